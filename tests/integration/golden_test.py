"""Every case of tests/golden through h3ctl and the real servers, against float64."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from h3test import GOLDEN, ctl, golden

# An evaluation or a whole run. Measured: 3e-7 and less.
FLOAT32_LIMIT = 2e-6
# Measured: 8e-3 and less; see the report at the end of a run.
BFLOAT16_LIMIT = 1e-2
# An adapter so strong that rounding is amplified: in float32 this case is the worst too.
BFLOAT16_LIMITS = {"full_autostrength": 3e-2}

GRID = ("--silu-grid", GOLDEN / "pruned/silu_temb_grid.safetensors")
# Ordinary AdaLN pairs on a pruned base.
NEEDS_GRID = {"pruned_turbo_exact_grid"}


def folder(path):
    return path.relative_to(GOLDEN).parts[0]


def cases_of(containers):
    return [pytest.param(path, case, id=f"{folder(path)}-{case['name']}")
            for model, _, path in containers for case in golden.CASES if case["model"] == model]


def run(case, server, output, lora=None):
    lora = golden.lora_options(case) if lora is None else lora
    common = ["--request", golden.request_path(case), *lora, "--output", output]
    if "evaluations" in case:
        start = ["--seed", case["seed"]] if "seed" in case else ["--noise-from-request"]
        ctl.ok("generate", *common, "--evaluations", case["evaluations"], *start, server=server.address)
    else:
        ctl.ok("evaluate", *common, server=server.address)
    return output


@pytest.mark.parametrize("path,case", cases_of(golden.CONTAINERS))
def test_float32_equals_the_golden_answer(path, case, serve, errors, tmp_path):
    server = serve(path, *(GRID if case["name"] in NEEDS_GRID else ()))
    error = golden.worst_error(run(case, server, tmp_path / "out.safetensors"), case)
    kind = "run" if "evaluations" in case else "evaluation"
    errors.add(f"float32, {folder(path)}, {kind}", error)
    assert error <= FLOAT32_LIMIT


@pytest.mark.parametrize("path,case", cases_of([golden.CONTAINERS[0], golden.CONTAINERS[3]]))
def test_bfloat16_is_as_close_as_its_digits_allow(path, case, serve, errors, tmp_path):
    server = serve(path, "--dtype", "bfloat16", *(GRID if case["name"] in NEEDS_GRID else ()))
    error = golden.worst_error(run(case, server, tmp_path / "out.safetensors"), case)
    kind = "run" if "evaluations" in case else "evaluation"
    errors.add(f"bfloat16, {folder(path)}, {kind}", error)
    assert error <= BFLOAT16_LIMITS.get(case["name"], BFLOAT16_LIMIT)


def test_strength_zero_is_the_base_bit_for_bit(golden_server, tmp_path):
    case = next(case for case in golden.CASES if case["name"] == "full_zero_strength")
    without = run(case, golden_server, tmp_path / "without.safetensors", lora=[])
    with_zero = run(case, golden_server, tmp_path / "zero.safetensors")
    assert with_zero.read_bytes() == without.read_bytes()


def test_spellings_of_the_same_factors_agree(golden_server, tmp_path):
    """Bit for bit where the fused factors are the same; up to rounding where q, k and v are stored apart."""

    def answer(spec):
        output = tmp_path / "out.safetensors"
        ctl.ok("evaluate", "--request", GOLDEN / "inputs/t2va.safetensors", "--lora", f"lora/{spec}", "--output", output, server=golden_server.address)
        return load_file(output)

    for first, others in (("turbo_bare=1", ("turbo_comfy=1", "turbo_peft=1", "turbo_diffsynth=1")),
                          ("turbo_comfy_alpha4=0.75", ("turbo_kohya_alpha4=0.75",))):
        expected = answer(first)
        for spec in others:
            other = answer(spec)
            assert all(np.array_equal(other[stream].view(np.int32), expected[stream].view(np.int32)) for stream in expected), spec
    expected, split = answer("turbo_bare=1"), answer("turbo_diffusers=1")
    assert all(golden.relative_l2(split[stream], expected[stream]) <= 1e-6 for stream in expected)


@pytest.mark.parametrize("path", [path for model, _, path in golden.CONTAINERS if model == "full"], ids=lambda path: path.name)
def test_weights_that_are_copied_give_the_same_bits_as_mapped_ones(path, serve, tmp_path):
    case = next(case for case in golden.CASES if case["name"] == "full_stack4_ref2va_mixed")
    mapped = run(case, serve(path), tmp_path / "mapped.safetensors")
    copied = run(case, serve(path, "--weights", "copy"), tmp_path / "copied.safetensors")
    assert mapped.read_bytes() == copied.read_bytes()


def test_all_containers_report_the_same_model(serve):
    def model(path):
        return json.loads(ctl.ok("--json", "model", server=serve(path).address))["models"][0]

    reported = {container: model(path) for kind, container, path in golden.CONTAINERS if kind == "full"}
    assert {name: it["container"] for name, it in reported.items()} == {name: name for name in reported}
    assert len({str(it["geometry"]) for it in reported.values()}) == 1
    assert len({it["parameters"] for it in reported.values()}) == 1


@pytest.mark.parametrize("adapter,reason", [
    *((f"turbo_{spelling}", "ADALN_NEEDS_GRID") for spelling in ("bare", "comfy", "comfy_alpha4", "kohya_alpha4", "peft", "diffusers", "diffsynth")),
    ("time_embedder", "BASE_MISMATCH"),
])
def test_pruned_base_refuses_what_it_cannot_apply_exactly(adapter, reason, serve, tmp_path):
    server = serve(GOLDEN / "pruned/model.safetensors")
    code, error = ctl.refusal("evaluate", "--request", GOLDEN / "inputs/t2va.safetensors", "--lora", f"lora/{adapter}=1",
                              "--output", tmp_path / "out.safetensors", server=server.address)
    assert (code, error["reason"]) == (3, reason)
    assert not (tmp_path / "out.safetensors").exists()


def test_a_grid_of_16_bits_is_taken_and_its_loss_stated(serve, tmp_path):
    """As it is published; the answer stays within what the rounding costs, and every place says so."""
    exact = load_file(GOLDEN / "pruned/silu_temb_grid.safetensors")
    save_file({"silu_t_emb_grid": next(iter(exact.values())).astype(np.float16)}, tmp_path / "grid.safetensors")
    case = next(case for case in golden.CASES if case["name"] == "pruned_turbo_exact_grid")
    server = serve(GOLDEN / "pruned/model.safetensors", "--silu-grid", tmp_path / "grid.safetensors")
    assert golden.worst_error(run(case, server, tmp_path / "out.safetensors"), case) <= 5e-4
    assert any("F16" in warning for warning in json.loads(ctl.ok("--json", "model", server=server.address))["models"][0]["warnings"])
    loaded = json.loads(ctl.ok("--json", "adapters", "load", f"lora/{case['stack'][0]['file']}", server=server.address))
    assert any("F16" in warning for warning in loaded["resolved"]["warnings"])
