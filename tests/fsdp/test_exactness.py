"""With everything sent in fp32, replicas that DCTFSDPStrategy keeps together train as torch's own
HSDP does.
"""

from typing import Any

import pytest

from distributed.training import assert_weights_close
from fsdp.training import Documented, Native, Plain, fsdp, hsdp, train

DENSE = {"density": 1.0, "value_format": "fp32", "local_steps": 1}


def train_natively(settings: dict[str, Any]) -> dict[str, Any]:
    return train(hsdp(), Native(lr=0.05), **settings)


def train_here(kind: type, trainer: dict[str, Any]) -> dict[str, Any]:
    return train(fsdp(**DENSE), kind(lr=0.05), **trainer)


@pytest.mark.parametrize(
    ("kind", "trainer"), [(Plain, {}), (Documented, {"accumulate_grad_batches": 2})]
)
def test_trains_as_hsdp_does(ranks: Any, kind: type, trainer: dict[str, Any]) -> None:
    """Oracle: fully_shard over a mesh of 2 x 2.

    The mean of the steps of SGD is a step with the mean gradient.
    """
    batches = {"batches": 20 * trainer.get("accumulate_grad_batches", 1), **trainer}
    native = ranks(4).run(train_natively, batches)
    runs = ranks(4).run(train_here, kind, batches)
    for run, expected in zip(runs, native, strict=True):
        weights = {name: tensor for name, tensor in run["weights"].items() if "running" not in name}
        assert_weights_close(
            {name: expected["weights"][name] for name in weights}, weights, rtol=0, atol=1e-6
        )
