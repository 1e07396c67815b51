"""Profiles an exchange of updates without a network: ``python experiments/benchmark/kernels.py``.

One process plays a rank that exchanges with another: it compresses its own updates, reads both
payloads and adds the mean to both sets of weights. Beside the whole are its parts, in ns of CPU
time an entry of the model, all threads together, and the *roofline*: the bytes that an exchange
must touch (it reads both sets of weights twice and writes them once, 24 bytes an entry in fp32)
over the rate at which this machine copies. All take turns in each round.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import process_time

# Experiments/, where `benchmark` is.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmark.session import at_least
from benchmark.tables import describe_machine, publish
from lightning_dct.compress.bucket_plan import Bucket, ExchangeContext, Received, plan_bucket
from lightning_dct.compress.codec import apply, compress
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.kernels import available_kernels, cpu_kernel
from lightning_dct.kernels.plain import Sent
from lightning_dct.sync.optimizer_clock import LARGEST_BUCKET
from lightning_dct.wire.payload import unpack_payload
from lightning_dct.wire.positions import count_flags
from lightning_dct.wire.values import encode_values

ROOFLINE = "roofline: 24 bytes an entry"
EXCHANGE = "exchange: {}"
TOPK = "torch.topk of the magnitudes"
BYTES_TOUCHED = 24
WARM_UP_ROUNDS = 1


@dataclass(frozen=True)
class Timed:
    """The nanoseconds of CPU time an entry that one action took in each round."""

    name: str
    entries: int
    density: float
    threads: int
    nanoseconds: list[float]


class Rank:
    """A model's own and shared weights in buckets, and what another rank has sent."""

    def __init__(self, entries: int, density: float, value_format: str, of_tensor: int) -> None:
        sizes = [
            min(LARGEST_BUCKET, entries - start) for start in range(0, entries, LARGEST_BUCKET)
        ]
        noise = torch.Generator().manual_seed(0)
        self.entries = entries
        self.density = density
        self.plans = [
            plan_bucket(
                [f"{number} {start}" for start in range(0, size, of_tensor)],
                [min(of_tensor, size - start) for start in range(0, size, of_tensor)],
                [density] * -(-size // of_tensor),
                torch.float32,
                value_format,
                16,
                2,
            )
            for number, size in enumerate(sizes)
        ]
        self.shared = [torch.randn(size, generator=noise) for size in sizes]
        self.own = [
            shared + 0.01 * torch.randn(shared.shape, generator=noise) for shared in self.shared
        ]
        self._start = [
            (own.clone(), shared.clone()) for own, shared in zip(self.own, self.shared, strict=True)
        ]
        self._copy = torch.empty(entries)
        self._source = torch.ones(entries)
        self.feedback = ErrorFeedback({}, adapt_threshold=True, undoable=False, of_updates=True)
        # Twice, so that the guard has adjusted the thresholds.
        self.payloads = [self._compress(number) for _ in range(2) for number in range(len(sizes))][
            -len(sizes) :
        ]

    def reset(self) -> None:
        """Put back the weights, because an exchange changes them."""
        for own, shared, start in zip(self.own, self.shared, self._start, strict=True):
            own.copy_(start[0])
            shared.copy_(start[1])

    def actions(self) -> dict[str, Callable[[], object]]:
        """The timed actions, by name.

        The roofline is that of a copy, which touches 8 bytes an entry.
        """
        fast = available_kernels("cpu")[-1]
        numbers = range(len(self.plans))
        found: dict[str, Callable[[], object]] = {ROOFLINE: lambda: self._copy.copy_(self._source)}
        for kernel in available_kernels("cpu"):
            found[EXCHANGE.format(kernel)] = partial(
                self._each, partial(self._exchange, kernel=kernel)
            )
        found[f"exchange, thresholds selected: {fast}"] = self._exchange_first
        found["compress"] = partial(self._each, self._compress)
        found["  flag and gather"] = partial(self._each, self._select)
        sent = [
            unpack_payload(self.plans[number].layout, self.payloads[number]) for number in numbers
        ]
        codes = [plan.layout.position_code for plan in self.plans]
        counts = [
            count_flags(sent[n].flags, self.plans[n].layout.tensor_sizes, "auto") for n in numbers
        ]
        kernel = cpu_kernel()
        found["  code signs"] = partial(
            self._each, lambda n: encode_values(sent[n].values, counts[n], "1bit")
        )
        found["  code positions"] = partial(
            self._each, lambda n: codes[n].encode_flags(sent[n].flags, "auto")
        )
        found["read one payload"] = partial(
            self._each, lambda n: unpack_payload(self.plans[n].layout, self.payloads[n])
        )
        weights = torch.tensor([1.0, 0.7, 0.5])
        both = [
            Sent(one.flags.expand(2, -1).clone(), one.values.repeat(2), 2 * [one.values.numel()])
            for one in sent
        ]

        def add_sum(number: int) -> None:
            owns, totals = self._tensors(number)
            kernel.add_sums(totals, owns, self.plans[number].first, both[number], weights, mine=0)

        found["add the sum of two"] = partial(self._each, add_sum)
        target = int(self.density * self.entries)
        magnitudes = torch.cat(
            [own - shared for own, shared in zip(self.own, self.shared, strict=True)]
        ).abs_()
        found[TOPK] = lambda: torch.topk(magnitudes, target, sorted=False)
        return found

    def _each(self, action: Callable[[int], object]) -> None:
        for number in range(len(self.plans)):
            action(number)

    def _bucket(self, number: int) -> Bucket:
        return Bucket([self.own[number]], [self.shared[number]], None)

    def _tensors(self, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's own and the shared weights of the tensors that are compressed."""
        plan = self.plans[number]
        return self._bucket(number).parts([plan.bounds[index] for index in plan.compressed])

    def _compress(self, number: int, kernel: str = "auto") -> torch.Tensor:
        self.feedback.kernel = kernel
        return compress(self.feedback, self._bucket(number), self.plans[number], set())[0]

    def _exchange(self, number: int, kernel: str) -> None:
        payloads = torch.stack([self._compress(number, kernel), self.payloads[number]])
        received = Received(
            payloads, self.plans[number], 0.5, own=0, context=ExchangeContext(gain=None)
        )
        apply(self.feedback, received, self._bucket(number))

    def _exchange_first(self) -> None:
        self.feedback.thresholds.forget()
        self._each(partial(self._exchange, kernel="auto"))

    def _select(self, number: int) -> None:
        plan = self.plans[number]
        flags = torch.zeros(sum(plan.flag_bytes), dtype=torch.uint8)
        tensors = plan.of_tensors(plan.compressed)
        labels = zip(tensors.names, tensors.targets, strict=True)
        thresholds = [self.feedback.thresholds.get(name, target) or 0.0 for name, target in labels]
        cpu_kernel().select(*self._tensors(number), plan.first, thresholds, None, flags)


def time_in_turn(
    actions: dict[str, Callable[[], object]], rounds: int, reset: Callable[[], object]
) -> dict[str, list[float]]:
    """CPU seconds of each action in each round, after rounds of warm-up; ``reset`` comes before
    each, untimed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for round in range(WARM_UP_ROUNDS + rounds):
        for name, action in actions.items():
            reset()
            started = process_time()
            action()
            if round >= WARM_UP_ROUNDS:
                seconds[name].append(process_time() - started)
    return seconds


def profile(
    entries: int, density: float, threads: int, rounds: int, value_format: str, of_tensor: int
) -> list[Timed]:
    """Time the parts of an exchange on so many threads."""
    torch.set_num_threads(threads)
    rank = Rank(entries, density, value_format, of_tensor)
    found = []
    for name, seconds in time_in_turn(rank.actions(), rounds, rank.reset).items():
        touched = BYTES_TOUCHED / 8 if name == ROOFLINE else 1
        found.append(
            Timed(
                name,
                entries,
                density,
                threads,
                [1e9 * touched * time / entries for time in seconds],
            )
        )
    return found


def tabulate_profiles(timed: Sequence[Timed]) -> list[list[str]]:
    """A row of heads, then a row for each action with the median for each number of entries,
    density and threads.
    """
    columns = list(dict.fromkeys((one.entries, one.density, one.threads) for one in timed))
    medians = {
        (one.name, (one.entries, one.density, one.threads)): statistics.median(one.nanoseconds)
        for one in timed
    }
    heads = ["ns an entry, and times the roofline"]
    heads += [
        f"{entries / 1e6:g} M, {100 * density:g}%, {threads} thread{'s' * (threads > 1)}"
        for entries, density, threads in columns
    ]
    rows = [heads]
    for name in dict.fromkeys(one.name for one in timed):
        found = [(medians[name, column], medians[ROOFLINE, column]) for column in columns]
        rows.append([name, *(f"{mine:.2f} ({mine / floor:.1f}x)" for mine, floor in found)])
    return rows


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line, less the script's name."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--entries", type=at_least(1), nargs="+", default=[10_000_000], help="of the model, fp32"
    )
    parser.add_argument(
        "--tensor",
        type=at_least(16),
        default=LARGEST_BUCKET,
        help="entries of each tensor (default: a bucket of 1 M)",
    )
    parser.add_argument(
        "--density",
        type=float,
        nargs="+",
        default=[0.3, 0.1, 0.03, 0.01],
        help="share that is sent",
    )
    parser.add_argument("--value-format", default="1bit", help="of the payloads")
    parser.add_argument(
        "--rounds", type=at_least(1), default=10, help="how often everything is measured"
    )
    parser.add_argument("--threads", type=at_least(1), nargs="+", default=[1, 2], help="of a rank")
    parser.add_argument(
        "--output", type=Path, default=Path("outputs/benchmark"), help="folder for the table"
    )
    options = parser.parse_args(words)
    for density in options.density:
        if not 0 < density < 1:
            parser.error(f"--density {density}: must lie between 0 and 1")
    return options


def main(words: Sequence[str]) -> None:
    """Measure, print the table and write it."""
    options = parse_options(words)
    machine = describe_machine()
    timed = [
        one
        for entries in options.entries
        for threads in options.threads
        for density in options.density
        for one in profile(
            entries, density, threads, options.rounds, options.value_format, options.tensor
        )
    ]
    note = (
        f"Medians of {options.rounds} rounds; tensors of {options.tensor:,} entries; values in"
        f" {options.value_format}; two senders; {machine['processor']}, torch {machine['torch']}."
    )
    file = options.output / "kernels.md"
    found = [asdict(one) for one in timed]
    publish(
        file,
        "An exchange of updates beside the roofline",
        tabulate_profiles(timed),
        [note],
        machine,
        timed=found,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
