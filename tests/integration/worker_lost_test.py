"""A worker that dies takes neither the scheduler nor the next request with it."""

import concurrent.futures
import os
import signal
import threading
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from h3test import GOLDEN, metrics
from h3test.protos import generation, operations, operations_grpc
from h3test.requests import Generate, RequestFile, Session, reason, stack
from h3test.servers import Worker, wait_for

STACK = stack(("turbo", 1.0), ("style", 0.5))
EVALUATIONS = 800  # Of a model so small that this is some seconds.


@pytest.fixture
def server(small_h3, fresh_server):
    return fresh_server(small_h3 / "h3-small.safetensors", small_h3 / "adapters")


@pytest.fixture
def request_file(small_h3):
    return RequestFile(small_h3 / "request.safetensors")


def same(one, other):
    return all((one.tensors[name] == other.tensors[name]).all() for name in other.tensors)


def in_the_middle(call):
    for kind, event in call:
        if kind == "progress" and event.step >= 1:
            return


def test_sigkill_in_the_middle_of_a_request(server, request_file):
    with grpc.insecure_channel(server.address) as channel:
        operator = operations_grpc.OperationsStub(channel)
        quiet = Generate(channel, request_file, STACK, seed=1, evaluations=10).run()
        call = Generate(channel, request_file, STACK, seed=1, evaluations=10)
        in_the_middle(call)
        (worker,) = server.worker_pids()
        killed = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        progress = [(event, time.monotonic()) for kind, event in call if kind == "progress"]
        queued = [(event, when) for event, when in progress if event.phase == generation.PHASE_QUEUED]
        assert [event.attempt for event, _ in queued] == [1], "the client was told once"
        assert queued[0][1] - killed < 2
        assert progress[-1][0].attempt == 1
        assert same(call, quiet)
        assert server.worker_pids() != [worker]
        status = operator.GetStatus(operations.GetStatusRequest())
        assert status.workers[0].state == operations.WORKER_STATE_READY and status.workers[0].restarts == 1
        assert same(Generate(channel, request_file, STACK, seed=1, evaluations=10).run(), quiet)


def test_without_retries_the_client_learns_it(small_h3, fresh_server, request_file):
    server = fresh_server(small_h3 / "h3-small.safetensors", small_h3 / "adapters", "--retries", "0")
    with grpc.insecure_channel(server.address) as channel:
        call = Generate(channel, request_file, STACK, seed=1, evaluations=1000)
        in_the_middle(call)
        killed = time.monotonic()
        os.kill(*server.worker_pids(), signal.SIGKILL)
        with pytest.raises(grpc.RpcError) as caught:
            call.run()
        assert time.monotonic() - killed < 2
        assert reason(caught.value) == (grpc.StatusCode.UNAVAILABLE, "WORKER_LOST")


def test_a_request_that_kills_each_worker_it_meets_is_refused(server, request_file):
    with grpc.insecure_channel(server.address) as channel:
        call = Generate(channel, request_file, STACK, seed=1, evaluations=1000)
        deaths = 0
        with pytest.raises(grpc.RpcError) as caught:
            for kind, event in call:
                # Long before the next step: the worker says each.
                if kind == "progress" and event.phase != generation.PHASE_QUEUED and event.attempt == deaths:
                    os.kill(*server.worker_pids(), signal.SIGKILL)
                    deaths += 1
        assert reason(caught.value) == (grpc.StatusCode.FAILED_PRECONDITION, "REQUEST_KILLS_WORKERS")
        assert deaths == 2
        assert Generate(channel, request_file, STACK, seed=1, evaluations=2).run().completed, "the others go on"
        shown = metrics.values(server.metrics)
        assert shown["h3_requests_poisonous_total"] == 1 and shown["h3_requests_retried_total"] == 1


def test_a_client_may_leave_while_its_request_waits_for_the_restart(server, request_file):
    with grpc.insecure_channel(server.address) as channel:
        call = Generate(channel, request_file, STACK, seed=1, evaluations=1000)
        in_the_middle(call)
        os.kill(*server.worker_pids(), signal.SIGKILL)
        next(event for kind, event in call if kind == "progress" and event.attempt == 1)
        call.call.cancel()
        assert Generate(channel, request_file, STACK, seed=1, evaluations=2).run().completed


def test_killed_workers_cost_no_request(fresh_server):
    """Six clients, two workers that are killed in turn and come back: every result is there, and the same as in peace."""
    model, inputs = GOLDEN / "full/model.safetensors", RequestFile(GOLDEN / "inputs/t2va.safetensors")
    workers = [Worker(model, GOLDEN) for _ in range(2)]
    try:
        server = fresh_server(None, GOLDEN, *(option for worker in workers for option in ("--worker", worker.address)))
        with grpc.insecure_channel(server.address) as channel:
            begin = time.monotonic()
            expected = [Generate(channel, inputs, seed=seed, evaluations=EVALUATIONS).run() for seed in range(6)]
            one = (time.monotonic() - begin) / len(expected)
            over = threading.Event()

            def client(seed):
                done = 0
                while not over.is_set():
                    assert same(Generate(channel, inputs, seed=seed, evaluations=EVALUATIONS).run(), expected[seed])
                    done += 1
                return done

            with concurrent.futures.ThreadPoolExecutor(6) as pool:
                clients = [pool.submit(client, seed) for seed in range(6)]
                try:
                    for kill in range(4):
                        time.sleep(max(4, 3 * one))  # On a busy machine too, a request is hit less often than --retries allows.
                        workers[kill % 2].kill()
                        workers[kill % 2].start()
                finally:
                    over.set()
                assert all(client.result() > 0 for client in clients)
            shown = metrics.values(server.metrics)
            assert shown["h3_requests_retried_total"] > 0, "nobody was hit"
            assert shown["h3_requests_poisonous_total"] == 0
    finally:
        for worker in workers:
            worker.kill()


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
        call = Generate(channel, request_file, STACK, seed=1, evaluations=10, timeout=60)
        in_the_middle(call)
        (worker,) = server.worker_pids()
        os.kill(worker, signal.SIGSTOP)
        try:
            next(event for kind, event in call if kind == "progress" and event.attempt == 1)
        finally:
            os.kill(worker, signal.SIGCONT)
        assert call.run().completed, "it waited for a worker that answers"


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
        wait_for(lambda: "draining" in server.log(), "the signal was seen")  # What comes before waits its turn and keeps the server.

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
