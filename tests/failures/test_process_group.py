"""Ranks that start again find each other in a store that is full of what dead ranks have said."""

import os
from datetime import timedelta
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from distributed.harness import CONTEXT, free_port, started
from lightning_dct import Updates
from lightning_dct.failures.meeting import Job
from lightning_dct.failures.process_group import init_process_group, job_of, meet

WORLD_SIZE = 3
# Far more than any of it takes on a quiet machine.
PATIENCE = timedelta(seconds=240)


def start(rank: int, port: int, lifelines: bool | int, answer: Connection) -> None:
    """What a rank does under torchrun's agent, whose store is at ``port``: the sum of all ranks,
    the port of the store, and that of the lifelines, which rank 0 knows.
    """
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(WORLD_SIZE),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    init_process_group("gloo", timeout=PATIENCE, lifelines=lifelines)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    model = torch.nn.Linear(1, 1)
    updates = Updates(model, torch.optim.SGD(model.parameters(), 0.1))
    hub = None if updates.lifeline is None else updates.lifeline._hub
    answer.send((total.item(), int(os.environ["MASTER_PORT"]), None if hub is None else hub.port))


@pytest.fixture
def agent() -> dist.Store:
    """The store of torchrun's agent, with what ranks 1 and 2 and rank 0 of a dead start have
    said.
    """
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for rank in (1, 2):
        store.set(f"lightning_dct/request/{rank}", f"old-{rank}")
        store.set(f"lightning_dct/reply/old-{rank}", "localhost 1")
    return store


def test_every_start_has_a_store_of_its_own(agent: dist.TCPStore) -> None:
    """Oracle: the sum of the ranks, in starts one after the other, at other ports than the agent's:
    free ones, those that are asked for, and, without lifelines, the agent's.
    """
    chosen = free_port()
    stores = []
    hubs = []
    for lifelines in (True, chosen, False):
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(WORLD_SIZE)]
        processes = [
            started(start, rank, agent.port, lifelines, sender)
            for rank, (_, sender) in enumerate(pipes)
        ]
        answers = []
        for receiver, _ in pipes:
            assert receiver.poll(PATIENCE.total_seconds())
            answers.append(receiver.recv())
        totals, ports, (hub, *_) = zip(*answers, strict=True)
        assert set(totals) == {3.0}
        stores.append(set(ports))
        hubs.append(hub)
        for process in processes:
            process.kill()
            process.join()
    assert len(stores[0]) == 1
    assert agent.port not in stores[0]
    assert stores[1:] == [{chosen + 1}, {agent.port}]
    assert hubs[0] not in (None, chosen)
    assert hubs[1:] == [chosen, None]


@pytest.mark.parametrize(("rank", "says"), [(0, "ranks 1, 2 of 3"), (1, "no rank 0 of this start")])
def test_ranks_that_do_not_come_are_named(agent: dist.TCPStore, rank: int, says: str) -> None:
    """Oracle: who is missing."""
    with pytest.raises(RuntimeError, match=says):
        meet(Job(rank, 3, "localhost", agent.port, has_store=True), timedelta(seconds=3))


def test_a_process_that_nothing_has_started_as_a_rank_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(ValueError, match=r"lacks MASTER_ADDR, RANK, WORLD_SIZE\. Start .*torchrun"):
        init_process_group()
    with pytest.raises(TypeError, match="takes no `init_method`"):
        init_process_group(init_method="env://")
    with pytest.raises(ValueError, match="`lifelines` must be True, False or a port"):
        init_process_group(lifelines=0)


class Strategy:
    """What a job is made of."""

    cluster_environment = LightningEnvironment()
    world_size = 2
    global_rank = 1
    local_rank = 0
    set_world_ranks = _get_process_group_backend = str

    def __init__(self, num_nodes: int) -> None:
        self.num_nodes = num_nodes


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_only_ranks_of_several_hosts_meet_without_torchrun(
    monkeypatch: pytest.MonkeyPatch, num_nodes: int
) -> None:
    """Oracle: on one host nothing is between the ranks."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert (job_of(Strategy(num_nodes)) is None) == (num_nodes == 1)
