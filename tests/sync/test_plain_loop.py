"""`Updates` and `Gradients` in a loop without a Trainer: the bits of `DCTStrategy`, resume, misuse;
on real ranks.
"""

import copy
import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from distributed.training import Module, fit, loader, message_of, perceptron, rank, warnings_of
from lightning_dct import DCTStrategy, Gradients, Updates
from sync.test_run_length import train_unknown

STEPS = 24
SETTINGS: list[dict[str, Any]] = [
    {"local_steps": 1, "density": 0.2},
    {"local_steps": 3, "density": 0.1, "warmup_steps": 6, "exchange": "two_phase"},
    {"local_steps": 4, "overlap_steps": 2, "value_format": "2bit", "warmup_steps": 0},
]


def sums(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): tensor.detach().clone() for name, tensor in state.items()}


def under_the_trainer(settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[float], int]:
    run = fit(DCTStrategy(**settings), Module(perceptron(), optim.AdamW, lr=0.01), STEPS)
    return sums(run.weights), run.losses, run.totals.bytes_sent


class Loop:
    """What a user writes."""

    def __init__(self, settings: dict[str, Any], optimizers: int = 1) -> None:
        self.model = perceptron()
        parameters = list(self.model.parameters())
        self.optimizers = [
            optim.AdamW(parameters[number::optimizers], lr=0.01) for number in range(optimizers)
        ]
        self.updates = Updates(self.model, self.optimizers, **settings)
        self.losses: list[float] = []

    def train(self, first: int, last: int) -> None:
        for step, (inputs, outputs) in enumerate(loader(STEPS, 40, 8)):
            if first <= step < last:
                loss = (self.model(inputs) - outputs).square().mean()
                loss.backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                self.losses.append(loss.item())


def in_a_loop(settings: dict[str, Any]) -> tuple[dict[str, Tensor], list[float], int]:
    loop = Loop(settings)
    loop.train(0, STEPS)
    loop.updates.close()
    weights = sums(loop.model.state_dict())
    losses = loop.losses[:]
    sent = loop.updates.traffic.totals.bytes_sent
    if rank() == 0:  # it exchanges no more
        loop.train(0, 1)
    return weights, losses, sent


class Derived(optim.AdamW):
    """Torch hooks this `step`, and that of its base if the process has made such an optimizer."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def step_within_a_step() -> list[Any]:
    found: list[Any] = []
    for kind in (optim.AdamW, Derived):
        model = perceptron()
        optimizer = kind(model.parameters(), lr=0.01)
        updates = Updates(model, optimizer, density=0.2)
        for inputs, outputs in loader(6, 40, 8):
            (model(inputs) - outputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        updates.close()
        found.append(
            (
                updates.traffic.totals.steps,
                updates.traffic.totals.bytes_sent,
                sums(model.state_dict()),
            )
        )
    return found


def test_a_step_that_calls_that_of_its_base_is_one(ranks: Any) -> None:
    for (steps, sent, weights), (their_steps, their_sent, theirs) in ranks(2).run(
        step_within_a_step
    ):
        assert (steps, sent) == (their_steps, their_sent) == (6, sent)
        assert all(torch.equal(weights[name], one) for name, one in theirs.items())


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_same_bits_as_under_the_trainer(ranks: Any, settings: dict[str, Any]) -> None:
    """Oracle: DCTStrategy with the same model, data, optimizer and settings."""
    settings = {"min_tensor_size": 8, **settings}
    loops = ranks(2).run(in_a_loop, settings)
    trainers = ranks(2).run(under_the_trainer, settings)
    for (weights, losses, sent), (their_weights, their_losses, their_sent) in zip(
        loops, trainers, strict=True
    ):
        assert losses == their_losses
        assert sent == their_sent > 0
        assert all(torch.equal(weights[name], theirs) for name, theirs in their_weights.items())


def gradients_in_a_loop(settings: dict[str, Any], stops_after: int = STEPS) -> Any:
    """In one piece, or stopped and resumed."""
    states = None
    losses = []
    sent = 0
    for first, last in ((0, stops_after), (stops_after, STEPS)):
        model = perceptron()
        wrapped = DistributedDataParallel(model)
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        gradients = Gradients(wrapped, **settings)
        for object_, state in zip((model, optimizer, gradients), states or (), strict=False):
            object_.load_state_dict(state)
        for inputs, outputs in list(loader(STEPS, 40, 8))[first:last]:
            loss = (wrapped(inputs) - outputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        states = copy.deepcopy([one.state_dict() for one in (model, optimizer, gradients)])
        sent = gradients.traffic.totals.bytes_sent
    return sums(model.state_dict()), losses, sent


def test_gradients_have_the_same_bits_as_under_the_trainer(ranks: Any) -> None:
    """Oracle: DCTStrategy with the same model, data, optimizer and settings."""
    settings = {"min_tensor_size": 8, "density": 0.2}
    theirs = ranks(2).run(under_the_trainer, {"compress": "gradients", **settings})
    for stops_after in (STEPS, 10):
        for loop, trainer in zip(
            ranks(2).run(gradients_in_a_loop, settings, stops_after), theirs, strict=True
        ):
            assert loop[1:] == trainer[1:]
            assert all(torch.equal(loop[0][name], weights) for name, weights in trainer[0].items())


def evaluate_everywhere() -> list[dict[str, Tensor]]:
    """The weights within evaluations that must all see the shared ones, and then this rank's own,
    twice.
    """
    loop = Loop(SETTINGS[0])
    loop.train(0, 10)
    own = sums(loop.model.state_dict())
    seen = []
    with loop.updates.shared_weights():
        with loop.updates.shared_weights():
            pass
        seen.append(sums(loop.model.state_dict()))
    again = sums(loop.model.state_dict())
    with loop.updates.shared_weights():
        loop.updates.close()
    seen.append(sums(loop.model.state_dict()))
    with loop.updates.shared_weights():
        pass
    return [*seen, sums(loop.model.state_dict()), own, again]


def test_evaluations_within_another_and_after_the_end_see_the_shared_weights(ranks: Any) -> None:
    one, other = ranks(2).run(evaluate_everywhere)
    for name, shared in one[0].items():
        assert all(torch.equal(shared, seen[name]) for seen in (*one[:3], *other[:3]))
        assert torch.equal(one[3][name], one[4][name])
    assert not torch.equal(one[3]["first.weight"], other[3]["first.weight"])


def evaluate_before_training() -> tuple[list[bool], list[str]]:
    """Whether an evaluation within another leaves its buffers; and what is said of a run too short
    to exchange.
    """
    model = nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    updates = Updates(model, optimizer, local_steps=4, warmup_steps=0)
    model(torch.randn(4, 40) * (1 + rank()))
    mean = model[1].running_mean
    own = mean.clone()
    with updates.shared_weights():
        shown = mean.clone()
        with updates.shared_weights():
            pass
        kept = [torch.equal(mean, shown), not torch.equal(mean, own)]
    for _ in range(3):
        model(torch.randn(4, 40)).square().mean().backward()
        optimizer.step()
    return [*kept, torch.equal(own, mean)], warnings_of(updates.close)


def test_an_evaluation_before_the_first_step_and_an_end_before_the_first_exchange(
    ranks: Any,
) -> None:
    (kept, said), (theirs, _) = ranks(2).run(evaluate_before_training)
    assert kept == theirs == [True, True, False]
    assert any("before its first exchange" in one for one in said)


def write_apart(ends: bool) -> str:
    """What is said after one rank alone has loaded weights."""
    loop = Loop(SETTINGS[0])
    loop.train(0, 5)
    with loop.updates.shared_weights(), torch.no_grad():
        loop.model.first.weight += rank()
    return message_of(loop.updates.close if ends else loop.updates.shared_weights().__enter__)


@pytest.mark.parametrize("ends", [True, False])
def test_an_error_names_shared_weights_that_differ(ranks: Any, ends: bool) -> None:
    for said in ranks(2).run(write_apart, ends):
        assert said.startswith("The shared weights of 'first.weight' on ranks 0 and 1 differ")


def load_within_an_evaluation() -> list[dict[str, Tensor]]:
    """Own weights and shared ones: those that are saved, and those that another loop has loaded."""
    loop = Loop(SETTINGS[0])
    found = []
    loop.train(0, 10)
    for _ in range(2):
        found.append(sums(loop.model.state_dict()))
        with loop.updates.shared_weights():
            found.append(sums(loop.model.state_dict()))
        state = copy.deepcopy(loop.updates.state_dict())
        loop = Loop(SETTINGS[0])
        loop.train(10, 15)
        with loop.updates.shared_weights():
            loop.model.load_state_dict(found[1])
            loop.updates.load_state_dict(state)
            assert all(
                torch.equal(one, found[1][name]) for name, one in loop.model.state_dict().items()
            )
    return found


def test_a_state_may_be_loaded_within_an_evaluation(ranks: Any) -> None:
    for own, shared, loaded_own, loaded_shared in ranks(2).run(load_within_an_evaluation):
        for name in own:
            assert torch.equal(own[name], loaded_own[name])
            assert torch.equal(shared[name], loaded_shared[name])
        assert not torch.equal(own["first.weight"], shared["first.weight"])


def load_a_counter() -> int:
    """A buffer that one rank has counted on by itself when a state from before is loaded within an
    evaluation.
    """
    model = perceptron()
    model.register_buffer("skipped", torch.zeros((), dtype=torch.long))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    updates = Updates(model, optimizer, density=0.2)
    model(torch.ones(4, 40)).square().mean().backward()
    optimizer.step()
    state = copy.deepcopy(updates.state_dict())
    model.skipped += rank()
    with updates.shared_weights():
        updates.load_state_dict(state)
    counted = int(model.skipped)
    updates.close()
    return counted


def test_a_buffer_that_is_loaded_within_an_evaluation_stays(ranks: Any) -> None:
    assert ranks(2).run(load_a_counter) == [0, 0]


def compile_the_step() -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """The weights after plain steps and after compiled ones; and how many graphs torch has made."""
    found: list[dict[str, Tensor]] = []
    graphs = 0

    def count(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    for compiles in (False, True):
        torch._dynamo.reset()
        loop = Loop({"local_steps": 1, "density": 1.0})
        if compiles:
            loop.optimizers[0].step = torch.compile(loop.optimizers[0].step, backend=count)  # type: ignore[method-assign]
        loop.train(0, 6)
        found.append(sums(loop.model.state_dict()))
        loop.updates.close()
    return found[0], found[1], graphs


def test_a_compiled_step_is_compiled_without_the_exchange(ranks: Any) -> None:
    for plain, compiled, graphs in ranks(2).run(compile_the_step):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)
        assert 1 <= graphs <= 4


def load_weights_late() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights that all ranks load after `Updates` is made, and the shared ones after steps that
    move nothing.
    """
    model = perceptron()
    optimizer = optim.SGD(model.parameters(), lr=0.0)
    updates = Updates(model, optimizer, density=0.1)
    loaded = {name: torch.ones_like(weights) for name, weights in model.state_dict().items()}
    model.load_state_dict(loaded)
    for inputs, _ in loader(3, 40, 8):
        model(inputs).square().mean().backward()
        optimizer.step()
    updates.close()
    return loaded, sums(model.state_dict())


def test_weights_that_all_ranks_load_before_the_first_step_are_shared(ranks: Any) -> None:
    for loaded, shared in ranks(2).run(load_weights_late):
        assert all(torch.equal(weights, shared[name]) for name, weights in loaded.items())


def train_a_loop(
    save: Path | None, load: Path | None, settings: dict[str, Any], optimizers: int = 1
) -> Any:
    """Saved after eleven steps, each rank its own file."""
    loop = Loop(settings, optimizers)
    if load is not None:
        states = torch.load(f"{load}.{rank()}", weights_only=True)
        for one, state in zip([loop.model, loop.updates, *loop.optimizers], states, strict=True):
            one.load_state_dict(state)
    loop.train(0 if load is None else 11, STEPS if save is None else 11)
    if save is not None:
        with loop.updates.shared_weights():
            model = copy.deepcopy(loop.model.state_dict())
        others = [one.state_dict() for one in (loop.updates, *loop.optimizers)]
        torch.save([model, *others], f"{save}.{rank()}")
    own = sums(loop.model.state_dict())
    loop.updates.close()
    return loop.losses, [own, sums(loop.model.state_dict())]


def train_a_loop_of_unknown_length(save: Path | None, load: Path | None) -> Any:
    """Saved after settings have changed."""
    return train_unknown(train_a_loop, save, load, {"warmup_steps": 3})


def two_optimizers() -> list[Tensor]:
    model = nn.ModuleList([nn.Linear(20, 20), nn.Linear(20, 20)])
    torch.manual_seed(rank())  # other weights on each rank, until `Updates` is made
    for layer in model:
        nn.init.normal_(layer.weight)
    optimizers = [
        optim.Adam(model[0].parameters(), lr=0.01),
        optim.SGD(model[1].parameters(), lr=0.01),
    ]
    updates = Updates(model, optimizers, local_steps=1)
    for step in range(12):
        optimizer = optimizers[step % 2]
        layer = model[step % 2]
        layer(torch.randn(4, 20)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    updates.close()
    return [weights.detach() for weights in model.parameters()]


def test_several_optimizers(ranks: Any) -> None:
    first, second = ranks(2).run(two_optimizers)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def unfreeze_on_one_rank() -> str:
    model = perceptron()
    model.first.requires_grad_(False)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    Updates(model, optimizer, local_steps=1)

    def train() -> None:
        for step in range(4):
            model.first.requires_grad_(step == 2 and rank() == 1)
            model(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()

    return message_of(train)


def test_a_rank_that_trains_more_parameters_is_told(ranks: Any) -> None:
    for said in ranks(2).run(unfreeze_on_one_rank):
        assert "rank 1 at the first step of 2 parameters. Change `requires_grad`" in said


def train_in_phases(given: int) -> tuple[dict[str, Tensor], int, list[str]]:
    """Two phases: a head by one optimizer, then everything by a new one, which `Updates` is given
    too, or is not.
    """
    model = perceptron()
    model.first.requires_grad_(False)
    optimizers = [
        optim.AdamW(model.second.parameters(), lr=0.01),
        optim.Adam(model.parameters(), lr=0.02),
    ]
    updates = Updates(model, optimizers[:given], density=0.2, warmup_steps=0)

    def train() -> None:
        for step, (inputs, outputs) in enumerate(loader(STEPS, 40, 8)):
            if step == STEPS // 2:
                model.first.requires_grad_(True)
            (model(inputs) - outputs).square().mean().backward()
            optimizers[step >= STEPS // 2].step()
            model.zero_grad()

    train()
    said = warnings_of(updates.close)
    return sums(model.state_dict()), updates.traffic.totals.steps, said


def test_an_optimizer_that_is_made_later_is_exchanged_too(ranks: Any) -> None:
    """Oracle: the bits of `Updates` that is given both optimizers from the start."""
    both = ranks(2).run(train_in_phases, 2)
    for (weights, steps, said), (theirs, _, _) in zip(
        ranks(2).run(train_in_phases, 1), both, strict=True
    ):
        assert steps == STEPS
        assert not said
        assert all(torch.equal(weights[name], one) for name, one in theirs.items())
        assert all(torch.equal(weights[name], one) for name, one in both[0][0].items())


def train_with_an_optimizer_for_each_phase() -> tuple[int, dict[str, int]]:
    """The loop keeps one optimizer at a time; its successors take its number, as they do in a run
    that resumes.
    """
    model = perceptron()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    updates = Updates(model, optimizer, density=0.2)
    for phase in range(3):
        for inputs, outputs in loader(4, 40, 8):
            (model(inputs) - outputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        clocks = updates.state_dict()["exchange_clocks"]
        if phase < 2:
            optimizer = optim.SGD(model.parameters(), lr=0.1)
            gc.collect()
    updates.close()
    return updates.traffic.totals.steps, {
        key: one for key, one in clocks.items() if key.startswith("steps of")
    }


def test_a_new_optimizer_takes_the_place_of_one_that_is_gone(ranks: Any) -> None:
    assert ranks(2).run(train_with_an_optimizer_for_each_phase) == [(12, {"steps of 0": 4})] * 2


class Twice(optim.Optimizer):
    """Steps by another optimizer, as Lookahead and SAM do."""

    def __init__(self, inner: optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)


def step_around(is_given: bool, fails: bool) -> tuple[int, dict[str, Tensor]]:
    """Steps of an optimizer within another's; `Updates` is given either of the two."""
    model = perceptron()
    inner = optim.SGD(model.parameters(), lr=0.1)
    outer = Twice(inner)
    updates = Updates(model, outer if is_given else inner, density=0.2)

    def fail() -> None:
        raise InterruptedError

    for step, (inputs, outputs) in enumerate(loader(6, 40, 8)):
        (model(inputs) - outputs).square().mean().backward()
        if fails and step == 3:  # a batch that the user skips; then the inner one goes on alone
            with pytest.raises(InterruptedError):
                inner.step(fail)
        (inner if fails and step > 3 else outer).step()
        model.zero_grad()
    updates.close()
    return updates.traffic.totals.steps, sums(model.state_dict())


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_within_another_is_a_part_of_it(ranks: Any, fails: bool) -> None:
    """Whichever optimizer `Updates` knows; also after a step that has failed."""
    (steps, weights), (_, others) = ranks(2).run(step_around, True, fails)
    assert steps == 6
    assert all(torch.equal(one, others[name]) for name, one in weights.items())
    (steps, weights), (_, others) = ranks(2).run(step_around, False, fails)
    assert steps == 6
    assert all(torch.equal(one, others[name]) for name, one in weights.items())


def step_a_new_one_on_one_rank() -> str:
    model = perceptron()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    Updates(model, optimizer, local_steps=1)
    other = optim.Adam(model.parameters(), lr=0.1)

    def train() -> None:
        for step in range(4):
            model(torch.randn(4, 40)).square().mean().backward()
            (other if step == 2 and rank() == 1 else optimizer).step()

    return message_of(train)


def test_a_rank_that_alone_steps_a_new_optimizer_is_told(ranks: Any) -> None:
    for said in ranks(2).run(step_a_new_one_on_one_rank):
        assert "rank 1 at the first step of a new `Adam`" in said


def train_others_and_nothing() -> list[str]:
    """An optimizer of another model is none of its business, and one that nobody steps is said at
    the end.
    """
    model = perceptron()
    other = perceptron()
    updates = Updates(model, optim.SGD(model.parameters(), lr=0.1), local_steps=1)
    optimizer = optim.Adam(other.parameters(), lr=0.1)
    other(torch.randn(4, 40)).square().mean().backward()
    optimizer.step()
    return warnings_of(updates.close)


def test_a_loop_that_steps_nothing_is_told(ranks: Any) -> None:
    first, _ = ranks(2).run(train_others_and_nothing)
    assert any("no optimizer has stepped parameters of the model" in said for said in first)


def misuse(settings: dict[str, Any], kind: Any = optim.SGD, differ: bool = False) -> Any:
    model = perceptron()
    return Updates(model, kind(model.parameters(), lr=0.1 + differ * rank()), **settings)


def misuse_of_gradients(settings: dict[str, Any]) -> Any:
    return Gradients(DistributedDataParallel(perceptron()), **settings)


def optimizers_that_are_none(given: Callable[[list[Any]], Any]) -> Any:
    model = perceptron()
    return Updates(model, given(list(model.parameters())))


def load(state: dict[str, Any]) -> Any:
    return misuse({}).load_state_dict(state)


def load_gradients(state: dict[str, Any]) -> Any:
    return misuse_of_gradients({}).load_state_dict(state)


def nothing(given: list[Any]) -> list[Any]:
    return given[:0]


def wrapped() -> Any:
    model = DistributedDataParallel(perceptron())
    return Updates(model, optim.SGD(model.parameters(), lr=0.1))


def prepared(model: nn.Module) -> Any:
    """An optimizer as accelerate's `prepare` wraps it."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(optim.SGD(model.parameters(), lr=0.1))


def wrapped_by_accelerate() -> Any:
    model = perceptron()
    return Updates(model, prepared(model))


def train_a_layer_that_comes_late() -> None:
    """An optimizer of its own trains it, and `Updates` knows neither."""
    model = perceptron()
    optimizers = [optim.Adam(model.parameters(), lr=0.01)]
    Updates(model, optimizers, density=0.2)
    for step in range(4):
        if step == 2:
            model.second = nn.Linear(24, 8)
            optimizers.append(optim.Adam(model.second.parameters(), lr=0.01))
        model(torch.ones(4, 40)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def train_in_a_group_of_others() -> Any:
    groups = [dist.new_group([one]) for one in range(2)]
    return misuse({"process_group": groups[1 - rank()]})


def not_wrapped() -> Any:
    return Gradients(perceptron(), density=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partial(misuse, {"densty": 0.1}), "densty"),
        (partial(misuse, {"density": 2.0}), "`density`"),
        (partial(misuse, {"compress": "gradients"}), "Use `Gradients`"),
        (partial(misuse_of_gradients, {"compress": "updates"}), "Use `Updates`"),
        (partial(misuse_of_gradients, {"local_steps": 3}), "`compress='gradients'`"),
        (
            partial(misuse, {"project": 3}),
            "`project` must be a function of the module, or None; got 3.",
        ),
        (partial(misuse, {"steps": -3}), "`steps`"),
        (partial(misuse, {"steps": "300"}), "`steps`"),
        (partial(misuse, {}, optim.LBFGS), "`LBFGS`"),
        (partial(optimizers_that_are_none, iter), "`Updates` needs an optimizer after the model"),
        (
            partial(optimizers_that_are_none, nothing),
            "`Updates` needs an optimizer after the model",
        ),
        (
            partial(load, {"state": {}, "param_groups": []}),
            "This is not a state that `Updates.state_dict()` has made.",
        ),
        (
            partial(load, {"residuals": {}}),
            "This is not a state that `Updates.state_dict()` has made.",
        ),
        (
            partial(load_gradients, {"residuals": {}, "weights": {}}),
            "This is not a state that `Gradients.state_dict()` has made.",
        ),
        (partial(misuse, {}, differ=True), "lr of optimizer 0"),
        (wrapped, "`Updates` replaces `DistributedDataParallel`"),
        (wrapped_by_accelerate, "`AcceleratedOptimizer` has no step hooks"),
        (train_a_layer_that_comes_late, "A parameter of shape [8, 24] was made after"),
        (train_in_a_group_of_others, "This rank is not in `process_group`."),
        (not_wrapped, "`Gradients` needs a model in `DistributedDataParallel`; got `Perceptron`."),
    ],
)
def test_misuse_is_named(ranks: Any, make: Any, words: str) -> None:
    assert all(words in message for message in ranks(2).run(message_of, make))


def step_as_accelerate_does() -> tuple[int, list[float]]:
    model = perceptron()
    optimizer = prepared(model)
    updates = Updates(model, optimizer.optimizer)
    for step in range(3):
        model(torch.full((2, 40), rank() + step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    updates.close()
    return updates.traffic.totals.steps, [float(one.sum()) for one in model.parameters()]


def test_the_optimizer_that_accelerate_wraps_is_exchanged(ranks: Any) -> None:
    found = ranks(2).run(step_as_accelerate_does)
    assert found[0] == found[1]
    assert found[0][0] == 3
