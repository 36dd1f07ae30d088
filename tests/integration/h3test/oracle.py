"""MiniMax-H3 in float64 numpy, with a stack of adapters patched into dense weights one entry after the other.

Slow, small and unlike the server on purpose: no low-rank shortcut, no sharing, no tiles. What it and the server agree on, two
readings of the same documents agree on. Rows, indices, tags, positions and timesteps are taken as the request file holds them.
"""

import json

import numpy as np

EPS = 1e-5
# Tags of rows, which are also the order of the modalities in a modulation.
VIDEO, TEXT, AUDIO = MODALITIES = range(3)
# Vectors of a block's modulation.
ATTENTION_SHIFT, ATTENTION_SCALE, ATTENTION_GATE, MLP_SHIFT, MLP_SCALE, MLP_GATE = range(6)

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64}
# What ends an adapter's tensor name, and the part that it is.
SUFFIXES = {
    ".lora_A.weight": "a", ".lora_down.weight": "a", ".lora_B.weight": "b", ".lora_up.weight": "b", ".alpha": "alpha",
    ".dora_scale": "magnitude", ".lora_magnitude_vector": "magnitude", ".diff_b": "offset", ".diff": "difference",
    ".lokr_w1_a": "w1_a", ".lokr_w1_b": "w1_b", ".lokr_w2_a": "w2_a", ".lokr_w2_b": "w2_b", ".lokr_w1": "w1", ".lokr_w2": "w2",
}
# Parts of reference names and what diffusers calls them; q, k, v and fc1 also differ in rows, see `places`.
DIFFUSERS = {
    "token_refiner.blocks.": "token_refiner.refiner_blocks.", ".attn.out_proj": ".attn.to_out.0", ".mlp.fc1": ".ff.net.0.proj",
    ".mlp.fc2": ".ff.net.2", "final_layer.adaln_proj.linear": "norm_out.linear", "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out", "video_patch_proj": "proj_in", "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder", "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
}


def read(path):
    """(tensors, metadata) of a safetensors file: floating point as float64, bfloat16 too, which numpy does not know."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        content = data[start + begin:start + end]
        if entry["dtype"] == "BF16":
            value = (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            value = np.frombuffer(content, DTYPES[entry["dtype"]])
        value = value.reshape(entry["shape"])
        tensors[name] = value.astype(np.float64) if value.dtype.kind == "f" else value
    return tensors, metadata


def places(weights):
    """Name in an adapter -> (module, the module's rows in the order in which the adapter has them)."""
    result = {}
    for name, weight in weights.items():
        if weight.ndim != 2 or not name.endswith(".weight"):
            continue
        module = name.removesuffix(".weight")
        rows = np.arange(weight.shape[0])
        result[module] = (module, rows)
        other = f"transformer_{module}" if module.startswith("blocks.") else module
        for reference, diffusers in DIFFUSERS.items():
            other = other.replace(reference, diffusers)
        if module.endswith(".attn.qkv_proj"):
            for letter, part in zip("qkv", np.split(rows, 3)):
                result[other.replace("qkv_proj", f"to_{letter}")] = (module, part)
        elif module.endswith(".mlp.fc1"):
            gate, up = np.split(rows, 2)
            result[other] = (module, np.concatenate([up, gate]))
        elif other != module:
            result[other] = (module, rows)
    return result


class Adapter:
    """A file by modules. `modules`: [(module, rows, parts)]; `curve`: the tensors of a complete adapter's modulation, or None;
    `own_table`: that which the file's AdaLN pairs are in the coordinates of, or None."""

    def __init__(self, path, weights):
        tensors, metadata = read(path)
        self.alpha = float(metadata["alpha"]) if "alpha" in metadata else None
        known = places(weights)
        flat = {name.replace(".", "_"): place for name, place in known.items()}
        modules, curve = {}, {}
        for name, value in tensors.items():
            for prefix in ("base_model.model.", "diffusion_model.", "transformer."):
                name = name.removeprefix(prefix)
            if name == "adaln_t_table" or name.endswith((".adaln_proj.linear.weight", ".adaln_proj.linear.bias")):
                curve[name] = value
                continue
            suffix = next(suffix for suffix in SUFFIXES if name.endswith(suffix))
            stem = name.removesuffix(suffix)
            place = flat[stem.removeprefix("lora_unet_")] if stem.startswith("lora_unet_") else known[stem]
            modules.setdefault(stem, (*place, {}))[2][SUFFIXES[suffix]] = value
        self.modules = list(modules.values())
        whole = any(name != "adaln_t_table" for name in curve)
        self.curve = curve if whole else None
        self.own_table = None if whole else curve.get("adaln_t_table")

    def _scale(self, parts, rank):
        alpha = parts.get("alpha", self.alpha)
        return 1.0 if alpha is None else np.asarray(alpha).item() / rank

    def delta(self, parts):
        """The dense change at strength 1 (of a DoRA: the one inside the norm)."""
        if "difference" in parts:
            return parts["difference"]
        if "a" in parts:
            return self._scale(parts, parts["a"].shape[0]) * (parts["b"] @ parts["a"])
        scale, factors = 1.0, []
        for factor in ("w1", "w2"):
            if factor in parts:
                factors.append(parts[factor])
            else:
                left, right = parts[f"{factor}_a"], parts[f"{factor}_b"]
                scale = self._scale(parts, left.shape[1])
                factors.append(left @ right)
        return scale * np.kron(*factors)


def dora(weight, delta, magnitude, strength):
    adapted = weight + delta
    by_columns = magnitude.shape == (1, weight.shape[1])
    norms = np.linalg.norm(adapted, axis=0 if by_columns else 1, keepdims=True)
    return weight + strength * (magnitude.reshape(norms.shape) * adapted / norms - weight)


def silu(x):
    return x / (1 + np.exp(-x))


def interpolate(table, t):
    position = np.clip(t, 0, 1) * (len(table) - 1)
    low = min(int(position), len(table) - 2)
    return table[low] + (position - low) * (table[low + 1] - table[low])


def linear(x, module, weights):
    y = x @ weights[f"{module}.weight"].T
    return y + weights[f"{module}.bias"] if f"{module}.bias" in weights else y


def time_features(t, weights):
    """c(t): what the AdaLN projections of a model with these weights are given."""
    if "adaln_t_table" in weights:
        return interpolate(weights["adaln_t_table"], t)
    half = weights["time_embedder.proj_in.weight"].shape[1] // 2
    angles = t * np.exp(-np.log(10000.0) * np.arange(half) / half)
    hidden = silu(linear(np.concatenate([np.cos(angles), np.sin(angles)]), "time_embedder.proj_in", weights))
    return silu(linear(hidden, "time_embedder.proj_out", weights))


def rms_norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


class Patched:
    """The weights as rows of one modality see them: the base's, changed by every adapter in stack order at its strength."""

    def __init__(self, base, grid, adapters, strengths):
        self.base, self.grid = base, grid
        self.weights = dict(base)
        # AdaLN module -> [(table, dense change)]: changes of what the table is at t, not of the base's features.
        self.on_tables = {}
        self.curves = []
        for adapter, strength in zip(adapters, strengths):
            self._patch(adapter, strength)

    def _patch(self, adapter, strength):
        for module, rows, parts in adapter.modules:
            name = f"{module}.weight"
            if "offset" in parts:
                bias = self.weights.get(f"{module}.bias", np.zeros(len(self.base[name]))).copy()
                bias[rows] += strength * parts["offset"]
                self.weights[f"{module}.bias"] = bias
                if len(parts) == 1:
                    continue
            delta = adapter.delta(parts)
            table = None
            if module.endswith("adaln_proj.linear"):
                # The coordinates of an adapter's own table are not the base's, though they be as many.
                table = adapter.own_table
                if table is None and delta.shape[1] != self.base[name].shape[1]:
                    table = self.grid
            if table is not None:
                assert "magnitude" not in parts
                self.on_tables.setdefault(module, []).append((table, strength * delta))
                continue
            weight = self.weights[name].copy()
            if "magnitude" in parts:
                weight[rows] = dora(weight[rows], delta, parts["magnitude"], strength)
            else:
                weight[rows] += strength * delta
            self.weights[name] = weight
        if adapter.curve is not None:
            self.curves.append((strength, adapter.curve))

    def linear(self, x, module):
        return linear(x, module, self.weights)

    def modulation(self, module, t):
        """m(t) of the whole projection."""
        line = linear(time_features(t, self.weights), module, self.weights)
        for table, change in self.on_tables.get(module, ()):
            line = line + change @ interpolate(table, t)
        base = linear(time_features(t, self.base), module, self.base)
        for strength, curve in self.curves:
            line = line + strength * (linear(interpolate(curve["adaln_t_table"], t), module, curve) - base)
        return line


class Oracle:
    """One model with one stack: entries {"file": path, "strength": number} and, where wanted, "video", "text", "audio" (factors
    of the modalities). `grid`: the file of silu(time embedding) that AdaLN pairs on a pruned model go through."""

    def __init__(self, model, stack=(), grid=None):
        self.base, _ = read(model)
        grid = read(grid)[0]["silu_t_emb_grid"] if grid else None
        adapters = [Adapter(entry["file"], self.base) for entry in stack]
        self.by_modality = [Patched(self.base, grid, adapters, [entry["strength"] * entry.get(factor, 1) for entry in stack])
                            for factor in ("video", "text", "audio")]

    def _linear(self, x, module, tags):
        """Each row of x through the weights of its modality."""
        y = np.empty((len(x), len(self.base[f"{module}.weight"])))
        for tag in MODALITIES:
            y[tags == tag] = self.by_modality[tag].linear(x[tags == tag], module)
        return y

    def _attention(self, x, block, tags, rotary):
        rows, head_dim = len(x), len(self.base[f"{block}.attn.q_norm.weight"])
        q, k, v = (part.reshape(rows, -1, head_dim).transpose(1, 0, 2)
                   for part in np.split(self._linear(x, f"{block}.attn.qkv_proj", tags), 3, axis=1))  # [heads, rows, head_dim]
        q = rms_norm(q, self.base[f"{block}.attn.q_norm.weight"])
        k = rms_norm(k, self.base[f"{block}.attn.k_norm.weight"])
        if rotary is not None:
            q, k = rotary(q), rotary(k)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(head_dim)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = scores / scores.sum(axis=-1, keepdims=True) @ v
        return self._linear(attended.transpose(1, 0, 2).reshape(rows, -1), f"{block}.attn.out_proj", tags)

    def _mlp(self, x, block, tags):
        gate, up = np.split(self._linear(x, f"{block}.mlp.fc1", tags), 2, axis=1)
        return self._linear(silu(gate) * up, f"{block}.mlp.fc2", tags)

    def _blocks(self, prefix):
        """Names of the blocks, in order."""
        count = sum(name.startswith(prefix) and name.endswith(".norm1.weight") for name in self.base)
        return [f"{prefix}{n}" for n in range(count)]

    def _text(self, text):
        tags = np.full(len(text), TEXT)
        x = self._linear(text, "condition_proj", tags)
        for block in self._blocks("token_refiner.blocks."):
            x = x + self._attention(rms_norm(x, self.base[f"{block}.norm1.weight"]), block, tags, None)
            x = x + self._mlp(rms_norm(x, self.base[f"{block}.norm2.weight"]), block, tags)
        return rms_norm(x, self.base["token_refiner.final_norm.weight"])

    def _rotary(self, positions):
        # The angle is a float32 product, as in the released model: it belongs to the function, not to its rounding.
        frequencies = self.base["rope.inv_freq"].astype(np.float32)
        angles = (positions.astype(np.float32)[:, :, None] * frequencies).reshape(len(positions), -1).astype(np.float64)
        cos, sin = np.cos(angles), np.sin(angles)
        half = angles.shape[1]

        def rotate(heads):
            first, second, rest = heads[..., :half], heads[..., half:2 * half], heads[..., 2 * half:]
            return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

        return rotate

    def evaluate(self, request):
        """{"video", "audio"}: velocity rows, condition rows first."""
        r, _ = read(request)
        tags, hidden = r["token_tags"], len(self.base["final_layer.norm.weight"])
        x = np.empty((len(tags), hidden))
        x[r["text_indices"]] = self._text(r["text"])
        for stream, modality in (("video", VIDEO), ("audio", AUDIO)):
            x[r[f"{stream}_indices"]] = self.by_modality[modality].linear(r[f"{stream}_rows"], f"{stream}_patch_proj")

        def modulation(module):
            """Each row's whole line, at its timestep and with its modality's factors."""
            lines = np.array([[patched.modulation(module, t) for patched in self.by_modality] for t in r["timestep"]])
            return lines[r["timestep_indices"], tags]

        rotary = self._rotary(r["position_ids"])
        for block in self._blocks("blocks."):
            lines = modulation(f"{block}.adaln_proj.linear").reshape(len(x), len(MODALITIES), 6, hidden)
            m = lines[np.arange(len(x)), tags]
            normed = rms_norm(x, self.base[f"{block}.norm1.weight"]) * (1 + m[:, ATTENTION_SCALE]) + m[:, ATTENTION_SHIFT]
            x = x + m[:, ATTENTION_GATE] * self._attention(normed, block, tags, rotary)
            normed = rms_norm(x, self.base[f"{block}.norm2.weight"]) * (1 + m[:, MLP_SCALE]) + m[:, MLP_SHIFT]
            x = x + m[:, MLP_GATE] * self._mlp(normed, block, tags)
        shift, scale = np.split(modulation("final_layer.adaln_proj.linear"), 2, axis=1)
        x = rms_norm(x, self.base["final_layer.norm.weight"]) * (1 + scale) + shift
        return {stream: self.by_modality[modality].linear(x[r[f"{stream}_indices"]], f"final_layer.{stream}_out")
                for stream, modality in (("video", VIDEO), ("audio", AUDIO))}
