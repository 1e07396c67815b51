"""One rank of the benchmark, which torchrun starts: trains under each synchronisation, and writes
the figures.
"""

import gc
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Experiments/, where `benchmark` is.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from lightning.pytorch import Trainer, seed_everything

from benchmark.job import QUIET, Job, Run, do_job
from benchmark.recommenders import RECOMMENDERS, ClickSteps, click_batches
from benchmark.stages import CROSSINGS, STAGES, split_model
from benchmark.stopwatch import Stopwatch, local_steps_of
from benchmark.synchronisations import SYNCHRONISATIONS
from benchmark.task import NextBytes, next_bytes_data
from benchmark.timeline import Timeline


def train(name: str, job: Job) -> Run:
    """Train from the same start as every other run, and measure."""
    seed_everything(0, verbose=False)
    if name in SYNCHRONISATIONS:
        strategy = SYNCHRONISATIONS[name](job.steps if job.score else 0)
        model = NextBytes(job.width)
        data = {"datamodule": next_bytes_data(job.batch_size)}
    elif name in CROSSINGS:
        strategy, model, text = split_model(name, job)
        data = {"datamodule": text}
    else:
        make_strategy, make_tables, filling_steps = RECOMMENDERS[name]
        job = replace(job, warm_up_steps=job.warm_up_steps + filling_steps)
        strategy = make_strategy()
        model = ClickSteps(make_tables, job)
        batches = click_batches(
            job,
            job.warm_up_steps + job.steps,
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
        )
        data = {"train_dataloaders": batches}
    if not job.score:
        # The first exchange of updates, which selects thresholds, belongs to the warm-up. Whole
        # rounds are measured.
        length = local_steps_of(strategy)
        job = replace(
            job, warm_up_steps=max(job.warm_up_steps, length), steps=max(job.steps, length)
        )
    stopwatch = Stopwatch(job)
    timeline = Timeline()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=job.warm_up_steps + job.steps,
        callbacks=[stopwatch, timeline] if name in CROSSINGS else [stopwatch],
        limit_val_batches=None if job.score else 0,
        # Held-out text is scored at the end only.
        check_val_every_n_epoch=None,
        val_check_interval=job.warm_up_steps + job.steps + 1,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(model, **data)
    scores = trainer.validate(model, **data, verbose=False) if job.score else [{}]
    run = stopwatch.run(name, scores[0].get("loss"))
    if name not in CROSSINGS:
        return run
    mine = {
        f"stage {stage}": run.sent_bytes * run.steps * (stage == trainer.global_rank)
        for stage in range(STAGES)
    }
    return replace(run, parts=mine, spans=timeline.steps[-run.steps :])


def train_all(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Train under each synchronisation of a :class:`benchmark.job.Job`, and return the runs."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    runs = []
    for name in job["synchronisations"]:
        runs.append(asdict(train(name, Job(**job))))
        # DistributedDataParallel is in a reference cycle, and gloo may abort a process that ends
        # with one alive.
        gc.collect()
    return runs


if __name__ == "__main__":
    do_job(sys.argv[-1], train_all)
