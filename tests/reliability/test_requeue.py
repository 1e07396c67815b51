"""A job that SLURM requeues goes on where it was, whatever the ranks were doing when the signal came."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment

from distributed.training import Module, Run, Watch, assert_weights_equal, loader, rank, summary, trainer_for
from lightning_dct import DCTStrategy
from reliability.killed_training import BATCHES, Resumable

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
    """One rank gets SLURM's signal in the middle of a step."""

    signalled_rank, at = 1, -1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.at and rank() == self.signalled_rank:
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


def train(folder: Path, signalled_rank: int, at: int, accumulate: int, ckpt_path: str | None) -> Run:
    strategy, watch = DCTStrategy(density=0.05, refresh_every=4), Watch()
    module = Signalled(None, torch.optim.Adam, lr=0.01)
    module.signalled_rank, module.at = signalled_rank, at
    trainer = trainer_for(
        strategy,
        callbacks=[watch],
        plugins=[Slurm()],
        default_root_dir=folder,
        accumulate_grad_batches=accumulate,
    )
    found = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": JOB}
    with patch.dict(os.environ, found):
        trainer.fit(module, Resumable(loader(BATCHES, 40, 8).dataset.__getitem__), ckpt_path=ckpt_path)
    return summary(strategy, module, watch)


@pytest.mark.parametrize(("signalled_rank", "at", "accumulate", "saved_after"), [(1, 3, 1, 4), (0, 4, 2, 6)])
def test_requeued_job_goes_on(
    ranks: Any, tmp_path: Path, signalled_rank: int, at: int, accumulate: int, saved_after: int
) -> None:
    """Oracle: the run as it went on after the signal, to the last bit; one checkpoint, and one request to SLURM."""
    requests = tmp_path / "requests"
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {requests}\n')
    (tmp_path / "scontrol").chmod(0o755)
    first = ranks(2).run(train, tmp_path, signalled_rank, at, accumulate, None)
    assert requests.read_text() == f"requeue {JOB}\n"
    made = {"hpc_ckpt_1.ckpt", "hpc-ckpt-1.ckpt.dct"}
    assert {entry.name for entry in tmp_path.iterdir()} == {"scontrol", "requests", *made}
    assert len(list((tmp_path / "hpc-ckpt-1.ckpt.dct").iterdir())) == 2
    # A later save that was killed half way leaves nothing that Lightning would rather resume from.
    (tmp_path / "hpc-ckpt-2.ckpt.dct").mkdir()
    (tmp_path / ".hpc-ckpt-2.ckpt.part").touch()
    again = ranks(2).run(train, tmp_path, signalled_rank, -1, accumulate, "hpc")
    for run, resumed in zip(first, again, strict=True):
        assert resumed.hashes == run.hashes[saved_after:]
        assert_weights_equal(run.residuals, resumed.residuals)
