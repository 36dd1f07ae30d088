"""Many requests with other stacks and strengths: nothing of one is left for the next, not a bit and not a byte."""

import concurrent.futures
import hashlib
import os
import random
import shutil

import grpc
import numpy as np

from h3test import GOLDEN, metrics
from h3test.protos import adapters, adapters_grpc, operations, operations_grpc
from h3test.requests import Generate, RequestFile, reason, stack
from h3test.servers import wait_for

ADAPTERS = ["turbo_bare", "turbo_comfy_alpha4", "turbo_kohya_alpha4", "turbo_peft", "turbo_diffusers", "turbo_diffsynth", "style_bf16", "style_fp16_metaalpha",
            "edges_fp32", "split_qkv_ranks", "dora", "dora_columns", "lokr", "uneven", "complete_own_table", "complete_fixed_a"]
INPUTS = {name: RequestFile(GOLDEN / f"inputs/{name}.safetensors") for name in ("t2va", "t2va_wide", "fl2va_first_last", "ref2va_mixed")}


def random_request(random):
    entries = [(f"lora/{random.choice(ADAPTERS)}", round(random.uniform(-1.5, 1.5), 6)) for _ in range(random.randint(0, 4))]
    return random.choice(sorted(INPUTS)), entries, random.randint(1, 3), random.randint(0, 5)


def run(channel, request):
    name, entries, evaluations, seed = request
    return Generate(channel, INPUTS[name], stack(*entries), evaluations=evaluations, seed=seed).run().tensors


def memory(channel):
    return operations_grpc.OperationsStub(channel).GetMemory(operations.GetMemoryRequest()).devices[0]


def settled_memory(channel):
    """Once no request holds anything, which may be a moment after its client has the result."""
    wait_for(lambda: memory(channel).owners.activations == 0 and not any(it.pins for it in memory(channel).adapters), "requests have let go", 10)
    return memory(channel)


def allocated(server):
    """Bytes that were ever allocated for what a strength change must leave alone."""
    shown = metrics.values(server.worker_metrics)
    return {owner: shown[f'h3_vram_allocated_bytes_total{{device="cpu",owner="{owner}"}}'] for owner in ("base_weights", "adapters", "materialized", "caches")}


def test_200_random_requests_from_two_clients_equal_the_same_requests_alone(fresh_server):
    chance = random.Random(20)
    requests = [random_request(chance) for _ in range(200)]
    model = GOLDEN / "full/model.safetensors"

    alone = fresh_server(model, GOLDEN)
    with grpc.insecure_channel(alone.address) as channel:
        expected = [run(channel, request) for request in requests]

    together = fresh_server(model, GOLDEN)
    with grpc.insecure_channel(together.address) as first, grpc.insecure_channel(together.address) as second:
        run(first, ("t2va", [], 1, 0))  # Warm: what the process needs once.
        before = settled_memory(first)
        order = list(range(200))
        chance.shuffle(order)

        def client(channel, mine):
            return [(i, run(channel, requests[i])) for i in mine]

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            halves = [pool.submit(client, channel, order[k::2]) for k, channel in enumerate((first, second))]
            for half in halves:
                for i, tensors in half.result():
                    for name, value in tensors.items():
                        assert np.array_equal(value.view(np.int32), expected[i][name].view(np.int32)), (requests[i], name)
        after = settled_memory(first)

    assert after.base_fingerprint == before.base_fingerprint
    assert after.base_mutations == 0
    assert after.owners.base_weights == before.owners.base_weights
    resident = sum(adapter.bytes for adapter in after.adapters if adapter.tier == "device")
    assert after.owners.adapters == resident > 0
    # Live bytes: after = before + resident adapters, to the byte. Caches are bounded and have a line of their own.
    assert after.used_bytes - after.owners.caches == before.used_bytes - before.owners.caches + resident


def test_1000_strength_changes_allocate_nothing_for_weights_or_adapters(golden_server):
    names = ("lora/turbo_bare", "lora/style_bf16")
    with grpc.insecure_channel(golden_server.address) as channel:
        def with_strengths(first, second):
            return Generate(channel, INPUTS["t2va"], stack((names[0], first), (names[1], second)), evaluations=1, seed=1).run()

        with_strengths(1, 1)
        before, allocated_before = settled_memory(channel), allocated(golden_server)
        peaks, answers = set(), set()
        for i in range(1000):
            done = with_strengths(1 - i / 1000, 0.5 + i / 500)
            peaks.add(done.completed.peak_bytes)
            answers.add(done.tensors["video"].tobytes())
        after, allocated_after = settled_memory(channel), allocated(golden_server)
    assert len(answers) == 1000, "a strength had no effect"
    # Not even for a moment: counted are the bytes ever allocated, and the peak of every single run is the same.
    assert allocated_after == allocated_before
    assert len(peaks) == 1
    for owner in ("base_weights", "adapters", "materialized", "workspace", "staging", "unattributed"):
        assert getattr(after.owners, owner) == getattr(before.owners, owner), owner
    assert after.base_mutations == 0


def test_adapters_that_come_and_go_leave_other_requests_alone(fresh_server, tmp_path):
    """Loading, unloading and replacing in a loop, by file and by upload, while two clients generate with other adapters."""
    folder = tmp_path / "adapters"
    folder.mkdir()
    for name in ("turbo_bare", "style_bf16", "dora", "lokr"):
        shutil.copy(GOLDEN / f"lora/{name}.safetensors", folder)
    requests = [("t2va", [("turbo_bare", 0.7), ("dora", 0.4)], 3, 1), ("fl2va_first_last", [("style_bf16", -0.6), ("lokr", 0.3)], 2, 2)]

    def client(channel, request):
        name, entries, evaluations, seed = request
        return [Generate(channel, INPUTS[name], stack(*entries), evaluations=evaluations, seed=seed).run().tensors for _ in range(15)]

    server = fresh_server(GOLDEN / "full/model.safetensors", folder)
    with grpc.insecure_channel(server.address) as channel, grpc.insecure_channel(server.address) as churn:
        expected = [client(channel, request)[0] for request in requests]
        before = settled_memory(channel)
        busy = [True]

        def come_and_go():
            registry = adapters_grpc.AdaptersStub(churn)
            turns = 0
            while busy[0]:
                source = GOLDEN / f"lora/{('edges_fp32', 'split_qkv_ranks', 'uneven')[turns % 3]}.safetensors"
                shutil.copy(source, folder / "new")
                os.replace(folder / "new", folder / "changing.safetensors")
                registry.LoadAdapter(adapters.LoadAdapterRequest(name="changing"))
                registry.UnloadAdapter(adapters.UnloadAdapterRequest(name="changing"))
                content = source.read_bytes()
                header = adapters.UploadHeader(name="uploaded", bytes=len(content), digest=hashlib.sha256(content).hexdigest())
                registry.UploadAdapter(iter([adapters.UploadAdapterRequest(header=header), adapters.UploadAdapterRequest(chunk=content)]))
                registry.LoadAdapter(adapters.LoadAdapterRequest(name="uploaded"))
                registry.UnloadAdapter(adapters.UnloadAdapterRequest(name="uploaded"))
                turns += 1
            return turns

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            churning = pool.submit(come_and_go)
            runs = [pool.submit(client, channel, request) for request in requests]
            for run_of, answer in zip(runs, expected):
                for tensors in run_of.result():
                    for name, value in tensors.items():
                        assert np.array_equal(value.view(np.int32), answer[name].view(np.int32)), name
            busy[0] = False
            assert churning.result() > 3
        after = settled_memory(channel)
    assert after.owners.adapters == before.owners.adapters
    assert after.base_mutations == 0


def test_the_order_of_a_stack_is_that_of_the_request(channel):
    """Up to rounding the order does not matter; that it is kept shows in the last bits, again and again the same."""
    entries = [("lora/turbo_bare", 0.6), ("lora/style_bf16", -0.35), ("lora/edges_fp32", 1.25)]
    forward = [run(channel, ("t2va", entries, 2, 1))["video"] for _ in range(3)]
    backward = [run(channel, ("t2va", entries[::-1], 2, 1))["video"] for _ in range(3)]
    for answers in (forward, backward):
        assert all(np.array_equal(answers[0], answer) for answer in answers)
    assert np.linalg.norm(forward[0] - backward[0]) <= 2e-6 * np.linalg.norm(forward[0])


def test_more_requests_than_may_wait_are_refused_and_all_others_are_served(small_h3, fresh_server):
    server = fresh_server(small_h3 / "h3-small.safetensors", small_h3 / "adapters", "--queue-capacity", "2")
    request = RequestFile(small_h3 / "request.safetensors")
    with grpc.insecure_channel(server.address) as channel:
        calls = [Generate(channel, request, seed=1, evaluations=8) for _ in range(6)]
        codes = []
        for call in calls:
            try:
                call.run()
                codes.append("OK")
            except grpc.RpcError as error:
                codes.append(reason(error)[1])
    assert set(codes) == {"OK", "QUEUE_FULL"}
    assert codes.count("OK") >= 3  # One ran, two waited.
