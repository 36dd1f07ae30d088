"""Requests over gRPC, as a Python client writes them: a header, the bytes of its tensors in chunks, and what comes back."""

import json
import queue
import re

import grpc
import numpy as np
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from safetensors import safe_open
from safetensors.numpy import load_file

from h3test.protos import generation, generation_grpc, types

CHUNK = 1 << 20
DTYPES = {np.dtype(np.float32): types.DTYPE_F32, np.dtype(np.int64): types.DTYPE_I64}
CONDITION = re.compile(r"text|text_token_tags|condition_(video|audio)\.\d+")
TARGETS = ("target_video", "target_audio_rows")


class RequestFile:
    """A request file: its layout as a message, its tensors by name, its base_sigma."""

    def __init__(self, path):
        with safe_open(path, "np") as file:
            layout = json.loads(file.metadata()["layout"])
        tensors = load_file(path)
        self.base_sigma = layout["base_sigma"]
        self.conditions = {name: value for name, value in tensors.items() if CONDITION.fullmatch(name)}
        self.targets = {name: tensors[name] for name in TARGETS}
        sizes = ("text_tokens", "latent_frames", "latent_height", "latent_width", "audio_latents")
        self.layout = types.Layout(
            keyframes=[types.Keyframe.Value(f"KEYFRAME_{name.upper()}") for name in layout["keyframes"]],
            references=[types.Reference(kind=types.ReferenceKind.Value(f"REFERENCE_KIND_{it.pop('kind').upper()}"), **it) for it in layout["refs"]],
            **{size: layout[size] for size in sizes})


def stack(*entries):
    """("style", 0.5) pairs as a stack."""
    return [types.StackEntry(adapter=name, strength=strength) for name, strength in entries]


def specs(tensors):
    return [types.TensorSpec(name=name, dtype=DTYPES[value.dtype], shape=value.shape, bytes=value.nbytes) for name, value in tensors.items()]


def chunks(message, tensors):
    for index, value in enumerate(tensors.values()):
        data = value.tobytes()
        for offset in range(0, len(data), CHUNK):
            yield message(chunk=types.TensorChunk(tensor=index, offset=offset, data=data[offset:offset + CHUNK]))


class Assembler:
    """The tensors that a ResultHeader or EvaluationResult announces, from the chunks that follow."""

    def __init__(self, announced):
        self._specs = announced
        self._data = [bytearray() for _ in announced]

    def add(self, chunk):
        assert chunk.offset == len(self._data[chunk.tensor]), "a gap between chunks"
        assert len(chunk.data) <= CHUNK
        self._data[chunk.tensor].extend(chunk.data)

    @property
    def complete(self):
        return all(len(data) == spec.bytes for data, spec in zip(self._data, self._specs))

    def tensors(self):
        assert self.complete
        return {spec.name: np.frombuffer(bytes(data), np.float32).reshape(spec.shape) for data, spec in zip(self._data, self._specs)}


def generate_header(request, stack, tensors, **sampling):
    return generation.GenerateHeader(layout=request.layout, stack=stack, tensors=specs(tensors), sampling=generation.Sampling(**sampling))


class Generate:
    """A Generate call. Iterate over it for its events; then `tensors`, and the events by kind."""

    def __init__(self, channel, request, stack=(), *, timeout=120, **sampling):
        tensors = {**request.conditions, **(request.targets if "noise_from_request" in sampling else {})}
        header = generate_header(request, stack, tensors, **sampling)

        def messages():
            yield generation.GenerateRequest(header=header)
            yield from chunks(generation.GenerateRequest, tensors)

        self.call = generation_grpc.GenerationStub(channel).Generate(messages(), timeout=timeout)
        self.kinds = []
        self.accepted = self.completed = self.tensors = None

    def __iter__(self):
        for response in self.call:
            kind = response.WhichOneof("event")
            self.kinds.append(kind)
            event = getattr(response, kind)
            if kind == "accepted":
                self.accepted = event
            elif kind == "result":
                assembler = Assembler(event.tensors)
            elif kind == "chunk":
                assembler.add(event)
            elif kind == "completed":
                self.completed = event
                self.tensors = assembler.tensors()
            yield kind, event

    def run(self):
        for _ in self:
            pass
        return self


class Session:
    """An Evaluate call: evaluate() as often as wanted, then close()."""

    def __init__(self, channel, request, stack=(), *, include_condition_rows=False, timeout=120):
        self._messages = queue.Queue()
        header = generation.EvaluateHeader(layout=request.layout, stack=stack, tensors=specs(request.conditions),
                                           include_condition_rows=include_condition_rows)
        self._send(generation.EvaluateRequest(header=header))
        for message in chunks(generation.EvaluateRequest, request.conditions):
            self._send(message)
        self.call = generation_grpc.GenerationStub(channel).Evaluate(iter(self._messages.get, None), timeout=timeout)
        self.accepted = next(self.call).accepted
        assert next(self.call).WhichOneof("event") == "ready"

    def _send(self, message):
        self._messages.put(message)

    def evaluate(self, tensors, **point):
        """{"video", "audio"} velocities."""
        self._send(generation.EvaluateRequest(evaluation=generation.Evaluation(tensors=specs(tensors), **point)))
        for message in chunks(generation.EvaluateRequest, tensors):
            self._send(message)
        assembler = Assembler(next(self.call).result.tensors)
        while not assembler.complete:
            assembler.add(next(self.call).chunk)
        return assembler.tensors()

    def close(self):
        self._messages.put(None)
        assert list(self.call) == []


def reason(error: grpc.RpcError):
    """(code, reason) of a refusal."""
    status = rpc_status.from_call(error)
    info = error_details_pb2.ErrorInfo()
    for detail in status.details if status else ():
        if detail.Unpack(info):
            return error.code(), info.reason
    return error.code(), None
