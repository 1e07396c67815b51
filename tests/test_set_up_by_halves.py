"""Strategies that are set up by halves, as Lightning's own tests do it: no module, or a stand-in
for one.
"""

import os
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_dct import DCTPipelineStrategy, DCTStrategy


@pytest.fixture
def no_group_afterwards() -> Iterator[None]:
    # Lightning leaves the rest of the address there.
    with patch.dict(os.environ, {"MASTER_ADDR": "127.0.0.1"}):
        yield
    dist.destroy_process_group()


def test_processes_come_up_without_a_module(no_group_afterwards: None) -> None:
    trainer: Any = Trainer(strategy=DCTStrategy(), accelerator="cpu", devices=1, logger=False)
    trainer.strategy.setup_environment()
    assert dist.get_world_size() == 1


@pytest.mark.parametrize("kind", [DCTStrategy, DCTPipelineStrategy])
def test_a_stand_in_for_a_module_connects(kind: type[DCTStrategy]) -> None:
    strategy = kind()
    stand_in = Mock(wraps=BoringModel(), spec=BoringModel)
    strategy.connect(stand_in)
    assert strategy.lightning_module is stand_in
