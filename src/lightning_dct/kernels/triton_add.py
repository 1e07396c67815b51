"""Reads the payloads of all senders on a GPU, in Triton, and adds their weighted sum.

Tables are those of :mod:`~lightning_dct.kernels.triton_tables`. What has arrived has a row for each
sender, of ``stride`` words. ``flags`` are decoded ones, ``words`` a row, where the code is no
bitmap.
"""

import triton
import triton.language as tl

from lightning_dct.kernels import triton_bits as tb
from lightning_dct.kernels import triton_tables as tables

GROUP = 4  # blocks of which a program counts and opens the words
BLOCKS = tl.constexpr(GROUP)


@triton.jit
def _code_flags(part, block, code, CODE: tl.constexpr):
    """The words of flags in a block of an Elias-Fano code, their numbers, and how many of their
    flags are in it.
    """
    k = block * (CODE // 32) + tl.arange(0, CODE // 32)
    left = tl.minimum(tl.maximum(tl.load(part + tables.PART_CODE_FLAGS) - 32 * k, 0), 32)
    return tl.load(code + k, mask=left > 0, other=0) & tb.first_ones(left), k, left


@triton.jit
def count_flags(parts, block_part, blocks, payloads, stride, counts, CODE: tl.constexpr):
    """The number of set flags in each block, of ``CODE`` flags, of Elias-Fano codes, row by row."""
    b = tl.program_id(0)
    row = tl.program_id(1)
    part = tables.row_of_part(parts, tl.load(block_part + b))
    code = payloads + row * stride + tl.load(part + tables.PART_POSITIONS)
    m, _, _ = _code_flags(part, b - tl.load(part + tables.PART_FIRST_CODE_BLOCK), code, CODE)
    tl.store(counts + row * blocks + b, tl.sum(tb.ones(m), axis=0))


@triton.jit
def decode(
    parts, block_part, blocks, ends, payloads, stride, origin, words, flags, wrong, num_parts,
    CODE: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Decode what Elias-Fano codes say of ``words`` words of scratch flags from ``origin`` on,
    which are zero before.

    Invalid codes are reported. A thread has a word of the code, whose entries follow each other: it
    sets those of a word of scratch flags at once.
    """
    b = tl.program_id(0)
    row = tl.program_id(1)
    p = tl.load(block_part + b)
    part = tables.row_of_part(parts, p)
    block = b - tl.load(part + tables.PART_FIRST_CODE_BLOCK)
    low_bits = tl.load(part + tables.PART_LOW_BITS)
    first = tl.load(part + tables.PART_FIRST_WORD)
    before = ends + row * blocks + b
    before_all = tl.load(before - block)
    before_block = tl.load(before) - before_all
    zeros = (block + 1) * CODE - (tl.load(before + 1) - before_all)
    # Positions that shall be decoded; those beyond the last one, too, so that they are reported.
    size = (tables.of_next_part(part, tables.PART_FIRST_WORD) - first) * 32
    begin = (origin - first) * 32
    end = (origin - first + words) * 32
    reaches = (block * CODE - before_block) << low_bits < end
    if (reaches | (end >= size)) & ((zeros + 1) << low_bits > begin):
        code = payloads + row * stride + tl.load(part + tables.PART_POSITIONS)
        m, k, left = _code_flags(part, block, code, CODE)
        n = tb.ones(m)
        at = before_block + tl.cumsum(n, 0) - n
        num_flags = tl.load(part + tables.PART_CODE_FLAGS)
        capacity = tl.load(part + tables.PART_CAPACITY)
        coded = tl.minimum(tl.maximum(capacity - at, 0), n).to(tl.int32)
        valid = tb.apart(tb.first_ones(coded), m)
        # Where the flag before is set, too, the high parts are equal: then the low ones must
        # ascend.
        last = tl.load(code + k - 1, mask=(left > 0) & (k > 0), other=0) >> 31
        follows = valid & ((m << 1) | last)
        planes = ()
        ascends = tl.zeros_like(m)
        for plane in tl.static_range(PLANES):
            spot = num_flags + plane * capacity + at
            is_coded = plane < low_bits
            low = tb.apart(tb.get_bits(code, spot, tl.where(is_coded, coded, 0)), m)
            spot -= 1
            bit = tl.load(code + (spot >> 5), mask=tl.where(is_coded, follows & 1, 0) != 0, other=0)
            low_before = (low << 1) | ((bit >> (spot & 31).to(tl.uint32)) & 1)
            ascends = (ascends & ((low ^ low_before) ^ tb.ALL)) | (low & (low_before ^ tb.ALL))
            planes += (low,)
        bad = (coded < n) | ((follows & (ascends ^ tb.ALL)) != 0)
        high = (32 * k - at) << low_bits
        step = (tl.zeros_like(high) + 1) << low_bits
        flag = tl.zeros_like(m) + 1
        found = tl.zeros_like(m)
        word = high * 0
        scratch = flags + row * words + first - origin
        for _ in range(32):
            position = high
            for plane in tl.static_range(PLANES):
                position += tl.where((planes[plane] & flag) != 0, 1 << plane, 0)
            here = (valid & flag) != 0
            bad |= here & (position >= size)
            here &= (position >= begin) & (position < tl.minimum(end, size))
            leaves = here & ((position >> 5) != word)
            tl.atomic_or(scratch + word, found, mask=leaves & (found != 0), sem="relaxed")
            word = tl.where(leaves, position >> 5, word)
            bit = here.to(tl.uint32) << (position & 31).to(tl.uint32)
            found = tl.where(leaves, bit, found | bit)
            high += tl.where((m & flag) != 0, 0, step)
            flag <<= 1
        tl.atomic_or(scratch + word, found, mask=found != 0, sem="relaxed")
        if tl.sum(bad.to(tl.int32), axis=0) > 0:
            tl.atomic_or(wrong + row * num_parts + p, 1, sem="relaxed")


@triton.jit
def _flags_of(tensors, parts, block_tensor, b, inside, payload, decoded):
    """Of words of blocks: the parts, the flags, from the payload or decoded, and those beyond their
    tensors.
    """
    t, start, size, word = tb.place(tensors, block_tensor, b)
    p = tables.of_tensor(tensors, t, tables.TENSOR_PART)
    part = tables.row_of_part(parts, p)
    in_payload = (
        payload + tl.load(part + tables.PART_POSITIONS) - tl.load(part + tables.PART_FIRST_WORD)
    )
    number = tl.arange(0, BLOCKS * tb.WORDS) % tb.WORDS
    left = tl.where(inside, tl.minimum(tl.maximum(size - start - number * 32, 0), 32), 0)
    m = tl.load(
        tl.where(tl.load(part + tables.PART_LOW_BITS) < 0, in_payload, decoded) + word + number,
        mask=left > 0,
        other=0,
    )
    valid = tb.first_ones(left)
    return p, m & valid, m & (valid ^ tb.ALL)


@triton.jit
def count_entries(
    tensors, parts, block_tensor, blocks, payloads, stride, flags, origin, words, first, end, counts, wrong, num_parts
):  # fmt: skip
    """The number of set flags of some blocks, row by row; flags beyond the end of a tensor are
    reported.
    """
    row = tl.program_id(1)
    begin = first + tl.program_id(0) * BLOCKS
    b = begin + tl.arange(0, BLOCKS * tb.WORDS) // tb.WORDS
    inside = b < end
    b = tl.minimum(b, end - 1)
    rest = payloads + row * stride, flags + row * words - origin
    p, m, beyond = _flags_of(tensors, parts, block_tensor, b, inside, *rest)
    tl.atomic_or(wrong + row * num_parts + p, 1, mask=beyond != 0, sem="relaxed")
    b = begin + tl.arange(0, BLOCKS)
    tl.store(
        counts + row * blocks + b,
        tl.sum(tl.reshape(tb.ones(m), [BLOCKS, tb.WORDS]), axis=1),
        mask=b < end,
    )


@triton.jit(do_not_specialize=["tag"])
def judge(
    tensors, parts, blocks, ends, payloads, stride, wrong, header, tag, num_parts,
    ROUNDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Write to ``wrong``, for each row and part: 1 for a payload of another layout, 2 for infinite
    scales.
    """
    p = tl.program_id(0)
    row = tl.program_id(1)
    part = tables.row_of_part(parts, p)
    head = payloads + row * stride + tl.load(part + tables.PART_HEADER)
    found = tl.load(
        ends + row * blocks + tables.of_next_part(part, tables.PART_FIRST_BLOCK)
    ) - tl.load(ends + row * blocks + tl.load(part + tables.PART_FIRST_BLOCK))
    harmed = (tl.load(head).to(tl.int64) != header) | (tl.load(head + 1).to(tl.int64) != found)
    harmed |= (found > tl.load(part + tables.PART_CAPACITY)) | (
        tl.load(head + 2).to(tl.int64) != (tl.load(part + tables.PART_FINGERPRINT) ^ tag)
    )
    infinite = tl.sum(tl.zeros([128], tl.int32), axis=0)
    if SCALES:
        t = tl.load(part + tables.PART_FIRST_TENSOR) + tl.arange(0, 128)
        for _ in range(ROUNDS):
            valid = t < tables.of_next_part(part, tables.PART_FIRST_TENSOR)
            at = tl.load(
                tensors + t * tables.TENSOR_COLUMNS + tables.TENSOR_SCALE, mask=valid, other=0
            )
            scale = tl.load(payloads + row * stride + at, mask=valid, other=0)
            infinite += tl.sum(((scale & 0x7F800000) == 0x7F800000).to(tl.int32), axis=0)
            t += 128
    faults = (
        tl.load(wrong + row * num_parts + p) | harmed.to(tl.int32) | tl.where(infinite > 0, 2, 0)
    )
    tl.store(wrong + row * num_parts + p, faults)


@triton.jit
def _every_second(x):
    """The bits 0, 2, 4 and so on of words, side by side."""
    x &= 0x55555555
    x = (x | (x >> 1)) & 0x33333333
    x = (x | (x >> 2)) & 0x0F0F0F0F
    x = (x | (x >> 4)) & 0x00FF00FF
    return (x | (x >> 8)) & 0xFFFF


@triton.jit
def open_words(
    tensors, parts, block_tensor, blocks, payloads, stride, flags, origin, words, ends, first, chunk, opened,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """For some blocks (``chunk`` from ``first`` on) of each row: flags, and where the values of a
    word are.

    A block has ``WORDS`` words of flags, and as many of signs in the places of their entries; with
    2bit also words of which entries are large. With fp32 and bf16 it has the number of each word's
    first value. Here a thread has a word, in :func:`add` an entry.
    """
    each = tl.arange(0, BLOCKS * tb.WORDS)
    row = tl.program_id(1)
    local = tl.program_id(0) * BLOCKS + each // tb.WORDS
    inside = local < chunk
    local = tl.minimum(local, chunk - 1)
    b = first + local
    rest = (payloads + row * stride, flags + row * words - origin)
    p, m, _ = _flags_of(tensors, parts, block_tensor, b, inside, *rest)
    part = tables.row_of_part(parts, p)
    n = tb.ones(m)
    before = tl.reshape(tl.cumsum(tl.reshape(n, [BLOCKS, tb.WORDS]), 1), [BLOCKS * tb.WORDS]) - n
    at = (
        tl.load(ends + row * blocks + b)
        - tl.load(ends + row * blocks + tl.load(part + tables.PART_FIRST_BLOCK))
        + before
    )
    # A harmed payload may have more flags than values.
    capacity = tl.load(part + tables.PART_CAPACITY)
    at = tl.minimum(at, capacity)
    n = tl.minimum(n, capacity - at)
    values = payloads + row * stride + tl.load(part + tables.PART_VALUES)
    out = opened + (row * chunk + local) * (tb.WORDS * 3) + each % tb.WORDS
    tl.store(out, m, mask=inside)
    if FORMAT == "1bit":
        tl.store(out + tb.WORDS, tb.apart(tb.get_bits(values, at, n), m), mask=inside)
    elif FORMAT == "2bit":
        low = tb.get_bits(values, 2 * at, 2 * tl.minimum(n, 16))
        high = tb.get_bits(values, 2 * at + 32, 2 * tl.maximum(n - 16, 0))
        tl.store(
            out + tb.WORDS,
            tb.apart(_every_second(low) | (_every_second(high) << 16), m),
            mask=inside,
        )
        large = _every_second(low >> 1) | (_every_second(high >> 1) << 16)
        tl.store(out + 2 * tb.WORDS, tb.apart(large, m), mask=inside)
    else:
        tl.store(out + tb.WORDS, at.to(tl.uint32), mask=inside)


@triton.jit
def _bits():
    """The bit of each entry in its word: shape ``[1, 32]``."""
    return (tl.zeros([1, 32], tl.uint32) + 1) << tl.arange(0, 32)[None, :].to(tl.uint32)


@triton.jit
def _values(tensors, parts, t, payload, opened, BASE: tl.constexpr, FORMAT: tl.constexpr):
    """A sender's part of a block: the words of flags of what it has sent, and the values, zero
    elsewhere.
    """
    bit = _bits()
    out = opened + tl.arange(0, tb.WORDS)[:, None]
    m = tl.load(out)
    x = tl.load(out + tb.WORDS)
    here = (m & bit) != 0
    if FORMAT == "1bit" or FORMAT == "2bit":
        level = tl.load(payload + tables.of_tensor(tensors, t, tables.TENSOR_SCALE)).to(
            tl.float32, bitcast=True
        )
        if FORMAT == "2bit":
            level = tl.where((tl.load(out + 2 * tb.WORDS) & bit) != 0, level + level, level)
        v = tl.where((x & bit) != 0, level, -level)
    else:
        part = tables.row_of_part(parts, tables.of_tensor(tensors, t, tables.TENSOR_PART))
        k = x.to(tl.int64) + tb.ones(m & tb.first_ones(tl.arange(0, 32))[None, :])
        values = payload + tl.load(part + tables.PART_VALUES)
        valid = here & (k < tl.load(part + tables.PART_CAPACITY))
        if FORMAT == "fp32":
            v = tl.load(values + k, mask=valid, other=0).to(tl.float32, bitcast=True)
        else:
            half = tl.load(values.to(tl.pointer_type(tl.uint16)) + k, mask=valid, other=0)
            v = (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return m, tl.where(here, v, 0.0).to(BASE)


@triton.jit
def add(
    addresses, count, tensors, parts, block_tensor, payloads, stride, first, chunk, opened,
    weights, mine, factors, places, own_tensors, own_parts, own_payload, own_opened,
    SENDERS: tl.constexpr, BASE: tl.constexpr, FORMAT: tl.constexpr, OWN_FORMAT: tl.constexpr, OWNS: tl.constexpr,
    GAINS: tl.constexpr,
):  # fmt: skip
    """Add ``weights[n]`` times the sum of what ``n`` senders have sent of an entry; see
    ``plain.add_sums``.

    With ``GAINS`` that is multiplied by the factors of the entry's row and column: see
    ``plain.Gains``.

    The same is added to own weights, if there are any (``OWNS``), less what row ``mine`` has sent,
    or a payload apart, if ``OWN_FORMAT`` is given.
    """
    local = tl.program_id(0)
    t, start, _, _ = tb.place(tensors, block_tensor, first + local)
    total = tl.zeros([tb.WORDS, 32], BASE)
    flags = tl.zeros([tb.WORDS, 1], tl.uint32)
    sent = total
    n = tl.zeros([tb.WORDS, 32], tl.int32)
    # Unrolled, because a loop costs several times what is in it.
    for row in tl.static_range(SENDERS):
        block = opened + (row * chunk + local) * (tb.WORDS * 3)
        m, v = _values(tensors, parts, t, payloads + row * stride, block, BASE, FORMAT)
        total += v
        n += (v != 0).to(tl.int32)
        flags |= m
        if OWNS:
            sent = tl.where(row == mine, v, sent)
    union = (flags & _bits()) != 0
    # In one row, because of whole words the compiler would move all numbers to other threads and
    # back.
    mean = total * tl.reshape(tl.load(weights + tl.reshape(n, [tb.WORDS * 32])), [tb.WORDS, 32])
    i = start + tb.lanes()
    if GAINS:
        entry = tl.load(places + 3 * count + t) + i
        width = tl.load(places + 2 * count + t)
        row = entry // width
        of_row = tl.load(factors + tl.load(places + t) + row, mask=union, other=0.0)
        mean *= of_row * tl.load(
            factors + tl.load(places + count + t) + entry - row * width, mask=union, other=0.0
        )
    shared = tl.load(addresses + count + t).to(tl.pointer_type(BASE)) + i
    tl.store(shared, tl.load(shared, mask=union) + mean, mask=union)
    if OWNS:
        counted = union
        if OWN_FORMAT is not None:
            block = own_opened + local * (tb.WORDS * 3)
            m, sent = _values(own_tensors, own_parts, t, own_payload, block, BASE, OWN_FORMAT)
            counted = ((m & _bits()) != 0) & (total != 0)
        own = tl.load(addresses + t).to(tl.pointer_type(BASE)) + i
        w = tl.load(own, mask=union)
        tl.store(own, tl.where(counted, w - sent, w) + mean, mask=union)
