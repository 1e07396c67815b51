"""Ranks that start again find each other in a store that is full of what dead ranks have said."""

import os
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist

from distributed.harness import CONTEXT, started
from lightning_dct.failures.process_group import meet_in_fresh_store

WORLD_SIZE = 3
# Far more than any of it takes on a quiet machine.
PATIENCE = timedelta(seconds=240)


def start(rank: int, port: int, answer: Connection) -> None:
    """What a rank does under torchrun's agent, whose store is at ``port``."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    meet_in_fresh_store(PATIENCE)
    meet_in_fresh_store(PATIENCE)  # the second time there is nothing to do
    dist.init_process_group("gloo", timeout=PATIENCE)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    answer.send((total.item(), os.environ["MASTER_PORT"]))


@pytest.fixture
def agent() -> dist.Store:
    """The store of torchrun's agent, with what ranks 1 and 2 and rank 0 of a dead start have said."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for rank in (1, 2):
        store.set(f"lightning_dct/request/{rank}", f"old-{rank}")
        store.set(f"lightning_dct/reply/old-{rank}", "localhost 1")
    return store


def test_every_start_has_a_store_of_its_own(agent: dist.TCPStore) -> None:
    """Oracle: the sum of the ranks, in two starts one after the other, at two other ports than the agent's."""
    ports = set()
    for _ in range(2):
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(WORLD_SIZE)]
        processes = [started(start, rank, agent.port, sender) for rank, (_, sender) in enumerate(pipes)]
        for receiver, _ in pipes:
            assert receiver.poll(PATIENCE.total_seconds())
            total, port = receiver.recv()
            assert total == 3.0
            ports.add(port)
        for process in processes:
            process.kill()
            process.join()
    assert len(ports) == 2
    assert str(agent.port) not in ports


@pytest.mark.parametrize(("rank", "says"), [("0", r"ranks \[1, 2\]"), ("1", "nothing from rank 0")])
def test_ranks_that_do_not_come_are_named(
    agent: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, rank: str, says: str
) -> None:
    """Oracle: who is missing."""
    for name, value in {"RANK": rank, "WORLD_SIZE": "3", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RuntimeError, match=says):
        meet_in_fresh_store(timedelta(seconds=3))  # enough to connect to the store on a busy machine


def test_nothing_happens_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the environment, which stays as it is."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    before = dict(os.environ)
    meet_in_fresh_store(timedelta(seconds=0.1))
    assert dict(os.environ) == before
