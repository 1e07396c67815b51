"""Reads the payloads of all senders on a GPU, in Triton, and adds their weighted sum.

Tables are those of :mod:`~lightning_dct.kernels.triton_bits`. What has arrived has a row for each sender, of ``stride``
words. ``flags`` are decoded ones, ``words`` a row, where the code is no bitmap.
"""

import triton
import triton.language as tl

from lightning_dct.kernels import triton_bits as tb


@triton.jit
def count_flags(parts, block_part, blocks, payloads, stride, counts):
    """The number of set flags in each block of Elias-Fano codes, row by row."""
    b, row = tl.program_id(0), tl.program_id(1)
    p = tl.load(block_part + b)
    part = parts + p * tb.PART
    k = (b - tl.load(part + 10)) * tb.WORDS + tl.arange(0, tb.WORDS)
    left = tl.minimum(tl.maximum(tl.load(part + 7) - 32 * k, 0), 32)
    m = tl.load(payloads + row * stride + tl.load(part + 1) + k, mask=left > 0, other=0) & tb.first_ones(left)
    tl.store(counts + row * blocks + b, tl.sum(tb.ones(m), axis=0))


@triton.jit
def decode(parts, block_part, blocks, ends, payloads, stride, words, flags, wrong, num_parts, PLANES: tl.constexpr):
    """Decode Elias-Fano codes into scratch flags, which are zero before, row by row; report invalid codes."""
    b, row = tl.program_id(0), tl.program_id(1)
    p = tl.load(block_part + b)
    part = parts + p * tb.PART
    code = payloads + row * stride + tl.load(part + 1)
    num_flags, capacity, low_bits = tl.load(part + 7), tl.load(part + 8), tl.load(part + 6)
    k = (b - tl.load(part + 10)) * tb.WORDS + tl.arange(0, tb.WORDS)
    left = tl.minimum(tl.maximum(num_flags - 32 * k, 0), 32)
    m = tl.load(code + k, mask=left > 0, other=0) & tb.first_ones(left)
    n = tb.ones(m)
    at = tl.load(ends + row * blocks + b) - tl.load(ends + row * blocks + tl.load(part + 10)) + tl.cumsum(n, 0) - n
    number = tb.numbered(at, m)
    flag = k[:, None] * 32 + tl.arange(0, 32)[None, :]
    here = tb.bits_of(m) & (number < capacity)
    # Where the flag before is set, too, the high parts are equal: then the low ones must ascend.
    last = tl.load(code + k - 1, mask=(left > 0) & (k > 0), other=0)
    follows = here & tb.bits_of((m << 1) | (last >> 31))
    low, low_before = number * 0, number * 0
    for plane in tl.static_range(PLANES):
        spot = num_flags + plane * capacity + number
        is_coded = plane < low_bits
        bit = (tl.load(code + (spot >> 5), mask=here & is_coded, other=0) >> (spot & 31).to(tl.uint32)) & 1
        low |= bit.to(tl.int64) << plane
        spot -= 1
        bit = (tl.load(code + (spot >> 5), mask=follows & is_coded, other=0) >> (spot & 31).to(tl.uint32)) & 1
        low_before |= bit.to(tl.int64) << plane
    position = ((flag - number) << low_bits) | low
    valid = here & (position < (tl.load(part + tb.PART + 4) - tl.load(part + 4)) * 32)
    bad = (tb.bits_of(m) & (valid == 0)) | (follows & (low <= low_before))
    if tl.sum(tl.sum(bad.to(tl.int32), axis=1), axis=0) > 0:
        tl.atomic_or(wrong + row * num_parts + p, 1, sem="relaxed")
    bit = (tl.zeros_like(position) + 1).to(tl.uint32) << (position & 31).to(tl.uint32)
    tl.atomic_or(flags + row * words + tl.load(part + 4) + (position >> 5), bit, mask=valid, sem="relaxed")


@triton.jit
def _flags_of(part, payloads, row, stride, flags, words, start, size, word):
    """The words of flags of a block, from the payload or decoded, and which of their flags are in the tensor."""
    in_payload = payloads + row * stride + tl.load(part + 1)
    decoded = flags + row * words + tl.load(part + 4)
    source = tl.where(tl.load(part + 6) < 0, in_payload, decoded) + word - tl.load(part + 4)
    rows = tl.arange(0, tb.WORDS)
    left = tl.minimum(tl.maximum(size - start - rows * 32, 0), 32)
    return tl.load(source + rows, mask=left > 0, other=0), tb.first_ones(left)


@triton.jit
def count_entries(tensors, parts, block_tensor, blocks, payloads, stride, flags, words, counts, wrong, num_parts):
    """The number of set flags of each block, row by row; flags beyond the end of a tensor are reported."""
    b, row = tl.program_id(0), tl.program_id(1)
    t, start, size, word = tb.place(tensors, block_tensor, b)
    p = tl.load(tensors + t * tb.TENSOR + 3)
    part = parts + p * tb.PART
    m, valid = _flags_of(part, payloads, row, stride, flags, words, start, size, word)
    inside = m & valid
    if tl.sum(tb.ones(m ^ inside), axis=0) > 0:
        tl.atomic_or(wrong + row * num_parts + p, 1, sem="relaxed")
    tl.store(counts + row * blocks + b, tl.sum(tb.ones(inside), axis=0))


@triton.jit(do_not_specialize=["tag"])
def judge(
    tensors, parts, blocks, ends, payloads, stride, wrong, header, tag, num_parts,
    ROUNDS: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Write to ``wrong``, for each row and part: 1 for a payload of another layout, 2 for infinite scales."""
    p, row = tl.program_id(0), tl.program_id(1)
    part = parts + p * tb.PART
    head = payloads + row * stride + tl.load(part)
    found = tl.load(ends + row * blocks + tl.load(part + tb.PART + 3)) - tl.load(
        ends + row * blocks + tl.load(part + 3)
    )
    harmed = (tl.load(head).to(tl.int64) != header) | (tl.load(head + 1).to(tl.int64) != found)
    harmed |= (found > tl.load(part + 8)) | (tl.load(head + 2).to(tl.int64) != (tl.load(part + 9) ^ tag))
    infinite = tl.sum(tl.zeros([128], tl.int32), axis=0)
    if SCALES:
        t = tl.load(part + 5) + tl.arange(0, 128)
        for _ in range(ROUNDS):
            valid = t < tl.load(part + tb.PART + 5)
            at = tl.load(tensors + t * tb.TENSOR + 4, mask=valid, other=0)
            scale = tl.load(payloads + row * stride + at, mask=valid, other=0)
            infinite += tl.sum(((scale & 0x7F800000) == 0x7F800000).to(tl.int32), axis=0)
            t += 128
    told = tl.load(wrong + row * num_parts + p) | harmed.to(tl.int32) | tl.where(infinite > 0, 2, 0)
    tl.store(wrong + row * num_parts + p, told)


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
    tensors, parts, block_tensor, blocks, payloads, stride, flags, words, ends, first, chunk, opened,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """For some blocks (``chunk`` from ``first`` on) of each row: flags, and where the values of a word are.

    A block has ``WORDS`` words of flags, and as many of signs in the places of their entries; with 2bit also words of
    which entries are large. With fp32 and bf16 it has the number of each word's first value. Here a thread has a word,
    in :func:`add` an entry.
    """
    local, row = tl.program_id(0), tl.program_id(1)
    b = first + local
    t, start, size, word = tb.place(tensors, block_tensor, b)
    part = parts + tl.load(tensors + t * tb.TENSOR + 3) * tb.PART
    m, valid = _flags_of(part, payloads, row, stride, flags, words, start, size, word)
    m &= valid
    n = tb.ones(m)
    at = tl.load(ends + row * blocks + b) - tl.load(ends + row * blocks + tl.load(part + 3)) + tl.cumsum(n, 0) - n
    # A harmed payload may have more flags than values.
    capacity = tl.load(part + 8)
    at = tl.minimum(at, capacity)
    n = tl.minimum(n, capacity - at)
    values = payloads + row * stride + tl.load(part + 2)
    out = opened + (row * chunk + local) * (tb.WORDS * 3) + tl.arange(0, tb.WORDS)
    tl.store(out, m)
    if FORMAT == "1bit":
        tl.store(out + tb.WORDS, tb.apart(tb.get_bits(values, at, n), m))
    elif FORMAT == "2bit":
        low = tb.get_bits(values, 2 * at, 2 * tl.minimum(n, 16))
        high = tb.get_bits(values, 2 * at + 32, 2 * tl.maximum(n - 16, 0))
        tl.store(out + tb.WORDS, tb.apart(_every_second(low) | (_every_second(high) << 16), m))
        tl.store(out + 2 * tb.WORDS, tb.apart(_every_second(low >> 1) | (_every_second(high >> 1) << 16), m))
    else:
        tl.store(out + tb.WORDS, at.to(tl.uint32))


@triton.jit
def _values(tensors, parts, t, payload, opened, BASE: tl.constexpr, FORMAT: tl.constexpr):
    """A sender's part of a block: which entries it has sent, and their values, zero elsewhere."""
    lane = tl.arange(0, 32)[None, :].to(tl.uint32)
    out = opened + tl.arange(0, tb.WORDS)[:, None]
    m = tl.load(out)
    x = tl.load(out + tb.WORDS)
    here = ((m >> lane) & 1) != 0
    if FORMAT == "1bit" or FORMAT == "2bit":
        level = tl.load(payload + tl.load(tensors + t * tb.TENSOR + 4)).to(tl.float32, bitcast=True)
        if FORMAT == "2bit":
            level = tl.where(((tl.load(out + 2 * tb.WORDS) >> lane) & 1) != 0, level + level, level)
        v = tl.where(((x >> lane) & 1) != 0, level, -level)
    else:
        part = parts + tl.load(tensors + t * tb.TENSOR + 3) * tb.PART
        k = x.to(tl.int64) + tb.ones(m & tb.first_ones(tl.arange(0, 32))[None, :])
        values, valid = payload + tl.load(part + 2), here & (k < tl.load(part + 8))
        if FORMAT == "fp32":
            v = tl.load(values + k, mask=valid, other=0).to(tl.float32, bitcast=True)
        else:
            half = tl.load(values.to(tl.pointer_type(tl.uint16)) + k, mask=valid, other=0)
            v = (half.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return here, tl.where(here, v, 0.0).to(BASE)


@triton.jit
def add(
    addresses, count, tensors, parts, block_tensor, payloads, stride, first, chunk, opened, weights, mine,
    own_tensors, own_parts, own_payload, own_opened,
    SENDERS: tl.constexpr, BASE: tl.constexpr, FORMAT: tl.constexpr, OWN_FORMAT: tl.constexpr, OWNS: tl.constexpr,
):  # fmt: skip
    """Add ``weights[n]`` times the sum of what ``n`` senders have sent of an entry; see ``plain.add_sums``.

    The same is added to own weights, if there are any (``OWNS``), less what row ``mine`` has sent, or a payload apart,
    if ``OWN_FORMAT`` is given.
    """
    local = tl.program_id(0)
    t, start, _, _ = tb.place(tensors, block_tensor, first + local)
    total = tl.zeros([tb.WORDS, 32], BASE)
    sent = tl.zeros([tb.WORDS, 32], BASE)
    n = tl.zeros([tb.WORDS, 32], tl.int32)
    union = tl.zeros([tb.WORDS, 32], tl.int1)
    # Unrolled, because a loop costs several times what is in it.
    for row in tl.static_range(SENDERS):
        block = opened + (row * chunk + local) * (tb.WORDS * 3)
        here, v = _values(tensors, parts, t, payloads + row * stride, block, BASE, FORMAT)
        total += v
        n += (v != 0).to(tl.int32)
        union |= here
        if OWNS:
            sent = tl.where(row == mine, v, sent)
    mean = total * tl.load(weights + n)
    i = start + tb.lanes()
    shared = tl.load(addresses + count + t).to(tl.pointer_type(BASE)) + i
    tl.store(shared, tl.load(shared, mask=union) + mean, mask=union)
    if OWNS:
        counted = union
        if OWN_FORMAT is not None:
            block = own_opened + local * (tb.WORDS * 3)
            counted, sent = _values(own_tensors, own_parts, t, own_payload, block, BASE, OWN_FORMAT)
            counted &= total != 0
        own = tl.load(addresses + t).to(tl.pointer_type(BASE)) + i
        w = tl.load(own, mask=union)
        w = tl.where(counted, w - sent, w)
        tl.store(own, w + mean, mask=union)
