import math

import pytest
import torch

from lightning_dct.activations.codec import CHUNK, mixed_seed, salt, uniform

CONTENT = torch.randn(100, generator=torch.Generator().manual_seed(0))


def hashed_by_loop(x: int) -> int:
    """C. Wellons's lowbias32 on unsigned integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def test_numbers_are_the_documented_hash() -> None:
    seed = 12345
    stream = 1
    count = 5
    fingerprint = int(CONTENT.view(torch.int32).to(torch.int64).sum())
    salted = (seed * 0x9E3779B97F4A7C15 + (stream + 1) * 0xBF58476D1CE4E5B9) & ((1 << 62) - 1)
    key = fingerprint + salted
    low = hashed_by_loop(key & 0x7FFFFFFF)
    high = hashed_by_loop((key >> 31 & 0x7FFFFFFF) ^ low)
    expected = [
        (hashed_by_loop((hashed_by_loop(place ^ low) + high) & 0xFFFFFFFF) & 0xFFFFFF) / 2**24
        for place in range(count)
    ]
    assert uniform(count, salt(seed, stream), CONTENT).tolist() == expected


def test_numbers_are_uniform_and_uncorrelated() -> None:
    n = 4 * CHUNK + 7
    numbers = uniform(n, salt(mixed_seed(0, 0), 0), CONTENT)
    assert bool(((numbers >= 0) & (numbers < 1)).all())
    counts = torch.histc(numbers, bins=64, min=0, max=1)
    chi_squared = float(((counts - n / 64) ** 2 / (n / 64)).sum())
    assert abs(chi_squared - 63) < 5 * math.sqrt(2 * 63)
    centred = numbers - 0.5
    others = [
        centred.roll(1),
        centred.roll(CHUNK),
        uniform(n, salt(mixed_seed(0, 1), 0), CONTENT) - 0.5,
        uniform(n, salt(mixed_seed(1, 0), 0), CONTENT) - 0.5,
        uniform(n, salt(mixed_seed(0, 0), 1), CONTENT) - 0.5,
        uniform(n, salt(mixed_seed(0, 0), 0), CONTENT + 1) - 0.5,
    ]
    for other in others:
        correlation = float((centred * other).mean()) * 12
        assert abs(correlation) < 5 / math.sqrt(n)


def test_numbers_are_a_pure_function_whatever_zeros_the_content_ends_in() -> None:
    torch.manual_seed(0)
    first = uniform(10, salt(5, 2), CONTENT)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    padded = torch.cat([CONTENT, torch.zeros(50)])
    assert torch.equal(uniform(10, salt(5, 2), padded), first)
    assert torch.equal(uniform(20, salt(5, 2), padded)[:10], first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "content", [torch.empty(0), torch.tensor([math.nan, math.inf]), torch.randn(3, 4).bfloat16()]
)
def test_any_content(content: torch.Tensor) -> None:
    assert uniform(0, salt(0, 0), content).shape == (0,)
    assert uniform(3, salt((1 << 63) - 1, 2), content).dtype == torch.float32
