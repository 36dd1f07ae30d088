"""Where programs listen and where they write: what cannot be is told in one plain line, before anything is loaded."""

import json
import socket
import subprocess

import pytest

from h3test import BIN, GOLDEN

SCHEDULER = ["h3-scheduler", "--model", GOLDEN / "full/model.safetensors", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
WORKER = ["h3-worker", "--model", GOLDEN / "full/model.safetensors", "--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]
FLAGS = [(SCHEDULER, "--listen"), (SCHEDULER, "--metrics"), (SCHEDULER, "--worker-metrics"),
         (WORKER, "--listen"), (WORKER, "--metrics")]
IDS = [f"{command[0]}{flag}" for command, flag in FLAGS]


def refusal(command, flag, address):
    """(exit code, what it said) of a server with another value of that flag."""
    arguments = list(command)
    if flag in arguments:
        arguments[arguments.index(flag) + 1] = address
    else:
        arguments += [flag, address]
    done = subprocess.run([BIN / arguments[0], *arguments[1:]], capture_output=True, text=True, timeout=60,
                          stdin=subprocess.DEVNULL)
    assert done.stdout == ""
    assert done.stderr.startswith(f"{flag} {address}: ") and done.stderr.count("\n") == 1, done.stderr
    return done.returncode, done.stderr.removeprefix(f"{flag} {address}: ").strip()


@pytest.mark.parametrize("address, message", [
    ("127.0.0.1:70000", 'the port "70000" is not a number from 0 to 65535'),
    ("127.0.0.1:99999999999999999999", "is not a number from 0 to 65535"),
    ("127.0.0.1:-1", "is not a number from 0 to 65535"),
    ("127.0.0.1:http", "is not a number from 0 to 65535"),
    ("127.0.0.1", "needs HOST:PORT"),
    (":50051", "needs HOST:PORT"),
    ("no.such.host.invalid:0", "is no host that is known here"),
    ("999.1.1.1:0", "is no host that is known here"),
    ("192.0.2.1:0", "is no address of this machine"),
    ("::1:50051", "in brackets"),
])
@pytest.mark.parametrize("command, flag", FLAGS, ids=IDS)
def test_what_is_no_address_here_is_wrong_usage(command, flag, address, message):
    code, said = refusal(command, flag, address)
    assert code == 2 and message in said


@pytest.mark.parametrize("command, flag", FLAGS, ids=IDS)
def test_a_port_in_use_is_told(command, flag):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, said = refusal(command, flag, f"127.0.0.1:{other.getsockname()[1]}")
    assert code == 1 and "is in use by another program" in said


def test_a_result_on_standard_output_equals_the_file_bit_for_bit(fresh_server, tmp_path):
    server = fresh_server(GOLDEN / "full/model.safetensors", GOLDEN)
    command = [BIN / "h3ctl", "--server", server.address, "--json", "generate", "--request", GOLDEN / "inputs/t2va.safetensors",
               "--evaluations", "1", "--seed", "7", "--output"]
    subprocess.run([*command, tmp_path / "out.safetensors"], check=True, capture_output=True)
    piped = subprocess.run([*command, "-"], check=True, capture_output=True)
    assert piped.stdout == (tmp_path / "out.safetensors").read_bytes()
    assert [json.loads(line)["event"] for line in piped.stderr.splitlines()][-1] == "completed"
    dropped = subprocess.run([*command, "/dev/null"], check=True, capture_output=True)
    assert b'"completed"' in dropped.stdout and dropped.stderr == b""


def test_a_name_of_this_machine_is_an_address(fresh_server):
    server = fresh_server(GOLDEN / "full/model.safetensors", GOLDEN, "--worker-metrics", "localhost:0")
    assert server.worker_metrics.startswith("localhost:")
