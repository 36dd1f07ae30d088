#!/usr/bin/env python3
"""Makes the Grafana dashboards of dashboards/*.json. Edit here, never there.

  dashboards.py           writes the files
  dashboards.py --check   fails when a file is not what this program makes
"""

import argparse
import difflib
import json
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent / "dashboards"
TAG = "h3-serve"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# The filter of every expression. Both programs are jobs: h3-scheduler and h3-worker.
WHERE = 'job=~"$job", instance=~"$instance"'

# Owners keep their colours on every panel: a reader learns them once.
OWNERS = {
    "base_weights": "#5794F2", "adapters": "#FF9830", "materialized": "#F2495C", "caches": "#8AB8FF", "activations": "#73BF69",
    "workspace": "#FADE2A", "staging": "#B877D9", "runtime_context": "#A0A0A0", "allocator_cache": "#CCCCDC",
    "unattributed": "#FF0000",
}
CODES = {"OK": "green", "CANCELLED": "blue", "INTERNAL": "dark-red", "UNAVAILABLE": "red"}


def of(metric, *filters):
    """The metric's series that the dashboard's variables choose."""
    return f"{metric}{{{', '.join((WHERE, *filters))}}}"


def rate(metric, *filters):
    return f"rate({of(metric, *filters)}[$__rate_interval])"


def total(expr, *by):
    return f"sum by ({', '.join(by)}) ({expr})" if by else f"sum({expr})"


def target(expr, legend="__auto", *, instant=False, kind="time_series"):
    return {"expr": expr, "legendFormat": legend, "instant": instant, "range": not instant, "format": kind}


def override(name, what, value):
    return {"matcher": {"id": "byName", "options": name}, "properties": [{"id": what, "value": value}]}


def colours(by_name):
    return [override(name, "color", {"mode": "fixed", "fixedColor": colour}) for name, colour in by_name.items()]


def thresholds(*steps):
    """(value from which it holds, colour), the first from minus infinity."""
    return {"mode": "absolute", "steps": [{"value": value, "color": colour} for value, colour in steps]}


def panel(kind, title, description, unit, targets, *, width, height, defaults, options, overrides=()):
    refs = "ABCDEFGH"
    return {
        "type": kind, "title": title, "description": description, "datasource": DATASOURCE,
        "gridPos": {"w": width, "h": height},
        "targets": [{"refId": refs[i], "datasource": DATASOURCE, **it} for i, it in enumerate(targets)],
        "fieldConfig": {"defaults": {"unit": unit, **defaults}, "overrides": list(overrides)},
        "options": options,
    }


def series(title, description, unit, *targets, width=12, height=8, stacked=False, by_name=None, links=(),
           maximum=None, overrides=()):
    """A panel over time."""
    custom = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 60 if stacked else 8, "showPoints": "never", "spanNulls": False,
              "stacking": {"mode": "normal" if stacked else "none", "group": "A"}}
    defaults = {"min": 0, "custom": custom, "links": list(links), "color": {"mode": "palette-classic"}}
    if maximum is not None:
        defaults["max"] = maximum
    options = {"legend": {"displayMode": "table", "placement": "right", "showLegend": True, "calcs": ["lastNotNull", "max"]},
               "tooltip": {"mode": "multi", "sort": "desc"}}
    return panel("timeseries", title, description, unit, targets, width=width, height=height, defaults=defaults, options=options,
                 overrides=[*colours(by_name or {}), *overrides])


def stat(title, description, unit, expr, *, steps=((None, "green"),), width=4, legend="__auto"):
    """The value of now, with its recent course behind it."""
    options = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value",
               "graphMode": "area", "textMode": "value", "justifyMode": "auto"}
    return panel("stat", title, description, unit, [target(expr, legend)], width=width, height=4,
                 defaults={"thresholds": thresholds(*steps), "color": {"mode": "thresholds"}}, options=options)


def heatmap(title, description, unit, metric, *, width=12):
    options = {"calculate": False, "yAxis": {"unit": unit}, "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64},
               "cellGap": 1, "legend": {"show": True}, "tooltip": {"mode": "single"}}
    counts = total(f"increase({of(f'{metric}_bucket')}[$__rate_interval])", "le")
    return panel("heatmap", title, description, unit, [target(counts, "{{le}}", kind="heatmap")], width=width, height=8,
                 defaults={}, options=options)


def table(title, description, unit, expr, *, hidden=(), width=12, height=8):
    made = panel("table", title, description, unit, [target(expr, instant=True, kind="table")], width=width, height=height,
                 defaults={}, options={"showHeader": True, "sortBy": [{"displayName": "Value", "desc": True}]})
    made["transformations"] = [{"id": "organize", "options": {"excludeByName": {name: True for name in ("Time", *hidden)}}}]
    return made


def row(title):
    return {"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": {"w": 24, "h": 1}}


def quantiles(metric, by=()):
    """p50, p95 and p99 of a histogram."""
    buckets = total(rate(f"{metric}_bucket"), "le", *by)
    suffix = "".join(f" {{{{{label}}}}}" for label in by)
    return [target(f"histogram_quantile({q}, {buckets})", f"p{round(q * 100)}{suffix}") for q in (0.5, 0.95, 0.99)]


def mean(metric):
    """Of a histogram."""
    return f"{total(rate(f'{metric}_sum'))} / {total(rate(f'{metric}_count'))}"


def query_variable(name, label, query, *, several):
    return {"type": "query", "name": name, "label": label, "datasource": DATASOURCE, "definition": query, "sort": 1, "refresh": 2,
            "query": {"query": query, "refId": "StandardVariableQuery"}, "multi": several, "includeAll": several,
            **({"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}} if several else {})}


def variables(probe, *, several, device):
    """Datasource, job, instance and device, each narrowed by those before it; `probe`: the metric that has their labels."""
    made = [
        {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "refresh": 1},
        query_variable("job", "Job", f"label_values({probe}, job)", several=True),
        query_variable("instance", "Instance", f'label_values({probe}{{job=~"$job"}}, instance)', several=several),
    ]
    if device:
        made.append(query_variable("device", "Device", f"label_values({of('h3_vram_bytes')}, device)", several=True))
    return made


def fleet_variables():
    return variables("h3_workers_ready", several=True, device=False) + [
        query_variable("worker", "Worker", f"label_values({of('h3_worker_up')}, worker)", several=True)]


def place(panels):
    """Gives ids and positions: from left to right, a new line where the width of 24 is used up."""
    x = y = height = 0
    for number, it in enumerate(panels, 1):
        grid = it["gridPos"]
        if it["type"] == "row" or x + grid["w"] > 24:
            x, y, height = 0, y + height, 0
        it["id"] = number
        grid.update(x=x, y=y)
        x, height = x + grid["w"], max(height, grid["h"])
    return panels


def dashboard(uid, title, description, panels, templating):
    return {
        "id": None, "uid": uid, "title": title, "description": description, "tags": [TAG], "schemaVersion": 39, "version": 1,
        "editable": False, "graphTooltip": 1, "refresh": "30s", "timezone": "browser", "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": []}, "templating": {"list": templating}, "panels": place(panels),
        # One link for each dashboard with the tag: a new one appears everywhere by itself.
        "links": [{"type": "dashboards", "title": "H3 Serve", "tags": [TAG], "asDropdown": False, "includeVars": False,
                   "keepTime": True, "targetBlank": False, "icon": "dashboard", "tooltip": "", "url": ""}],
    }


# From a worker's series to its memory.
TO_MEMORY = {"title": "Memory of ${__field.labels.instance}", "targetBlank": False, "url": "/d/h3-worker-memory?" + "&".join([
    "var-datasource=${datasource}", "var-job=${__field.labels.job}", "var-instance=${__field.labels.instance}",
    "${__url_time_range}"])}
BUDGET = "What adapters take, and what they may (--adapter-memory; no line where there is no limit)."


def overview():
    ended = rate("h3_requests_total")
    in_queue = f"{total(of('h3_queue_requests'))} / {total(of('h3_queue_capacity_requests'))}"
    not_free = f"1 - {of('h3_vram_device_free_bytes')} / {of('h3_vram_device_total_bytes')}"
    firing = 'ALERTS{alertname=~"H3.+", alertstate="firing"}'
    restarts = f"increase({of('h3_worker_restarts_total')}[$__rate_interval])"
    return dashboard("h3-overview", "H3 Serve / Overview", "Requests, queue, steps and workers of all schedulers and workers.", [
        row("Now"),
        stat("Workers ready", "Workers that serve. 0: every new request is refused with WORKER_LOST until one is back.", "short",
             total(of("h3_workers_ready")), steps=((None, "red"), (1, "green"))),
        stat("Waiting", "Requests in the queue, all priorities.", "short", total(of("h3_queue_requests"))),
        stat("Queue in use",
             "Waiting requests by what the queue holds (--queue-capacity). At 100 % new ones are refused with QUEUE_FULL.",
             "percentunit", in_queue, steps=((None, "green"), (0.7, "orange"), (0.95, "red"))),
        stat("Running", "Requests that a worker computes now; one a worker.", "short",
             total(of("h3_requests_in_flight", 'phase="denoise"'))),
        stat("Sessions", "Open Evaluate sessions.", "short", total(of("h3_sessions"))),
        stat("Completed", "Share of ended Generate calls that ended with OK.", "percentunit",
             f"""{total(rate("h3_requests_total", 'code="OK"'))} / {total(ended)}""",
             steps=((None, "red"), (0.9, "orange"), (0.99, "green"))),
        series("Alerts", "H3 alerts that fire (see alerts.yaml). Empty is good.", "short",
               target(total(firing, "alertname", "severity"), "{{alertname}} ({{severity}})"), width=24, height=5, stacked=True),
        row("Requests"),
        series("Requests by code", "Generate calls that ended, by gRPC code.", "reqps", target(total(ended, "code"), "{{code}}"),
               stacked=True, by_name=CODES),
        series("Requests by task", "Generate calls that ended, by task.", "reqps", target(total(ended, "task"), "{{task}}"),
               stacked=True),
        series("Duration of completed requests", "From the header of a Generate call to its end; its wait in the queue is in it.",
               "s", *quantiles("h3_request_duration_seconds", by=("task",))),
        series("Lost workers' requests", "run again: queued again because their worker was lost; refused: a second worker was lost at the same "
               "step (REQUEST_KILLS_WORKERS).", "ops", target(total(rate("h3_requests_retried_total")), "run again"),
               target(total(rate("h3_requests_poisonous_total")), "refused")),
        series("Rejections by reason",
               "Refused before they ran. queue_full: too much load; no_worker: none ready; invalid_*: the client's fault.",
               "reqps", target(total(rate("h3_admission_rejections_total"), "reason"), "{{reason}}"), stacked=True),
        series("Cancellations by origin", "Requests that were cancelled: by their client, by their deadline, by a drain.",
               "reqps", target(total(rate("h3_cancellations_total"), "origin"), "{{origin}}"), stacked=True),
        series("What ended on each worker", "Generations and sessions that ended, by gRPC code, as the worker saw it.", "reqps",
               target(total(rate("h3_worker_requests_total"), "job", "instance", "code") + " > 0", "{{instance}} {{code}}"),
               stacked=True, links=[TO_MEMORY]),
        series("Time by phase", "What a request goes through: waiting, preparation, steps, its result on the way.", "s",
               *quantiles("h3_request_phase_seconds", by=("phase",))),
        series("Results written", "Bytes of results that were written to clients, of sessions too.", "Bps",
               target(total(rate("h3_output_bytes_total"), "task"), "{{task}}"), stacked=True),
        row("Queue"),
        series("Queue by priority", "Requests that wait, and how many may.", "short",
               target(total(of("h3_queue_requests"), "priority"), "{{priority}}"),
               target(total(of("h3_queue_capacity_requests")), "capacity")),
        series("Work in the queue",
               "Predicted seconds of one device for all that waits and what is left of all that runs: what a scaler should look at.",
               "s", target(total(of("h3_queue_work_seconds"), "instance"), "{{instance}}")),
        series("Age of the oldest request", "How long the request that has waited longest has waited.", "s",
               target(f"""(time() - {of('h3_queue_oldest_enqueue_timestamp_seconds')}) and {of('h3_queue_oldest_enqueue_timestamp_seconds')} > 0 or 0 * {of('h3_queue_oldest_enqueue_timestamp_seconds')}""",
                      "{{instance}}")),
        series("Wait in the queue", "From acceptance to the start on a worker.", "s", *quantiles("h3_queue_wait_seconds")),
        series("Requests in flight",
               "denoise: a worker computes; stream: computed, on the way to the client; sessions: Evaluate.", "short",
               target(total(of("h3_requests_in_flight"), "phase"), "{{phase}}"), target(total(of("h3_sessions")), "sessions")),
        series("Buffered tensors", "Host memory for the tensors of requests that wait, or run and may be run again (--max-buffered).", "bytes",
               target(total(of("h3_queue_buffered_bytes"), "instance"), "{{instance}}")),
        row("Workers"),
        series("Step time", "One model evaluation, over all workers and all sizes of requests.", "s",
               *quantiles("h3_denoise_step_seconds")),
        heatmap("Step time, every step", "How many evaluations took how long: two sizes of requests are two bands here.", "s",
                "h3_denoise_step_seconds"),
        series("Steps per second", "Model evaluations done, by worker.", "ops",
               target(total(rate("h3_denoise_steps_total"), "job", "instance"), "{{instance}}"), links=[TO_MEMORY]),
        series("Memory in use", "Share of each device that is not free, whoever uses it. Click a line for the worker's memory.",
               "percentunit", target(not_free, "{{instance}} {{device}}"), links=[TO_MEMORY], maximum=1),
        series("From cancel to a free device", "From the moment that a cancel was seen; the target is one step.", "s",
               *quantiles("h3_cancel_latency_seconds")),
        series("Out of memory after admission", "Allocations that failed though the request had been admitted. Should stay 0.", "ops",
               target(total(rate("h3_oom_total"), "phase"), "{{phase}}"), stacked=True),
        series("Workers ready and restarts", "Workers that serve, and local workers that ended and were started again.", "short",
               target(total(of("h3_workers_ready"), "instance"), "ready {{instance}}"),
               target(total(restarts, "instance"), "restarts {{instance}}")),
        table("Versions", "What runs where.", "short", of("h3_build_info"), hidden=("__name__", "Value")),
        table("Devices", "What the machine calls each device.", "short", of("h3_device_info"), hidden=("__name__", "Value")),
    ], variables("h3_build_info", several=True, device=False))


def fleet():
    def memory(metric, *filters):
        return of(f"h3_worker_{metric}", 'worker=~"$worker"', *filters)

    used = total(memory("vram_bytes"), "worker", "device")
    figures = [("device total", "vram_device_total_bytes"), ("free", "vram_device_free_bytes"), ("headroom", "vram_headroom_bytes"),
               ("reusable", "vram_reusable_bytes"), ("margin", "vram_margin_bytes")]
    return dashboard("h3-fleet", "H3 Serve / Fleet memory", "Memory of every worker's device, scraped from the scheduler alone.", [
        row("Now"),
        stat("Workers up", "Workers that serve or drain.", "short", total(memory("up")), steps=((None, "red"), (1, "green"))),
        stat("Used", "Sum of all owners on all devices.", "bytes", total(memory("vram_bytes"))),
        stat("Headroom", "What new requests may take, on all devices.", "bytes", total(memory("vram_headroom_bytes"))),
        stat("Unattributed", "Bytes outside every owner's scope. Always a bug of H3 Serve.", "bytes",
             total(memory("vram_bytes", 'owner="unattributed"')), steps=((None, "green"), (1, "red"))),
        stat("Out of memory", "Allocations that failed though the request had been admitted.", "short",
             total(memory("oom_total")), steps=((None, "green"), (1, "red"))),
        stat("Base weights changed", "Must stay 0.", "short", total(memory("base_weight_mutations_total")),
             steps=((None, "green"), (1, "red"))),
        row("Who owns the memory"),
        series("Memory by owner, all workers", "The height of the stack is what is used. A lost worker's bytes are gone at once.", "bytes",
               target(total(memory("vram_bytes", 'owner="base_weights"'), "owner"), "{{owner}}"),
               target(total(memory("vram_bytes", 'owner!="base_weights"'), "owner"), "{{owner}}"), width=24, height=10, stacked=True,
               by_name=OWNERS),
        series("Used by worker", "Sum of the owners on each device.", "bytes", target(used, "{{worker}} {{device}}"), stacked=True),
        series("Room by worker", "Memory of each device, what nobody uses, what a new request may take, the part of that which idle "
               "adapters and caches fill until it is wanted, and what is kept free.", "bytes",
               *(target(total(memory(metric), "worker"), f"{name} {{{{worker}}}}") for name, metric in figures)),
        series("Reserved and peak", "Promised to admitted requests and sessions; largest sum of owners during the last finished request.",
               "bytes", target(total(memory("vram_admission_reserved_bytes"), "worker"), "reserved {{worker}}"),
               target(total(memory("vram_peak_bytes"), "worker"), "peak {{worker}}")),
        series("Avoided by not merging", "What a merging runtime would hold a second time for the adapters in use now.", "bytes",
               target(total(memory("rematerialization_avoided_resident_bytes"), "worker"), "{{worker}}")),
        row("Adapters"),
        series("Resident adapters", "On each device, and in each worker's host memory.", "short",
               target(total(memory("adapters_resident"), "worker", "tier"), "{{worker}} {{tier}}")),
        table("Where they are", "Bytes of each adapter, the largest 50 by worker and tier.", "bytes",
              f"topk(50, {total(memory('adapter_bytes'), 'worker', 'tier', 'adapter')} > 0)"),
        series("Adapters against their budget", BUDGET, "bytes",
               target(total(memory("vram_bytes", 'owner="adapters"'), "worker"), "adapters {{worker}}"),
               target(total(memory("vram_budget_bytes", 'pool="adapters"'), "worker"), "budget {{worker}}")),
        row("Allocator and workers"),
        series("Allocator", "allocated: in live tensors; active: or still waited for; reserved: taken from the driver; inactive split: "
               "free parts that cannot go back.", "bytes",
               *(target(total(memory(f"allocator_{name}_bytes"), "worker"), f"{name.replace('_', ' ')} {{{{worker}}}}")
                 for name in ("allocated", "active", "reserved", "inactive_split"))),
        series("Allocator retries", "Allocations that had to flush the allocator's cache first.", "ops",
               target(total(f"rate({memory('allocator_retries_total')}[$__rate_interval])", "worker"), "{{worker}}")),
        series("State", "The state of each worker.", "short",
               target(total(memory("state"), "worker", "state") + " > 0", "{{worker}} {{state}}"), stacked=True),
        series("Age of the last heartbeat", "Beyond 2 s its bytes are not shown any more.", "s",
               target(f"(time() - {memory('snapshot_timestamp_seconds')}) and {memory('snapshot_timestamp_seconds')} > 0", "{{worker}}")),
    ], fleet_variables())


def worker_memory():
    def here(metric, *filters):
        return of(metric, 'device=~"$device"', *filters)

    def allocated(*filters):
        return total(rate("h3_vram_allocated_bytes_total", 'device=~"$device"', *filters), "owner")

    all_of_it = total(here("h3_vram_device_total_bytes"))
    free = total(here("h3_vram_device_free_bytes"))
    used = total(here("h3_vram_bytes"))
    of_adapters = total(here("h3_vram_bytes", 'owner="adapters"'))
    budget = total(here("h3_vram_budget_bytes", 'pool="adapters"'))
    return dashboard("h3-worker-memory", "H3 Serve / Worker memory", "Who owns every byte of one worker's device.", [
        row("Now"),
        stat("Device memory", "Memory of the device, as capped by --device-memory.", "bytes", all_of_it),
        stat("Used by the worker", "Sum of the owners.", "bytes", used),
        stat("Free", "Memory of the device that nobody uses.", "bytes", free),
        stat("Headroom at the last peak",
             "Share of the device that would be left at the peak of a request as large as the last one. Alert H3HeadroomLow "
             "below 5 %.",
             "percentunit", f"min({here('instance_device:h3_vram_headroom:ratio')})",
             steps=((None, "red"), (0.05, "orange"), (0.15, "green"))),
        stat("Unattributed",
             "Bytes allocated outside every owner's scope. Always a bug of H3 Serve: alert H3UnattributedBytes.", "bytes",
             total(here("h3_vram_bytes", 'owner="unattributed"')), steps=((None, "green"), (1, "red"))),
        stat("Base weights changed",
             "Times that a base weight was found changed. Must stay 0: alert H3BaseWeightsChanged.", "short",
             total(here("h3_base_weight_mutations_total")), steps=((None, "green"), (1, "red"))),
        row("Ledger"),
        series("Memory by owner",
               "Every byte that the worker uses on the device, by owner. The height of the stack is what is used.", "bytes",
               # The first is the lowest: what never changes carries what does.
               target(total(here("h3_vram_bytes", 'owner="base_weights"'), "owner"), "{{owner}}"),
               target(total(here("h3_vram_bytes", 'owner!="base_weights"'), "owner"), "{{owner}}"), width=24, height=11,
               stacked=True, by_name=OWNERS),
        series("Device: total, used, free",
               "others: what neither is free nor belongs to this worker, such as another process or the driver.", "bytes",
               target(all_of_it, "total"), target(used, "used by the worker"), target(free, "free"),
               target(f"clamp_min({all_of_it} - {free} - {used}, 0)", "others")),
        series("Peak of the last request",
               "Largest sum of owners during the last finished request, beside what is used now. Their distance is what a "
               "request needs for itself.", "bytes", target(total(here("h3_vram_peak_bytes")), "peak of the last request"),
               target(used, "used now")),
        series("Avoided by not merging",
               "avoided: what a runtime that merges adapters into weights would hold a second time for the adapters that "
               "requests use now; adapters: what they take here instead.", "bytes",
               target(total(here("h3_rematerialization_avoided_resident_bytes")), "avoided"), target(of_adapters, "adapters"),
               target(total(here("h3_vram_bytes", 'owner="materialized"')), "materialized"),
               by_name={"adapters": OWNERS["adapters"], "materialized": OWNERS["materialized"], "avoided": "#96D98D"}),
        series("Adapters against their budget", BUDGET, "bytes", target(of_adapters, "adapters"), target(budget, "budget"),
               by_name={"adapters": OWNERS["adapters"], "budget": "red"}),
        row("Admission"),
        series("Headroom", "headroom: what a new request may take, the number that admission compares with; reusable: the part of it that idle "
               "adapters, merged copies and cached modulations fill until it is wanted; margin: kept free; reserved: promised to what was admitted.",
               "bytes", target(total(here("h3_vram_headroom_bytes")), "headroom"), target(total(here("h3_vram_reusable_bytes")), "reusable"),
               target(total(here("h3_vram_admission_reserved_bytes")), "reserved"), target(total(here("h3_vram_margin_bytes")), "margin")),
        series("Checks of the base", "Parts of the base that were read again and compared between requests. changed must stay 0.", "ops",
               target(total(rate("h3_base_weight_verifications_total"), "result"), "{{result}}"), by_name={"ok": "green", "changed": "red"}),
        row("Allocation"),
        series("Allocator", "allocated: in live tensors; active: or freed and still waited for by the device; reserved: taken from the driver; "
               "inactive split: free parts of blocks that cannot go back.", "bytes",
               *(target(total(here(f"h3_allocator_{name}_bytes")), name.replace("_", " "))
                 for name in ("allocated", "active", "reserved", "inactive_split"))),
        series("Allocator retries", "Allocations that had to flush the allocator's cache first. Many: the device is nearly full.", "ops",
               target(total(rate("h3_allocator_retries_total", 'device=~"$device"')), "retries")),
        series("Host memory", "The process in host memory: pages of its own, pages of mapped files (which the kernel may drop), and the weights "
               "that stay there (--adaln-residency host).", "bytes",
               target(total(of("h3_host_resident_bytes"), "kind"), "{{kind}}"), target(total(here("h3_host_weights_bytes")), "weights in host memory")),
        series("Allocated per second by owner", "Bytes allocated, by owner: what requests churn through.", "Bps",
               target(allocated(), "{{owner}}"), stacked=True, by_name=OWNERS),
        series("Allocated for good",
               "The same for the owners that outlive a request. A change of strength, order or stack of resident adapters adds "
               "nothing here; a load does.", "Bps",
               target(allocated('owner=~"base_weights|adapters|materialized|caches"'), "{{owner}}"), stacked=True,
               by_name=OWNERS),
        row("Work"),
        series("Step time", "One model evaluation on this worker.", "s", *quantiles("h3_denoise_step_seconds")),
        series("Steps per second", "Model evaluations done.", "ops",
               target(total(rate("h3_denoise_steps_total"), "instance"), "{{instance}}")),
    ], variables("h3_vram_bytes", several=False, device=True))


def adapters():
    of_adapters = of("h3_vram_bytes", 'owner="adapters"')
    budget = of("h3_vram_budget_bytes", 'pool="adapters"')
    lookups = "h3_adapter_cache_lookups_total"
    hit_share = f"""{total(rate(lookups, 'result="hit"'))} / {total(rate(lookups))}"""
    depth = "h3_lora_stack_depth"
    alone = f"""{total(rate(f"{depth}_bucket", 'le="1"'))} / {total(rate(f"{depth}_count"))}"""
    per_adapter = of("h3_adapter_bytes")
    return dashboard("h3-adapters", "H3 Serve / Adapters", "Resident adapters, what they cost, how requests stack them.", [
        row("Now"),
        stat("Resident adapters", "Adapters on the devices.", "short", total(of("h3_adapters_resident"))),
        stat("Their bytes", "What they take on the devices.", "bytes", total(of_adapters)),
        stat("Budget in use", "Of --adapter-memory, on the devices that have such a limit.", "percentunit",
             f"sum({of_adapters} and on (job, instance, device) {budget}) / {total(budget)}",
             steps=((None, "green"), (0.95, "orange"))),
        stat("Found on the device", "Share of the adapters that stacks asked for and that were on the device already.",
             "percentunit", hit_share, steps=((None, "red"), (0.5, "orange"), (0.9, "green"))),
        stat("Mean stack", "Adapters per request.", "short", mean(depth)),
        stat("Stacked requests", "Share of requests with two or more adapters.", "percentunit", f"1 - {alone}"),
        row("Residency"),
        series("Bytes of each adapter", "Each resident adapter; beyond the 50 largest together as other.", "bytes",
               target(total(per_adapter, "adapter"), "{{adapter}}"), width=16, height=10, stacked=True),
        table("Resident now", "The largest 50, by worker.", "bytes",
              f"topk(50, {total(per_adapter, 'instance', 'adapter')} > 0)", width=8, height=10),
        series("Resident adapters", "Adapters on each device.", "short",
               target(total(of("h3_adapters_resident"), "job", "instance", "tier"), "{{instance}} {{tier}}"), links=[TO_MEMORY]),
        series("Adapters against their budget", BUDGET, "bytes",
               target(total(of_adapters, "job", "instance"), "{{instance}}"),
               target(total(budget, "job", "instance"), "budget {{instance}}"), links=[TO_MEMORY]),
        series("Adapters that there are", "In the adapters directory and among the uploads, as of the last half minute.", "short",
               target(total(of("h3_adapters_registered"), "instance"), "{{instance}}")),
        series("Holds", "Holds on adapters by the stacks of requests and sessions.", "short",
               target(total(of("h3_adapter_leases"), "job", "instance"), "{{instance}}"), links=[TO_MEMORY]),
        row("Loads"),
        series("Lookups",
               "Adapters that stacks asked for. hit: on the device already; miss: had to be read, checked and copied.", "ops",
               target(total(rate(lookups), "result"), "{{result}}"), stacked=True, by_name={"hit": "green", "miss": "orange"}),
        series("Evictions",
               "Adapters that had to go for others. As many as misses: the budget is smaller than what is in use.", "ops",
               target(total(rate("h3_adapter_evictions_total"), "reason"), "{{reason}}")),
        series("Bytes loaded", "Allocated per second under adapters: loads, and nothing when only strengths change.", "Bps",
               target(total(rate("h3_vram_allocated_bytes_total", 'owner="adapters"'), "job", "instance"), "{{instance}}"),
               links=[TO_MEMORY]),
        series("Time to load", "To bring an adapter to the device, by where it was.", "s", *quantiles("h3_adapter_load_seconds", by=("source",))),
        series("Loaded from", "Bytes of adapters that were brought to the device, by where they were.", "Bps",
               target(total(rate("h3_adapter_load_bytes_total"), "source"), "{{source}}"), stacked=True),
        series("Found wrong", "Adapters of requests that were looked at and refused, by what is wrong with them.", "ops",
               target(total(rate("h3_adapter_validation_failures_total"), "reason"), "{{reason}}"), stacked=True),
        series("Refused for an adapter",
               "invalid_adapter: unknown, of another model, or of a form that is not understood; vram: no room.", "reqps",
               target(total(rate("h3_admission_rejections_total", 'reason=~"invalid_adapter|vram"'), "reason"), "{{reason}}"),
               stacked=True),
        row("Swaps"),
        series("Swaps by kind", "Stacks that differ from the one before, by the first difference. refused: the new one could not be put in place.",
               "ops", target(total(rate("h3_adapter_swaps_total"), "kind", "result"), "{{kind}} {{result}}"), stacked=True),
        series("Time of a swap", "Until such a stack was in place, by where the slowest of its adapters was.", "s",
               *quantiles("h3_adapter_swap_seconds", by=("residency",))),
        series("Writes avoided", "Bytes of weights that a merging runtime would have written for these changes.", "Bps",
               target(total(rate("h3_rematerialization_avoided_write_bytes_total"), "cause"), "{{cause}}"), stacked=True),
        row("Stacks"),
        series("Effective rank", "Sum of the ranks in the stack of a request.", "short", *quantiles("h3_lora_effective_rank")),
        heatmap("Strengths", "How many adapters were asked for with which strength.", "short", "h3_lora_strength"),
        series("Stack depth", "Adapters in the stack of a request.", "short", *quantiles(depth), target(mean(depth), "mean")),
        heatmap("Stack depth, every request", "How many requests had how many adapters.", "short", depth),
        series("Mean step time and mean stack", "Does a deeper stack cost time?", "s",
               target(mean("h3_denoise_step_seconds"), "step time"), target(mean(depth), "adapters per request"),
               overrides=[override("adapters per request", "unit", "short"),
                          override("adapters per request", "custom.axisPlacement", "right")]),
        series("Avoided by not merging",
               "What a runtime that merges adapters into weights would hold a second time for the adapters in use now, and the "
               "merged copies that requests asked for (apply=materialized).", "bytes",
               target(total(of("h3_rematerialization_avoided_resident_bytes"), "job", "instance"), "avoided {{instance}}"),
               target(total(of("h3_vram_bytes", 'owner="materialized"'), "job", "instance"), "materialized {{instance}}"),
               links=[TO_MEMORY]),
    ], variables("h3_build_info", several=True, device=False))


def files():
    """{name: text} of all dashboards."""
    made = {"overview": overview(), "fleet": fleet(), "worker-memory": worker_memory(), "adapters": adapters()}
    return {f"{name}.json": json.dumps(it, indent=2, ensure_ascii=False) + "\n" for name, it in made.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs")
    check = parser.parse_args().check
    wanted = files()
    if not check:
        FOLDER.mkdir(exist_ok=True)
        for name, text in wanted.items():
            (FOLDER / name).write_text(text)
        return 0
    found = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
    for name in sorted(wanted.keys() | found.keys()):
        sys.stderr.writelines(difflib.unified_diff(found.get(name, "").splitlines(True), wanted.get(name, "").splitlines(True),
                                                   f"dashboards/{name}", "what dashboards.py makes", n=1))
    return int(found != wanted)


if __name__ == "__main__":
    sys.exit(main())
