#!/usr/bin/env python3
"""Makes a MiniMax-H3 checkpoint of the true format with random weights, adapters for it, and a request file.

  make_checkpoint.py demo DIR                 a small full model, two adapters and a request: what ./demo.sh runs
  make_checkpoint.py checkpoint FILE [sizes]  only a checkpoint; --true-width gives one block of the released width
  make_checkpoint.py adapter FILE --model M   a low-rank adapter for the linears of a checkpoint
  make_checkpoint.py request FILE [sizes]     a request file as h3ctl reads them

Names, shapes and types are those of the released files; the weights are noise, scaled so that activations stay of order one.
"""

import argparse
import dataclasses
import json
import pathlib

import numpy as np
from safetensors import safe_open


@dataclasses.dataclass
class Sizes:
    hidden: int = 768
    blocks: int = 6
    refiner_blocks: int = 2
    heads: int = 8
    head_dim: int = 128
    ffn: int = 2048
    video_channels: int = 24
    audio_channels: int = 32
    text_width: int = 512
    time_input: int = 256
    time_hidden: int = 768
    adaln_width: int = 384
    curve_rows: int = 1025
    curve_width: int = 8
    rope_frequencies: int = 16


TRUE_WIDTH = Sizes(hidden=5376, blocks=1, refiner_blocks=2, heads=56, head_dim=128, ffn=14336, text_width=5120, time_hidden=5376, adaln_width=2688)


def linears(s: Sizes, pruned: bool):
    """(name, out, in, has bias, stays float32) of every linear, in the order of the file."""
    inner = s.heads * s.head_dim
    adaln = s.curve_width if pruned else s.adaln_width

    def block(prefix):
        yield f"{prefix}.attn.qkv_proj", 3 * inner, s.hidden, False, False
        yield f"{prefix}.attn.out_proj", s.hidden, inner, False, False
        yield f"{prefix}.mlp.fc1", 2 * s.ffn, s.hidden, False, False
        yield f"{prefix}.mlp.fc2", s.hidden, s.ffn, False, False

    yield "video_patch_proj", s.hidden, 4 * s.video_channels, True, True
    yield "audio_patch_proj", s.hidden, s.audio_channels, True, True
    yield "condition_proj", s.hidden, s.text_width, True, False
    if not pruned:
        yield "time_embedder.proj_in", s.time_hidden, s.time_input, True, True
        yield "time_embedder.proj_out", s.adaln_width, s.time_hidden, True, True
    for i in range(s.refiner_blocks):
        yield from block(f"token_refiner.blocks.{i}")
    for i in range(s.blocks):
        yield from block(f"blocks.{i}")
        yield f"blocks.{i}.adaln_proj.linear", 18 * s.hidden, adaln, True, pruned
    yield "final_layer.adaln_proj.linear", 2 * s.hidden, adaln, True, pruned
    yield "final_layer.video_out", 4 * s.video_channels, s.hidden, True, True
    yield "final_layer.audio_out", s.audio_channels, s.hidden, True, True


class Noise:
    """Uniform noise of a given rms, the same for the same seed."""

    def __init__(self, seed: int):
        self._generator = np.random.default_rng(seed)

    def __call__(self, *shape, rms=1.0):
        values = self._generator.random(shape, np.float32)
        values -= np.float32(0.5)
        values *= np.float32(12**0.5 * rms)
        return values


def save(path, tensors, dtypes=None, metadata=None):
    """A safetensors file. `dtypes`: "bfloat16" by name, which numpy does not know; anything else is stored as it is."""
    header, blobs, offset = {}, [], 0
    if metadata:
        header["__metadata__"] = metadata
    for name, value in tensors.items():
        code = {"float32": "F32", "int64": "I64"}[str(value.dtype)]
        if (dtypes or {}).get(name) == "bfloat16":
            bits = np.ascontiguousarray(value).view(np.uint32)
            value, code = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), "BF16"  # To the nearest, ties to even.
        header[name] = {"dtype": code, "shape": value.shape, "data_offsets": [offset, offset + value.nbytes]}
        blobs.append(value)
        offset += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for blob in blobs:
            blob.tofile(file)


def make_checkpoint(path, s: Sizes, pruned: bool, dtype: str, seed: int):
    noise = Noise(seed)
    tensors, dtypes = {}, {}

    def add(name, value, keep=False):
        tensors[name] = value
        dtypes[name] = "float32" if keep else dtype

    for name, out, inp, bias, keep in linears(s, pruned):
        # Modulation and residual branches small, as in a trained model: the stream neither dies nor explodes.
        scale = {"adaln_proj.linear": 0.3, "attn.out_proj": 0.5, "mlp.fc2": 0.5}.get(".".join(name.split(".")[-2:]), 1.0)
        add(f"{name}.weight", noise(out, inp, rms=scale * inp**-0.5), keep)
        if bias:
            add(f"{name}.bias", noise(out, rms=0.1), keep)
    for prefix in [*(f"token_refiner.blocks.{i}" for i in range(s.refiner_blocks)), *(f"blocks.{i}" for i in range(s.blocks))]:
        for name, size in (("norm1", s.hidden), ("norm2", s.hidden), ("attn.q_norm", s.head_dim), ("attn.k_norm", s.head_dim)):
            add(f"{prefix}.{name}.weight", np.ones(size, np.float32))
    add("token_refiner.final_norm.weight", np.ones(s.hidden, np.float32))
    add("final_layer.norm.weight", np.ones(s.hidden, np.float32))
    if pruned:
        add("adaln_t_table", noise(s.curve_rows, s.curve_width, rms=s.curve_rows**-0.5).cumsum(0), keep=True)
    n = s.rope_frequencies
    add("rope.inv_freq", (1.0 / 10000.0 ** (np.arange(0, 2 * n, 2) / (2 * n))).astype(np.float32), keep=True)
    save(path, tensors, dtypes)


def make_adapter(path, model, rank: int, adaln_rank: int, spelling: str, alpha, dtype: str, strength: float, seed: int):
    """`strength`: rms of the delta against that of the weight, at strength 1."""
    noise = Noise(seed)
    tensors, dtypes = {}, {}
    with safe_open(str(model), "np") as file:
        shapes = {key.removesuffix(".weight"): file.get_slice(key).get_shape() for key in file.keys() if key.endswith(".weight")}
    for module, shape in shapes.items():
        is_adaln = "adaln_proj" in module
        if not (module.endswith(("qkv_proj", "out_proj", "fc1", "fc2")) or (is_adaln and adaln_rank)):
            continue
        out, inp = shape
        r = adaln_rank if is_adaln else rank
        if spelling == "kohya":
            name, down, up = "lora_unet_" + module.replace(".", "_"), "lora_down", "lora_up"
        else:
            name, down, up = f"diffusion_model.{module}", "lora_A", "lora_B"
        tensors[f"{name}.{down}.weight"] = noise(r, inp, rms=inp**-0.5)
        tensors[f"{name}.{up}.weight"] = noise(out, r, rms=strength * r**-0.5)
        dtypes[f"{name}.{down}.weight"] = dtypes[f"{name}.{up}.weight"] = dtype
        if alpha is not None or spelling == "kohya":
            tensors[f"{name}.alpha"] = np.array(r if alpha is None else alpha, np.float32)
    save(path, tensors, dtypes)


def make_request(path, s: Sizes, tokens: int, frames: int, height: int, width: int, audio: int, seed: int):
    noise = Noise(seed)
    layout = {
        "keyframes": [], "refs": [], "base_sigma": 0.6, "video_shift": 12.0, "audio_shift": 3.0, "text_tokens": tokens,
        "latent_frames": frames, "latent_height": height, "latent_width": width, "audio_latents": audio,
    }
    tensors = {
        "text": noise(tokens, s.text_width),
        "text_token_tags": np.ones(tokens, np.int64),
        "target_video": noise(1, s.video_channels, frames, height, width),
        "target_audio_rows": noise(2 * audio, s.audio_channels),
    }
    save(path, tensors, metadata={"layout": json.dumps(layout)})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo")
    demo.add_argument("path", type=pathlib.Path)
    checkpoint = commands.add_parser("checkpoint")
    request = commands.add_parser("request")
    for sub in (checkpoint, request):
        sub.add_argument("path", type=pathlib.Path)
        sub.add_argument("--true-width", action="store_true", help="one block and the refiner at the released sizes")
        for field in dataclasses.fields(Sizes):
            sub.add_argument("--" + field.name.replace("_", "-"), type=int)
        sub.add_argument("--seed", type=int, default=0)
    checkpoint.add_argument("--pruned", action="store_true")
    checkpoint.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    for name, value in (("tokens", 32), ("frames", 7), ("height", 12), ("width", 20), ("audio", 40)):
        request.add_argument(f"--{name}", type=int, default=value)
    adapter = commands.add_parser("adapter")
    adapter.add_argument("path", type=pathlib.Path)
    adapter.add_argument("--model", type=pathlib.Path, required=True)
    adapter.add_argument("--rank", type=int, default=64)
    adapter.add_argument("--adaln-rank", type=int, default=0)
    adapter.add_argument("--alpha", type=float)
    adapter.add_argument("--spelling", choices=["comfy", "kohya"], default="comfy")
    adapter.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    adapter.add_argument("--strength", type=float, default=0.2)
    adapter.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    if arguments.command == "demo":
        sizes = Sizes(hidden=512, blocks=4, heads=4, ffn=1408, time_hidden=512, adaln_width=256)
        arguments.path.mkdir(parents=True, exist_ok=True)
        (arguments.path / "adapters").mkdir(exist_ok=True)
        model = arguments.path / "h3-small.safetensors"
        make_checkpoint(model, sizes, False, "float32", 0)
        make_adapter(arguments.path / "adapters/turbo.safetensors", model, 64, 16, "comfy", None, "float32", 0.2, 1)
        make_adapter(arguments.path / "adapters/style.safetensors", model, 32, 0, "kohya", 16, "float32", 0.2, 2)
        make_request(arguments.path / "request.safetensors", sizes, 32, 5, 12, 16, 30, 3)
    elif arguments.command == "adapter":
        make_adapter(arguments.path, arguments.model, arguments.rank, arguments.adaln_rank, arguments.spelling, arguments.alpha,
                     arguments.dtype, arguments.strength, arguments.seed)
    else:
        sizes = dataclasses.replace(TRUE_WIDTH if arguments.true_width else Sizes())
        for field in dataclasses.fields(Sizes):
            if (value := getattr(arguments, field.name)) is not None:
                setattr(sizes, field.name, value)
        if arguments.command == "checkpoint":
            make_checkpoint(arguments.path, sizes, arguments.pruned, arguments.dtype, arguments.seed)
        else:
            make_request(arguments.path, sizes, arguments.tokens, arguments.frames, arguments.height, arguments.width, arguments.audio, arguments.seed)


if __name__ == "__main__":
    main()
