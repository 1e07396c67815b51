"""LightningCLI: the strategy by its name, by its class path with settings, or from a YAML file.

    python cli.py fit --trainer.strategy=dct --trainer.devices=2 --trainer.max_epochs=2
    python cli.py fit --config=cli.yaml --trainer.strategy.density=0.3

Wants ``pip install 'jsonargparse[signatures]'``.
"""

from lightning.pytorch.cli import LightningCLI
from task import Classifier, Points

import lightning_dct  # noqa: F401  registers strategy="dct"

if __name__ == "__main__":
    LightningCLI(Classifier, Points)
