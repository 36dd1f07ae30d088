"""The edges of the protocol: what breaks its grammar is refused; health and reflection answer."""

import threading

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from h3test import GOLDEN
from h3test.protos import generation, generation_grpc, types
from h3test.requests import Generate, RequestFile, generate_header, reason, specs, stack

T2VA = RequestFile(GOLDEN / "inputs/t2va.safetensors")
TEXT = T2VA.conditions["text"].tobytes()
HEADER = generation.GenerateRequest(header=generate_header(T2VA, [], T2VA.conditions, seed=1, evaluations=1))


def chunk(**fields):
    return generation.GenerateRequest(chunk=types.TensorChunk(**fields))


def refused(channel, messages):
    """(code, reason) of a Generate call with these messages; a normal one is served after it."""
    with pytest.raises(grpc.RpcError) as caught:
        list(generation_grpc.GenerationStub(channel).Generate(iter(messages), timeout=10))
    assert Generate(channel, T2VA, seed=1, evaluations=1).run().completed
    return reason(caught.value)


BROKEN = {
    "nothing": [],
    "chunk before the header": [chunk(tensor=0, data=TEXT)],
    "two headers": [HEADER, HEADER],
    "gap": [HEADER, chunk(tensor=0, offset=8, data=TEXT[8:])],
    "unknown tensor": [HEADER, chunk(tensor=9, data=TEXT)],
    "more bytes than announced": [HEADER, chunk(tensor=0, data=TEXT + b"1234")],
    "fewer bytes than announced": [HEADER, chunk(tensor=0, data=TEXT)],
    "chunk of more than 1 MiB": [HEADER, chunk(tensor=0, data=bytes((1 << 20) + 4))],
    "empty message": [generation.GenerateRequest()],
}


@pytest.mark.parametrize("name", BROKEN)
def test_messages_that_break_the_grammar_are_refused(channel, name):
    code, why = refused(channel, BROKEN[name])
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert why in ("BAD_REQUEST", "BAD_TENSOR")


def test_a_bad_header_is_refused_before_its_tensors_are_sent(channel):
    header = generate_header(T2VA, stack(("lora/absent", 1.0)), T2VA.conditions, seed=1, evaluations=1)

    answered = threading.Event()

    def header_then_silence():
        yield generation.GenerateRequest(header=header)
        answered.wait(10)

    with pytest.raises(grpc.RpcError) as caught:
        list(generation_grpc.GenerationStub(channel).Generate(header_then_silence(), timeout=8))
    answered.set()
    assert reason(caught.value) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ADAPTER")


def test_a_request_of_ten_gigabytes_is_refused_by_its_header(channel):
    tokens = 10**10 // 160
    request = RequestFile(GOLDEN / "inputs/t2va.safetensors")
    request.layout.text_tokens = tokens
    header = generation.GenerateHeader(layout=request.layout, sampling=generation.Sampling(seed=1, evaluations=1), tensors=[
        types.TensorSpec(name="text", dtype=types.DTYPE_F32, shape=[tokens, 40], bytes=tokens * 160),
        types.TensorSpec(name="text_token_tags", dtype=types.DTYPE_I64, shape=[tokens], bytes=tokens * 8)])
    # Not RESOURCE_EXHAUSTED: trying again later would not help.
    code, why = refused(channel, [generation.GenerateRequest(header=header)])
    assert (code, why) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_TENSOR")


@pytest.mark.parametrize("change", [{"bytes": 7}, {"dtype": 99}, {"dtype": 0}, {"shape": [-7, -40]}, {"shape": [2**62, 2**62]}, {"name": "text_token_tags"}],
                         ids=str)
def test_a_spec_that_contradicts_itself_is_refused(channel, change):
    announced = specs(T2VA.conditions)
    text = next(spec for spec in announced if spec.name == "text")
    changed = types.TensorSpec(**{**{"name": "text", "dtype": types.DTYPE_F32, "shape": [7, 40], "bytes": 1120}, **change})
    text.CopyFrom(changed)
    header = generation.GenerateHeader(layout=T2VA.layout, sampling=generation.Sampling(seed=1, evaluations=1), tensors=announced)
    assert refused(channel, [generation.GenerateRequest(header=header)]) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_TENSOR")


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
