"""Forecasts the memory of sharded tables on a rank: its own rows, and what it remembers besides."""

from collections.abc import Sequence

from lightning_dct.embedding.cache import INDEX_BYTES
from lightning_dct.embedding.messages import CODE_BYTES
from lightning_dct.embedding.store import default_room
from lightning_dct.traffic import FP32_BYTES, format_bytes, plain_table


def describe_tables(
    table_rows: Sequence[int], dim: int, ranks: int, cache_rows: int | None = None
) -> str:
    """A table of the bytes on a rank, for fp32 rows, if all ranks use the rows of all owners alike.

    ``cache_rows`` is the setting of :class:`~lightning_dct.ShardedEmbeddingBags`; None for its
    default.
    """
    rows = sum(table_rows)
    row_bytes = FP32_BYTES * dim
    own = -(-rows // ranks)
    room = min(default_room(own, dim, row_bytes) if cache_rows is None else cache_rows, rows - own)
    index = room * 2 * (1 + INDEX_BYTES + CODE_BYTES)
    parts = {
        "own rows": (own, own * row_bytes),
        "copies of others' rows, and residuals": (room, 2 * room * row_bytes),
        "mirrors of what others have": (room, room * row_bytes),
        "index of both, at most": (2 * room, index),
    }
    besides = 3 * room * row_bytes + index
    lines = [(name, f"{number:,}", format_bytes(size)) for name, (number, size) in parts.items()]
    share = f"{format_bytes(besides)}, {besides / (own * row_bytes):.2f} times the own rows"
    return (
        f"Tables of {rows:,} rows of {dim} entries on {ranks} ranks:\n"
        + plain_table([("on a rank", "rows", "bytes"), *lines])
        + f"\nbesides the own rows: {share} (cache_rows={room})"
    )
