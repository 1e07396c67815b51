"""Handwritten-looking digits, drawn here: strokes under random distortion, with noise and a stray
stroke.

The images are the same in every run; the run's seed decides their order only.
"""

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 10
_CORNERS = {"a": (-1, 2), "b": (1, 2), "c": (-1, 0), "d": (1, 0), "e": (-1, -2), "f": (1, -2)}
# Each digit as strokes from corner to corner.
_STROKES = ("ab bd df fe ec ca", "cb bd df", "ab bd de ef", "ab bc cd df fe", "ac cd bd df", "ba ac cd df fe",
            "ba ac ce ef fd dc", "ab be", "ab bd df fe ec ca cd", "dc ca ab bd df")  # fmt: skip
_MOST_STROKES = max(len(strokes.split()) for strokes in _STROKES)
_CHUNK = 2048


def draw_digits(count: int, side: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw ``count`` images of digits with noise of this standard deviation on every pixel, where
    ink is 1.

    Returns:
        float32 ``[count, 1, side, side]``, and int64 labels ``[count]``.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    parts = [_draw(part, side, noise, generator) for part in labels.split(_CHUNK)]
    return torch.cat(parts).unsqueeze(1), labels


def _draw(labels: Tensor, side: int, noise: float, generator: torch.Generator) -> Tensor:
    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    count = len(labels)
    # Every corner of every image wanders, then the whole is turned, sheared, stretched and shifted.
    corners = torch.tensor(list(_CORNERS.values()), dtype=torch.float32) + 0.2 * normal(
        count, len(_CORNERS), 2
    )
    distortion = 0.16 * side * (torch.eye(2) + 0.18 * normal(count, 2, 2))
    corners = corners @ distortion + 0.06 * side * normal(count, 1, 2)
    ends = torch.gather(
        corners, 1, _ends()[labels].flatten(1).unsqueeze(-1).expand(-1, -1, 2)
    ).unflatten(1, (-1, 2))
    stray = 0.3 * side * normal(count, 1, 2, 2)
    distance = _distance(torch.cat([ends, stray], dim=1), side)
    width = 0.07 * side * (0.25 * normal(count, 1, 1)).exp()
    ink = torch.exp(-((distance / width) ** 2))
    return ink + noise * normal(count, side, side)


def _ends() -> Tensor:
    """Corners at both ends of every stroke, int64 ``[digits, strokes, 2]``; a digit with fewer
    repeats its first.
    """
    order = "".join(_CORNERS)
    digits = []
    for strokes in _STROKES:
        ends = [[order.index(corner) for corner in stroke] for stroke in strokes.split()]
        digits.append(ends + ends[:1] * (_MOST_STROKES - len(ends)))
    return torch.tensor(digits)


def _distance(strokes: Tensor, side: int) -> Tensor:
    """Distance of every pixel from the nearest of ``[images, strokes, 2, 2]``: ``[images, side,
    side]``.
    """
    axis = torch.arange(side) - (side - 1) / 2
    pixels = torch.cartesian_prod(-axis, axis).flip(1)
    nearest = torch.full((len(strokes), side * side), torch.inf)
    for start, end in strokes.permute(1, 2, 0, 3):
        along = end - start
        offset = pixels - start.unsqueeze(1)
        place = (offset @ along.unsqueeze(-1)).squeeze(-1) / along.square().sum(
            -1, keepdim=True
        ).clamp(min=1e-6)
        away = offset - place.clamp(0, 1).unsqueeze(-1) * along.unsqueeze(1)
        nearest = torch.minimum(nearest, away.norm(dim=-1))
    return nearest.unflatten(1, (side, side))


class DrawnData(LightningDataModule):
    """Examples that ``setup`` draws, the same in every run; the run's seed decides their order
    only.
    """

    val_batch_size = 256

    def keep(self, train: int, *tensors: Tensor) -> None:
        """Train on the first examples, and validate on the others."""
        self.train = TensorDataset(*(tensor[:train] for tensor in tensors))
        self.val = TensorDataset(*(tensor[train:] for tensor in tensors))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.val_batch_size)


class Digits(DrawnData):
    """Digits to train on and, others, to validate on; a batch is images ``[batch, 1, side, side]``
    and labels.
    """

    def __init__(
        self,
        batch_size: int,
        train_images: int = 16384,
        val_images: int = 8192,
        side: int = 16,
        noise: float = 0.25,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage: str | None = None) -> None:
        settings = self.hparams
        count = settings.train_images + settings.val_images
        self.keep(settings.train_images, *draw_digits(count, settings.side, settings.noise, seed=0))
