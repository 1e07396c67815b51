"""Peak memory of a rank under HSDP, ``dct_fsdp`` and ``dct``.

    python experiments/benchmark/memory.py

For each strategy four ranks start on this machine, two a node, and train dense layers with AdamW
and gloo, until past the first round of updates, which selects thresholds. The peak is a rank's
largest resident set, less its size before the model was made and after the first use of numba,
which takes as much for any model. Malloc usually keeps most of the freed memory, which hides what a
strategy needs. Here it returns that memory, unless ``--keep-freed`` is given.
"""

import argparse
import resource
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

# Experiments/, where `benchmark` is.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmark.job import QUIET, do_job, run_job
from benchmark.session import at_least
from benchmark.tables import describe_machine, publish
from hsdp import HSDPStrategy
from lightning_dct import DCTConfig, DCTFSDPStrategy, DCTStrategy
from lightning_dct.cost.timing import measure_speed
from network.hosts import Host

NODES = 2
RANKS_PER_NODE = 2
STEPS = 10
ROWS = 8
HSDP = "hsdp"
# Without the shorter rounds of the warm-up, which send less.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    HSDP: HSDPStrategy,
    "dct_fsdp, updates": lambda: DCTFSDPStrategy(warmup_steps=0),
    "dct, updates": lambda: DCTStrategy(warmup_steps=0),
}


class Stack(LightningModule):
    """Dense layers, each a unit of FSDP from a width of 1,000 on."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def peak() -> int:
    """The largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def num_bytes(state: Any) -> int:
    """Of all tensors in a tree of dicts."""
    return state.nbytes if isinstance(state, Tensor) else sum(map(num_bytes, state.values()))


def train(name: str, layers: int, width: int) -> dict[str, int]:
    """One rank: bytes of the peak beyond what there was before, and of what is remembered."""
    seed_everything(0, verbose=False)
    measure_speed(DCTConfig(density=0.3), [20_000], 0.0, torch.device("cpu"))
    strategy = STRATEGIES[name]()
    before = peak()
    place: dict[str, Any] = {"accelerator": "cpu", "devices": RANKS_PER_NODE, "num_nodes": NODES}
    rows = torch.randn(NODES * RANKS_PER_NODE * STEPS * ROWS, width)
    trainer = Trainer(strategy=strategy, max_steps=STEPS, **place, **QUIET)
    trainer.fit(Stack(layers, width), DataLoader(rows, ROWS))
    found = {"peak": peak() - before, "remembered": 0}
    synchronizer = getattr(strategy, "synchronizer", None)
    if synchronizer is not None:
        # A rank's own weights are as large as the shared ones that it keeps beside them.
        state = synchronizer.state_dict()
        found["remembered"] = sum(
            num_bytes(state.get(part, {})) for part in ("residuals", "owned", "weights")
        )
    return found


def measure(name: str, options: argparse.Namespace) -> dict[str, float]:
    """Start the ranks, and return the means over them, in bytes."""
    job = {"name": name, "layers": options.layers, "width": options.width}
    environment = {} if options.keep_freed else {"MALLOC_MMAP_THRESHOLD_": str(1 << 16)}
    found = run_job([Host()] * NODES, __file__, job, RANKS_PER_NODE, environment=environment)
    return {key: mean(one[key] for one in found) for key in found[0]}


def main(words: Sequence[str]) -> None:
    """Measure all strategies, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=at_least(2), default=6, help="of the model")
    parser.add_argument(
        "--width",
        type=at_least(2),
        default=2048,
        help="of each; 6 of 2048 have 25 million parameters",
    )
    parser.add_argument("--keep-freed", action="store_true", help="leave malloc as it is")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/benchmark"), help="folder for the table"
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.job:
        do_job(options.job, lambda job: train(**job))
        return
    found = {name: measure(name, options) for name in STRATEGIES}
    rows = [
        ["strategy", "peak, MB", f"beyond {HSDP}", "residuals and shared weights", "not explained"]
    ]
    for name, one in found.items():
        beyond = one["peak"] - found[HSDP]["peak"]
        figures = one["peak"], beyond, one["remembered"], beyond - one["remembered"]
        rows.append([name, *(f"{figure / 1e6:,.0f}" for figure in figures)])
    parameters = options.layers * (options.width + 1) * options.width
    machine = describe_machine()
    malloc = "keeps" if options.keep_freed else "returns"
    note = (
        f"{parameters:,} parameters, AdamW, {STEPS} steps; {NODES} x {RANKS_PER_NODE} ranks on"
        f" gloo, mean over ranks; malloc {malloc} what is freed; torch {machine['torch']},"
        f" {machine['processor']}."
    )
    publish(options.output / "memory.md", "Peak memory a rank", rows, [note], machine, found=found)


if __name__ == "__main__":
    main(sys.argv[1:])
