"""Files that change under a server: replaced and deleted ones do not matter, a base that was written to ends the worker."""

import os
import shutil

import grpc
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from h3test import GOLDEN
from h3test.protos import adapters, adapters_grpc, operations, operations_grpc
from h3test.requests import Generate, RequestFile, Session, reason, stack
from h3test.servers import wait_for

T2VA = RequestFile(GOLDEN / "inputs/t2va.safetensors")
TARGETS = T2VA.targets


@pytest.fixture
def folder(tmp_path):
    """A base and two adapters of one's own."""
    shutil.copy(GOLDEN / "full/model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "adapters").mkdir()
    shutil.copy(GOLDEN / "lora/turbo_bare.safetensors", tmp_path / "adapters/style.safetensors")
    return tmp_path


@pytest.fixture
def channel(folder, fresh_server):
    server = fresh_server(folder / "model.safetensors", folder / "adapters")
    with grpc.insecure_channel(server.address) as channel:
        yield channel


def evaluate(session):
    return session.evaluate(TARGETS, sigma=0.9)["video"]


def replace(path, source):
    """As careful programs do: beside it, then over it."""
    shutil.copy(source, path.with_suffix(".new"))
    os.rename(path.with_suffix(".new"), path)


def test_a_base_that_is_replaced_or_deleted_serves_on(channel, folder):
    session = Session(channel, T2VA)
    before = evaluate(session)
    replace(folder / "model.safetensors", GOLDEN / "pruned/model.safetensors")
    assert np.array_equal(evaluate(session), before)
    (folder / "model.safetensors").unlink()
    assert np.array_equal(evaluate(session), before)
    session.close()
    again = Session(channel, T2VA)
    assert np.array_equal(evaluate(again), before)
    again.close()


def test_an_adapter_that_is_replaced_or_deleted_does_not_disturb_who_uses_it(channel, folder):
    path = folder / "adapters/style.safetensors"
    session = Session(channel, T2VA, stack(("style", 1.0)))
    digest = session.accepted.stack[0].digest
    before = evaluate(session)
    replace(path, GOLDEN / "lora/style_bf16.safetensors")
    assert np.array_equal(evaluate(session), before)

    # Who comes later gets what the name means now, under its own digest.
    later = Session(channel, T2VA, stack(("style", 1.0)))
    assert later.accepted.stack[0].digest != digest
    assert not np.array_equal(evaluate(later), before)
    path.unlink()
    assert np.array_equal(evaluate(session), before)
    later.close()
    session.close()
    with pytest.raises(grpc.RpcError) as caught:
        Generate(channel, T2VA, stack(("style", 1.0)), seed=1, evaluations=1).run()
    assert reason(caught.value) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_ADAPTER")


def test_factors_and_alphas_with_trailing_dimensions_of_one_answer_bit_for_bit_alike(channel, folder):
    """As tools write them that treat linear layers as 1x1 convolutions."""
    with safe_open(GOLDEN / "lora/turbo_comfy_alpha4.safetensors", "np") as file:
        flat, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()
    assert any(value.ndim == 2 for value in flat.values()) and any(name.endswith("alpha") for name in flat)
    padded = {name: value.reshape(*value.shape, 1, 1) for name, value in flat.items()}
    save_file(flat, folder / "adapters/flat.safetensors", metadata)
    save_file(padded, folder / "adapters/padded.safetensors", metadata)
    answers = []
    for name in ("flat", "padded"):
        session = Session(channel, T2VA, stack((name, 1.0)))
        answers.append(evaluate(session))
        session.close()
    assert np.array_equal(*answers)
    bare = Session(channel, T2VA)
    assert not np.array_equal(evaluate(bare), answers[0])
    bare.close()


def test_an_adapter_in_use_cannot_be_unloaded_and_a_free_one_gives_its_bytes_back(channel):
    registry = adapters_grpc.AdaptersStub(channel)
    operator = operations_grpc.OperationsStub(channel)
    loaded = registry.LoadAdapter(adapters.LoadAdapterRequest(name="style")).adapter
    assert loaded.resident and loaded.bytes > 0
    session = Session(channel, T2VA, stack(("style", 1.0)))
    before = evaluate(session)
    with pytest.raises(grpc.RpcError) as caught:
        registry.UnloadAdapter(adapters.UnloadAdapterRequest(name="style"))
    assert reason(caught.value) == (grpc.StatusCode.FAILED_PRECONDITION, "IN_USE")
    assert np.array_equal(evaluate(session), before)
    session.close()

    def unload():
        try:
            return registry.UnloadAdapter(adapters.UnloadAdapterRequest(name="style"))
        except grpc.RpcError:
            return None

    assert wait_for(unload, "the closed session has let go", 5).freed_bytes == loaded.bytes
    wait_for(lambda: operator.GetMemory(operations.GetMemoryRequest()).devices[0].owners.adapters == 0, "the ledger shows it", 5)


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\x3c" * 4096)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [overwrite, truncate], ids=lambda harm: harm.__name__)
def test_a_base_that_is_changed_in_place_ends_the_worker_instead_of_giving_wrong_answers(channel, folder, harm):
    session = Session(channel, T2VA)
    before = evaluate(session)
    harm(folder / "model.safetensors")
    # Bits as before, or an error: nothing else. The worker must notice soon.
    with pytest.raises(grpc.RpcError) as caught:
        for _ in range(200):
            assert np.array_equal(evaluate(session), before), "a wrong answer"
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    operator = operations_grpc.OperationsStub(channel)
    wait_for(lambda: operator.GetStatus(operations.GetStatusRequest()).workers[0].restarts >= 1
             or operator.GetStatus(operations.GetStatusRequest()).workers[0].state == operations.WORKER_STATE_LOST, "the worker has ended", 10)
