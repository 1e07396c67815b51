"""Packs a bucket on a GPU, in Triton: flags, limits, scales, payloads, and what is left.

Tables are those of :mod:`~lightning_dct.kernels.triton_tables`. ``addresses`` are those of all
inputs, then of all references.
"""

import triton
import triton.language as tl

from lightning_dct.kernels import triton_bits as tb
from lightning_dct.kernels import triton_tables as tables

BITS_OF_PLANE = tl.constexpr((0xAAAAAAAA, 0xCCCCCCCC, 0xF0F0F0F0, 0xFF00FF00, 0xFFFF0000))
LARGEST_BF16 = tl.constexpr(3.3895313892515355e38)


@triton.jit
def mark(
    addresses, count, tensors, block_tensor, taus, limits, ends, scale, flags, signs, counts, sums, broken,
    DTYPE: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr, PASS: tl.constexpr,
):  # fmt: skip
    """Flag what is sent, and write its signs, number and magnitude of each block.

    Pass 0 flags entries that reach their threshold. Where there is a limit, pass 1 keeps those that
    reach it. Where too many are left, pass 2 keeps a regular choice of them. Infinite and NaN
    entries reach everything.
    """
    b = tl.program_id(0)
    t, start, size, word = tb.place(tensors, block_tensor, b)
    tau = tl.load(taus + t)
    limit = tl.load(limits + t)
    target = tables.of_tensor(tensors, t, tables.TENSOR_TARGET)
    first = tables.of_tensor(tensors, t, tables.TENSOR_FIRST_BLOCK)
    active = True
    if PASS == 1:
        active = limit >= 0
    if PASS == 2:
        whole = tl.load(
            ends + tables.of_tensor(tensors, t + 1, tables.TENSOR_FIRST_BLOCK)
        ) - tl.load(ends + first)
        active = whole > target
    if active:
        i = start + tb.lanes()
        inside = i < size
        rows = tl.arange(0, tb.WORDS)
        inside_words = start + rows * 32 < size
        a, _ = tb.entries(addresses, t, count, i, inside, scale, DTYPE, BASE, SCALED)
        magnitude = tl.abs(a)
        if PASS == 2:
            before = tl.load(flags + word + rows, mask=inside_words, other=0)
            n = tb.ones(before)
            at = tl.load(ends + b) - tl.load(ends + first) + tl.cumsum(n, 0) - n
            number = tb.numbered(at, before)
            here = tb.bits_of(before) & ((number + 1) * target // whole > number * target // whole)
        else:
            # "Not below" instead of "at or above", because it is true for NaN.
            here = ((magnitude < tau.to(BASE)) == 0) & (i < tl.where(tau >= 0, size, 0))
            if PASS == 1:
                here &= (magnitude < limit.to(BASE)) == 0
            else:
                some = tl.sum(tl.sum((here & (tb.is_finite(a) == 0)).to(tl.int32), axis=1), axis=0)
                if some > 0:
                    tl.atomic_max(broken + t, 1, sem="relaxed")
        tl.store(flags + word + rows, tb.words_of(here), mask=inside_words)
        tl.store(signs + word + rows, tb.words_of(here & (a > 0)), mask=inside_words)
        tl.store(counts + b, tl.sum(tl.sum(here.to(tl.int32), axis=1), axis=0))
        tl.store(
            sums + b, tl.sum(tl.sum(tl.where(here, magnitude.to(tl.float64), 0.0), axis=1), axis=0)
        )


@triton.jit
def sample(
    addresses, count, tensors, ends, scale, flags, samples,
    STEPS: tl.constexpr, LANES: tl.constexpr, SAMPLE: tl.constexpr,
    DTYPE: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The magnitudes of a regular sample of a tensor's flagged entries, if there are more than its
    target.
    """
    t = tl.program_id(0)
    edge = tables.of_tensor(tensors, t, tables.TENSOR_FIRST_BLOCK)
    before = tl.load(ends + edge)
    last = tables.of_tensor(tensors, t + 1, tables.TENSOR_FIRST_BLOCK) - 1
    n = tl.load(ends + last + 1) - before
    if n > tables.of_tensor(tensors, t, tables.TENSOR_TARGET):
        size = tables.of_tensor(tensors, t, tables.TENSOR_ENTRIES)
        wanted = tl.minimum(size, SAMPLE)
        j = tl.program_id(1) * LANES + tl.arange(0, LANES)
        valid = j < wanted
        rank = tl.minimum(j, wanted - 1) * n // wanted
        low = tl.zeros([LANES], tl.int64) + edge
        high = tl.zeros([LANES], tl.int64) + last
        for _ in range(STEPS):
            middle = (low + high + 1) // 2
            right = tl.load(ends + middle) - before <= rank
            low = tl.where(right, middle, low)
            high = tl.where(right, high, middle - 1)
        left = (rank - (tl.load(ends + low) - before)).to(tl.int32)
        first = tables.of_tensor(tensors, t, tables.TENSOR_FIRST_WORD) + (low - edge) * tb.WORDS
        end = tables.of_tensor(tensors, t + 1, tables.TENSOR_FIRST_WORD)
        at = tl.zeros([LANES], tl.int32)
        searching = valid
        for w in range(tb.WORDS):
            set_here = tb.ones(tl.load(flags + first + w, mask=first + w < end, other=0))
            searching &= left >= set_here
            left = tl.where(searching, left - set_here, left)
            at = tl.where(searching, at + 1, at)
        x = tl.load(flags + first + at, mask=valid & (at < tb.WORDS), other=0)
        bit = tl.zeros([LANES], tl.int32)
        for step in tl.static_range(5):
            half = 16 >> step
            set_here = tb.ones(x & ((1 << half) - 1))
            right = left >= set_here
            left = tl.where(right, left - set_here, left)
            bit = tl.where(right, bit + half, bit)
            x = tl.where(right, x >> half, x)
        i = (low - edge) * (tb.WORDS * 32) + at * 32 + bit
        a, _ = tb.entries(addresses, t, count, i, valid & (i < size), scale, DTYPE, BASE, SCALED)
        magnitude = tl.abs(a)
        tl.store(
            samples + t * SAMPLE + j, tl.where(magnitude < float("inf"), magnitude, 0.0), mask=valid
        )


@triton.jit
def limit(
    tensors, aims, ends, taus, broken, samples, limits, moved,
    BASE: tl.constexpr, INTEGER: tl.constexpr, BITS: tl.constexpr, SAMPLE: tl.constexpr, GUARD: tl.constexpr,
    FACTOR: tl.constexpr, RESELECT: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """The limit of each tensor with too many flags, and its next threshold: see ``threshold.py``.

    ``aims`` has two numbers a tensor: the guard's exponent, and what it aims at. The limit is -1
    where there is none, and infinite for a tensor with infinite or NaN entries, of which only these
    are sent.
    """
    t = tl.program_id(0)
    n = tl.load(ends + tables.of_tensor(tensors, t + 1, tables.TENSOR_FIRST_BLOCK)) - tl.load(
        ends + tables.of_tensor(tensors, t, tables.TENSOR_FIRST_BLOCK)
    )
    target = tables.of_tensor(tensors, t, tables.TENSOR_TARGET)
    tau = tl.load(taus + t)
    found = tau * 0.0 - 1.0
    if n > target:
        wanted = tl.minimum(tables.of_tensor(tensors, t, tables.TENSOR_ENTRIES), SAMPLE)
        k = (wanted * target + n - 1) // n
        j = tl.arange(0, SAMPLE)
        values = tl.load(samples + t * SAMPLE + j, mask=j < wanted, other=0.0).to(
            INTEGER, bitcast=True
        )
        values = tl.where(j < wanted, values, -1)
        kth = k * 0
        for step in range(BITS):
            more = kth | ((k * 0 + 1) << (BITS - 1 - step))
            reached = tl.sum((values.to(tl.int64) >= more).to(tl.int32), axis=0)
            kth = tl.where(reached >= k, more, kth)
        found = tl.maximum(kth.to(INTEGER).to(BASE, bitcast=True).to(tl.float64), TINY)
    harmed = tl.load(broken + t) > 0
    tl.store(limits + t, tl.where(harmed, float("inf"), found))
    if GUARD:
        ratio = (n.to(tl.float64) + 0.5) / (tl.load(aims + 2 * t + 1) + 0.5)
        factor = tl.exp(tl.load(aims + 2 * t) * tl.log(ratio))
        nudged = tau * tl.minimum(tl.maximum(factor, 1 / FACTOR), FACTOR)
        after = tl.maximum(tl.where(n > RESELECT * target, found, nudged), TINY)
        tl.store(moved + t, tl.where(harmed | (tau < 0), tau, after))


@triton.jit
def _total(numbers, first, last, ROUNDS: tl.constexpr):
    """The sum of some blocks' numbers, in a fixed order: fp64."""
    at = first + tl.arange(0, 1024)
    total = tl.zeros([1024], tl.float64)
    for _ in range(ROUNDS):
        total += tl.load(numbers + at, mask=at < last, other=0).to(tl.float64)
        at += 1024
    return tl.sum(total, axis=0)


@triton.jit
def average(tensors, ends, sums, means, payload, ROUNDS: tl.constexpr, SCALES: tl.constexpr):
    """The mean magnitude of each tensor's sent entries, and after all means their sums: fp64.

    With ``SCALES`` the mean goes into the payload, as fp32.
    """
    t = tl.program_id(0)
    first = tables.of_tensor(tensors, t, tables.TENSOR_FIRST_BLOCK)
    last = tables.of_tensor(tensors, t + 1, tables.TENSOR_FIRST_BLOCK)
    n = tl.load(ends + last) - tl.load(ends + first)
    total = _total(sums, first, last, ROUNDS)
    mean = total / tl.maximum(n, 1).to(tl.float64)
    tl.store(means + t, mean)
    tl.store(means + tl.num_programs(0) + t, total)
    if SCALES:
        tl.store(
            payload + tables.of_tensor(tensors, t, tables.TENSOR_SCALE),
            mean.to(tl.float32).to(tl.uint32, bitcast=True),
        )


@triton.jit
def enlarge(
    addresses, count, tensors, block_tensor, means, scale, flags, large, counts, sums,
    DTYPE: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """2bit: flag what is at least the mean, and write its number and magnitude of each block."""
    b = tl.program_id(0)
    t, start, size, word = tb.place(tensors, block_tensor, b)
    i = start + tb.lanes()
    rows = tl.arange(0, tb.WORDS)
    inside_words = start + rows * 32 < size
    here = tb.bits_of(tl.load(flags + word + rows, mask=inside_words, other=0))
    a, _ = tb.entries(addresses, t, count, i, here, scale, DTYPE, BASE, SCALED)
    magnitude = tl.abs(a).to(tl.float64)
    here &= magnitude >= tl.load(means + t)
    tl.store(large + word + rows, tb.words_of(here), mask=inside_words)
    tl.store(counts + b, tl.sum(tl.sum(here.to(tl.int32), axis=1), axis=0))
    tl.store(sums + b, tl.sum(tl.sum(tl.where(here, magnitude, 0.0), axis=1), axis=0))


@triton.jit
def two_levels(
    tensors, ends, means, counts, sums, payload, fits, ROUNDS: tl.constexpr, LARGEST: tl.constexpr
):
    """2bit: the scale of each tensor, as :func:`~lightning_dct.wire.values.encode_values` chooses
    it.
    """
    t = tl.program_id(0)
    first = tables.of_tensor(tensors, t, tables.TENSOR_FIRST_BLOCK)
    last = tables.of_tensor(tensors, t + 1, tables.TENSOR_FIRST_BLOCK)
    n = tl.maximum(tl.load(ends + last) - tl.load(ends + first), 1).to(tl.float64)
    mean = tl.load(means + t)
    total = tl.load(means + tl.num_programs(0) + t)
    product = total + _total(sums, first, last, ROUNDS)
    square = n + 3.0 * _total(counts, first, last, ROUNDS)
    scale = product / square
    two = (product * product / square > total * mean) & (scale <= LARGEST)
    tl.store(fits + t, two.to(tl.int32))
    chosen = tl.where(two, scale, mean).to(tl.float32)
    tl.store(
        payload + tables.of_tensor(tensors, t, tables.TENSOR_SCALE),
        chosen.to(tl.uint32, bitcast=True),
    )


@triton.jit
def _spread(x):
    """The 16 lowest bits of words, with a zero after each."""
    x = (x | (x << 8)) & 0x00FF00FF
    x = (x | (x << 4)) & 0x0F0F0F0F
    x = (x | (x << 2)) & 0x33333333
    return (x | (x << 1)) & 0x55555555


@triton.jit
def _as_bf16(v):
    """fp32 rounded to nearest, as 16 bits; finite numbers stay finite."""
    bounded = tl.where(
        v > LARGEST_BF16, LARGEST_BF16, tl.where(v < -LARGEST_BF16, -LARGEST_BF16, v)
    )
    v = tl.where(tb.is_finite(v), bounded, v)
    x = v.to(tl.uint32, bitcast=True)
    x = (x + 0x7FFF + ((x >> 16) & 1)) >> 16
    return tl.where(v == v, x, 0x7FC0).to(tl.uint16)


@triton.jit
def write(
    addresses, count, tensors, block_tensor, parts, ends, scale, flags, signs, large, fits, payload,
    DTYPE: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr, FORMAT: tl.constexpr,
    GROUPS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Write positions and values into the payloads, which are zero before."""
    b = tl.program_id(0)
    t, start, size, word = tb.place(tensors, block_tensor, b)
    p = tables.of_tensor(tensors, t, tables.TENSOR_PART)
    part = tables.row_of_part(parts, p)
    first_block = tl.load(part + tables.PART_FIRST_BLOCK)
    before = tl.load(ends + first_block)
    rows = tl.arange(0, tb.WORDS)
    m = tl.load(flags + word + rows, mask=start + rows * 32 < size, other=0)
    n = tb.ones(m)
    at = tl.load(ends + b) - before + tl.cumsum(n, 0) - n
    j = word - tl.load(part + tables.PART_FIRST_WORD) + rows  # of a word in the part
    positions = payload + tl.load(part + tables.PART_POSITIONS)
    low_bits = tl.load(part + tables.PART_LOW_BITS).to(tl.int32)
    if low_bits < 0:
        tl.store(positions + j, m, mask=start + rows * 32 < size)
    else:
        # Elias-Fano: see wire/positions.py. A group of entries has the same high part.
        width = tl.where(low_bits < 5, 1 << tl.minimum(low_bits, 5), 32)
        high = (j * 32) >> low_bits
        ahead = at
        for g in tl.static_range(GROUPS):
            begin = width * g
            in_group = tb.first_ones(tl.where(begin < 32, width, 0))
            n_here = tb.ones((m >> (begin & 31).to(tl.uint32)) & in_group)
            tb.set_bits(positions, high + g + ahead, tb.first_ones(n_here), n_here)
            ahead += n_here
        num_flags = tl.load(part + tables.PART_CODE_FLAGS)
        capacity = tl.load(part + tables.PART_CAPACITY)
        for plane in tl.static_range(PLANES):
            if plane < 5:
                # The bits of 0 to 31 in this plane.
                bits = tb.together(tl.zeros_like(m) + BITS_OF_PLANE[plane], m)
            else:
                # All entries of a word have the same.
                bits = tl.where(((j >> (plane - 5)) & 1) == 1, tb.first_ones(n), 0).to(tl.uint32)
            tb.set_bits(
                positions, num_flags + plane * capacity + at, bits, tl.where(plane < low_bits, n, 0)
            )
    values = payload + tl.load(part + tables.PART_VALUES)
    if FORMAT == "1bit":
        tb.set_bits(
            values, at, tb.together(tl.load(signs + word + rows, mask=n > 0, other=0), m), n
        )
    elif FORMAT == "2bit":
        s = tb.together(tl.load(signs + word + rows, mask=n > 0, other=0), m)
        huge = tb.together(tl.load(large + word + rows, mask=n > 0, other=0), m)
        huge = tl.where(tl.load(fits + t) > 0, huge, 0).to(tl.uint32)
        tb.set_bits(
            values,
            2 * at,
            _spread(s & 0xFFFF) | (_spread(huge & 0xFFFF) << 1),
            2 * tl.minimum(n, 16),
        )
        tb.set_bits(
            values,
            2 * at + 32,
            _spread(s >> 16) | (_spread(huge >> 16) << 1),
            2 * tl.maximum(n - 16, 0),
        )
    else:
        here = tb.bits_of(m)
        a, _ = tb.entries(addresses, t, count, start + tb.lanes(), here, scale, DTYPE, BASE, SCALED)
        k = tb.numbered(at, m)
        v = a.to(tl.float32)
        if FORMAT == "fp32":
            tl.store(values + k, v.to(tl.uint32, bitcast=True), mask=here)
        else:
            tl.store(values.to(tl.pointer_type(tl.uint16)) + k, _as_bf16(v), mask=here)


@triton.jit(do_not_specialize=["tag"])
def write_headers(parts, ends, payload, header, tag, entries):
    """Write the header of each payload, and its number of entries, int64."""
    part = tables.row_of_part(parts, tl.program_id(0))
    whole = tl.load(ends + tables.of_next_part(part, tables.PART_FIRST_BLOCK)) - tl.load(
        ends + tl.load(part + tables.PART_FIRST_BLOCK)
    )
    head = payload + tl.load(part + tables.PART_HEADER)
    tl.store(head, header.to(tl.uint32))
    tl.store(head + 1, whole.to(tl.uint32))
    tl.store(head + 2, (tl.load(part + tables.PART_FINGERPRINT) ^ tag).to(tl.uint32))
    tl.store(entries + tl.program_id(0), whole)


@triton.jit
def keep_rest(
    addresses, count, tensors, block_tensor, taus, means, fits, scale, dropped, flags, payload,
    DTYPE: tl.constexpr, BASE: tl.constexpr, SCALED: tl.constexpr, FORMAT: tl.constexpr,
    RANKS_KEEP_UNSENT: tl.constexpr,
):  # fmt: skip
    """Write the unsent rest into residuals; with updates, take the share ``dropped`` of it from own
    weights.
    """
    b = tl.program_id(0)
    t, start, size, word = tb.place(tensors, block_tensor, b)
    if tl.load(taus + t) >= 0:
        i = start + tb.lanes()
        inside = i < size
        rows = tl.arange(0, tb.WORDS)
        here = tb.bits_of(tl.load(flags + word + rows, mask=start + rows * 32 < size, other=0))
        a, old = tb.entries(addresses, t, count, i, inside, scale, DTYPE, BASE, SCALED)
        if FORMAT == "fp32":
            sent = a.to(tl.float32)
        elif FORMAT == "bf16":
            sent = (_as_bf16(a.to(tl.float32)).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            level = tl.load(payload + tables.of_tensor(tensors, t, tables.TENSOR_SCALE)).to(
                tl.float32, bitcast=True
            )
            if FORMAT == "2bit":
                large = (tl.abs(a).to(tl.float64) >= tl.load(means + t)) & (tl.load(fits + t) > 0)
                level = tl.where(large, level + level, level)
            sent = tl.where(a > 0, level, -level)
        sent = tl.where(here, sent.to(BASE), 0.0)
        if SCALED:
            # Infinite and NaN values do not change the residual.
            finite = tl.where(tb.is_finite(a), a, old)
            left = finite - sent
            left = tl.where(tb.is_finite(left), left, finite)
            if RANKS_KEEP_UNSENT:
                left = tl.where(sent != 0, left, old)
            tl.store(
                tl.load(addresses + count + t).to(tl.pointer_type(BASE)) + i, left, mask=inside
            )
        else:
            own = tl.load(addresses + t).to(tl.pointer_type(DTYPE)) + i
            left = (a - sent) * tl.load(dropped).to(BASE)
            tl.store(own, tl.load(own, mask=inside) - left, mask=inside)
