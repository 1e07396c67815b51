"""The same for Fabric users: training, refreshes, checkpoints; and a process group of the user's
own.
"""

import gc
import pickle
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy

from distributed.harness import RankFailure
from distributed.training import (
    Module,
    Noise,
    Perceptron,
    fit,
    launched,
    perceptron,
    rank,
    train_in_fabric,
    weights_of,
)
from lightning_dct import DCTStrategy, Updates
from lightning_dct.fabric import DCTStrategy as FabricDCTStrategy
from one_card import accelerator

STEPS = 12


def set_up(fabric: Fabric, **settings: Any) -> tuple[Any, Any]:
    """A model and its optimizer."""
    module = Perceptron()
    return fabric.setup(module, torch.optim.SGD(module.parameters(), **{"lr": 0.05, **settings}))


def flat(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def train_with_fabric(
    settings: dict[str, Any] | None, checkpoint: Path | None = None
) -> dict[str, Any]:
    """Train with Fabric; with a checkpoint, save half way, spoil everything and load it again."""
    strategy = (
        FabricDDPStrategy()
        if settings is None
        else FabricDCTStrategy(**{"compress": "gradients", **settings})
    )
    fabric = launched(strategy)
    torch.manual_seed(0)
    module, optimizer = set_up(fabric, momentum=0.9)
    data = Noise(STEPS, 40, 8, rank=rank())
    for step in range(STEPS):
        if checkpoint is not None and step == STEPS // 2:
            state = {"module": module, "optimizer": optimizer}
            fabric.save(checkpoint, state)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            strategy.synchronizers[0].residuals.load_state_dict({})
            strategy.synchronizers[0].thresholds.forget()
            assert fabric.load(checkpoint, state) == {}
        inputs, targets = fabric.to_device(data[step])
        fabric.backward(torch.nn.functional.mse_loss(module(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    totals = None if settings is None else strategy.traffic.totals
    own = flat(module)
    with nullcontext() if settings is None else strategy.shared_weights():
        return {"weights": flat(module), "own": own, "totals": totals}


def test_dense_fabric_equals_ddp(ranks: Any) -> None:
    ddp = ranks(2).run(train_with_fabric, None)
    dense = ranks(2).run(train_with_fabric, {"density": 1.0, "value_format": "fp32"})
    assert torch.equal(dense[0]["weights"], ddp[0]["weights"])
    assert torch.equal(dense[1]["weights"], ddp[0]["weights"])


def train_without_fabrics_backward(compress: str) -> int:
    strategy = FabricDCTStrategy(
        compress=compress, local_steps=1, density=0.05, refresh_every=5, adapt_threshold=False
    )
    fabric = launched(strategy)
    module, optimizer = set_up(fabric)
    for inputs, _ in Noise(STEPS, 40, 8, rank=rank()):
        module(fabric.to_device(inputs)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return strategy.traffic.totals.refreshes


@pytest.mark.parametrize("compress", ["gradients", "updates"])
def test_plain_backward_is_allowed_and_refreshes(ranks: Any, compress: str) -> None:
    """Fabric forbids ``loss.backward()`` under strategies that override ``backward``; steps 0, 5
    and 10 are due.
    """
    assert ranks(2).run(train_without_fabrics_backward, compress) == [3, 3]


def test_fabric_checkpoints_hold_the_compression_state(ranks: Any, tmp_path: Path) -> None:
    settings = {"density": 0.2, "value_format": "2bit", "exchange": "two_phase"}
    straight = ranks(2).run(train_with_fabric, settings)
    resumed = ranks(2).run(train_with_fabric, settings, tmp_path / "fabric.ckpt")
    for run in (straight[1], *resumed):
        assert torch.equal(straight[0]["weights"], run["weights"])
    assert len(list((tmp_path / "fabric.ckpt.module-0.dct").iterdir())) == 2


def test_updates_are_exchanged_and_saved(ranks: Any, tmp_path: Path) -> None:
    """Oracle: shared weights equal on all ranks, own ones not, and a run that is loaded half way,
    within a round.
    """
    settings = {"compress": "updates", "local_steps": 4, "density": 0.2, "overlap_steps": 2}
    one, other = ranks(2).run(train_with_fabric, settings)
    assert torch.equal(one["weights"], other["weights"])
    assert not torch.equal(one["own"], other["own"])
    assert one["totals"].steps == STEPS
    resumed = ranks(2).run(train_with_fabric, settings, tmp_path / "fabric.ckpt")
    assert torch.equal(resumed[0]["weights"], one["weights"])
    assert torch.equal(resumed[1]["own"], other["own"])


def end_with_updates_in_flight(
    path: Path,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], list[str]]:
    """The final weights: of an evaluation, with what is saved in it; and of a plain loop, which
    ends with `close`.
    """
    settings = {"local_steps": 3, "overlap_steps": 3, "density": 0.2, "warmup_steps": 0}
    batches = list(Noise(10, 40, 8, rank=rank()))
    strategy = FabricDCTStrategy(**settings)
    fabric = launched(strategy)
    with patch("lightning_dct.fabric.rank_zero_info") as said:
        module, optimizer = fabric.setup(
            model := perceptron(), torch.optim.SGD(model.parameters(), lr=0.1)
        )
        for inputs, _ in batches:
            fabric.backward(module(fabric.to_device(inputs)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(2):
            fabric.save(path, {"module": module})
        with strategy.shared_weights():
            fabric.save(path, {"module": module})
            shown = weights_of(model)
    saved = torch.load(path, weights_only=True)["module"]
    assert all(torch.equal(saved[name].to(one.device), one) for name, one in shown.items())
    other = perceptron()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    updates = Updates(other, optimizer, **settings)
    for inputs, _ in batches:
        other(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    updates.close()
    return shown, weights_of(other), [call.args[0] for call in said.call_args_list]


def test_the_last_exchange_is_applied(ranks: Any, tmp_path: Path) -> None:
    """Oracle: a plain loop. A checkpoint of updates in flight lacks them, which is said once."""
    for shown, expected, said in ranks(2).run(end_with_updates_in_flight, tmp_path / "a.ckpt"):
        assert all(torch.equal(one.cpu(), expected[name]) for name, one in shown.items())
        assert ["lack the updates that are in flight" in one for one in said] == [True]


class Bounded(torch.nn.Module):
    """Writes into its weights in forward, as ``nn.Embedding(max_norm=...)`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(40))
        self.last = torch.nn.Linear(40, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.gain.data.clamp_(max=float(inputs.abs().mean()))
        return self.last(inputs * self.gain)


def train_bounded() -> dict[str, torch.Tensor]:
    strategy = FabricDCTStrategy(local_steps=1, density=0.1)
    fabric = launched(strategy)
    module = Bounded()
    module, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    train_in_fabric(fabric, module, optimizer, 6)
    with strategy.shared_weights():
        return {name: weights.clone() for name, weights in module.state_dict().items()}


def test_a_forward_may_write_other_weights_on_each_rank(ranks: Any) -> None:
    one, other = ranks(2).run(train_bounded)
    assert all(torch.equal(weights, other[name]) for name, weights in one.items())
    assert float(one["gain"].mean()) < 0.9


def load_within_an_evaluation(path: Path) -> bool:
    """Whether a rank's own weights are those that were saved after a checkpoint is loaded in
    mid-run.
    """
    strategy = FabricDCTStrategy(local_steps=1, density=0.1)
    fabric = launched(strategy)
    module, optimizer = set_up(fabric)
    train_in_fabric(fabric, module, optimizer, 3)
    saved = flat(module)
    fabric.save(path, {"module": module, "optimizer": optimizer})
    train_in_fabric(fabric, module, optimizer, 3)
    later = flat(module)
    with strategy.shared_weights():
        fabric.load(path, {"module": module, "optimizer": optimizer})
    return torch.equal(saved, flat(module)) and not torch.equal(saved, later)


def test_a_checkpoint_may_be_loaded_within_an_evaluation(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(load_within_an_evaluation, tmp_path / "fabric.ckpt") == [True, True]


def evaluate_within_an_evaluation(steps: int) -> bool:
    """Whether the weights and buffers of an evaluation stay when another one within it ends, and
    its own afterwards.
    """
    strategy = FabricDCTStrategy(density=0.1)
    fabric = launched(strategy)
    original = torch.nn.Sequential(torch.nn.Linear(40, 8), torch.nn.BatchNorm1d(8))
    module, optimizer = fabric.setup(original, torch.optim.SGD(original.parameters(), lr=0.1))
    module(torch.randn(4, 40, device=fabric.device) * (1 + rank()))
    train_in_fabric(fabric, module, optimizer, steps)

    def now() -> list[torch.Tensor]:
        return [value.clone() for value in original.state_dict().values()]

    own = now()
    with strategy.shared_weights():
        shown = now()
        with strategy.shared_weights():
            pass
        stays = all(map(torch.equal, shown, now()))
    return stays and all(map(torch.equal, own, now())) and not all(map(torch.equal, own, shown))


@pytest.mark.parametrize("steps", [0, 3])
def test_an_evaluation_within_another(ranks: Any, steps: int) -> None:
    assert ranks(2).run(evaluate_within_an_evaluation, steps) == [True] * 2


def train_a_probe_within_an_evaluation() -> bool:
    """Whether an evaluation within another sees shared weights of a module that was trained
    meanwhile.
    """
    strategy = FabricDCTStrategy(density=0.2, local_steps=1)
    fabric = launched(strategy)
    other = set_up(fabric)  # nobody else keeps it
    probe, optimizer = set_up(fabric)
    with strategy.shared_weights():
        for inputs, _ in Noise(4, 40, 8, rank=rank()):
            fabric.backward(probe(fabric.to_device(inputs)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        with strategy.shared_weights():
            seen = flat(probe)
    with strategy.shared_weights():
        return len(other) == 2 and torch.equal(seen, flat(probe))


def test_a_module_that_is_trained_within_an_evaluation_is_evaluated(ranks: Any) -> None:
    assert ranks(2).run(train_a_probe_within_an_evaluation) == [True, True]


def clamp(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.01, 0.01)


def train_clamped(compress: str) -> float:
    fabric = launched(FabricDCTStrategy(compress=compress, density=0.5, project=clamp))
    module, optimizer = set_up(fabric)
    train_in_fabric(fabric, module, optimizer, 3)
    return float(flat(module).abs().max())


@pytest.mark.parametrize("compress", ["gradients", "updates"])
def test_weights_stay_within_bounds(ranks: Any, compress: str) -> None:
    assert ranks(2).run(train_clamped, compress) == [pytest.approx(0.01)] * 2


def save_fewer_modules(path: Path) -> None:
    fabric = launched(FabricDCTStrategy())
    modules = {name: fabric.setup_module(Perceptron()) for name in ("first", "second", "third")}
    fabric.save(path, modules)
    fabric.save(path, {"first": modules["first"]})


def test_a_save_removes_what_modules_of_an_earlier_one_have_left(
    ranks: Any, tmp_path: Path
) -> None:
    ranks(2).run(save_fewer_modules, tmp_path / "a.ckpt")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.ckpt", "a.ckpt.module-0.dct"]


def save_or_load_two_modules(path: Path, load: bool) -> None:
    """Save two modules of one shape, or load them."""
    fabric = launched(FabricDCTStrategy(density=0.2))
    state = {name: fabric.setup_module(Perceptron()) for name in ("first", "second")}
    if load:
        fabric.load(path, state)
    else:
        fabric.save(path, state)


def test_state_of_another_module_is_refused(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the folders of two modules that differ in nothing else, in each other's place."""
    saved = tmp_path / "a.ckpt"
    ranks(2).run(save_or_load_two_modules, saved, False)
    ranks(2).run(save_or_load_two_modules, saved, True)
    first, second = (Path(f"{saved}.module-{index}.dct") for index in (0, 1))
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    with pytest.raises(RankFailure, match=r"module-0\.dct.* is not there"):
        ranks(2).run(save_or_load_two_modules, saved, True)


def make_group() -> dist.ProcessGroup:
    return dist.new_group([0, 1])


def make_two_groups() -> dist.ProcessGroup:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    return groups[dist.get_rank() == 2]


def train_in_groups_of_two_sizes() -> int:
    strategy = DCTStrategy(process_group=make_two_groups, density=0.05)
    fit(strategy, Module(), 4)
    return strategy.synchronizer.exchange.everyone.size


def test_groups_of_two_sizes(ranks: Any) -> None:
    """Oracle: a group of one rank has nobody to make groups with, and yet takes part where others
    make theirs.
    """
    assert ranks(3).run(train_in_groups_of_two_sizes) == [2, 2, 1]


def train_in_own_group() -> tuple[bool, int]:
    strategy = DCTStrategy(compress="gradients", process_group=make_group, density=0.05)
    fit(strategy, Module(), 4)
    group = strategy.synchronizer.exchange.everyone.group
    return group is not dist.group.WORLD, strategy.traffic.totals.steps


def test_own_process_group(ranks: Any) -> None:
    assert ranks(2).run(train_in_own_group) == [(True, 4)] * 2


def test_a_plugin_may_read_and_write_files() -> None:
    io = TorchCheckpointIO()
    fabric = Fabric(accelerator=accelerator(), strategy=FabricDCTStrategy(), plugins=[io])
    assert fabric.strategy.checkpoint_io is io


def test_the_strategy_is_pickled_for_processes_that_are_spawned() -> None:
    assert pickle.loads(pickle.dumps(FabricDCTStrategy(density=0.2))).config.density == 0.2


def load_the_model_alone(path: Path) -> list[float]:
    """Rates before a save and after a load into a model with another optimizer."""
    rates = []
    for rate in (0.01, 1e-5):
        fabric = launched(FabricDCTStrategy())
        model, optimizer = set_up(fabric, lr=rate)
        if rate == 0.01:
            fabric.backward(model(torch.ones(4, 40, device=fabric.device)).sum())
            optimizer.step()
            fabric.save(path, {"model": model, "optimizer": optimizer})
        else:
            fabric.load(path, {"model": model})
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_an_optimizer_that_nobody_loads_stays_as_it_is(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2).run(load_the_model_alone, tmp_path / "model.ckpt") == [[0.01, 1e-5]] * 2


def load_with_another_rate(path: Path) -> list[tuple[list[float], bool]]:
    """The rates after a load and whether each rank has its own momentum: of what was saved, and of
    a file edited.
    """
    found = []
    for rate in (0.1, 0.001):
        fabric = launched(FabricDCTStrategy())
        model, optimizer = set_up(fabric, lr=0.1, momentum=0.9)
        state = {"model": model, "optimizer": optimizer}
        fabric.backward(model(torch.full((4, 40), 1.0 + rank(), device=fabric.device)).sum())
        optimizer.step()
        # As methods that adapt it on each rank.
        optimizer.param_groups[0]["momentum"] = 0.5 + 0.1 * rank()
        momentum = optimizer.state[model.gain]["momentum_buffer"].clone()
        fabric.save(path, state)
        if rank() == 0:
            edited = torch.load(path)
            edited["optimizer"]["param_groups"][0]["lr"] = rate
            torch.save(edited, path)
        fabric.barrier()
        optimizer.load_state_dict(torch.optim.SGD(model.parameters(), lr=7.0).state_dict())
        fabric.load(path, state)
        (group,) = optimizer.param_groups
        is_own = torch.equal(optimizer.state[model.gain]["momentum_buffer"], momentum)
        found.append(([group["lr"], group["momentum"]], is_own))
    return found


def test_hyperparameters_that_somebody_edits_in_the_file_are_taken(
    ranks: Any, tmp_path: Path
) -> None:
    """A rank keeps its own only if the file has those that were saved."""
    one, other = ranks(2).run(load_with_another_rate, tmp_path / "edited.ckpt")
    assert one == [([0.1, 0.5], True), ([0.001, 0.5], True)]
    assert other == [([0.1, 0.6], True), ([0.001, 0.5], True)]


def load_a_checkpoint_of_plain_ddp(path: Path, compress: str) -> list[bool]:
    """Whether residuals are there before and after, while updates are in flight, and whether a rank
    has its own.
    """
    rounds = (
        {"local_steps": 2, "warmup_steps": 0, "overlap_steps": 2} if compress == "updates" else {}
    )
    strategy = FabricDCTStrategy(compress=compress, density=0.1, **rounds)
    fabric = launched(strategy)
    model, optimizer = set_up(fabric)
    if rank() == 0:
        torch.save({"model": model.state_dict()}, path)
    fabric.barrier()
    train_in_fabric(fabric, model, optimizer, 4)
    before = strategy.synchronizers[0].norm()
    steps = strategy.traffic.totals.steps
    fabric.load(path, {"model": model})
    same = torch.load(path)["model"]
    alike = all(
        torch.equal(same[name].to(one.device), one) for name, one in model.state_dict().items()
    )
    return [
        before > 0.0,
        strategy.synchronizers[0].norm() > 0.0,
        alike,
        steps == strategy.traffic.totals.steps,
    ]


@pytest.mark.parametrize("compress", ["gradients", "updates"])
def test_residuals_start_at_zero_without_a_saved_state(
    ranks: Any, tmp_path: Path, compress: str
) -> None:
    found = ranks(2).run(load_a_checkpoint_of_plain_ddp, tmp_path / "ddp.ckpt", compress)
    assert found == [[True, False, True, True]] * 2


def load_one_of_two(path: Path) -> list[bool]:
    """Whether a module that nobody loads goes on, and whether one is found in a program with fewer
    modules.
    """
    settings = {"local_steps": 2, "warmup_steps": 0, "overlap_steps": 1, "density": 0.2}

    def train(fabric: Fabric, module: Any, optimizer: Any) -> torch.Tensor:
        train_in_fabric(fabric, module, optimizer, 3)
        return flat(module)

    fabric = launched(FabricDCTStrategy(**settings))
    (first, of_first), (second, of_second) = (
        set_up(fabric, momentum=0.9),
        set_up(fabric, momentum=0.9),
    )
    train(fabric, first, of_first)
    train(fabric, second, of_second)
    fabric.save(
        path, {"first": first, "second": second, "of_first": of_first, "of_second": of_second}
    )
    later = train(fabric, second, of_second)
    fabric.load(path, {"first": first, "of_first": of_first})
    untouched = torch.equal(flat(second), later)
    other = launched(FabricDCTStrategy(**settings))
    alone, optimizer = set_up(other, momentum=0.9)
    other.load(path, {"second": alone, "of_second": optimizer})
    return [untouched, torch.equal(train(other, alone, optimizer), later)]


def test_modules_are_found_by_their_key(ranks: Any, tmp_path: Path) -> None:
    """Oracle: the same three steps, by the module that was saved and by the one that was loaded,
    within a round.
    """
    assert ranks(2).run(load_one_of_two, tmp_path / "two.ckpt") == [[True, True]] * 2


def train_folds(compress: str) -> tuple[list[bool], int]:
    """Train one module after the other; which of them are kept, and the number of synchronizers.

    A reference cycle keeps those of rank 1 until their memory is collected, which happens on each
    rank at its own time.
    """
    strategy = FabricDCTStrategy(compress=compress)
    fabric = launched(strategy)
    kept: list[weakref.ref] = []
    for _ in range(3):
        original = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        original.cycle = [original] if rank() == 1 else []
        module, optimizer = fabric.setup(original, torch.optim.Adam(original.parameters()))
        kept += [weakref.ref(one) for one in (original, original[0].weight, optimizer.optimizer)]
        fabric.backward(module(torch.rand(4, 8, device=fabric.device)).sum())
        optimizer.step()
        with strategy.shared_weights():
            pass
    del original, module, optimizer
    with strategy.shared_weights():
        pass
    gc.collect()
    return [one() is not None for one in kept], len(strategy.synchronizers)


@pytest.mark.parametrize("compress", ["gradients", "updates"])
def test_modules_that_are_dropped_are_not_kept(ranks: Any, compress: str) -> None:
    """Oracle: no reference; and ranks that disagree for a while on what is there do not wait for
    each other.
    """
    assert ranks(2).run(train_folds, compress) == [([False] * 9, 0)] * 2


def train_in_phases(path: Path, overlap_steps: int) -> tuple[list[bool], list[int]]:
    """A new optimizer for each phase; then a resume with one.

    Whether buffers were alike, and the steps it counts.
    """

    def begin() -> tuple[Fabric, Any]:
        strategy = FabricDCTStrategy(
            local_steps=2, overlap_steps=overlap_steps, density=0.5, warmup_steps=0
        )
        fabric = launched(strategy)
        torch.manual_seed(0)
        layers = torch.nn.Sequential(torch.nn.Linear(4, 40), torch.nn.BatchNorm1d(40))
        return fabric, fabric.setup_module(layers)

    def train(steps: int) -> list[bool]:
        alike = []
        for _ in range(steps):
            inputs = torch.randn(16, 4, device=fabric.device) * (1 + rank())
            fabric.backward(module(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            means = fabric.all_gather(module.module[1].running_mean)
            alike.append(torch.equal(means[0], means[1]))
        return alike

    fabric, module = begin()
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.01))
    train(3)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.01))
    train(4)
    gc.collect()
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.01))
    alike = train(8)
    fabric.save(path, {"module": module, "optimizer": optimizer})
    fabric, module = begin()
    optimizer = fabric.setup_optimizers(torch.optim.SGD(module.parameters(), lr=0.01))
    fabric.load(path, {"module": module, "optimizer": optimizer})
    train(1)
    clocks = fabric.strategy.synchronizers[0].state_dict()["exchange_clocks"]
    return alike, [
        clocks[f"steps of {number}"] for number in range(2) if f"steps of {number}" in clocks
    ]


@pytest.mark.parametrize("overlap_steps", [0, 1])
def test_an_optimizer_for_each_phase(ranks: Any, tmp_path: Path, overlap_steps: int) -> None:
    """Oracle: running statistics are averaged in the last phase, too, and the last optimizer's
    clock goes on.
    """
    for alike, steps in ranks(2).run(train_in_phases, tmp_path / "a.ckpt", overlap_steps):
        assert alike == [step % 2 == 1 for step in range(8)]
        assert 9 in steps


def set_up_a_trunk_twice() -> None:
    fabric = launched(FabricDCTStrategy())
    trunk = torch.nn.Linear(8, 40)
    actor, critic = (torch.nn.Sequential(trunk, torch.nn.Linear(40, 1)) for _ in range(2))
    fabric.setup_module(actor)
    fabric.setup_module(actor)
    with pytest.raises(ValueError, match=r"'0\.weight' is also in a module that was set up before"):
        fabric.setup_module(critic)
    del actor
    gc.collect()
    fabric.setup_module(critic)


def test_modules_that_share_parameters_are_refused(ranks: Any) -> None:
    """Oracle: no error for the same module again, nor once the other one is gone."""
    ranks(2).run(set_up_a_trunk_twice)


def train_parts_of_a_list() -> list[torch.Tensor]:
    strategy = FabricDCTStrategy(density=0.2)
    fabric = launched(strategy)
    part = torch.nn.Linear(40, 8)
    optimizer = fabric.setup(
        torch.nn.ModuleList([part]), torch.optim.SGD(part.parameters(), lr=0.1)
    )[1]
    gc.collect()
    fabric.backward(part(torch.full((4, 40), 1.0 + rank(), device=fabric.device)).sum())
    optimizer.step()
    with strategy.shared_weights():
        return [part.weight.detach().clone(), torch.tensor(float(strategy.traffic.totals.steps))]


def test_a_module_is_synchronised_while_an_optimizer_steps_its_parameters(ranks: Any) -> None:
    """Nobody keeps the list, as in programs that set up several modules at once."""
    one, other = ranks(2).run(train_parts_of_a_list)
    assert torch.equal(one[0], other[0])
    assert one[1] == 1.0
