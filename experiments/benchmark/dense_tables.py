"""Sharded tables that send all rows and gradients in every step, as TorchRec does: the reference
for changes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dct import ShardedEmbeddingBags
from lightning_dct.embedding.collected import DeliverRows
from lightning_dct.embedding.owners import place_tables
from lightning_dct.wire.rows import (
    decode_rows,
    encode_rows,
    row_scales_num_bytes,
    row_values_num_bytes,
)


class DenseTables(ShardedEmbeddingBags):
    """Tables that each live on one rank; a batch's ids, rows and gradients cross in three
    all-to-all exchanges.

    ``row_format`` is ``"fp32"``, ``"fp16"``, ``"int8"`` or ``"int4"``, the last two with a scale a
    row.
    """

    def __init__(self, table_rows: list[int], embedding_dim: int, row_format: str) -> None:
        super().__init__(table_rows, embedding_dim)
        self.row_format = row_format

    def initial(self, owner: int, places: object) -> Tensor:
        """Any rows: no other rank has to know them."""
        return torch.rand(len(places), self.embedding_dim).sub_(0.5).mul_(1e-3)  # type: ignore[arg-type]

    def request(self, ids: Tensor, *_: object) -> DenseLookup:
        """Ask for the rows of ids ``[samples, tables]``."""
        return DenseLookup(self, ids)

    def encode(self, rows: Tensor) -> Tensor:
        """Rows ``[n, dim]`` as bytes."""
        if self.row_format in ("fp32", "fp16"):
            return (
                rows.to(torch.float32 if self.row_format == "fp32" else torch.float16)
                .reshape(-1)
                .view(torch.uint8)
            )
        return torch.cat(encode_rows(rows.reshape(-1), None, len(rows), self.row_format))

    def num_bytes(self, num_rows: int) -> int:
        """Bytes of so many encoded rows."""
        entries = num_rows * self.embedding_dim
        if self.row_format in ("fp32", "fp16"):
            return entries * (4 if self.row_format == "fp32" else 2)
        return row_values_num_bytes(self.row_format, entries) + row_scales_num_bytes(
            self.row_format, num_rows
        )

    def decode(self, data: Tensor, num_rows: int) -> Tensor:
        entries = num_rows * self.embedding_dim
        if self.row_format in ("fp32", "fp16"):
            values = data.view(torch.float32 if self.row_format == "fp32" else torch.float16).to(
                torch.float32
            )
        else:
            cut = row_values_num_bytes(self.row_format, entries)
            values = decode_rows(data[:cut], entries, None, data[cut:], self.row_format)
        return values.view(num_rows, self.embedding_dim)


class DenseLookup:
    """A look-up under way: asks in the constructor, pools in :meth:`pooled`."""

    def __init__(self, module: DenseTables, ids: Tensor) -> None:
        self._module = module
        self._samples = len(ids)
        exchange = module.exchange_group
        world = range(module.placement.world_size)
        with module.traffic.timed():
            self._tables = [
                torch.tensor(module.placement.first_rank).eq(rank).nonzero().squeeze(1)
                for rank in world
            ]
            mine = self._tables[exchange.rank].numpy()
            asked = {
                rank: ids[:, tables].reshape(-1).view(torch.uint8)
                for rank, tables in enumerate(self._tables)
            }
        received = exchange.start(
            asked, dict.fromkeys(world, 8 * len(ids) * mine.size), module.traffic, "ids"
        )()
        with module.traffic.timed():
            first = torch.from_numpy(module.placement.locate(mine, 0 * mine)[1])
            self._places = [
                (part.view(torch.int64).view(-1, mine.size) + first).view(-1) for part in received
            ]
            rows = [module.weight.detach().index_select(0, places) for places in self._places]
            answers = {rank: module.encode(part) for rank, part in enumerate(rows)}
            sizes = {
                rank: module.num_bytes(len(ids) * len(tables))
                for rank, tables in enumerate(self._tables)
            }
        self._wait = exchange.start(answers, sizes, module.traffic, "rows")

    def pooled(self) -> Tensor:
        """Wait for the rows: ``[samples, tables, dim]``."""
        module = self._module
        received = self._wait()
        with module.traffic.timed():
            pooled = module.weight.new_empty(
                self._samples, len(module.table_rows), module.embedding_dim
            )
            for tables, data in zip(self._tables, received, strict=True):
                rows = module.decode(data, self._samples * len(tables))
                pooled[:, tables] = rows.view(self._samples, -1, module.embedding_dim)
        return DeliverRows.apply(module.weight, pooled, self.send_gradient)

    def send_gradient(self, pooled_gradient: Tensor) -> None:
        """Send each owner the gradient of its rows; it arrives when backward ends."""
        module = self._module
        with module.traffic.timed():
            parts = [
                pooled_gradient[:, tables].reshape(-1, module.embedding_dim)
                for tables in self._tables
            ]
            payloads = {rank: module.encode(part) for rank, part in enumerate(parts)}
            sizes = {
                rank: module.num_bytes(len(places)) for rank, places in enumerate(self._places)
            }
        wait = module.exchange_group.start(payloads, sizes, module.traffic, "gradients")

        def finish() -> None:
            received = wait()
            with module.traffic.timed():
                for places, data in zip(self._places, received, strict=True):
                    module.collected.add(places, module.decode(data, len(places)))
                module.collected.deliver(
                    module.weight,
                    module.placement.world_size,
                    module.resolve,
                    module.reads,
                    module.num_places,
                )

        torch.autograd.Variable._execution_engine.queue_callback(finish)


class TorchRecTables(nn.Module):
    """TorchRec's sharded tables, each whole on one rank, with row-wise Adagrad fused into their
    backward.

    ``row_format`` is that of its codecs for rows and gradients, such as ``"fp32"``, ``"fp16"`` or
    ``"int8"``.
    """

    def __init__(self, table_rows: list[int], embedding_dim: int, row_format: str) -> None:
        super().__init__()
        self._table_rows = table_rows
        self._dim = embedding_dim
        self._row_format = row_format

    def materialize(self) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.fbgemm_qcomm_codec import (
            CommType,
            QCommsConfig,
            get_qcomm_codecs_registry,
        )
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
        from torchrec.distributed.types import ShardingEnv
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        if hasattr(self, "tables"):
            return
        self._names = [f"table{number}" for number in range(len(self._table_rows))]
        configs = [
            EmbeddingBagConfig(
                name=name, embedding_dim=self._dim, num_embeddings=rows, feature_names=[name]
            )
            for name, rows in zip(self._names, self._table_rows, strict=True)
        ]
        whole = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.03}
        precision = CommType(self._row_format)
        codecs = get_qcomm_codecs_registry(
            QCommsConfig(forward_precision=precision, backward_precision=precision)
        )
        sharder = EmbeddingBagCollectionSharder(
            fused_params=fused, qcomm_codecs_registry=None if self._row_format == "fp32" else codecs
        )
        world_size = dist.get_world_size()
        owners = place_tables(self._table_rows, world_size).first_rank
        plan = construct_module_sharding_plan(
            whole,
            per_param_sharding={
                name: table_wise(rank=owner, compute_kernel="fused")
                for name, owner in zip(self._names, owners, strict=True)
            },
            sharder=sharder,
            local_size=1,
            world_size=world_size,
            device_type="cpu",
        )
        group = dist.group.WORLD
        assert group is not None
        self.tables = sharder.shard(
            whole, plan, ShardingEnv.from_process_group(group), torch.device("cpu")
        )

    def request(self, ids: Tensor) -> TorchRecTables:
        """Ask for rows; TorchRec's own pipelines are not used."""
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        self._pooled = self.tables(
            KeyedJaggedTensor(self._names, ids.t().reshape(-1), lengths=lengths)
        )
        self._samples = len(ids)
        return self

    def pooled(self) -> Tensor:
        """Wait for the rows: ``[samples, tables, dim]``."""
        return self._pooled.values().view(self._samples, -1, self._dim)
