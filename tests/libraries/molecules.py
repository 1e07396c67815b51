"""chemprop: a message-passing network learns how many atoms of a kind a molecule has."""

import random

import lightning as L
from chemprop import data, featurizers, models, nn

from libraries.training import Outcome, run

ATOMS = ("C", "N", "O")


def train(trainer: L.Trainer, alone: L.Trainer, checkpoint: str) -> Outcome:
    """Fit and save; load and predict."""
    draw = random.Random(0)
    texts = ["".join(draw.choice(ATOMS) for _ in range(draw.randint(3, 8))) for _ in range(256)]
    points = [data.MoleculeDatapoint.from_smi(text, [float(text.count("N"))]) for text in texts]
    molecules = data.MoleculeDataset(points, featurizers.SimpleMoleculeMolGraphFeaturizer())
    batches = data.build_dataloader(molecules, batch_size=16, num_workers=0, shuffle=False)
    parts = nn.BondMessagePassing(d_h=32), nn.MeanAggregation(), nn.RegressionFFN(input_dim=32)
    model = models.MPNN(*parts, warmup_epochs=1)
    trainer.fit(model, batches, batches)
    loss = float(trainer.callback_metrics["val_loss"])
    trainer.save_checkpoint(checkpoint)
    if not trainer.is_global_zero:
        return None
    loaded = models.MPNN.load_from_checkpoint(checkpoint)
    predicted = alone.predict(loaded, batches)
    return loss, predicted[0].flatten().tolist()


if __name__ == "__main__":
    run(train, epochs=40)
