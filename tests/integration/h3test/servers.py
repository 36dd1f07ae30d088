"""Starts h3-scheduler and stops it again, without sleeping for a guessed time."""

import contextlib
import os
import pathlib
import queue
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time

from h3test import BIN

READY = re.compile(r"ready grpc=(\S+) metrics=(\S+)\n")
START_SECONDS = 120


def wait_for(condition, what, seconds=30):
    """The first true value of `condition`, asked again and again; TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds} s still not: {what}")
        time.sleep(0.02)
    return value


def free_port():
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Worker:
    """An h3-worker at addresses of its own (`address`, `metrics`), which it keeps over kill() and start()."""

    def __init__(self, model, adapters, *options):
        self.address, self.metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self._arguments = [BIN / "h3-worker", "--model", model, "--adapters", adapters, "--listen", self.address, "--metrics", self.metrics, *options]
        self.start()

    def start(self):
        """Returns when it serves."""
        self.process = subprocess.Popen(self._arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                                        env={"OMP_NUM_THREADS": "1", **os.environ})
        assert READY.fullmatch(self.process.stdout.readline()), "no ready line"

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


class Server:
    """A running h3-scheduler with its local worker, or without a model with the workers of its options. `address` and `metrics` are HOST:PORT; `exit_code` is what it should end with."""

    running = []  # For the report of a failed test.

    def __init__(self, model, adapters, *options):
        self._log = tempfile.NamedTemporaryFile("w+", prefix="h3-scheduler-", suffix=".log")
        self.process = subprocess.Popen(
            [BIN / "h3-scheduler", *(["--model", model] if model else []), "--adapters", adapters, "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", *options],
            stdout=subprocess.PIPE, stderr=self._log, text=True,
            # The tests' models are tiny: threads would only wait for each other, for ever on a busy machine.
            env={"OMP_NUM_THREADS": "1", **os.environ})
        # A reader of its own: the pipe never fills, and a program that prints nothing does not hang the tests.
        self._lines = queue.Queue()
        self.exit_code = 0
        threading.Thread(target=self._read, daemon=True).start()
        try:
            match = READY.fullmatch(self._lines.get(timeout=START_SECONDS))
            assert match, f"no ready line: {self.log()}"
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.address, self.metrics = match.groups()
        Server.running.append(self)

    def _read(self):
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def log(self):
        return pathlib.Path(self._log.name).read_text()

    def worker_pids(self):
        """Processes of the worker, as the operating system knows them."""
        children = []
        for task in pathlib.Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                children += map(int, (task / "children").read_text().split())
        return children

    @property
    def worker_metrics(self):
        """Where the latest worker serves its metrics."""
        return re.findall(r"worker \S+ serves, metrics at (\S+)", self.log())[-1]

    def stop(self):
        """Drains. Whoever stops a server also learns whether it ended well."""
        Server.running.remove(self)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"did not drain within 30 s: {self.log()[-4000:]}") from None
        assert code == self.exit_code, f"ended with {code}: {self.log()[-4000:]}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def rss_bytes(pid):
    """Resident bytes, pages of mapped files included."""
    pages = int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
