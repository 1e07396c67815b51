"""A recommender on two ranks: tables are spread over them, and only changes of rows cross.

With ``--torchrec`` the model is TorchRec's own DLRM; the only import of it that changes is that of
the tables. Without, it is a small one over ``ShardedEmbeddingBags``. The rest is the same: data,
optimizer, AUC, checkpoint, and tables in files, which a server loads without lightning_dct.
"""

import argparse
import sys

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import BinaryAUROC

import lightning_dct  # registers strategy="dct"
from lightning_dct import AdamWithRows, EmbeddingTable, ShardedEmbeddingBags

FEATURES = {"user": 4000, "item": 2000, "last_item": 2000, "country": 50}
NUM_DENSE = 4
DIM = 16


class Clicks(L.LightningDataModule):
    """Made-up clicks: users and items have a hidden taste, and items are as popular as words are
    frequent.
    """

    def setup(self, stage: str) -> None:
        numbers = torch.Generator().manual_seed(0)
        tastes = {name: torch.randn(rows, generator=numbers) for name, rows in FEATURES.items()}
        tastes["last_item"] = tastes["item"]
        dense = torch.rand(40_000, NUM_DENSE, generator=numbers)
        # Low ids are frequent, as in most vocabularies.
        draws = torch.rand(len(dense), len(FEATURES), generator=numbers) ** 3
        ids = (draws * torch.tensor(list(FEATURES.values()))).long()
        logit = dense.sum(dim=1) - 2
        for place, name in enumerate(FEATURES):
            logit += tastes[name][ids[:, place]]
        labels = torch.rand(len(dense), generator=numbers) < logit.sigmoid()
        self.train = TensorDataset(dense[:36_000], ids[:36_000], labels[:36_000].float())
        self.held_out = TensorDataset(dense[36_000:], ids[36_000:], labels[36_000:].float())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, 128, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, 500)


class SmallDLRM(nn.Module):
    """Dense features through a network, ids through tables, dot products of all pairs on top."""

    def __init__(self) -> None:
        super().__init__()
        items = EmbeddingTable("items", FEATURES["item"], DIM, features=("item", "last_item"))
        users = EmbeddingTable("users", FEATURES["user"], DIM)
        countries = EmbeddingTable("countries", FEATURES["country"], DIM)
        # Of user, item, last_item and country.
        self.tables = ShardedEmbeddingBags([users, items, countries])
        self.bottom = nn.Sequential(
            nn.Linear(NUM_DENSE, 32), nn.ReLU(), nn.Linear(32, DIM), nn.ReLU()
        )
        self.top = nn.Sequential(nn.Linear(DIM + 10, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        lookup = self.tables.request(ids)  # rows travel ...
        bottom = self.bottom(dense)  # ... while this computes
        vectors = torch.cat([bottom.unsqueeze(1), lookup.pooled()], dim=1)
        rows, columns = torch.tril_indices(5, 5, offset=-1)
        pairs = (vectors @ vectors.transpose(1, 2))[:, rows, columns]
        return self.top(torch.cat([bottom, pairs], dim=1)).squeeze(1)

    def export(self, folder: str) -> dict[str, Tensor]:
        return lightning_dct.gather_tables(self.tables, folder)


class TorchRecDLRM(nn.Module):
    """TorchRec's model, as its users write it."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec.models.dlrm import DLRM
        from torchrec.modules.embedding_configs import EmbeddingBagConfig

        # Instead of torchrec.modules.embedding_modules.
        from lightning_dct.torchrec import EmbeddingBagCollection

        tables = [
            EmbeddingBagConfig(FEATURES["user"], DIM, "users", feature_names=["user"]),
            EmbeddingBagConfig(FEATURES["item"], DIM, "goods", feature_names=["item", "last_item"]),
            EmbeddingBagConfig(FEATURES["country"], DIM, "countries", feature_names=["country"]),
        ]
        self.tables = EmbeddingBagCollection(tables=tables)
        self.dlrm = DLRM(self.tables, NUM_DENSE, [32, DIM], [32, 1])

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        ones = torch.ones(ids.numel(), dtype=torch.int32)
        return self.dlrm(
            dense, KeyedJaggedTensor(list(FEATURES), ids.T.reshape(-1), lengths=ones)
        ).squeeze(1)

    def export(self, folder: str) -> dict[str, Tensor]:
        return self.tables.whole_state_dict(folder)


class Recommender(L.LightningModule):
    """Any of the two models, trained on clicks.

    Args:
        torchrec: Whether the model is TorchRec's.
    """

    def __init__(self, torchrec: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = TorchRecDLRM() if torchrec else SmallDLRM()
        self.auc = BinaryAUROC()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        dense, ids, labels = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(dense, ids), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        dense, ids, labels = batch
        self.auc.update(self.model(dense, ids).sigmoid(), labels.int())
        self.log("auc", self.auc, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        rows = list(self.model.tables.parameters())
        others = [
            weight for weight in self.model.parameters() if not any(weight is row for row in rows)
        ]
        return AdamWithRows([{"params": rows, "lr": 0.05}, {"params": others}], lr=3e-3)


def main() -> None:
    """Train, save, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torchrec", action="store_true", help="TorchRec's own DLRM")
    parser.add_argument("--epochs", type=int, default=2)
    arguments = parser.parse_args()
    L.seed_everything(0)
    module = Recommender(arguments.torchrec)
    trainer = L.Trainer(
        strategy="dct",
        accelerator="cpu",
        devices=2,
        max_epochs=arguments.epochs,
        enable_progress_bar=sys.stdout.isatty(),
    )
    trainer.fit(module, datamodule=Clicks())
    # Rows are in a folder beside it: trainer.fit(ckpt_path=...) goes on.
    trainer.save_checkpoint("recommender.ckpt")
    tables = module.model.export("serving")  # every rank calls it; rank 0 writes the files
    if trainer.is_global_zero:
        print(f"AUC {float(trainer.callback_metrics['auc']):.3f}")
        for name, rows in tables.items():
            print(f"serving/ has {name}: {list(rows.shape)}")


if __name__ == "__main__":
    main()
