"""Fabric: your own loop, with ``strategy="dct"`` or the class where settings are wanted.

python fabric.py
"""

import torch
from lightning.fabric import Fabric
from task import Classifier, Points

from lightning_dct.fabric import DCTStrategy  # importing it registers Fabric(strategy="dct")


def main(epochs: int = 2) -> None:
    """Train on two processes and say what they have sent."""
    # No callbacks here: it refreshes its thresholds itself.
    strategy = DCTStrategy(refresh_every=50)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    model = Classifier()
    model, optimizer = fabric.setup(model, model.configure_optimizers())
    batches = fabric.setup_dataloaders(Points().train_dataloader())
    for epoch in range(epochs):
        for points, labels in batches:
            loss = torch.nn.functional.cross_entropy(model(points), labels)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        ratio = strategy.traffic.totals.compression_ratio
        fabric.print(
            f"epoch {epoch}: loss {loss.item():.3f}, {ratio:.0f}x fewer bytes than dense fp32"
        )
    # Residuals and thresholds lie beside the file, one for each rank.
    fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer})


if __name__ == "__main__":
    main()
