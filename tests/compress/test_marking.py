import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.compress.marking import Marked, RowLayout, Senders
from lightning_dct.compress.threshold import LIMIT_SAMPLE
from one_card import DEVICE
from strategies_for_hypothesis import examples

numbers = st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0, 1e-40, 3e38]) | st.floats(
    width=32, allow_nan=False, allow_infinity=False
)
nonfinite_too = numbers | st.sampled_from([math.nan, math.inf, -math.inf])
# Tensors of a payload: their entries, targets (0: it sends nothing) and thresholds.
Payload = Sequence[tuple[Tensor, int, float]]


def assert_equals_loop(*payloads: Payload) -> Marked:
    """One entry at a time; on the GPU where there is one."""
    every = [tensor for payload in payloads for tensor in payload]
    row = RowLayout([[entries.numel() for entries, _, _ in payload] for payload in payloads])
    used = [index for index, (_, target, _) in enumerate(every) if target]
    slots = [sum(target for _, target, _ in payload) + 1 for payload in payloads]
    senders = Senders(row, used, [every[index][1] for index in used], slots, DEVICE)
    zero = every[0][0].new_zeros(1).to(DEVICE)
    laid_out = senders.lay_out([every[index][0].to(DEVICE) for index in used], zero)
    thresholds = torch.tensor([every[index][2] for index in used], dtype=torch.float64).to(DEVICE)
    marked = senders.mark(laid_out, thresholds)
    means = senders.mean_magnitudes(marked).tolist()
    marks, slot_numbers = [False, *marked.marks.tolist()], marked.numbers.tolist()
    sender = place = slot = 0
    counts = []
    for payload, begin, own_slots in zip(payloads, row.first, slots, strict=True):
        place, number = begin, slot
        for entries, target, threshold in payload:
            values, size = entries.numpy(), entries.numel()
            picks = np.flatnonzero(~(np.abs(values) < values.dtype.type(threshold))) if target else np.array([], int)
            reached, broken = picks.size, not np.isfinite(values[picks]).all()
            if broken:
                picks = np.flatnonzero(~np.isfinite(values))
                reached = picks.size
            limit, count = 0.0, reached
            if target and reached > target and not broken:
                wanted = min(LIMIT_SAMPLE, size)
                sampled = sorted(abs(values[picks[number * reached // wanted]]) for number in range(wanted))
                limit = sampled[-math.ceil(wanted * target / reached)]
                picks = picks[~(np.abs(values[picks]) < limit)]
                count = picks.size
            if count > target:
                # Of twice as many picks as fit: the second, the fourth, and so on.
                picks = picks[[math.ceil(slot * count / target) - 1 for slot in range(1, target + 1)]]
            found = [index for index in range(size) if marks[place + index]]
            assert found == picks.tolist()
            assert [slot_numbers[place + index] for index in found] == [number + 1 + i for i in range(len(found))]
            number += len(found)
            if target:
                assert bool(marked.whole[sender]) != broken
                assert int(marked.reached[sender]) == reached
                assert broken or float(marked.limits[sender]) == limit
                assert int(marked.kept[sender]) == len(found)
                mean = np.abs(values[picks].astype(np.float64)).sum() / max(picks.size, 1)
                assert means[sender] == pytest.approx(float(np.float32(mean)), rel=1e-7, nan_ok=True)
                sender += 1
            place += size
        counts.append(number - slot)
        slot += own_slots
        # An unused slot has an entry of the padding, or one before all.
        unused = torch.arange(number + 1, slot + 1, device=DEVICE)
        assert not laid_out[torch.searchsorted(marked.numbers[:-1], unused)].any()
    assert marked.counts.tolist() == counts
    return marked


def noise(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("targets", [(1, 1, 1), (7, 1, 20), (80, 1, 4000), (7, 0, 0), (0, 0, 9)])
def test_equals_the_loop_in_one_payload_and_in_several(dtype: torch.dtype, targets: tuple[int, ...]) -> None:
    sizes, thresholds = (87, 1, 4800), (2.0, 0.1, 3.0)
    tensors = [
        (noise(size, dtype, seed), target, threshold)
        for seed, (size, target, threshold) in enumerate(zip(sizes, targets, thresholds, strict=True))
    ]
    assert_equals_loop(tensors)
    assert_equals_loop(tensors[:1], [], tensors[1:])
    assert_equals_loop([], tensors[:2], tensors[2:], tensors[:1])


def test_a_tensor_with_more_picks_than_its_target_is_sampled_regularly() -> None:
    marked = assert_equals_loop([(torch.ones(4500), 3, 0.5)])
    assert marked.marks.nonzero().squeeze(1).tolist() == [1499, 2999, 4499]
    assert marked.reached.tolist() == [4500]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_broken_entry_among_too_many_picks_is_never_lost(value: float) -> None:
    entries = torch.ones(3000)
    entries[[17, 2500]] = value
    marked = assert_equals_loop([(entries, 4, 0.5), (torch.ones(3000), 4, 0.5)])
    assert marked.marks[:3000].nonzero().squeeze(1).tolist() == [17, 2500]
    assert marked.whole.tolist() == [False, True]


@given(data=st.data(), threshold=st.sampled_from([1e-38, 0.5, 1.0, 1e30]))
@examples(60)
def test_equals_the_loop_whatever_the_numbers(data: st.DataObject, threshold: float) -> None:
    kind = data.draw(st.sampled_from([numbers, nonfinite_too]))
    tensors = []
    for entries in data.draw(st.lists(st.lists(kind, min_size=1, max_size=30), min_size=1, max_size=4)):
        target = data.draw(st.integers(0 if tensors else 1, len(entries)))
        tensors.append((torch.tensor(entries), target, threshold))
    cut = data.draw(st.integers(0, len(tensors)))
    assert_equals_loop(tensors[:cut], tensors[cut:])
