"""h3ctl as a user runs it."""

import json
import subprocess

from h3test import BIN


def run(*arguments, server=None, timeout=120):
    command = [BIN / "h3ctl", *(["--server", server] if server else []), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def ok(*arguments, **options):
    """Its standard output; it must succeed."""
    done = run(*arguments, **options)
    assert done.returncode == 0, f"h3ctl {' '.join(map(str, arguments))} ended with {done.returncode}: {done.stderr}"
    return done.stdout


def refusal(*arguments, **options):
    """(exit code, error object) of a command that must be refused."""
    done = run("--json", *arguments, **options)
    assert done.returncode != 0, f"h3ctl {' '.join(map(str, arguments))} was not refused: {done.stdout}"
    return done.returncode, json.loads(done.stderr)
