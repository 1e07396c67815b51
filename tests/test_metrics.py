import pytest
import torch

from lightning_dct import CompressionRatio
from lightning_dct.traffic import TrafficTotals


def sent(num_bytes: int, dense: int = 1000) -> TrafficTotals:
    return TrafficTotals(bytes_sent=num_bytes, bytes_dense=dense)


def test_nan_when_nothing_was_sent() -> None:
    ratio = CompressionRatio()
    ratio.update(sent(0))
    assert ratio.compute().isnan()


def test_forward_gives_the_step_and_keeps_the_sum() -> None:
    """The ratio of the sums, not the mean of ratios."""
    ratio = CompressionRatio()
    assert ratio(sent(10)).item() == 100.0
    assert ratio(sent(190)).item() == pytest.approx(1000 / 190)
    assert ratio.compute().item() == 10.0
    assert (ratio.compute().dtype, ratio.compute().shape) == (torch.float64, ())


def test_merge_of_two_ranks() -> None:
    mine = CompressionRatio()
    theirs = CompressionRatio()
    mine.update(sent(10))
    theirs.update(sent(90, dense=4000))
    mine.merge_state(theirs)
    assert mine.compute().item() == 50.0


def test_counts_beyond_what_fp32_can_hold() -> None:
    ratio = CompressionRatio()
    for _ in range(3):
        ratio.update(sent(1, dense=2**40 + 1))
    assert ratio.compute().item() == 2**40 + 1
