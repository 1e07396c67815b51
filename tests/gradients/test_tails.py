"""Entries shared out by tails, against a common threshold found by sorting everything."""

from typing import Any

import pytest
import torch
from emulated_ranks import EmulatedRanks
from torch import Tensor

from lightning_dct.gradients.between_steps import count_tails, share_out_by_tails, tails_are_counted
from lightning_dct.gradients.tails import MULTIPLES, Tails, share_out_entries

SIZES = {"light": 4000, "heavy": 4000, "scaled": 4000}


def tensors(seed: int) -> dict[str, Tensor]:
    """Noise, noise to the third, and noise to the second in other units."""
    noise = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(size, generator=noise) for name, size in SIZES.items()}
    return {"light": drawn["light"], "heavy": drawn["heavy"] ** 3, "scaled": 1e4 * drawn["scaled"].abs() ** 2}


def in_units_of_size(values: Tensor) -> Tensor:
    return values.abs() / values.square().mean().sqrt()


def by_sorting(given: dict[str, Tensor], entries: int) -> dict[str, int]:
    """The largest of all tensors, each in units of its root mean square."""
    together = torch.cat([in_units_of_size(values) for values in given.values()])
    threshold = together.sort(descending=True).values[entries - 1]
    return {name: int((in_units_of_size(values) >= threshold).sum()) for name, values in given.items()}


def counted(given: dict[str, Tensor]) -> Tails:
    tails = Tails(given)
    for name, values in given.items():
        tails.add(name, values)
    return tails


def test_counts() -> None:
    """Oracle: comparing; a piece counts for its tensor, infinite entries as zero, sums and unknown names not at all."""
    given = tensors(0)
    tails = counted(given)
    for row, values in enumerate(given.values()):
        for column in (0, 1, 40, 100, 256):
            assert tails.counts[row, column] == int((in_units_of_size(values) >= MULTIPLES[column]).sum())
    pieces = Tails(given)
    broken = given["light"].clone()
    broken[[3, 5]] = torch.tensor([float("nan"), float("inf")])
    mended = broken.nan_to_num(0.0, 0.0, 0.0)
    pieces.add("light[0:4000]", broken)
    pieces.add("sum of light", broken)
    pieces.add("heavy", torch.zeros(9))
    assert torch.equal(pieces.counts[0], counted({"light": mended}).counts[0])
    assert not pieces.counts[1:].any()


@pytest.mark.parametrize("density", [0.1, 0.01])
def test_one_threshold_in_units_of_each_size(density: float) -> None:
    """Oracle: sorting."""
    given, targets = tensors(1), [int(4000 * density)] * 3
    shares = share_out_entries(counted(given).counts.tolist(), [4000] * 3, targets, 16, bound=100)
    expected = by_sorting(given, sum(targets))
    assert sum(targets) * 0.98 <= sum(shares) <= sum(targets)
    for share, name in zip(shares, SIZES, strict=True):
        assert share == pytest.approx(expected[name], rel=0.05, abs=2)
    assert (shares[0] < shares[1]) == (density == 0.01)


def test_bounds_and_equal_tensors() -> None:
    """Oracle: a half and twice; what is alike keeps what it has."""
    given = tensors(2)
    shares = share_out_entries(counted(given).counts.tolist(), [4000] * 3, [40] * 3, 16, bound=2)
    assert all(20 <= share <= 80 for share in shares)
    assert min(shares) == 20
    alike = torch.tile(counted({"light": given["light"]}).counts, (3, 1)).tolist()
    assert share_out_entries(alike, [4000] * 3, [40] * 3, 16, bound=4) == pytest.approx([40] * 3, abs=1)
    assert share_out_entries(alike, [4000] * 3, [40] * 3, 16, bound=1) == [40] * 3


@pytest.mark.parametrize("exchange", ["all_gather", "sharded", "by_node"])
def test_ranks_agree_and_send_no_more(exchange: str) -> None:
    """Oracle: bytes before; the counting itself; which tensor gets more."""
    settings: dict[str, Any] = {"density": 0.01, "value_format": "bf16", "guard": False}
    per_node = 2 if exchange == "by_node" else 1
    ranks = EmulatedRanks(SIZES, 4, exchange, ranks_per_node=per_node, **settings)

    def step(seed: int) -> int:
        before = [synchronizer.traffic.totals.bytes_sent for synchronizer in ranks.synchronizers]
        ranks.step([tensors(100 * seed + rank) for rank in range(4)])
        return sum(s.traffic.totals.bytes_sent for s in ranks.synchronizers) - sum(before)

    usual = step(0)
    for synchronizer in ranks.synchronizers:
        count_tails(synchronizer)
        assert not tails_are_counted(synchronizer)
    step(1)
    assert all(tails_are_counted(synchronizer) for synchronizer in ranks.synchronizers)
    before = ranks.synchronizers[0].traffic.totals.bytes_sent
    factors = ranks.together(lambda synchronizer: share_out_by_tails(synchronizer, 4))
    counts = 3 * len(MULTIPLES) * 8 * 2 * (4 - 1) // 4
    assert ranks.synchronizers[0].traffic.totals.bytes_sent - before == counts // per_node
    for synchronizer, found in zip(ranks.synchronizers, factors, strict=True):
        assert found == factors[0]
        assert not tails_are_counted(synchronizer)
    assert 0.25 <= factors[0]["light"] < 0.7 < 1.2 < factors[0]["heavy"] <= 4.0
    # Every rank reads what the others send now: plans that differ would be an error. Pieces round up.
    assert step(2) <= usual * (1.0 if exchange == "all_gather" else 1.01)
