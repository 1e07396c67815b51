"""With everything sent in fp32, replicas that DCTFSDPStrategy keeps together train as torch's own HSDP does."""

from typing import Any
from unittest import mock

import pytest
import torch

from distributed.training import assert_weights_close
from fsdp.training import Documented, Native, Plain, fsdp, hsdp, train
from lightning_dct.fsdp import shard_gradients

DENSE = {"density": 1.0, "value_format": "fp32"}


def train_natively(**settings: Any) -> dict[str, Any]:
    return train(hsdp(), Native(lr=0.05), **settings)


def train_here(kind: type, strategy: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    return train(fsdp(**DENSE, **strategy), kind(lr=0.05), **trainer)


@pytest.mark.parametrize(
    ("kind", "strategy", "trainer"),
    [
        (Plain, {"compress": "updates", "local_steps": 1}, {}),
        (Documented, {"compress": "gradients"}, {}),
        (Plain, {"compress": "gradients"}, {"accumulate_grad_batches": 2}),
        (Plain, {"compress": "gradients"}, {"gradient_clip_val": 0.05}),
    ],
)
def test_trains_as_hsdp_does(ranks: Any, kind: type, strategy: dict[str, Any], trainer: dict[str, Any]) -> None:
    """Oracle: fully_shard over a mesh of 2 x 2."""
    batches = {"batches": 20 * trainer.get("accumulate_grad_batches", 1), **trainer}
    native = ranks(4).run(train_natively_with, batches)
    runs = ranks(4).run(train_here, kind, strategy, batches)
    for run, expected in zip(runs, native, strict=True):
        weights = {name: tensor for name, tensor in run["weights"].items() if "running" not in name}
        assert_weights_close({name: expected["weights"][name] for name in weights}, weights, rtol=0, atol=1e-6)


def train_natively_with(settings: dict[str, Any]) -> dict[str, Any]:
    return train_natively(**settings)


def shards_kept() -> int:
    with mock.patch.object(shard_gradients, "_keep_for_this_stream") as keep:
        train(fsdp(compress="gradients"), Plain(lr=0.05), 4, accumulate_grad_batches=2)
    return keep.call_count


def test_memory_of_other_streams_is_kept_until_it_is_read(ranks: Any) -> None:
    """FSDP's sum of each unit in each of four micro-batches, and in each of two steps what waits for it."""
    kept = ranks(4).run(shards_kept)
    assert min(kept) >= 6
    tensor = mock.Mock(is_cuda=True)
    with mock.patch("torch.cuda.current_stream", return_value="stream"):
        shard_gradients._keep_for_this_stream(tensor)
    tensor.record_stream.assert_called_once_with("stream")
    shard_gradients._keep_for_this_stream(torch.zeros(3))
