"""Every kind of bytes that ranks send each other, with a decoder that checks what it has decoded.

A decoder either raises :class:`~lightning_dct.wire.positions.PayloadError` with a message or
returns; then what it has read lies within what the layout promises, or it raises
:class:`AssertionError`. A value whose bits have been flipped is another valid value: it is a right
answer in this sense.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_dct.activations.codec import (
    ActivationLayout,
    decode_backward,
    decode_forward,
    encode_backward,
    encode_forward,
)
from lightning_dct.activations.split_point import ROW_FORMATS, SplitPoint
from lightning_dct.compress.bucket_plan import BucketPlan, Received
from lightning_dct.compress.codec import decompress
from lightning_dct.compress.error_feedback import ErrorFeedback
from lightning_dct.embedding.collected import check_announced
from lightning_dct.embedding.messages import Message as Changes
from lightning_dct.embedding.messages import RequestCode, message_about
from lightning_dct.kernels.bits import as_bytes, flags_num_bytes, unpack_bits
from lightning_dct.pipeline.borders import as_floats
from lightning_dct.wire.payload import unpack_payload
from lightning_dct.wire.positions import PositionCode
from lightning_dct.wire.values import BITS_PER_VALUE
from strategies_for_hypothesis import pack_entries

# Memory around what is decoded into, to see whether anything is written there.
GUARD = 64
UNTOUCHED = 7.0


class Message(NamedTuple):
    """The kind of one valid message, its bytes, and what reads bytes that may have been harmed."""

    wire: str
    data: bytes
    decode: Callable[[Tensor], None]


def messages(seed: int) -> list[Message]:
    """Valid messages of every kind, several of each."""
    torch.manual_seed(seed)
    found = [*_gradients(), *_positions(), *_changes(), *_requests(), *_announcements()]
    return found + _activations()


def as_tensor(data: bytes) -> Tensor:
    """The bytes as they lie in a buffer that was received."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


def _bytes(*parts: Tensor) -> bytes:
    return bytes(torch.cat(parts).tolist())


def _some(count: int, below: int) -> Tensor:
    return torch.randperm(below)[:count].sort().values


def _check_positions(positions: Tensor, universe: int, most: int) -> None:
    assert positions.dtype == torch.int64
    assert positions.numel() <= most
    if positions.numel():
        assert int(positions[0]) >= 0
        assert int(positions[-1]) < universe
        assert bool((positions[1:] > positions[:-1]).all())


def _gradients() -> list[Message]:
    found = []
    for value_format in BITS_PER_VALUE:
        for sizes, targets in (
            ((40, 3, 30), (4, 0, 6)),
            ((1000,), (10,)),
            ((300, 5, 700, 2), (3, 0, 350, 0)),
        ):
            names = tuple(f"tensor {index}" for index in range(len(sizes)))
            plan = BucketPlan(names, sizes, targets, torch.float32, value_format)
            whole = torch.randint(0, 256, (plan.layout.dense_bytes,), dtype=torch.uint8)
            positions = _some(
                plan.layout.capacity, sum(plan.sizes[index] for index in plan.compressed)
            )
            # Each tensor's flags begin at a word.
            ends = torch.tensor([plan.sizes[index] for index in plan.compressed]).cumsum(0)
            tensor = torch.searchsorted(ends, positions, right=True)
            before = torch.cat([torch.zeros(1, dtype=torch.int64), ends])[tensor]
            positions += torch.tensor(plan.first)[tensor] - before
            payload, _ = pack_entries(plan.layout, positions, torch.randn(positions.numel()), whole)

            def decode(data: Tensor, plan: BucketPlan = plan) -> None:
                around = torch.full((2 * GUARD + sum(plan.sizes),), UNTOUCHED)
                decompress(
                    ErrorFeedback({}, False, False),
                    Received(data[None], plan, 0.5, own=0),
                    around[GUARD:-GUARD],
                )
                assert bool((around[:GUARD] == UNTOUCHED).all())
                assert bool((around[-GUARD:] == UNTOUCHED).all())

            found.append(Message(f"gradients, {value_format}", _bytes(payload), decode))
    return found


def _positions() -> list[Message]:
    found = []
    for universe, count in ((1000, 10), (1000, 1), (64, 30), (5, 5), (100_000, 50)):
        for name, code in (
            ("sparse", PositionCode(universe, count)),
            ("bitmap", PositionCode(universe, universe)),
        ):

            def decode(
                data: Tensor,
                code: PositionCode = code,
                universe: int = universe,
                count: int = count,
            ) -> None:
                positions = code.decode(data, count)
                _check_positions(positions, universe, count)
                assert positions.numel() == count
                flags = data.new_zeros(flags_num_bytes(universe))
                code.decode_flags(data, count, flags, [universe], "auto")
                assert unpack_bits(flags, universe).nonzero().squeeze(1).equal(positions)

            found.append(
                Message(f"positions, {name}", _bytes(code.encode(_some(count, universe))), decode)
            )
    return found


def _changes() -> list[Message]:
    found = []
    for value_format in BITS_PER_VALUE:
        tables = np.repeat(np.arange(3), (5, 0, 40))
        message = message_about(tables, 8, 0.1, value_format)
        positions = _some(message.layout.capacity, sum(message.layout.tensor_sizes))
        payload, _ = pack_entries(
            message.layout,
            positions,
            torch.randn(len(positions)),
            torch.empty(0, dtype=torch.uint8),
        )

        def decode(data: Tensor, message: Changes = message) -> None:
            found = unpack_payload(message.layout, data)
            read = found.positions
            values = found.values
            _check_positions(read, sum(message.layout.tensor_sizes), message.layout.capacity)
            assert values.numel() == read.numel()

        found.append(Message("rows of tables, changes", _bytes(payload), decode))
    return found


def _requests() -> list[Message]:
    found = []
    for universe, known, asked in (
        (300, 60, 40),
        (1000, 0, 30),
        (50, 50, 50),
        (1_000_000_000, 500, 100),
    ):
        code = RequestCode(universe)
        rows = np.sort(
            np.random.default_rng(known).choice(min(universe, 5000), known, replace=False)
        ).astype(np.int64)
        code.learn(rows, np.random.default_rng(asked).integers(1, 90, known))
        wanted = np.sort(
            np.random.default_rng(1).choice(min(universe, 5000), asked, replace=False)
        ).astype(np.int64)

        def decode(
            data: Tensor, code: RequestCode = code, universe: int = universe, asked: int = asked
        ) -> None:
            _check_positions(torch.from_numpy(code.decode(data, asked)), universe, asked)

        found.append(Message("rows of tables, ids", _bytes(code.encode(wanted)), decode))
    return found


def _announcements() -> list[Message]:
    def decode(data: Tensor) -> None:
        if data.numel() != 24:
            return  # the collective itself takes this size only
        heard = data.clone().view(torch.int32).numpy().astype(np.int64).reshape(2, 3)
        check_announced(heard, 0)
        assert (heard >= 0).all()

    return [
        Message("announced sizes", np.array([3, 9, 0, 7, 7, 7], dtype=np.int32).tobytes(), decode)
    ]


def _activations() -> list[Message]:
    found = []
    for forward_format in ROW_FORMATS:
        for split in (
            SplitPoint(density=0.1, forward_format=forward_format, backward_format="int8"),
            SplitPoint(density=0.4, forward_format=forward_format, backward_format="int4"),
            SplitPoint(density=1.0, forward_format=forward_format),
        ):
            layout = split.layout((6, 5, 8))
            positions = None if layout.sends_everything else _some(layout.capacity, layout.numel)
            encoded = encode_forward(layout, torch.randn(layout.shape), positions, seed=1)

            def forward(data: Tensor, layout: ActivationLayout = layout) -> None:
                # As the pipeline has it: a part crosses as numbers of four bytes.
                cut = min(4 * layout.on_the_wire[0], data.numel())
                words = as_floats(data[:cut], -(-cut // 4))
                activations, read = decode_forward(
                    layout, torch.cat([as_bytes(words)[:cut], data[cut:]])
                )
                assert activations.shape == layout.shape
                if read is not None:
                    _check_positions(read, layout.numel, layout.capacity)

            def backward(
                data: Tensor,
                layout: ActivationLayout = layout,
                positions: Tensor | None = positions,
            ) -> None:
                gradient = decode_backward(layout, data, positions)
                assert gradient.shape == layout.shape

            gradient = encode_backward(layout, torch.randn(layout.shape), positions, seed=1)
            found.append(Message("stages, forward", _bytes(encoded), forward))
            found.append(Message("stages, backward", _bytes(gradient), backward))
    return found
