"""Fixtures and the closing report of measured errors."""

import collections
import subprocess
import sys

import grpc
import pytest

from h3test import BIN, GOLDEN, ROOT
from h3test.servers import Server


def pytest_configure(config):
    missing = [name for name in ("h3-scheduler", "h3-worker", "h3ctl") if not (BIN / name).exists()]
    if missing:
        raise pytest.UsageError(f"{', '.join(missing)} not in {BIN}: build first (./test.sh), or set H3_BIN")


class Errors:
    """Measured errors by topic; the worst of each is shown at the end of the run."""

    def __init__(self):
        self._values = collections.defaultdict(list)

    def add(self, topic, value):
        self._values[topic].append(value)

    def lines(self):
        for topic, values in self._values.items():
            yield f"{topic:58} {len(values):4} cases, worst relative L2 {max(values):.2e}"


ERRORS = Errors()


def pytest_terminal_summary(terminalreporter):
    lines = list(ERRORS.lines())
    if lines:
        terminalreporter.section("errors against the float64 golden answers")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failed test shows what the servers had to say."""
    report = yield
    if report.failed:
        for server in Server.running:
            report.sections.append((f"log of {' '.join(map(str, server.process.args[1:3]))}", server.log()[-2000:]))
    return report


@pytest.fixture(scope="session")
def errors():
    return ERRORS


@pytest.fixture(scope="session")
def serve():
    """serve(model, *options) -> Server over tests/golden's adapters; one per distinct argument list, kept to the end of the run."""
    servers = {}

    def get(model, *options):
        key = (str(model), *map(str, options))
        if key not in servers:
            servers[key] = Server(model, GOLDEN, *options)
        return servers[key]

    yield get
    for server in servers.values():
        server.stop()


@pytest.fixture
def golden_server(serve):
    """The small full model of tests/golden."""
    return serve(GOLDEN / "full/model.safetensors")


@pytest.fixture
def channel(golden_server):
    with grpc.insecure_channel(golden_server.address) as channel:
        yield channel


@pytest.fixture(scope="session")
def small_h3(tmp_path_factory):
    """The demo's files: h3-small.safetensors, adapters/turbo and style, request.safetensors. An evaluation takes long enough to be
    interrupted."""
    folder = tmp_path_factory.mktemp("small_h3")
    subprocess.run([sys.executable, ROOT / "scripts/make_checkpoint.py", "demo", folder], check=True)
    return folder


@pytest.fixture
def fresh_server():
    """A server of one's own, to be harmed: fresh_server(model, adapters, *options)."""
    servers = []

    def start(*arguments):
        servers.append(Server(*arguments))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
