"""What a strategy changes for sharded tables ends with it."""

from types import SimpleNamespace

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn

from lightning_dct import DCTStrategy
from lightning_dct.embedding.hosting import install_clipping


def test_clipping_is_lightnings_own_again_after_teardown() -> None:
    precision = Precision()
    strategy = DCTStrategy(
        CPUAccelerator(), precision_plugin=precision, cluster_environment=LightningEnvironment(), parallel_devices=[]
    )
    table = SimpleNamespace(weight=nn.Parameter(torch.ones(3)), exchange_group=SimpleNamespace(group=None))
    install_clipping(precision, {"table": table})  # type: ignore[dict-item]
    assert {"clip_grad_by_norm", "clip_grad_by_value"} <= vars(precision).keys()
    strategy.teardown()
    assert not {"clip_grad_by_norm", "clip_grad_by_value"} & vars(precision).keys()
