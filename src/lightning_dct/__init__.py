"""Dynamic Communication Thresholding for PyTorch Lightning: a tenth to a hundredth of the bytes.

Importing this package registers the strategy names ``dct``, ``dct_spawn``, ``dct_fork``, ``dct_notebook`` and
``dct_find_unused_parameters_true``, ``dct_pipeline`` with three of these endings, ``dct_fsdp`` and ``dct_elastic``,
with ``lightning.pytorch.Trainer``.

CONTRIBUTING.md has a map of the modules.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dct.__about__ import __version__
from lightning_dct.activations.split_point import SplitPoint
from lightning_dct.activations.subspace import subspace
from lightning_dct.callbacks.accordion import AccordionSchedule
from lightning_dct.callbacks.compression_monitor import CompressionMonitor
from lightning_dct.callbacks.embedding_pruning import EmbeddingPruning
from lightning_dct.callbacks.threshold_refresh import ThresholdRefresh
from lightning_dct.checksums import CheckpointError
from lightning_dct.config import DCTConfig
from lightning_dct.elastic.elastic_strategy import DCTElasticStrategy
from lightning_dct.embedding.growing import GrowingEmbeddingBags
from lightning_dct.embedding.optimizers import RowWiseAdagrad
from lightning_dct.embedding.sharded import ShardedEmbeddingBags
from lightning_dct.fsdp.fsdp_strategy import DCTFSDPStrategy
from lightning_dct.metrics import CompressionRatio
from lightning_dct.pipeline.pipeline_strategy import DCTPipelineStrategy
from lightning_dct.pipeline.sequential import SplitSequential
from lightning_dct.strategy import DCTStrategy
from lightning_dct.sync.plain_loop import Updates

__all__ = [
    "AccordionSchedule",
    "CheckpointError",
    "CompressionMonitor",
    "CompressionRatio",
    "DCTConfig",
    "DCTElasticStrategy",
    "DCTFSDPStrategy",
    "DCTPipelineStrategy",
    "DCTStrategy",
    "EmbeddingPruning",
    "GrowingEmbeddingBags",
    "RowWiseAdagrad",
    "ShardedEmbeddingBags",
    "SplitPoint",
    "SplitSequential",
    "ThresholdRefresh",
    "Updates",
    "__version__",
    "subspace",
]

for _strategy in (DCTStrategy, DCTPipelineStrategy, DCTFSDPStrategy, DCTElasticStrategy):
    _strategy.register_strategies(StrategyRegistry)
