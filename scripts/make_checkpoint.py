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

import torch
from safetensors import safe_open
from safetensors.torch import save_file


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


def make_checkpoint(path, s: Sizes, pruned: bool, dtype, seed: int):
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape, scale=1.0, to=torch.float32):
        return (torch.randn(*shape, generator=generator) * scale).to(to)

    tensors = {}
    for name, out, inp, bias, keep in linears(s, pruned):
        to = torch.float32 if keep else dtype
        # Modulation and residual branches small, as in a trained model: the stream neither dies nor explodes.
        scale = {"adaln_proj.linear": 0.3, "attn.out_proj": 0.5, "mlp.fc2": 0.5}.get(".".join(name.split(".")[-2:]), 1.0)
        tensors[f"{name}.weight"] = noise(out, inp, scale=scale * inp**-0.5, to=to)
        if bias:
            tensors[f"{name}.bias"] = noise(out, scale=0.1, to=to)
    for i in range(s.refiner_blocks):
        norms(tensors, f"token_refiner.blocks.{i}", s, dtype)
    for i in range(s.blocks):
        norms(tensors, f"blocks.{i}", s, dtype)
    tensors["token_refiner.final_norm.weight"] = torch.ones(s.hidden, dtype=dtype)
    tensors["final_layer.norm.weight"] = torch.ones(s.hidden, dtype=dtype)
    if pruned:
        tensors["adaln_t_table"] = noise(s.curve_rows, s.curve_width).cumsum(0) * s.curve_rows**-0.5
    n = s.rope_frequencies
    tensors["rope.inv_freq"] = 1.0 / (10000.0 ** (torch.arange(0, 2 * n, 2, dtype=torch.float32) / (2 * n)))
    save_file(tensors, str(path))


def norms(tensors, prefix, s: Sizes, dtype):
    for name, size in (("norm1", s.hidden), ("norm2", s.hidden), ("attn.q_norm", s.head_dim), ("attn.k_norm", s.head_dim)):
        tensors[f"{prefix}.{name}.weight"] = torch.ones(size, dtype=dtype)


def make_adapter(path, model, rank: int, adaln_rank: int, spelling: str, alpha, dtype, strength: float, seed: int):
    """`strength`: rms of the delta against that of the weight, at strength 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    with safe_open(str(model), "pt") as file:
        for key in file.keys():
            module = key.removesuffix(".weight")
            is_adaln = "adaln_proj" in module
            if not (module.endswith(("qkv_proj", "out_proj", "fc1", "fc2")) or (is_adaln and key.endswith(".weight") and adaln_rank)):
                continue
            out, inp = file.get_slice(key).get_shape()
            r = adaln_rank if is_adaln else rank
            a = torch.randn(r, inp, generator=generator) * inp**-0.5
            b = torch.randn(out, r, generator=generator) * strength * r**-0.5
            if spelling == "kohya":
                name = "lora_unet_" + module.replace(".", "_")
                tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"] = a.to(dtype), b.to(dtype)
                tensors[f"{name}.alpha"] = torch.tensor(float(alpha if alpha is not None else r))
            else:
                name = f"diffusion_model.{module}"
                tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a.to(dtype), b.to(dtype)
                if alpha is not None:
                    tensors[f"{name}.alpha"] = torch.tensor(float(alpha))
    save_file(tensors, str(path))


def make_request(path, s: Sizes, tokens: int, frames: int, height: int, width: int, audio: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    layout = {
        "keyframes": [], "refs": [], "base_sigma": 0.6, "video_shift": 12.0, "audio_shift": 3.0, "text_tokens": tokens,
        "latent_frames": frames, "latent_height": height, "latent_width": width, "audio_latents": audio,
    }
    tensors = {
        "text": torch.randn(tokens, s.text_width, generator=generator),
        "text_token_tags": torch.ones(tokens, dtype=torch.int64),
        "target_video": torch.randn(1, s.video_channels, frames, height, width, generator=generator),
        "target_audio_rows": torch.randn(2 * audio, s.audio_channels, generator=generator),
    }
    save_file(tensors, str(path), metadata={"layout": json.dumps(layout)})


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
        make_checkpoint(model, sizes, False, torch.float32, 0)
        make_adapter(arguments.path / "adapters/turbo.safetensors", model, 64, 16, "comfy", None, torch.float32, 0.2, 1)
        make_adapter(arguments.path / "adapters/style.safetensors", model, 32, 0, "kohya", 16, torch.float32, 0.2, 2)
        make_request(arguments.path / "request.safetensors", sizes, 32, 5, 12, 16, 30, 3)
    elif arguments.command == "adapter":
        make_adapter(arguments.path, arguments.model, arguments.rank, arguments.adaln_rank, arguments.spelling, arguments.alpha,
                     getattr(torch, arguments.dtype), arguments.strength, arguments.seed)
    else:
        sizes = dataclasses.replace(TRUE_WIDTH if arguments.true_width else Sizes())
        for field in dataclasses.fields(Sizes):
            if (value := getattr(arguments, field.name)) is not None:
                setattr(sizes, field.name, value)
        if arguments.command == "checkpoint":
            make_checkpoint(arguments.path, sizes, arguments.pruned, getattr(torch, arguments.dtype), arguments.seed)
        else:
            make_request(arguments.path, sizes, arguments.tokens, arguments.frames, arguments.height, arguments.width, arguments.audio, arguments.seed)


if __name__ == "__main__":
    main()
