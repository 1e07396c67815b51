"""What a rank does with an exchange that fails or that it misses, against plain arithmetic; one process, no torchft."""

from typing import Any

import pytest
import torch

from lightning_dct.config import DCTConfig
from lightning_dct.elastic.elastic_updates import HANDS_OVER, ElasticUpdates, Header
from lightning_dct.exchange.collectives import Link
from lightning_dct.exchange.compressed import AllGather
from lightning_dct.sync.buffers import PresentBuffers
from lightning_dct.traffic import Traffic
from sync.optimizers import Sign


class Pretended:
    """Ranks that send what this one does, times a factor, or fail."""

    def __init__(self) -> None:
        self.round, self.quorum, self.commits, self.sent = 0, 1, True, []
        self.others: list[Any] = []
        self.forgotten = False

    def size(self) -> int:
        return 1 + len(self.others)

    def rank(self) -> int:
        return 0

    def meet(self) -> bool:
        return True

    def gather(self, sent: torch.Tensor, patience_s: float | None = None) -> torch.Tensor:
        self.sent.append(sent)
        return torch.stack([sent, *(other(sent) for other in self.others)])

    def agree(self) -> bool:
        self.round += self.commits
        return self.commits

    def forget(self) -> None:
        self.forgotten = True


def rank_of(
    values: torch.Tensor, make: Any = torch.optim.SGD, **settings: Any
) -> tuple[ElasticUpdates, Pretended, torch.nn.Parameter, Any]:
    parameter = torch.nn.Parameter(values.clone())
    optimizer = make([parameter], lr=1.0)
    config = DCTConfig(local_steps=1, warmup_steps=0, kernel="torch", **settings)
    present = Pretended()
    exchange = AllGather(Link(present, Traffic()))  # type: ignore[arg-type]
    exchange.link_traversals = 4.0
    every = PresentBuffers(dict, tuple), (lambda: [optimizer]), (lambda: [parameter])
    updates = ElasticUpdates(config, {parameter: "w"}, exchange, *every, rank=0)
    return updates, present, parameter, optimizer


def step(
    updates: ElasticUpdates, parameter: torch.nn.Parameter, optimizer: Any, gradient: torch.Tensor, seconds: float = 0.1
) -> None:
    updates.before_step(optimizer)
    parameter.grad = gradient.clone()
    optimizer.step()
    updates.after_step(optimizer)
    updates.add_step(True, seconds)


def train_and_meet(updates: ElasticUpdates, *of_step: Any) -> None:
    step(updates, *of_step)
    updates.exchange_updates()


@pytest.fixture
def gradient() -> torch.Tensor:
    return torch.randn(400)


def test_a_failed_exchange_changes_nothing(gradient: torch.Tensor) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25)
    present.commits = False
    step(updates, parameter, optimizer, gradient)
    assert updates.due
    updates.exchange_updates()
    assert torch.equal(parameter.data, -gradient)
    assert torch.equal(updates.weights.shared("w"), torch.zeros(400))


@pytest.mark.parametrize("added", [True, False])
def test_a_rank_that_is_behind_keeps_what_the_others_have_not_added(gradient: torch.Tensor, added: bool) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25, value_format="fp32")
    present.commits = False
    train_and_meet(updates, parameter, optimizer, gradient)
    sent = gradient.abs() >= gradient.abs()[parameter.data != 0].topk(100).values[-1]
    theirs = torch.randn(400)
    given = {"step": 3, "commits": [(0, 1 if added else 9)], "history": 7, "buffers": {}, "shared": {"w": theirs}}
    updates.catch_up(given)
    kept = torch.where(sent, 0.0, -gradient) if added else -gradient
    torch.testing.assert_close(parameter.data, theirs + kept)
    assert torch.equal(updates.weights.shared("w"), theirs)
    assert not updates.trains  # until it is at the step of the others
    step(updates, parameter, optimizer, torch.zeros(400))
    step(updates, parameter, optimizer, torch.zeros(400))
    assert not updates.due
    assert updates.trains


def test_a_rank_that_has_missed_too_much_starts_with_nothing_held_back(gradient: torch.Tensor) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25)
    present.commits = False
    train_and_meet(updates, parameter, optimizer, gradient)
    theirs = torch.randn(400)
    given = {"step": 300, "commits": [(200, 5)], "history": 7, "buffers": {}, "shared": {"w": theirs}}
    updates.catch_up(given)
    assert torch.equal(parameter.data, theirs)


def test_ranks_that_have_not_trained_are_not_counted_in_the_mean(gradient: torch.Tensor) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25, value_format="fp32")

    def silent(sent: torch.Tensor) -> torch.Tensor:
        is_header = sent.dtype == torch.int64
        return (
            torch.tensor(Header(*sent.tolist())._replace(rank=1, trained=0))
            if is_header
            else sent.new_zeros(sent.shape)
        )

    present.others = [silent]
    train_and_meet(updates, parameter, optimizer, gradient)
    shared = updates.weights.shared("w")
    assert int((shared != 0).sum()) == 100
    torch.testing.assert_close(shared[shared != 0], -gradient[shared != 0])  # of one sender, not of two
    assert updates.tallies[0][0] == 1
    assert updates.tallies[1][0] == 0


def test_a_rank_that_has_not_trained_moves_as_the_others_do(gradient: torch.Tensor) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25, value_format="fp32")
    other, _, theirs, their_optimizer = rank_of(torch.zeros(400), density=0.25, value_format="fp32")
    train_and_meet(other, theirs, their_optimizer, gradient)
    answers = list(other.present.sent)  # type: ignore[attr-defined]
    present.others = [lambda _: answers.pop(0)]
    updates.before_step(optimizer)
    parameter.data.copy_(torch.ones(400))  # not sent, because it counts as no step
    updates.after_step(optimizer)
    updates.exchange_updates()
    assert int((updates.weights.shared("w") != 0).sum()) == 100
    assert torch.equal(updates.weights.shared("w"), other.weights.shared("w"))
    assert torch.equal(parameter.data, 1.0 + updates.weights.shared("w"))


def test_a_rank_that_has_stopped_in_the_warm_up_reads_what_is_sent_after_it(gradient: torch.Tensor) -> None:
    """Others send more entries by then; it has no step of its own to send."""
    config = DCTConfig(local_steps=8, warmup_steps=4, kernel="torch", density=0.25, value_format="fp32")
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25, value_format="fp32")
    other, _, theirs, their_optimizer = rank_of(torch.zeros(400), density=0.25, value_format="fp32")
    updates.plans.change(config)
    other.plans.change(config)
    for _ in range(16):
        step(other, theirs, their_optimizer, gradient)
    other.exchange_updates()
    answers = list(other.present.sent)  # type: ignore[attr-defined]
    present.others = [lambda _: answers.pop(0)]
    train_and_meet(updates, parameter, optimizer, gradient)
    assert int((updates.weights.shared("w") != 0).sum()) == 100
    assert torch.equal(updates.weights.shared("w"), other.weights.shared("w"))
    assert updates.resume_at == 16


@pytest.mark.parametrize("commits", [True, False])
def test_a_rank_that_is_behind_reads_with_the_settings_of_the_step_in_which_others_send(
    gradient: torch.Tensor, commits: bool
) -> None:
    """A run of unknown length sends fewer entries from step 1,001 on."""
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25)
    later = DCTConfig(local_steps=1, warmup_steps=0, kernel="torch", density=0.1)

    class Grows:
        def reached(self, steps: int) -> int:
            return steps // 1000 * 1000

        def at(self, steps: int) -> DCTConfig:
            return later if steps >= 1000 else before

    other, _, theirs, their_optimizer = rank_of(torch.zeros(400), density=0.1)
    before = updates.config
    updates.run_settings = Grows()  # type: ignore[assignment]
    step(other, theirs, their_optimizer, gradient)
    other._the_rounds.steps = 1001
    other.exchange_updates()
    answers = list(other.present.sent)  # type: ignore[attr-defined]
    present.others, present.commits = [lambda _: answers.pop(0)], commits
    step(updates, parameter, optimizer, gradient)
    updates.exchange_updates()
    if commits:
        assert torch.equal(updates.weights.shared("w"), other.weights.shared("w"))
    else:
        assert updates.config.density == before.density


@pytest.mark.parametrize("others", [1, 2])
def test_ranks_that_have_met_apart_take_the_weights_of_the_most(gradient: torch.Tensor, others: int) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25)
    train_and_meet(updates, parameter, optimizer, gradient)  # alone
    shared, sent = updates.weights.shared("w").clone(), len(present.sent)
    present.others = [lambda header: torch.tensor(Header(*header.tolist())._replace(rank=1, history=5))] * others
    train_and_meet(updates, parameter, optimizer, gradient)
    assert len(present.sent) == sent + 1  # the header
    assert torch.equal(updates.weights.shared("w"), shared)
    assert present.forgotten == (others == 2)


def other_rank(ready: int, row: torch.Tensor, history: int, step: int = 1) -> Any:
    """Another rank, which sends a header and then, if ranks hand over, this row."""
    header = torch.tensor(Header(1, step, 1, 0, 0, ready=ready, history=history))
    return lambda sent: header if sent.dtype == torch.int64 else row


def test_a_rank_that_leaves_hands_over_what_it_has_not_sent(gradient: torch.Tensor) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25)
    train_and_meet(updates, parameter, optimizer, gradient)  # alone
    shared, left = updates.weights.shared("w").clone(), (parameter.data - updates.weights.shared("w")).clone()
    assert left.abs().sum() > 0
    present.others = [other_rank(0, torch.zeros(400), updates._history)]
    updates.apply_all(ready=HANDS_OVER)
    torch.testing.assert_close(updates.weights.shared("w"), shared + left / 2)
    assert [len(sent) for sent in present.sent[-2:]] == [len(Header._fields), 400]


def test_the_others_take_what_a_rank_hands_over_and_send_nothing_then(gradient: torch.Tensor) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25)
    train_and_meet(updates, parameter, optimizer, gradient)
    step(updates, parameter, optimizer, gradient)
    shared, own, row = updates.weights.shared("w").clone(), parameter.data.clone(), torch.randn(400)
    present.others = [other_rank(2, row, updates._history)]
    updates.exchange_updates()
    torch.testing.assert_close(updates.weights.shared("w"), shared + row / 2)
    torch.testing.assert_close(parameter.data, own + row / 2)
    assert torch.equal(present.sent[-1], torch.zeros(400))


def test_nothing_is_handed_over_while_a_rank_joins(gradient: torch.Tensor) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25)
    train_and_meet(updates, parameter, optimizer, gradient)
    shared, sent = updates.weights.shared("w").clone(), len(present.sent)
    present.others = [other_rank(0, torch.zeros(400), updates._history, step=-1)]
    updates.apply_all(ready=HANDS_OVER)
    assert torch.equal(updates.weights.shared("w"), shared)
    assert len(present.sent) == sent + 3  # it tries three times


def test_a_joiner_delays_what_the_others_send(gradient: torch.Tensor) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25)
    present.others = [lambda sent: torch.tensor(Header(1, -1, 0, 0, 0))]
    train_and_meet(updates, parameter, optimizer, gradient)
    assert len(present.sent) == 1  # the header
    assert torch.equal(parameter.data, -gradient)
    assert torch.equal(updates.weights.shared("w"), torch.zeros(400))
    assert present.round == 1


def test_a_slow_rank_trains_as_many_steps_as_the_others_wait_for(gradient: torch.Tensor) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25)
    updates.plans.change(DCTConfig(local_steps=8, warmup_steps=0, kernel="torch", density=0.25))

    def fast(sent: torch.Tensor) -> torch.Tensor:
        is_header = sent.dtype == torch.int64
        header = Header(*sent.tolist()) if is_header else None
        return torch.tensor(header._replace(nanoseconds=header.nanoseconds // 4)) if header else sent

    present.others = [fast] * 3
    for _ in range(8):
        step(updates, parameter, optimizer, gradient)
    updates.exchange_updates()
    assert updates.train_until == 10  # a quarter of the eight steps to come


def test_a_rank_that_was_stopped_once_is_not_a_slow_one(gradient: torch.Tensor) -> None:
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), density=0.25)
    updates.plans.change(DCTConfig(local_steps=8, warmup_steps=0, kernel="torch", density=0.25))

    def steady(sent: torch.Tensor) -> torch.Tensor:
        if sent.dtype != torch.int64:
            return sent
        return torch.tensor(Header(*sent.tolist())._replace(nanoseconds=100_000_000))

    present.others = [steady] * 3
    for number in range(8):
        step(updates, parameter, optimizer, gradient, 30.0 if number == 3 else 0.1)
    updates.exchange_updates()
    assert updates.train_until == 0  # it trains every step


def test_after_every_step_the_mean_is_lengthened_as_by_dct(gradient: torch.Tensor) -> None:
    """Two ranks whose steps are at right angles: from the first exchange on, the next mean is longer."""
    settings = {"density": 0.25, "value_format": "fp32"}
    updates, present, parameter, optimizer = rank_of(torch.zeros(400), Sign, **settings)
    other, _, theirs, their_optimizer = rank_of(torch.zeros(400), Sign, **settings)
    mine = torch.zeros(400)
    mine[::2] = 1.0

    def of_the_other(sent: torch.Tensor) -> torch.Tensor:
        return answers.pop(0)

    present.others = [of_the_other]
    train_and_meet(other, theirs, their_optimizer, 1.0 - mine)
    answers = list(other.present.sent)  # type: ignore[attr-defined]
    train_and_meet(updates, parameter, optimizer, mine)
    rounds = updates._the_rounds
    assert rounds.cosine.value == 512  # the mean of 1024, which is taken at first, and of none
    assert rounds.cosine.lengthening(2) == pytest.approx((2 / 1.5) ** 0.5)
    assert float(updates.weights.shared("w").min()) == pytest.approx(-0.5)
