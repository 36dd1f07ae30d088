#!/usr/bin/env python3
"""DoRA at run time against a merged copy, in one run on one machine: the same answers, what each holds, what each waits for.

    H3_BIN=build/release/bin .deps/venv/bin/python tests/benchmarks/dora.py [--hidden 768 --blocks 8 ...]

Not a test: nothing is asserted. The model is made of random weights; sizes decide.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integration"))

import grpc
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from h3test import ROOT
from h3test.golden import relative_l2
from h3test.protos import operations, operations_grpc, types
from h3test.requests import Generate, RequestFile, stack
from h3test.servers import Server


def make_dora(model, plain, path, columns):
    """Gives a plain adapter magnitudes near the norms of its weights, as a trained one has."""
    tensors = {}
    with safe_open(model, "pt") as base, safe_open(plain, "pt") as adapter:
        for name in adapter.keys():
            if "adaln" in name:
                continue
            tensors[name] = adapter.get_tensor(name)
            if not name.endswith(".lora_A.weight"):
                continue
            module = name.removesuffix(".lora_A.weight")
            weight = base.get_tensor(module.removeprefix("diffusion_model.") + ".weight").float()
            norms = weight.norm(dim=0, keepdim=True) if columns else weight.norm(dim=1, keepdim=True)
            tensors[module + ".dora_scale"] = norms * (1 + 0.05 * torch.randn(norms.shape, generator=torch.Generator().manual_seed(1)))
    save_file(tensors, path)


def memory(channel):
    return operations_grpc.OperationsStub(channel).GetMemory(operations.GetMemoryRequest()).devices[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(hidden=768, blocks=8, refiner_blocks=2, heads=8, head_dim=128, ffn=2048, rank=64).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = parser.parse_args()
    sizes = [f for name, value in vars(options).items() if name != "rank" for f in (f"--{name.replace('_', '-')}", str(value))]
    with tempfile.TemporaryDirectory() as text:
        folder = pathlib.Path(text)
        make = [sys.executable, ROOT / "scripts/make_checkpoint.py"]
        model, request_path = folder / "h3.safetensors", folder / "request.safetensors"
        subprocess.run([*make, "checkpoint", model, *sizes], check=True)
        subprocess.run([*make, "adapter", folder / "plain.safetensors", "--model", model, "--rank", str(options.rank), "--alpha", str(options.rank)],
                       check=True)
        subprocess.run([*make, "request", request_path, *sizes, "--tokens", "64", "--frames", "4", "--height", "32", "--width", "32", "--audio", "16"],
                       check=True)
        make_dora(model, folder / "plain.safetensors", folder / "rows.safetensors", columns=False)
        make_dora(model, folder / "plain.safetensors", folder / "columns.safetensors", columns=True)
        request = RequestFile(request_path)
        for kind in ("rows", "columns"):
            answers = {}
            for apply in ("bypass", "materialized"):
                with Server(model, folder, "--dtype", "float32", "--materialized-idle", "64GiB") as server, grpc.insecure_channel(server.address) as channel:
                    def run(strength):
                        entries = stack((kind, strength))
                        entries[0].apply = types.APPLY_MATERIALIZED if apply == "materialized" else types.APPLY_BYPASS
                        done = Generate(channel, request, entries, evaluations=2, seed=1).run()
                        return done.tensors["video"], done.completed

                    Generate(channel, request, evaluations=1, seed=1).run()  # Warm: threads, pages of the base.
                    base = Generate(channel, request, evaluations=2, seed=1).run().completed
                    answers[apply], first = run(0.8)
                    held = memory(channel).owners
                    _, again = run(0.8)
                    _, changed = run(0.5)
                    show = lambda done: f"{done.prepare_seconds + done.step_seconds[0]:7.2f} s"
                    print(f"{kind:8} {apply:13} to the first step: first request {show(first)}, again {show(again)}, other strength {show(changed)}, "
                          f"base alone {show(base)}; a step {np.median(again.step_seconds):.2f} s (base {np.median(base.step_seconds):.2f} s); "
                          f"materialized {held.materialized:,} B, caches {held.caches:,} B, peak over the base's {first.peak_bytes - base.peak_bytes:,} B",
                          flush=True)
            print(f"{kind:8} run time against merged: relative L2 {relative_l2(answers['bypass'], answers['materialized']):.2e}", flush=True)


if __name__ == "__main__":
    main()
