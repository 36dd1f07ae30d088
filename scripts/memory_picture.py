#!/usr/bin/env python3
"""Makes deploy/monitoring/images/memory.png: a real server generates with stacks, a real Prometheus watches, render_panels.py
draws.

  memory_picture.py [--bin build/release/bin] [--output FILE]

Takes about a minute. Needs `prometheus`, and the Python packages of scripts/requirements-test.txt.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "deploy/monitoring"))
sys.path.insert(0, str(ROOT / "scripts"))

import render_panels  # noqa: E402  They are programs, not packages.
from local import Prometheus, ask, free_port  # noqa: E402

# What is generated: one thing changes from line to line, so that the picture shows what it costs.
STACKS = [
    ["turbo=1"],
    ["turbo=1", "style=0.6"],
    ["turbo=1", "style=0.2"],
    ["style=0.9", "turbo=1"],
    ["turbo=1,apply=materialized", "style=0.6"],
    ["turbo=1", "style=0.6"],
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin", help="folder of h3-scheduler and h3ctl")
    parser.add_argument("--output", type=pathlib.Path, default=ROOT / "deploy/monitoring/images/memory.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="h3-picture-") as folder:
        folder = pathlib.Path(folder)
        subprocess.run([sys.executable, ROOT / "scripts/make_checkpoint.py", "demo", folder], check=True)
        worker = f"127.0.0.1:{free_port()}"
        with open(folder / "log", "w") as log:
            server = subprocess.Popen(
                [options.bin / "h3-scheduler", "--model", folder / "h3-small.safetensors", "--adapters", folder / "adapters",
                 "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--worker-metrics", worker, "--device-memory", "512MiB",
                 "--adapter-memory", "32MiB"], stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            ready = re.fullmatch(r"ready grpc=(\S+) metrics=(\S+)\n", server.stdout.readline())
            if not ready:
                raise RuntimeError((folder / "log").read_text())
            environment = {**os.environ, "H3_SERVER": ready[1]}
            with Prometheus({"h3-scheduler": [ready[2]], "h3-worker": [worker]}, interval="500ms") as prometheus:
                while len(ask(prometheus.url, "query", query="up == 1")["result"]) < 2:
                    time.sleep(0.2)
                start = time.time()
                time.sleep(3)
                for i, stack in enumerate(STACKS):
                    loras = [it for entry in stack for it in ("--lora", entry)]
                    print("generate", *loras, flush=True)
                    subprocess.run([options.bin / "h3ctl", "generate", "--request", folder / "request.safetensors", *loras,
                                    "--evaluations", "8", "--seed", str(i), "--output", folder / "out.safetensors"],
                                   env=environment, check=True, stdout=subprocess.DEVNULL)
                    time.sleep(2)
                time.sleep(2)
                dashboard = json.loads(render_panels.WORKER_MEMORY.read_text())
                options.output.parent.mkdir(parents=True, exist_ok=True)
                caption = f"{dashboard['title']}: {len(STACKS)} generations of the demo model on the CPU"
                render_panels.render(prometheus.url, dashboard, render_panels.MAIN_PANELS[dashboard["uid"]], {}, start, time.time(), 0.5, "2s",
                                     options.output, caption)
        finally:
            server.terminate()
            server.wait(timeout=60)
    print(options.output)


if __name__ == "__main__":
    main()
