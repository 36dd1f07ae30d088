"""The known answers of tests/golden (see its README)."""

import json

import numpy as np
from safetensors.numpy import load_file

from h3test import GOLDEN

CASES = json.loads((GOLDEN / "cases.json").read_text())["cases"]
REASONS = json.loads((GOLDEN / "reject/reasons.json").read_text())

# Every way in which the model of a case is stored: (model, container, path).
CONTAINERS = [
    ("full", "single file", GOLDEN / "full/model.safetensors"),
    ("full", "reference directory", GOLDEN / "full-sharded"),
    ("full", "diffusers directory", GOLDEN / "full-diffusers"),
    ("pruned", "single file", GOLDEN / "pruned/model.safetensors"),
]


def request_path(case):
    return GOLDEN / f"inputs/{case['input']}.safetensors"


def expected(case):
    return load_file(GOLDEN / f"expected/{case['name']}.safetensors")


def lora_options(case):
    """The case's stack as h3ctl takes it. Adapters are served from tests/golden itself, hence the folder."""
    options = []
    for entry in case["stack"]:
        spec = f"lora/{entry['file']}={entry['strength']}"
        for modality in ("video", "text", "audio"):
            if modality in entry:
                spec += f",{modality}={entry[modality]}"
        if "per_evaluation" in entry:
            spec += ",per-evaluation=" + ":".join(map(str, entry["per_evaluation"]))
        if "auto_strength" in entry:
            spec += f",auto-strength={entry['auto_strength']['floor']}:{entry['auto_strength']['ceiling']}"
        options += ["--lora", spec]
    return options


def relative_l2(value, reference):
    reference = reference.astype(np.float64)
    return float(np.linalg.norm(value.astype(np.float64) - reference) / np.linalg.norm(reference))


def worst_error(output, case):
    """Relative L2 of the worse stream of an output file."""
    values, answers = load_file(output), expected(case)
    for stream in ("video", "audio"):
        assert values[stream].dtype == np.float32
        assert values[stream].shape == answers[stream].shape
    return max(relative_l2(values[stream], answers[stream]) for stream in ("video", "audio"))
