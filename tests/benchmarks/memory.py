#!/usr/bin/env python3
"""Peak activation bytes of one model evaluation: H3 Serve against diffusers, in one run on one machine.

    H3_BIN=build/release/bin .deps/venv/bin/python tests/benchmarks/memory.py [--hidden 2688 --heads 28 ...] [--json]
    .deps/venv/bin/python tests/benchmarks/memory.py --server-bin build/first/bin --server-bin build/release/bin

Both run the same checkpoint, inputs and timesteps; what they answer is compared, and where it differs there is no ratio. What
counts is what the tensor allocator has handed out beyond what was live before: not the base, not the adapter.

  diffusers   one forward of MiniMaxH3Transformer3DModel under inference_mode, by the allocator events of torch.profiler. Its
              inputs are live before. The LoRA is loaded with load_lora_adapter (PEFT, not merged).
  H3 Serve    Completed.peak_bytes of a generation with one evaluation, less what was used before. Text, start rows and the
              results are in it.

diffusers gets a virtual environment of its own (--venv), made where it is missing. Not a test: nothing is asserted. The model is
made of random weights; sizes decide.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "integration"))

import numpy as np
from safetensors.numpy import load_file

from h3test import BIN, ROOT
from h3test.golden import relative_l2

# The opponent; its torch is the one that the server's LibTorch is from.
OPPONENT = ["diffusers==0.42.1", "peft==0.21.2", "transformers==5.25.0", "accelerate==1.16.0"]
# The released proportions at half the width.
MODEL = dict(hidden=2688, blocks=1, refiner_blocks=1, heads=28, head_dim=128, ffn=7168, video_channels=24, audio_channels=32, text_width=2560,
             time_input=256, time_hidden=2688, adaln_width=1344, rope_frequencies=16)
LAYOUT = dict(tokens=256, frames=12, height=48, width=56, audio=64)
SMALL = dict(tokens=16, frames=1, height=8, width=8, audio=4)
DTYPES = ("bfloat16", "float32")
KINDS = ("base", "lora")
# Of the measured evaluation, and of the requests before it: no modulation is found in a cache.
SIGMAS = {"video": 0.875, "audio": 0.75}
OTHER_SIGMAS = {"video": 0.5, "audio": 0.25}
# Relative L2 up to which two answers are of the same function, rounded differently.
SAME = {"bfloat16": 2e-2, "float32": 1e-5}
MIB = 1 << 20


def opponent_python(folder):
    """The interpreter of the opponent's environment, which is made or brought up to date first."""
    python, stamp = folder / "bin/python", folder / "stamp"
    ours = [ROOT / "scripts" / name for name in ("requirements.txt", "requirements-torch.txt")]
    wanted = "\n".join([path.read_text() for path in ours] + OPPONENT)
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"setting up {folder} (takes some minutes)", file=sys.stderr, flush=True)
        if not python.exists():
            subprocess.run(["/usr/bin/python3", "-m", "venv", folder], check=True)
        files = [argument for path in ours for argument in ("-r", path)]
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *files, *OPPONENT], check=True, stdout=sys.stderr)
        stamp.write_text(wanted)
    return python


class Peak:
    """Most bytes that were live at once, beyond those live at the start, by the allocator's own events."""

    def __enter__(self):
        from torch.profiler import ProfilerActivity, profile

        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *failure):
        self.seconds = time.perf_counter() - self._start
        self._profile.__exit__(*failure)
        events = [event for event in self._profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        self.bytes = int(np.max(np.cumsum([event.nbytes() for event in events]), initial=0))


def convert(job):
    """Runs in the opponent's environment: makes a diffusers directory of a single file, every tensor in the type it has."""
    from diffusers.loaders.single_file_utils import convert_minimax_h3_transformer_checkpoint_to_diffusers
    from safetensors.torch import load_file, save_file

    folder, config = pathlib.Path(job["model"]), job["config"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_class_name": "MiniMaxH3Transformer3DModel", **config}))
    tensors = convert_minimax_h3_transformer_checkpoint_to_diffusers(load_file(job["checkpoint"]), config)
    save_file({name: value.clone() for name, value in tensors.items()}, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})


def evaluate(job):
    """Runs in the opponent's environment: an evaluation without and with the adapter. Velocities go to files, figures to stdout."""
    import diffusers
    import peft
    import torch
    from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_minimax_h3_lora_to_diffusers as to_diffusers
    from diffusers.modular_pipelines.minimax_h3.before_denoise import (MiniMaxH3PrepareLayoutStep, MiniMaxH3SetTimestepsStep,
                                                                       patchify_video_latents)
    from safetensors.torch import load_file, save_file

    dtype = getattr(torch, job["dtype"])
    model = diffusers.MiniMaxH3Transformer3DModel.from_pretrained(job["model"], torch_dtype=dtype).eval()

    def inputs(path, sizes, sigmas):
        tensors, patch = load_file(path), model.config.patch_size
        positions, tags, video, audio, text, *conditions = MiniMaxH3PrepareLayoutStep.build_packed_sequence(
            tensors["text_token_tags"], sizes["frames"], sizes["height"], sizes["width"], sizes["audio"], patch, 2, 2, 0)
        timestep, indices = MiniMaxH3SetTimestepsStep.build_row_timesteps(
            video, audio, *conditions, len(text), 1 - sigmas["video"], 1 - sigmas["audio"], 1, 1)
        return dict(hidden_states=patchify_video_latents(tensors["target_video"], patch)[None], audio_hidden_states=tensors["target_audio_rows"][None],
                    encoder_hidden_states=tensors["text"][None].to(dtype), timestep=timestep, timestep_indices=indices, token_tags=tags,
                    position_ids=positions, video_indices=video, audio_indices=audio, text_indices=text)

    warm, measured = inputs(job["small_request"], job["small"], OTHER_SIGMAS), inputs(job["request"], job["layout"], SIGMAS)
    figures = {"versions": {module.__name__: module.__version__ for module in (diffusers, peft, torch)}}
    for kind in KINDS:
        if kind == "lora":
            adapter = to_diffusers({name: value.to(dtype) for name, value in load_file(job["adapter"]).items()})
            model.load_lora_adapter(adapter, prefix="transformer")
        with torch.inference_mode():
            model(**warm)
            with Peak() as peak:
                video, audio = model(**measured, return_dict=False)
        save_file({"video": video[0].float(), "audio": audio[0].float()}, job["answers"][kind])
        figures[kind] = {"peak_bytes": peak.bytes, "seconds": peak.seconds}
    print(json.dumps(figures))


def measure_server(folder, timeout, files, dtype, start):
    """The same of a server: figures and velocities without and with the adapter, or why there are none."""
    import grpc
    from h3test import servers
    from h3test.protos import operations, operations_grpc
    from h3test.requests import Generate, RequestFile, stack

    def schedule(sigmas):
        return {"noise_from_request": True, **{f"{stream}_sigmas": [sigma, 0] for stream, sigma in sigmas.items()}}

    def settled(channel):
        """The memory of the device once nothing is left of the requests before; a report may be of a moment ago."""
        memory = operations_grpc.OperationsStub(channel).GetMemory(operations.GetMemoryRequest()).devices[0]
        owners = memory.owners
        return memory if memory.used_bytes and not (owners.activations or owners.workspace or owners.staging) else None

    servers.BIN = folder
    small, request = RequestFile(files["small_request"]), RequestFile(files["request"])
    result = {}
    try:
        with servers.Server(files["model"], files["adapter"].parent, "--dtype", dtype) as server, grpc.insecure_channel(server.address) as channel:
            for kind, entries in (("base", ()), ("lora", stack((files["adapter"].stem, 1)))):
                Generate(channel, small, entries, **schedule(OTHER_SIGMAS)).run()
                before = servers.wait_for(lambda: settled(channel), "a memory report without activations")
                done = Generate(channel, request, entries, timeout=timeout, **schedule(SIGMAS)).run()
                if not done.completed.peak_bytes:
                    result[kind] = {"missing": "reports no peak"}
                    continue
                result[kind] = {
                    "peak_bytes": done.completed.peak_bytes - before.used_bytes, "seconds": sum(done.completed.step_seconds),
                    # One step leads to x0 = x + sigma v.
                    "velocity": {stream: (done.tensors[stream] - start[stream]) / np.float32(sigma) for stream, sigma in SIGMAS.items()},
                }
    except (grpc.RpcError, AssertionError, TimeoutError, OSError) as error:
        reason = error.details() if isinstance(error, grpc.RpcError) else str(error)
        for kind in KINDS:
            result.setdefault(kind, {"missing": reason.strip().splitlines()[-1] if reason.strip() else type(error).__name__})
    return result


def worst(value, reference):
    return max(relative_l2(value[stream], reference[stream]) for stream in ("video", "audio"))


def make_files(folder, sizes, layout, rank):
    """The model as a single file, an adapter for it and two requests: one to measure, one that only wakes everything up."""
    make = [sys.executable, ROOT / "scripts/make_checkpoint.py"]
    flags = [flag for name, value in sizes.items() for flag in (f"--{name.replace('_', '-')}", str(value))]
    (folder / "adapters").mkdir()
    files = {"checkpoint": folder / "h3.safetensors", "model": folder / "transformer", "adapter": folder / "adapters/style.safetensors"}
    subprocess.run([*make, "checkpoint", files["checkpoint"], *flags, "--dtype", "bfloat16"], check=True)
    subprocess.run([*make, "adapter", files["adapter"], "--model", files["checkpoint"], "--rank", str(rank), "--strength", "1"], check=True)
    for name, wanted in (("request", layout), ("small_request", SMALL)):
        files[name] = folder / f"{name}.safetensors"
        extent = [flag for size, value in wanted.items() for flag in (f"--{size}", str(value))]
        subprocess.run([*make, "request", files[name], *flags, *extent], check=True)
    return files


def diffusers_config(sizes):
    return {"num_attention_heads": sizes["heads"], "attention_head_dim": sizes["head_dim"], "hidden_size": sizes["hidden"], "num_layers": sizes["blocks"],
            "num_refiner_layers": sizes["refiner_blocks"], "ffn_dim": sizes["ffn"], "in_channels": sizes["video_channels"],
            "audio_in_channels": sizes["audio_channels"], "patch_size": [1, 2, 2], "text_dim": sizes["text_width"], "freq_dim": sizes["time_input"],
            "time_embed_hidden_dim": sizes["time_hidden"], "time_embed_dim": sizes["adaln_width"], "rope_freq_dim": sizes["rope_frequencies"]}


def run_opponent(python, what, job):
    """The JSON that a function of this file prints in the opponent's environment."""
    done = subprocess.run([python, __file__, "--opponent", what, json.dumps(job, default=str)], capture_output=True, text=True,
                          env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if done.returncode != 0:
        sys.exit(f"diffusers could not {what}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def start_rows(request):
    """Start rows as the results have them: patches of 1 x 2 x 2, frame by frame."""
    tensors = load_file(request)
    _, channels, frames, height, width = tensors["target_video"].shape
    patches = tensors["target_video"].reshape(channels, frames, height // 2, 2, width // 2, 2).transpose(1, 2, 4, 0, 3, 5)
    return {"video": patches.reshape(-1, 4 * channels), "audio": tensors["target_audio_rows"]}


def run(options, sizes, layout):
    """Every figure: {"versions", "rows", "runs": [{"dtype", "kind", "diffusers", "servers": {name: ...}}]}."""
    python = opponent_python(options.venv)
    report = {"model": sizes, "layout": layout, "rank": options.rank, "threads": options.threads, "versions": None, "runs": []}
    with tempfile.TemporaryDirectory(dir=options.scratch) as text:
        folder = pathlib.Path(text)
        files = make_files(folder, sizes, layout, options.rank)
        run_opponent(python, "convert", {**files, "config": diffusers_config(sizes)})
        start = start_rows(files["request"])
        report["rows"] = layout["tokens"] + sum(len(rows) for rows in start.values())
        exact = {}
        for dtype in reversed(DTYPES):  # float32 first: bfloat16 is compared with it.
            answers = {kind: folder / f"{dtype}-{kind}.safetensors" for kind in KINDS}
            theirs = run_opponent(python, "evaluate", {**files, "dtype": dtype, "layout": layout, "small": SMALL, "answers": answers})
            report["versions"] = theirs.pop("versions")
            ours = {}
            for build in options.server_bin:
                name = str(build.relative_to(ROOT) if build.is_relative_to(ROOT) else build)
                ours[name] = measure_server(build, options.timeout, files, dtype, start)
            for kind in KINDS:
                velocity = load_file(answers[kind])
                exact.setdefault(kind, velocity)
                entry = {"dtype": dtype, "kind": kind, "diffusers": {**theirs[kind], "off_float32": worst(velocity, exact[kind])}, "servers": {}}
                for name, figures in ours.items():
                    line = entry["servers"][name] = figures[kind]
                    if "velocity" in line:
                        value = line.pop("velocity")
                        line["off_diffusers"], line["off_float32"] = worst(value, velocity), worst(value, exact[kind])
                        line["same_function"] = line["off_diffusers"] <= SAME[dtype]
                        if line["same_function"]:
                            line["ratio"] = line["peak_bytes"] / theirs[kind]["peak_bytes"]
                report["runs"].append(entry)
        report["lora_changes"] = worst(exact["lora"], exact["base"])
    return report


def show(report):
    m, shape = report["model"], report["layout"]
    print(f"hidden {m['hidden']}, {m['heads']} x {m['head_dim']} heads, ffn {m['ffn']}, {m['blocks']} blocks, {m['refiner_blocks']} refiner blocks, "
          f"AdaLN {m['adaln_width']}; {report['rows']:,} rows: {shape['tokens']} text, {2 * shape['audio']} audio, "
          f"{shape['frames']} x {shape['height'] // 2} x {shape['width'] // 2} video; {report['threads']} threads")
    print(", ".join(f"{name} {version}" for name, version in report["versions"].items()))
    print("Peak bytes of one evaluation beyond weights and adapters. Ratio: to diffusers. Differs: relative L2 of the velocities from diffusers'.")
    print(f"The LoRA (rank {report['rank']}) changes the velocities by {report['lora_changes']:.1e}.\n")
    names = list(report["runs"][0]["servers"])
    print(" " * 14 + f"{'diffusers':>23}" + "".join(f"{name[-42:]:>44}" for name in names))
    print(f"{'dtype':9}{'LoRA':5}{'bytes':>14}{'time':>9}" + f"{'bytes':>16}{'ratio':>8}{'differs':>10}{'time':>10}" * len(names))
    notes = []

    def server(ours):
        if "missing" in ours:
            notes.append(ours["missing"])
            return f"{f'not measured ({len(notes)})':>44}"
        ratio = f"{ours['ratio']:8.3f}" if ours["same_function"] else f"{'-':>8}"
        return f"{ours['peak_bytes']:16,}{ratio}{ours['off_diffusers']:10.1e}{ours['seconds']:8.1f} s"

    for entry in report["runs"]:
        theirs = entry["diffusers"]
        print(f"{entry['dtype']:9}{entry['kind'] == 'lora' and 'yes' or 'no':5}{theirs['peak_bytes']:14,}{theirs['seconds']:7.1f} s"
              + "".join(server(entry["servers"][name]) for name in names))
    for number, note in enumerate(notes, 1):
        print(f"({number}) {note}")
    if any("same_function" in ours and not ours["same_function"] for entry in report["runs"] for ours in entry["servers"].values()):
        print("No ratio where the answers are not of the same function.")
    for entry in report["runs"]:
        if entry["dtype"] == "bfloat16":
            off = {"diffusers": entry["diffusers"], **entry["servers"]}
            print(f"{'with' if entry['kind'] == 'lora' else 'without'} the LoRA, bfloat16 differs from diffusers' float32 by: "
                  + ", ".join(f"{name} {figures['off_float32']:.1e}" for name, figures in off.items() if "off_float32" in figures))


def main():
    if sys.argv[1:2] == ["--opponent"]:
        what, job = sys.argv[2:]
        return {"convert": convert, "evaluate": evaluate}[what](json.loads(job))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {**MODEL, **LAYOUT}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    parser.add_argument("--rank", type=int, default=64, help="of the LoRA; default 64")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of both; default: one for each core")
    parser.add_argument("--server-bin", action="append", type=lambda text: pathlib.Path(text).resolve(), metavar="DIR",
                        help="folder of h3-scheduler and h3-worker; several to compare builds. Default: H3_BIN")
    parser.add_argument("--venv", type=pathlib.Path, default=ROOT / "build/benchmark-venv", help="the opponent's environment; default build/benchmark-venv")
    parser.add_argument("--scratch", type=pathlib.Path, help="where the checkpoints are made for the time of a run; default: the system's folder")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="of an evaluation of a server; default 1800")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    options.server_bin = options.server_bin or [BIN]
    for build in options.server_bin:
        if not (build / "h3-scheduler").exists():
            parser.error(f"no h3-scheduler in {build}")
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    report = run(options, {name: getattr(options, name) for name in MODEL}, {name: getattr(options, name) for name in LAYOUT})
    if options.json:
        print(json.dumps(report))
    else:
        show(report)


if __name__ == "__main__":
    main()
