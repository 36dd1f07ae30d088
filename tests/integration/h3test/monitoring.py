"""deploy/monitoring in Python: its dashboards, a Prometheus with its rules, and what must hold of a fleet's memory in its data."""

import contextlib
import itertools
import json
import math
import re
import sys
import threading
import time

import grpc

from h3test import ROOT
from h3test.requests import Generate, Session, stack

MONITORING = ROOT / "deploy/monitoring"
sys.path[:0] = [str(MONITORING), str(ROOT / "scripts")]

import dashboards  # noqa: E402, F401  They are programs, not packages.
import local  # noqa: E402
import render_panels  # noqa: E402

FILES = {path.stem: json.loads(path.read_text()) for path in sorted((MONITORING / "dashboards").glob("*.json"))}
PANELS = [(name, panel) for name, dashboard in FILES.items() for panel in dashboard["panels"] if panel["type"] != "row"]


def panel_expressions(rate_interval, **variables):
    """[(dashboard, title, expression)] with Grafana's variables filled in: all that there is, but for `variables`."""
    return [(name, panel["title"], render_panels.substitute(target["expr"], variables, rate_interval))
            for name, panel in PANELS for target in panel["targets"]]


def alert_expressions():
    """{name: expression} of alerts.yaml, every comparison answering 0 or 1 instead of nothing or something."""
    found = {}
    for text in re.split(r"- alert: ", (MONITORING / "alerts.yaml").read_text())[1:]:
        expr = re.search(r"^ +expr: (.*)$", text, re.MULTILINE)[1]
        found[text.split()[0]] = re.sub(r"(>|<|==) ", r"\1 bool ", expr)
    return found


def recorded_names():
    return re.findall(r"- record: (\S+)", (MONITORING / "recording-rules.yaml").read_text())


def fast_alerts(text):
    """For Prometheus.change_rules: alerts that wait for a second instead of minutes."""
    return re.sub(r"\bfor: \S+", "for: 1s", text)


def scraped(url, selector, since):
    """[(labels, {time: value})] as they were scraped: no time between scrapes is filled in."""
    window = math.ceil(time.time() - since)
    return [(it["metric"], {float(when): float(value) for when, value in it["values"] if float(when) >= since})
            for it in local.ask(url, "query", query=f"{selector}[{window}s]")["result"]]


def has_data(url, expr, since, step=0.5):
    """Whether an expression had a number at any time since."""
    return any(math.isfinite(value) for _, points in render_panels.query_range(url, expr, since, time.time(), step) for _, value in points)


def owners_against_used(url, since):
    """{worker: [(time, sum of its owners, used of its device)]}, one for each scrape that shows bytes of it."""
    sums = {}
    # In one query: between two there may be a scrape.
    for labels, points in scraped(url, '{__name__=~"h3_worker_vram_(bytes|device_total_bytes|device_free_bytes)"}', since):
        owners, used = {"h3_worker_vram_bytes": (1, 0), "h3_worker_vram_device_total_bytes": (0, 1), "h3_worker_vram_device_free_bytes": (0, -1)}[labels["__name__"]]
        for when, value in points.items():
            scrape = sums.setdefault(labels["worker"], {}).setdefault(when, [0, 0])
            scrape[0] += owners * value
            scrape[1] += used * value
    return {worker: [(when, *sums[worker][when]) for when in sorted(sums[worker])] for worker in sums}


def after_death(url, worker, killed):
    """What scrapes have shown of a worker since it was killed: {"up": values of h3_worker_up in their order, "dead": times of the scrapes
    with 0, "late_bytes": seconds from the death to each scrape before the last of those that still had bytes of it, "stale": series of
    bytes that queries at those with 0 were answered}."""
    ((_, up),) = scraped(url, f'h3_worker_up{{worker="{worker}"}}', killed)
    dead = sorted(when for when, value in up.items() if value == 0)
    selector = f'{{__name__=~"h3_worker_.*bytes", worker="{worker}"}}'
    with_bytes = {when for _, points in scraped(url, selector, killed) for when in points}
    stale = [it["metric"] for when in dead for it in local.ask(url, "query", query=selector, time=when + 0.001)["result"]]
    return {"up": [up[when] for when in sorted(up)], "dead": dead, "stale": stale,
            "late_bytes": sorted(when - killed for when in with_bytes if dead and when < dead[-1])}


def counted_twice(url, since, rate_interval, step=1):
    """(Number of comparisons, titles of the fleet dashboard's panels that answer something else when the workers' own metrics are there too)."""
    compared, wrong = 0, []
    end = time.time()
    for all_jobs, scheduler in zip(panel_expressions(rate_interval), panel_expressions(rate_interval, job="h3-scheduler")):
        if all_jobs[0] != "fleet":
            continue
        answers = [sorted(((sorted(labels.items()), points) for labels, points in render_panels.query_range(url, expr, since, end, step)), key=str)
                   for expr in (all_jobs[2], scheduler[2])]
        compared += sum(len(points) for _, points in answers[0])
        if answers[0] != answers[1]:
            wrong.append(all_jobs[1])
    return compared, wrong


def put_to_work(address, request, stacks, absent="absent"):
    """Some of everything that panels show: the given stacks of (name, strength), a refusal, a session, a client that leaves."""
    with grpc.insecure_channel(address) as channel:
        for seed, entries in enumerate(stacks):
            Generate(channel, request, stack(*entries), seed=seed, evaluations=3).run()
        with contextlib.suppress(grpc.RpcError):
            Generate(channel, request, stack((absent, 1.0)), seed=1, evaluations=3).run()
            raise AssertionError(f"adapter {absent} was not refused")
        session = Session(channel, request, stack(*stacks[0]))
        session.evaluate(request.targets, sigma=0.9)
        session.close()
        leaving = Generate(channel, request, stack(*stacks[0]), seed=1, evaluations=1000)
        for kind, _ in leaving:
            if kind == "progress":
                break
        leaving.call.cancel()


class Load:
    """Clients that generate with one stack after the other until the block ends. `done`, `failed`: what became of their requests."""

    def __init__(self, address, request, stacks, *, clients, evaluations):
        self._address, self._request, self._evaluations = address, request, evaluations
        self._stacks = itertools.cycle(stacks)
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._client, args=(number,)) for number in range(clients)]
        self.done, self.failed = 0, []

    def _client(self, number):
        with grpc.insecure_channel(self._address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            for turn in itertools.count():
                if self._over.is_set():
                    return
                with self._lock:
                    entries = next(self._stacks)
                try:
                    Generate(channel, self._request, stack(*entries), seed=100 * number + turn, evaluations=self._evaluations).run()
                except grpc.RpcError as error:
                    with self._lock:
                        self.failed.append(f"{error.code().name}: {error.details()}")
                else:
                    with self._lock:
                        self.done += 1

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        for thread in self._threads:
            thread.join()
