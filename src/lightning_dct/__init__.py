"""Dynamic Communication Thresholding for PyTorch Lightning: a tenth to a hundredth of the bytes.

Importing this package registers the strategy names ``dct``, ``dct_spawn``, ``dct_fork``,
``dct_notebook`` and ``dct_find_unused_parameters_true``, ``dct_pipeline`` with three of these
endings, ``dct_fsdp`` and ``dct_elastic`` with ``lightning.pytorch.Trainer``, now or when that is
imported. :class:`Updates` in a plain loop needs no Lightning.

CONTRIBUTING.md has a map of the modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_dct.__about__ import __version__
from lightning_dct.activations.split_point import SplitPoint, subspace
from lightning_dct.checksums import CheckpointError
from lightning_dct.config import DCTConfig
from lightning_dct.embedding.growing import GrowingEmbeddingBags
from lightning_dct.embedding.optimizers import AdamWithRows, RowWiseAdagrad
from lightning_dct.embedding.sharded import ShardedEmbeddingBags, ShardedEmbeddings
from lightning_dct.embedding.string_ids import string_ids
from lightning_dct.embedding.tables import EmbeddingTable
from lightning_dct.embedding.whole_tables import gather_tables
from lightning_dct.failures.process_group import init_process_group
from lightning_dct.pipeline.sequential import SplitSequential
from lightning_dct.registration import register_strategies
from lightning_dct.sync.plain_loop import Gradients, Updates

if TYPE_CHECKING:
    from lightning_dct.callbacks.compression_monitor import CompressionMonitor, CompressionRatio
    from lightning_dct.callbacks.schedules import (
        AccordionSchedule,
        EmbeddingPruning,
        ThresholdRefresh,
    )
    from lightning_dct.elastic.elastic_strategy import DCTElasticStrategy
    from lightning_dct.fsdp.fsdp_strategy import DCTFSDPStrategy
    from lightning_dct.pipeline.pipeline_strategy import DCTPipelineStrategy
    from lightning_dct.strategy import DCTStrategy

__all__ = [
    "AccordionSchedule",
    "AdamWithRows",
    "CheckpointError",
    "CompressionMonitor",
    "CompressionRatio",
    "DCTConfig",
    "DCTElasticStrategy",
    "DCTFSDPStrategy",
    "DCTPipelineStrategy",
    "DCTStrategy",
    "EmbeddingPruning",
    "EmbeddingTable",
    "Gradients",
    "GrowingEmbeddingBags",
    "RowWiseAdagrad",
    "ShardedEmbeddingBags",
    "ShardedEmbeddings",
    "SplitPoint",
    "SplitSequential",
    "ThresholdRefresh",
    "Updates",
    "__version__",
    "gather_tables",
    "init_process_group",
    "string_ids",
    "subspace",
]

# Names whose modules import Lightning or torchmetrics.
_PLACES = {
    "AccordionSchedule": "callbacks.schedules",
    "CompressionMonitor": "callbacks.compression_monitor",
    "CompressionRatio": "callbacks.compression_monitor",
    "DCTElasticStrategy": "elastic.elastic_strategy",
    "DCTFSDPStrategy": "fsdp.fsdp_strategy",
    "DCTPipelineStrategy": "pipeline.pipeline_strategy",
    "DCTStrategy": "strategy",
    "EmbeddingPruning": "callbacks.schedules",
    "ThresholdRefresh": "callbacks.schedules",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return __all__


register_strategies()
