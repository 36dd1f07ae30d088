"""What is wrong is refused as a whole, with a code, a reason and the place; the next request is not affected."""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from h3test import GOLDEN, ctl, golden

REQUEST = GOLDEN / "inputs/t2va.safetensors"
# Refused by a server that knows less ("until" in reasons.json); this one applies them.
APPLIED = {"dora_scale", "peft_magnitude", "bias_diff"}


@pytest.fixture
def base_answer(golden_server, tmp_path):
    """The bytes of the adapter-free answer: asked for again after each refusal."""
    def ask():
        output = tmp_path / "base.safetensors"
        ctl.ok("evaluate", "--request", REQUEST, "--output", output, server=golden_server.address)
        return output.read_bytes()

    return ask


@pytest.fixture
def refused(golden_server, tmp_path, base_answer):
    """refused(command, *options) -> error object; checks that nothing was half-done."""
    before = base_answer()

    def memory():
        device = json.loads(ctl.ok("--json", "memory", server=golden_server.address))["devices"][0]
        return device["owners"], sorted(adapter["digest"] for adapter in device["adapters"] if adapter["tier"] == "device")

    def run(command, *options):
        output = tmp_path / "refused.safetensors"
        held = memory()
        exit_code, error = ctl.refusal(command, *options, "--output", output, server=golden_server.address)
        assert exit_code == 3, error
        assert not output.exists()
        assert str(GOLDEN) not in json.dumps(error), "a path of the server reached a client"
        assert memory() == held
        assert base_answer() == before
        return error

    return run


@pytest.mark.parametrize("name", [name for name in golden.REASONS if name not in APPLIED])
def test_bad_adapter_is_refused_with_its_reason(name, refused):
    error = refused("evaluate", "--request", REQUEST, "--lora", f"reject/{name}=1")
    assert error["reason"] == golden.REASONS[name]["reason"]
    assert error["code"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("name", [name for name in golden.REASONS if name not in APPLIED])
def test_bad_adapter_refuses_the_whole_stack(name, refused):
    refused("evaluate", "--request", REQUEST, "--lora", "lora/turbo_bare=1", "--lora", f"reject/{name}=1", "--lora", "lora/style_bf16=1")


@pytest.mark.parametrize("name", sorted(APPLIED))
def test_adapter_that_lesser_servers_refuse_acts_as_a_merged_copy_would(name, golden_server, tmp_path, base_answer):
    answers = {}
    for apply in ("bypass", "materialized"):
        output = tmp_path / f"{apply}.safetensors"
        ctl.ok("evaluate", "--request", REQUEST, "--lora", f"reject/{name}=1,apply={apply}", "--output", output, server=golden_server.address)
        assert output.read_bytes() != base_answer()
        answers[apply] = load_file(output)
    for stream in ("video", "audio"):
        assert golden.relative_l2(answers["bypass"][stream], answers["materialized"][stream]) <= 1e-6


@pytest.mark.parametrize("strength", ["nan", "inf", "1e30", "-100.5"])
def test_strength_out_of_range_is_refused(strength, refused):
    error = refused("evaluate", "--request", REQUEST, "--lora", f"lora/turbo_bare={strength}")
    assert error["reason"] == "BAD_STRENGTH"


@pytest.mark.parametrize("spec", ["lora/turbo_bare=1,video=nan", "lora/turbo_bare=1,per-evaluation=1:1e9", "lora/turbo_bare=1,auto-strength=2:1"])
def test_factor_out_of_range_is_refused(spec, refused):
    error = refused("generate", "--request", REQUEST, "--lora", spec, "--evaluations", 2, "--seed", 1)
    assert error["reason"] == "BAD_STRENGTH"


@pytest.mark.parametrize("name", ["absent", "lora/absent", "../golden/lora/turbo_bare", "/etc/passwd", "lora/../lora/turbo_bare", "lora", "sha256:" + "0" * 64,
                                  "x" * 300, "lora\\turbo_bare", "%2e%2e/turbo_bare"])
def test_unknown_or_escaping_adapter_name_is_refused(name, refused):
    error = refused("evaluate", "--request", REQUEST, "--lora", f"{name}=1")
    assert error["reason"] == "UNKNOWN_ADAPTER"
    assert error["code"] in ("NOT_FOUND", "INVALID_ARGUMENT")


def changed_request(path, tensors=None, layout=None, drop=()):
    """A copy of REQUEST with other tensors, other layout values, or without some tensors."""
    values = {name: value for name, value in load_file(REQUEST).items() if name not in drop}
    values.update(tensors or {})
    with safe_open(REQUEST, "np") as file:
        old = json.loads(file.metadata()["layout"])
    save_file(values, path, metadata={"layout": json.dumps({**old, **(layout or {})})})
    return path


def filled(name, value):
    tensor = load_file(REQUEST)[name].copy()
    tensor.flat[tensor.size // 2] = value
    return {name: tensor}


NOT_FINITE = {
    "nan_text": dict(tensors=filled("text", np.nan)),
    "infinite_video": dict(tensors=filled("target_video", np.inf)),
    "infinite_audio": dict(tensors=filled("target_audio_rows", -np.inf)),
}

BAD_TENSORS = {
    "narrow_text": dict(tensors={"text": np.zeros((7, 39), np.float32)}),
    "flat_text": dict(tensors={"text": np.zeros(280, np.float32)}),
    "few_video_frames": dict(tensors={"target_video": np.zeros((1, 4, 2, 4, 6), np.float32)}),
    "many_audio_rows": dict(tensors={"target_audio_rows": np.zeros((12, 6), np.float32)}),
    "integer_text": dict(tensors={"text": np.zeros((7, 40), np.int64)}),
    "float_tags": dict(tensors={"text_token_tags": np.ones(7, np.float32)}),
    "unknown_tag": dict(tensors={"text_token_tags": np.full(7, 5, np.int64)}),
    "no_text": dict(drop=["text"]),
    "no_tags": dict(drop=["text_token_tags"]),
    "no_video": dict(drop=["target_video"]),
    "no_audio": dict(drop=["target_audio_rows"]),
    "condition_that_no_layout_names": dict(tensors={"condition_video.0": np.zeros((1, 4, 1, 4, 6), np.float32)}),
}


@pytest.mark.parametrize("name", [*NOT_FINITE, *BAD_TENSORS])
@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_bad_tensor_is_refused(command, name, refused, tmp_path):
    request = changed_request(tmp_path / "request.safetensors", **{**NOT_FINITE, **BAD_TENSORS}[name])
    options = ["--evaluations", 2, "--noise-from-request"] if command == "generate" else []
    error = refused(command, "--request", request, *options)
    assert error["reason"] == ("NOT_FINITE" if name in NOT_FINITE else "BAD_TENSOR"), error


BAD_LAYOUTS = {
    "no_frames": dict(latent_frames=0),
    "negative_width": dict(latent_width=-6),
    "odd_height": dict(latent_height=5),
    "no_text": dict(text_tokens=0),
    "overflowing": dict(latent_frames=2**31 - 1, latent_height=2**31 - 2, latent_width=2**31 - 2),
    "keyframe_twice": dict(keyframes=["first", "first"]),
    "keyframes_and_references": dict(keyframes=["first"], refs=[{"kind": "image", "latent_frames": 1, "latent_height": 4, "latent_width": 4}]),
    "empty_reference": dict(refs=[{"kind": "video", "latent_frames": 0, "latent_height": 4, "latent_width": 4}]),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_bad_layout_is_refused(name, refused, tmp_path):
    request = changed_request(tmp_path / "request.safetensors", layout=BAD_LAYOUTS[name])
    error = refused("evaluate", "--request", request)
    assert error["reason"] == "BAD_LAYOUT", error


def test_layout_that_contradicts_the_tensors_is_refused(refused, tmp_path):
    request = changed_request(tmp_path / "request.safetensors", layout=dict(text_tokens=8))
    error = refused("evaluate", "--request", request)
    assert error["reason"] in ("BAD_LAYOUT", "BAD_TENSOR")
    assert "text" in error["message"]


@pytest.mark.parametrize("sigmas", ["1,0.5", "0.5,0.9,0", "1,0.5,0.5,0", "1.5,0", "nan,0", "0", "1,-0.1,0"])
def test_sigmas_that_do_not_fall_to_zero_are_refused(sigmas, refused):
    error = refused("generate", "--request", REQUEST, "--sigmas", sigmas, "--seed", 1)
    assert error["reason"] == "BAD_REQUEST", error


@pytest.mark.parametrize("evaluations", [0, 1001, 4294967295])
def test_absurd_number_of_evaluations_is_refused(evaluations, refused):
    error = refused("generate", "--request", REQUEST, "--evaluations", evaluations, "--seed", 1)
    assert error["reason"] == "BAD_REQUEST", error


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"\xff" * 64, (2**63).to_bytes(8, "little") + b"{}", (100).to_bytes(8, "little") + b"{",
                                     REQUEST.read_bytes()[:-40]], ids=["empty", "zeros", "ones", "huge", "short", "truncated"])
def test_malformed_file_is_refused_as_request_and_as_adapter(content, fresh_server, tmp_path):
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "bad.safetensors").write_bytes(content)
    (tmp_path / "request.safetensors").write_bytes(content)
    server = fresh_server(GOLDEN / "full/model.safetensors", adapters)
    output = ["--output", tmp_path / "out.safetensors"]
    code, error = ctl.refusal("evaluate", "--request", tmp_path / "request.safetensors", *output, server=server.address)
    assert (code, error["reason"]) == (3, "MALFORMED_FILE")
    code, error = ctl.refusal("evaluate", "--request", REQUEST, "--lora", "bad=1", *output, server=server.address)
    assert (code, error["reason"]) == (3, "MALFORMED_FILE")
    ctl.ok("evaluate", "--request", REQUEST, *output, server=server.address)


def test_symlink_out_of_the_adapters_folder_is_not_followed(fresh_server, tmp_path):
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    (adapters / "link.safetensors").symlink_to(GOLDEN / "lora/turbo_bare.safetensors")
    server = fresh_server(GOLDEN / "full/model.safetensors", adapters)
    code, error = ctl.refusal("evaluate", "--request", REQUEST, "--lora", "link=1", "--output", tmp_path / "out.safetensors", server=server.address)
    assert (code, error["reason"]) == (3, "UNKNOWN_ADAPTER")


def test_wrong_usage_ends_with_two(golden_server, tmp_path):
    for arguments in ([], ["frobnicate"], ["evaluate"], ["evaluate", "--request", REQUEST, "--lora", "turbo", "--output", tmp_path / "o"]):
        assert ctl.run(*arguments, server=golden_server.address).returncode == 2


def test_no_server_ends_with_four(tmp_path):
    code, error = ctl.refusal("evaluate", "--request", REQUEST, "--output", tmp_path / "out.safetensors", server="127.0.0.1:1")
    assert (code, error["code"]) == (4, "UNAVAILABLE")
