"""Long runs of many replicas on one card, of as many steps as fit: ``compile RANKS NUMBER``,
``time``, ``train S``.

``compile`` compiles the kernels of one training, by the number of its settings, so that several at
once fill the cache. ``time`` writes how many milliseconds a step of all trainings takes, and
``train`` makes so many steps. Its files are of ``experiments/replicas.py``, whose command
(docs/evidence/quality.md) makes the table from them, without training.
"""

import json
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "experiments"))
import replicas
from lightning_dct.compress.bucket_plan import ExchangeContext
from lightning_dct.sync.coherence import TensorCoherence, shape_of
from lightning_dct.sync.updates import UpdateSynchronizer
from replicated.engines import Engines
from replicated.side_by_side import SideBySide, train_side_by_side
from replicated.training import Job

SHARED = ("experiment=lm", "data.context_length=64", "data.batch_size=4")
# By ranks: a setting of earlier runs, and what the law takes after 60,000 steps.
STEPS_AND_DENSITIES = {
    4: ((4, 0.1), (1, 0.015)),
    8: ((4, 0.1), (1, 0.015)),
    16: ((4, 0.1), (1, 0.03)),
}
SETTINGS = {
    ranks: [f"strategy.local_steps={steps} strategy.density={density}" for steps, density in pairs]
    for ranks, pairs in STEPS_AND_DENSITIES.items()
}
DENSE_RATES = (0.002, 0.004)
RATE = 0.002
MOST_STEPS = 60_000
SEEDS = {4: 2, 8: 2, 16: 1}
MEASURED = Path("/tmp/milliseconds")


def job(
    ranks: int, strategy: str, seed: int, rate: float, steps: int, more: Sequence[str] = ()
) -> Job:
    words = (*SHARED, *strategy.split(), f"seed={seed}", f"model.learning_rate={rate}")
    return Job((*words, *more), ranks, steps, device="cuda")


def jobs(steps: int, more: Sequence[str] = ()) -> Iterator[Job]:
    for ranks, seeds in SEEDS.items():
        for seed in range(seeds):
            yield from (job(ranks, "strategy=ddp", seed, rate, steps) for rate in DENSE_RATES)
            yield from (
                job(ranks, f"strategy=dct {one}", seed, RATE, steps, more)
                for one in SETTINGS[ranks]
            )


def compile_kernels(ranks: int, settings: str) -> None:
    (one,) = SideBySide(
        [job(ranks, f"strategy=dct {settings}", 0, RATE, MOST_STEPS, ["data=documentation"])]
    ).trainings
    engines = one.engines
    assert engines is not None
    engines.begin_step()  # its parameters take part from now on
    config = engines.config
    gains = {}
    if config.exchanges_every_step:
        gains = {
            name: TensorCoherence(shape_of(own[0])).gain(ranks) for name, own in one.weights.items()
        }
    dropped = 1 - config.kept_of_residuals(True)
    gain = 1.0 if gains else None
    for now in (gains, gains, {}):  # without any at the end
        exchange(engines, 1, ExchangeContext(1, dropped=dropped, gains=now, gain=gain))
    selected = one.weights.keys()
    exchange(engines, config.local_steps, ExchangeContext(1, gains=gains, gain=gain), selected)


def exchange(
    engines: Engines, length: int, context: ExchangeContext, selected_anew: Collection[str] = ()
) -> None:
    """Exchange all parameters without a graph, and check the payloads."""

    def of_rank(rank: int) -> None:
        one = engines.synchronizers[rank]
        clock = one.register(engines.optimizers[rank])
        UpdateSynchronizer.exchange_buckets(
            one, clock, clock.buckets, length, context, selected_anew
        )
        one.flush()

    engines.ranks.run(of_rank)


def measure() -> None:
    together = SideBySide(list(jobs(MOST_STEPS, ["strategy.warmup_steps=20"])))
    started = 0.0
    for step in range(1, 321):  # in the first ones graphs are recorded
        together.step()
        if step in (192, 320):
            torch.cuda.synchronize()
            started, spent = time.perf_counter(), time.perf_counter() - started
    milliseconds = 1e3 * spent / 128
    MEASURED.write_text(str(milliseconds))
    memory = torch.cuda.max_memory_allocated() / 1e9
    print(
        f"{milliseconds:.2f} ms a step of {len(together.trainings)} trainings, {memory:.1f} GB",
        flush=True,
    )


def train(seconds: float) -> None:
    steps = min(MOST_STEPS, int(1e3 * seconds / float(MEASURED.read_text())) // 2500 * 2500)
    all_jobs = list(jobs(steps))
    folder = Path(os.environ.get("OUT", "outputs")) / "long"
    runs = replicas.Runs(folder, 1, 1)
    started = time.perf_counter()
    print(f"{steps:,} steps of {len(all_jobs)} trainings", flush=True)
    told: set[int] = set()

    def report(step: int, losses: Sequence[float]) -> None:
        if losses and step not in told:
            told.add(step)
            print(
                step,
                f"{time.perf_counter() - started:.0f} s",
                *(f"{loss:.4f}" for loss in losses),
                flush=True,
            )

    for one, figures in zip(all_jobs, train_side_by_side(all_jobs, report), strict=True):
        (folder / runs.file_of(one).name).write_text(json.dumps({"job": asdict(one), **figures}))


if __name__ == "__main__":
    torch.set_float32_matmul_precision("high")
    mode, *rest = sys.argv[1:]
    if mode == "compile":
        compile_kernels(int(rest[0]), SETTINGS[int(rest[0])][int(rest[1])])
    elif mode == "time":
        measure()
    else:
        train(float(rest[0]))
