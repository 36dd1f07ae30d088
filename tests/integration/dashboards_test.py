"""deploy/monitoring: rules, alerts and dashboards against real programs and a real Prometheus."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import grpc
import pytest

from h3test import BIN, GOLDEN, ROOT
from h3test.metrics import read
from h3test.monitoring import FILES, MONITORING, PANELS, dashboards, fast_alerts, has_data, local, panel_expressions, put_to_work, recorded_names
from h3test.requests import Generate, RequestFile
from h3test.servers import Server, wait_for

pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (scripts/setup.sh --tests)")

# Panels that may be empty in a short run, and why.
EMPTY = {("overview", "Alerts"): "only while an alert fires: test_real_trouble_raises_alerts looks at it"}
RATE_INTERVAL = "10s"


def promtool(*arguments):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rule_files():
    return [MONITORING / "recording-rules.yaml", MONITORING / "alerts.yaml"]


def alert_names():
    return re.findall(r"- alert: (\w+)", (MONITORING / "alerts.yaml").read_text())


def test_the_files_are_what_the_generator_makes(tmp_path):
    check = [sys.executable, MONITORING / "dashboards.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # And it does look.
    shutil.copytree(MONITORING / "dashboards", tmp_path / "dashboards")
    shutil.copy(MONITORING / "dashboards.py", tmp_path)
    check[1] = tmp_path / "dashboards.py"
    assert subprocess.run(check).returncode == 0
    overview = tmp_path / "dashboards/overview.json"
    overview.write_text(overview.read_text().replace("Requests by code", "Requests by colour"))
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 1 and "+" in done.stderr and "Requests by code" in done.stderr


def test_promtool_accepts_rules_and_configuration():
    promtool("check", "rules", *rule_files())
    promtool("check", "config", MONITORING / "prometheus.yaml")


def test_each_alert_fires_when_it_should_and_not_before():
    promtool("test", "rules", MONITORING / "rules_test.yaml")
    tests = (MONITORING / "rules_test.yaml").read_text()
    readme = (MONITORING / "README.md").read_text()
    for name in alert_names():
        assert f"name: {name}\n" in tests, f"no test of {name}"
        assert f"`{name}`" in readme, f"README.md does not explain {name}"


def test_each_alert_says_what_to_do():
    alerts = re.split(r"- alert: ", (MONITORING / "alerts.yaml").read_text())[1:]
    assert len(alerts) == len(set(alert_names())) > 0
    for alert in alerts:
        for needed in ("severity:", "summary:", "description:", "runbook:"):
            assert needed in alert, f"{alert.splitlines()[0]} has no {needed}"


@pytest.mark.parametrize("name", FILES)
def test_a_dashboard_is_well_formed(name):
    """The rules of Grafana's dashboard-linter, and a layout without holes."""
    dashboard = FILES[name]
    assert dashboard["id"] is None and dashboard["uid"] and dashboard["schemaVersion"] == 39 and dashboard["editable"] is False
    variables = [it["name"] for it in dashboard["templating"]["list"]]
    assert variables[:3] == ["datasource", "job", "instance"]
    assert dashboard["links"] and dashboards.TAG in dashboard["tags"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        grid = panel["gridPos"]
        cells = {(x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])}
        assert not cells & taken and grid["x"] + grid["w"] <= 24, f"{panel['title']} lies on another"
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["title"] and panel["description"] and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            expr = target["expr"]
            assert set(re.findall(r"\$(\w+)", expr)) <= {*variables, "__rate_interval"}, expr
            assert all(window == "$__rate_interval" for window in re.findall(r"\[(.*?)\]", expr)), expr
            assert "ALERTS" in expr or 'job=~"$job", instance=~"$instance"' in expr, expr


@contextlib.contextmanager
def program(name, folder, *options):
    """(grpc address, metrics address, process)."""
    with open(folder / f"{name}.log", "w") as log:
        process = subprocess.Popen(
            [BIN / name, "--adapters", GOLDEN, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", *options],
            stdout=subprocess.PIPE, stderr=log, text=True, env={"OMP_NUM_THREADS": "1", **os.environ})
    try:
        ready = re.fullmatch(r"ready grpc=(\S+) metrics=(\S+)\n", process.stdout.readline())
        assert ready, (folder / f"{name}.log").read_text()
        yield *ready.groups(), process
    finally:
        process.kill()
        process.wait()


class Watched:
    """Real programs under a small load and a Prometheus that watches them. `local`: a scheduler with a worker of its own;
    `scheduler`, `worker`: (grpc address, metrics address, process) of two that were started apart."""

    def __init__(self, prometheus, local_server, scheduler, worker, since):
        self.url, self.local, self.scheduler, self.worker, self.since = prometheus.url, local_server, scheduler, worker, since

    def query(self, expr):
        return local.ask(self.url, "query", query=expr)["result"]

    def has_data(self, expr):
        return has_data(self.url, expr, self.since)

    def firing(self):
        """{(name, instance): annotations}"""
        alerts = local.ask(self.url, "alerts")["alerts"]
        return {(it["labels"]["alertname"], it["labels"].get("instance")): it["annotations"]
                for it in alerts if it["state"] == "firing"}

    def metrics(self):
        """The text of all endpoints."""
        return "".join(read(address) for address in (self.local.metrics, self.local.worker_metrics))


# More adapters than have room.
STACKS = [[(f"lora/{name}", 0.5) for name in names] for names in (
    ["style_bf16"], ["turbo_bare"], ["turbo_bare", "style_bf16"], ["turbo_peft", "style_bf16"], ["style_bf16"] * 3, [], ["turbo_peft"] * 2)]


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    model = GOLDEN / "full/model.safetensors"
    with contextlib.ExitStack() as running:
        # Room for one of the turbos, not for two: some must go.
        server = running.enter_context(Server(model, GOLDEN, "--adapter-memory", "400KiB"))
        worker = running.enter_context(program("h3-worker", folder, "--model", model))
        scheduler = running.enter_context(program("h3-scheduler", folder, "--worker", worker[0], "--queue-capacity", "1"))
        targets = {"h3-scheduler": [server.metrics, scheduler[1]], "h3-worker": [server.worker_metrics, worker[1]]}
        since = time.time()
        # The rules as they are, but nobody waits for minutes.
        prometheus = running.enter_context(local.Prometheus(
            targets, interval="500ms", change_rules=fast_alerts))
        made = Watched(prometheus, server, scheduler, worker, since)
        wait_for(lambda: len(made.query("up == 1")) == 4, f"all are scraped; {prometheus.log()[-1000:]}")
        put_to_work(server.address, RequestFile(GOLDEN / "inputs/t2va.safetensors"), STACKS * 2)
        yield made


def test_every_panel_has_data(watched):
    expressions = [it for it in panel_expressions(RATE_INTERVAL) if it[:2] not in EMPTY]
    assert EMPTY.keys() <= {it[:2] for it in panel_expressions(RATE_INTERVAL)}, "EMPTY names what is no more"
    without = expressions
    # Rates need two scrapes after the load.
    deadline = time.monotonic() + 20
    while without and time.monotonic() < deadline:
        without = [it for it in without if not watched.has_data(it[2])]
        time.sleep(0.2)
    assert without == []


def test_panels_tell_the_truth(watched):
    """A few numbers that are known otherwise."""

    def value(dashboard, title, **labels):
        """Of the newest answer that has the labels; panels over a rate are not asked here."""
        (expr,) = {it[2] for it in panel_expressions(RATE_INTERVAL) if it[:2] == (dashboard, title)}
        return sum(float(it["value"][1]) for it in watched.query(expr) if labels.items() <= it["metric"].items())

    def owners_at(address):
        found = re.findall(r'^h3_vram_bytes\{.*owner="(\w+)"\} (\S+)$', read(address), re.M)
        return {owner: float(number) for owner, number in found}

    owners, of_other = owners_at(watched.local.worker_metrics), owners_at(watched.worker[1])
    assert value("overview", "Workers ready") == 2
    assert value("adapters", "Their bytes") == owners["adapters"] > 0
    assert value("adapters", "Budget in use") == pytest.approx(owners["adapters"] / (400 << 10))
    assert value("worker-memory", "Used by the worker") == sum(owners.values()) + sum(of_other.values())
    assert value("worker-memory", "Unattributed") == value("worker-memory", "Base weights changed") == 0
    assert 0 < value("worker-memory", "Headroom at the last peak") < 1


def test_every_rule_is_evaluated_without_error(watched):
    groups = local.ask(watched.url, "rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {it["name"] for it in rules if it["type"] == "alerting"} == set(alert_names())
    recorded = [it["name"] for it in rules if it["type"] == "recording"]
    assert sorted(recorded) == sorted(recorded_names())
    assert {it["name"]: it["lastError"] for it in rules if it.get("lastError")} == {}
    for rule in rules:
        watched.query(rule["query"])
    for name in recorded:
        wait_for(lambda name=name: watched.has_data(name), f"{name} has a value")


def test_only_metrics_and_labels_that_exist_are_asked_for(watched):
    text = watched.metrics()
    metrics = set(re.findall(r"^# TYPE (h3_\w+)", text, re.M))
    histograms = re.findall(r"^# TYPE (h3_\w+) histogram", text, re.M)
    known = metrics | {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    expressions = [it[2] for it in panel_expressions(RATE_INTERVAL)]
    expressions += [rule["query"] for group in local.ask(watched.url, "rules")["groups"] for rule in group["rules"]]
    used = {name for expr in expressions for name in re.findall(r"(?<![:\w])h3_\w+(?![:\w])", expr)}
    assert used - known == set()
    for expr in expressions:
        for name, filters in re.findall(r"(?<![:\w])(h3_\w+)\{(.*?)\}", expr):
            lines = re.findall(rf"^{name}\{{.*", text, re.M)
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', filters):
                # job and instance come from Prometheus.
                for value in values.split("|") if label not in ("job", "instance") and values != ".*" else ():
                    assert any(f'{label}="{value}"' in line for line in lines), f'no {name} with {label}="{value}"'
    # The other way round: what is measured is shown somewhere.
    assert {name for name in metrics if not any(name in expr for expr in expressions)} == set()


def test_panels_can_be_drawn_without_grafana(watched, tmp_path):
    picture = tmp_path / "memory.png"
    command = [sys.executable, ROOT / "scripts/render_panels.py", "--prometheus", watched.url, "--minutes", "1",
               "--rate-interval", RATE_INTERVAL, "--var", f"instance={watched.local.worker_metrics}", "--output", picture]
    done = subprocess.run(command, capture_output=True, text=True, env={"MPLCONFIGDIR": str(tmp_path), **os.environ})
    assert done.returncode == 0, done.stderr
    assert int(re.search(r"(\d+) series", done.stdout)[1]) >= 20
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


# Last: it ends the programs.
def test_real_trouble_raises_alerts(watched):
    """Rejections for a full queue, a worker that is gone, a worker that was started again, a scheduler that is gone."""
    assert set(watched.firing()) == set()
    grpc_address, scheduler, scheduler_process = watched.scheduler
    _, worker, worker_process = watched.worker
    request = RequestFile(GOLDEN / "inputs/t2va.safetensors")
    with grpc.insecure_channel(grpc_address) as channel:
        calls = [Generate(channel, request, seed=1, evaluations=1000) for _ in range(4)]

        def drain(call):
            with contextlib.suppress(grpc.RpcError):
                call.run()

        threads = [threading.Thread(target=drain, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        wait_for(lambda: ("H3QueueFull", scheduler) in watched.firing(), "a full queue is told")
        for call in calls:
            call.call.cancel()
        for thread in threads:
            thread.join()

    (local_worker,) = watched.local.worker_pids()
    moved = watched.local.worker_metrics
    os.kill(local_worker, signal.SIGKILL)
    worker_process.kill()
    wanted = {("H3NoWorkerReady", scheduler), ("H3WorkerNotScraped", worker), ("H3WorkerRestarted", watched.local.metrics),
              ("H3WorkerNotScraped", moved)}  # The local worker is back, at another port: as README.md says.
    wait_for(lambda: wanted <= watched.firing().keys(), "lost workers are told")
    assert ("H3NoWorkerReady", watched.local.metrics) not in watched.firing()

    scheduler_process.kill()
    wait_for(lambda: ("H3SchedulerNotScraped", scheduler) in watched.firing(), "a lost scheduler is told")
    firing = watched.firing()
    wait_for(lambda: ("H3NoWorkerReady", scheduler) not in watched.firing(), "what nobody says any more is no alert")
    for (name, instance), texts in firing.items():
        # Some are about all instances together, such as H3RequestsFail, which may fire here too.
        assert (instance or "") in texts["summary"] + texts["description"], name
        assert texts["runbook"] and not re.search("<no value>|error", str(texts["summary"] + texts["description"])), texts
    (expr,) = {it[2] for it in panel_expressions(RATE_INTERVAL) if it[:2] == ("overview", "Alerts")}
    assert {it["metric"]["alertname"] for it in watched.query(expr)} >= {"H3QueueFull", "H3SchedulerNotScraped"}
