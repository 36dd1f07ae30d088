#!/usr/bin/env python3
"""Draws panels of a Grafana dashboard as a PNG from the data of a running Prometheus, without Grafana.

  render_panels.py --prometheus http://127.0.0.1:9090 --minutes 15 --output memory.png
  render_panels.py ... --dashboard deploy/monitoring/dashboards/adapters.json --panel "Bytes of each adapter" --panel Lookups

Without --panel: the main panels of the worker-memory and fleet dashboards, or all panels over time of another one.
"""

import argparse
import datetime
import json
import math
import pathlib
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import matplotlib

matplotlib.use("agg")  # No display needed.
import matplotlib.dates  # noqa: E402  The backend comes first.
import matplotlib.pyplot as plt  # noqa: E402
import matplotlib.ticker  # noqa: E402

WORKER_MEMORY = pathlib.Path(__file__).resolve().parents[1] / "deploy/monitoring/dashboards/worker-memory.json"
# By the uid of a dashboard.
MAIN_PANELS = {
    "h3-worker-memory": ["Memory by owner", "Device: total, used, free", "Peak of the last request", "Avoided by not merging",
                         "Adapters against their budget", "Allocated per second by owner", "Allocated for good"],
    "h3-fleet": ["Memory by owner, all workers", "Used by worker", "State", "Adapters against their budget", "Avoided by not merging"],
}
# Grafana's words for colours that matplotlib has under others.
COLOURS = {"dark-red": "darkred"}


def substitute(expr, values, rate_interval):
    """An expression with Grafana's variables filled in, as Grafana does; a variable without a value takes everything."""
    expr = expr.replace("$__rate_interval", rate_interval)
    return re.sub(r"\$(\w+)", lambda match: values.get(match[1], ".*"), expr)


def legend(template, labels):
    """What Grafana calls a series."""
    if template in ("", "__auto"):
        return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()) if name != "__name__") or "value"
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), template).strip()


def query_range(url, expr, start, end, step):
    """[(labels, [(time, value)])]; RuntimeError in Prometheus's words when it refuses."""
    body = urllib.parse.urlencode({"query": expr, "start": start, "end": end, "step": step}).encode()
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query_range", body, timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{expr}: {error.read().decode()}") from None
    return [(it["metric"], [(float(t), float(value)) for t, value in it["values"]]) for it in result]


def scale(unit, largest):
    """(divisor, name) of an axis."""
    if unit in ("bytes", "Bps"):
        power = min(int(math.log(largest, 1024)), 4) if largest >= 1 else 0
        return 1024 ** power, ["B", "KiB", "MiB", "GiB", "TiB"][power] + ("/s" if unit == "Bps" else "")
    if unit == "percentunit":
        return 0.01, "%"
    return 1, {"s": "s", "reqps": "requests/s", "ops": "1/s"}.get(unit, "")


def draw(axes, panel, lines):
    """`lines`: [(name, [(time, value)])]."""
    defaults = panel["fieldConfig"]["defaults"]
    stacked = defaults["custom"]["stacking"]["mode"] == "normal"
    fixed = {it["matcher"]["options"]: it["properties"][0]["value"]["fixedColor"] for it in panel["fieldConfig"]["overrides"]
             if it["properties"][0]["id"] == "color"}
    if stacked:  # What is 0 all the time only fills the legend.
        lines = [line for line in lines if any(value for _, value in line[1])]
    times = sorted({t for _, points in lines for t, _ in points})
    dates = [datetime.datetime.fromtimestamp(t) for t in times]
    columns = [[dict(points).get(t, math.nan) for t in times] for _, points in lines]
    heights = [sum(value for value in row if not math.isnan(value)) if stacked else max(row) for row in zip(*columns)]
    divisor, name = scale(defaults["unit"], max((it for it in heights if not math.isnan(it)), default=0))
    columns = [[value / divisor for value in column] for column in columns]
    colours = [COLOURS.get(fixed.get(title), fixed.get(title)) for title, _ in lines]
    if stacked and lines:
        cycle = plt.rcParams["axes.prop_cycle"].by_key()["color"]
        colours = [colour or cycle[i % len(cycle)] for i, colour in enumerate(colours)]
        filled = [[0 if math.isnan(value) else value for value in column] for column in columns]
        # A ledger steps from value to value: a slope would show bytes that never were.
        axes.stackplot(dates, filled, labels=[title for title, _ in lines], colors=colours, alpha=0.8, step="post", linewidth=0)
    else:
        for (title, _), column, colour in zip(lines, columns, colours):
            axes.step(dates, column, where="post", label=title, color=colour, linewidth=1.5)
    axes.set_title(panel["title"], loc="left", fontsize=10, fontweight="bold")
    axes.set_ylabel(name)
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=8)
    axes.xaxis.set_major_locator(matplotlib.dates.AutoDateLocator(maxticks=6))
    axes.xaxis.set_major_formatter(matplotlib.dates.DateFormatter("%H:%M:%S"))
    if lines:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    else:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center")


def render(url, dashboard, titles, values, start, end, step, rate_interval, output, caption=""):
    """The number of series that were drawn."""
    panels = {panel["title"]: panel for panel in dashboard["panels"] if panel["type"] == "timeseries"}
    chosen = [panels[title] for title in titles or panels]
    figure = plt.figure(figsize=(15, 3.4 * (1 + math.ceil((len(chosen) - 1) / 2))), layout="constrained")
    grid = figure.add_gridspec(1 + math.ceil((len(chosen) - 1) / 2), 2)
    drawn = 0
    for i, panel in enumerate(chosen):
        lines = []
        for target in panel["targets"]:
            expr = substitute(target["expr"], values, rate_interval)
            lines += [(legend(target["legendFormat"], labels), points)
                      for labels, points in query_range(url, expr, start, end, step)]
        drawn += len(lines)
        # The first over the whole width, the others two in a line.
        draw(figure.add_subplot(grid[0, :] if i == 0 else grid[(i + 1) // 2, (i + 1) % 2]), panel, lines)
    figure.suptitle(caption or dashboard["title"], fontsize=12)
    figure.savefig(output, dpi=90)
    plt.close(figure)
    return drawn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--dashboard", type=pathlib.Path, default=WORKER_MEMORY)
    parser.add_argument("--panel", action="append", metavar="TITLE")
    parser.add_argument("--var", action="append", default=[], metavar="NAME=VALUE",
                        help="of the dashboard: job, instance, device")
    parser.add_argument("--minutes", type=float, default=15, help="how far back from --end")
    parser.add_argument("--end", type=float, metavar="UNIX_SECONDS", help="default: now")
    parser.add_argument("--step", type=float, help="seconds between two points; default: 400 points in all")
    parser.add_argument("--rate-interval", default="1m", help="four times the scrape interval, as Grafana does it")
    parser.add_argument("--caption", default="")
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args()
    dashboard = json.loads(options.dashboard.read_text())
    titles = options.panel or MAIN_PANELS.get(dashboard["uid"])
    end = options.end or time.time()
    start = end - 60 * options.minutes
    step = options.step or max((end - start) / 400, 0.5)
    drawn = render(options.prometheus, dashboard, titles, dict(it.split("=", 1) for it in options.var), start, end, step,
                   options.rate_interval, options.output, options.caption)
    print(f"{options.output}: {drawn} series")
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
