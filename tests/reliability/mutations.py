"""Ways in which bytes are harmed."""

import random
from collections.abc import Callable, Sequence

LONGEST_ADDITION = 64


def flip_a_bit(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> bytes:
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def flip_bits(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> bytes:
    for _unused in range(chance.randint(2, 40)):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(data)


def set_bytes(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> bytes:
    start = chance.randrange(len(data))
    stop = min(start + chance.randint(1, 8), len(data))
    data[start:stop] = bytes([chance.choice((0, 1, 127, 128, 255))]) * (stop - start)
    return bytes(data)


def cut(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> bytes:
    return bytes(data[: chance.randrange(len(data))])


def lengthen(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> bytes:
    return bytes(data) + chance.randbytes(chance.randint(1, LONGEST_ADDITION))


def move_a_part(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> bytes:
    first, second = sorted((chance.randrange(len(data)), chance.randrange(len(data))))
    return bytes(data[second:] + data[first:second] + data[:first])


def replace_all(chance: random.Random, data: bytearray, _: Sequence[bytes]) -> bytes:
    return chance.randbytes(len(data))


def take_another(chance: random.Random, _: bytearray, others: Sequence[bytes]) -> bytes:
    """What was meant for somebody else."""
    return chance.choice(others)


def take_another_beginning(
    chance: random.Random, data: bytearray, others: Sequence[bytes]
) -> bytes:
    """The header of another layout."""
    other = chance.choice(others)
    length = chance.randint(1, 16)
    return other[:length] + bytes(data[length:])


def take_another_end(chance: random.Random, data: bytearray, others: Sequence[bytes]) -> bytes:
    """The right header, then something else."""
    other = chance.choice(others)
    return (bytes(data[:12]) + other[12:] + bytes(len(data)))[: len(data)]


Mutation = Callable[[random.Random, bytearray, Sequence[bytes]], bytes]
MUTATIONS: tuple[Mutation, ...] = (
    flip_a_bit,
    flip_bits,
    set_bytes,
    cut,
    lengthen,
    move_a_part,
    replace_all,
    take_another,
    take_another_beginning,
    take_another_end,
)


def mutate(chance: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """Harm some bytes, which are not empty, in one of the ways; ``others`` are of the same kind."""
    return chance.choice(MUTATIONS)(chance, bytearray(data), others)
