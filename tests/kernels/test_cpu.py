"""The CPU kernels: each against the plainest loop, bit for bit, at any offset of the flags and on
several threads.
"""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.kernels import add_rows, cpu_kernel, numba_cpu, plain, positions_of
from lightning_dct.kernels.bits import flags_num_bytes, pack_bits
from lightning_dct.kernels.plain import Sent
from lightning_dct.wire import positions
from lightning_dct.wire.values import decode_values, encode_values
from strategies_for_hypothesis import examples

numbers = st.sampled_from([0.0, 0.5, -0.5, 1e-40, 3e38, -3e38, math.nan, math.inf, -math.inf])


class Kernel:
    """The one under test."""

    name = "torch"


@pytest.fixture(autouse=True, params=["torch", "numba", "numba on two threads"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    name, _, threads = request.param.partition(" ")
    monkeypatch.setattr(Kernel, "name", name)
    monkeypatch.setattr(plain, "CHUNK", 48)
    for module in (plain, numba_cpu):  # fewer than a large tensor has
        monkeypatch.setattr(module, "LIMIT_SAMPLE", 300)
    # Few enough that two threads share a tensor, and that their border is in the middle of a block.
    monkeypatch.setattr(numba_cpu, "ENTRIES_PER_THREAD", 7)
    before = torch.get_num_threads()
    torch.set_num_threads(2 if threads else 1)
    yield
    torch.set_num_threads(before)


def test_nothing_is_selected_of_no_tensors_on_any_device() -> None:
    """A rank may want no row of another."""
    for device in ("cpu", "meta"):  # the second stands for a GPU
        values, counts = plain.select(
            [], [], [], [], None, torch.zeros(8, dtype=torch.uint8, device=device)
        )
        assert (values.shape, values.device.type, counts) == ((0,), device, [])


def marks_of(flags: Tensor) -> np.ndarray:
    """Flags as marks, one bool an entry."""
    return np.unpackbits(flags.numpy(), bitorder="little").view(np.bool_)


@st.composite
def tensors(draw: st.DrawFn, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Noise with now and then an odd number."""
    noise = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    made = [torch.randn(size, generator=noise).to(dtype) for size in sizes]
    for number in draw(st.lists(numbers, max_size=3)):
        tensor = made[draw(st.integers(0, len(made) - 1))]
        if tensor.numel():
            tensor[draw(st.integers(0, tensor.numel() - 1))] = number
    return made


sizes_of_tensors = st.lists(
    st.sampled_from([0, 1, 63, 64, 65, 200]) | st.integers(1, 2 * numba_cpu.BLOCK + 9),
    min_size=1,
    max_size=4,
)
dtypes = st.sampled_from([torch.float32, torch.float64])


def firsts(sizes: list[int], gap: int) -> tuple[list[int], Tensor]:
    """The first flag of each tensor, with a gap before the first, and zeroed flags."""
    first = [gap + sum(sizes[:number]) for number in range(len(sizes))]
    return first, torch.zeros(flags_num_bytes(gap + sum(sizes)), dtype=torch.uint8)


@st.composite
def sent_of(draw: st.DrawFn, sizes: list[int], gap: int) -> Sent:
    """By one sender."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    marks = np.zeros(8 * flags_num_bytes(gap + sum(sizes)), np.bool_)
    marks[gap : gap + sum(sizes)] = generator.random(sum(sizes)) < draw(
        st.sampled_from([0.0, 0.02, 0.4, 1.0])
    )
    values = generator.standard_normal(int(marks.sum())).astype(np.float32)
    if values.size and draw(st.booleans()):
        values[generator.integers(values.size)] = draw(
            st.sampled_from([0.0, 1e-40, math.inf, math.nan])
        )
    return Sent(pack_bits(torch.from_numpy(marks))[None], torch.from_numpy(values), [values.size])


def dense(sent: Sent, sizes: list[int], gap: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Marks and values (fp32, zero where nothing is sent) of each tensor."""
    marks = marks_of(sent.flags[0])
    values = np.zeros(marks.size, np.float32)
    values[marks] = sent.values.numpy()
    edges = np.cumsum([gap, *sizes])
    return [[array[a:b] for a, b in pairwise(edges)] for array in (marks, values)]  # type: ignore[return-value]


def same(left: Tensor, right: np.ndarray) -> None:
    np.testing.assert_array_equal(left.numpy(), right)


@given(data=st.data(), sizes=sizes_of_tensors, gap=st.integers(0, 70), dtype=dtypes)
@examples(50)
def test_select_a_difference(
    data: st.DataObject, sizes: list[int], gap: int, dtype: torch.dtype
) -> None:
    inputs, references = (data.draw(tensors(sizes, dtype)) for _ in range(2))
    before = [tensor.clone() for tensor in [*inputs, *references]]
    thresholds = [data.draw(st.sampled_from([1e-38, 0.5, 2.0])) for _ in sizes]
    first, flags = firsts(sizes, gap)
    values, counts = cpu_kernel(Kernel.name).select(
        inputs, references, first, thresholds, None, flags
    )
    marks = np.zeros(8 * flags.numel(), np.bool_)
    expected = []
    with np.errstate(all="ignore"):
        for new, base, begin, threshold in zip(inputs, references, first, thresholds, strict=True):
            a = new.numpy() - base.numpy()
            reached = ~(np.abs(a) < a.dtype.type(threshold))
            marks[begin : begin + a.size] = reached
            expected.append(a[reached])
    np.testing.assert_array_equal(marks_of(flags), marks)
    same(values, np.concatenate(expected))
    assert (values.dtype, counts) == (dtype, [part.size for part in expected])
    for tensor, old in zip([*inputs, *references], before, strict=True):
        same(tensor, old.numpy())


@given(
    data=st.data(),
    sizes=sizes_of_tensors,
    gap=st.integers(0, 70),
    dtype=dtypes,
    scale=st.sampled_from([1.0, 3.7]),
)
@examples(50)
def test_select_a_sum(
    data: st.DataObject, sizes: list[int], gap: int, dtype: torch.dtype, scale: float
) -> None:
    """With gradients in any dtype; what is infinite or NaN is flagged, and does not change the
    residual.
    """
    gradients = [
        gradient.to(data.draw(st.sampled_from([torch.bfloat16, torch.float16, dtype])))
        for gradient in data.draw(tensors(sizes, dtype))
    ]
    residuals = [tensor.nan_to_num(nan=1.0) for tensor in data.draw(tensors(sizes, dtype))]
    if data.draw(st.booleans()):  # as the gradient of a column
        gradients = [torch.stack([gradient, gradient], 1)[:, 0] for gradient in gradients]
    first, flags = firsts(sizes, gap)
    marks = np.zeros(8 * flags.numel(), np.bool_)
    expected = []
    left = []
    with np.errstate(all="ignore"):
        for gradient, residual, begin in zip(gradients, residuals, first, strict=True):
            a = residual.numpy() + residual.numpy().dtype.type(scale) * gradient.to(dtype).numpy()
            reached = ~(np.abs(a) < 0.8)
            marks[begin : begin + a.size] = reached
            expected.append(a[reached])
            left.append(np.where(np.isfinite(a), a, residual.numpy()))
    values, counts = cpu_kernel(Kernel.name).select(
        gradients, residuals, first, [0.8] * len(sizes), scale, flags
    )
    np.testing.assert_array_equal(marks_of(flags), marks)
    same(values, np.concatenate(expected))
    assert counts == [part.size for part in expected]
    for residual, one in zip(residuals, left, strict=True):
        same(residual, one)


@given(data=st.data(), shape=st.tuples(*[st.integers(0, 5)] * 3), dtype=dtypes)
@examples(40)
def test_add_rows_where_they_lie(
    data: st.DataObject, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """In any memory layout, with two or three dimensions."""
    samples, tables, dim = shape
    whole = torch.randn(samples, tables + 2, dim + 1).to(dtype)
    layouts = [
        whole[:, 1:-1, 1:],
        whole.mT.contiguous().mT[:, :-2, :-1],
        whole[:1, 1:, :-1].flatten(0, 1),
    ]
    rows = data.draw(st.sampled_from(layouts))
    indices = torch.randint(0, 4, (rows.shape[:-1].numel(),))
    total = torch.ones(4, dim, dtype=dtype)
    expected = torch.ones(4, dim, dtype=dtype)
    add_rows(total, indices, rows)
    for index, row in zip(indices.tolist(), rows.reshape(len(indices), dim), strict=True):
        expected[index] += row
    assert torch.equal(total, expected)


@given(data=st.data(), sizes=sizes_of_tensors)
@examples(40)
def test_positions_of_flags(data: st.DataObject, sizes: list[int]) -> None:
    sent = data.draw(sent_of(sizes, 0))
    expected = np.flatnonzero(marks_of(sent.flags[0]))
    same(positions_of(sent.flags[0], expected.size), expected)


@given(data=st.data(), sizes=sizes_of_tensors, gap=st.integers(0, 70), dtype=dtypes)
@examples(60)
def test_fit(data: st.DataObject, sizes: list[int], gap: int, dtype: torch.dtype) -> None:
    """Of more entries than the target those that reach a limit are left, or a regular sample; all
    others stay.
    """
    sent = data.draw(sent_of(sizes, gap))
    first = firsts(sizes, gap)[0]
    flags = sent.flags[0]
    expected = marks_of(sent.flags[0]).copy()
    kept = []
    limits = []
    targets = [data.draw(st.integers(1, max(size, 1))) for size in sizes]
    by_tensor = dense(sent, sizes, gap)
    for begin, size, target, marks, all_values in zip(
        first, sizes, targets, *by_tensor, strict=True
    ):
        places = np.flatnonzero(marks)
        values = all_values[places]
        wanted = min(plain.LIMIT_SAMPLE, size)
        limit = 0.0
        if not np.isfinite(values).all():
            limit = math.inf
        elif len(values) > target:
            sampled = sorted(
                abs(float(values[number * len(values) // wanted])) for number in range(wanted)
            )
            limit = max(
                sampled[-math.ceil(wanted * target / len(values))], torch.finfo(torch.float32).tiny
            )
        large = places[~(np.abs(values) < limit)]
        share = min(target, len(large))
        left = [
            large[n]
            for n in range(len(large))
            if (n + 1) * share // len(large) > n * share // len(large)
        ]
        left = places.tolist() if limit == 0 else left
        expected[begin + places] = False
        expected[[begin + place for place in left]] = True
        kept.append(all_values[left])
        limits.append(limit)
    counts = [int(marks.sum()) for marks in by_tensor[0]]
    given = flags, first, sizes, sent.values.to(dtype), counts, targets
    values, counts, found = cpu_kernel(Kernel.name).fit(*given)
    same(values, np.concatenate(kept))
    np.testing.assert_array_equal(marks_of(flags), expected)
    assert (values.dtype, counts, found) == (dtype, list(map(len, kept)), limits)


@given(data=st.data(), sizes=sizes_of_tensors, gap=st.integers(0, 70), dtype=dtypes)
@examples(40)
def test_subtract(data: st.DataObject, sizes: list[int], gap: int, dtype: torch.dtype) -> None:
    sent = data.draw(sent_of(sizes, gap))
    residuals = [torch.ones(size, dtype=dtype) for size in sizes]
    cpu_kernel(Kernel.name).subtract(residuals, firsts(sizes, gap)[0], sent)
    for residual, values in zip(residuals, dense(sent, sizes, gap)[1], strict=True):
        left = 1 - values.astype(residual.numpy().dtype)
        same(residual, np.where(np.isfinite(left), left, 1))


@given(data=st.data(), sizes=sizes_of_tensors, gap=st.integers(0, 70), dtype=dtypes)
@examples(40)
def test_decay(data: st.DataObject, sizes: list[int], gap: int, dtype: torch.dtype) -> None:
    sent = data.draw(sent_of(sizes, gap))
    inputs, references = ([torch.randn(size, dtype=dtype) for size in sizes] for _ in range(2))
    before = [new.numpy().copy() for new in inputs]
    cpu_kernel(Kernel.name).decay(inputs, references, firsts(sizes, gap)[0], sent, 0.05)
    for new, old, base, marks, values in zip(
        inputs, before, references, *dense(sent, sizes, gap), strict=True
    ):
        left = old - base.numpy()
        left[marks] -= values[marks].astype(left.dtype)
        same(new, old - left.dtype.type(0.05) * left)


@given(
    data=st.data(),
    sizes=sizes_of_tensors,
    gap=st.integers(0, 70),
    dtype=dtypes,
    ranks=st.integers(0, 4),
)
@examples(60)
def test_add_sums(
    data: st.DataObject, sizes: list[int], gap: int, dtype: torch.dtype, ranks: int
) -> None:
    """The shared weights and a rank's own, which is one of the senders, sends to an owner, or is
    not there.
    """
    senders = [data.draw(sent_of(sizes, gap)) for _ in range(ranks)]
    every = [*senders, data.draw(sent_of(sizes, gap))]
    mine = data.draw(st.integers(-1, ranks))
    totals, owns = ([torch.randn(size, dtype=dtype) for size in sizes] for _ in range(2))
    weights = torch.rand(ranks + 1, dtype=dtype)
    expected, own_expected = ([tensor.numpy().copy() for tensor in some] for some in (totals, owns))
    first = firsts(sizes, gap)[0]
    flags, values = (torch.cat([sender[part] for sender in every]) for part in (0, 1))
    sent = Sent(flags, values, [sender.values.numel() for sender in every])
    owned = mine >= 0 or data.draw(st.booleans())
    cpu_kernel(Kernel.name).add_sums(totals, owns if owned else None, first, sent, weights, mine)
    with np.errstate(all="ignore"):
        for number, (total, own) in enumerate(zip(expected, own_expected, strict=True)):
            sums = np.zeros_like(total)
            counts = np.zeros(total.size, np.int64)
            union = np.zeros(total.size, np.bool_)
            for marks, values in (dense(sender, sizes, gap) for sender in senders):
                sums[marks[number]] += values[number][marks[number]].astype(total.dtype)
                counts += values[number] != 0
                union |= marks[number]
            mean = (weights.numpy()[counts] * sums)[union]
            total[union] += mean
            if mine >= 0:
                marks, values = dense(every[mine], sizes, gap)
                # Of what an owner has got, only what it has sent on counts.
                counted = marks[number] & ((sums != 0) | (mine < ranks))
                own[counted] -= values[number][counted].astype(own.dtype)
            if owned:
                own[union] += mean
            same(totals[number], total)
            same(owns[number], own)


@given(
    counts=st.lists(st.integers(0, 200), max_size=4), seed=st.integers(0, 2**32 - 1), dtype=dtypes
)
@examples(40)
def test_signs(counts: list[int], seed: int, dtype: torch.dtype) -> None:
    values = torch.randn(sum(counts), generator=torch.Generator().manual_seed(seed), dtype=dtype)
    index = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    means = (
        [math.fsum(part.abs().tolist()) / max(len(part), 1) for part in values.split(counts)]
        if counts
        else []
    )
    for kernel in ("numba", "torch"):
        signs, scales = encode_values(values, counts, "1bit", kernel)
        assert np.array_equal(signs.numpy(), np.packbits(values.numpy() > 0, bitorder="little"))
        assert scales.tolist() == torch.tensor(means, dtype=torch.float32).tolist()
    expected = torch.where(values > 0, scales[index], -scales[index])
    for kernel in ("numba", "torch"):
        assert torch.equal(decode_values(signs, counts, scales, "1bit", kernel=kernel), expected)


@given(
    counts=st.lists(st.integers(0, 70), max_size=4),
    seed=st.integers(0, 2**32 - 1),
    dtype=dtypes,
    whole=st.booleans(),
)
@examples(60)
def test_levels(counts: list[int], seed: int, dtype: torch.dtype, whole: bool) -> None:
    """The loops of 2bit give the bits of torch.

    Whole numbers are often equal to their mean, and some are infinite.
    """
    noise = torch.Generator().manual_seed(seed)
    values = torch.randn(sum(counts), generator=noise, dtype=dtype)
    if whole:
        values = (
            (4 * values)
            .round_()
            .masked_fill_(values > 2.5, math.inf)
            .masked_fill_(values < -2.5, math.nan)
        )
    codes, scales = encode_values(values, counts, "2bit", "numba")
    expected = encode_values(values, counts, "2bit", "torch")
    assert torch.equal(codes, expected[0])
    torch.testing.assert_close(scales, expected[1], rtol=0, atol=0, equal_nan=True)
    decoded, as_torch = (
        decode_values(codes, counts, scales, "2bit", kernel=k) for k in ("numba", "torch")
    )
    torch.testing.assert_close(decoded, as_torch, rtol=0, atol=0, equal_nan=True)


@given(data=st.data(), sizes=sizes_of_tensors)
@examples(30)
def test_count_flags(data: st.DataObject, sizes: list[int]) -> None:
    sent = data.draw(sent_of(sizes, 0))
    assert positions.count_flags(sent.flags[0], sizes, Kernel.name) == [
        int(m.sum()) for m in dense(sent, sizes, 0)[0]
    ]


def pad(packed: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(packed, (0, size - packed.numel()))


@given(data=st.data(), dtype=dtypes)
@examples(60)
def test_rows(data: st.DataObject, dtype: torch.dtype) -> None:
    """Oracle: the rows side by side, and loops over them."""
    kernel = cpu_kernel(Kernel.name)
    lengths = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    dim = data.draw(st.sampled_from([1, 3, 64, 65, 200]))
    number = sum(lengths)
    base, new = data.draw(tensors([2 * number * dim, (number + 3) * dim], dtype))
    rows = base.view(-1, dim)
    others = new.view(-1, dim)
    order = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    at = torch.randperm(2 * number, generator=order)[:number]
    others_at = torch.randint(0, number + 3, (number,), generator=order)
    scale = data.draw(st.sampled_from([1.0, -1.0]))
    sums = (rows[at] + scale * others[others_at]).view(-1)
    thresholds = data.draw(
        st.lists(st.sampled_from([1e-38, 1.0, 4.0]), min_size=len(lengths), max_size=len(lengths))
    )
    limits = torch.tensor(np.repeat(thresholds, np.array(lengths) * dim), dtype=dtype)
    reached = (sums.abs() < limits).logical_not()
    for is_kept in (False, True):
        left = rows.clone()
        flags = torch.zeros(flags_num_bytes(number * dim), dtype=torch.uint8)
        values, counts = kernel.select_rows(
            left, at, others, others_at, lengths, thresholds, scale, is_kept, flags
        )
        values = values.clone()
        assert np.array_equal(marks_of(flags)[: number * dim], reached.numpy())
        same(values, sums[reached].numpy())
        sizes = [length * dim for length in lengths]
        assert counts == [int(part.sum()) for part in reached.split(sizes)]
        expected = rows.clone()
        if is_kept:
            expected[at] = torch.where(sums.isfinite(), sums, rows[at].view(-1)).view(-1, dim)
        same(left, expected.numpy())
    sent = torch.randn(values.numel(), generator=order)
    each = torch.repeat_interleave(at, dim)[reached] * dim
    entries = each + torch.arange(dim).repeat(number)[reached]
    for entry, value, what in zip(entries.tolist(), values, sent, strict=True):
        rest = value - what.to(dtype)
        expected.view(-1)[entry] = rest if rest.isfinite() else expected.view(-1)[entry]
    kernel.keep_rest(left, at, flags, values, sent)
    same(left, expected.numpy())
    for entry, what in zip(entries.tolist(), sent, strict=True):
        expected.view(-1)[entry] += what.to(dtype)
    kernel.add_flagged(left, at, flags, sent)
    same(left, expected.numpy())
    keep = torch.rand(values.numel(), generator=order) < 0.5
    fewer = flags.clone()
    kernel.unflag(fewer, keep)
    some = reached.clone()
    some[reached] = keep
    same(fewer, pad(pack_bits(some), flags.numel()).numpy())
    touched, dense = kernel.rows_of_flags(flags, sent, dim)
    whole = torch.zeros(number * dim)
    whole[reached] = sent
    assert touched.tolist() == reached.view(-1, dim).any(dim=1).nonzero().view(-1).tolist()
    same(dense, whole.view(-1, dim)[touched].numpy())
