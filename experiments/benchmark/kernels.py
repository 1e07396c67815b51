"""Times the kernels of compression beside the floor that memory sets: ``python experiments/benchmark/kernels.py``.

The floor is ``torch.add(gradient, residual, out=residual)``: no residual can be kept with less. Beside it are the
installed kernels, alone and followed by removing the sent entries from the residual; ``torch.topk`` and
``torch.kthvalue`` on magnitudes computed before; and the wire. All take turns in each round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `benchmark` is

import torch

from benchmark.session import at_least
from benchmark.tables import describe_machine, publish
from lightning_dct.forecast.timing import wait_for
from lightning_dct.kernels import available_kernels, buffer_kernel, select, sum_entries
from lightning_dct.kernels.buffered import Segments, buffer_capacity
from lightning_dct.threshold import kth_magnitude
from lightning_dct.wire import PayloadLayout, pack, unpack

FLOOR = "torch.add: the floor of memory"
SELECT = "select: "
WARM_UP_ROUNDS = 1
# Written before each kernel, so that gradient and residual come from memory: more than caches hold.
OTHER_DATA_BYTES = 1 << 28


@dataclass(frozen=True)
class Timed:
    """The milliseconds that one action took in each round, on so many threads."""

    name: str
    threads: int
    milliseconds: list[float]


class Gradients:
    """A large gradient, its residual, and what is timed on them; ``density`` is the share of entries that is sent."""

    def __init__(self, entries: int, density: float, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.gradient = torch.randn(entries, generator=generator, device=device)
        self._start = torch.randn(entries, generator=generator, device=device)
        self.residual = self._start.clone()
        self._other_data = torch.zeros(OTHER_DATA_BYTES, dtype=torch.uint8, device=device)
        self.magnitudes = (self.gradient + self._start).abs_()
        self.target = max(1, int(entries * density))
        self.threshold = kth_magnitude(self.magnitudes, self.target)
        self._sent = select(self.gradient, self.residual.clone(), [(0, entries)], [self.threshold])

    def reset(self) -> None:
        """Restore the residual, or ever more of it would reach the threshold; then fill the caches with other data."""
        self.residual.copy_(self._start)
        self._other_data.add_(1)

    def actions(self) -> dict[str, Callable[[], object]]:
        """The timed actions, by name."""
        entries, target = self.gradient.numel(), self.target
        found: dict[str, Callable[[], object]] = {
            FLOOR: lambda: torch.add(self.gradient, self.residual, out=self.residual)
        }
        on_gpu = self.gradient.is_cuda
        for name in available_kernels(self.gradient.device.type):
            select_with = self._select_into_buffer if on_gpu else self._select
            pick = partial(select_with, name)
            found[f"{SELECT}{name}"] = pick
            found[f"{SELECT}{name}, and take out"] = partial(self._take_out, pick)
        found["torch.topk"] = lambda: torch.topk(self.magnitudes, target, sorted=False)
        found["torch.kthvalue"] = lambda: torch.kthvalue(self.magnitudes, entries - target + 1)
        sent = self._sent.positions[:target], self._sent.values[:target], self.gradient.new_empty(0, dtype=torch.uint8)
        for value_format in ("bf16", "int8", "1bit"):
            layout = PayloadLayout((entries,), (target,), value_format)
            payload, _ = pack(layout, *sent)
            found[f"pack, {value_format}"] = partial(pack, layout, *sent)
            found[f"unpack, {value_format}"] = partial(unpack, layout, payload)
        for name in ["torch"] if on_gpu else available_kernels("cpu"):
            found[f"sum of two senders: {name}"] = partial(self._sum, [sent[:2]] * 2, name)
        return found

    def _select(self, kernel: str) -> torch.Tensor:
        segments = [(0, self.gradient.numel())]
        return select(self.gradient, self.residual, segments, [self.threshold], kernel=kernel).positions

    def _select_into_buffer(self, kernel: str) -> torch.Tensor:
        entries = self.gradient.numel()
        numbers = torch.tensor([1.0, self.threshold], device=self.gradient.device)
        segments = Segments([(0, entries)], [buffer_capacity(entries, self.target)], self.gradient.device)
        return buffer_kernel(kernel, "cuda")(self.gradient, self.residual, segments, numbers).positions

    def _take_out(self, pick: Callable[[], torch.Tensor]) -> None:
        self.residual.scatter_(0, pick(), 0.0)

    def _sum(self, sent: list[tuple[torch.Tensor, torch.Tensor]], kernel: str) -> None:
        sum_entries(self.residual, [(0, self.gradient.numel())], sent, 0.5, kernel)


def time_in_turn(
    actions: dict[str, Callable[[], object]],
    rounds: int,
    threads: int,
    reset: Callable[[], object],
    device: torch.device,
) -> list[Timed]:
    """Time each action in each round, after some rounds of warm-up; ``reset`` comes before each action, untimed."""
    torch.set_num_threads(threads)
    milliseconds: dict[str, list[float]] = {name: [] for name in actions}
    for round in range(WARM_UP_ROUNDS + rounds):
        for name, action in actions.items():
            reset()
            wait_for(device)
            started = perf_counter()
            action()
            wait_for(device)
            if round >= WARM_UP_ROUNDS:
                milliseconds[name].append(1e3 * (perf_counter() - started))
    return [Timed(name, threads, times) for name, times in milliseconds.items()]


def tabulate_kernels(timed: Sequence[Timed]) -> list[list[str]]:
    """A row of heads, then a row for each action."""
    counts = list(dict.fromkeys(one.threads for one in timed))
    times = {(one.name, one.threads): one.milliseconds for one in timed}
    heads = [""]
    for count in counts:
        heads += [f"ms, {count} thread{'s' * (count > 1)}: median", "least", "times floor"]
    rows = [heads]
    for name in dict.fromkeys(one.name for one in timed):
        row = [name]
        for count in counts:
            mine, floor = statistics.median(times[name, count]), statistics.median(times[FLOOR, count])
            row += [f"{mine:.2f}", f"{min(times[name, count]):.2f}", f"{mine / floor:.2f}x"]
        rows.append(row)
    return rows


def compare_kernels(timed: Sequence[Timed]) -> list[str]:
    """Compare our selection with ``torch.topk``, which others use."""
    medians = {(one.name, one.threads): statistics.median(one.milliseconds) for one in timed}
    notes = []
    for count in dict.fromkeys(one.threads for one in timed):
        mine = {name: median for (name, threads), median in medians.items() if threads == count}
        fastest = min((name for name in mine if name.startswith(SELECT)), key=mine.__getitem__)
        notes.append(
            f"{count} thread{'s' * (count > 1)}: torch.topk takes {mine['torch.topk'] / mine[fastest]:.0f} times as"
            f" long as {fastest}."
        )
    return notes


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line, less the script's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--entries", type=at_least(1), default=10_000_000, help="of the gradient, fp32")
    parser.add_argument("--density", type=float, default=0.01, help="share of the gradient that is sent")
    parser.add_argument("--rounds", type=at_least(1), default=20, help="how often everything is measured")
    parser.add_argument(
        "--threads", type=at_least(1), nargs="+", default=[1, 2], help="one table column for each number"
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, or cuda")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark"), help="folder for the table")
    options = parser.parse_args(words)
    if not 0 < options.density < 1:
        parser.error(f"--density {options.density}: must lie between 0 and 1")
    return options


def main(words: Sequence[str]) -> None:
    """Measure, print the table and write it."""
    options, machine = parse_options(words), describe_machine()
    gradients = Gradients(options.entries, options.density, options.device)
    timed = []
    for threads in options.threads:
        timed += time_in_turn(gradients.actions(), options.rounds, threads, gradients.reset, options.device)
    where = machine["gpu"] if options.device.type == "cuda" else machine["processor"]
    note = (
        f"{options.entries:,} entries, fp32, {100 * options.density:g}% sent, on {where}, torch {machine['torch']};"
        f" {options.rounds} rounds."
    )
    file, title, notes = options.output / "kernels.md", "Kernels beside the floor of memory", compare_kernels(timed)
    found = [asdict(one) for one in timed]
    publish(file, title, tabulate_kernels(timed), [note, *notes], machine, timed=found)


if __name__ == "__main__":
    main(sys.argv[1:])
