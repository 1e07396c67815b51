"""Dynamic Communication Thresholding for PyTorch Lightning: a hundredth of the gradient bytes.

Importing this package registers the strategy names ``dct``, ``dct_spawn``, ``dct_fork``, ``dct_notebook``,
``dct_auto`` and ``dct_find_unused_parameters_true``, ``dct_pipeline`` with three of these endings, ``dct_fsdp`` and
``dct_elastic``, with ``lightning.pytorch.Trainer``.

CONTRIBUTING.md has a map of the modules.
"""

import sys

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dct.__about__ import __version__
from lightning_dct.activations import SplitPoint, subspace
from lightning_dct.callbacks import CompressionMonitor, EmbeddingPruning, ThresholdRefresh
from lightning_dct.checkpoint import CheckpointError
from lightning_dct.config import DCTConfig
from lightning_dct.elastic import DCTElasticStrategy
from lightning_dct.embedding import GrowingEmbeddingBags, RowWiseAdagrad, ShardedEmbeddingBags
from lightning_dct.fsdp import DCTFSDPStrategy
from lightning_dct.metrics import CompressionRatio
from lightning_dct.pipeline import DCTPipelineStrategy, SplitSequential
from lightning_dct.strategy import DCTStrategy

__all__ = [
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
    "__version__",
    "subspace",
]


def _refuse_other_lightning(**_: object) -> None:
    raise TypeError(
        "strategy='dct' works with `lightning.pytorch.Trainer`; this is `pytorch_lightning.Trainer`, which has classes"
        " of its own. Replace `import pytorch_lightning as pl` by `import lightning.pytorch as pl` everywhere."
    )


for _strategy in (DCTStrategy, DCTPipelineStrategy, DCTFSDPStrategy, DCTElasticStrategy):
    _strategy.register_strategies(StrategyRegistry)
    if "pytorch_lightning.strategies" in sys.modules:
        for _name in _strategy.registered_names:
            sys.modules["pytorch_lightning.strategies"].StrategyRegistry.register(
                _name, _refuse_other_lightning, description="use lightning.pytorch.Trainer", override=True
            )
