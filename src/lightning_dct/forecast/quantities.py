"""Quantities as people write them: rates of links and numbers of parameters."""

from __future__ import annotations

import math
import re

MOST_PARAMETERS = 10**15
"""More than any model has; beyond it sizes in bytes no longer fit the numbers that tensors count with."""

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BITS = {"bit": 1, "B": 8}
_RATE = re.compile(r"(?P<number>[\d.]+(?:e\d+)?)\s*(?P<prefix>[kMGT]?)(?P<unit>bit|B)(?:/s)?")
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_COUNT = re.compile(r"(?P<number>[\d._]+(?:e\d+)?)\s*(?P<suffix>[kMGBT]?)")


def parse_rate(text: str) -> float:
    """The rate of a link in bits a second.

    Args:
        text: A number with its unit, decimal: bits (``"1Gbit"``, ``"100Mbit/s"``) or bytes (``"1.2GB/s"``).

    Raises:
        ValueError: There is no unit, or no positive and finite number.

    Example:
        >>> parse_rate("100Mbit/s"), parse_rate("1.5GB")
        (100000000.0, 12000000000.0)
    """
    match = _RATE.fullmatch(text.strip())
    rate = _number(match["number"]) * _PREFIXES[match["prefix"]] * _BITS[match["unit"]] if match else 0.0
    if not 0 < rate < math.inf:
        raise ValueError(f"{text!r} is not the rate of a link: write a number and its unit, as 1Gbit, 100Mbit or 1.2GB")
    return rate


def parse_count(text: str) -> int:
    """A whole number from 1 to :data:`MOST_PARAMETERS`.

    Args:
        text: As ``"100M"``, ``"1.3B"``, ``"25_000_000"`` or ``"1e8"``.

    Raises:
        ValueError: It is something else.

    Example:
        >>> parse_count("1.3B")
        1300000000
    """
    match = _COUNT.fullmatch(text.strip())
    number = _number(match["number"]) * _COUNTS[match["suffix"]] if match else 0.0
    if number < 1:
        raise ValueError(f"{text!r} is not a number of parameters: write it as 25000000, 100M or 1.3B")
    if number > MOST_PARAMETERS:
        raise ValueError(f"{text!r} are more parameters than any model has: give {MOST_PARAMETERS:.0e} at most")
    return round(number)


def _number(digits: str) -> float:
    """The number; 0 when it is none."""
    try:
        return float(digits)
    except ValueError:
        return 0.0


def rate_text(bits_per_second: float) -> str:
    """A rate as people write it.

    Example:
        >>> rate_text(1e9), rate_text(2.5e8)
        ('1 Gbit/s', '250 Mbit/s')
    """
    for prefix, factor in reversed(_PREFIXES.items()):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:g} {prefix}bit/s"
    return f"{bits_per_second:g} bit/s"
