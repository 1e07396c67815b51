"""Lifelines of real ranks: who gets one, what carries a signal, and what is left when they are
closed.
"""

import contextlib
import io
import os
import random
import socket
import threading
import time
import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from distributed.harness import free_port
from distributed.training import Module, hash_of, loader, rank, trainer_for
from lightning_dct import DCTStrategy, Updates
from lightning_dct.failures import sockets
from lightning_dct.failures.hub import STRANGERS, Hub
from lightning_dct.failures.lifeline import Lifeline, check_lifelines

ROUNDS = 12


def threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_dct")
    ]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def places_of_signals() -> dict[int, int]:
    """Where this rank acts on the signals that it and the others receive at random moments."""
    lifeline = Lifeline.open()
    assert lifeline is not None
    chance = random.Random(rank())
    sent = []
    acted = {}
    for place in range(20 * ROUNDS):
        if place % 20 == 0 and chance.random() < 0.7:
            sent.append(place)
            lifeline.signalled(place)
        time.sleep(chance.random() * 3e-4)
        acted.update(dict.fromkeys(lifeline.passed(), place))
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, sent)
    # One that has left acts no more: all go on until the last signal of any has been acted on.
    while acted.keys() != {signal for signals in by_rank for signal in signals}:
        place += 1
        time.sleep(chance.random() * 3e-4)
        acted.update(dict.fromkeys(lifeline.passed(), place))
    lifeline.close()
    return acted


def test_all_ranks_act_on_a_signal_at_the_same_place(ranks: Any) -> None:
    """Oracle: each other's places, though nothing else keeps the ranks together."""
    first, *others = ranks(3).run(places_of_signals)
    assert len(first) > ROUNDS / 4
    assert others == [first, first]


def says_who_is_missing() -> str:
    """What this rank has printed until the last one has opened its lifeline."""
    printed = io.StringIO()
    with patch("lightning_dct.failures.waiting.FIRST_S", 0.01), contextlib.redirect_stderr(printed):
        if rank() == dist.get_world_size() - 1:
            while not dist.distributed_c10d._get_default_store().check(["has said"]):
                time.sleep(0.01)
            lifeline = Lifeline.open()
        else:
            opening = threading.Thread(target=lambda: opened.append(Lifeline.open()))
            opened: list[Any] = []
            opening.start()
            while "load data" not in printed.getvalue():
                time.sleep(0.01)
            dist.distributed_c10d._get_default_store().set("has said", "")
            opening.join()
            (lifeline,) = opened
    assert lifeline is not None
    lifeline.close()
    return printed.getvalue()


def test_a_rank_says_whose_lifeline_is_missing(ranks: Any) -> None:
    """Oracle: the rank that opens its lifeline only once the others have said that they wait."""
    said = ranks(2).run(says_who_is_missing)
    assert "for ranks [1] to come to their first exchange" in said[0]


def open_and_close(wanted: Any) -> tuple[bool, list[str], list[str], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lifeline = Lifeline.open(wanted[rank()])
    running = threads()
    dist.barrier()  # rank 0's end ends the threads of others
    if lifeline is not None:
        with patch("lightning_dct.failures.lifeline.ANSWER_S", 240.0):
            lifeline.close()
    return lifeline is not None, [str(warning.message) for warning in caught], running, threads()


def test_nothing_is_left_of_a_closed_lifeline(ranks: Any) -> None:
    """Oracle: the names of the threads that run; rank 0's are two."""
    for round_ in range(2):
        first, second = ranks(2).run(open_and_close, (True, True))
        assert first == (True, [], ["lightning_dct hub", "lightning_dct lifeline"], []), round_
        assert second == (True, [], ["lightning_dct lifeline"], []), round_


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)])
def test_all_ranks_have_a_lifeline_or_none(ranks: Any, wanted: tuple[bool, bool]) -> None:
    """Oracle: a warning with the rank that wants none, where another does; no thread."""
    said = [] if not any(wanted) else [f"rank {wanted.index(False)} has `lifelines=False`"]
    for opened, warned, _, left in ranks(2).run(open_and_close, wanted):
        assert not opened
        assert len(warned) == len(said)
        assert all(reason in warning for reason, warning in zip(said, warned, strict=True))
        assert left == []


def listening(port: int) -> tuple[bool, bool]:
    lifeline = Lifeline.open(port)
    assert lifeline is not None
    chosen = lifeline._hub.port == port if lifeline._hub else True
    lifeline.close()
    return chosen, listens(port)


def loop_listens(port: int) -> bool:
    model = torch.nn.Linear(1, 1)
    updates = Updates(model, torch.optim.SGD(model.parameters(), 0.1), lifelines=port)
    assert updates.lifeline is not None
    return updates.lifeline._hub.port == port if updates.lifeline._hub else True


def test_the_port_can_be_chosen(ranks: Any) -> None:
    """Oracle: the hub's port; twice, as in two fits of one process."""
    port = free_port()
    for _ in range(2):
        assert ranks(2).run(listening, port) == [(True, False)] * 2
    assert ranks(2).run(loop_listens, port) == [True] * 2


def test_a_port_that_is_taken_is_said(ranks: Any) -> None:
    """Oracle: a warning on both ranks, which names what to set, and no lifeline."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for opened, (warned,), _, left in ranks(2).run(open_and_close, (port, port)):
            assert not opened
            assert "rank 0 cannot listen" in warned
            assert "lifelines" in warned
            assert left == []


def open_among_strangers() -> tuple[bool, list[str], list[str], list[str]]:
    """Rank 1 is slow to say hello: before that, so many strangers call that the hub hangs up on
    it.
    """
    say = sockets.write_line
    strangers = []

    def crowd_out(connection: socket.socket, message: dict[str, Any]) -> None:
        if "token" in message and not strangers:
            strangers.extend(
                socket.create_connection(connection.getpeername()[:2]) for _ in range(3 + STRANGERS)
            )
            assert connection.recv(1) == b""
        say(connection, message)

    with patch.object(sockets, "write_line", crowd_out):
        opened = open_and_close((True, True))
    for stranger in strangers:
        stranger.close()
    return opened


def test_a_rank_that_strangers_crowd_out_calls_again(ranks: Any) -> None:
    """Oracle: the lifelines of ranks without strangers, and no warning."""
    first, second = ranks(2).run(open_among_strangers)
    assert first == (True, [], ["lightning_dct hub", "lightning_dct lifeline"], [])
    assert second == (True, [], ["lightning_dct lifeline"], [])


def open_where_nobody_is_let_in() -> tuple[Any, str]:
    told = io.StringIO()
    with (
        patch.object(Hub, "_admit", side_effect=ValueError("no")),
        patch("lightning_dct.failures.lifeline.CONNECT_S", 0.1),
        contextlib.redirect_stderr(told),
    ):
        return open_and_close((True, True)), told.getvalue()


def test_a_close_before_the_welcome_is_no_death(ranks: Any) -> None:
    """Oracle: a warning on both ranks, with the rank that cannot connect; nothing is printed, and
    nothing ends.
    """
    for (opened, (warned,), _, left), told in ranks(2).run(open_where_nobody_is_let_in):
        assert not opened
        assert "rank 1 cannot connect to rank 0" in warned
        assert left == []
        assert told == ""


class Unread(io.StringIO):
    """What a process writes to when the other end of its pipe is gone."""

    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_a_rank_ends_when_nobody_reads_what_it_prints() -> None:
    """Oracle: the exit status of a rank whose collective does not notice that rank 0 has died."""
    ours, theirs = sockets.pair()
    with (
        patch("lightning_dct.failures.lifeline.GRACE_S", 0.0),
        patch("lightning_dct.failures.lifeline.os._exit") as exited,
        contextlib.redirect_stderr(Unread()),
    ):
        lifeline = Lifeline(1, ours, "Rank 0")
        theirs.close()
        lifeline._thread.join()
    exited.assert_called_once_with(1)


def test_a_rank_hears_a_question_of_many_ranks() -> None:
    """Oracle: the message after it, which tells that rank 0 has left and not that it cannot be
    reached.
    """
    ours, theirs = sockets.pair()
    lifeline = Lifeline(1, ours, "Rank 0")
    many = list(range(10_000))
    asked = {
        "place": 1,
        "what": "a barrier",
        "said": "a barrier",
        "peers": many,
        "rank": 0,
        "counts": [[many, 1]],
    }
    sockets.write_line(theirs, {"ask": asked})
    sockets.write_line(theirs, {"over": ""})
    theirs.close()
    lifeline._thread.join()
    assert lifeline.failure == "Rank 0 has left"


def test_a_rank_that_ends_because_of_another_one_ends_in_time() -> None:
    """On a GPU its teardown may wait for what the lost rank has not sent, although `report` has
    come back.
    """
    ours, theirs = sockets.pair()
    with (
        patch("lightning_dct.failures.lifeline.GRACE_S", 0.2),
        patch("lightning_dct.failures.lifeline.os._exit") as exited,
        contextlib.redirect_stderr(io.StringIO()),
    ):
        lifeline = Lifeline(1, ours, "Rank 0")
        sockets.write_line(theirs, {"failure": "Rank 2 has died", "blamed": [2]})
        lifeline._decided.wait(20)
        with pytest.raises(RuntimeError, match="Rank 2 has died") as raised:
            lifeline.check_order("an exchange", "an exchange", [1])
        assert lifeline.report(raised.value) == "Rank 2 has died"
        deadline = time.monotonic() + 20
        while not exited.called and time.monotonic() < deadline:
            time.sleep(0.01)
        theirs.close()
        lifeline._thread.join()
    exited.assert_called_once_with(1)


@pytest.mark.parametrize(
    ("exception", "reported"),
    [(AssertionError(), "AssertionError"), (ValueError("It is so.\nWhy?"), "ValueError: It is so")],
)
def test_an_exception_is_reported_by_its_name_and_its_first_line(
    exception: Exception, reported: str
) -> None:
    """Without its full stop, because a sentence goes on or ends after it."""
    ours, theirs = sockets.pair()
    with (
        patch("lightning_dct.failures.lifeline.ANSWER_S", 0.0),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        lifeline = Lifeline(1, ours, "Rank 0")
        lifeline.report(exception)
        with theirs:
            assert theirs.makefile().readline() == f'{{"failed": "{reported}"}}\n'
        lifeline._thread.join()


def train_on_uneven_batches() -> str:
    """Rank 1 has two batches more, after the last of which nothing is exchanged."""
    module = Module()
    trainer = trainer_for(DCTStrategy(local_steps=4, warmup_steps=0, density=0.5))
    trainer.fit(module, loader(9 + 2 * rank(), 40, 8))
    return hash_of(module)


def test_uneven_batches_without_an_exchange_are_no_mistake(ranks: Any) -> None:
    """Oracle: both ranks end with the weights of the exchange in step 8."""
    one, other = ranks(2).run(train_on_uneven_batches)
    assert one == other


def fail_when_rank_0_has_left() -> str:
    lifeline = Lifeline.open()
    assert lifeline is not None
    failure = ""
    if rank() == 1:
        lifeline._thread.join()  # the end of the hub has been heard
        failure = lifeline.report(ValueError("no"))
    lifeline.close()
    return failure


def test_who_fails_after_rank_0_has_left_is_told(ranks: Any) -> None:
    """Oracle: it hears it, so that it begins no checkpoint, which would take rank 0."""
    first, second = ranks(2).run(fail_when_rank_0_has_left)
    assert first == ""
    assert "Rank 0 (process " in second
    assert "has left" in second


@pytest.mark.parametrize("wanted", [0, -1, 1 << 16, 1.0, "29500", None])
def test_what_is_no_port_is_refused(wanted: Any) -> None:
    with pytest.raises(ValueError, match="lifelines"):
        check_lifelines(wanted)


def train_without() -> dict[str, Any]:
    """What a training without lifelines does to the process."""
    before = dict(os.environ)
    strategy = DCTStrategy(density=0.1, lifelines=False)
    trainer = trainer_for(strategy)
    with (
        patch("lightning_dct.failures.process_group.meet") as meet,
        patch("lightning_dct.failures.process_group.atexit.register") as pause,
    ):
        trainer.fit(Module(), loader(2, 40, 8))
    return {
        "environment": {
            name for name in {*before, *os.environ} if before.get(name) != os.environ.get(name)
        },
        "store": meet.called,
        "pause": pause.called,
        "threads": threads(),
        "callbacks": {"FailureNotice", "SignalsAfterStep"}
        & {type(callback).__name__ for callback in trainer.callbacks},
        "lifeline": strategy.lifeline,
    }


def test_lifelines_can_be_turned_off(ranks: Any) -> None:
    """Oracle: nothing of all that lifelines bring."""
    for found in ranks(2).run(train_without):
        assert not any(found.values()), found


class Broadcasts(Callback):
    """Counts the process group's broadcasts from the start of the first batch to the start of the
    last.
    """

    def __init__(self) -> None:
        self.at_starts: list[int] = []

    def on_train_start(self, *_: Any) -> None:
        self.patch = patch.object(dist, "broadcast", wraps=dist.broadcast)
        self.broadcast = self.patch.start()

    def on_train_batch_start(self, *_: Any) -> None:
        self.at_starts.append(self.broadcast.call_count)

    def on_train_end(self, *_: Any) -> None:
        self.patch.stop()


def broadcasts_in_steps(lifelines: bool) -> tuple[int, bool]:
    counter = Broadcasts()
    trainer = trainer_for(DCTStrategy(lifelines=lifelines), callbacks=[counter])
    trainer.fit(Module(), loader(6, 40, 8))
    is_lightnings = (
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor.__name__
        == "_broadcast_sigterm_tensor"
    )
    return counter.at_starts[-1] - counter.at_starts[0], is_lightnings


@pytest.mark.parametrize(("lifelines", "broadcasts"), [(True, 0), (False, 5)])
def test_lifelines_save_lightnings_round_trip(ranks: Any, lifelines: bool, broadcasts: int) -> None:
    """Oracle: Lightning agrees on SIGTERM before every batch, and does so again after fit."""
    assert ranks(2).run(broadcasts_in_steps, lifelines) == [(broadcasts, True)] * 2
