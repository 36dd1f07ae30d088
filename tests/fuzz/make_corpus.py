#!/usr/bin/env python3
"""Writes the seeds of tests/fuzz/corpus anew: `.deps/venv/bin/python tests/fuzz/make_corpus.py`.

Needs protoc for the requests in wire format.
"""

import json
import pathlib
import shutil
import struct
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden"
CORPUS = ROOT / "tests/fuzz/corpus"
LARGEST_SEED = 8 << 10
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1}
DTYPES = {"F64": "DTYPE_F64", "F32": "DTYPE_F32", "F16": "DTYPE_F16", "BF16": "DTYPE_BF16", "I64": "DTYPE_I64"}

# Options of adapter_fuzz.cc by seed, beside none; "P": on a pruned base.
ADAPTER_OPTIONS = {
    "complete_fixed_a": ["P"],
    "complete_fixed_b_comfy": ["P"],
    "complete_own_table": ["P", "PG"],
    "dora_columns": ["b"],
    "full_diff": ["M"],
    "bias_diff": ["M"],
    "style_bf16": ["0", "N", "f", "Fr"],
    "style_fp16_metaalpha": ["a", "A"],
    "time_embedder": ["P"],
    "turbo_bare": ["P", "PG", "PL", "Ri"],
    "turbo_comfy_alpha4": ["PG", "O", "N"],
    "turbo_diffsynth": ["s"],
    "turbo_diffusers": ["PGg", "PLu"],
}


def read(path):
    """Metadata and tensors {name: (dtype, shape, data)} of a safetensors file."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", None)
    data = content[8 + length :]
    return metadata, {name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])]) for name, t in header.items()}


def header_text(metadata, tensors):
    """The header of a file of these tensors, {name: (dtype, shape, ...)}, tiled anew."""
    header = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape, *_) in tensors.items():
        begin = end
        size = ELEMENT_BYTES[dtype]
        for n in shape:
            size *= n
        end += size
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return json.dumps(header, separators=(",", ":"))


def shorten(metadata, tensors, room):
    """Leaves modules out, those of later blocks first, until the header takes at most `room` bytes. A whole AdaLN projection
    stays: without one of them the file is another kind."""
    tensors = dict(tensors)
    for block in ("3", "2", "1"):
        for name in [n for n in tensors if f"blocks.{block}." in n or f"blocks_{block}_" in n]:
            if len(header_text(metadata, tensors)) <= room:
                return tensors
            if not name.endswith(("adaln_proj.linear.weight", "adaln_proj.linear.bias")):
                del tensors[name]
    assert len(header_text(metadata, tensors)) <= room
    return tensors


def small(tensors, room):
    """The first tensors whose data take at most `room` bytes."""
    kept, total = {}, 0
    for name, tensor in tensors.items():
        total += len(tensor[2])
        if total > room:
            break
        kept[name] = tensor
    return kept


def file_bytes(metadata, tensors):
    header = header_text(metadata, tensors).encode()
    return struct.pack("<Q", len(header)) + header + b"".join(t[2] for t in tensors.values())


def write(kind, name, content):
    if isinstance(content, str):
        content = content.encode()
    assert len(content) < LARGEST_SEED, (kind, name, len(content))
    (CORPUS / kind / name).write_bytes(content)


def adapters():
    for path in sorted([*GOLDEN.glob("lora/*.safetensors"), *GOLDEN.glob("reject/*.safetensors")]):
        yield path.stem, *read(path)


def safetensors_seeds():
    """Files, cut to their first tensors."""
    for name, metadata, tensors in adapters():
        write("safetensors", f"{name}.safetensors", file_bytes(metadata, small(tensors, 4 << 10)))
    write("safetensors", "golden_input.json", header_text(*read(GOLDEN / "inputs/ref2va_mixed.safetensors")))
    one = {"a": ("F32", [2, 3]), "b": ("I64", []), "c": ("U8", [0, 7])}
    good = header_text({"format": "pt"}, one)
    write("safetensors", "small.json", good)
    write("safetensors", "gap.json", good.replace("[24,32]", "[25,33]"))
    write("safetensors", "twice.json", good.replace('"c"', '"a"'))
    write("safetensors", "sparse.json", header_text(None, {"a": ("U8", [1 << 40]), "b": ("F64", [1 << 20, 0, 1 << 40])}))


PEFT_CONFIG = json.dumps(
    {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": True,
        "alpha_pattern": {"blocks\\.0\\..*qkv_proj": 16, "fc1": 2.5},
        "rank_pattern": {"out_proj": 2},
    }
)


def adapter_seeds():
    """The text of headers, whole where it fits, with options and adapter_config.json (see adapter_fuzz.cc)."""
    room = LARGEST_SEED - len(PEFT_CONFIG) - 32
    for name, metadata, tensors in adapters():
        text = header_text(metadata, shorten(metadata, tensors, room))
        write("adapter", f"{name}.txt", text + "\n")
        for options in ADAPTER_OPTIONS.get(name, []):
            write("adapter", f"{name}-{options}.txt", f"{text}\n{options}\n")
        if name in ("turbo_peft", "split_qkv_ranks"):
            write("adapter", f"{name}-config.txt", f"{text}\n\n{PEFT_CONFIG}")
        if name == "turbo_peft":
            declared = {"lora_adapter_metadata": PEFT_CONFIG, "ss_base_model": "fl2va"}
            write("adapter", f"{name}-metadata.txt", header_text(declared, shorten(declared, tensors, room)) + "\nF\n")
        if name == "lokr":
            flat = {}
            for full_name, tensor in tensors.items():
                module, _, part = full_name.removeprefix("diffusion_model.").rpartition(".")
                flat[f"lycoris_{module.replace('.', '_')}.{part}"] = tensor
            write("adapter", "lycoris.txt", header_text(None, flat) + "\n")
        if name == "uneven":
            # One file for both partitions.
            first, second = dict(list(tensors.items())[:8]), dict(list(tensors.items())[8:16])
            both = {f"transformer.{n}": t for n, t in first.items()} | {f"transformer_ref.{n}": t for n, t in second.items()}
            write("adapter", "both_partitions.txt", header_text(None, both) + "\nR\n")
    module = "diffusion_model.blocks.0.attn.qkv_proj"
    pair = {f"{module}.lora_A.weight": ("F32", [4, 64]), f"{module}.lora_B.weight": ("F32", [288, 4])}
    extra = {
        "alphas": {f"{module}.alpha": ("F32", []), "blocks.1.mlp.fc1.alpha": ("I64", [1])},
        "offsets": {"blocks.0.mlp.fc1.diff_b": ("F32", [224]), "final_layer.video_out.diff_b": ("BF16", [16])},
        "norms": {"blocks.0.norm1.diff": ("F32", [64]), "transformer_blocks.1.attn.norm_q.diff": ("F32", [24])},
        "kronecker": {
            "blocks.0.attn.out_proj.lokr_w1": ("F32", [8, 8]),
            "blocks.0.attn.out_proj.lokr_w2_a": ("F32", [8, 2]),
            "blocks.0.attn.out_proj.lokr_w2_b": ("F32", [2, 12]),
            "blocks.0.attn.out_proj.alpha": ("F16", []),
        },
        # Adapters' AdaLN pairs in the coordinates of their own table.
        "own_table_pairs": {
            "adaln_t_table": ("F32", [5, 3]),
            "blocks.0.adaln_proj.linear.lora_A.weight": ("F32", [2, 3]),
            "blocks.0.adaln_proj.linear.lora_B.weight": ("F32", [1152, 2]),
        },
        "unpaired_alpha": {"blocks.1.mlp.fc1.alpha": ("F32", [])},
        "no_elements": {
            "blocks.0.attn.out_proj.lokr_w1": ("F32", [1 << 31, 0]),
            "blocks.0.attn.out_proj.lokr_w2": ("F32", [1 << 31, 0]),
        },
    }
    for name, tensors in extra.items():
        text = header_text({"alpha": "4", "rank": "4"}, pair | tensors)
        write("adapter", f"{name}.txt", text + "\n")
        write("adapter", f"{name}-OPG.txt", f"{text}\nOPG\n")


def adapter_files():
    """Bytes of files: alphas of every type."""
    values = {"F64": struct.pack("<d", 2), "F32": struct.pack("<f", float("inf")), "F16": b"\x00\x40", "BF16": b"\x00\x40"}
    for dtype, alpha in (values | {"I64": struct.pack("<q", -1), "U8": b"\x04"}).items():
        module = "final_layer.audio_out"
        tensors = {
            f"{module}.lora_A.weight": ("BF16", [1, 64], bytes(128)),
            f"{module}.lora_B.weight": ("BF16", [6, 1], bytes(12)),
            f"{module}.alpha": (dtype, [], alpha),
        }
        write("adapter", f"alpha_{dtype}.safetensors", file_bytes(None, tensors))


def request_text(layout, tensors, rest):
    lines = ["layout {"]
    for keyframe in layout["keyframes"]:
        lines.append(f"  keyframes: KEYFRAME_{keyframe.upper()}")
    for reference in layout["refs"]:
        sizes = " ".join(f"{key}: {value}" for key, value in reference.items() if key != "kind")
        lines.append(f"  references {{ kind: REFERENCE_KIND_{reference['kind'].upper()} {sizes} }}")
    for key in ("text_tokens", "latent_frames", "latent_height", "latent_width", "audio_latents"):
        lines.append(f"  {key}: {layout[key]}")
    lines.append("}")
    for name, (dtype, shape, data) in tensors.items():
        sizes = " ".join(f"shape: {n}" for n in shape)
        lines.append(f'tensors {{ name: "{name}" dtype: {DTYPES[dtype]} {sizes} bytes: {len(data)} }}')
    return "\n".join([*lines, *rest]) + "\n"


# What a header holds beside its layout and its tensors.
VARIANTS = {
    "plain": ["sampling { seed: 7 evaluations: 4 }"],
    "noise": [
        "sampling { noise_from_request: true evaluations: 3 schedule: SCHEDULE_NORMAL video_shift: 12 audio_shift: 3 }",
        "priority: PRIORITY_HIGH",
    ],
    "sigmas": [
        "sampling { seed: 1 video_sigmas: 1 video_sigmas: 0.5 video_sigmas: 0",
        "  audio_sigmas: 0.9 audio_sigmas: 0.25 audio_sigmas: 0 }",
    ],
    "stack": [
        "sampling { seed: 1 evaluations: 2 video_shift: 0.001 }",
        'stack { adapter: "style" strength: 0.8 alpha: 4 per_evaluation: 1 per_evaluation: 0.25',
        "  factors { video: 1 text: 0.5 audio: -1 } }",
        'stack { adapter: "sha256:00" digest: "00" strength: -1 leave_out: "adaln" apply: APPLY_MATERIALIZED',
        "  auto_strength { floor: 0.5 ceiling: 2 } }",
        'stack { adapter: "a/b" strength: 0 settings { alpha: 2 qkv_layout: QKV_LAYOUT_INTERLEAVED',
        '  fc1_order: FC1_ORDER_UP_FIRST partition: PARTITION_FL2VA peft_config: "{}" } }',
        'request_id: "r-1" model: "tiny"',
    ],
}


def request_seeds():
    for path in sorted(GOLDEN.glob("inputs/*.safetensors")):
        metadata, tensors = read(path)
        layout = json.loads(metadata["layout"])
        sent = {n: t for n, t in tensors.items() if n in ("text", "text_token_tags") or n.startswith("condition_")}
        targets = {n: t for n, t in tensors.items() if n in ("target_video", "target_audio_rows")}
        for name, rest in VARIANTS.items():
            text = request_text(layout, sent | targets if name == "noise" else sent, rest)
            encoded = subprocess.run(
                ["protoc", f"-I{ROOT}/proto", "--encode=h3.v1.GenerateHeader", "h3/v1/generation.proto"],
                input=text.encode(),
                stdout=subprocess.PIPE,
                check=True,
            ).stdout
            write("request", f"{path.stem}-{name}.textproto", text)
            write("request", f"{path.stem}-{name}.binpb", encoded)


def main():
    for kind in ("safetensors", "adapter", "request"):
        shutil.rmtree(CORPUS / kind, ignore_errors=True)
        (CORPUS / kind).mkdir(parents=True)
    safetensors_seeds()
    adapter_seeds()
    adapter_files()
    request_seeds()
    seeds = [path for path in CORPUS.rglob("*") if path.is_file()]
    total = sum(path.stat().st_size for path in seeds)
    assert total < 500 << 10, total
    print(f"{len(seeds)} seeds, {total} bytes")


if __name__ == "__main__":
    main()
