#!/usr/bin/env python3
"""What the service adds to the engine's own time: one small request through client, scheduler and worker, from C++ and from Python.

    H3_BIN=build/release/bin .deps/venv/bin/python tests/benchmarks/overhead.py [--json]
    H3_BIN=build/release/bin .deps/venv/bin/python tests/benchmarks/overhead.py --server-bin build/first/bin   # Another server, the same client.

The request is one evaluation of the small model of tests/golden: about 3 ms of engine. Overhead of a request = from the call to its last
tensor, less the engine's prepare and denoise. With many clients a request also waits for its turn: there the rate counts. Server and
clients share the machine's cores. Not a test: nothing is asserted.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integration"))

import grpc
import numpy as np

import h3test
import h3test.servers
from h3test import BIN, GOLDEN
from h3test.protos import operations, operations_grpc
from h3test.requests import Generate, RequestFile


WARM = 20


def python_client(address, file, requests, start, out):
    request = RequestFile(file)
    samples = []
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        for i in range(-WARM, requests):
            if i == 0:
                start.wait()
                begin_all = time.time()
            begin = time.perf_counter()
            call = Generate(channel, request, evaluations=1, seed=7)
            for kind, _ in call:
                if kind == "accepted":
                    accepted = time.perf_counter() - begin
            seconds = time.perf_counter() - begin
            if i >= 0:
                samples.append(dict(seconds=seconds, accepted=accepted, engine=call.completed.prepare_seconds + call.completed.denoise_seconds))
    out.put((begin_all, time.time(), samples))


def from_python(address, request, clients, requests):
    context = multiprocessing.get_context("spawn")
    start, out = context.Barrier(clients), context.Queue()
    processes = [context.Process(target=python_client, args=(address, request, requests, start, out)) for _ in range(clients)]
    for process in processes:
        process.start()
    results = [out.get() for _ in processes]
    for process in processes:
        process.join()
    wall = max(end for _, end, _ in results) - min(begin for begin, _, _ in results)
    return wall, [sample for _, _, samples in results for sample in samples]


def from_cpp(address, request, clients, requests):
    output = subprocess.run([BIN / "h3-benchmark-overhead", "--server", address, "--request", request, "--clients", str(clients), "--requests", str(requests), "--warm", str(WARM)],
                            check=True, stdout=subprocess.PIPE, text=True).stdout
    *samples, total = map(json.loads, output.splitlines())
    return total["wall"], samples


def status_seconds(address, calls=500):
    """Median of a unary call from Python: what gRPC itself costs here."""
    with grpc.insecure_channel(address) as channel:
        stub, taken = operations_grpc.OperationsStub(channel), []
        for _ in range(calls):
            begin = time.perf_counter()
            stub.GetStatus(operations.GetStatusRequest())
            taken.append(time.perf_counter() - begin)
    return float(np.median(taken))


def figures(client, clients, wall, samples):
    overhead = [(it["seconds"] - it["engine"]) * 1e3 for it in samples]
    return dict(client=client, clients=clients, requests=len(samples), per_second=len(samples) / wall,
                engine_p50_ms=float(np.median([it["engine"] for it in samples])) * 1e3,
                accepted_p50_ms=float(np.median([it["accepted"] for it in samples])) * 1e3,
                overhead_p50_ms=float(np.percentile(overhead, 50)), overhead_p99_ms=float(np.percentile(overhead, 99)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500, help="of one client; with 64 they are shared among them, six times as many")
    parser.add_argument("--model", type=pathlib.Path, default=GOLDEN / "pruned/model.safetensors")
    parser.add_argument("--request", type=pathlib.Path, default=GOLDEN / "inputs/t2va.safetensors")
    parser.add_argument("--server-bin", type=pathlib.Path, default=BIN)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--python-clients", type=int, nargs="*", default=[1])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    h3test.servers.BIN = options.server_bin
    rows = []
    with h3test.servers.Server(options.model, GOLDEN) as server:
        status = status_seconds(server.address)
        for name, run, counts in (("C++", from_cpp, options.clients), ("Python", from_python, options.python_clients)):
            for clients in counts:
                requests = options.requests if clients == 1 else options.requests * 6 // clients
                rows.append(figures(name, clients, *run(server.address, options.request, clients, requests)))
    if options.json:
        return print(json.dumps(dict(status_p50_ms=status * 1e3, rows=rows)))
    print(f"a unary status call from Python: p50 {status * 1e3:.2f} ms; {os.cpu_count()} cores")
    print(f"{'client':8}{'clients':>8}{'requests':>10}{'per s':>8}{'engine p50':>12}{'accepted p50':>14}{'overhead p50':>14}{'p99 ms':>9}")
    for row in rows:
        print(f"{row['client']:8}{row['clients']:8}{row['requests']:10}{row['per_second']:8.0f}{row['engine_p50_ms']:12.2f}{row['accepted_p50_ms']:14.2f}"
              f"{row['overhead_p50_ms']:14.2f}{row['overhead_p99_ms']:9.2f}")


if __name__ == "__main__":
    main()
