"""TorchRec's collections beside torch's own modules, and TorchRec's models where TorchRec is
installed.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from distributed.training import trainer_for
from embedding.training import generator
from embedding.with_torchrec import IS_REAL, DataType, KeyedJaggedTensor, KeyedTensor, PoolingType
from lightning_dct import DCTStrategy, RowWiseAdagrad
from lightning_dct.torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)

EVERYTHING = {"density": 1.0, "value_format": "fp32"}
FEATURES = ["query", "seen", "age", "bought"]
SIZES = {"query": 30, "seen": 12, "age": 5, "bought": 12}
needs_torchrec = pytest.mark.skipif(not IS_REAL, reason="needs TorchRec: `make test-torchrec`")


def configs(dim: int = 4, **query: Any) -> list[EmbeddingBagConfig]:
    """Tables of two dims, one with two features; a feature is looked up in two tables."""
    return [
        EmbeddingBagConfig(
            12, dim, "goods", feature_names=["bought", "seen"], pooling=PoolingType.MEAN
        ),
        EmbeddingBagConfig(30, 3, "words", feature_names=["query"], **query),
        EmbeddingBagConfig(5, dim, "ages", feature_names=["age"]),
        EmbeddingBagConfig(
            12, dim, "more", feature_names=["seen"], init_fn=partial(nn.init.normal_, std=0.1)
        ),
    ]


def batch(step: int, rank: int, unequal: bool = False) -> KeyedJaggedTensor:
    """Bags of 0 to 3 rows of each feature; features need not come in the order of the tables."""
    numbers = generator(step, rank, 17)
    strides = [2, 4, 1, 3] if unequal else [4] * len(FEATURES)
    lengths = [torch.randint(0, 4, (stride,), generator=numbers) for stride in strides]
    values = [
        torch.randint(0, SIZES[name], (int(part.sum()),), generator=numbers)
        for name, part in zip(FEATURES, lengths, strict=True)
    ]
    weights = torch.rand(sum(len(part) for part in values), generator=numbers)
    more: dict[str, Any] = {}
    if unequal:
        at = torch.stack([torch.randint(0, stride, (4,), generator=numbers) for stride in strides])
        more = {
            "stride_per_key_per_rank": [[stride] for stride in strides],
            "inverse_indices": (FEATURES, at),
        }
    return KeyedJaggedTensor(
        keys=FEATURES, values=torch.cat(values), weights=weights, lengths=torch.cat(lengths), **more
    )


def state_of(tables: list[EmbeddingBagConfig], prefix: str = "embedding_bags") -> dict[str, Tensor]:
    """A ``state_dict`` as TorchRec has it."""
    numbers = generator(5)
    return {
        f"{prefix}.{table.name}.weight": torch.randn(
            table.num_embeddings, table.embedding_dim, generator=numbers
        )
        for table in tables
    }


def bags_of(
    whole: dict[str, Tensor], features: KeyedJaggedTensor, weighted: bool
) -> dict[str, Tensor]:
    """What TorchRec's ``KeyedTensor`` has, from whole tables."""
    starts = features.offset_per_key()
    found = {}
    lengths = dict(zip(FEATURES, features.lengths().split(features.stride_per_key()), strict=True))
    inverse = features.inverse_indices_or_none()
    for config in configs():
        for name in config.feature_names:
            own = slice(starts[FEATURES.index(name)], starts[FEATURES.index(name) + 1])
            rows = whole[f"embedding_bags.{config.name}.weight"][features.values()[own]]
            rows = rows * features.weights()[own].unsqueeze(1) if weighted else rows
            count = len(lengths[name])
            bags = torch.zeros(count, rows.shape[1]).index_add(
                0, torch.arange(count).repeat_interleave(lengths[name]), rows
            )
            if config.pooling == PoolingType.MEAN:
                bags = bags / lengths[name].clamp(min=1).unsqueeze(1)
            if inverse is not None:
                bags = bags[inverse[1][FEATURES.index(name)]]
            found[f"{name}@{config.name}" if name == "seen" else name] = bags
    return found


def weight_of(found: dict[str, Tensor]) -> Tensor:
    return (
        torch.stack(
            [(part * torch.arange(1.0, part.shape[1] + 1)).sum() for part in found.values()]
        ).sum()
        * 0.1
    )


def trained(weighted: bool, unequal: bool, folder: str) -> tuple[float, list[str]]:
    """Train from a state of TorchRec's beside whole tables; the largest difference, also of what is
    given back.
    """
    world = range(dist.get_world_size())
    rank = dist.get_rank()
    tables = EmbeddingBagCollection(
        tables=configs(), is_weighted=weighted, device=torch.device("meta"), **EVERYTHING
    )
    tables.load_state_dict(state_of(configs()))
    for shard in tables.shards:
        shard.materialize()
    whole = {name: nn.Parameter(rows) for name, rows in state_of(configs()).items()}
    optimizer, oracle = (
        torch.optim.SGD(of, lr=0.5) for of in (tables.parameters(), whole.values())
    )
    worst = 0.0
    keys = []
    for step in range(3):
        pooled = tables(batch(step, rank, unequal))
        assert isinstance(pooled, KeyedTensor)
        found = pooled.to_dict()
        keys = list(pooled.keys())
        optimizer.zero_grad()
        weight_of(found).backward()
        optimizer.step()
        oracle.zero_grad()
        for peer in world:
            expected = bags_of(whole, batch(step, peer, unequal), weighted)
            if peer == rank:
                assert list(found) == list(expected)
                worst = max(worst, *(difference(found[name], expected[name]) for name in found))
            (weight_of(expected) / len(world)).backward()
        oracle.step()
    given_back = tables.whole_state_dict(folder)
    assert given_back.keys() == (whole.keys() if rank == 0 else set())
    return max([worst, *(difference(rows, whole[name]) for name, rows in given_back.items())]), keys


def difference(one: Tensor, other: Tensor) -> float:
    assert one.shape == other.shape
    return float((one.detach() - other.detach()).abs().max())


@pytest.mark.parametrize(
    ("world_size", "weighted", "unequal"), [(2, False, False), (3, True, False), (2, True, True)]
)
def test_a_collection_trains_as_whole_tables(
    ranks: Any, tmp_path: Path, world_size: int, weighted: bool, unequal: bool
) -> None:
    for worst, keys in ranks(world_size).run(trained, weighted, unequal, str(tmp_path / "serving")):
        assert worst < 1e-5
        assert keys == ["bought", "seen@goods", "query", "age", "seen@more"]
    for name, rows in state_of(configs()).items():
        file = tmp_path / "serving" / f"{name.split('.')[1]}.pt"
        assert torch.load(file, weights_only=True).shape == rows.shape


def sequences() -> float:
    tables = EmbeddingCollection(
        tables=[
            EmbeddingConfig(30, 4, "words", feature_names=["query"]),
            EmbeddingConfig(12, 4, "seen"),
        ],
        need_indices=True,
        **EVERYTHING,
    )
    whole = state_of(tables.embedding_configs(), "embeddings")
    tables.load_state_dict(whole)
    tables.shards[0].materialize()
    features = batch(0, dist.get_rank())
    found = tables(features)
    starts = features.offset_per_key()
    assert list(found) == ["query", "seen"]
    worst = 0.0
    for place, (name, table) in enumerate([("query", "words"), ("seen", "seen")]):
        ids = features.values()[starts[place] : starts[place + 1]]
        assert torch.equal(found[name].weights(), ids)
        assert found[name].lengths().tolist() == features.lengths().split(4)[place].tolist()
        worst = max(
            worst, difference(found[name].values(), whole[f"embeddings.{table}.weight"][ids])
        )
    sum(part.values().sum() for part in found.values()).backward()
    assert tables.shards[0].weight.grad is not None
    return worst


def test_sequences(ranks: Any) -> None:
    assert ranks(2).run(sequences) == [0.0, 0.0]


def test_uniform_initial_values_are_those_of_the_hash() -> None:
    """They cost no bytes; those of a function would be sent whole."""
    tables = EmbeddingBagCollection(tables=configs(weight_init_min=0.25, weight_init_max=0.5))
    kinds = {table.name: table.initial for shard in tables.shards for table in shard.tables}
    assert kinds["words"] == (0.25, 0.5)
    assert callable(kinds["more"])


def test_reset_parameters() -> None:
    tables = EmbeddingBagCollection(tables=configs())
    shard = tables.shards[0]
    shard.materialize()
    first = shard.weight.detach().clone()
    with torch.no_grad():
        shard.weight += 1
    tables.reset_parameters()
    assert torch.equal(shard.weight, first)


def one(**settings: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        **{"num_embeddings": 5, "embedding_dim": 4, "name": "one", **settings}
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: EmbeddingBagCollection([one(data_type=DataType.INT8)]),
            "Quantise them for inference",
        ),
        (lambda: EmbeddingBagCollection([one(use_virtual_table=True)]), "GrowingEmbeddingBags"),
        (
            lambda: EmbeddingBagCollection([one(pooling=PoolingType.NONE)]),
            "use SUM, MEAN or an `EmbeddingCollection`",
        ),
        (lambda: EmbeddingBagCollection([one(), one()]), "Duplicate table name one"),
        (lambda: EmbeddingBagCollection([]), "`tables` is empty"),
        (
            lambda: EmbeddingCollection([one(), one(name="b", embedding_dim=3)]),
            "same embedding dimension",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_state_that_does_not_fit_is_refused() -> None:
    tables = EmbeddingBagCollection(tables=configs())
    state = state_of(configs())
    key = "embedding_bags.words.weight"
    with pytest.raises(
        RuntimeError, match=r"Table 'words' has shape \[29, 3\] instead of \[30, 3\]"
    ):
        tables.load_state_dict({**state, key: torch.zeros(29, 3)})
    with pytest.raises(RuntimeError, match=r"embedding_bags\.words\.weight"):
        tables.load_state_dict({name: rows for name, rows in state.items() if name != key})


class Clicks(LightningModule):
    """A model of TorchRec's on made-up clicks, as its users write it."""

    def __init__(self, model: str) -> None:
        super().__init__()
        from torchrec.models import deepfm, dlrm

        tables = [
            EmbeddingBagConfig(40, 8, f"t{number}", feature_names=[f"f{number}"])
            for number in range(3)
        ]
        collection = EmbeddingBagCollection(tables=tables, density=0.2)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.model = {
                "DLRM": lambda: dlrm.DLRM(collection, 2, [8, 8], [8, 1]),
                "DLRM_DCN": lambda: dlrm.DLRM_DCN(collection, 2, [8, 8], [8, 1], 1, 4),
                "DeepFM": lambda: deepfm.SimpleDeepFMNN(2, collection, 8, 4),
            }[model]()
        self.losses: list[float] = []

    def training_step(self, ids: Tensor, batch_index: int) -> Tensor:
        features = KeyedJaggedTensor(
            ["f0", "f1", "f2"],
            ids.T.reshape(-1),
            lengths=torch.ones(ids.numel(), dtype=torch.int32),
        )
        logits = self.model(ids[:, :2].float() / 40, features).squeeze(1)
        loss = nn.functional.mse_loss(logits, (ids[:, 0] < 20).float())
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self) -> Any:
        return RowWiseAdagrad(self.parameters(), lr=0.1)


def fitted(model: str) -> list[float]:
    module = Clicks(model)
    ids = torch.randint(0, 40, (40, 16, 3), generator=generator(dist.get_rank()))
    trainer_for(DCTStrategy(local_steps=1)).fit(module, DataLoader(ids, batch_size=None))
    return module.losses


@needs_torchrec
@pytest.mark.parametrize("model", ["DLRM", "DLRM_DCN", "DeepFM"])
def test_torchrecs_models_train(ranks: Any, model: str) -> None:
    for losses in ranks(2).run(fitted, model):
        assert sum(losses[-8:]) < sum(losses[:8])


@needs_torchrec
def test_the_same_as_torchrecs_own_collection_in_one_process(tmp_path: Path) -> None:
    from torchrec.modules.embedding_modules import EmbeddingBagCollection as Theirs

    theirs = Theirs(tables=configs())
    ours = EmbeddingBagCollection(configs())
    # One process may load what TorchRec saved.
    ours.load_state_dict(theirs.state_dict())
    for shard in ours.shards:
        shard.materialize()
    for unequal in (False, True):
        expected = theirs(batch(0, 0, unequal))
        found = ours(batch(0, 0, unequal))
        assert found.keys() == expected.keys()
        torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=1e-6)
    saved = {name: rows.clone() for name, rows in theirs.state_dict().items()}
    for rows in theirs.parameters():
        nn.init.zeros_(rows)
    theirs.load_state_dict(ours.whole_state_dict(tmp_path))
    assert all(torch.equal(rows, saved[name]) for name, rows in theirs.state_dict().items())
