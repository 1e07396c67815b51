"""Messages whose lengths only their senders know: one collective, and now and then a second one.

A collective needs the length of each part on both ends. So both ends know a *room* for each
message, from the lengths of the last ones. The first collective fills the rooms. What does not fit
is the *rest*, which a second collective sends::

    head | body .......... | zeros     the message is shorter than its room
    head | body ...................| ......... rest     it is longer: this rank's heads say so

A head says which exchange the message is of, and the lengths of its parts. If some rank has a rest
for any other, all ranks make the second collective. A head says that to each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from lightning_dct.compress.awaited import to_device
from lightning_dct.embedding.on_device import DeferredReads, Piece
from lightning_dct.traffic import Traffic
from lightning_dct.wire.positions import PayloadError

if TYPE_CHECKING:
    from lightning_dct.embedding.collected import RowCollectives

# Every first part is so long at least, and no head is longer.
HEAD_BYTES = 16
# Bytes of a message that its receiver's host reads at once: a head, and the header of a payload.
READ_BYTES = 32
# In the first byte of a head: this rank has a rest for some other rank.
HAS_REST = 0x80
# A room follows the lengths of so many messages, and is longer than they were by at most this share
# of a message on average.
RECENT = 8
PADDING = 1 / 24
# Bytes of a number below 2**35.
_MOST_NUMBER_BYTES = 5


class Room:
    """The length that both ends expect of the next message from one rank to another.

    It is as long as the padding of the last messages allows, so that few are longer.
    """

    def __init__(self, least: int) -> None:
        self._least = least
        self._lengths: deque[int] = deque(maxlen=RECENT)

    def size(self, more: int = 0) -> int:
        """The length; the message has ``more`` bytes beside those."""
        if not self._lengths:
            return self._least
        lengths = sorted(self._lengths)
        number = len(lengths)
        # The longest room so far may be exceeded as far as it exceeds the usual one.
        lengths.append(2 * lengths[-1] - lengths[number // 2])
        budget = int(PADDING * (sum(lengths[:number]) + number * more))
        size = lengths[0]
        for shorter in range(1, number + 1):
            # So many of the last messages were shorter, and each would have had as much padding.
            wider = lengths[shorter] - size
            if wider * shorter > budget:
                size += budget // shorter
                break
            budget -= wider * shorter
            size += wider
        return max(size, self._least)

    def note(self, length: int) -> None:
        """Learn the length of a message, of which :meth:`size` was asked."""
        self._lengths.append(length)


class Rooms(NamedTuple):
    """The rooms of a rank's messages to and from each other, by rank."""

    sent_ids: dict[int, Room]
    received_ids: dict[int, Room]
    # Of answers, what their rows do not say.
    sent_rows: dict[int, Room]
    received_rows: dict[int, Room]

    @classmethod
    def between(cls, peers: Sequence[int]) -> Rooms:
        """Of ranks that have sent each other nothing yet."""
        ids = ({peer: Room(HEAD_BYTES) for peer in peers} for _ in range(2))
        rows = ({peer: Room(0) for peer in peers} for _ in range(2))
        return cls(*ids, *rows)


def write_head(kind: int, numbers: Sequence[int]) -> bytes:
    """A head: its kind in a byte, then numbers from 0, 7 bits a byte, the lowest first."""
    head = bytearray([kind])
    for number in numbers:
        while number >= 0x80:
            head.append(number & 0x7F | 0x80)
            number >>= 7
        head.append(number)
    return bytes(head)


def read_head(head: bytes, how_many: int) -> tuple[list[int], int]:
    """Undo :func:`write_head`: the numbers, and the bytes that the head takes (PayloadError)."""
    numbers = []
    at = 1
    for _ in range(how_many):
        number = 0
        for place in range(_MOST_NUMBER_BYTES):
            if at == len(head):
                raise PayloadError("the head of a message ends too early")
            byte = head[at]
            at += 1
            number |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                break
        else:
            raise PayloadError("the head of a message has a number without an end")
        numbers.append(number)
    return numbers, at


class FirstParts:
    """Messages of all ranks to each other, of which the first parts are on their way.

    Args:
        exchange: The ranks.
        name: What is sent, for whoever counts bytes.
        heads: By receiver: its head, from :func:`write_head`.
        bodies: By receiver: what follows, as bytes or uint8. What is on the host is copied to the
            device of the collectives.
        rooms: By receiver: the room of this rank's message, at least :data:`HEAD_BYTES`.
        expected: By sender: the room of its message.
        most: By sender: the most bytes that it sends if it is at another collective.
        traffic: Counts the bytes.
        reads: Reads what the host must know.
        to_host: Whether the host reads all that arrives.
    """

    def __init__(
        self,
        exchange: RowCollectives,
        name: str,
        heads: Mapping[int, bytes],
        bodies: Mapping[int, Sequence[Piece]],
        rooms: Mapping[int, int],
        expected: Mapping[int, int],
        most: Mapping[int, int],
        traffic: Traffic,
        reads: DeferredReads,
        to_host: bool = False,
    ) -> None:
        self._to_host = to_host
        self._exchange = exchange
        self._name = name
        self._expected = expected
        self._traffic = traffic
        self._reads = reads
        # By receiver, that of its message.
        self.lengths = {
            peer: len(head) + sum(map(_length_of, bodies[peer])) for peer, head in heads.items()
        }
        self._has_rest = any(length > rooms[peer] for peer, length in self.lengths.items())
        mark = HAS_REST * self._has_rest
        messages: dict[int, list[Piece]] = {}
        for peer, head in heads.items():
            missing = max(rooms[peer] - self.lengths[peer], 0)
            messages[peer] = [bytes([head[0] | mark]), head[1:], *bodies[peer], bytes(missing)]
        first: dict[int, list[Tensor]] = {}
        self._rest: dict[int, list[Tensor]] = {}
        for peer, parts in parts_on_device(messages, exchange.device).items():
            first[peer], self._rest[peer] = _cut(parts, rooms[peer])
        self._wait = exchange.start(first, most, traffic, name)

    def wait(self) -> dict[int, bytes]:
        """Wait for the first parts; by sender, the beginning of its message."""
        received = self._wait()
        self._received = {peer: received[peer][:length] for peer, length in self._expected.items()}
        heads = {}
        if self._received:
            if self._to_host:
                parts = torch.cat(list(self._received.values())).cpu()
                sizes = list(self._expected.values())
                self._received = dict(zip(self._received, parts.split(sizes), strict=True))
            width = min(READ_BYTES, *self._expected.values())
            starts = torch.cat([part[:width] for part in self._received.values()])
            [numbers] = self._reads.now(starts)
            read = bytes(numbers)
            heads = {
                peer: read[number * width : (number + 1) * width]
                for number, peer in enumerate(self._received)
            }
        self._has_rest |= any(head[0] & HAS_REST for head in heads.values())
        return heads

    def complete(self, lengths: Mapping[int, int]) -> dict[int, Tensor]:
        """By sender, the whole message: so many bytes. Waits for the rests, if there are any."""
        rests = None
        if self._has_rest:
            missing = {peer: max(lengths[peer] - room, 0) for peer, room in self._expected.items()}
            rests = self._exchange.start(self._rest, missing, self._traffic, self._name)()
            if self._to_host:
                sizes = [part.numel() for part in rests]
                rests = list(torch.cat(rests).cpu().split(sizes))
        return {
            peer: part[: lengths[peer]]
            if rests is None
            else torch.cat([part[: lengths[peer]], rests[peer]])
            for peer, part in self._received.items()
        }


def _length_of(piece: Piece) -> int:
    return piece.numel() if isinstance(piece, Tensor) else len(piece)


def parts_on_device(
    messages: Mapping[int, Sequence[Piece]], device: torch.device
) -> dict[int, list[Tensor]]:
    """The parts of messages on a device; those that are on the host go there in one piece."""
    on_host = bytearray()
    cuts: list[list[tuple[Piece, int]]] = []
    for parts in messages.values():
        cuts.append([])
        for part in parts:
            cuts[-1].append((part, len(on_host)))
            if isinstance(part, bytes):
                on_host += part
            elif part.device.type != device.type:
                on_host += part.numpy().tobytes()
    # One more byte, because there may be none.
    copied = to_device(torch.frombuffer(on_host + b"\0", dtype=torch.uint8), device)
    found = {}
    for peer, placed in zip(messages, cuts, strict=True):
        found[peer] = [
            part
            if isinstance(part, Tensor) and part.device.type == device.type
            else copied[start : start + _length_of(part)]
            for part, start in placed
        ]
    return found


def _cut(parts: Sequence[Tensor], length: int) -> tuple[list[Tensor], list[Tensor]]:
    """The first bytes of a message in parts, and the others."""
    first: list[Tensor] = []
    rest: list[Tensor] = []
    for part in parts:
        one, other = part.tensor_split([min(length, part.numel())])
        length -= one.numel()
        first.append(one)
        rest.append(other)
    return first, rest
