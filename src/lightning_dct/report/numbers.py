"""Numbers as text: bytes, ratios, shares, times, and ticks of axes."""

from __future__ import annotations

import math

from lightning_dct.callbacks.compression_monitor import format_bytes

UNKNOWN = "-"
"""The text of a figure that is not known."""


def text_of(unit: str, value: float | None) -> str:
    """Write a number.

    Args:
        unit: ``bytes``, ``ratio``, ``share``, ``milliseconds`` (written without the unit), ``seconds`` or ``steps``;
            anything else is a number.
        value: None if it is not known.

    Example:
        >>> [text_of("bytes", 1500), text_of("ratio", 131.26), text_of("share", 0.0312), text_of("number", None)]
        ['1.50 kB', '131x', '3.12%', '-']
    """
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    match unit:
        case "bytes":
            return format_bytes(round(value))
        case "ratio":
            return f"{value:,.0f}x" if value >= 100 else f"{value:.1f}x"
        case "share":
            return f"{100 * value:.3g}%"
        case "milliseconds":
            return f"{value:.2g}" if value < 10 else f"{value:,.0f}"
        case "seconds":
            minutes, seconds = divmod(round(value), 60)
            hours, minutes = divmod(minutes, 60)
            return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
        case "steps":
            return f"{value:,.0f}"
        case _:
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def tick_of(unit: str, value: float) -> str:
    """Write the tick of an axis, as short as possible; units as in :func:`text_of`.

    Example:
        >>> [tick_of("bytes", 2e6), tick_of("ratio", 100.0), tick_of("share", 0.01), tick_of("steps", 2500.0)]
        ['2 MB', '100x', '1%', '2,500']
    """
    match unit:
        case "bytes":
            amount, name = format_bytes(round(value)).split()
            return f"{float(amount):.4g} {name}" if value else "0"
        case "ratio":
            return f"{value:,.4g}x" if value < 1e4 else f"{value:,.0f}x"
        case "share":
            return f"{100 * value:.4g}%"
        case "steps":
            return f"{value:,.0f}"
        case _:
            return f"{value:.6g}"
