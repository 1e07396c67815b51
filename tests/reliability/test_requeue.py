"""A job that SLURM requeues goes on where it was, whatever the ranks were doing when the signal
came.
"""

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from distributed.training import (
    Module,
    Run,
    Watch,
    assert_weights_equal,
    loader,
    rank,
    summary,
    trainer_for,
)
from lightning_dct import DCTStrategy
from reliability.killed_training import BATCHES, Resumable, signal_itself

JOB = "77"


class Slurm(SLURMEnvironment):
    """The environment of a SLURM job on the ranks of the tests."""

    _validate_srun_used = staticmethod(lambda: None)
    _validate_srun_variables = staticmethod(lambda: None)

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return rank()

    def local_rank(self) -> int:
        return rank()

    def node_rank(self) -> int:
        return 0


class Signalled(Module):
    """Some ranks get signals in the middle of a step: by rank and batch.

    The first of a kind is one to act on.
    """

    signals: dict[tuple[int, int], int]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if (number := self.signals.get((rank(), batch_idx))) is not None:
            if batch_idx == min(
                batch for (_, batch), other in self.signals.items() if other == number
            ):
                signal_itself(number, self.trainer.strategy.lifeline)
            else:
                os.kill(os.getpid(), number)
        return super().training_step(batch, batch_idx)


def train(
    folder: Path, signals: dict[tuple[int, int], int], accumulate: int, ckpt_path: str | None
) -> Run:
    strategy = DCTStrategy(density=0.05, refresh_every=4)
    watch = Watch()
    module = Signalled(None, torch.optim.Adam, lr=0.01)
    module.signals = signals
    trainer = trainer_for(
        strategy,
        callbacks=[watch],
        plugins=[Slurm()],
        default_root_dir=folder,
        accumulate_grad_batches=accumulate,
    )
    found = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": JOB}
    with patch.dict(os.environ, found):
        trainer.fit(
            module, Resumable(loader(BATCHES, 40, 8).dataset.__getitem__), ckpt_path=ckpt_path
        )
    return summary(strategy, module, watch)


def slurm(folder: Path) -> Path:
    """Where SLURM's command writes what it is asked for."""
    requests = folder / "requests"
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {requests}\n')
    (folder / "scontrol").chmod(0o755)
    return requests


@pytest.mark.parametrize(("signalled_rank", "at", "accumulate"), [(1, 3, 1), (0, 4, 2)])
def test_requeued_job_goes_on(
    ranks: Any, tmp_path: Path, signalled_rank: int, at: int, accumulate: int
) -> None:
    """Oracle: the run as it went on after the signal, to the last bit; one checkpoint, and one
    request to SLURM.
    """
    requests = slurm(tmp_path)
    first = ranks(2).run(train, tmp_path, {(signalled_rank, at): signal.SIGUSR1}, accumulate, None)
    assert requests.read_text() == f"requeue {JOB}\n"
    made = {"hpc_ckpt_1.ckpt", "hpc-ckpt-1.ckpt.dct"}
    assert {entry.name for entry in tmp_path.iterdir()} == {"scontrol", "requests", *made}
    assert len(list((tmp_path / "hpc-ckpt-1.ckpt.dct").iterdir())) == 2
    # In the same step, unless another rank has gone on before it heard of the signal.
    saved_after = (
        accumulate * torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)["global_step"]
    )
    assert at < saved_after < BATCHES
    # A later save that was killed half way leaves nothing that Lightning would rather resume from.
    (tmp_path / "hpc-ckpt-2.ckpt.dct").mkdir()
    (tmp_path / ".hpc-ckpt-2.ckpt.part").touch()
    again = ranks(2).run(train, tmp_path, {}, accumulate, "hpc")
    for run, resumed in zip(first, again, strict=True):
        assert resumed.hashes == run.hashes[saved_after:]
        assert_weights_equal(run.residuals, resumed.residuals)


def train_until_killed(folder: Path) -> tuple[Any, int]:
    """SLURM's signal on one rank after the other, and when the job has been requeued, SIGTERM."""
    signals = {(1, 3): signal.SIGUSR1, (0, 6): signal.SIGUSR1, (0, 10): signal.SIGTERM}
    with patch.object(DCTStrategy, "reduce_boolean_decision") as votes:
        try:
            train(folder, signals, 1, None)
        except SystemExit as end:
            return end.code, votes.call_count
    return "no end", votes.call_count


def test_a_requeued_job_ends_well(ranks: Any, tmp_path: Path) -> None:
    """Oracle: exit status 0, one request and one checkpoint for two signals; no vote that all ranks
    wait for.
    """
    requests = slurm(tmp_path)
    assert ranks(2).run(train_until_killed, tmp_path) == [(0, 0)] * 2
    assert requests.read_text() == f"requeue {JOB}\n"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
