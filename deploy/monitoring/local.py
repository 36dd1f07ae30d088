#!/usr/bin/env python3
"""Runs a Prometheus with this folder's rules over programs on this machine, until it is interrupted.

  local.py --scheduler 127.0.0.1:9464 --worker 127.0.0.1:9465

Needs the program `prometheus` (Debian: apt-get install prometheus). Its data go when it ends.
"""

import argparse
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

FOLDER = pathlib.Path(__file__).resolve().parent


def configuration(text, targets, interval):
    """prometheus.yaml with other targets ({job: [HOST:PORT]}) and another interval."""
    text = re.sub(r"(\w+_interval): \S+", rf"\1: {interval}", text)
    for job, addresses in targets.items():
        text, replaced = re.subn(rf"(?s)(job_name: {job}\n.*?targets: ).*?\n", rf"\g<1>{json.dumps(addresses)}\n", text)
        if replaced != 1:
            raise ValueError(f"prometheus.yaml has no job {job}")
    return text


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Prometheus:
    """A running one, as a context manager. `change_rules` gets the text of each rule file: a test cannot wait for minutes."""

    def __init__(self, targets, *, interval="1s", listen=None, change_rules=lambda text: text):
        self._folder = tempfile.TemporaryDirectory(prefix="h3-prometheus-")
        folder = pathlib.Path(self._folder.name)
        for name in ("recording-rules.yaml", "alerts.yaml"):
            (folder / name).write_text(change_rules((FOLDER / name).read_text()))
        (folder / "prometheus.yaml").write_text(configuration((FOLDER / "prometheus.yaml").read_text(), targets, interval))
        listen = listen or f"127.0.0.1:{free_port()}"
        self.url = f"http://{listen}"
        self._log = folder / "log"
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(
                ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
                 f"--web.listen-address={listen}"], stdout=log, stderr=log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self, seconds=30):
        deadline = time.monotonic() + seconds
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return
            except OSError:  # Not listening yet, or still reading its data (503).
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"prometheus does not start: {self.log()[-2000:]}") from None
                time.sleep(0.05)

    def log(self):
        return self._log.read_text() if self._log.exists() else ""

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def ask(url, path, **parameters):
    """The data of an answer of Prometheus's HTTP API; ValueError with its words when it refuses."""
    body = urllib.parse.urlencode(parameters).encode() if parameters else None
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}", body, timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        try:
            text = json.loads(text)["error"]
        except (ValueError, KeyError):
            pass
        raise ValueError(f"{path} {parameters}: {text}") from None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", action="append", default=[], metavar="HOST:PORT", help="--metrics of an h3-scheduler")
    parser.add_argument("--worker", action="append", default=[], metavar="HOST:PORT",
                        help="--worker-metrics of an h3-scheduler, or --metrics of an h3-worker")
    parser.add_argument("--listen", default="127.0.0.1:9090", metavar="HOST:PORT", help="where Prometheus serves")
    parser.add_argument("--interval", default="5s", help="between two scrapes")
    options = parser.parse_args()
    # As an interrupt, or Prometheus and its data would stay.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    targets = {"h3-scheduler": options.scheduler, "h3-worker": options.worker}
    with Prometheus(targets, interval=options.interval, listen=options.listen) as prometheus:
        print(f"ready {prometheus.url}", flush=True)
        try:
            return prometheus.process.wait()
        except KeyboardInterrupt:
            return 0


if __name__ == "__main__":
    sys.exit(main())
