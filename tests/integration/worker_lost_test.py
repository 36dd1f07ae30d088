"""A worker that dies takes neither the scheduler nor the next request with it."""

import os
import signal
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from h3test.protos import operations, operations_grpc
from h3test.requests import Generate, RequestFile, Session, reason, stack
from h3test.servers import wait_for

STACK = stack(("turbo", 1.0), ("style", 0.5))


@pytest.fixture
def server(small_h3, fresh_server):
    return fresh_server(small_h3 / "h3-small.safetensors", small_h3 / "adapters")


@pytest.fixture
def request_file(small_h3):
    return RequestFile(small_h3 / "request.safetensors")


def in_the_middle(call):
    for kind, event in call:
        if kind == "progress" and event.step >= 1:
            return


def test_sigkill_in_the_middle_of_a_request(server, request_file):
    with grpc.insecure_channel(server.address) as channel:
        operator = operations_grpc.OperationsStub(channel)
        before = Generate(channel, request_file, STACK, seed=1, evaluations=2).run()
        call = Generate(channel, request_file, STACK, seed=1, evaluations=1000)
        in_the_middle(call)
        (worker,) = server.worker_pids()
        killed = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            call.run()
        assert time.monotonic() - killed < 2
        assert reason(caught.value) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")

        def ready():
            status = operator.GetStatus(operations.GetStatusRequest())
            return status.workers[0].state == operations.WORKER_STATE_READY and status.workers[0].restarts == 1

        wait_for(ready, "the worker is back", 30)
        after = Generate(channel, request_file, STACK, seed=1, evaluations=2).run()
        assert all((after.tensors[name] == before.tensors[name]).all() for name in before.tensors)
        assert server.worker_pids() != [worker]


def test_a_session_learns_that_its_worker_died(server, request_file):
    with grpc.insecure_channel(server.address) as channel:
        session = Session(channel, request_file, STACK)
        (worker,) = server.worker_pids()
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            session.evaluate({"target_video": request_file.targets["target_video"], "target_audio_rows": request_file.targets["target_audio_rows"]}, sigma=0.9)
        assert reason(caught.value) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")


def test_a_stopped_worker_is_noticed_too(server, request_file):
    """SIGSTOP: the process is there and silent, as with a hung device driver."""
    with grpc.insecure_channel(server.address) as channel:
        call = Generate(channel, request_file, STACK, seed=1, evaluations=1000, timeout=60)
        in_the_middle(call)
        (worker,) = server.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        try:
            with pytest.raises(grpc.RpcError) as caught:
                call.run()
            assert reason(caught.value) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")
        finally:
            if worker in server.worker_pids():
                os.kill(worker, signal.SIGCONT)


def test_readiness_follows_the_worker_and_liveness_does_not(server):
    with grpc.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def status(service):
            return health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status

        (worker,) = server.worker_pids()
        # A restart may be quick: watch from before the end.
        seen = []
        watch = health.Watch(health_pb2.HealthCheckRequest(service="readiness"), timeout=30)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        os.kill(worker, signal.SIGKILL)
        seen.append(next(watch).status)
        assert status("liveness") == status("") == health_pb2.HealthCheckResponse.SERVING
        seen.append(next(watch).status)
        watch.cancel()
        assert seen == [health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING]


def test_sigterm_finishes_what_runs_and_refuses_the_rest(server, request_file):
    with grpc.insecure_channel(server.address) as channel:
        call = Generate(channel, request_file, STACK, seed=1, evaluations=40)
        in_the_middle(call)
        worker_pids = server.worker_pids()
        finished = threading.Event()
        stopping = threading.Thread(target=lambda: (server.process.send_signal(signal.SIGTERM), server.process.wait(60), finished.set()))
        stopping.start()

        def refused():
            try:
                Generate(channel, request_file, seed=1, evaluations=1).run()
            except grpc.RpcError as error:
                return reason(error)
            return None

        assert wait_for(refused, "new work is refused", 10) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert call.run().completed
        assert finished.wait(30) and server.process.returncode == 0
        stopping.join()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in worker_pids), "a process was left behind"


def test_a_second_sigterm_ends_at_once(server, request_file):
    with grpc.insecure_channel(server.address) as channel:
        call = Generate(channel, request_file, STACK, seed=1, evaluations=1000)
        in_the_middle(call)
        worker_pids = server.worker_pids()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: "draining" in server.log(), "the first one was seen")
        server.exit_code = 1
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(5)
        with pytest.raises(grpc.RpcError):
            call.run()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in worker_pids), "the worker left with it", 5)
