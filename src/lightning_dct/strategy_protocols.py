"""What other modules need of a strategy, without an import of one: its ranks, its checkpoints, its
training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

    import lightning.pytorch as pl
    import torch
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment

    from lightning_dct.activations.module import CompressedModule
    from lightning_dct.config import DCTConfig
    from lightning_dct.embedding.sharded import ShardedEmbeddingBags
    from lightning_dct.failures.lifeline import Lifeline
    from lightning_dct.law import UserSettings
    from lightning_dct.sync.synchronizer import Synchronizer
    from lightning_dct.sync.updates import UpdateSynchronizer
    from lightning_dct.traffic import Traffic


class RankedStrategy(Protocol):
    """Which rank of which node this process is; any of Lightning's or Fabric's strategies."""

    @property
    def global_rank(self) -> int:
        """This rank, from 0 on."""

    @property
    def local_rank(self) -> int:
        """This rank among those of its node."""

    @property
    def node_rank(self) -> int:
        """The number of this node."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""


class StrategyWithGroup(RankedStrategy, Protocol):
    """A strategy that makes a process group."""

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Knows the address of rank 0; None for a single process."""

    def _get_process_group_backend(self) -> str: ...


class CheckpointedRank(RankedStrategy, Protocol):
    """A strategy of this package that saves a file for each rank, for the Trainer or Fabric."""

    @property
    def config(self) -> DCTConfig:
        """The settings now."""

    @property
    def stages(self) -> int:
        """The number of ranks that together hold one replica of the parameters."""

    @property
    def holds_shards(self) -> bool:
        """Whether each of those ranks has a shard of every parameter."""

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """Reads and writes files."""


class TrainerStrategy(CheckpointedRank, Protocol):
    """A strategy of this package for Lightning's Trainer, as its callbacks see it."""

    dense_rival: ClassVar[str]
    when_alone: ClassVar[str]
    user_settings: UserSettings
    has_unused: bool
    traffic: Traffic
    split_traffic: Traffic
    synchronizer: Synchronizer | None
    lifeline: Lifeline | None

    @property
    def activation_modules(self) -> Sequence[CompressedModule]:
        """The modules whose activations are compressed."""

    @property
    def updates(self) -> UpdateSynchronizer | None:
        """The synchronizer, if updates are exchanged."""

    def sharded_tables(self) -> dict[str, ShardedEmbeddingBags]:
        """The embedding tables that are sharded over the ranks, by name."""

    def set_density(self, density: float) -> None:
        """Send this share of each tensor's entries from the next exchange on."""

    def check_order(
        self, name: str, patience_s: float | None = None, *, detail: object = ""
    ) -> None:
        """Check that all ranks do the same here."""


def strategy_of(trainer: pl.Trainer) -> TrainerStrategy:
    """The strategy of a Trainer that runs one of this package's."""
    return cast("TrainerStrategy", trainer.strategy)


def synchronizer_of(trainer: pl.Trainer) -> Synchronizer:
    """The synchronizer of the fit that is running."""
    synchronizer = strategy_of(trainer).synchronizer
    assert synchronizer is not None
    return synchronizer


def updates_of(trainer: pl.Trainer) -> UpdateSynchronizer:
    """The synchronizer of the fit that is running, which exchanges updates."""
    updates = strategy_of(trainer).updates
    assert updates is not None
    return updates
