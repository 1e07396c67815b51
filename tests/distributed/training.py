"""Small models, data that differ from rank to rank, and what the tests want to know of a run."""

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.utils.data import DataLoader, Dataset

from lightning_dct import DCTStrategy
from lightning_dct.sync.gradients import GradientSynchronizer
from one_card import accelerator

State = dict[str, Tensor]


def rank() -> int:
    return int(os.environ["RANK"])


class Noise(Dataset):
    """Batches of a linear teacher's examples: ``(batch, in)`` and ``(batch, out)``, another stream
    on every rank.
    """

    def __init__(
        self, batches: int, in_features: int, out_features: int, batch_size: int = 4, rank: int = 0
    ) -> None:
        self.shape = (batch_size, in_features)
        self.batches = batches
        self.rank = rank
        self.teacher = torch.randn(
            in_features, out_features, generator=torch.Generator().manual_seed(7)
        )

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.batches:
            raise IndexError(index)
        inputs = torch.randn(
            self.shape, generator=torch.Generator().manual_seed(100_000 * self.rank + index)
        )
        return inputs, inputs @ self.teacher / self.shape[1] ** 0.5


def loader(batches: int, in_features: int, out_features: int, batch_size: int = 4) -> DataLoader:
    """This rank's batches, one an item, always in the same order."""
    return DataLoader(
        Noise(batches, in_features, out_features, batch_size, rank()), batch_size=None
    )


class Perceptron(nn.Module):
    """Two layers and a scalar gain: 40 x 24 + 24, 24 x 8 + 8 and 1 entries."""

    def __init__(self, in_features: int = 40, hidden: int = 24, out_features: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(in_features, hidden)
        self.second = nn.Linear(hidden, out_features)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.gain * self.second(torch.tanh(self.first(inputs)))


def perceptron(**sizes: int) -> Perceptron:
    """The same weights on every rank and every time."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Perceptron(**sizes)


class Module(LightningModule):
    """Regression with any model and optimizer."""

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
        **optimizer_settings: Any,
    ) -> None:
        super().__init__()
        self.model = perceptron() if model is None else model
        self.optimizer = optimizer
        self.optimizer_settings = optimizer_settings or {"lr": 0.1}

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, outputs = batch
        return (self(inputs.to(self.dtype)) - outputs).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(
            [parameter for parameter in self.parameters() if parameter.requires_grad],
            **self.optimizer_settings,
        )


class Manual(Module):
    """Steps its optimizers by hand, all of them after one backward."""

    automatic_optimization = False

    def stepped(self, batch_idx: int) -> list[Any]:
        """The optimizers that are at turn."""
        optimizers: Any = self.optimizers()
        return optimizers if isinstance(optimizers, list) else [optimizers]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        optimizers = self.stepped(batch_idx)
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return {"loss": loss.detach()}


@dataclass
class Run:
    """What a rank remembers of a run."""

    weights: State
    losses: list[float]
    hashes: list[str]
    synchronisations: int = 0
    residuals: State = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    totals: Any = None
    seen: list[Any] = field(default_factory=list)


class Watch(Callback):
    """Records each batch's loss, a hash of the weights every so many batches, and what ``look``
    sees after each.
    """

    def __init__(self, every: int = 1, look: Callable[[Trainer], Any] | None = None) -> None:
        self.every = every
        self.look = look
        self.losses: list[float] = []
        self.hashes: list[str] = []
        self.seen: list[Any] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if outputs is not None:
            self.losses.append(float(outputs["loss"]))
        if (batch_idx + 1) % self.every == 0:
            self.hashes.append(hash_of(pl_module))
        if self.look is not None:
            self.seen.append(self.look(trainer))


def hash_of(module: nn.Module) -> str:
    """Differs when one bit of one weight differs."""
    digest = hashlib.sha1()
    for _, tensor in sorted(module.state_dict().items()):
        if isinstance(tensor, Tensor) and not tensor.is_meta:  # as what another stage has
            digest.update(
                tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
            )
    return digest.hexdigest()


@contextmanager
def on_two_nodes() -> Iterator[None]:
    """This rank sees the environment of a job on two nodes with the same number of ranks, ranks in
    their order.
    """
    per_node = int(os.environ["WORLD_SIZE"]) // 2
    node, local = divmod(rank(), per_node)
    with patch.dict(
        os.environ, {"GROUP_RANK": str(node), "NODE_RANK": str(node), "LOCAL_RANK": str(local)}
    ):
        yield


def trainer_for(strategy: Any, **settings: Any) -> Trainer:
    """A quiet Trainer on the ranks that are already there, or in one process."""
    settings = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "max_epochs": 1,
        "devices": int(os.environ.get("WORLD_SIZE", "1")),
        **settings,
    }
    return Trainer(accelerator=accelerator(), strategy=strategy, **settings)


def launched(strategy: Any) -> Fabric:
    """Fabric on the ranks that are already there."""
    fabric = Fabric(
        accelerator=accelerator(), devices=int(os.environ["WORLD_SIZE"]), strategy=strategy
    )
    fabric.launch()
    return fabric


def train_in_fabric(fabric: Fabric, module: nn.Module, optimizer: Any, steps: int) -> None:
    """Draw a module's outputs to zero."""
    for inputs, _ in Noise(steps, 40, 8, rank=rank()):
        fabric.backward(module(fabric.to_device(inputs)).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def fit(
    strategy: DDPStrategy,
    module: LightningModule,
    batches: Any = 20,
    *,
    ckpt_path: str | None = None,
    watch: Watch | None = None,
    **settings: Any,
) -> Run:
    """Train on ``batches`` batches of noise (or on a loader) and say what came of it."""
    watch = watch or Watch()
    trainer = trainer_for(strategy, callbacks=[watch, *settings.pop("callbacks", [])], **settings)
    data = loader(batches, 40, 8) if isinstance(batches, int) else batches
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return summary(strategy, module, watch)


class SearchLater(LearningRateFinder):
    """Searches at the start of the second epoch, as Lightning's documentation of the finder
    shows.
    """

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.lr_find(trainer, pl_module)


def message_of(function: Callable[..., Any], *arguments: Any, **settings: Any) -> str:
    """What the error says that a function must end with."""
    with pytest.raises(Exception) as caught:
        function(*arguments, **settings)
    return str(caught.value)


def warnings_of(function: Callable[..., Any], *arguments: Any, **settings: Any) -> list[str]:
    """What a function warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*arguments, **settings)
    return [str(one.message) for one in caught]


def summary(strategy: DDPStrategy, module: LightningModule, watch: Watch) -> Run:
    run = Run(weights_of(module), watch.losses, watch.hashes, seen=watch.seen)
    if isinstance(strategy, DCTStrategy):
        run.state = strategy.synchronizer.state_dict()
        run.synchronisations = strategy.synchronizer.synchronisations
        run.residuals = run.state["residuals"]
        run.totals = strategy.traffic.totals
    return run


def weights_of(module: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@contextmanager
def local_gradients() -> Iterator[State]:
    """Sums up, in fp64 and by name, the local gradients that the synchroniser is given, in unscaled
    units.

    Those of a synchronisation that is undone, because mixed precision skips its optimizer step, do
    not count.
    """
    sums: State = {}
    pending: State = {}
    original = GradientSynchronizer.hook

    def recording(self: GradientSynchronizer, state: object, bucket: GradBucket) -> Future[Tensor]:
        scale = 1.0 if self._loss_scale is None else self._loss_scale()
        sparse = bucket.buffer().is_sparse
        gradients = [bucket.buffer().to_dense()] if sparse else bucket.gradients()
        for parameter, gradient in zip(bucket.parameters(), gradients, strict=True):
            # DistributedDataParallel hands over what an optimizer that is not at turn has left in
            # `.grad`.
            if parameter.requires_grad:
                pending[self.parameter_names[parameter]] = gradient.flatten().double() / scale
        before = self.synchronisations
        future = original(self, state, bucket)
        if bucket.is_last():
            if self.synchronisations > before:
                for name, gradient in pending.items():
                    sums[name] = sums.get(name, 0) + gradient
            pending.clear()
        return future

    with patch.object(GradientSynchronizer, "hook", recording):
        yield sums


class Applied(Callback):
    """Sums up, in fp64 and by name, the synchronised gradients that reach the optimizer, in
    unscaled units.
    """

    def __init__(self) -> None:
        self.sums: State = {}

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        names = {
            parameter: name.replace("_orig_mod.", "")
            for name, parameter in pl_module.named_parameters()
        }
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        gradients = {
            names[parameter]: parameter.grad.to_dense().flatten().double()
            for parameter in parameters
            if parameter.grad is not None
        }
        # Otherwise the step is skipped.
        if all(gradient.isfinite().all() for gradient in gradients.values()):
            for name, gradient in gradients.items():
                self.sums[name] = self.sums.get(name, 0) + gradient


def held_back(state: dict[str, Any], given: State) -> State:
    """What a rank holds back, of its own gradients and of sums it owns, for each tensor that has
    had a gradient.
    """
    held = {}
    for name, gradient in given.items():
        held[name] = torch.zeros_like(gradient) + torch.as_tensor(
            state["residuals"].get(name, 0.0)
        ).to(gradient.device)
        for start, piece in state["owned"].get(name, {}).items():
            held[name][start : start + piece.numel()] += piece.to(gradient.device)
    return held


def fit_recorded(
    *arguments: Any, callbacks: Any = (), **settings: Any
) -> tuple[Run, tuple[State, State, State]]:
    """As :func:`fit`; and the sums of local gradients, those that were applied, and what this rank
    holds back.
    """
    applied = Applied()
    with local_gradients() as given:
        run = fit(*arguments, callbacks=[applied, *callbacks], **settings)
    return run, (given, applied.sums, held_back(run.state, given) if run.state else {})


def assert_conserved(ranks: list[tuple[State, State, State]]) -> None:
    """``W * applied + residuals of all ranks == local gradients of all ranks``, for every tensor.

    Up to 1e-5 of the largest entry of the tensor's gradient sum.

    Args:
        ranks: For each rank the sums of its local gradients, the sums applied, and what it holds
            back.
    """
    names = {name for given, _, _ in ranks for name in given}
    assert names
    for name in names:
        given = sum(mine[name] for mine, _, _ in ranks)
        applied = ranks[0][1].get(name, torch.zeros_like(given))
        held = sum(
            (mine[name].double() for _, _, mine in ranks if name in mine), torch.zeros_like(given)
        )
        difference = (len(ranks) * applied + held - given).abs().max()
        scale = max(float(max(mine[name].abs().max() for mine, _, _ in ranks)), 1e-12)
        assert float(difference) <= 1e-5 * scale, (
            f"{name}: {float(difference):.3g} of {scale:.3g} went missing"
        )


def assert_replicas_equal(runs: list[Run]) -> None:
    """Every recorded hash and every final weight is the same on all ranks."""
    for run in runs[1:]:
        assert runs[0].hashes == run.hashes
        for name, weight in runs[0].weights.items():
            assert torch.equal(weight, run.weights[name]), name


def assert_weights_equal(one: State, other: State) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        found = other[name].to(weight.device)
        assert torch.equal(weight, found), f"{name}: {float((weight - found).abs().max())}"


def assert_weights_close(one: State, other: State, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(
            other[name], weight, rtol=rtol, atol=atol, msg=lambda text, name=name: name + text
        )


def assert_learns(run: Run) -> None:
    """The second half of the run has a lower mean loss than the first quarter."""
    quarter = max(len(run.losses) // 4, 1)
    start = run.losses[:quarter]
    end = run.losses[-2 * quarter :]
    assert sum(end) / len(end) < sum(start) / len(start), run.losses
