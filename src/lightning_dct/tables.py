"""Numbers and tables as text, for what is printed."""

from collections.abc import Sequence


def format_bytes(num_bytes: float) -> str:
    """A byte count in decimal units, as network rates have.

    Example:
        >>> format_bytes(999), format_bytes(123_456)
        ('999 B', '123.46 kB')
    """
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if round(value, 2) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def rate_text(bits_per_second: float, digits: int = 6) -> str:
    """A rate as people write it, of which so many digits are known.

    Example:
        >>> rate_text(1e9), rate_text(2.54e8, digits=2)
        ('1 Gbit/s', '250 Mbit/s')
    """
    bits_per_second = float(f"{bits_per_second:.{digits}g}")
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if bits_per_second >= factor:
            return f"{bits_per_second / factor:g} {prefix}bit/s"
    return f"{bits_per_second:g} bit/s"


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """A table with its first column on the left and all others on the right.

    Example:
        >>> print(plain_table([["what", "bytes"], ["ddp", "1,000"]]))
        what  bytes
        ddp   1,000
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *cells[1:]])

    return "\n".join(map(line, rows))
