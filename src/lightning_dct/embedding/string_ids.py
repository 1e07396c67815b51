"""Ids of strings: a hash that is the same in every process, on every machine and in every
version.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dct.config import check_integer
from lightning_dct.embedding.owners import ID_SPACE

# Bytes of a hash; the ids of growing tables leave out its highest bit.
HASH_BYTES = 8


def string_ids(strings: Sequence[Any], rows: int | None = None) -> Tensor:
    """Ids of strings, for :class:`~lightning_dct.GrowingEmbeddingBags` or, with ``rows``, for a
    table of fixed size.

    The id of a string is the BLAKE2b hash (RFC 7693) of its UTF-8 bytes, 8 bytes long and read as a
    number with the highest byte first, modulo ``2**63``, or modulo ``rows``. So ``printf %s user_7
    | b2sum -l 64`` shows the hash. Python's own ``hash`` of a string is another number in each
    process: neither other ranks nor a resumed run have it.

    Two of ``n`` strings share an id with a probability of about ``n**2 / 2**64``. With ``rows``
    many strings share one.

    Example::

        ids = string_ids(["user_7", "user_8"])                          # int64 [2]
        pooled = growing_tables(string_ids([["user_7", "shoes"]]))      # ids [1, 2]: of one sample and two tables

    Args:
        strings: Strings, or equally long lists of them, or an array of them.
        rows: The number of rows of the table; None for a growing one.

    Returns:
        int64, in the shape of ``strings``.

    Raises:
        TypeError: Something among them is no string, such as a missing value.
        ValueError: ``rows`` is below 1.
    """
    if isinstance(strings, str):
        raise TypeError(
            f"`strings` must be a list or an array of strings; got the string {strings!r}."
        )
    if rows is not None:
        check_integer("rows", rows, minimum=1)
    given = np.array(strings, dtype=object)
    ids = np.fromiter((_hashed(one) for one in given.flat), np.uint64, given.size)
    limited = ids % np.uint64(ID_SPACE if rows is None else rows)
    return torch.from_numpy(limited.astype(np.int64).reshape(given.shape))


def _hashed(one: Any) -> int:
    if not isinstance(one, str):
        raise TypeError(
            f"`strings` must be strings, in lists of the same length; there is {one!r:.100}. Give a"
            " missing value a string of its own, such as an empty one."
        )
    return int.from_bytes(blake2b(one.encode(), digest_size=HASH_BYTES).digest(), "big")
