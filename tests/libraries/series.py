"""darts, which imports `pytorch_lightning`: a linear network continues a noisy wave."""

import lightning_dct.as_pytorch_lightning  # noqa: F401, I001  before what imports `pytorch_lightning`

import lightning as L
import numpy as np
from darts import TimeSeries
from darts.models import NLinearModel

from libraries.training import Outcome, run

EPOCHS = 40


def train(trainer: L.Trainer, alone: L.Trainer, checkpoint: str) -> Outcome:
    """Fit and save; load and predict."""
    noise = np.random.default_rng(0).normal(size=400)
    values = (np.sin(np.arange(400) / 6) + 0.2 * noise).astype(np.float32)
    wave = TimeSeries.from_values(values)
    model = NLinearModel(24, 6, n_epochs=EPOCHS, batch_size=16, random_state=0)
    model.fit(wave, val_series=wave, trainer=trainer)
    loss = float(trainer.callback_metrics["val_loss"])
    model.save(checkpoint)
    trainer.strategy.barrier()
    if not trainer.is_global_zero:
        return None
    loaded = NLinearModel.load(checkpoint)
    predicted = loaded.predict(6, trainer=alone)
    return loss, predicted.values().flatten().tolist()


if __name__ == "__main__":
    run(train, epochs=EPOCHS)
