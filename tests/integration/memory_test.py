"""Memory at the released width: mapped weights cost their size once, and the ledger knows every byte."""

import json
import subprocess
import sys

import pytest
from safetensors import safe_open

from h3test import GOLDEN, ROOT, ctl
from h3test.servers import Server, rss_bytes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def true_width(tmp_path_factory):
    """One block and one refiner block at the released sizes, pruned, bfloat16: 1.6 GB."""
    folder = tmp_path_factory.mktemp("true_width")
    make = [sys.executable, ROOT / "scripts/make_checkpoint.py"]
    sizes = ["--true-width", "--refiner-blocks", "1"]
    subprocess.run([*make, "checkpoint", folder / "h3.safetensors", *sizes, "--pruned", "--dtype", "bfloat16"], check=True)
    subprocess.run([*make, "adapter", folder / "style.safetensors", "--model", folder / "h3.safetensors", "--rank", "16"], check=True)
    subprocess.run([*make, "request", folder / "request.safetensors", *sizes, "--tokens", "4", "--frames", "2", "--height", "2", "--width", "2", "--audio", "2"],
                   check=True)
    yield folder
    (folder / "h3.safetensors").unlink()


@pytest.fixture(scope="module")
def true_width_server(true_width):
    with Server(true_width / "h3.safetensors", true_width) as server:
        yield server


def worker_rss(server):
    (worker,) = server.worker_pids()
    return rss_bytes(worker)


def memory(server):
    return json.loads(ctl.ok("--json", "memory", server=server.address))["devices"][0]


def test_one_evaluation_at_true_width(true_width, true_width_server, tmp_path):
    model = json.loads(ctl.ok("--json", "model", server=true_width_server.address))["models"][0]
    geometry = model["geometry"]
    assert [geometry[size] for size in ("hidden", "heads", "head_dim", "ffn", "adaln_width", "curve_rows")] == [5376, 56, 128, 14336, 8, 1025]
    assert model["pruned"] and model["dtype"] == "bfloat16"
    ctl.ok("evaluate", "--request", true_width / "request.safetensors", "--lora", "style=0.7", "--output", tmp_path / "out.safetensors",
           server=true_width_server.address)
    with safe_open(tmp_path / "out.safetensors", "pt") as out:
        assert all(out.get_tensor(name).isfinite().all() and out.get_tensor(name).norm() > 0 for name in ("video", "audio"))

    # The ledger equals the sum of the tensors: of the base (whose rotary frequencies, 16 numbers, stay on the host), and of the adapter.
    owners = memory(true_width_server)["owners"]
    assert owners["base_weights"] == tensor_bytes(true_width / "h3.safetensors")
    assert owners["adapters"] == tensor_bytes(true_width / "style.safetensors")


def tensor_bytes(path, host=("rope.inv_freq", "__metadata__")):
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(it["data_offsets"][1] - it["data_offsets"][0] for name, it in header.items() if name not in host)


def test_a_mapped_base_costs_its_size_once(true_width, true_width_server, serve, tmp_path):
    size = (true_width / "h3.safetensors").stat().st_size
    assert size >= 10**9
    empty = serve(GOLDEN / "full/model.safetensors")
    for server, request in ((empty, GOLDEN / "inputs/t2va.safetensors"), (true_width_server, true_width / "request.safetensors")):
        ctl.ok("evaluate", "--request", request, "--output", tmp_path / "out.safetensors", server=server.address)
    growth = worker_rss(true_width_server) - worker_rss(empty)
    assert growth <= 1.05 * size, f"{growth / size:.3f} of the file"
