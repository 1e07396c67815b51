"""What ``start.py`` starts as each rank, and again if it has died.

The other ranks go on meanwhile.
"""

import os
import sys
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dct import DCTElasticStrategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from task import Classifier, Points

if __name__ == "__main__":
    trainer = L.Trainer(
        # Between exchanges a slow machine may train fewer steps than the others.
        strategy=DCTElasticStrategy(local_steps=8, density=0.3),
        accelerator="cpu",
        devices=4,
        max_epochs=int(os.environ.get("EPOCHS", "20")),
        # The lowest rank that is present writes it. It serves if all ranks are lost.
        callbacks=[ModelCheckpoint("checkpoints", every_n_train_steps=100, save_last=True)],
    )
    trainer.fit(Classifier(), Points(), ckpt_path="last")
