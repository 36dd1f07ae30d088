"""What a Python client made from the protos can rely on: order of events, sampling, cancelling, sessions."""

import itertools

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file

from h3test import GOLDEN
from h3test.protos import generation, operations, operations_grpc
from h3test.requests import Generate, RequestFile, Session, stack
from h3test.servers import wait_for

SIGMAS = load_file(GOLDEN / "expected/sigmas.safetensors")
T2VA = RequestFile(GOLDEN / "inputs/t2va.safetensors")
STACK = stack(("lora/turbo_bare", 1.0), ("lora/style_bf16", -0.4))


def test_events_of_a_generation_come_in_the_documented_order(channel):
    call = Generate(channel, T2VA, STACK, noise_from_request=True, evaluations=4)
    progress = [event for kind, event in call if kind == "progress"]
    order = [kind for kind, _ in itertools.groupby(call.kinds)]
    assert order == ["accepted", "progress", "result", "chunk", "completed"]
    steps = [event.step for event in progress if event.phase == generation.PHASE_DENOISE]
    assert steps == sorted(steps) and steps[-1] == 4
    assert all(event.steps == 4 for event in progress if event.phase == generation.PHASE_DENOISE)
    assert call.call.code() == grpc.StatusCode.OK


def test_accepted_tells_what_will_be_computed(channel):
    call = Generate(channel, T2VA, STACK, noise_from_request=True, evaluations=4).run()
    accepted = call.accepted
    assert [(it.adapter, round(it.strength, 6)) for it in accepted.stack] == [("lora/turbo_bare", 1.0), ("lora/style_bf16", -0.4)]
    assert all(len(it.digest) == 64 and it.modules > 0 and it.scales for it in accepted.stack)
    assert len(accepted.base_fingerprint) == 64
    assert len(call.completed.step_seconds) == 4
    assert call.completed.avoided_resident_bytes > 0 and call.completed.peak_bytes > 0


@pytest.mark.parametrize("grid", sorted(name.removesuffix("_shift_12") for name in SIGMAS if name.endswith("_shift_12")))
def test_effective_sigmas_equal_the_golden_ones_bit_for_bit(channel, grid):
    kind, evaluations = grid.rsplit("_", 1)
    schedule = generation.SCHEDULE_NORMAL if kind == "normal" else generation.SCHEDULE_OFFICIAL
    call = Generate(channel, T2VA, seed=1, evaluations=int(evaluations), schedule=schedule)
    next(iter(call))
    call.call.cancel()
    assert np.array_equal(np.float32(call.accepted.video_sigmas), SIGMAS[f"{grid}_shift_12"])
    assert np.array_equal(np.float32(call.accepted.audio_sigmas), SIGMAS[f"{grid}_shift_3"])


def test_noise_from_a_seed_is_that_of_torch_bit_for_bit(channel):
    noise = load_file(GOLDEN / "expected/noise_seed1234.safetensors")
    request = RequestFile(GOLDEN / "inputs/t2va.safetensors")
    request.layout.latent_frames, request.layout.latent_height, request.layout.latent_width = noise["video_1_4_7_4_6"].shape[2:]
    request.layout.audio_latents = len(noise["audio_18_6"]) // 2
    request.targets = {"target_video": noise["video_1_4_7_4_6"], "target_audio_rows": noise["audio_18_6"]}
    given = Generate(channel, request, noise_from_request=True, evaluations=1).run().tensors
    drawn = Generate(channel, request, seed=1234, evaluations=1).run().tensors
    assert given.keys() == drawn.keys() == {"video", "audio", "video_latents", "audio_latents"}
    for name in given:
        assert np.array_equal(given[name], drawn[name]), name


def test_latents_are_the_rows_unpacked(channel):
    tensors = Generate(channel, T2VA, STACK, noise_from_request=True, evaluations=2).run().tensors
    video, rows = tensors["video_latents"], tensors["video"]
    _, c, t, h, w = video.shape
    packed = video[0].reshape(c, t, h // 2, 2, w // 2, 2).transpose(1, 2, 4, 0, 3, 5).reshape(-1, 4 * c)
    assert np.array_equal(packed, rows)
    assert np.array_equal(tensors["audio_latents"].transpose(0, 2, 1).reshape(tensors["audio"].shape), tensors["audio"])


@pytest.fixture
def slow(small_h3, fresh_server):
    """A server whose runs last: (channel, request, stack)."""
    server = fresh_server(small_h3 / "h3-small.safetensors", small_h3 / "adapters")
    with grpc.insecure_channel(server.address) as channel:
        yield channel, RequestFile(small_h3 / "request.safetensors"), stack(("turbo", 1.0), ("style", 0.5))


def test_a_cancelled_run_stops_and_the_next_one_is_not_disturbed(slow):
    channel, request, adapters = slow
    operator = operations_grpc.OperationsStub(channel)
    call = Generate(channel, request, adapters, seed=1, evaluations=1000)
    for kind, event in call:
        if kind == "progress" and event.step >= 1:
            break
    call.call.cancel()
    with pytest.raises(grpc.RpcError) as caught:
        call.run()
    assert caught.value.code() == grpc.StatusCode.CANCELLED
    # An evaluation takes some hundredths of a second here; nine hundred more of them would take many seconds.
    wait_for(lambda: operator.GetStatus(operations.GetStatusRequest()).running == 0, "the device is free", 5)
    wait_for(lambda: not any(it.pins for it in operator.GetMemory(operations.GetMemoryRequest()).devices[0].adapters), "no adapter is pinned", 5)
    assert Generate(channel, request, adapters, seed=1, evaluations=1).run().completed


def test_a_deadline_stops_a_run(slow):
    channel, request, adapters = slow
    with pytest.raises(grpc.RpcError) as caught:
        Generate(channel, request, adapters, seed=1, evaluations=1000, timeout=1).run()
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    operator = operations_grpc.OperationsStub(channel)
    wait_for(lambda: operator.GetStatus(operations.GetStatusRequest()).running == 0, "the device is free", 10)


@pytest.mark.parametrize("name", ["t2va", "fl2va_first_last", "ref2va_mixed"])
def test_a_session_driven_by_the_clients_own_sampler_equals_generate(channel, name):
    request = RequestFile(GOLDEN / f"inputs/{name}.safetensors")
    whole = Generate(channel, request, STACK, noise_from_request=True, evaluations=4).run()
    video_sigmas, audio_sigmas = (np.float32(it) for it in (whole.accepted.video_sigmas, whole.accepted.audio_sigmas))
    session = Session(channel, request, STACK)
    latents = request.targets["target_video"]
    _, c, t, h, w = latents.shape
    video = latents[0].reshape(c, t, h // 2, 2, w // 2, 2).transpose(1, 2, 4, 0, 3, 5).reshape(-1, 4 * c).copy()
    audio = request.targets["target_audio_rows"]
    one = np.float32(1)
    for i in range(4):
        velocity = session.evaluate({"target_video_rows": video, "target_audio_rows": audio},
                                    timesteps=generation.Timesteps(video=one - video_sigmas[i], audio=one - audio_sigmas[i]))

        def euler(x, v, now, after):
            x0 = x + now * v
            ratio = after / now
            return ratio * x + (one - ratio) * x0

        video = euler(video, velocity["video"], video_sigmas[i], video_sigmas[i + 1])
        audio = euler(audio, velocity["audio"], audio_sigmas[i], audio_sigmas[i + 1])
    session.close()
    # Condition rows come first in a run's result.
    for mine, theirs in ((video, whole.tensors["video"]), (audio, whole.tensors["audio"])):
        theirs = theirs[len(theirs) - len(mine):]
        assert np.linalg.norm(mine - theirs) <= 1e-6 * np.linalg.norm(theirs)
