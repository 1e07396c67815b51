"""What later versions must write and read to the last bit: payloads, rows, and a checkpoint of two
ranks.

``python -m golden.golden`` in ``tests/`` writes the files of this folder anew, which only a change
of a format needs.
"""

import io
import json
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distributed.harness import Ranks
from distributed.resuming import AtStart, SaveAndStop
from distributed.training import rank, trainer_for
from lightning_dct import DCTStrategy, ShardedEmbeddingBags
from lightning_dct.wire.payload import PayloadLayout
from lightning_dct.wire.rows import encode_rows
from strategies_for_hypothesis import pack_entries

FOLDER = Path(__file__).parent
BYTES = FOLDER / "bytes.json"
ARCHIVE = FOLDER / "checkpoint.tar.xz"
CHECKPOINT = "half.ckpt"
SEEN = "seen.pt"

# Payloads of four tensors. The second is sent dense, and the last sends nothing.
SIZES = (100, 7, 60, 33)
DENSE = torch.arange(28, dtype=torch.uint8)
CODES = {"Elias-Fano": (5, 0, 3, 2), "bitmap": (40, 0, 20, 10)}
FORMATS = ("fp32", "bf16", "2bit", "1bit")
ROW_FORMATS = ("fp32", "bf16", "int8", "int4")


def numbers(count: int) -> Tensor:
    """Of many magnitudes and both signs, each exact in fp32 and so are their sums in fp64: shape
    ``[count]``.
    """
    return torch.tensor(
        [(i * 40503 % 65536 - 32767) * 2.0 ** -(12 + i * 5 % 7) for i in range(1, count + 1)]
    )


def entries(code: str) -> tuple[Tensor, Tensor]:
    """Positions and values: as many as fit of the first tensor, one less of the third."""
    first, _, third, _ = CODES[code]
    positions = [100 * i // first for i in range(first)] + [
        107 + 60 * i // third for i in range(1, third)
    ]
    return torch.tensor(positions), numbers(len(positions))


def layout(value_format: str, code: str) -> PayloadLayout:
    return PayloadLayout(SIZES, CODES[code], value_format, DENSE.numel())


def payload(value_format: str, code: str) -> Tensor:
    return pack_entries(layout(value_format, code), *entries(code), DENSE)[0]


def rows() -> tuple[Tensor, Tensor]:
    """Values and the row of each: rows of one length; the third is of zeros, and the fourth
    infinite.
    """
    values = numbers(30)
    values[12:18] = 0.0
    values[20] = torch.inf
    return values, torch.arange(5).repeat_interleave(6)


def coded_rows(value_format: str, stochastic: bool) -> Tensor:
    """Scales and values: of rows of one length, or with another number in each and noise for the
    rounding.
    """
    values, row_of = rows()
    if not stochastic:
        return torch.cat(encode_rows(values, None, 5, value_format)[::-1])
    return torch.cat(
        encode_rows(values[4:], row_of[4:], 5, value_format, torch.arange(26) / 26)[::-1]
    )


def all_bytes() -> dict[str, str]:
    """Everything without a run, in hexadecimal digits, by name."""
    sent = {f"{name}, {code}": payload(name, code) for name in FORMATS for code in CODES}
    sent |= {
        f"{name} rows, {noise=}": coded_rows(name, noise)
        for name in ROW_FORMATS
        for noise in (False, True)
    }
    return {name: bytes(data.tolist()).hex() for name, data in sent.items()}


# A run of two ranks with all that a checkpoint can hold: own and shared weights, thresholds, sums
# that ranks own, what is on its way, tables in rows, remembered rows and their residuals, and
# states of an optimizer.
STRATEGY: dict[str, Any] = {
    "exchange": "two_phase",
    "local_steps": 3,
    "overlap_steps": 1,
    "warmup_steps": 2,
    "density": 0.3,
}


class Golden(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.tables = ShardedEmbeddingBags([12, 3], 2, density=0.5, refresh_every=3, cache_rows=8)
        self.top = nn.Linear(4, 9)
        with torch.no_grad():
            self.top.weight.copy_(numbers(36).view(9, 4) / 64)
            self.top.bias.zero_()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        ids, targets = batch
        return (self.top(self.tables(ids).flatten(1)) - targets).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.25, initial_accumulator_value=0.1)


def batches() -> DataLoader:
    """Twelve batches, the second six the first six again, because a loader begins anew where a run
    resumes.
    """
    found = []
    for index in [*range(6)] * 2:
        ids = torch.tensor([[(3 * index + 2 * i + rank()) % 12, (index + i) % 3] for i in range(4)])
        found.append((ids, numbers(36 * (2 * index + rank() + 1))[-36:].view(4, 9)))
    return DataLoader(found, batch_size=None)  # type: ignore[arg-type]


def seen_in(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """The rank's rows, the shared weights and its own, by name."""
    updates = trainer.strategy.updates  # type: ignore[attr-defined]
    found = {f"own {name}": weight for name, weight in updates.state_dict()["weights"].items()}
    found |= {f"shared {name}": updates.weights.shared(name) for name in updates.weights.parameters}
    return {
        name: tensor.detach().clone()
        for name, tensor in {**found, "rows": module.tables.weight}.items()
    }


def save_half(path: Path) -> None:
    trainer_for(DCTStrategy(**STRATEGY), callbacks=[SaveAndStop(path, 6)]).fit(Golden(), batches())


def resume(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What this rank begins with after the checkpoint, and what it ends with after six more
    steps.
    """
    module = Golden()
    start = AtStart(lambda trainer: seen_in(trainer, module))
    trainer = trainer_for(DCTStrategy(**STRATEGY), callbacks=[start])
    trainer.fit(module, batches(), ckpt_path=str(path))
    return start.seen, seen_in(trainer, module)


def main() -> None:
    BYTES.write_text(json.dumps(all_bytes(), indent=0) + "\n")
    with tempfile.TemporaryDirectory() as folder, tarfile.open(ARCHIVE, "w:xz") as archive:
        path = Path(folder) / CHECKPOINT
        ranks = Ranks(2, Path(folder))
        seen = io.BytesIO()
        ranks.run(save_half, path)
        torch.save(ranks.run(resume, path), seen)
        ranks.stop()
        for name in (CHECKPOINT, f"{CHECKPOINT}.dct"):
            archive.add(Path(folder) / name, name)
        part = tarfile.TarInfo(SEEN)
        part.size = seen.tell()
        archive.addfile(part, io.BytesIO(seen.getvalue()))


if __name__ == "__main__":
    main()
