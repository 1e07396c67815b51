"""What ``train.sbatch`` starts, once for each GPU of the job.

Lightning takes ranks and addresses from SLURM.
"""

import os
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_dct  # noqa: F401  registers strategy="dct"

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from task import Classifier, Points

if __name__ == "__main__":
    trainer = L.Trainer(
        strategy="dct",
        accelerator="cpu",
        num_nodes=int(os.environ["SLURM_NNODES"]),
        devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
        max_epochs=1,
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=20, save_last=True)],
    )
    # Goes on where a requeued job was: from what it saved when SLURM signalled it, or from the last
    # checkpoint.
    trainer.fit(Classifier(), Points(), ckpt_path="last")
