"""The bound that a request is admitted by, against what it was measured to take."""

import random
import statistics
import types as plain

import grpc
import numpy as np
import pytest

from h3test import GOLDEN
from h3test.protos import operations, operations_grpc, types
from h3test.requests import Generate

ADAPTERS = ("turbo_bare", "style_bf16", "edges_fp32", "split_qkv_ranks", "dora", "dora_columns", "lokr", "uneven", "turbo_kohya_alpha4")
TEXT_WIDTH = 40


def request_of(draw):
    sizes = dict(text_tokens=draw.randint(1, 60), latent_frames=draw.randint(2, 16), latent_height=2 * draw.randint(4, 16),
                 latent_width=2 * draw.randint(4, 16), audio_latents=draw.randint(1, 60))
    tokens = sizes["text_tokens"]
    conditions = {"text": np.ones((tokens, TEXT_WIDTH), np.float32), "text_token_tags": np.ones(tokens, np.int64)}
    return plain.SimpleNamespace(layout=types.Layout(**sizes), conditions=conditions, targets={})


def entry_of(draw):
    entry = types.StackEntry(adapter=f"lora/{draw.choice(ADAPTERS)}", strength=draw.uniform(-1, 1))
    if draw.random() < 0.3:
        entry.factors.audio = draw.choice((0.0, 0.5))
    if draw.random() < 0.15 and "dora" not in entry.adapter and "lokr" not in entry.adapter:
        entry.apply = types.APPLY_MATERIALIZED
    return entry


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("workspace", ["256MiB", "1MiB"])
def test_no_request_takes_more_than_was_planned(serve, dtype, workspace):
    server = serve(GOLDEN / "full/model.safetensors", "--dtype", dtype, "--workspace", workspace)
    draw = random.Random(f"{dtype}{workspace}")
    ratios = []
    with grpc.insecure_channel(server.address) as channel:
        memory = operations_grpc.OperationsStub(channel)
        while len(ratios) < 30:
            call = Generate(channel, request_of(draw), [entry_of(draw) for _ in range(draw.randint(0, 3))], seed=1,
                            evaluations=draw.randint(1, 4))
            before = memory.GetMemory(operations.GetMemoryRequest()).devices[0]
            resting = before.owners.base_weights
            try:
                call.run()
            except grpc.RpcError as error:
                assert "merged" in error.details() or "materialized" in error.details(), error.details()
                continue
            completed = call.completed
            assert completed.planned_peak_bytes >= completed.peak_bytes, call.accepted
            ratios.append((completed.planned_peak_bytes - resting) / (completed.peak_bytes - resting))
    print(f"{dtype}, workspace {workspace}: planned / measured median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}")
    # A model this small shows every fixed allowance of the plan: up to 12 % measured in bfloat16, 2 % in float32.
    assert statistics.median(ratios) < 1.2
