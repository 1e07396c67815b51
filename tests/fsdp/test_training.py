"""What users do with models that DCTFSDPStrategy shards: bytes that pass, what works, mistakes that
are named.
"""

import os
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from distributed.harness import RankFailure
from distributed.training import Module, assert_weights_equal, loader, on_two_nodes, trainer_for
from fsdp.training import Plain, fsdp, train, whole_weights
from lightning_dct import DCTFSDPStrategy, ShardedEmbeddingBags
from lightning_dct.fsdp.mesh_strategy import check_sharded


class Wide(Module):
    """Tensors large enough for a link to feel."""

    def __init__(self) -> None:
        super().__init__(
            nn.Sequential(nn.Linear(40, 256), nn.Tanh(), nn.Linear(256, 128), nn.Linear(128, 8)),
            torch.optim.Adam,
            lr=0.01,
        )


def count(settings: dict[str, Any], trainer: dict[str, Any]) -> Any:
    """Bytes of 48 optimizer steps on two nodes, one replica each by default."""
    with on_two_nodes():
        strategy = DCTFSDPStrategy(lifelines=False, **settings)
        batches = 48 * trainer.get("accumulate_grad_batches", 1)
        return train(strategy, Wide(), batches, devices=2, num_nodes=2, **trainer)["totals"]


def test_micro_batches_send_nothing_between_nodes(ranks: Any) -> None:
    once = ranks(4).run(count, {}, {"max_steps": 4})[0]
    thrice = ranks(4).run(count, {}, {"max_steps": 4, "accumulate_grad_batches": 3})[0]
    assert thrice.bytes_sent == once.bytes_sent > 0
    assert thrice.bytes_inside_node == 3 * once.bytes_inside_node


class Evaluated(Plain):
    """It is validated in the middle of an epoch and says what it has seen."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.seen: list[Any] = []

    def on_validation_end(self) -> None:
        assert self.trainer.strategy.updates.views.are_open
        self.seen.append({**whole_weights(self), "loss": self.trainer.callback_metrics["val_loss"]})


def validate() -> dict[str, Any]:
    module = Evaluated()
    strategy = fsdp(density=0.1)
    trainer = trainer_for(strategy, val_check_interval=5, num_sanity_val_steps=0)
    data = loader(2, 40, 8)
    trainer.fit(module, loader(10, 40, 8), data)
    scored = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    return {
        "seen": module.seen,
        "scored": scored,
        "in_fit": module.seen[1]["loss"],
        "weights": whole_weights(module),
    }


def test_validation_sees_weights_that_all_replicas_share(ranks: Any) -> None:
    runs = ranks(4).run(validate)
    for run in runs:
        # Without the last validation, which only scored again.
        for seen, first in zip(run["seen"], runs[0]["seen"], strict=True):
            assert_weights_equal(seen, first)
        assert run["scored"] == pytest.approx(float(run["in_fit"]), rel=1e-6)
        assert not torch.equal(run["seen"][0]["model.0.weight"], run["seen"][1]["model.0.weight"])


class TwoOptimizers(Plain):
    """Manual optimisation of two parts, one of which is no Module that is ever called."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 8)])
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        inputs, outputs = batch
        answer = self.other[1](torch.tanh(self.other[0](inputs)))
        losses = [self.loss(batch), (answer - outputs).square().mean()]
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return {"loss": sum(losses).detach()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(self.model.parameters(), 0.1),
            torch.optim.Adam(self.other.parameters(), 0.01),
        ]


class Tied(Wide):
    """Two layers share a weight, the module itself has a parameter, and another is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.zeros(8))
        self.two.weight = self.one.weight
        self.model[0].weight.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.two(self.one(checkpoint(self.model, inputs, use_reentrant=False))) + self.shift


class Compiled(Wide):
    """Compiled, as far as a test can wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model, backend="aot_eager")


class Attention(Wide):
    """torch's own encoder uses weights of its children without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 32, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.encoder(self.model(inputs)[:, None])[:, 0]


class Head(Wide):
    """Trains one row and one number, which lie on the first shard of each replica: the other has
    nothing to send.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)
        self.head = nn.Linear(8, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.model(inputs)).expand(-1, 8)


KINDS = {
    "head": Head,
    "manual": TwoOptimizers,
    "tied": Tied,
    "compiled": Compiled,
    "attention": Attention,
    "wide": Wide,
}


def learn(kind: str, strategy: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    return train(fsdp(**strategy), KINDS[kind](), 20, **trainer)


@pytest.mark.parametrize(
    ("kind", "strategy", "trainer"),
    [
        ("manual", {}, {}),
        ("tied", {"unit": 50}, {}),
        ("compiled", {}, {}),
        ("attention", {"unit": nn.Linear}, {"precision": "bf16-mixed"}),
        (
            "wide",
            {"replicas": 4, "exchange": "two_phase", "density": 0.5},
            {"precision": "bf16-true"},
        ),
        ("wide", {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}, {"gradient_clip_val": 1.0}),
        ("wide", {"replicas": 1}, {}),
    ],
)
def test_learns(ranks: Any, kind: str, strategy: dict[str, Any], trainer: dict[str, Any]) -> None:
    """And ends with the same weights on every rank."""
    runs = ranks(4).run(learn, kind, strategy, trainer)
    losses = torch.tensor([run["losses"] for run in runs]).mean(0)
    assert losses[-5:].mean() < 0.9 * losses[:5].mean(), losses
    for run in runs:
        assert_weights_equal(run["weights"], runs[0]["weights"])


def test_a_rank_may_have_nothing_to_train(ranks: Any) -> None:
    runs = ranks(4).run(learn, "head", {}, {})
    for run in runs:
        assert run["weights"]["head.weight"].all()
        assert torch.equal(run["weights"]["head.weight"], runs[0]["weights"]["head.weight"])


class HalfSharded(Plain):
    def configure_model(self) -> None:
        fully_shard(self.model[0], mesh=self.device_mesh["data_parallel"])


class DenseBetween(Plain):
    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["replicate", "data_parallel"])


class WithTables(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.tables = ShardedEmbeddingBags([10], embedding_dim=4)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (HalfSharded, {}, ["'model.2.weight'", "is not sharded", "`configure_model`"]),
        (DenseBetween, {}, ["'model.0.weight'", "uncompressed", "device_mesh['data_parallel']"]),
        (WithTables, {}, ["`ShardedEmbeddingBags` ('tables')"]),
        (Plain, {"replicas": 3}, ["`replicas=3` does not divide the 4 ranks"]),
        (Plain, {"unit": (nn.LSTM,)}, ["`Plain` has no module of the classes in `unit=", "LSTM"]),
    ],
)
def test_what_cannot_work_is_named(
    ranks: Any, kind: type, settings: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RankFailure) as failure:
        ranks(4).run(refused, kind.__name__, settings)
    for word in words:
        assert str(failure.value).count(word) >= 4, str(failure.value)


def refused(kind: str, settings: dict[str, Any]) -> None:
    train(fsdp(**settings), globals()[kind](), 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 2}, "has no setting `tensor_parallel_size`"),
        ({"replica": 2}, "Did you mean `replicas`.* It takes its own and those of `DCTConfig`"),
        ({"data_parallel_size": 2}, "has no setting `data_parallel_size`"),
        ({"wrap_unit": 2}, "has no setting `wrap_unit`"),
        ({"unit": "Linear"}, "`unit` must be a whole number"),
        ({"unit": 1e6}, "`unit` must be a whole number"),
        ({"replicas": 0}, "`replicas` must be at least 1"),
        ({"density": 2.0}, "`density`"),
        (
            {"compress": "gradients"},
            "`DCTFSDPStrategy` exchanges updates of weights.*Leave `compress` out",
        ),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        DCTFSDPStrategy(**settings)


def test_embeddings_with_sparse_gradients_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`0` is an embedding with `sparse=True`.*`strategy='dct'`"
    ):
        check_sharded(nn.Sequential(nn.Embedding(4, 2, sparse=True)), MagicMock())


def test_callbacks_that_copy_the_model_are_refused() -> None:
    averaging = StochasticWeightAveraging(swa_lrs=0.1)
    with patch.dict(os.environ):  # Lightning leaves the address of its process group there
        trainer = Trainer(
            accelerator="cpu", strategy="dct_fsdp", callbacks=[averaging], logger=False
        )
        with pytest.raises(ValueError, match="copies the model"):
            trainer.fit(Plain())
