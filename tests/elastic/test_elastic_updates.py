"""What a rank does with an exchange that fails or that it misses, against plain arithmetic; one
process, no torchft.
"""

from functools import partial
from types import SimpleNamespace
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
        self.quorum_step = 0
        self.quorum = 1
        self.commits = True
        self.sent = []
        self.others: list[Any] = []
        self.forgotten = False

    def size(self) -> int:
        return 1 + len(self.others)

    def rank(self) -> int:
        return 0

    def start_quorum(self) -> bool:
        return True

    def all_gather(self, sent: torch.Tensor, patience_s: float | None = None) -> torch.Tensor:
        self.sent.append(sent)
        return torch.stack([sent, *(other(sent) for other in self.others)])

    def should_commit(self) -> bool:
        self.quorum_step += self.commits
        return self.commits

    def invalidate(self) -> None:
        self.forgotten = True


class Rank:
    """A rank with 400 weights of zero, which are plain SGD's: a step of rate 1 takes the gradient
    from them.
    """

    def __init__(self, make: Any = torch.optim.SGD, density: float = 0.25, **settings: Any) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(400))
        self.optimizer = make([self.parameter], lr=1.0)
        config = DCTConfig(
            local_steps=1, warmup_steps=0, kernel="torch", density=density, **settings
        )
        self.present = Pretended()
        exchange = AllGather(Link(self.present, Traffic()))  # type: ignore[arg-type]
        exchange.link_traversals = 4.0
        every = PresentBuffers(dict, tuple), (lambda: [self.optimizer]), (lambda: [self.parameter])
        self.updates = ElasticUpdates(config, {self.parameter: "w"}, exchange, *every, rank=0)

    @property
    def shared(self) -> torch.Tensor:
        return self.updates.weights.shared("w")

    def step(self, gradient: torch.Tensor, seconds: float = 0.1) -> None:
        self.updates.before_step(self.optimizer)
        self.parameter.grad = gradient.clone()
        self.optimizer.step()
        self.updates.after_step(self.optimizer)
        self.updates.add_step(True, seconds)

    def train_and_meet(self, gradient: torch.Tensor) -> None:
        self.step(gradient)
        self.updates.exchange_updates()

    def hear(self, other: "Rank") -> None:
        """Take what another rank has sent for what it sends in answer to this one."""
        answers = list(other.present.sent)
        self.present.others = [lambda _: answers.pop(0)]


def changed(header: torch.Tensor, **fields: int) -> torch.Tensor:
    return torch.tensor(Header(*header.tolist())._replace(**fields))


def is_header(sent: torch.Tensor) -> bool:
    return sent.dtype == torch.int64


@pytest.fixture
def gradient() -> torch.Tensor:
    return torch.randn(400)


def test_a_failed_exchange_changes_nothing(gradient: torch.Tensor) -> None:
    rank = Rank()
    rank.present.commits = False
    rank.step(gradient)
    assert rank.updates.due
    rank.updates.exchange_updates()
    assert torch.equal(rank.parameter.data, -gradient)
    assert torch.equal(rank.shared, torch.zeros(400))


@pytest.mark.parametrize("added", [True, False])
def test_a_rank_that_is_behind_keeps_what_the_others_have_not_added(
    gradient: torch.Tensor, added: bool
) -> None:
    rank = Rank(value_format="fp32")
    rank.present.commits = False
    rank.train_and_meet(gradient)
    sent = gradient.abs() >= gradient.abs()[rank.parameter.data != 0].topk(100).values[-1]
    theirs = torch.randn(400)
    given = {
        "step": 3,
        "commits": [(0, 1 if added else 9)],
        "history": 7,
        "buffers": {},
        "shared": {"w": theirs},
    }
    rank.updates.catch_up(given)
    kept = torch.where(sent, 0.0, -gradient) if added else -gradient
    torch.testing.assert_close(rank.parameter.data, theirs + kept)
    assert torch.equal(rank.shared, theirs)
    assert not rank.updates.trains  # until it is at the step of the others
    rank.step(torch.zeros(400))
    rank.step(torch.zeros(400))
    assert not rank.updates.due
    assert rank.updates.trains


def test_a_rank_that_has_missed_too_much_starts_with_nothing_held_back(
    gradient: torch.Tensor,
) -> None:
    rank = Rank()
    rank.present.commits = False
    rank.train_and_meet(gradient)
    theirs = torch.randn(400)
    given = {
        "step": 300,
        "commits": [(200, 5)],
        "history": 7,
        "buffers": {},
        "shared": {"w": theirs},
    }
    rank.updates.catch_up(given)
    assert torch.equal(rank.parameter.data, theirs)


def test_ranks_that_have_not_trained_are_not_counted_in_the_mean(gradient: torch.Tensor) -> None:
    rank = Rank(value_format="fp32")
    rank.present.others = [
        lambda sent: (
            changed(sent, rank=1, trained=0) if is_header(sent) else sent.new_zeros(sent.shape)
        )
    ]
    rank.train_and_meet(gradient)
    moved = rank.shared != 0
    assert int(moved.sum()) == 100
    torch.testing.assert_close(rank.shared[moved], -gradient[moved])  # of one sender, not of two
    assert rank.updates.tallies[0][0] == 1
    assert rank.updates.tallies[1][0] == 0


def test_a_rank_that_has_not_trained_moves_as_the_others_do(gradient: torch.Tensor) -> None:
    rank = Rank(value_format="fp32")
    other = Rank(value_format="fp32")
    other.train_and_meet(gradient)
    rank.hear(other)
    rank.updates.before_step(rank.optimizer)
    rank.parameter.data.copy_(torch.ones(400))  # not sent, because it counts as no step
    rank.updates.after_step(rank.optimizer)
    rank.updates.exchange_updates()
    assert int((rank.shared != 0).sum()) == 100
    assert torch.equal(rank.shared, other.shared)
    assert torch.equal(rank.parameter.data, 1.0 + rank.shared)


def test_a_rank_that_has_stopped_in_the_warm_up_reads_what_is_sent_after_it(
    gradient: torch.Tensor,
) -> None:
    """Others send more entries by then; it has no step of its own to send."""
    config = DCTConfig(
        local_steps=8, warmup_steps=4, kernel="torch", density=0.25, value_format="fp32"
    )
    rank = Rank(value_format="fp32")
    other = Rank(value_format="fp32")
    rank.updates.plans.change(config)
    other.updates.plans.change(config)
    for _ in range(16):
        other.step(gradient)
    other.updates.exchange_updates()
    rank.hear(other)
    rank.train_and_meet(gradient)
    assert int((rank.shared != 0).sum()) == 100
    assert torch.equal(rank.shared, other.shared)
    assert rank.updates.resume_at == 16


@pytest.mark.parametrize("commits", [True, False])
def test_a_rank_that_is_behind_reads_with_the_settings_of_the_step_in_which_others_send(
    gradient: torch.Tensor, commits: bool
) -> None:
    """A run of unknown length sends fewer entries from step 1,001 on."""
    rank = Rank()
    later = DCTConfig(local_steps=1, warmup_steps=0, kernel="torch", density=0.1)
    other = Rank(density=0.1)
    before = rank.updates.config
    rank.updates.run_settings = SimpleNamespace(  # type: ignore[assignment]
        config_after=lambda steps: later if steps >= 1000 else before, is_ending=lambda steps: False
    )
    other.step(gradient)
    other.updates._the_clock.steps = 1001
    other.updates.exchange_updates()
    rank.hear(other)
    rank.present.commits = commits
    rank.train_and_meet(gradient)
    if commits:
        assert torch.equal(rank.shared, other.shared)
    else:
        assert rank.updates.config.density == before.density


@pytest.mark.parametrize("others", [1, 2])
def test_ranks_that_have_met_apart_take_the_weights_of_the_most(
    gradient: torch.Tensor, others: int
) -> None:
    rank = Rank()
    rank.train_and_meet(gradient)  # alone
    shared = rank.shared.clone()
    sent = len(rank.present.sent)
    rank.present.others = [lambda header: changed(header, rank=1, history=5)] * others
    rank.train_and_meet(gradient)
    assert len(rank.present.sent) == sent + 1  # the header
    assert torch.equal(rank.shared, shared)
    assert rank.present.forgotten == (others == 2)


def other_rank(ready: int, row: torch.Tensor, history: int, step: int = 1) -> Any:
    """Another rank, which sends a header and then, if ranks hand over, this row."""
    header = torch.tensor(Header(1, step, 1, 0, 0, ready=ready, history=history))
    return lambda sent: header if is_header(sent) else row


def test_a_rank_that_leaves_hands_over_what_it_has_not_sent(gradient: torch.Tensor) -> None:
    rank = Rank()
    rank.train_and_meet(gradient)  # alone
    shared = rank.shared.clone()
    left = (rank.parameter.data - rank.shared).clone()
    assert left.abs().sum() > 0
    rank.present.others = [other_rank(0, torch.zeros(400), rank.updates._history)]
    rank.updates.apply_all(ready=HANDS_OVER)
    torch.testing.assert_close(rank.shared, shared + left / 2)
    assert [len(sent) for sent in rank.present.sent[-2:]] == [len(Header._fields), 400]


def test_the_others_take_what_a_rank_hands_over_and_send_nothing_then(
    gradient: torch.Tensor,
) -> None:
    rank = Rank()
    rank.train_and_meet(gradient)
    rank.step(gradient)
    shared = rank.shared.clone()
    own = rank.parameter.data.clone()
    row = torch.randn(400)
    rank.present.others = [other_rank(2, row, rank.updates._history)]
    rank.updates.exchange_updates()
    torch.testing.assert_close(rank.shared, shared + row / 2)
    torch.testing.assert_close(rank.parameter.data, own + row / 2)
    assert torch.equal(rank.present.sent[-1], torch.zeros(400))


def test_nothing_is_handed_over_while_a_rank_joins(gradient: torch.Tensor) -> None:
    rank = Rank()
    rank.train_and_meet(gradient)
    shared = rank.shared.clone()
    sent = len(rank.present.sent)
    rank.present.others = [other_rank(0, torch.zeros(400), rank.updates._history, step=-1)]
    rank.updates.apply_all(ready=HANDS_OVER)
    assert torch.equal(rank.shared, shared)
    assert len(rank.present.sent) == sent + 3  # it tries three times


def test_a_joiner_delays_what_the_others_send(gradient: torch.Tensor) -> None:
    rank = Rank()
    rank.present.others = [lambda sent: torch.tensor(Header(1, -1, 0, 0, 0))]
    rank.train_and_meet(gradient)
    assert len(rank.present.sent) == 1  # the header
    assert torch.equal(rank.parameter.data, -gradient)
    assert torch.equal(rank.shared, torch.zeros(400))
    assert rank.present.quorum_step == 1


def test_a_slow_rank_trains_as_many_steps_as_the_others_wait_for(gradient: torch.Tensor) -> None:
    rank = Rank()
    rank.updates.plans.change(
        DCTConfig(local_steps=8, warmup_steps=0, kernel="torch", density=0.25)
    )
    nanoseconds = Header._fields.index("nanoseconds")
    rank.present.others = [
        lambda sent: (
            changed(sent, nanoseconds=int(sent[nanoseconds]) // 4) if is_header(sent) else sent
        )
    ] * 3
    for _ in range(8):
        rank.step(gradient)
    rank.updates.exchange_updates()
    assert rank.updates.train_until == 10  # a quarter of the eight steps to come


def test_a_rank_that_was_stopped_once_is_not_a_slow_one(gradient: torch.Tensor) -> None:
    rank = Rank()
    rank.updates.plans.change(
        DCTConfig(local_steps=8, warmup_steps=0, kernel="torch", density=0.25)
    )
    rank.present.others = [
        lambda sent: changed(sent, nanoseconds=100_000_000) if is_header(sent) else sent
    ] * 3
    for number in range(8):
        rank.step(gradient, 30.0 if number == 3 else 0.1)
    rank.updates.exchange_updates()
    assert rank.updates.train_until == 0  # it trains every step


def test_after_every_step_the_mean_is_lengthened_as_by_dct(gradient: torch.Tensor) -> None:
    """Two ranks whose steps are at right angles: from the first exchange on, the next mean is
    longer.
    """
    rank = Rank(Sign, value_format="fp32")
    other = Rank(Sign, value_format="fp32")
    mine = torch.zeros(400)
    mine[::2] = 1.0
    other.train_and_meet(1.0 - mine)
    rank.hear(other)
    rank.train_and_meet(mine)
    clock = rank.updates._the_clock
    # The cosine is half of 1, which is taken at first, and of none.
    gains = rank.updates._gains(rank.updates._decide(clock, clock.steps), 2)
    assert gains is not None
    assert [float(gain.rows[0]) for gain in gains.values()] == [pytest.approx((2 / 1.5) ** 0.5)]
    assert float(rank.shared.min()) == pytest.approx(-0.5)


def test_both_sets_of_weights_stay_within_bounds(gradient: torch.Tensor) -> None:
    """A rank's own after each step, the shared ones after each exchange, which also others may have
    taken out.
    """
    rank = Rank(density=1.0, value_format="fp32")
    rank.updates.project = lambda: rank.parameter.data.clamp_(-0.5, 0.5)
    rank.step(gradient)
    assert torch.equal(rank.parameter.data, (-gradient).clamp(-0.5, 0.5))
    rank.present.others = [lambda sent: sent if is_header(sent) else rank.present.sent[-1]] * 2
    for _ in range(3):
        rank.train_and_meet(gradient)
        assert float(rank.shared.abs().max()) == float(rank.parameter.data.abs().max()) == 0.5


def decaying(density: float = 0.25) -> Rank:
    """A rank with 400 weights of 2, which shrink by a hundredth in each step; half of them have
    gradients.
    """
    rank = Rank(partial(torch.optim.AdamW, weight_decay=0.01), density=density, value_format="fp32")
    rank.parameter.data.fill_(2.0)
    return rank


def test_decay_is_no_update(gradient: torch.Tensor) -> None:
    """Oracle: weights without gradients shrink as they do on one rank, on all ranks; also after a
    failed exchange.
    """
    gradient[200:] = 0.0
    rank = decaying()
    rank.present.others = [lambda sent: sent]
    for commits in (True, True, False, False, True):
        rank.present.commits = commits
        rank.train_and_meet(gradient)
    torch.testing.assert_close(rank.shared[200:], torch.full((200,), 2.0 * 0.99**5))
    torch.testing.assert_close(rank.parameter.data[200:], rank.shared[200:])


def test_ranks_that_have_decayed_differently_decay_by_the_mean(gradient: torch.Tensor) -> None:
    """One that has made two steps since its last exchange and one that has made one; what they hold
    back stays.
    """
    gradient[200:] = 0.0
    rank = decaying()
    other = decaying()
    other.train_and_meet(gradient)
    rank.hear(other)
    rank.step(gradient)
    rank.updates._the_clock.steps = 0  # the other has missed a step
    rank.step(gradient)
    before = rank.parameter.data - 0.99**2 * rank.shared
    rank.updates.exchange_updates()
    torch.testing.assert_close(rank.shared[200:], torch.full((200,), 2.0 * (0.99**2 + 0.99) / 2))
    left = (rank.parameter.data - rank.shared)[200:]
    torch.testing.assert_close(left, before[200:], atol=1e-6, rtol=0.0)


def test_a_rank_that_is_behind_takes_weights_that_have_decayed(gradient: torch.Tensor) -> None:
    """What it has moved, and not sent, has no decay in it."""
    rank = decaying()
    rank.present.commits = False
    rank.train_and_meet(gradient)
    moved = rank.parameter.data - 0.99 * 2.0
    rank.updates._unsure = None
    theirs = torch.randn(400)
    given = {"step": 1, "commits": [(0, 9)], "history": 7, "buffers": {}, "shared": {"w": theirs}}
    state = rank.updates.state_dict()
    rank.updates.catch_up(given)
    torch.testing.assert_close(rank.parameter.data, theirs + moved)
    assert state["own_decay"] == {0: {"w": 0.99}}
    assert "own_decay" not in rank.updates.state_dict()


def test_second_moments_are_averaged_over_those_who_send(gradient: torch.Tensor) -> None:
    """A rank whose gradients are three times as large; one that has not trained keeps its own."""
    rank = Rank(torch.optim.Adam, value_format="fp32")
    other = Rank(torch.optim.Adam, value_format="fp32")
    idle = Rank(torch.optim.Adam, value_format="fp32")
    for one in (rank, other, idle):
        one.step(gradient if one is not other else 3 * gradient)
    idle.updates._trained = 0
    other.updates.exchange_updates()
    for one in (rank, idle):
        one.hear(other)
        one.updates.exchange_updates()
    own = 0.001 * gradient.square()
    squares = [one.optimizer.state[one.parameter]["exp_avg_sq"] for one in (rank, idle)]
    # What ranks send of them has eight bits.
    torch.testing.assert_close(squares[0], 5 * own, rtol=2**-7, atol=0.0)
    torch.testing.assert_close(squares[1], own, rtol=1e-6, atol=0.0)
    # The idle one takes what the other has sent, and nothing else.
    torch.testing.assert_close(idle.shared, other.shared)
