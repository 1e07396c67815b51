"""The package against `lightning_dct.reference`, bit for bit, in one process; tests of exactness
have ranks.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct import DCTConfig, reference
from lightning_dct.compress.bucket_plan import (
    Bucket,
    BucketPlan,
    ExchangeContext,
    Gain,
    Received,
    plan_bucket,
)
from lightning_dct.compress.codec import compress, decompress
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.config import VALUE_FORMATS
from lightning_dct.kernels.bits import unpack_bits
from lightning_dct.reference import Settings, State
from lightning_dct.wire.positions import PositionCode
from lightning_dct.wire.values import decode_values, encode_values
from strategies_for_hypothesis import examples

SHARED = set(vars(Settings())) - {"ranks_per_node", "exchange", "local_steps"}
formats = st.sampled_from(VALUE_FORMATS)
dtypes = st.sampled_from([torch.float32, torch.float64])


@st.composite
def tensors(draw: st.DrawFn, size: int) -> Tensor:
    """Heavy tails, ties and zeros, the largest and the smallest floats; now and then what is
    infinite or NaN.
    """
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    entries = torch.randn(size, generator=noise).pow(3)
    kind = draw(st.sampled_from(["smooth", "smooth", "ties", "extreme", "broken"]))
    if kind == "ties":
        return entries.round()
    if kind == "extreme":
        return (
            (entries * 10 ** (80 * torch.rand(size, generator=noise).double() - 42))
            .clamp(-3.4e38, 3.4e38)
            .float()
        )
    if kind == "broken":
        entries[torch.rand(size, generator=noise) < 0.1] = draw(
            st.sampled_from([math.nan, math.inf, -math.inf])
        )
    return entries


def same(one: Tensor, other: Tensor) -> bool:
    """Every bit but those of a NaN, and the sign of zero."""
    return one.dtype == other.dtype and torch.equal(
        one.nan_to_num(nan=7.0), other.nan_to_num(nan=7.0)
    )


def test_settings_are_those_of_the_package() -> None:
    assert {name: getattr(Settings(), name) for name in SHARED} == {
        name: getattr(DCTConfig(), name) for name in SHARED
    }
    assert Settings().local_steps == DCTConfig().local_steps


@given(
    values=st.integers(0, 400).flatmap(tensors), data=st.data(), value_format=formats, dtype=dtypes
)
@examples(60)
def test_values(values: Tensor, data: st.DataObject, value_format: str, dtype: torch.dtype) -> None:
    """Of three tensors with a scale each."""
    sizes = torch.tensor(
        [len(values) // 3, data.draw(st.integers(0, len(values) - len(values) // 3))]
    )
    sizes = [*sizes.tolist(), len(values) - int(sizes.sum())]
    values = values.to(dtype)
    encoded, scales = encode_values(values, sizes, value_format, "torch")
    decoded = decode_values(encoded, sizes, scales, value_format, kernel="torch")
    assert same(
        decoded, torch.cat([reference.as_read(part, value_format) for part in values.split(sizes)])
    )


@given(data=st.data(), size=st.integers(0, 3000))
@examples(60)
def test_positions(data: st.DataObject, size: int) -> None:
    positions = sorted(data.draw(st.sets(st.integers(0, size - 1), max_size=60))) if size else []
    code = PositionCode(size, data.draw(st.integers(len(positions), size)))
    bits = unpack_bits(code.encode(torch.tensor(positions, dtype=torch.int64)), code.num_bits)
    assert bits.tolist() == reference.position_bits(positions, size, code.capacity)


@given(
    size=st.integers(1, 10**6),
    density=st.floats(1e-6, 1),
    passes=st.integers(1, 9),
    dtype=dtypes,
    form=formats,
)
@examples(60)
def test_targets(size: int, density: float, passes: int, dtype: torch.dtype, form: str) -> None:
    settings = Settings(density=density, value_format=form)
    plan = plan_bucket(["a"], [size], [density], dtype, form, settings.min_tensor_size, passes)
    assert plan.targets == (reference.target_of(torch.empty(size, dtype=dtype), passes, settings),)


@pytest.mark.parametrize("kernel", ["torch", "numba"])
@given(
    data=st.data(),
    value_format=formats,
    dtype=dtypes,
    adapt_threshold=st.booleans(),
    ranks=st.integers(1, 3),
)
@examples(60)
def test_what_ranks_send_what_arrives_and_what_they_remember(
    kernel: str, data: st.DataObject, **settings: Any
) -> None:
    ranks = settings.pop("ranks")
    dtype = settings.pop("dtype")
    sizes = tuple(data.draw(st.lists(st.integers(1, 800), min_size=1, max_size=4)))
    targets = tuple(data.draw(st.integers(0, size)) for size in sizes)
    names = tuple("abcd"[: len(sizes)])
    plan = BucketPlan(names, sizes, targets, dtype, settings["value_format"])
    feedbacks = [
        ErrorFeedback({}, settings["adapt_threshold"], undoable=False, kernel=kernel)
        for _ in range(ranks)
    ]
    residuals = [torch.zeros(sum(sizes), dtype=dtype) for _ in range(ranks)]
    held = [[State() for _ in sizes] for _ in range(ranks)]
    for _ in range(3):
        payloads = []
        sent = []
        for rank in range(ranks):
            gradient = data.draw(tensors(sum(sizes))).to(dtype)
            bucket = Bucket([gradient], [residuals[rank]], 1.0)
            out, _ = compress(feedbacks[rank], bucket, plan, set())
            payloads.append(out)
            parts = zip(gradient.split(sizes), held[rank], targets, strict=True)
            sent.append(
                [
                    reference.send(part, one, target, Settings(**settings))
                    for part, one, target in parts
                ]
            )
            assert same(
                residuals[rank], torch.cat([torch.as_tensor(one.residual) for one in held[rank]])
            )
            expected = {
                name: one.threshold
                for name, one in zip(names, held[rank], strict=True)
                if one.target
            }
            assert feedbacks[rank].thresholds.by_label() == pytest.approx(expected, rel=1e-12)
        factors = torch.rand(sum(sizes), dtype=torch.float64) + 0.5
        own_gains = dict(zip(names, factors.split(sizes), strict=True))
        known = {
            name: Gain(rows, torch.ones(1, dtype=torch.float64)) for name, rows in own_gains.items()
        }
        of_reference = {name: rows.to(dtype) for name, rows in own_gains.items()}
        for gains, expected_gains, gain in (
            ({}, {}, 1.0),
            (known, of_reference, 1.0),
            (known, of_reference, 1.2),
            ({}, {}, None),
        ):
            context = ExchangeContext(gains=gains, gain=gain)
            received = Received(torch.stack(payloads), plan, 1 / ranks, own=0, context=context)
            empty = torch.empty(sum(sizes), dtype=dtype)
            got = decompress(feedbacks[0], received, empty)
            means = [
                reference.weighted_sum(
                    [one[number] for one in sent],
                    1 / ranks,
                    not target,
                    expected_gains.get(names[number], reference.ONE),
                    gain,
                )
                for number, target in enumerate(targets)
            ]
            assert same(got, torch.cat(means))
