"""Stacks of adapters of all kinds, at run time and merged, against a float64 forward of patched weights: h3test/oracle.py, itself
held to tests/golden."""

import contextlib
import functools
import itertools

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from h3test import GOLDEN, ctl, golden, oracle
from h3test.servers import Server

MODELS = {"full": GOLDEN / "full/model.safetensors", "pruned": GOLDEN / "pruned/model.safetensors"}
# The full model's weights again, its qkv rows interleaved per head.
SHARDED = "full-sharded"
GRID = GOLDEN / "pruned/silu_temb_grid.safetensors"
INPUTS = ("t2va", "t2va_wide", "fl2va_first_last", "ref2va_mixed")

# Measured: 7e-9 and less; half of it is the golden answers' float32 rotary table.
ORACLE_LIMIT = 2e-8
# Measured: 3e-7 and less, for one adapter and for ten; another order of the ten moves the answer by 4e-3.
SERVER_LIMIT = 7e-7

BLOCKS, REFINER_BLOCKS = range(4), range(2)
BLOCK_MODULES = ("attn.qkv_proj", "attn.out_proj", "mlp.fc1", "mlp.fc2")
BACKBONE = [f"blocks.{n}.{module}" for n in BLOCKS for module in BLOCK_MODULES]
REFINER = [f"token_refiner.blocks.{n}.{module}" for n in REFINER_BLOCKS for module in BLOCK_MODULES]
ADALN = [*(f"blocks.{n}.adaln_proj.linear" for n in BLOCKS), "final_layer.adaln_proj.linear"]
EDGES = ["video_patch_proj", "audio_patch_proj", "condition_proj", "final_layer.video_out", "final_layer.audio_out"]


def weights_of(model):
    return MODELS["full" if model == SHARDED else model]


def evaluate(model, stack, request):
    return oracle.Oracle(weights_of(model), stack, GRID if model == "pruned" else None).evaluate(request)


@functools.cache
def evaluate_base(model, request):
    return evaluate(model, [], request)


def is_for_the_oracle(case):
    """It evaluates once, knows no auto-strength, and does not read DiffSynth's interleaved rows."""
    return ("evaluations" not in case and case["name"] != "full_turbo_diffsynth"
            and not any("auto_strength" in entry for entry in case["stack"]))


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in golden.CASES if is_for_the_oracle(case)])
def test_oracle_equals_the_golden_answers(case, errors):
    stack = [{**entry, "file": GOLDEN / f"lora/{entry['file']}.safetensors"} for entry in case["stack"]]
    answer = evaluate(case["model"], stack, golden.request_path(case))
    expected = golden.expected(case)
    error = max(golden.relative_l2(answer[stream], expected[stream]) for stream in ("video", "audio"))
    errors.add("the oracle itself", error)
    assert error <= ORACLE_LIMIT


class Maker:
    """Makes adapter files for one model. A delta's norm is `share` of its weight's: big enough to be seen, small enough not to
    drown the other nine."""

    def __init__(self, model):
        self.weights = load_file(weights_of(model))
        # A complete adapter is in the coordinates of a table, whatever the base.
        self.pruned = load_file(MODELS["pruned"])
        self.full = load_file(MODELS["full"])
        self.rng = np.random.default_rng(10)

    def normal(self, *shape):
        return self.rng.standard_normal(shape)

    def pair(self, weight, rank, share, scale=1.0):
        """(A, B) with |scale B A| = share |weight|."""
        a, b = self.normal(rank, weight.shape[1]), self.normal(weight.shape[0], rank)
        return a, b * (share * np.linalg.norm(weight) / (scale * np.linalg.norm(b @ a)))

    def reference_pairs(self, modules, rank, share, prefix=""):
        tensors = {}
        for module in modules:
            a, b = self.pair(self.weights[f"{module}.weight"], rank, share)
            tensors |= {f"{prefix}{module}.lora_A.weight": a, f"{prefix}{module}.lora_B.weight": b}
        return tensors

    def kohya(self):
        tensors = {}
        for module in BACKBONE + REFINER + EDGES:
            a, b = self.pair(self.weights[f"{module}.weight"], 4, 0.06, scale=1.5 / 4)
            name = f"lora_unet_{module.replace('.', '_')}"
            tensors |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": np.array(1.5)}
        return tensors

    def split_qkv(self):
        """In diffusers' spelling: q, k and v of different ranks, k absent in every second block, fc1 rows swapped."""
        tensors = {}
        for n in BLOCKS:
            block, name = f"blocks.{n}", f"transformer.transformer_blocks.{n}"
            q, k, v = np.split(self.weights[f"{block}.attn.qkv_proj.weight"], 3)
            parts = [("attn.to_q", q, 2), ("attn.to_v", v, 5), ("ff.net.0.proj", self.weights[f"{block}.mlp.fc1.weight"], 3)]
            if n % 2 == 0:
                parts.append(("attn.to_k", k, 3))
            for leaf, weight, rank in parts:
                a, b = self.pair(weight, rank, 0.08)
                tensors |= {f"{name}.{leaf}.lora_A.weight": a, f"{name}.{leaf}.lora_B.weight": b}
        return tensors

    def complete(self, change):
        """Pairs, the table as `change` (invertible) makes it, and projections that differ from the base's by a few per cent."""
        tensors = {"adaln_t_table": self.pruned["adaln_t_table"] @ change, **self.reference_pairs(BACKBONE, 3, 0.03)}
        for module in ADALN:
            for part, back in (("weight", np.linalg.inv(change)), ("bias", 1)):
                value = self.pruned[f"{module}.{part}"]
                other = value * (1 + 0.05 * self.normal(*value.shape))
                tensors[f"{module}.{part}"] = other @ back if part == "weight" else other
        return tensors

    def complete_own_table(self):
        width = self.pruned["adaln_t_table"].shape[1]
        return self.complete(np.eye(width) + 0.2 * self.normal(width, width))

    def complete_shared_table(self):
        return self.complete(np.eye(self.pruned["adaln_t_table"].shape[1]))

    def adaln_pairs(self):
        """Of the full model's width, so that a pruned base takes them through the grid."""
        tensors = {}
        for module in ADALN:
            a, b = self.pair(self.full[f"{module}.weight"], 4, 0.08)
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        return tensors

    def dora(self, modules, axis):
        """`axis`: that over which the norms are taken, 1 for rows."""
        tensors = self.reference_pairs(modules, 3, 0.08, "diffusion_model.")
        for module in modules:
            norms = np.linalg.norm(self.weights[f"{module}.weight"], axis=axis, keepdims=True)
            tensors |= {f"diffusion_model.{module}.dora_scale": norms * (1 + 0.05 * self.normal(*norms.shape)),
                        f"diffusion_model.{module}.alpha": np.array(2.0)}
        return tensors

    def dora_rows(self):
        return self.dora(BACKBONE + REFINER, axis=1)

    def dora_columns(self):
        return self.dora(BACKBONE, axis=0)

    def lokr_whole(self):
        """With an alpha, which means nothing where no factor is of low rank."""
        tensors = {}
        for module in BACKBONE:
            weight = self.weights[f"{module}.weight"]
            w1, w2 = self.normal(4, 4), self.normal(weight.shape[0] // 4, weight.shape[1] // 4)
            w2 *= 0.05 * np.linalg.norm(weight) / np.linalg.norm(np.kron(w1, w2))
            tensors |= {f"{module}.lokr_w1": w1, f"{module}.lokr_w2": w2, f"{module}.alpha": np.array(7.0)}
        return tensors

    def lokr_low_rank(self):
        """One factor or both of rank 3, in turn."""
        tensors = {}
        for module, low in zip(BACKBONE + REFINER, itertools.cycle([("w2",), ("w1",), ("w1", "w2")])):
            weight = self.weights[f"{module}.weight"]
            factors, products = {}, []
            for factor, shape in (("w1", (8, 4)), ("w2", (weight.shape[0] // 8, weight.shape[1] // 4))):
                if factor in low:
                    left, right = self.normal(shape[0], 3), self.normal(3, shape[1])
                    factors[factor] = {f"lokr_{factor}_a": left, f"lokr_{factor}_b": right}
                    products.append(left @ right)
                else:
                    products.append(self.normal(*shape))
                    factors[factor] = {f"lokr_{factor}": products[-1]}
            # Any tensor of w2 may take the norm: it is a factor of the product.
            next(iter(factors["w2"].values()))[:] *= 0.05 * np.linalg.norm(weight) / (0.5 * np.linalg.norm(np.kron(*products)))
            tensors |= {f"{module}.{name}": part for named in factors.values() for name, part in named.items()}
            tensors[f"{module}.alpha"] = np.array(1.5)
        return tensors

    def offsets(self):
        """diff_b beside pairs, on projections with a bias and without."""
        modules = BACKBONE + EDGES
        tensors = self.reference_pairs(modules, 2, 0.05, "diffusion_model.")
        for module in modules:
            weight = self.weights[f"{module}.weight"]
            # A few per cent of W x, where x is normed.
            size = 0.05 * np.linalg.norm(weight) / np.sqrt(len(weight))
            tensors[f"diffusion_model.{module}.diff_b"] = size * self.normal(len(weight))
        return tensors

    def differences(self):
        """Whole weights' differences: of whole modules, of rows of one, and of swapped rows."""
        fused = {n: self.weights[f"blocks.{n}.attn.qkv_proj.weight"] for n in BLOCKS}
        weights = {"blocks.0.attn.out_proj": self.weights["blocks.0.attn.out_proj.weight"], "blocks.1.attn.qkv_proj": fused[1],
                   "transformer_blocks.2.attn.to_k": np.split(fused[2], 3)[1],
                   "transformer_blocks.3.ff.net.0.proj": self.weights["blocks.3.mlp.fc1.weight"]}
        changes = {name: self.normal(*weight.shape) for name, weight in weights.items()}
        return {f"{name}.diff": 0.15 * np.linalg.norm(weights[name]) / np.linalg.norm(change) * change
                for name, change in changes.items()}

    def time_embedder(self):
        return self.reference_pairs(["time_embedder.proj_in", "time_embedder.proj_out"], 3, 0.05)

    def adaln_dora_columns(self):
        return self.dora(ADALN, axis=0)

    def split_dora(self, letters, axis):
        """In diffusers' spelling: q, k and v have a magnitude each, whose norms are of their own rows only."""
        tensors = {}
        for n in BLOCKS:
            parts = dict(zip("qkv", np.split(self.weights[f"blocks.{n}.attn.qkv_proj.weight"], 3)))
            for rank, letter in enumerate(letters, 2):
                a, b = self.pair(parts[letter], rank, 0.08)
                norms = np.linalg.norm(parts[letter], axis=axis, keepdims=True)
                name = f"transformer_blocks.{n}.attn.to_{letter}"
                tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b, f"{name}.alpha": np.array(1.5),
                            f"{name}.lora_magnitude_vector": norms * (1 + 0.05 * self.normal(*norms.shape))}
        return tensors

    def split_dora_columns(self):
        return self.split_dora("qkv", axis=0)

    def q_dora_columns(self):
        return self.split_dora("q", axis=0)

    def q_dora_rows(self):
        return self.split_dora("q", axis=1)

    def own_table_pairs(self, rows=17, width=9):
        """AdaLN pairs in the coordinates of a table that is unlike the base's in every respect. They give half of what the
        base's projection gives without its bias: the answers follow that weakly."""
        table, base_table = self.normal(rows, width), self.pruned["adaln_t_table"]
        tensors = {"adaln_t_table": table}
        for module in ADALN:
            weight = self.pruned[f"{module}.weight"]
            a, b = self.normal(3, width), self.normal(len(weight), 3)
            # Sized by what comes out: the coordinates themselves mean nothing.
            size = np.linalg.norm(weight @ base_table.T) / np.sqrt(len(base_table))
            b *= 0.5 * size / (np.linalg.norm(b @ a @ table.T) / np.sqrt(rows)) / (2 / 3)
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b, f"{module}.alpha": np.array(2.0)}
        return tensors

    def own_table_of_the_base_width(self):
        """What must not be taken for the base's own coordinates."""
        return self.own_table_pairs(33, self.pruned["adaln_t_table"].shape[1])

    def adaln_lokr(self):
        """Of the full model's width; the blocks' second factor whole, the final layer's of low rank."""
        tensors = {}
        for module in ADALN:
            weight = self.full[f"{module}.weight"]
            w1, scale = self.normal(4, 4), 1.0
            shape = (weight.shape[0] // 4, weight.shape[1] // 4)
            if module.startswith("final_layer"):
                scale, left, right = 1.0 / 2, self.normal(shape[0], 2), self.normal(2, shape[1])
                factors, w2 = {"lokr_w2_a": left, "lokr_w2_b": right, "alpha": np.array(1.0)}, left @ right
            else:
                w2 = self.normal(*shape)
                factors = {"lokr_w2": w2}
            w1 *= 0.4 * np.linalg.norm(weight) / (scale * np.linalg.norm(np.kron(w1, w2)))
            tensors |= {f"{module}.{name}": part for name, part in (factors | {"lokr_w1": w1}).items()}
        return tensors


# In stack order: what a DoRA takes its norm from is patched by others before it, and patched again after it.
STRENGTHS = {"kohya": 0.7, "offsets": -0.45, "complete_own_table": 0.6, "dora_columns": 0.9, "split_qkv": -0.8, "lokr_whole": 1.2,
             "dora_rows": -0.35, "adaln_pairs": 1.1, "lokr_low_rank": -0.5, "complete_shared_table": 0.3}
TEN = [{"kind": kind, "strength": strength} for kind, strength in STRENGTHS.items()]
# Rows of different modalities then see different weights, and every DoRA has a norm for each.
FACTORS = ({"video": 1.0, "text": 0.5, "audio": 0.25}, {"video": 0.5, "audio": -1.0}, {"text": 0.0}, {})
STACKS = {"as_listed": TEN, "reversed": TEN[::-1],
          "by_modality": [entry | factors for entry, factors in zip(TEN, itertools.cycle(FACTORS))]}


# Kinds that are not among the ten.
OTHERS = {"differences": 0.8, "split_dora_columns": 0.8, "q_dora_columns": -0.6, "q_dora_rows": 0.7, "own_table_pairs": 0.9,
          "own_table_of_the_base_width": -0.7, "adaln_lokr": 0.8}
ONLY_FULL = {"time_embedder": 0.9, "adaln_dora_columns": 0.7}
ALL_STRENGTHS = STRENGTHS | OTHERS | ONLY_FULL


def some(kind, **more):
    """An entry of a stack."""
    return {"kind": kind, "strength": ALL_STRENGTHS[kind]} | more


def merged(kind, **more):
    return some(kind, apply="materialized", **more)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    """worlds(model) -> (model, folder with an adapter file of each kind, address of a server of both); one a model, however the
    tests that want it are ordered."""
    found = {}

    def get(model):
        if model not in found:
            folder = tmp_path_factory.mktemp(model)
            maker = Maker(model)
            for kind in STRENGTHS | OTHERS | ({} if model == "pruned" else ONLY_FULL):
                tensors = {name: np.asarray(value, np.float32, order="C") for name, value in getattr(maker, kind)().items()}
                save_file(tensors, folder / f"{kind}.safetensors")
            path = GOLDEN / SHARDED if model == SHARDED else MODELS[model]
            options = ("--silu-grid", GRID) if model == "pruned" else ()
            found[model] = (model, folder, servers.enter_context(Server(path, folder, *options)).address)
        return found[model]

    with contextlib.ExitStack() as servers:
        yield get


@pytest.fixture(params=MODELS)
def world(request, worlds):
    return worlds(request.param)


def lora_option(entry):
    factors = [f"{modality}={entry[modality]}" for modality in ("video", "text", "audio") if modality in entry]
    apply = [f"apply={entry['apply']}"] if "apply" in entry else []
    return ",".join([f"{entry['kind']}={entry['strength']}", *factors, *apply])


def lora_options(stack):
    return list(itertools.chain.from_iterable(("--lora", lora_option(entry)) for entry in stack))


def error_of(world, stack, name, output):
    """(relative L2 of the server's worse stream against the oracle, how far the stack moves the less moved stream)."""
    model, folder, address = world
    request = GOLDEN / f"inputs/{name}.safetensors"
    ctl.ok("evaluate", "--request", request, *lora_options(stack), "--output", output, server=address)
    files = [entry | {"file": folder / f"{entry['kind']}.safetensors"} for entry in stack]
    expected, base = evaluate(model, files, request), evaluate_base(model, request)
    answer = load_file(output)
    return (max(golden.relative_l2(answer[stream], expected[stream]) for stream in ("video", "audio")),
            min(golden.relative_l2(base[stream], expected[stream]) for stream in ("video", "audio")))


@pytest.mark.parametrize("entry", TEN, ids=lambda entry: entry["kind"])
def test_each_kind_alone_equals_the_float64_oracle(entry, world, errors, tmp_path):
    error, moved = error_of(world, [entry], "ref2va_mixed", tmp_path / "out.safetensors")
    errors.add(f"{world[0]}, one adapter of the ten, against the oracle", error)
    assert moved > 5e-3
    assert error <= SERVER_LIMIT


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("stack", STACKS)
def test_stack_of_ten_kinds_equals_the_float64_oracle(stack, name, world, errors, tmp_path):
    error, moved = error_of(world, STACKS[stack], name, tmp_path / "out.safetensors")
    errors.add(f"{world[0]}, ten kinds {stack}, against the oracle", error)
    assert moved > 5e-2
    assert error <= SERVER_LIMIT


def check(topic, world, stack, errors, output, moves=1e-3):
    """Holds the server to the oracle, for the input with rows of every kind."""
    error, moved = error_of(world, stack, "ref2va_mixed", output)
    errors.add(f"{world[0]}, {topic}, against the oracle", error)
    assert moved > moves
    assert error <= SERVER_LIMIT


def refusal(world, stack, output):
    """(exit code, reason); nothing is written."""
    request = GOLDEN / "inputs/ref2va_mixed.safetensors"
    code, error = ctl.refusal("evaluate", "--request", request, *lora_options(stack), "--output", output, server=world[2])
    assert not output.exists()
    return code, error["reason"]


def on(models, stacks):
    """Parametrises `world` and `stack`: each of `stacks` (by name) on each of `models`."""
    params = [pytest.param(model, stack, id=f"{model}-{name}") for model in models for name, stack in stacks.items()]
    return pytest.mark.parametrize("world, stack", params, indirect=["world"])


def materialized(stack):
    return [entry | {"apply": "materialized"} for entry in stack]


@on(MODELS, {kind: [merged(kind)] for kind in STRENGTHS})
def test_each_kind_materialised_equals_the_float64_oracle(stack, world, errors, tmp_path):
    check("one of the ten materialised", world, stack, errors, tmp_path / "out.safetensors", moves=5e-3)


@on([*MODELS, SHARDED], {"as_listed": materialized(TEN), "reversed": materialized(TEN[::-1])})
def test_ten_kinds_materialised_equal_the_float64_oracle(stack, world, errors, tmp_path):
    check("ten kinds materialised", world, stack, errors, tmp_path / "out.safetensors", moves=5e-2)


@on([SHARDED], STACKS)
def test_ten_kinds_on_interleaved_rows_equal_the_float64_oracle(stack, world, errors, tmp_path):
    check("ten kinds", world, stack, errors, tmp_path / "out.safetensors", moves=5e-2)


MIXED = {
    # What comes before a materialised DoRA goes into its copy, what comes after it does not.
    "plain_around_dora_rows": [some("kohya"), some("split_qkv"), merged("dora_rows"), some("lokr_whole"), some("offsets")],
    "plain_around_dora_columns": [some("lokr_low_rank"), some("offsets"), merged("dora_columns"), some("split_qkv"),
                                  some("kohya")],
    "factors_after_dora": [some("kohya"), merged("dora_rows"), some("split_qkv", **FACTORS[0]), some("lokr_whole", **FACTORS[1])],
    # A run-time DoRA then takes its norms from the copy, for each modality its own.
    "dora_columns_after_dora": [some("kohya"), merged("dora_rows"), some("lokr_whole", **FACTORS[0]), some("dora_columns")],
    "dora_rows_after_plain": [merged("kohya"), some("split_qkv", **FACTORS[0]), some("dora_rows", **FACTORS[1]), some("offsets")],
    "plain_then_plain": [merged("kohya"), some("split_qkv")],
    "plain_after_plain": [some("split_qkv"), merged("kohya")],
    "same_file_both_ways": [merged("lokr_whole"), some("lokr_whole", strength=-0.5)],
    "equal_factors": [merged("kohya", video=0.5, text=0.5, audio=0.5), merged("dora_rows", video=2, text=2, audio=2)],
    "strength_zero": [some("dora_rows", strength=0), merged("kohya"), merged("dora_columns", strength=0), some("split_qkv")],
    "half_of_the_ten": [entry | ({"apply": "materialized"} if number in (1, 3, 5, 6, 9) else {})
                        for number, entry in enumerate(TEN)],
}


@on(MODELS, MIXED)
def test_materialised_beside_run_time_equals_the_float64_oracle(stack, world, errors, tmp_path):
    check("materialised beside run time", world, stack, errors, tmp_path / "out.safetensors", moves=5e-3)


@on(MODELS, {
    "factor_by_modality": [merged("kohya", video=0.5)],
    "run_time_dora_before_merged_plain": [some("dora_rows"), merged("kohya")],
    "run_time_dora_before_merged_dora": [some("dora_columns"), some("kohya"), merged("dora_rows")],
    # It would have to go into the copy.
    "factor_before_merged_dora": [some("kohya", video=0.5), merged("dora_rows")],
})
def test_what_no_merged_copy_can_do_is_refused(stack, world, tmp_path):
    assert refusal(world, stack, tmp_path / "out.safetensors") == (3, "BAD_STRENGTH")


@pytest.mark.parametrize("world", [*MODELS, SHARDED], indirect=True)
def test_whole_difference_is_taken_only_into_a_merged_copy(world, errors, tmp_path):
    for _ in range(2):  # Once more when it is resident.
        assert refusal(world, [some("differences")], tmp_path / "refused.safetensors") == (3, "UNSUPPORTED_ADAPTER_TYPE")
        check("whole differences", world, [merged("differences")], errors, tmp_path / "out.safetensors")


@on([*MODELS, SHARDED], {
    "between_plain": [some("kohya"), merged("differences"), some("split_qkv", **FACTORS[0])],
    "before_run_time_dora": [merged("differences"), some("dora_columns"), some("q_dora_rows")],
    "around_merged_dora": [merged("differences"), merged("dora_rows"), merged("differences", strength=-0.5)],
})
def test_whole_difference_in_a_stack_equals_the_float64_oracle(stack, world, errors, tmp_path):
    check("whole differences in a stack", world, stack, errors, tmp_path / "out.safetensors", moves=5e-3)


# m_base in a curve's term is the untouched base's, whatever else changes what the base's projections are given.
CHANGED_FEATURES = {
    "dora_columns_then_curve": [some("adaln_dora_columns"), some("complete_shared_table")],
    "curve_then_dora_columns": [some("complete_shared_table"), some("adaln_dora_columns")],
    "time_embedder_then_curve": [some("time_embedder"), some("complete_shared_table")],
    "curve_then_time_embedder": [some("complete_shared_table"), some("time_embedder")],
    "all_by_modality": [some("complete_own_table", **FACTORS[1]), some("time_embedder", **FACTORS[0]), some("adaln_pairs"),
                        some("adaln_dora_columns", **FACTORS[0]), some("complete_shared_table", **FACTORS[2])],
    "materialised": [merged("time_embedder"), merged("adaln_pairs"), merged("adaln_dora_columns"), some("complete_shared_table")],
}


@on(["full"], CHANGED_FEATURES)
def test_curve_is_added_to_the_untouched_base(stack, world, errors, tmp_path):
    check("curves beside changed AdaLN inputs", world, stack, errors, tmp_path / "out.safetensors")


SPLIT_DORA = {
    "alone": [some("split_dora_columns")],
    "between_fused_pairs": [some("kohya"), some("split_dora_columns"), some("offsets")],
    "by_modality": [some("kohya", **FACTORS[0]), some("split_dora_columns", **FACTORS[1]), some("offsets", **FACTORS[2])],
    "after_lokr": [some("lokr_whole"), some("split_dora_columns"), some("lokr_low_rank")],
    "materialised": [merged("kohya"), merged("split_dora_columns"), some("offsets")],
    "q_alone": [some("q_dora_columns")],
    "q_between_fused_pairs": [some("kohya"), some("q_dora_columns"), some("offsets")],
    "q_materialised": [some("kohya"), merged("q_dora_columns"), some("offsets")],
}


@on(["full"], SPLIT_DORA)
def test_dora_by_columns_of_split_qkv_equals_the_float64_oracle(stack, world, errors, tmp_path):
    check("DoRA by columns of split q, k, v", world, stack, errors, tmp_path / "out.safetensors")


@on([SHARDED], {kind: [some(kind)] for kind in ("split_dora_columns", "q_dora_columns")})
def test_dora_by_columns_of_split_qkv_is_refused_on_interleaved_rows(stack, world, tmp_path):
    assert refusal(world, stack, tmp_path / "out.safetensors") == (3, "UNSUPPORTED_DORA")


OWN_TABLE = {
    "alone": [some("own_table_pairs")],
    "of_the_base_width": [some("own_table_of_the_base_width")],
    "by_modality": [some("own_table_pairs", **FACTORS[0])],
    # It stays a run-time term.
    "materialised": [merged("own_table_pairs")],
    "with_every_other_modulation": [some("adaln_pairs"), some("own_table_pairs", **FACTORS[1]), some("complete_own_table"),
                                    some("own_table_of_the_base_width"), some("complete_shared_table"), some("adaln_lokr"),
                                    some("own_table_pairs", strength=0.3)],
}


@on(MODELS, OWN_TABLE)
def test_adaln_pairs_on_their_own_table_equal_the_float64_oracle(stack, world, errors, tmp_path):
    check("AdaLN pairs on their own table", world, stack, errors, tmp_path / "out.safetensors")


@pytest.mark.parametrize("world, kind, reason", [
    ("full", "own_table_pairs", "BASE_MISMATCH"),
    ("full", "own_table_of_the_base_width", "BASE_MISMATCH"),
    # That they fit the base's table proves nothing.
    ("pruned", "own_table_of_the_base_width", "BASE_MISMATCH"),
    # These fit neither its table nor its grid.
    ("pruned", "own_table_pairs", "SHAPE_MISMATCH"),
], indirect=["world"])
def test_adaln_pairs_in_unknown_coordinates_are_refused(kind, reason, world, tmp_path):
    folder = world[1]
    tensors = load_file(folder / f"{kind}.safetensors")
    del tensors["adaln_t_table"]
    save_file(tensors, folder / f"{kind}_without_it.safetensors")
    stack = [some(kind) | {"kind": f"{kind}_without_it"}]
    assert refusal(world, stack, tmp_path / "out.safetensors") == (3, reason)


@on(MODELS, {
    "alone": [some("adaln_lokr")],
    "by_modality": [some("adaln_pairs"), some("adaln_lokr", **FACTORS[0]), some("complete_shared_table")],
    "materialised": [merged("adaln_lokr")],
})
def test_lokr_on_adaln_equals_the_float64_oracle(stack, world, errors, tmp_path):
    check("LoKr on AdaLN", world, stack, errors, tmp_path / "out.safetensors")


# What the norms of the last are taken of: kinds, axes and rows that differ from its own.
BEFORE_DORA = [("lokr_whole", "dora_rows"), ("lokr_low_rank", "dora_columns"), ("dora_rows", "dora_columns"),
               ("dora_columns", "dora_rows"), ("dora_rows", "dora_rows"), ("dora_columns", "dora_columns"),
               ("q_dora_rows", "dora_rows"), ("dora_rows", "q_dora_rows"), ("q_dora_rows", "dora_columns"),
               ("split_dora_columns", "dora_columns"), ("dora_columns", "split_dora_columns"), ("q_dora_columns", "q_dora_rows"),
               ("split_qkv", "q_dora_columns"), ("offsets", "dora_rows")]
NORMS = {f"{first}-{last}{suffix}": [some(first, **factors), some(last, strength=0.9)]
         for first, last in BEFORE_DORA
         for suffix, factors in (("", {}), ("-by_modality", {"video": 0.5, "text": -1.0, "audio": 0.25}))}


@on(["full"], NORMS)
def test_norms_of_a_dora_are_of_what_comes_before_it(stack, world, errors, tmp_path):
    check("two kinds with a DoRA last", world, stack, errors, tmp_path / "out.safetensors")
