"""TorchRec's collections of embedding tables, spread over the ranks: change one import (extra
``torchrec``).

The classes have the constructor, ``forward`` and configurations of those of the same names in
TorchRec, so its models take them::

    from torchrec.models.dlrm import DLRM
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    from lightning_dct.torchrec import EmbeddingBagCollection

    tables = [EmbeddingBagConfig(num_embeddings=1000, embedding_dim=16, name="items", feature_names=["seen", "bought"])]
    model = DLRM(EmbeddingBagCollection(tables=tables), 13, [64, 16], [64, 1])

Tables of one dim and data type are one :class:`~lightning_dct.ShardedEmbeddingBags`, whose settings
of the exchange the constructor takes too. A ``state_dict`` of TorchRec loads;
:meth:`whole_state_dict` gives one back.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dct.embedding.bags import Features
from lightning_dct.embedding.sharded import ShardedEmbeddingBags, ShardedEmbeddings
from lightning_dct.embedding.tables import EmbeddingTable
from lightning_dct.embedding.whole_tables import gather_tables

try:
    from torchrec.modules.embedding_configs import (
        DataType,
        EmbeddingBagConfig,
        EmbeddingConfig,
        PoolingType,
        data_type_to_dtype,
    )
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollectionInterface,
        EmbeddingCollectionInterface,
        get_embedding_names_by_table,
    )
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    from torchrec.sparse.tensor_dict import maybe_td_to_kjt
except ImportError as error:
    raise ImportError(
        "`lightning_dct.torchrec` needs TorchRec: `pip install '.[torchrec]'` in a clone of"
        " lightning_dct. On a CPU, `pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0`."
        " Without it use `lightning_dct.ShardedEmbeddingBags`."
    ) from error

__all__ = ["EmbeddingBagCollection", "EmbeddingBagConfig", "EmbeddingCollection", "EmbeddingConfig"]

DATA_TYPES = (DataType.FP32, DataType.FP16, DataType.BF16)
POOLINGS = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}


class _Tables(nn.Module):
    """The tables of a collection: one module of sharded tables for each dim and data type."""

    # The prefix of the tables in TorchRec's ``state_dict``.
    prefix: str
    kind: type[ShardedEmbeddingBags]

    def __init__(self, configs: list[Any], device: Any, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._configs = configs
        for config in configs:
            config.feature_names = config.feature_names or [config.name]
        self._device = torch.device("cpu" if device is None else device)
        described = [_table_of(config) for config in configs]
        if not described:
            raise ValueError("`tables` is empty: give a configuration for each table.")
        if twice := next(
            (one.name for one in configs if [o.name for o in configs].count(one.name) > 1), None
        ):
            raise ValueError(f"Duplicate table name {twice}")
        groups: dict[tuple[int, Any], list[EmbeddingTable]] = {}
        for table in described:
            groups.setdefault((table.dim, table.dtype), []).append(table)
        seed = settings.get("seed", 0)
        self.shards = nn.ModuleList(
            self.kind(tables, **{**settings, "seed": seed + number})
            for number, tables in enumerate(groups.values())
        )
        if self._device.type not in ("cpu", "meta"):
            self.shards.to(self._device)
        self._embedding_names = get_embedding_names_by_table(configs)
        # Of each table's features: the number of their module, and the place among its features.
        places = {table.name: [] for table in described}  # type: dict[str, list[tuple[int, int]]]
        for number, shard in enumerate(self._groups()):
            for place, table_number in enumerate(shard.features.table_of):
                places[shard.tables[table_number].name].append((number, place))
        self._places = list(
            itertools.chain.from_iterable(places[config.name] for config in configs)
        )
        self._register_load_state_dict_pre_hook(self._take_whole_tables)

    @property
    def device(self) -> torch.device:
        """The device that was given; ``cpu`` if none was."""
        return self._device

    def reset_parameters(self) -> None:
        """Return to the initial values."""
        for shard in self._groups():
            if shard.is_materialized:
                with torch.no_grad():
                    shard.initialize_rows()
                shard.rows_replaced()

    def whole_state_dict(self, folder: str | Path) -> dict[str, Tensor]:
        """Give all tables back as TorchRec's ``state_dict`` has them; a collective call.

        Rank 0 writes a file for each table into ``folder``, which ``torch.load`` reads, and maps
        the tensors from these files, so no rank ever has more than its own rows and 65,536 others.
        Other ranks get an empty dict.
        """
        gathered = [gather_tables(shard, folder) for shard in self._groups()]
        return {
            f"{self.prefix}.{name}.weight": rows
            for found in gathered
            for name, rows in found.items()
        }

    def _groups(self) -> list[ShardedEmbeddingBags]:
        return list(self.shards)  # type: ignore[arg-type]

    def _lookups(self, features: KeyedJaggedTensor, weighted: bool) -> list[Any]:
        """Start the look-ups of all groups; the same number on every rank."""
        return [
            shard.request(
                *_inputs_of(
                    features, shard.features, weighted=weighted, unequal=self._is_unequal(features)
                )
            )
            for shard in self._groups()
        ]

    def _is_unequal(self, features: KeyedJaggedTensor) -> bool:
        return features.variable_stride_per_key()

    def _take_whole_tables(self, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        """Load the tables of TorchRec's ``state_dict``, if these are in it."""
        names = {
            config.name: f"{prefix}{self.prefix}.{config.name}.weight" for config in self._configs
        }
        if not any(key in state for key in names.values()):
            return
        missing = arguments[2]
        errors = arguments[4]
        for number, shard in enumerate(self._groups()):
            own = [names[table.name] for table in shard.tables]
            absent = [key for key in own if key not in state]
            missing += absent
            whole = [state.pop(key) for key in own if key in state]
            if absent:
                continue
            try:
                shard.load_tables([rows.detach() for rows in whole])
            except ValueError as error:
                errors.append(str(error))
            # The module itself then finds nothing missing.
            state.setdefault(f"{prefix}shards.{number}._extra_state", shard.get_extra_state())
            state[f"{prefix}shards.{number}.weight"] = None


class EmbeddingBagCollection(_Tables, EmbeddingBagCollectionInterface):
    """TorchRec's ``EmbeddingBagCollection``, spread over the ranks, which send each other changes
    of rows.

    Args:
        tables: Their configurations. ``init_fn`` may be any function that fills a tensor in place;
            it sees at most 65,536 rows at a time. Uniform initial values, the default, cost no
            bytes.
        is_weighted: Whether ``forward`` multiplies rows by the weights of the input. A mean is then
            the weighted sum over the number of rows.
        device: As for TorchRec. A strategy moves the rows to its own device.
        **settings: ``density``, ``value_format``, ``refresh_every``, ``cache_rows`` and ``seed`` of
            :class:`~lightning_dct.ShardedEmbeddingBags`.

    Raises:
        ValueError: A configuration asks for what sharded tables do not have; the message says what
            to do instead.
    """

    prefix = "embedding_bags"
    kind = ShardedEmbeddingBags

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(tables, device, settings)
        self._is_weighted = is_weighted
        self._length_per_key = [
            config.embedding_dim for config in tables for _ in config.feature_names
        ]
        self._keys = list(itertools.chain.from_iterable(self._embedding_names))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool: a ``KeyedTensor`` with values float32 ``[batch, sum of dims]``, in the
        order of tables.
        """
        features = maybe_td_to_kjt(features, None)
        lookups = self._lookups(features, self._is_weighted)
        pooled = [lookup.pooled() for lookup in lookups]
        if self._is_unequal(features):
            parts = [
                self._expand(features, shard, bags)
                for shard, bags in zip(self._groups(), pooled, strict=True)
            ]
        elif len(pooled) == 1:
            values = pooled[0].flatten(1).float()
            return KeyedTensor(keys=self._keys, length_per_key=self._length_per_key, values=values)
        else:
            parts = [list(bags.float().unbind(1)) for bags in pooled]
        values = torch.cat([parts[group][place] for group, place in self._places], dim=1)
        return KeyedTensor(keys=self._keys, length_per_key=self._length_per_key, values=values)

    def _expand(
        self, features: KeyedJaggedTensor, shard: ShardedEmbeddingBags, bags: Tensor
    ) -> list[Tensor]:
        """The bags of each feature of a batch without repeated samples, by sample of the whole
        batch.
        """
        inverse = features.inverse_indices_or_none()
        if inverse is None:
            raise ValueError(
                "The features have different numbers of samples: give the `KeyedJaggedTensor` its"
                " `inverse_indices`."
            )
        samples = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        at = dict(zip(inverse[0], inverse[1], strict=True))
        each = bags.float().split([samples[name] for name in shard.features.names])
        return [
            part.index_select(0, at[name])
            for name, part in zip(shard.features.names, each, strict=True)
        ]

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configurations of the tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether rows are multiplied by weights."""
        return self._is_weighted


class EmbeddingCollection(_Tables, EmbeddingCollectionInterface):
    """TorchRec's ``EmbeddingCollection``, for sequences: rows that are not pooled, spread over the
    ranks.

    Args:
        tables: Their configurations, all of one dim.
        device: As for TorchRec.
        need_indices: Whether the output has the ids as weights.
        **settings: As for :class:`EmbeddingBagCollection`.

    Raises:
        ValueError: Dims differ, or a configuration asks for what sharded tables do not have.
    """

    prefix = "embeddings"
    kind = ShardedEmbeddings

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | None = None,
        need_indices: bool = False,
        **settings: Any,
    ) -> None:
        if len({config.embedding_dim for config in tables}) > 1:
            raise ValueError(
                "All tables in a EmbeddingCollection are required to have same embedding dimension."
            )
        super().__init__(tables, device, settings)
        self._need_indices = need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up: of each feature a ``JaggedTensor`` with values float32 ``[look-ups, dim]``."""
        features = maybe_td_to_kjt(features, None)
        rows: list[Sequence[Tensor]] = []
        given = {
            name: (values, lengths)
            for name, values, lengths, _ in _by_feature(features, weighted=False)
        }
        for shard, lookup in zip(
            self._groups(), self._lookups(features, weighted=False), strict=True
        ):
            rows.append(
                lookup.rows()
                .float()
                .split([given[name][0].numel() for name in shard.features.names])
            )
        found = {}
        names = zip(self._places, itertools.chain.from_iterable(self._embedding_names), strict=True)
        for (group, place), name in names:
            ids, lengths = given[self._groups()[group].features.names[place]]
            weights = ids if self._need_indices else None
            found[name] = JaggedTensor(values=rows[group][place], lengths=lengths, weights=weights)
        return found

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configurations of the tables."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether the output has the ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Entries a row."""
        return self._groups()[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """The keys of the output, by table."""
        return self._embedding_names


def _table_of(config: Any) -> EmbeddingTable:
    """The description of a table from its configuration."""
    if config.data_type not in DATA_TYPES:
        raise ValueError(
            f"Table {config.name!r} has data_type={config.data_type}: rows are trained in FP32,"
            " FP16 or BF16. Quantise them for inference, after `whole_state_dict`."
        )
    if getattr(config, "use_virtual_table", False):
        raise ValueError(
            f"Table {config.name!r} is virtual: use `lightning_dct.GrowingEmbeddingBags`."
        )
    pooling = getattr(config, "pooling", PoolingType.SUM)
    if pooling not in POOLINGS:
        raise ValueError(
            f"Table {config.name!r} has pooling={pooling}: use SUM, MEAN or an"
            " `EmbeddingCollection`."
        )
    initial: tuple[float, float] | Callable[[Tensor], Any] = config.init_fn
    if (
        isinstance(config.init_fn, partial)
        and config.init_fn.func is nn.init.uniform_
        and not config.init_fn.args
    ):
        bounds = {"a": 0.0, "b": 1.0, **config.init_fn.keywords}
        initial = bounds["a"], bounds["b"]
    elif config.init_fn is None:
        initial = config.get_weight_init_min(), config.get_weight_init_max()
    return EmbeddingTable(
        config.name,
        config.num_embeddings,
        config.embedding_dim,
        pooling=POOLINGS[pooling],  # type: ignore[arg-type]
        dtype=data_type_to_dtype(config.data_type),
        initial=initial,
        features=tuple(config.feature_names),
    )


def _by_feature(features: KeyedJaggedTensor, *, weighted: bool) -> list[tuple[str, Any, Any, Any]]:
    """Of each feature of a batch: its name, values, lengths and weights."""
    starts = features.offset_per_key()
    samples = features.stride_per_key()
    sizes = [stop - start for start, stop in itertools.pairwise(starts)]
    values = features.values().split(sizes)
    lengths = features.lengths().split(samples)
    weights = features.weights().split(sizes) if weighted else [None] * len(sizes)
    return list(zip(features.keys(), values, lengths, weights, strict=True))


def _inputs_of(
    features: KeyedJaggedTensor, wanted: Features, *, weighted: bool, unequal: bool
) -> tuple[Tensor, Tensor, Tensor | None, list[int] | None]:
    """Ids, offsets, weights and samples of some of the features, in the order in which tables want
    them.
    """
    samples = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    if missing := [name for name in wanted.names if name not in samples]:
        raise KeyError(
            f"The batch has no feature {missing[0]!r}; it has"
            f" {', '.join(map(repr, features.keys()))}."
        )
    of_each = [samples[name] for name in wanted.names] if unequal else None
    if tuple(features.keys()) == wanted.names:
        return (
            features.values(),
            features.offsets(),
            features.weights() if weighted else None,
            of_each,
        )
    parts = {name: part for name, *part in _by_feature(features, weighted=weighted)}
    values, lengths = (torch.cat([parts[name][place] for name in wanted.names]) for place in (0, 1))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    weights = torch.cat([parts[name][2] for name in wanted.names]) if weighted else None
    return values, offsets, weights, of_each
