"""The contract: plain torch, numba and Triton pack the same bytes, and add the same numbers to the
last bit.

Triton's kernels run in its interpreter, or on a card.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from interpreted import WAYS, bits, device_of, way_of
from lightning_dct.compress import on_gpu
from lightning_dct.compress.bucket_plan import (
    Bucket,
    BucketPlan,
    ExchangeContext,
    Gain,
    Received,
)
from lightning_dct.compress.codec import apply, compress, decompress
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.exchange.sharding import sums_of
from lightning_dct.wire.payload import unpack_payload
from lightning_dct.wire.positions import PayloadError
from strategies_for_hypothesis import FORMATS, examples

# Bitmaps; the second and the last tensor are sent dense, and the fourth has flags beyond its end.
PLAN = BucketPlan(
    ("a", "b", "c", "d", "e"), (2300, 50, 200, 33, 1), (700, 0, 60, 9, 0), torch.float32, "bf16"
)
# Elias-Fano, with five low bits and more, and with fewer.
FEW = replace(PLAN, targets=(20, 0, 2, 1, 0))
SOME = replace(PLAN, targets=(200, 0, 20, 3, 0))
PLANS = {"bitmap": PLAN, "few": FEW, "some": SOME}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Rank:
    """One rank that packs bucket after bucket one of the ways, and adds the payload beside the one
    before.
    """

    tag = 7

    def __init__(
        self, way: str, plan: BucketPlan, of_updates: bool, adapt_threshold: bool = True
    ) -> None:
        self.way = way
        self.plan = plan
        self.of_updates = of_updates
        self.device = device_of(way)
        with way_of(way) as kernel:
            self.feedback = ErrorFeedback({}, adapt_threshold, undoable=False, kernel=kernel)
        self.before: Tensor | None = None
        length = plan.bounds[-1][1] if plan.sizes else 1
        self.base = torch.zeros(length + 2, dtype=plan.residual_dtype, device=self.device)
        self.own = self.base.clone()

    def step(
        self,
        inputs: Tensor,
        deferred: set[int],
        ranks_keep_unsent: bool = False,
        dropped: float = 0.0,
    ) -> dict[str, Any]:
        """What it has sent, and what is left everywhere."""
        with way_of(self.way):
            self.feedback.selected = False
            scale = None if self.of_updates else 0.5
            new = (
                self.own.add_(inputs.to(self.device)) if self.of_updates else inputs.to(self.device)
            )
            bucket = Bucket([new], [self.base], scale, ranks_keep_unsent)
            sent, entries = compress(
                self.feedback,
                bucket,
                self.plan,
                deferred,
                ExchangeContext(self.tag, dropped=dropped),
            )
            kept = {
                "base": self.base.cpu().clone(),
                "own": self.own.cpu().clone(),
                "sent": sent.cpu(),
            }
            payloads = torch.stack([sent, sent if self.before is None else self.before])
            self.before = sent
            for gain in (1.0, 1.3, None):
                context = ExchangeContext(self.tag, gains=gains_for(self.plan), gain=gain)
                received = Received(payloads, self.plan, 0.4, 0, context=context)
                if self.of_updates and gain is None:
                    apply(self.feedback, received, bucket)
                    kept |= {
                        "base after": self.base.cpu().clone(),
                        "own after": self.own.cpu().clone(),
                    }
                else:
                    kept[f"mean {gain}"] = decompress(
                        self.feedback, received, torch.full_like(new, 3.0)
                    ).cpu()
            self.feedback.awaited.synchronize()
            kept["entries"] = (
                int(torch.as_tensor(entries).sum()),
                self.feedback.selected,
            )
            return kept


def gains_for(plan: BucketPlan) -> dict[str, Gain]:
    """Of every other tensor: rows of one to seven entries."""
    made = torch.Generator().manual_seed(3)
    gains = {}
    for number, (name, size) in enumerate(zip(plan.names, plan.sizes, strict=True)):
        if number % 2 == 0:
            width = next(width for width in (7, 5, 4, 3, 2, 1) if size % width == 0)
            rows, columns = (
                torch.rand(n, dtype=torch.float64, generator=made) + 0.5
                for n in (size // width, width)
            )
            gains[name] = Gain(rows, columns)
    return gains


def assert_same_ways(
    plan: BucketPlan, steps: list[tuple[Tensor, set[int]]], of_updates: bool = False, **given: Any
) -> None:
    """All bits the same, and thresholds to the last but one."""
    adapt_threshold = given.pop("adapt_threshold", True)
    expected, *others = (Rank(way, plan, of_updates, adapt_threshold) for way in WAYS)
    for inputs, deferred in steps:
        wanted = expected.step(inputs, deferred, **given)
        for other in others:
            found = other.step(inputs, deferred, **given)
            assert wanted.pop("entries", None) in (found["entries"], None)
            sent = [unpack_without_tag(plan, kept["sent"]) for kept in (wanted, found)]
            for name, numbers in wanted.items():
                # Which of its many bit patterns a NaN has depends on its place in the processor's
                # vectors.
                nans = name == "sent" and any(bool(one.values.isnan().any()) for one in sent)
                assert nans or assert_same(numbers, found[name]), (other.way, name)
            assert torch.equal(sent[0].positions, sent[1].positions)
            assert assert_same(sent[0].values, sent[1].values)
            thresholds, of_other = (
                rank.feedback.thresholds.state_dict() for rank in (expected, other)
            )
            assert thresholds["targets"] == of_other["targets"]
            assert of_other["values"] == pytest.approx(thresholds["values"], rel=1e-13)


def assert_same(numbers: Tensor, others: Tensor) -> bool:
    if numbers.is_floating_point():
        nans = numbers.isnan()
        return torch.equal(nans, others.isnan()) and torch.equal(
            bits(numbers)[~nans], bits(others)[~nans]
        )
    return torch.equal(numbers, others)


def unpack_without_tag(plan: BucketPlan, payload: Tensor) -> Any:
    plain = payload.clone()
    plain[8] ^= Rank.tag
    return unpack_payload(plan.layout, plain)


def noise(plan: BucketPlan, steps: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randn(plan.bounds[-1][1] + 2, generator=generator).pow(3).to(plan.dtype)


@pytest.mark.parametrize(
    ("value_format", "dtype", "code"),
    [
        ("1bit", torch.float32, "few"),
        pytest.param("1bit", torch.bfloat16, "bitmap", marks=pytest.mark.slow),
        ("2bit", torch.float32, "bitmap"),
        pytest.param("2bit", torch.float64, "some", marks=pytest.mark.slow),
        pytest.param("bf16", torch.float16, "some", marks=pytest.mark.slow),
        pytest.param("fp32", torch.float64, "few", marks=pytest.mark.slow),
    ],
)
def test_gradients(value_format: str, dtype: torch.dtype, code: str) -> None:
    """With gaps between the tensors, and tensors of which nothing is sent."""
    plan = replace(
        PLANS[code], value_format=value_format, dtype=dtype, starts=(1, 2302, 2360, 2561, 2600)
    )
    deferred = [set(), {0, 1}]
    assert_same_ways(plan, list(zip(noise(plan, len(deferred)), deferred, strict=True)))


@pytest.mark.parametrize(
    ("value_format", "dropped"),
    [
        ("1bit", 0.0),
        ("bf16", 0.1),
        *(pytest.param(name, 0.1, marks=pytest.mark.slow) for name in ("1bit", "2bit", "fp32")),
    ],
)
def test_updates(value_format: str, dropped: float) -> None:
    dtype = torch.float64 if value_format == "2bit" else torch.float32
    plan = replace(SOME if dropped else PLAN, value_format=value_format, dtype=dtype)
    assert_same_ways(
        plan, [(inputs, set()) for inputs in noise(plan, 2)], of_updates=True, dropped=dropped
    )


def test_sums_whose_rest_ranks_keep() -> None:
    plan = replace(SOME, value_format="2bit")
    assert_same_ways(plan, [(inputs, set()) for inputs in noise(plan, 2)], ranks_keep_unsent=True)


@pytest.mark.parametrize(
    ("value_format", "broken"),
    [
        ("1bit", math.nan),
        *(
            pytest.param(name, -math.inf, marks=pytest.mark.slow)
            for name in ("2bit", "bf16", "fp32")
        ),
    ],
)
def test_infinite_and_nan_entries_arrive_and_spare_the_residual(
    value_format: str, broken: float
) -> None:
    plan = replace(SOME, value_format=value_format)
    gradients = list(noise(plan, 2))
    gradients[0][[5, 7, 2360]] = broken
    gradients[1][2350:] = broken
    assert_same_ways(plan, [(gradient, set()) for gradient in gradients])


numbers = st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.0, 1e-40, 3e38]) | st.floats(
    width=32, allow_nan=False
)
rarely_broken = st.sampled_from([0.5, -1.0, math.nan, math.inf])


@given(data=st.data())
@examples(10)
def test_whatever_the_numbers_and_sizes(data: st.DataObject) -> None:
    """Ties, denormals, overflowing sums, empty and full selections."""
    sizes = tuple(data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=3)))
    targets = tuple(data.draw(st.integers(0, size)) for size in sizes)
    dtype = data.draw(st.sampled_from(DTYPES))
    value_format = data.draw(st.sampled_from(FORMATS))
    plan = BucketPlan(tuple("abc"[: len(sizes)]), sizes, targets, dtype, value_format)
    kind = data.draw(st.sampled_from([numbers, numbers, rarely_broken]))
    drawn = st.lists(kind, min_size=sum(sizes) + 2, max_size=sum(sizes) + 2)
    deferred = data.draw(st.sets(st.integers(0, len(sizes) - 1), max_size=1))
    inputs = torch.tensor(data.draw(drawn)).to(dtype)
    if dtype == torch.bfloat16:  # of which Triton's interpreter reads denormals wrongly
        inputs[inputs.abs() < torch.finfo(dtype).tiny] = 0.0
    steps = [(inputs, deferred)]
    assert_same_ways(plan, steps, adapt_threshold=data.draw(st.booleans()))


def test_with_too_many_picks_the_largest_go_and_the_rest_stays() -> None:
    plan = BucketPlan(("a",), (1000,), (10,), torch.float32, "fp32")
    rank = Rank("triton", plan, of_updates=False)
    rank.feedback.thresholds.set("a", 10, 0.25)
    gradient = torch.arange(1, 1003) / 1000.0
    kept = rank.step(gradient, set())
    # A sample of the 501 says that about ten reach 0.99: 11 do, of which all but the first are
    # left.
    largest = list(range(990, 1000))
    assert kept["entries"][0] == 10
    assert unpack_without_tag(plan, kept["sent"]).positions.tolist() == largest
    left = gradient.clone() / 2
    left[largest] = 0.0
    left[1000:] = 0.0
    assert torch.equal(kept["base"], left)
    # That is the next threshold, because far too many have reached this one.
    assert next(iter(rank.feedback.thresholds.by_label().values())) == pytest.approx(0.99 / 2)


@pytest.mark.parametrize("code", ["bitmap", "few"])
def test_harm_is_found_and_nothing_is_read_out_of_bounds(code: str) -> None:
    """Headers, positions beyond the end of a tensor or more than the header says, and whatever
    bytes.
    """
    plan = replace(PLANS[code], value_format="1bit")
    intact = Rank("triton", plan, of_updates=True).step(next(noise(plan, 1)), set())["sent"]
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(36, plan.num_bytes - 220, (6,), generator=generator).tolist()
    for place in [0, 1, 2, 4, 8, 29, *some]:
        payload = intact.clone()
        told = []
        payload[place] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        for way in ("numba", "triton"):
            rank = Rank(way, plan, of_updates=True)
            with way_of(way):
                rows = torch.stack([intact, payload]).to(rank.device)
                try:
                    apply(
                        rank.feedback,
                        Received(rows, plan, 0.5, own=0, context=ExchangeContext(7)),
                        Bucket([rank.own], [rank.base], None),
                    )
                    rank.feedback.awaited.synchronize()
                    told.append("")
                except PayloadError as error:
                    told.append(re.sub(r":.*| of the process group", "", str(error)))
        assert told[0] == told[1], place
    for filled in (0, 255):
        payload = torch.full_like(intact, filled)
        rank = Rank("triton", plan, of_updates=True)
        with way_of("triton"):
            rows = torch.stack([payload, payload]).to(rank.device)
            apply(
                rank.feedback,
                Received(rows, plan, 0.5, own=0, context=ExchangeContext(7)),
                Bucket([rank.own], [rank.base], None),
            )
            with pytest.raises(
                PayloadError, match=r"^Gradients from rank 0, Gradients from rank 1"
            ):
                rank.feedback.awaited.synchronize()


def test_another_tag_is_another_step() -> None:
    plan = replace(PLAN, value_format="1bit")
    for way in WAYS:
        rank = Rank(way, plan, of_updates=True)
        rank.step(next(noise(plan, 1)), set())
        assert rank.before is not None
        received = Received(rank.before[None], plan, 0.5, own=0, context=ExchangeContext(8))

        def read(rank: Rank = rank, received: Received = received) -> None:
            apply(rank.feedback, received, Bucket([rank.own], [rank.base], None))
            rank.feedback.awaited.synchronize()

        with way_of(way), pytest.raises(PayloadError, match="step"):
            read()


@pytest.mark.parametrize("sum_code", ["bitmap", "some"])
def test_own_payload_beside_the_sums(sum_code: str) -> None:
    """As of an owner: several payloads in a row, and this rank's own in another format, as far as
    it is in the sums.
    """
    parts = [replace(PLANS[sum_code], value_format="1bit", starts=(1, 2302, 2360, 2561, 2600))]
    parts.append(
        BucketPlan(("f", "g"), (90, 20), (9, 0), torch.float32, "1bit", starts=(2700, 2800))
    )
    plan = BucketPlan.joined(parts)
    sums = BucketPlan.joined([sums_of(part) for part in parts])
    ended = []
    for way in WAYS:
        with way_of(way) as kernel:
            noise_of = torch.Generator().manual_seed(3)
            feedback = ErrorFeedback({}, adapt_threshold=True, undoable=False, kernel=kernel)
            own, base, total, left = (
                torch.randn(2900, generator=noise_of).to(device_of(way)) for _ in range(4)
            )
            sent, _ = compress(
                feedback, Bucket([own], [base], None), plan, set(), ExchangeContext(9)
            )
            of_sums = ErrorFeedback({}, adapt_threshold=True, undoable=False, kernel=kernel)
            spread, _ = compress(
                of_sums, Bucket([total], [left], 1.0), sums, set(), ExchangeContext(9)
            )
            mine = Received(sent[None], plan, 1.0, own=None)
            received = Received(
                spread[None], sums, 0.25, mine, label="Sums", context=ExchangeContext(9)
            )
            apply(feedback, received, Bucket([own], [base], None))
            feedback.awaited.synchronize()
            ended.append([sent.cpu(), spread.cpu(), own.cpu(), base.cpu(), left.cpu()])
    for others in ended[1:]:
        assert all(map(torch.equal, ended[0], others))


def test_the_launchers_read_no_number() -> None:
    """The host waits where it reads one; on a card ``gpu_check.py`` has torch raise there."""
    source = Path(on_gpu.__file__).read_text()
    assert not re.findall(r"\.item\(|\.tolist\(|float\(|\.cpu\(|nonzero|synchronize", source)
