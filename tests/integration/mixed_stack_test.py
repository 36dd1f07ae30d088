"""Stacks of ten kinds of adapters against a float64 forward of patched weights: h3test/oracle.py, itself held to tests/golden."""

import itertools

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from h3test import GOLDEN, ctl, golden, oracle
from h3test.servers import Server

MODELS = {"full": GOLDEN / "full/model.safetensors", "pruned": GOLDEN / "pruned/model.safetensors"}
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


def evaluate(model, stack, request):
    return oracle.Oracle(MODELS[model], stack, GRID if model == "pruned" else None).evaluate(request)


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
        self.weights = load_file(MODELS[model])
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


# In stack order: what a DoRA takes its norm from is patched by others before it, and patched again after it.
STRENGTHS = {"kohya": 0.7, "offsets": -0.45, "complete_own_table": 0.6, "dora_columns": 0.9, "split_qkv": -0.8, "lokr_whole": 1.2,
             "dora_rows": -0.35, "adaln_pairs": 1.1, "lokr_low_rank": -0.5, "complete_shared_table": 0.3}
TEN = [{"kind": kind, "strength": strength} for kind, strength in STRENGTHS.items()]
# Rows of different modalities then see different weights, and every DoRA has a norm for each.
FACTORS = ({"video": 1.0, "text": 0.5, "audio": 0.25}, {"video": 0.5, "audio": -1.0}, {"text": 0.0}, {})
STACKS = {"as_listed": TEN, "reversed": TEN[::-1],
          "by_modality": [entry | factors for entry, factors in zip(TEN, itertools.cycle(FACTORS))]}


@pytest.fixture(scope="module", params=MODELS)
def world(request, tmp_path_factory):
    """(model, folder with an adapter file of each kind, address of a server of both)."""
    model = request.param
    folder = tmp_path_factory.mktemp(model)
    maker = Maker(model)
    for kind in STRENGTHS:
        tensors = {name: np.asarray(value, np.float32, order="C") for name, value in getattr(maker, kind)().items()}
        save_file(tensors, folder / f"{kind}.safetensors")
    with Server(MODELS[model], folder, *(("--silu-grid", GRID) if model == "pruned" else ())) as server:
        yield model, folder, server.address


def lora_option(entry):
    factors = [f"{modality}={entry[modality]}" for modality in ("video", "text", "audio") if modality in entry]
    return ",".join([f"{entry['kind']}={entry['strength']}", *factors])


def error_of(world, stack, name, output):
    """(relative L2 of the server's worse stream against the oracle, how far the stack moves the less moved stream)."""
    model, folder, address = world
    request = GOLDEN / f"inputs/{name}.safetensors"
    options = itertools.chain.from_iterable(("--lora", lora_option(entry)) for entry in stack)
    ctl.ok("evaluate", "--request", request, *options, "--output", output, server=address)
    files = [entry | {"file": folder / f"{entry['kind']}.safetensors"} for entry in stack]
    expected, base = evaluate(model, files, request), evaluate(model, [], request)
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
