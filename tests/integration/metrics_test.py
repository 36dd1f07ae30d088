"""/metrics of both programs: well-formed, scraped by a real Prometheus, and telling the truth."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.request

import grpc
import pytest

from h3test import GOLDEN, ctl
from h3test.metrics import read, values
from h3test.requests import Generate, RequestFile, stack
from h3test.servers import wait_for

T2VA = RequestFile(GOLDEN / "inputs/t2va.safetensors")
OWNERS = {"base_weights", "adapters", "materialized", "caches", "activations", "workspace", "staging", "runtime_context", "allocator_cache", "unattributed"}


@pytest.fixture
def busy_server(golden_server, channel):
    """A server that has done and refused something."""
    Generate(channel, T2VA, stack(("lora/turbo_bare", 1.0)), seed=1, evaluations=3).run()
    with pytest.raises(grpc.RpcError):
        Generate(channel, T2VA, stack(("lora/absent", 1.0)), seed=1, evaluations=3).run()
    return golden_server


@pytest.mark.parametrize("endpoint", ["metrics", "worker_metrics"])
def test_promtool_finds_nothing_to_complain_about(busy_server, endpoint):
    checked = subprocess.run(["promtool", "check", "metrics"], input=read(getattr(busy_server, endpoint)), capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout + checked.stderr == ""


def test_requests_steps_and_rejections_are_counted(golden_server, channel):
    before = values(golden_server.metrics) | values(golden_server.worker_metrics)
    Generate(channel, T2VA, stack(("lora/turbo_bare", 1.0)), seed=1, evaluations=3).run()
    with pytest.raises(grpc.RpcError):
        Generate(channel, T2VA, stack(("lora/absent", 1.0)), seed=1, evaluations=3).run()

    def grown(pattern):
        now = values(golden_server.metrics) | values(golden_server.worker_metrics)
        return sum(value - before.get(name, 0) for name, value in now.items() if re.search(pattern, name))

    # Counted when the call has ended on the server's side, which a client may be told a moment earlier.
    wait_for(lambda: grown(r'^h3_requests_total\{.*code="OK"') == 1, "the request is counted")
    wait_for(lambda: grown(r"^h3_denoise_steps_total") == 3, "three steps are counted")
    wait_for(lambda: grown(r"^h3_admission_rejections_total") == 1, "the refusal is counted")


def test_the_ledger_on_metrics_is_that_of_the_memory_call(golden_server, channel):
    owners = json.loads(ctl.ok("--json", "memory", server=golden_server.address))["devices"][0]["owners"]
    shown = {re.search(r'owner="(\w+)"', name)[1]: value for name, value in values(golden_server.worker_metrics).items() if name.startswith("h3_vram_bytes")}
    assert shown.keys() == OWNERS == owners.keys()
    assert shown["base_weights"] == owners["base_weights"] > 0
    assert shown["adapters"] == owners["adapters"]
    assert values(golden_server.worker_metrics)['h3_base_weight_mutations_total{device="cpu"}'] == 0


def fleet(address):
    """{owner: bytes} and {series: value} of h3_worker_*, as the scheduler shows them."""
    shown = {name: value for name, value in values(address).items() if name.startswith("h3_worker_")}
    return {re.search(r'owner="(\w+)"', name)[1]: value for name, value in shown.items() if name.startswith("h3_worker_vram_bytes")}, shown


def test_the_scheduler_shows_its_workers_memory(golden_server, channel):
    Generate(channel, T2VA, stack(("lora/turbo_bare", 1.0)), seed=1, evaluations=1).run()

    def agree():
        device = json.loads(ctl.ok("--json", "memory", server=golden_server.address))["devices"][0]
        owners, shown = fleet(golden_server.metrics)
        total = shown['h3_worker_vram_device_total_bytes{worker="local-0",device="cpu"}']
        free = shown['h3_worker_vram_device_free_bytes{worker="local-0",device="cpu"}']
        assert sum(owners.values()) == total - free
        return owners == device["owners"]

    wait_for(agree, "the heartbeat has told what the memory call says")
    _, shown = fleet(golden_server.metrics)
    assert shown['h3_worker_up{worker="local-0"}'] == 1
    # Names of its own: who scrapes both processes counts no byte twice.
    worker = {name.split("{")[0] for name in values(golden_server.worker_metrics)}
    assert not {name.split("{")[0] for name in shown} & worker - {"h3_worker_requests_total"}


def test_a_lost_worker_has_no_bytes(fresh_server):
    server = fresh_server(GOLDEN / "full/model.safetensors", GOLDEN)
    wait_for(lambda: fleet(server.metrics)[0], "the worker is shown")
    (worker,) = server.worker_pids()
    os.kill(worker, signal.SIGSTOP)  # Neither gone nor answering.
    try:
        wait_for(lambda: not fleet(server.metrics)[0], "its bytes are gone", 10)
        wait_for(lambda: fleet(server.metrics)[1]['h3_worker_up{worker="local-0"}'] == 0, "it is down", 10)
    finally:
        os.kill(worker, signal.SIGCONT)
    wait_for(lambda: fleet(server.metrics)[0], "it is back", 20)


def test_labels_stay_bounded_whatever_clients_send(golden_server, channel):
    names = set(values(golden_server.metrics))
    for i in range(20):
        with pytest.raises(grpc.RpcError):
            Generate(channel, T2VA, stack((f"invented{i}", 0.01 * i)), seed=i, evaluations=1).run()
    assert not any("invented" in name for name in values(golden_server.metrics) | values(golden_server.worker_metrics))
    assert set(values(golden_server.metrics)) == names


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (scripts/setup.sh --tests)")
def test_a_real_prometheus_scrapes_both_endpoints(busy_server, tmp_path):
    (tmp_path / "prometheus.yml").write_text(f"""
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
- job_name: scheduler
  static_configs: [{{targets: ["{busy_server.metrics}"]}}]
- job_name: worker
  static_configs: [{{targets: ["{busy_server.worker_metrics}"]}}]
""")
    address = f"127.0.0.1:{free_port()}"
    with open(tmp_path / "log", "w") as log:
        prometheus = subprocess.Popen(["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
                                       f"--web.listen-address={address}"], stdout=log, stderr=log)

    def query(expression):
        try:
            with urllib.request.urlopen(f"http://{address}/api/v1/query?query={expression}", timeout=5) as answer:
                return {it["metric"]["job"]: float(it["value"][1]) for it in json.load(answer)["data"]["result"]}
        except OSError:
            return {}

    try:
        wait_for(lambda: query("up") == {"scheduler": 1, "worker": 1}, f"both are up; {(tmp_path / 'log').read_text()[-1000:]}", 60)
        assert wait_for(lambda: query("sum(h3_vram_bytes)by(job)"), "the ledger was scraped")["worker"] > 0
        assert wait_for(lambda: query("sum(h3_requests_total)by(job)"), "the requests were scraped")["scheduler"] >= 1
    finally:
        prometheus.kill()
        prometheus.wait()
