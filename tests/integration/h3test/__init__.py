"""What the integration tests share: the programs under test, requests for them, and golden answers."""

import os
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests/golden"
# The folder of h3-scheduler, h3-worker and h3ctl.
BIN = (ROOT / os.environ.get("H3_BIN", "build/release/bin")).resolve()
