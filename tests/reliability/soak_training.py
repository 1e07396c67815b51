"""A training for torchrun that can be killed, restarted and continued with another number of ranks;
see soak.py.

    torchrun ... tests/reliability/soak_training.py FOLDER STEPS [KILL_AT_STEP]

Every step uses the same 12 samples however many ranks share them. One tensor has a gradient that
does not depend on it, so that what it must come to is known: its start, less the sum of all
gradients, plus what is still held back. The other learns a regression, for a loss to compare. At
the end rank 0 writes both to FOLDER/result.json.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dct import DCTStrategy

SAMPLES = 12
SIZE = 600
FEATURES = 64


def gradient_of(step: int, sample: int) -> Tensor:
    """What one sample of a step adds to the gradient of the tensor that is known beforehand: fp64
    ``[SIZE]``.
    """
    generator = torch.Generator().manual_seed(step * SAMPLES + sample)
    return torch.randn(SIZE, generator=generator, dtype=torch.float64)


class Model(pl.LightningModule):
    """The two tensors, in fp64 so that sums can be compared."""

    def __init__(self, kill_at: int | None) -> None:
        super().__init__()
        self.known = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
        self.learnt = nn.Parameter(torch.zeros(FEATURES, dtype=torch.float64))
        self.kill_at = kill_at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        step = self.global_step
        rank = self.global_rank
        world_size = self.trainer.world_size
        if (
            step == self.kill_at
            and rank == world_size - 1
            and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        ):
            os.kill(os.getpid(), signal.SIGKILL)
        share = SAMPLES // world_size
        samples = range(rank * share, (rank + 1) * share)
        direction = torch.stack([gradient_of(step, sample) for sample in samples]).mean(0)
        features = direction[:FEATURES] / direction[:FEATURES].norm()
        loss = 0.1 * (features @ (self.learnt - 1.0)).square()
        return direction @ self.known + loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)

    def train_dataloader(self) -> DataLoader[Any]:
        # Steps make their own samples: nothing depends on where a loader had got to.
        return DataLoader(torch.zeros(1_000_000, 1), batch_size=1)

    def on_fit_end(self) -> None:
        """Sum what all ranks still hold back; a rank's residual enters the model as a share of the
        mean.
        """
        synchronizer = self.trainer.strategy.synchronizer
        assert synchronizer is not None
        state = synchronizer.state_dict()
        held = state["residuals"].get("known", torch.zeros(SIZE, dtype=torch.float64)).clone()
        for start, piece in state["owned"].get("known", {}).items():
            held[start : start + piece.numel()] += piece
        dist.all_reduce(held)
        self.held_back = held / self.trainer.world_size


def main() -> None:
    """Train from wherever the last checkpoint is."""
    folder = Path(sys.argv[1])
    steps = int(sys.argv[2])
    model = Model(int(sys.argv[3]) if len(sys.argv) > 3 else None)
    checkpoints = ModelCheckpoint(folder / "checkpoints", every_n_train_steps=1, save_last=True)
    trainer = pl.Trainer(
        strategy=DCTStrategy(
            compress="gradients", density=0.05, value_format="fp32", min_tensor_size=1
        ),
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=steps,
        callbacks=[checkpoints],
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, ckpt_path="last")
    if trainer.is_global_zero:
        total = sum(gradient_of(step, sample) for step in range(steps) for sample in range(SAMPLES))
        lost = (model.known.detach() + total / SAMPLES - model.held_back).abs().max()
        loss = (model.learnt.detach() - 1.0).norm()
        result = {"steps": trainer.global_step, "world_size": trainer.world_size}
        (folder / "result.json").write_text(
            json.dumps({**result, "lost": float(lost), "distance": float(loss)})
        )


if __name__ == "__main__":
    main()
