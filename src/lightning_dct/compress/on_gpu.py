"""Packs one bucket, and adds what all senders have sent of it, on a GPU: launches the kernels of
Triton.

A launch handles all tensors of a bucket and all payloads of all senders. The host reads no number
from the GPU and does no work by tensor: a plan's sizes and places are copied there once, and the
addresses of its tensors when they change.

Results are the bits that :mod:`~lightning_dct.compress.codec` gives on a CPU, and the same twice.
Only the means of 1bit and 2bit and the guard's power are computed in another order: in fp64, and
rounded to fp32 a mean hides that.
"""

from array import array
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from lightning_dct.compress.awaited import to_device
from lightning_dct.compress.bucket_plan import (
    WORD,
    Bucket,
    BucketPlan,
    ExchangeContext,
    Received,
    gains_of,
)
from lightning_dct.compress.codec import add_dense, name_broken_sender, take_dense
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.compress.threshold import (
    GUARD_AIM,
    GUARD_GAIN,
    GUARD_LARGEST_FACTOR,
    GUARD_RESELECT,
)
from lightning_dct.kernels import triton_add, triton_pack, weights_by_senders
from lightning_dct.kernels.plain import LARGEST_HALF, LIMIT_SAMPLE, SMALLEST_THRESHOLD
from lightning_dct.kernels.triton_add import GROUP
from lightning_dct.kernels.triton_bits import BLOCK
from lightning_dct.kernels.triton_tables import PartRow, TensorRow
from lightning_dct.wire.payload import FORMAT_CODES, MAGIC, VERSION, read_dense
from lightning_dct.wire.positions import PayloadError
from lightning_dct.wire.values import SCALED_FORMATS

DTYPES = {
    getattr(torch, name): getattr(tl, name)
    for name in ("float32", "float64", "float16", "bfloat16")
}
# A program looks at so many of the entries that have reached a threshold, and reads so many flags
# of a code.
LANES = 256
CODED = 8192
GUARD = {
    "FACTOR": GUARD_LARGEST_FACTOR,
    "RESELECT": int(GUARD_RESELECT),
    "TINY": SMALLEST_THRESHOLD,
}
# Words opened for each block; blocks opened at once, in 25 MB, and decoded at once, in 34 MB,
# counted by sender.
OPENED = 3 * BLOCK // 32
OPENED_AT_ONCE = 1 << 15
DECODED_AT_ONCE = 1 << 17


class Table:
    """A plan in the memory of a GPU; see :mod:`~lightning_dct.kernels.triton_tables` for the
    columns.

    Attributes:
        tensors: Of its compressed tensors: int64.
        parts: Of its payloads: int64.
        blocks: The tensor of each block: int32, and so many blocks are there.
        coded: The part of each block of flags of Elias-Fano codes: int32; none if all codes are
            bitmaps.
        words: Words of flags.
        starts: The first word of each block, and then the end of all.
        num_parts: Payloads in a row.
        aims: The guard's exponent and aim of each compressed tensor: fp64.
    """

    def __init__(self, plan: BucketPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        tensors: list[TensorRow] = []
        parts: list[PartRow] = []
        aims: list[float] = []
        blocks = list[int]()
        coded = list[int]()
        starts = array("q")
        start = words = 0
        for part in plan.parts or (plan,):
            layout = part.layout
            number = len(parts)
            ends = [start // 4 + end // 4 for end in layout.edges]
            code = layout.position_code
            parts.append(
                PartRow(
                    header=ends[0],
                    positions=ends[2],
                    values=ends[3],
                    first_block=len(blocks),
                    first_word=words,
                    first_tensor=len(tensors),
                    low_bits=-1 if code.is_bitmap else code.low_bits,
                    code_flags=code.num_flags,
                    capacity=layout.capacity,
                    fingerprint=layout.fingerprint,
                    first_code_block=len(coded),
                )
            )
            if layout.capacity and not code.is_bitmap:
                coded += -(-code.num_flags // CODED) * [number]
            for place, (index, first) in enumerate(zip(part.compressed, part.first, strict=True)):
                size = part.sizes[index]
                target = part.targets[index]
                first_word = words + first // WORD
                tensors.append(
                    TensorRow(
                        entries=size,
                        first_block=len(blocks),
                        first_word=first_word,
                        part=number,
                        scale=ends[1] + place,
                        target=target,
                    )
                )
                aims += [GUARD_GAIN * (target / size) ** 0.5, GUARD_AIM * target]
                starts.extend(range(first_word, first_word + -(-size // 32), BLOCK // 32))
                blocks += -(-size // BLOCK) * [len(tensors) - 1]
            start = start + layout.num_bytes
            words = words + sum(layout.tensor_sizes) // WORD
        self.count = len(tensors)
        self.num_parts = len(parts)
        low_bits = [max(part.low_bits, 0) for part in parts]
        tensors.append(TensorRow(0, len(blocks), words, part=0, scale=0, target=0))
        starts.append(words)
        parts.append(
            PartRow(
                header=0,
                positions=0,
                values=0,
                first_block=len(blocks),
                first_word=words,
                first_tensor=self.count,
                low_bits=0,
                code_flags=0,
                capacity=0,
                fingerprint=0,
                first_code_block=len(coded),
            )
        )
        self.tensors, self.parts = (_copied(rows, torch.int64, device) for rows in (tensors, parts))
        self.blocks, self.coded = (_copied(row, torch.int32, device) for row in (blocks, coded))
        self.aims = _copied(aims, torch.float64, device)
        self.words = words
        self.starts = starts
        most = max((-(-size // BLOCK) for size in plan.sizes), default=1)
        self.rounds = -(-most // 1024)
        self.steps = most.bit_length() + 1
        self.loops = {
            "PLANES": max(low_bits),
            "GROUPS": max(32 >> own if 0 < own < 5 else 1 for own in low_bits),
        }
        self.header = MAGIC | VERSION << 8 | FORMAT_CODES[plan.value_format] << 16
        self._ends: dict[tuple[int, int], Tensor] = {}
        self._where: tuple[tuple[int, ...], list[tuple[int, int]]] | None = None
        self._addresses: dict[bool, tuple[list[int], Tensor]] = {}

    @staticmethod
    def of(plan: BucketPlan, device: torch.device) -> "Table":
        """A plan's table, which it keeps."""
        if device not in plan.tables:
            plan.tables[device] = Table(plan, device)
        return plan.tables[device]

    def addresses(self, bucket: Bucket) -> Tensor:
        """Where inputs and references of the compressed tensors are: shape ``[2 n]``, int64."""
        starts = tuple(bucket.starts)
        if self._where is None or self._where[0] != starts:
            self._where = (
                starts,
                [bucket.place(self.plan.bounds[index][0]) for index in self.plan.compressed],
            )
        found = []
        for tensors in (bucket.inputs, bucket.references):
            places = [(tensor.data_ptr(), tensor.itemsize) for tensor in tensors]
            found += [
                places[i][0] + offset * places[i][1] if places else 0
                for i, offset in self._where[1]
            ]
        # A bucket that is packed has inputs, and that to which gradients are added has none.
        kind = bool(bucket.inputs)
        if kind not in self._addresses or self._addresses[kind][0] != found:
            self._addresses[kind] = found, _copied(found, torch.int64, self.device)
        return self._addresses[kind][1]

    def numbers(self, used: tuple[int, ...]) -> Tensor:
        """The numbers of some tensors, given by index, among the compressed ones: int64."""
        return _copied(
            [self.plan.compressed.index(index) for index in used], torch.int64, self.device
        )

    def room(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory that a kernel fills."""
        return torch.empty(count, dtype=dtype, device=self.device)

    def ends(self, counts: Tensor, rows: int = 0) -> Tensor:
        """Running sums of counts (shape ``[n]``, int64), after a zero: shape ``[n + 1]``, int64.

        The result lies in memory that the table keeps, until the next call with the same ``rows``.
        Codes pass minus their number of rows.
        """
        if (rows, len(counts)) not in self._ends:
            self._ends[rows, len(counts)] = torch.zeros(
                len(counts) + 1, dtype=torch.int64, device=self.device
            )
        ends = self._ends[rows, len(counts)]
        torch.cumsum(counts, 0, out=ends[1:])
        return ends


def _copied(numbers: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    return to_device(torch.tensor(numbers, dtype=dtype).flatten(), device)


@lru_cache(maxsize=64)
def _number(value: float, device: torch.device) -> Tensor:
    """A number that kernels read in fp64; as an argument it would be rounded to fp32."""
    return _copied([value], torch.float64, device)


@lru_cache(maxsize=64)
def _weights(
    ranks: int, factor: float, gain: float | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return to_device(weights_by_senders(ranks, factor, gain, dtype), device)


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    if all(grid):
        # Products and sums are rounded one by one, as on a CPU.
        with torch.cuda.device_of(arguments[0]):
            kernel[grid](*arguments, **constants, enable_fp_fusion=False)


def compress_bucket(
    feedback: ErrorFeedback,
    bucket: Bucket,
    plan: BucketPlan,
    used: tuple[int, ...],
    deferred: set[int],
    context: ExchangeContext,
) -> tuple[Tensor, Tensor]:
    """Pack the payloads of a bucket, and count the entries; see
    :func:`~lightning_dct.compress.codec.compress`.

    ``used`` are the indices of the compressed tensors that send something; all have thresholds.
    """
    return _Compression(Table.of(plan, bucket.references[0].device), bucket).run(
        feedback, used, deferred, context
    )


class _Compression:
    """The compression of one bucket, and what its kernels share."""

    def __init__(self, table: Table, bucket: Bucket) -> None:
        self.table = table
        self.plan = table.plan
        self.bucket = bucket
        room = table.room
        self.addresses = table.addresses(bucket)
        self.dtypes = {
            "DTYPE": DTYPES[bucket.inputs[0].dtype],
            "BASE": DTYPES[self.plan.residual_dtype],
        }
        self.kinds = {**self.dtypes, "SCALED": bucket.scale is not None}
        self.scale = _number(1.0 if bucket.scale is None else bucket.scale, table.device)
        self.flags = room(table.words, torch.uint32)
        self.signs = room(table.words, torch.uint32)
        self.counts = room(len(table.blocks), torch.int64)
        self.sums = room(len(table.blocks), torch.float64)
        self.payload = torch.zeros(self.plan.num_bytes, dtype=torch.uint8, device=table.device)
        self.words = self.payload.view(torch.uint32)

    def run(
        self,
        feedback: ErrorFeedback,
        used: tuple[int, ...],
        deferred: set[int],
        context: ExchangeContext,
    ) -> tuple[Tensor, Tensor]:
        table = self.table
        plan = self.plan
        if not table.count:
            ends = table.ends(self.counts)
        else:
            taus, ends = self.mark(feedback, used)
            means, fits, large = self.scales(ends)
            rest: Any = ends, self.scale, self.flags, self.signs, large, fits, self.words
            self.launch(
                triton_pack.write, table.parts, *rest, FORMAT=plan.value_format, **table.loops
            )
            if self.bucket.scale is not None or context.dropped:
                rest = (
                    taus,
                    means,
                    fits,
                    self.scale,
                    _number(context.dropped, table.device),
                    self.flags,
                    self.words,
                )
                ranks_keep_unsent = self.bucket.ranks_keep_unsent
                self.launch(
                    triton_pack.keep_rest,
                    *rest,
                    FORMAT=plan.value_format,
                    RANKS_KEEP_UNSENT=ranks_keep_unsent,
                )
        entries = table.room(table.num_parts, torch.int64)
        _launch(
            triton_pack.write_headers,
            (table.num_parts,),
            table.parts,
            ends,
            self.words,
            table.header,
            context.tag,
            entries,
        )
        first = 0
        for part, payload in plan.divide(self.payload):
            if part.dense:
                dense = take_dense(self.bucket, part, {index - first for index in deferred})
                read_dense(part.layout, payload).copy_(dense)
            first += len(part.names)
        return self.payload, entries

    def launch(self, kernel: Any, *rest: Any, **constants: Any) -> None:
        """Launch a kernel that reads the entries of each block."""
        table = self.table
        given = self.addresses, table.count, table.tensors, table.blocks, *rest
        _launch(kernel, (len(table.blocks),), *given, **self.kinds, **constants)

    def mark(self, feedback: ErrorFeedback, used: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Flag what is sent, and have the guard move thresholds: those of all tensors, and running
        counts of flags.
        """
        table = self.table
        names = self.plan.of_tensors(used).names
        own = taus = (
            feedback.thresholds.on_device(names, table.device)
            if names
            else table.room(0, torch.float64)
        )
        if len(used) < table.count:
            taus = own.new_full((table.count,), -1.0).index_copy_(0, table.numbers(used), own)
        broken = torch.zeros(table.count, dtype=torch.int32, device=table.device)
        limits = torch.empty_like(taus)
        moved = torch.empty_like(taus)
        out = self.scale, self.flags, self.signs, self.counts, self.sums, broken
        self.launch(triton_pack.mark, taus, limits, broken, *out, PASS=0)
        ends = table.ends(self.counts)
        samples = table.room(table.count * LIMIT_SAMPLE, self.plan.residual_dtype)
        rest: Any = (
            self.addresses,
            table.count,
            table.tensors,
            ends,
            self.scale,
            self.flags,
            samples,
        )
        looks = {"STEPS": table.steps, "LANES": LANES, "SAMPLE": LIMIT_SAMPLE}
        _launch(
            triton_pack.sample, (table.count, LIMIT_SAMPLE // LANES), *rest, **looks, **self.kinds
        )
        rest = table.tensors, table.aims, ends, taus, broken, samples, limits, moved
        wide = self.plan.residual_dtype == torch.float64
        kinds = {
            "BASE": self.dtypes["BASE"],
            "INTEGER": tl.int64 if wide else tl.int32,
            "BITS": 63 if wide else 31,
        }
        kinds |= {"SAMPLE": LIMIT_SAMPLE, "GUARD": feedback.adapt_threshold}
        _launch(triton_pack.limit, (table.count,), *rest, **kinds, **GUARD)
        if feedback.adapt_threshold and names:
            feedback.thresholds.replace(
                names, moved if len(used) == table.count else moved[table.numbers(used)]
            )
        self.launch(triton_pack.mark, taus, limits, ends, *out, PASS=1)
        self.launch(triton_pack.mark, taus, limits, table.ends(self.counts), *out, PASS=2)
        return taus, table.ends(self.counts)

    def scales(self, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write scales.

        Means of magnitudes, and of 2bit whether it takes two levels, and which entries are large.
        """
        table = self.table
        value_format = self.plan.value_format
        # Of formats that do without, any memory does: it is not read.
        means = self.sums
        fits = self.counts
        large = self.flags
        if value_format in SCALED_FORMATS:
            means = table.room(2 * table.count, torch.float64)
            rest: Any = table.tensors, ends, self.sums, means, self.words
            _launch(
                triton_pack.average,
                (table.count,),
                *rest,
                ROUNDS=table.rounds,
                SCALES=value_format == "1bit",
            )
        if value_format == "2bit":
            fits = table.room(table.count, torch.int32)
            large = torch.empty_like(self.flags)
            rest = means, self.scale, self.flags, large, self.counts, self.sums
            self.launch(triton_pack.enlarge, *rest)
            rest = table.tensors, ends, means, self.counts, self.sums, self.words, fits
            _launch(
                triton_pack.two_levels,
                (table.count,),
                *rest,
                ROUNDS=table.rounds,
                LARGEST=LARGEST_HALF,
            )
        return means, fits, large


class _Arrived:
    """Payloads that have arrived (uint8, ``[rows, bytes]``), whose codes are decoded some blocks at
    a time.

    ``wrong``, int32, shape ``[rows * parts]``, says which are harmed, after :meth:`judge`.
    """

    def __init__(self, payloads: Tensor, plan: BucketPlan) -> None:
        self.table = Table.of(plan, payloads.device)
        self.plan = plan
        self.rows = len(payloads)
        table = self.table
        coded = len(self.table.coded)
        self.words = payloads.contiguous().view(torch.uint32)
        self.stride = plan.num_bytes // 4
        self.wrong = torch.zeros(
            self.rows * table.num_parts, dtype=torch.int32, device=table.device
        )
        self.counts = table.room(self.rows * len(table.blocks), torch.int64)
        self.given = tuple[Any, ...]()
        if coded:
            codes = (table.parts, table.coded, coded)
            counts = table.room(self.rows * coded, torch.int64)
            _launch(
                triton_add.count_flags,
                (coded, self.rows),
                *codes,
                self.words,
                self.stride,
                counts,
                CODE=CODED,
            )
            self.codes = *codes, table.ends(counts, -self.rows), self.words, self.stride

    def find(self, first: int, end: int) -> None:
        """Find the flags of some blocks, and check them; all blocks before have been found."""
        table = self.table
        flags = self.words
        origin = 0
        words = 0
        found = self.wrong, table.num_parts
        if coded := len(table.coded):
            # the flags before make room
            self.given = ()
            origin = table.starts[first]
            words = table.starts[end] - origin
            flags = torch.zeros(self.rows * words, dtype=torch.int32, device=table.device).view(
                torch.uint32
            )
            rest: Any = *self.codes, origin, words, flags, *found
            _launch(
                triton_add.decode,
                (coded, self.rows),
                *rest,
                CODE=CODED,
                PLANES=table.loops["PLANES"],
            )
        self.given = table.tensors, table.parts, table.blocks, len(table.blocks)
        self.given = *self.given, self.words, self.stride, flags, origin, words
        grid = -(-(end - first) // GROUP), self.rows
        _launch(triton_add.count_entries, grid, *self.given, first, end, self.counts, *found)
        # Sums of counts that are not there yet are not read.
        self.ends = table.ends(self.counts, self.rows)

    def open(self, first: int, chunk: int, opened: Tensor) -> None:
        """Write flags and signs of some blocks at the places of their entries."""
        grid = (-(-chunk // GROUP), self.rows)
        rest = (self.ends, first, chunk, opened)
        _launch(triton_add.open_words, grid, *self.given, *rest, FORMAT=self.plan.value_format)

    def judge(self, tag: int) -> None:
        """Check headers and scales, after all blocks."""
        table = self.table
        parts = self.table.num_parts
        scales = self.plan.value_format in SCALED_FORMATS
        given = table.tensors, table.parts, len(table.blocks), self.ends, self.words, self.stride
        rest: Any = *given, self.wrong, table.header, tag, parts
        _launch(
            triton_add.judge,
            (parts, self.rows),
            *rest,
            ROUNDS=-(-table.count // 128),
            SCALES=scales,
        )


def add_payloads(feedback: ErrorFeedback, received: Received, bucket: Bucket, label: str) -> None:
    """Add payloads; see :func:`~lightning_dct.compress.codec.apply`.

    ``feedback.awaited`` raises errors later.
    """
    payloads, plan, factor, own, _, context = received
    arrived = _Arrived(payloads, plan)
    rows = len(payloads)
    base = DTYPES[plan.residual_dtype]
    table = arrived.table
    words = arrived.words
    addresses = arrived.table.addresses(bucket)
    weights = _weights(rows, factor, context.gain, plan.residual_dtype, table.device)
    gains = gains_of(plan, context.gains_of_compressed, table.device)
    factors, places = (
        (weights, weights)
        if gains is None
        else (gains.factors, to_device(gains.places, table.device))
    )
    mine = own if isinstance(own, int) else -1
    apart = arrived
    own_format = None
    if isinstance(own, Received) and bucket.inputs:
        apart = _Arrived(own.payloads, own.plan)
        own_format = own.plan.value_format
    owns = {"SENDERS": rows, "BASE": base, "OWNS": bool(bucket.inputs), "num_warps": 8}
    owns["GAINS"] = gains is not None
    formats = {"FORMAT": plan.value_format, "OWN_FORMAT": own_format}
    given = addresses, table.count, table.tensors, table.parts, table.blocks, words, arrived.stride
    # Some blocks at a time, because decoded flags and what a thread needs of each word take memory
    # by sender.
    blocks = len(table.blocks)
    most = max(OPENED_AT_ONCE // rows, 1)
    span = max(DECODED_AT_ONCE // rows, 1) if len(table.coded) else blocks
    sources = [arrived] if own_format is None else [arrived, apart]
    opened = [
        table.room(source.rows * min(most, blocks) * OPENED, torch.uint32) for source in sources
    ]
    for begin in range(0, max(blocks, 1), max(span, 1)):
        end = min(begin + span, blocks)
        for source in sources:
            source.find(begin, end)
        for first in range(begin, end, most):
            chunk = min(most, end - first)
            for source, room in zip(sources, opened, strict=True):
                source.open(first, chunk, room)
            rest: Any = first, chunk, opened[0], weights, mine, factors, places
            rest = *rest, apart.table.tensors, apart.table.parts, apart.words
            _launch(triton_add.add, (chunk,), *given, *rest, opened[-1], **owns, **formats)
    for source in sources:
        source.judge(context.tag)
    if plan.dense:
        wrong = arrived.wrong.view(rows, -1)
        owns_of_parts = own.plan.divide(own.payloads[0]) if isinstance(own, Received) else []
        for number, (part, column) in enumerate(plan.divide(payloads)):
            if not part.dense:
                continue
            sent = [read_dense(part.layout, row).view(plan.dtype) for row in column]
            wrong[:, number].bitwise_or_(
                torch.stack(sent).isfinite().all(1).logical_not_().int() * 2
            )
            if owns_of_parts:
                sent.append(
                    read_dense(owns_of_parts[number][0].layout, owns_of_parts[number][1]).view(
                        plan.dtype
                    )
                )
            add_dense(part, bucket, sent, received, rows if owns_of_parts else mine)
    feedback.awaited.on_ready(arrived.wrong, partial(_check, label))


def _check(label: str, wrong: list[int]) -> None:
    for number, found in enumerate(wrong):
        if found == 2:
            name_broken_sender(f"{label} from rank {number}")
    if harmed := [f"{label} from rank {number}" for number, found in enumerate(wrong) if found & 1]:
        raise PayloadError(
            f"{', '.join(harmed)} of the process group: the payload is corrupt, or was made for"
            " another model, other settings or in another step. Use the same model, settings and"
            " version of lightning_dct on every rank, and let all ranks step the same optimizers"
            " in the same order. A run on CPUs reports in more detail what differs."
        )
