#!/usr/bin/env python3
"""What a real Prometheus knows of a real fleet: a scheduler and two workers under load, one of them killed and started again.

    H3_BIN=build/release/bin .deps/venv/bin/python tests/benchmarks/fleet_monitoring.py [--picture FILE]

One Prometheus scrapes the scheduler alone, a second one all three processes, both every second. Prints what must hold of their data,
as a table, and draws the main panels of the fleet dashboard. Takes about a minute and a half; ends with 1 when something does not hold.
tests/integration/fleet_memory_test.py is the short version.
"""

import argparse
import contextlib
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/integration"))

from h3test.monitoring import (FILES, Load, after_death, alert_expressions, counted_twice, fast_alerts, has_data, local, owners_against_used,
                               panel_expressions, put_to_work, recorded_names, render_panels)
from h3test.requests import RequestFile
from h3test.servers import Server, Worker, wait_for

RATE_INTERVAL = "4s"  # Four scrapes, as Grafana does it.
STACKS = [[("turbo", 1.0)], [("turbo", 1.0), ("style", 0.5)], [], [("grain", 0.7)], [("style", -0.4), ("turbo", 0.8)], [("grain", 0.3), ("style", 0.5)]]
MIB = 1 << 20


def make_files(folder):
    """The demo's model with a third adapter, and a budget that has room for two of the three."""
    make = [sys.executable, ROOT / "scripts/make_checkpoint.py"]
    subprocess.run([*make, "demo", folder], check=True)
    subprocess.run([*make, "adapter", folder / "adapters/grain.safetensors", "--model", folder / "h3-small.safetensors", "--rank", "32", "--seed", "5"], check=True)
    return sum((folder / f"adapters/{name}.safetensors").stat().st_size for name in ("turbo", "style")) + MIB // 2


def evidence(fleet, everything, since, killed, worker):
    """[(what, found, whether it is as it must be)]"""
    lines = []
    for name, scrapes in owners_against_used(fleet, since).items():
        off = sum(owners != used for _, owners, used in scrapes)
        low, high = (pick(used for _, _, used in scrapes) / MIB for pick in (min, max))
        lines.append((f"owners of {name} = used of its device", f"{len(scrapes) - off} of {len(scrapes)} scrapes; {low:.1f} to {high:.1f} MiB", off == 0))
    death = after_death(fleet, worker, killed)
    late = [it for it in death["late_bytes"]]
    lines.append(("bytes of the killed worker", f"in {len(late)} scrapes after its death" + (f", {late[-1]:.2f} s after it" if late else ""), not late))
    lines.append(("stale bytes in queries while it is away", f"{len(death['stale'])} series at {len(death['dead'])} scrapes", not death["stale"] and death["dead"] != []))
    up = "".join(str(int(value)) for value in death["up"])
    lines.append(("h3_worker_up since the death", up, up.lstrip("0").strip("1") == "" and up[:1] == "0" and up[-1:] == "1"))
    compared, wrong = counted_twice(everything, since, RATE_INTERVAL)
    lines.append(("fleet dashboard with all three processes scraped", f"{compared} points as with the scheduler alone, but for: {', '.join(wrong) or 'none'}", not wrong and compared > 0))

    def total(url, expr):
        return float(local.ask(url, "query", query=expr)["result"][0]["value"][1])

    (used,) = {it[2] for it in panel_expressions(RATE_INTERVAL) if it[:2] == ("fleet", "Used")}
    totals = total(fleet, used), total(everything, used), total(everything, "sum(h3_vram_bytes)")
    lines.append(("fleet total at rest", "scheduler alone {:,.0f}, all three {:,.0f}, the workers' own {:,.0f} bytes".format(*totals), len(set(totals)) == 1))
    for kind, expressions, url in (
            ("fleet panel", [(it[1], it[2]) for it in panel_expressions(RATE_INTERVAL) if it[0] == "fleet"], fleet),
            ("panel", [("/".join(it[:2]), it[2]) for it in panel_expressions(RATE_INTERVAL)], everything),
            ("recording rule", [(name, name) for name in recorded_names()], everything),
            ("alert", list(alert_expressions().items()), everything)):
        silent = [name for name, expr in expressions if not has_data(url, expr, since)]
        source = "scheduler alone" if url == fleet else "all three"
        lines.append((f"{kind} expressions with data ({source})", f"{len(expressions) - len(silent)} of {len(expressions)}" + (f"; not {', '.join(silent)}" if silent else ""), not silent))
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of load before the death, while the worker is away, and after; default 20")
    parser.add_argument("--picture", type=pathlib.Path, help="PNG of the main panels of the fleet dashboard")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="h3-fleet-") as text, contextlib.ExitStack() as running:
        folder = pathlib.Path(text)
        budget = make_files(folder)
        request = RequestFile(folder / "request.safetensors")
        workers = []
        for _ in range(2):
            workers.append(Worker(folder / "h3-small.safetensors", folder / "adapters", "--device-memory", "384MiB", "--adapter-memory", str(budget)))
            running.callback(workers[-1].kill)
        server = running.enter_context(Server(None, folder / "adapters", *(flag for worker in workers for flag in ("--worker", worker.address))))
        fleet = running.enter_context(local.Prometheus({"h3-scheduler": [server.metrics], "h3-worker": []}))
        everything = running.enter_context(local.Prometheus(
            {"h3-scheduler": [server.metrics], "h3-worker": [worker.metrics for worker in workers]}, change_rules=fast_alerts))
        for prometheus in (fleet, everything):
            wait_for(lambda: local.ask(prometheus.url, "query", query="sum(h3_worker_up) == 2")["result"], "both workers are shown")
        since = time.time()
        put_to_work(server.address, request, STACKS)
        with Load(server.address, request, STACKS, clients=3, evaluations=10) as load:
            time.sleep(options.seconds)
            killed = time.time()
            workers[0].kill()
            time.sleep(options.seconds)
            workers[0].start()
            time.sleep(options.seconds)
        time.sleep(3)  # A heartbeat and a scrape: now everything rests.
        ended = time.time()
        lines = [("requests", f"{load.done} done, {len(load.failed)} failed" + (f": {load.failed[0]}" if load.failed else ""), not load.failed)]
        lines += evidence(fleet.url, everything.url, since, killed, workers[0].address)
        if options.picture:
            caption = f"{FILES['fleet']['title']}: two workers under load, one killed after {killed - since:.0f} s and back {options.seconds:.0f} s later"
            render_panels.render(fleet.url, FILES["fleet"], render_panels.MAIN_PANELS["h3-fleet"], {}, since, ended, 0.5, RATE_INTERVAL, options.picture, caption)
    width = max(len(what) for what, _, _ in lines)
    for what, found, fine in lines:
        print(f"{'ok ' if fine else 'NOT'} {what:{width}}  {found}")
    return int(not all(fine for _, _, fine in lines))


if __name__ == "__main__":
    sys.exit(main())
