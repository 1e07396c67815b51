"""pytorch-forecasting: a recurrent network continues sums of two waves."""

import lightning as L
import numpy as np
import pandas as pd
from pytorch_forecasting import RecurrentNetwork, TimeSeriesDataSet

from libraries.training import Outcome, run

SERIES = 16
LENGTH = 60


def train(trainer: L.Trainer, alone: L.Trainer, checkpoint: str) -> Outcome:
    """Fit and save; load and predict."""
    time = np.tile(np.arange(LENGTH), SERIES)
    number = np.repeat(np.arange(SERIES), LENGTH)
    values = np.sin(time / 3 + number) + 0.5 * np.cos(time / 5) + 3
    frame = pd.DataFrame({"time": time, "series": number.astype(str), "value": values})
    lengths = {"max_encoder_length": 20, "max_prediction_length": 5}
    names = {"time_idx": "time", "target": "value", "group_ids": ["series"]}
    windows = TimeSeriesDataSet(
        frame, **names, **lengths, time_varying_unknown_reals=["value"], static_categoricals=[]
    )
    batches = windows.to_dataloader(train=True, batch_size=32, num_workers=0)
    checked = windows.to_dataloader(train=False, batch_size=64, num_workers=0)
    model = RecurrentNetwork.from_dataset(windows, learning_rate=0.01, hidden_size=16)
    trainer.fit(model, batches, checked)
    loss = float(trainer.callback_metrics["val_loss"])
    trainer.save_checkpoint(checkpoint)
    if not trainer.is_global_zero:
        return None
    loaded = RecurrentNetwork.load_from_checkpoint(checkpoint)
    kinds = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    predicted = loaded.predict(checked, trainer_kwargs=kinds)
    return loss, predicted.flatten()[:20].tolist()


if __name__ == "__main__":
    run(train, epochs=60)
