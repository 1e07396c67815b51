"""The synchronisations that the benchmark compares, by their names in tables and plots."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, Strategy

from hsdp import HSDPStrategy
from lightning_dct import DCTFSDPStrategy, DCTStrategy
from rivals.hooks import CountedDDPStrategy

NOTHING = "no synchronisation"
DDP = "DDP, fp32"
"""The references."""

# PowerSGD refuses to compress the first two steps.
_POWERSGD_START = 2
# The share of a run that torch's documentation advises for PowerSGD's dense start.
_POWERSGD_DENSE_SHARE = 0.1


def _peer(synchronisation: str, **settings: float) -> Callable[[int], DDPStrategy]:
    return lambda steps: CountedDDPStrategy(synchronisation, **settings)


def _powersgd(rank: int) -> Callable[[int], DDPStrategy]:
    def make(steps: int) -> DDPStrategy:
        start = max(_POWERSGD_START, int(_POWERSGD_DENSE_SHARE * steps))
        return CountedDDPStrategy("powersgd", rank=rank, start_step=start)

    return make


def _gradients(density: float, value_format: str) -> Callable[[int], DDPStrategy]:
    return lambda steps: DCTStrategy(
        compress="gradients", density=density, value_format=value_format
    )


def _updates(**settings: Any) -> Callable[[int], DDPStrategy]:
    # Rounds of the warm-up are shorter.
    return lambda steps: DCTStrategy(**settings, warmup_steps=0)


SYNCHRONISATIONS: dict[str, Callable[[int], Strategy]] = {
    NOTHING: _peer("none"),
    DDP: _peer("fp32"),
    "DDP, fp16 hook": _peer("fp16"),
    "DDP, bf16 hook": _peer("bf16"),
    "PowerSGD, rank 1": _powersgd(1),
    "PowerSGD, rank 4": _powersgd(4),
    "top-k, 1%": _peer("top_k", density=0.01),
    "DCT, 1%, bf16": _gradients(0.01, "bf16"),
    "DCT, 1%, 1 bit": _gradients(0.01, "1bit"),
    "DCT, 3%, 1 bit": _gradients(0.03, "1bit"),
    "DCT, 0.1%, bf16": _gradients(0.001, "bf16"),
    "DCT, updates, 8 steps, 30%": _updates(local_steps=8, density=0.3),
    "DCT, updates, 4 steps, 15%": _updates(local_steps=4, density=0.15),
    "DCT, updates, 1 step, 3%": _updates(local_steps=1, density=0.03),
    "DCT, updates, 64 steps, 10%": _updates(local_steps=64, density=0.1),
    "DCT, updates, 64 steps, 10%, overlapped": _updates(
        local_steps=64, density=0.1, overlap_steps=64
    ),
    "HSDP, fp32": lambda steps: HSDPStrategy(),
    "dct_fsdp, updates": lambda steps: DCTFSDPStrategy(warmup_steps=0),
}
"""Makes a strategy, given the steps of the run; compression must begin within them."""
