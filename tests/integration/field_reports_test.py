"""Faults that people met with H3 adapters elsewhere, through the real programs; tests/field_reports.md lists them.

Most measure with the unit adapter: A's first column is 1, B is all ones. On an output head its delta is strength x alpha times
the same vector, whatever the rank (strength x rank without an alpha), so that a mistake of scale is one readable number."""

import concurrent.futures
import json
import math
import os
import subprocess
import threading

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from h3test import BIN, GOLDEN, ctl, golden, oracle
from h3test.protos import adapters, adapters_grpc, generation
from h3test.requests import Generate, RequestFile, Session, reason, stack
from h3test.servers import Server

FULL, PRUNED = GOLDEN / "full/model.safetensors", GOLDEN / "pruned/model.safetensors"
GRID = GOLDEN / "pruned/silu_temb_grid.safetensors"
T2VA = RequestFile(GOLDEN / "inputs/t2va.safetensors")
HIDDEN = 64
HEADS = {"final_layer.video_out": 16, "final_layer.audio_out": 6}
STREAMS = {"video": "final_layer.video_out", "audio": "final_layer.audio_out"}
# Of a measured number: the delta is what is left of two float32 answers.
MEASURED = 2e-5
# As in mixed_stack_test.py.
SERVER_LIMIT = 7e-7


def factors(rank, out, dtype=np.float32, value=1):
    """A and B of the unit adapter."""
    a = np.zeros((rank, HIDDEN), dtype)
    a[:, 0] = value
    return a, np.full((out, rank), value, dtype)


def pair(module, rank, dtype=np.float32, value=1):
    a, b = factors(rank, HEADS[module], dtype=dtype, value=value)
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def unit(rank, alpha=None):
    """The unit adapter on both heads."""
    tensors = {}
    for module in HEADS:
        tensors |= pair(module, rank)
        if alpha is not None:
            tensors[f"{module}.alpha"] = np.array(alpha, np.float32)
    return tensors


def kohya(rank, alpha):
    tensors = {}
    for module, out in HEADS.items():
        name = f"lora_unet_{module.replace('.', '_')}"
        a, b = factors(rank, out)
        tensors |= {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": np.array(alpha, np.float32)}
    return tensors


VIDEO, AUDIO = HEADS
# name -> (tensors, metadata, (delta of the video head, of the audio head) at strength 1).
SCALES = {
    "alpha_tensor": (unit(4, alpha=2), None, (2, 2)),
    "other_rank": (unit(16, alpha=2), None, (2, 2)),
    "kohya": (kohya(4, alpha=3), None, (3, 3)),
    "no_alpha": (unit(4), None, (4, 4)),
    "mixed_ranks": (pair(VIDEO, 64) | pair(AUDIO, 16), None, (64, 16)),
    "metadata_alpha": (unit(4), {"alpha": "2"}, (2, 2)),
    "metadata_fraction": (unit(4), {"lora_alpha": "0.5"}, (0.5, 0.5)),
    "metadata_kohya": (unit(4), {"ss_network_alpha": "2", "ss_network_dim": "4"}, (2, 2)),
    "metadata_namespaced": (unit(16), {"transformer.lora_alpha": "64", "transformer.r": "16"}, (64, 64)),
    "metadata_and_a_scalar": (unit(4) | {f"{AUDIO}.alpha": np.array(3, np.float32)}, {"alpha": "8"}, (8, 3)),
    "alpha_zero": (unit(4), {"alpha": "0"}, (0, 0)),
    "rank_stabilised": (unit(4), {"lora_alpha": "4", "use_rslora": "true"}, (8, 8)),
    "float64": ({name: value.astype(np.float64) for name, value in unit(4, alpha=2).items()}, None, (2, 2)),
    "float16": ({name: value.astype(np.float16) for name, value in unit(4, alpha=2).items()}, None, (2, 2)),
    "offset": ({f"{module}.diff_b": np.full(out, 0.5, np.float32) for module, out in HEADS.items()}, None, None),
    # 65504 is the largest float16: their product is beyond it, and must not be made in it.
    "large_halves": (pair(VIDEO, 1, np.float16, 65504) | pair(AUDIO, 1, np.float16, 65504), None, (65504**2, 65504**2)),
}


def all_modules(model):
    """Zero deltas on every linear layer of a model."""
    tensors = {}
    for name, weight in load_file(model).items():
        if weight.ndim == 2 and name.endswith(".weight"):
            a = np.random.default_rng(1).standard_normal((2, weight.shape[1])).astype(np.float32)
            module = name.removesuffix(".weight")
            tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": np.zeros((weight.shape[0], 2), np.float32)}
    return tensors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("units")
    for name, (tensors, metadata, _) in SCALES.items():
        save_file(tensors, folder / f"{name}.safetensors", metadata)
    for rank in range(1, 11):
        save_file(unit(rank, alpha=rank), folder / f"unit{rank}.safetensors")
    save_file(pair(VIDEO, 2), folder / "video.safetensors")
    save_file(pair(AUDIO, 3), folder / "audio.safetensors")
    save_file(all_modules(FULL), folder / "zeros.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(folder):
    with Server(FULL, folder) as server:
        yield server


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def evaluate(channel, *entries, **point):
    """One evaluation of a stack: {"video", "audio"} velocities."""
    session = Session(channel, T2VA, stack(*entries))
    answer = session.evaluate(T2VA.targets, **(point or {"sigma": 0.9}))
    session.close()
    return answer


def refusal(channel, *entries, **point):
    """(code, reason) of an evaluation that must be refused."""
    with pytest.raises(grpc.RpcError) as caught:
        evaluate(channel, *entries, **point)
    return reason(caught.value)


def same_bits(first, second):
    return all(np.array_equal(first[name].view(np.int32), second[name].view(np.int32)) for name in first)


@pytest.fixture(scope="module")
def base(channel):
    return evaluate(channel)


@pytest.fixture(scope="module")
def measure(channel, base):
    """measure(("style", 0.5), ...) -> how many unit deltas the stack adds to (video, audio); it must add nothing else."""
    one = {name: value.astype(np.float64) - base[name] for name, value in evaluate(channel, ("unit1", 1.0)).items()}

    def run(*entries):
        answer = evaluate(channel, *entries)
        numbers = []
        for stream in STREAMS:
            delta = answer[stream].astype(np.float64) - base[stream]
            number = np.sum(delta * one[stream]) / np.sum(one[stream] ** 2)
            rest = np.linalg.norm(delta - number * one[stream]) / np.linalg.norm(one[stream])
            assert rest <= MEASURED * max(1, abs(number)), f"{stream}: not a multiple of the unit delta"
            numbers.append(number)
        return tuple(numbers)

    return run


def about(*numbers):
    return pytest.approx(numbers, rel=MEASURED, abs=MEASURED)


# B1 .. B4


@pytest.mark.parametrize("name", [name for name, (_, _, expected) in SCALES.items() if expected])
def test_every_way_to_say_a_scale_gives_its_number(name, measure):
    expected = SCALES[name][2]
    assert measure((name, 1.0)) == about(*expected)
    assert measure((name, -0.25)) == about(*(-0.25 * number for number in expected))


def test_an_offset_is_scaled_by_the_strength_alone(channel, base):
    for strength in (1.0, -0.5):
        answer = evaluate(channel, ("offset", strength))
        for stream in STREAMS:
            assert np.allclose(answer[stream] - base[stream], 0.5 * strength, atol=1e-5)


# B5


@pytest.mark.parametrize("entries", [(("unit2", 1.0), ("unit3", 0.5)), (("unit3", 0.5), ("unit2", 1.0))])
def test_two_adapters_on_one_module_add_up_in_either_order(entries, measure):
    assert measure(*entries) == about(3.5, 3.5)


def test_adapters_on_different_modules_keep_apart(measure):
    assert measure(("video", 1.0), ("audio", 0.5)) == about(2, 1.5)
    assert measure(("audio", 0.5)) == about(0, 1.5)


def test_ten_adapters_add_up(measure):
    strengths = [round(0.1 * (-1)**rank * rank, 6) for rank in range(1, 11)]
    expected = sum(rank * strength for rank, strength in zip(range(1, 11), strengths))
    assert measure(*((f"unit{rank}", strength) for rank, strength in zip(range(1, 11), strengths))) == about(expected, expected)


def test_one_adapter_at_two_strengths_in_concurrent_requests(server, channel, measure):
    strengths = (0.25, 0.75)
    alone = {strength: evaluate(channel, ("unit2", strength)) for strength in strengths}
    assert measure(("unit2", 0.25)) == about(0.5, 0.5)
    start = threading.Barrier(2)

    def client(strength):
        with grpc.insecure_channel(server.address) as own:
            session = Session(own, T2VA, stack(("unit2", strength)))
            start.wait(10)
            answers = [session.evaluate(T2VA.targets, sigma=0.9) for _ in range(20)]
            session.close()
            return answers

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for strength, answers in zip(strengths, pool.map(client, strengths)):
            assert all(same_bits(answer, alone[strength]) for answer in answers)


# B6


def test_a_change_of_strength_alone_is_a_change(channel, base, measure):
    first = evaluate(channel, ("unit1", 1.0))
    assert measure(("unit1", 0.25)) == about(0.25, 0.25)
    assert same_bits(evaluate(channel, ("unit1", 0.0)), base)
    assert same_bits(evaluate(channel, ("unit1", 1.0)), first)


# B7


def test_the_same_adapter_twice_is_the_sum_and_both_are_reported(channel, measure):
    entries = (("unit2", 0.25), ("unit3", 1.0), ("unit2", 0.5))
    assert measure(*entries) == about(4.5, 4.5)
    session = Session(channel, T2VA, stack(*entries))
    assert [(it.adapter, it.strength) for it in session.accepted.stack] == list(entries)
    assert session.accepted.stack[0].digest == session.accepted.stack[2].digest
    session.close()


def test_strengths_that_cancel_each_other_leave_the_base(measure):
    assert measure(("unit2", 1.5), ("unit2", -1.5)) == about(0, 0)


def test_the_limits_of_a_strength_are_inclusive_and_what_is_no_number_is_refused(channel, base, measure):
    assert measure(("unit1", 100.0)) == about(100, 100)
    assert measure(("unit1", -100.0)) == about(-100, -100)
    for strength in (math.nextafter(100, 101), math.nan, math.inf, -math.inf):
        assert refusal(channel, ("unit2", 0.5), ("unit1", strength)) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_STRENGTH")
    assert same_bits(evaluate(channel), base)


# B8


def test_the_base_is_the_same_after_requests_that_finished_and_others_that_did_not(channel, base):
    for turn in range(20):
        strength = 0.1 + 1.6 * turn / 19
        entries = (("unit2", strength), ("zeros", 1.0), ("unit3", 1.8 - strength))
        if turn % 4 == 3:
            call = Generate(channel, T2VA, stack(*entries), seed=turn, evaluations=1000)
            for kind, event in call:
                if kind == "progress" and event.step >= 1:
                    break
            call.call.cancel()
        else:
            Generate(channel, T2VA, stack(*entries), seed=turn, evaluations=2).run()
    assert same_bits(evaluate(channel), base)


# C1

GRIDS = {
    "absent": None,
    "one_row": {"silu_t_emb_grid": np.zeros((1, 28), np.float32)},
    "flat": {"silu_t_emb_grid": np.zeros(28, np.float32)},
    "nan": {"silu_t_emb_grid": np.full((9, 28), np.nan, np.float32)},
    "infinite": {"silu_t_emb_grid": np.full((9, 28), np.inf, np.float32)},
    "integers": {"silu_t_emb_grid": np.zeros((9, 28), np.int64)},
    "of_several_other_names": {"first": np.zeros((9, 28), np.float32), "second": np.zeros((9, 28), np.float32)},
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_that_is_none_ends_the_start_with_its_reason(name, tmp_path):
    if GRIDS[name] is not None:
        save_file(GRIDS[name], tmp_path / "grid.safetensors")
    command = [BIN / "h3-worker", "--model", PRUNED, "--silu-grid", tmp_path / "grid.safetensors", "--listen", "127.0.0.1:0",
               "--metrics", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert "silu" in done.stderr and "grid" in done.stderr
    assert "ready" not in done.stdout


def test_a_grid_under_another_name_is_that_grid(serve, tmp_path):
    (grid,) = load_file(GRID).values()
    save_file({"t_emb_after_silu": grid}, tmp_path / "grid.safetensors")
    answers = []
    for path in (GRID, tmp_path / "grid.safetensors"):
        with grpc.insecure_channel(serve(PRUNED, "--silu-grid", path).address) as channel:
            answers.append(evaluate(channel, ("lora/turbo_bare", 1.0)))
    assert same_bits(*answers)


def test_a_grid_of_another_width_serves_the_base_and_refuses_pairs_that_do_not_fit(tmp_path):
    save_file({"silu_t_emb_grid": np.zeros((9, 27), np.float32)}, tmp_path / "grid.safetensors")
    options = ("--silu-grid", tmp_path / "grid.safetensors")
    with Server(PRUNED, GOLDEN, *options) as server, grpc.insecure_channel(server.address) as channel:
        assert refusal(channel, ("lora/turbo_bare", 1.0)) == (grpc.StatusCode.INVALID_ARGUMENT, "SHAPE_MISMATCH")
        assert evaluate(channel, ("lora/complete_own_table", 1.0))


# C4

# Video and audio timesteps: the ends of the table, at and beside a node of the grid, where streams or conditions share a row.
POINTS = {"start": (0.0, 0.0), "end": (1.0, 1.0), "before_the_end": (1 - 2**-20, 1 - 2**-20), "last_float": (1 - 2**-24, 0.5),
          "first_float": (2**-149, 2**-149), "on_a_node": (512 / 1024, 511 / 1024), "beside_a_node": (0.5 - 2**-20, 0.5 + 2**-20),
          "one_row": (0.37, 0.37), "condition_row": (0.999, 0.25), "above_it": (0.9995, 1.0), "audio_at_1": (0.25, 1.0),
          "crossed": (1.0, 0.0)}


def moved(name, point, path):
    """A request file whose rows are at other timesteps, as the packing rules say: text and video at t, visual conditions at
    max(t, 0.999), audio at its own t, audio conditions at 1."""
    request = load_file(GOLDEN / f"inputs/{name}.safetensors")
    (video,), (audio,) = request["video_timestep"], request["audio_timestep"]
    roles = {np.float32(video): np.float32(point[0]), np.float32(audio): np.float32(point[1]), np.float32(1): np.float32(1),
             np.float32(0.999): max(np.float32(point[0]), np.float32(0.999))}
    rows = np.array([roles[t] for t in request["timestep"][request["timestep_indices"]]], np.float32)
    request["timestep"], request["timestep_indices"] = np.unique(rows, return_inverse=True)
    request["timestep_indices"] = request["timestep_indices"].astype(np.int64)
    save_file(request, path)
    return path


@pytest.mark.parametrize("name", ["t2va", "ref2va_mixed"])
@pytest.mark.parametrize("model", ["full", "pruned"])
def test_every_row_has_its_own_timestep_to_the_very_ends(model, name, serve, errors, tmp_path):
    entries = [("lora/turbo_bare", 0.7), ("lora/complete_own_table", 0.5)]
    files = [{"file": GOLDEN / f"{file}.safetensors", "strength": strength} for file, strength in entries]
    path, grid, options = (PRUNED, GRID, ("--silu-grid", GRID)) if model == "pruned" else (FULL, None, ())
    reference = oracle.Oracle(path, files, grid)
    request = RequestFile(GOLDEN / f"inputs/{name}.safetensors")
    with grpc.insecure_channel(serve(path, *options).address) as channel:
        session = Session(channel, request, stack(*entries), include_condition_rows=True)
        for label, point in POINTS.items():
            answer = session.evaluate(request.targets, timesteps=generation.Timesteps(video=point[0], audio=point[1]))
            expected = reference.evaluate(moved(name, point, tmp_path / "moved.safetensors"))
            error = max(golden.relative_l2(answer[stream], expected[stream]) for stream in STREAMS)
            errors.add(f"{model}, timesteps at the ends, against the oracle", error)
            assert error <= SERVER_LIMIT, label
        session.close()


@pytest.mark.parametrize("kind", ["sigma", "base_sigma"])
def test_every_sigma_from_0_to_1_is_a_point_however_it_rounds(kind, channel):
    ends = {0.0: evaluate(channel, timesteps=generation.Timesteps(video=1, audio=1)),
            1.0: evaluate(channel, timesteps=generation.Timesteps())}
    session = Session(channel, T2VA)
    for sigma in (1.0, 1 - 2**-53, 1 - 2**-40, 1 - 2**-24, 1 - 1e-6, 1e-6, 1e-9, 2**-53, 1e-300, 5e-324, 0.0):
        answer = session.evaluate(T2VA.targets, **{kind: sigma})
        if sigma in ends:
            assert same_bits(answer, ends[sigma])
    session.close()


@pytest.mark.parametrize("point", [(-1e-9, 0.5), (0.5, 1 + 1e-9), (math.nan, 0.5), (0.5, math.inf)])
def test_timesteps_outside_0_to_1_are_refused(point, channel, base):
    timesteps = generation.Timesteps(video=point[0], audio=point[1])
    assert refusal(channel, timesteps=timesteps) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST")
    assert same_bits(evaluate(channel), base)


# D4


NO_NAMES = ["a\0b", "\0", "unit1\0", "..", "unit1/", "./unit1", "unit1.safetensors/../unit1", "\uff0e\uff0e/unit1", "u" * 5000]


@pytest.mark.parametrize("name", NO_NAMES, ids=range(len(NO_NAMES)))
def test_names_that_are_none_are_refused_and_not_resolved(name, channel, folder):
    with pytest.raises(grpc.RpcError) as caught:
        evaluate(channel, (name, 1.0))
    code, why = reason(caught.value)
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND) and why == "UNKNOWN_ADAPTER"
    assert str(folder) not in caught.value.details()


def test_what_is_no_file_is_neither_opened_nor_listed(tmp_path):
    """A FIFO would block for ever, /dev/zero has no end."""
    save_file(unit(1), tmp_path / "sound.safetensors")
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "folder.safetensors").mkdir()
    with Server(FULL, tmp_path) as server, grpc.insecure_channel(server.address) as channel:
        for name in ("fifo", "zero", "folder"):
            assert refusal(channel, (name, 1.0)) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ADAPTER")
        listed = adapters_grpc.AdaptersStub(channel).ListAdapters(adapters.ListAdaptersRequest(), timeout=10).adapters
        assert [it.name for it in listed] == ["sound"]
        assert evaluate(channel, ("sound", 1.0))


# D5


def test_other_content_under_the_same_name_acts_at_once_however_it_came_there(channel, folder, measure):
    """Written over in place, same size, same times: a name is an alias, the content counts."""
    path = folder / "changing.safetensors"

    def write(alpha, **times):
        save_file(unit(4, alpha), folder / "changing.new")
        path.write_bytes((folder / "changing.new").read_bytes())
        if times:
            os.utime(path, **times)

    write(2)
    before = path.stat()
    assert measure(("changing", 1.0)) == about(2, 2)
    write(3, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    assert measure(("changing", 1.0)) == about(3, 3)


def test_a_session_keeps_the_content_that_it_was_promised(channel, folder):
    path = folder / "promised.safetensors"
    save_file(unit(4, 2), path)
    session = Session(channel, T2VA, stack(("promised", 1.0)))
    before = session.evaluate(T2VA.targets, sigma=0.9)
    save_file(unit(4, 3), folder / "promised.new")
    path.write_bytes((folder / "promised.new").read_bytes())
    assert same_bits(session.evaluate(T2VA.targets, sigma=0.9), before)
    session.close()


# G2


def test_deltas_of_zero_are_the_base_bit_for_bit_and_said_to_be_without_effect(channel, base):
    assert same_bits(evaluate(channel, ("zeros", 1.0)), base)
    resolved = adapters_grpc.AdaptersStub(channel).LoadAdapter(adapters.LoadAdapterRequest(name="zeros")).resolved
    assert any("no effect" in warning for warning in resolved.warnings)
    resolved = adapters_grpc.AdaptersStub(channel).LoadAdapter(adapters.LoadAdapterRequest(name="unit1")).resolved
    assert not resolved.warnings


@pytest.mark.parametrize("model", [FULL, PRUNED], ids=["full", "pruned"])
def test_a_modulation_beyond_float16_is_never_a_silent_infinity(model, tmp_path):
    """As folded biases of pruned files are: float16 ends at 65504."""
    tensors = load_file(model)
    tensors["blocks.0.adaln_proj.linear.bias"][:HIDDEN] = 70000
    save_file(tensors, tmp_path / "model.safetensors")
    for dtype in ("float16", "bfloat16", "float32"):
        options = ("--dtype", dtype)
        with Server(tmp_path / "model.safetensors", GOLDEN, *options) as server, grpc.insecure_channel(server.address) as channel:
            if dtype == "float16":
                assert refusal(channel) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_FINITE")
            else:
                assert all(np.isfinite(value).all() for value in evaluate(channel).values())


# G4


def spoiled(tensors, name, value):
    tensors = {key: np.array(tensor) for key, tensor in tensors.items()}
    tensors[name].flat[tensors[name].size // 2] = value
    return tensors


def complete():
    return load_file(GOLDEN / "lora/complete_own_table.safetensors")


FC2 = "blocks.0.mlp.fc2"
DORA = {f"{FC2}.lora_A.weight": np.ones((2, 112), np.float32), f"{FC2}.lora_B.weight": np.ones((64, 2), np.float32),
        f"{FC2}.dora_scale": np.ones((64, 1), np.float32)}
LOKR = {f"{FC2}.lokr_w1": np.ones((4, 4), np.float32), f"{FC2}.lokr_w2": np.ones((16, 28), np.float32)}
NORM = {"blocks.0.norm1.diff": np.ones(64, np.float32)}
NOT_FINITE = {
    "a_infinite": spoiled(unit(4), f"{VIDEO}.lora_A.weight", np.inf),
    "b_nan": spoiled(unit(4), f"{AUDIO}.lora_B.weight", np.nan),
    "b_negative_infinite": spoiled(unit(4), f"{AUDIO}.lora_B.weight", -np.inf),
    "offset": spoiled(SCALES["offset"][0], f"{VIDEO}.diff_b", np.nan),
    "magnitude": spoiled(DORA, f"{FC2}.dora_scale", np.inf),
    "lokr": spoiled(LOKR, f"{FC2}.lokr_w2", np.nan),
    "norm": spoiled(NORM, "blocks.0.norm1.diff", np.nan),
    "table": spoiled(complete(), "adaln_t_table", np.nan),
    "curve": spoiled(complete(), "blocks.1.adaln_proj.linear.weight", np.inf),
    "curve_bias": spoiled(complete(), "final_layer.adaln_proj.linear.bias", np.nan),
    # Finite where it is stored, and not where it is used.
    "float64_beyond_float32": {name: value.astype(np.float64) * 1e300 for name, value in unit(4).items()},
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_is_refused_when_it_is_loaded(name, channel, folder, base):
    save_file(NOT_FINITE[name], folder / f"bad_{name}.safetensors")
    registry = adapters_grpc.AdaptersStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        registry.LoadAdapter(adapters.LoadAdapterRequest(name=f"bad_{name}"))
    assert reason(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_FINITE")
    assert refusal(channel, ("unit1", 1.0), (f"bad_{name}", 0.0)) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_FINITE")
    assert same_bits(evaluate(channel), base)


def filled(module, out, width):
    return {f"{module}.lora_A.weight": np.full((1, width), 1e20, np.float32),
            f"{module}.lora_B.weight": np.full((out, 1), 1e20, np.float32)}


# name -> (tensors, strength).
OVERFLOWS = {
    "factors": (pair(VIDEO, 1, value=1e20), 1.0),
    "alpha": (unit(1, alpha=3e38), 100.0),
    "in_a_block": (filled("blocks.2.attn.qkv_proj", 288, 64), 1.0),
    "in_the_refiner": (filled("token_refiner.blocks.0.mlp.fc2", 64, 112), 1.0),
    "in_the_modulation": (filled("blocks.1.adaln_proj.linear", 1152, 28), 1.0),
    "lokr_factors": ({f"{FC2}.lokr_w1_a": np.full((4, 1), 1e20, np.float32),
                      f"{FC2}.lokr_w1_b": np.full((1, 4), 1e20, np.float32),
                      f"{FC2}.lokr_w2": np.ones((16, 28), np.float32)}, 1.0),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_finite_factors_that_overflow_are_refused_instead_of_answered(name, channel, folder, base):
    tensors, strength = OVERFLOWS[name]
    save_file(tensors, folder / f"overflow_{name}.safetensors")
    entry = (f"overflow_{name}", strength)
    assert refusal(channel, entry) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_FINITE")
    with pytest.raises(grpc.RpcError) as caught:
        Generate(channel, T2VA, stack(entry), seed=1, evaluations=2).run()
    assert reason(caught.value) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_FINITE")
    # What overflowed is nobody else's: not the base's, and not that of the same adapter at no strength.
    assert same_bits(evaluate(channel), base)
    assert same_bits(evaluate(channel, (f"overflow_{name}", 0.0)), base)


def enormous(kind, size):
    """Factors whose product is about size squared, on a module whose output goes through a norm, or with a norm of their own."""
    rng = np.random.default_rng(3)
    module, width = {"residual": ("blocks.3.attn.out_proj", 96), "text": ("condition_proj", 40)}.get(kind, (FC2, 112))
    tensors = {f"{module}.lora_A.weight": size * rng.standard_normal((2, width)),
               f"{module}.lora_B.weight": size * rng.standard_normal((HIDDEN, 2))}
    if kind.startswith("dora"):
        weight = load_file(FULL)[f"{module}.weight"]
        tensors[f"{module}.dora_scale"] = np.linalg.norm(weight, axis=1 if kind == "dora_rows" else 0, keepdims=True)
    return {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}


@pytest.mark.parametrize("kind", ["residual", "text", "dora_rows", "dora_columns"])
def test_values_whose_squares_overflow_in_a_norm_are_normed_or_refused(kind, channel, folder):
    """A norm takes any size away, so that both files have the same answer. Squares beyond float32 are no reason to go on with
    zeros in place of the rows: what cannot be computed is refused."""
    answers = []
    for size in (1e8, 1e10):
        save_file(enormous(kind, size), folder / f"{kind}_{size:.0e}.safetensors")
        try:
            answers.append(evaluate(channel, (f"{kind}_{size:.0e}", 1.0)))
        except grpc.RpcError as error:
            assert size == 1e10 and reason(error) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_FINITE")
            return
    for stream in STREAMS:
        assert golden.relative_l2(answers[1][stream], answers[0][stream]) <= 1e-4


def test_factors_beyond_the_type_of_the_blocks_are_refused_when_they_are_loaded(tmp_path):
    """70000 is no float16: it would be an infinity on a float16 base."""
    for value in (60000, 70000):
        save_file({f"{FC2}.lora_A.weight": np.zeros((1, 112), np.float32),
                   f"{FC2}.lora_B.weight": np.full((HIDDEN, 1), value, np.float32)}, tmp_path / f"of{value}.safetensors")
    with Server(FULL, tmp_path, "--dtype", "float16") as server, grpc.insecure_channel(server.address) as channel:
        assert same_bits(evaluate(channel, ("of60000", 1.0)), evaluate(channel))
        assert refusal(channel, ("of70000", 1.0)) == (grpc.StatusCode.INVALID_ARGUMENT, "NOT_FINITE")


def test_an_overflow_says_what_can_be_done(server, folder, tmp_path):
    save_file(pair(VIDEO, 1, value=1e20), folder / "overflow.safetensors")
    code, error = ctl.refusal("evaluate", "--request", GOLDEN / "inputs/t2va.safetensors", "--lora", "overflow=1", "--output",
                              tmp_path / "out.safetensors", server=server.address)
    assert (code, error["reason"]) == (3, "NOT_FINITE")
    assert "strength" in error["message"] and "video" in json.dumps(error)
    assert not (tmp_path / "out.safetensors").exists()
