"""What a Python client made from the protos can rely on: order of events, cancelling, sessions, health, reflection."""

import itertools

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from google.protobuf.descriptor_pool import DescriptorPool
from safetensors.numpy import load_file

from h3test import GOLDEN
from h3test.protos import generation, operations, operations_grpc
from h3test.requests import Generate, RequestFile, Session, reason, stack
from h3test.servers import wait_for

T2VA = RequestFile(GOLDEN / "inputs/t2va.safetensors")
STACK = stack(("lora/turbo_bare", 1.0), ("lora/style_bf16", -0.4))


@pytest.fixture
def channel(golden_server):
    with grpc.insecure_channel(golden_server.address) as channel:
        yield channel


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


@pytest.mark.parametrize("grid,schedule", [("evaluations", generation.SCHEDULE_OFFICIAL), ("normal", generation.SCHEDULE_NORMAL)])
@pytest.mark.parametrize("evaluations", [2, 4, 8, 20, 50])
def test_effective_sigmas_equal_the_golden_ones_bit_for_bit(channel, grid, schedule, evaluations):
    golden = load_file(GOLDEN / "expected/sigmas.safetensors")
    if f"{grid}_{evaluations}_shift_12" not in golden:
        pytest.skip("no golden grid of that size")
    call = Generate(channel, T2VA, seed=1, evaluations=evaluations, schedule=schedule)
    next(iter(call))
    call.call.cancel()
    assert np.array_equal(np.float32(call.accepted.video_sigmas), golden[f"{grid}_{evaluations}_shift_12"])
    assert np.array_equal(np.float32(call.accepted.audio_sigmas), golden[f"{grid}_{evaluations}_shift_3"])


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


def test_a_cancelled_run_stops_and_the_next_one_is_not_disturbed(slow_server):
    with grpc.insecure_channel(slow_server.address) as channel:
        operator = operations_grpc.OperationsStub(channel)
        call = Generate(channel, slow_server.request, slow_server.stack, seed=1, evaluations=1000)
        for kind, event in call:
            if kind == "progress" and event.step >= 1:
                break
        call.call.cancel()
        with pytest.raises(grpc.RpcError) as caught:
            call.run()
        assert caught.value.code() == grpc.StatusCode.CANCELLED
        # Within one evaluation: of a thousand, each takes milliseconds here.
        wait_for(lambda: operator.GetStatus(operations.GetStatusRequest()).running == 0, "the device is free", 10)
        memory = operator.GetMemory(operations.GetMemoryRequest()).devices[0]
        assert all(adapter.pins == 0 for adapter in memory.adapters)
        assert Generate(channel, slow_server.request, slow_server.stack, seed=1, evaluations=1).run().completed


def test_a_deadline_stops_a_run(slow_server):
    with grpc.insecure_channel(slow_server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            Generate(channel, slow_server.request, slow_server.stack, seed=1, evaluations=1000, timeout=1).run()
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


def test_a_request_that_is_refused_is_refused_before_its_tensors_are_sent(channel):
    announced = {"text": np.zeros((7, 40), np.float32)}
    call = Generate(channel, T2VA, stack(("lora/absent", 1.0)), seed=1, evaluations=1, tensors={})
    with pytest.raises(grpc.RpcError) as caught:
        call.run()
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert announced and reason(caught.value)[1] in ("BAD_TENSOR", "UNKNOWN_ADAPTER")


def test_a_request_of_ten_gigabytes_is_refused_without_reading_it(channel):
    request = RequestFile(GOLDEN / "inputs/t2va.safetensors")
    request.layout.text_tokens = 10**10 // 160
    header = generation.GenerateHeader(layout=request.layout, sampling=generation.Sampling(seed=1, evaluations=1))
    header.tensors.add(name="text", dtype=1, shape=[request.layout.text_tokens, 40], bytes=request.layout.text_tokens * 160)
    header.tensors.add(name="text_token_tags", dtype=5, shape=[request.layout.text_tokens], bytes=request.layout.text_tokens * 8)
    from h3test.protos import generation_grpc
    with pytest.raises(grpc.RpcError) as caught:
        # Half-closed after the header: an answer that waited for the bytes would be another one.
        list(generation_grpc.GenerationStub(channel).Generate(iter([generation.GenerateRequest(header=header)]), timeout=10))
    code, why = reason(caught.value)
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION)
    assert why in ("BAD_REQUEST", "BAD_TENSOR", "BAD_LAYOUT", "VRAM_EXCEEDED")


def test_chunks_that_break_the_grammar_are_refused(channel):
    from h3test.protos import generation_grpc
    stub = generation_grpc.GenerationStub(channel)
    header = generation.GenerateRequest(header=Generate_header(T2VA))
    chunk = generation.GenerateRequest
    text = T2VA.conditions["text"].tobytes()
    bad = {
        "no header": [chunk(chunk={"tensor": 0, "data": text})],
        "empty stream": [],
        "two headers": [header, header],
        "gap": [header, chunk(chunk={"tensor": 0, "offset": 8, "data": text[8:]})],
        "no such tensor": [header, chunk(chunk={"tensor": 9, "data": text})],
        "too long": [header, chunk(chunk={"tensor": 0, "data": text + b"1234"})],
        "ends early": [header, chunk(chunk={"tensor": 0, "data": text})],
    }
    for name, messages in bad.items():
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(iter(messages), timeout=10))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, name
    assert Generate(channel, T2VA, seed=1, evaluations=1).run().completed


def Generate_header(request):
    from h3test.requests import specs
    return generation.GenerateHeader(layout=request.layout, sampling=generation.Sampling(seed=1, evaluations=1), tensors=specs(request.conditions))


@pytest.mark.parametrize("service", ["", "liveness", "readiness", "h3.v1.Generation", "h3.v1.Adapters", "h3.v1.Operations"])
def test_health_answers_for_every_name(channel, service):
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_an_unknown_service_is_not_found(channel):
    with pytest.raises(grpc.RpcError) as caught:
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nothing"), timeout=10)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


def test_reflection_describes_the_services(channel):
    database = ProtoReflectionDescriptorDatabase(channel)
    assert {"h3.v1.Generation", "h3.v1.Adapters", "h3.v1.Operations"} <= set(database.get_services())
    method = DescriptorPool(database).FindMethodByName("h3.v1.Generation.Generate")
    assert method.input_type.full_name == "h3.v1.GenerateRequest"
