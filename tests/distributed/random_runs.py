"""Runs with random settings and shapes, on real ranks and by `lightning_dct.reference` in one
process.
"""

import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from distributed.training import Run, fit, on_two_nodes, rank
from lightning_dct import DCTStrategy
from lightning_dct.config import VALUE_FORMATS
from lightning_dct.reference import Settings, State, States, exchange, train
from lightning_dct.sync.optimizer_trial import try_out

STEPS = 23
# Each has another value format.
CASES = len(VALUE_FORMATS)


class Case(NamedTuple):
    """What is trained and how; ``settings`` are those of DCTConfig.

    If ``is_unlike``, ranks pull in opposite directions, and some harder than others.
    """

    shapes: list[tuple[int, ...]]
    dtype: torch.dtype
    settings: dict[str, Any]
    optimizer: Callable[..., torch.optim.Optimizer]
    is_unlike: bool = False


def draw(seed: int, compress: str, exchange: str) -> Case:
    """The first tensor is always compressed: buckets of dense ones go by an all-reduce, in the
    backend's own order.
    """
    choice = random.Random(f"{seed} {compress} {exchange}")
    sizes = [
        choice.randint(1000, 3000),
        *(choice.choice([1, 50, 300, 1000]) for _ in range(choice.randint(0, 3))),
    ]
    settings: dict[str, Any] = {
        "compress": compress,
        "exchange": exchange,
        "density": choice.uniform(0.02, 0.4),
        "value_format": VALUE_FORMATS[seed % len(VALUE_FORMATS)],
        "min_tensor_size": choice.choice([0, 128, 400]),
        "adapt_threshold": choice.random() < 0.5,
        "refresh_every": choice.choice([1, 6, 1000]),
    }
    if compress == "updates":
        settings["local_steps"] = choice.randint(1, 9)
        settings["warmup_steps"] = choice.choice([0, 7])
        settings["overlap_steps"] = choice.choice([0, choice.randint(0, settings["local_steps"])])
        settings["residual_decay"] = choice.choice([1.0, 0.9, None])
    shapes = [(size // 2, 2) if size % 2 == 0 else (size,) for size in sizes]
    dtype = choice.choice([torch.float32, torch.float64])
    adam = choice.random() < 0.5
    return Case(shapes, dtype, settings, adamw if adam else _momentum)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.8)


class Springs(LightningModule):
    """Tensors drawn to where a batch says.

    Every entry is on its own, so all processors make the same bits of it.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(0)
        start = [torch.randn(shape, generator=noise, dtype=case.dtype) for shape in case.shapes]
        self.weights = nn.ParameterList(start)
        self.case = case

    def goals(self, rank: int, step: int) -> list[Tensor]:
        """Heavy-tailed, others for every rank and step."""
        noise = torch.Generator().manual_seed(100_000 * rank + step)
        goals = [
            torch.randn(shape, generator=noise, dtype=self.case.dtype).pow(3)
            for shape in self.case.shapes
        ]
        if self.case.is_unlike:
            towards = (8.0, -2.0, -6.0)[rank % 3]
            rows = [
                torch.arange(len(goal)).remainder(4).view(-1, *(goal.dim() - 1) * (1,))
                for goal in goals
            ]
            goals = [0.1 * goal + towards * row for goal, row in zip(goals, rows, strict=True)]
        return goals

    def pull(self, rank: int, step: int) -> Tensor:
        """The loss."""
        pairs = zip(self.weights, self.goals(rank, step), strict=True)
        return sum((weight - goal.to(weight.device)).square().sum() for weight, goal in pairs)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.pull(rank(), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.case.optimizer(self.parameters())


def run_case(case: Case, accumulate: int = 1, **settings: Any) -> Run:
    """On this rank."""
    strategy = DCTStrategy(**case.settings)
    batches = torch.utils.data.DataLoader(torch.zeros(accumulate * STEPS), batch_size=None)
    settings["accumulate_grad_batches"] = accumulate
    settings["precision"] = "64-true" if case.dtype == torch.float64 else "32-true"
    if case.settings["exchange"] != "hierarchical":
        return fit(strategy, Springs(case), batches, **settings)
    with on_two_nodes():
        return fit(strategy, Springs(case), batches, num_nodes=2, devices=2, **settings)


def run_cases(compress: str, exchange: str) -> list[Run]:
    return [run_case(draw(seed, compress, exchange)) for seed in range(CASES)]


def settings_of(case: Case) -> Settings:
    own = {name: value for name, value in case.settings.items() if name != "compress"}
    return Settings(ranks_per_node=2 if own["exchange"] == "hierarchical" else 1, **own)


def train_gradients(
    case: Case,
    world_size: int,
    accumulate: int = 1,
    after: Callable[[int, list[States]], None] | None = None,
) -> Any:
    """The weights that all ranks end with, and what is remembered of each tensor."""
    module = Springs(case)
    settings = settings_of(case)
    parameters = list(module.parameters())
    all_states = [States(State) for _ in case.shapes]
    optimizer = module.configure_optimizers()
    for step in range(STEPS):
        batches = range(step * accumulate, (step + 1) * accumulate)
        losses = [
            sum(module.pull(rank, batch) for batch in batches) / accumulate
            for rank in range(world_size)
        ]
        by_rank = [torch.autograd.grad(loss, parameters) for loss in losses]
        for parameter, states, gradients in zip(
            parameters, all_states, zip(*by_rank, strict=True), strict=True
        ):
            for held in states.values() if step % settings.refresh_every == 0 else ():
                held.target = 0
            parameter.grad = exchange([g.flatten() for g in gradients], states, settings)[
                0
            ].view_as(parameter)
        optimizer.step()
        if after is not None:
            after(step + 1, all_states)
    return [parameter.detach().flatten() for parameter in parameters], all_states


def train_updates(case: Case, world_size: int, plain_after: float = math.inf) -> Any:
    """The shared weights, each rank's own, and what is remembered of each tensor."""
    modules = [Springs(case) for _ in range(world_size)]
    optimizers = [module.configure_optimizers() for module in modules]

    def local_step(rank: int, step: int) -> list[Tensor]:
        optimizers[rank].zero_grad()
        modules[rank].pull(rank, step).backward()
        optimizers[rank].step()
        return [weight.grad.flatten() for weight in modules[rank].weights]

    def squares(rank: int) -> list[Tensor]:
        return [
            optimizers[rank].state[weight]["exp_avg_sq"].view(-1)
            for weight in modules[rank].weights
        ]

    own = [[weight.detach().view(-1) for weight in module.weights] for module in modules]
    is_adam = case.optimizer is adamw
    kept = 1 - 0.01 * 0.01 if is_adam else 1.0  # AdamW's own weight decay
    memory = try_out(optimizers[0]).squares[0]["exp_avg_sq"] if is_adam else None
    more = {"memory": memory, "squares": squares if is_adam else None, "shapes": case.shapes}
    shared, all_states = train(
        own, local_step, STEPS, settings_of(case), is_adam, kept, plain_after, **more
    )
    return shared, own, all_states


def assert_weights(state: dict[str, Tensor], expected: list[Tensor]) -> None:
    """The last bit of every entry."""
    for number, weights in enumerate(expected):
        assert torch.equal(state[f"weights.{number}"].flatten(), weights), f"tensor {number}"


def assert_remembered(runs: list[Run], all_states: list[States], ranks_per_node: int) -> None:
    """Thresholds and residuals, to the last bit, by the rank that keeps them."""
    for number, states in enumerate(all_states):
        name = f"weights.{number}"
        starts = sorted({start for _, _, start in states})
        for (sender, place, start), held in states.items():
            nodes = runs[place * ranks_per_node : (place + 1) * ranks_per_node]
            states = [
                run.state for run in {"rank": [runs[place]], "node": nodes, "owner": runs}[sender]
            ]
            if isinstance(held.residual, Tensor):
                stop = start + len(held.residual)
                pieces = [state["owned"].get(name, {}).get(start) for state in states]
                if sender == "rank":
                    pieces = [states[0]["residuals"][name][start:stop]]
                assert [piece.tolist() for piece in pieces if piece is not None] == [
                    held.residual.tolist()
                ]
            if held.target:
                size = runs[0].weights[name].numel()
                stop = [*starts, size][starts.index(start) + 1]
                label = (
                    ("sum of " if sender == "owner" else "")
                    + name
                    + f"[{start}:{stop}]" * (len(starts) > 1)
                )
                values = [state["thresholds"]["values"].get(label) for state in states]
                assert [value for value in values if value is not None] == [held.threshold], label
