"""The fleet's memory as a real Prometheus knows it from the scheduler, while workers compute, die and come back.

tests/benchmarks/fleet_monitoring.py is the long version, with a table and pictures.
"""

import shutil
import time
from types import SimpleNamespace

import pytest

from h3test import GOLDEN
from h3test.monitoring import Load, after_death, counted_twice, has_data, local, owners_against_used, panel_expressions
from h3test.requests import RequestFile
from h3test.servers import Server, Worker, wait_for

pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="prometheus is not installed (scripts/setup.sh --tests)")

STACKS = [[("lora/turbo_bare", 1.0)], [("lora/turbo_bare", 0.5), ("lora/style_bf16", -0.3)], [], [("lora/dora", 0.7)]]
RATE_INTERVAL = "2s"


@pytest.fixture(scope="module")
def fleet():
    """Two workers under load, a Prometheus over all three processes; `killed` is when the first worker was, which is back since."""
    workers = []
    try:
        for _ in range(2):
            workers.append(Worker(GOLDEN / "full/model.safetensors", GOLDEN))
        with Server(None, GOLDEN, *(flag for worker in workers for flag in ("--worker", worker.address))) as server:
            targets = {"h3-scheduler": [server.metrics], "h3-worker": [worker.metrics for worker in workers]}
            with local.Prometheus(targets, interval="500ms") as prometheus:
                def see(expr, what):
                    wait_for(lambda: local.ask(prometheus.url, "query", query=expr)["result"], what)

                see("sum(h3_worker_up) == 2", "both workers")
                since = time.time()
                with Load(server.address, RequestFile(GOLDEN / "inputs/t2va.safetensors"), STACKS, clients=3, evaluations=20) as load:
                    see("min(count_over_time((sum by (worker) (h3_worker_vram_bytes{owner='adapters'}) > 0)[1m:500ms])) > 4", "adapters on both, for a while")
                    killed = time.time()
                    workers[0].kill()
                    see("count_over_time((sum(h3_worker_up) == 1)[1m:500ms]) > 4", "the death")
                    workers[0].start()
                    see("min_over_time(sum(h3_worker_up)[2s:500ms]) == 2", "the return, for a while")
                yield SimpleNamespace(url=prometheus.url, since=since, killed=killed, name=workers[0].address, load=load)
    finally:
        for worker in workers:
            worker.kill()


def test_owners_sum_to_what_is_used_at_every_scrape(fleet):
    by_worker = owners_against_used(fleet.url, fleet.since)
    assert len(by_worker) == 2
    for scrapes in by_worker.values():
        assert len(scrapes) > 6
        assert len({used for _, _, used in scrapes}) > 2, "nothing happened"
        assert [it for it in scrapes if it[1] != it[2]] == []


def test_a_dead_worker_has_no_bytes_and_its_up_is_0_until_it_is_back(fleet):
    death = after_death(fleet.url, fleet.name, fleet.killed)
    assert len(death["dead"]) > 3
    assert death["stale"] == [] and death["late_bytes"] == []
    assert death["up"] == sorted(death["up"]) and death["up"][-1] == 1
    assert fleet.load.failed == [] and fleet.load.done > 0


def test_no_byte_is_counted_twice_when_workers_are_scraped_too(fleet):
    assert has_data(fleet.url, 'sum(h3_vram_bytes{job="h3-worker"})', fleet.since), "the workers are scraped"
    compared, wrong = counted_twice(fleet.url, fleet.since, RATE_INTERVAL, step=0.5)
    assert wrong == [] and compared > 100


def test_the_scheduler_alone_fills_the_fleet_dashboard(fleet):
    expressions = [it for it in panel_expressions(RATE_INTERVAL, job="h3-scheduler") if it[0] == "fleet"]
    assert len(expressions) > 20
    # No --adapter-memory, no line.
    assert [it[2] for it in expressions if "vram_budget" not in it[2] and not has_data(fleet.url, it[2], fleet.since)] == []
