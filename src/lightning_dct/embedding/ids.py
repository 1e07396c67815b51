"""The code of a request's ids, in little more than their entropy: rows are grouped by how often they were requested.

Look-ups are uneven: some rows are in every batch, most in hardly any. Among rows with the same number of requests, a
request is a uniform choice. :class:`~lightning_dct.wire.positions.PositionCode` (or its bitmap, if the request takes
most of a group) needs almost the fewest bits for it. So rows are grouped by the power of two below their count. Both
ends count the same requests, so they know the same groups.

==============  ===================================================================================
part            bits
==============  ===================================================================================
number of rows  for each group as many bits as its size has, lowest first; the last group is "all
                rows", for rows that are requested for the first time
positions       for each group, places among its rows in ascending order
==============  ===================================================================================
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dct.embedding.owners import Int64Array
from lightning_dct.kernels.bits import num_bytes, pack_bits, unpack_bits
from lightning_dct.wire.positions import PayloadError, PositionCode

# Requests between two groupings; in the beginning, rows are also grouped whenever the number of requests has doubled.
REGROUP_EVERY = 64
# Requests between two halvings of the counts.
HALVE_EVERY = 1024


class RequestCode:
    """Encodes and decodes ascending distinct places below ``universe``, the number of the owner's rows."""

    def __init__(self, universe: int) -> None:
        self.universe = universe
        self._rows = np.empty(0, dtype=np.int64)
        self._groups = np.empty(0, dtype=np.int64)
        self._split_groups()

    def learn(self, rows: Int64Array, counts: Int64Array) -> None:
        """Group ascending rows, ``[n]``, by their counts of requests, ``[n]``; ignore rows with count 0."""
        seen = counts > 0
        self._rows = rows[seen]
        self._groups = np.frexp(counts[seen])[1].astype(np.int64) - 1
        self._split_groups()

    def encode(self, places: Int64Array) -> Tensor:
        """Encode places, shape ``[k]``, ascending and distinct, as uint8 on the CPU."""
        known = np.zeros(places.size, dtype=bool)
        found = np.searchsorted(self._rows, places)
        inside = found < self._rows.size
        known[inside] = self._rows[found[inside]] == places[inside]
        groups, seen = self._groups[found[known]], places[known]
        parts = [np.searchsorted(members, seen[groups == group]) for group, members in enumerate(self._members)]
        parts.append(places[~known])
        bits = [
            torch.tensor([part.size >> place & 1 for place in range(size.bit_length())], dtype=torch.uint8)
            for part, size in zip(parts, self._sizes, strict=True)
        ]
        for part, size in zip(parts, self._sizes, strict=True):
            if 0 < part.size < size:
                bits.append(PositionCode(size, part.size).encode_bits(torch.from_numpy(part)))
        return pack_bits(torch.cat(bits))

    def decode(self, data: Tensor, most: int) -> Int64Array:
        """Undo :meth:`encode`. More than ``most`` places are refused: corrupt bits could claim all of a large table.

        Raises:
            PayloadError: The bytes are not a request.
        """
        widths = [size.bit_length() for size in self._sizes]
        bits = unpack_bits(data.cpu(), 8 * data.numel())
        if bits.numel() < sum(widths):
            raise PayloadError("a request for rows ends too early")
        start, counts = 0, []
        for width in widths:
            counts.append(sum(bit << place for place, bit in enumerate(bits[start : start + width].tolist())))
            start += width
        if any(count > size for count, size in zip(counts, self._sizes, strict=True)):
            raise PayloadError("a request for rows claims more of them than there are")
        if sum(counts) > most:
            raise PayloadError(f"a request for rows claims {sum(counts)} of them, for {most} look-ups")
        found = []
        for group, (count, size) in enumerate(zip(counts, self._sizes, strict=True)):
            places = np.arange(count, dtype=np.int64)
            if 0 < count < size:
                code = PositionCode(size, count)
                part = bits[start : start + code.num_bits]
                start += code.num_bits
                if part.numel() < code.num_bits:
                    raise PayloadError("a request for rows ends too early")
                places = code.decode_bits(part, count).numpy()
            found.append(places if group == len(self._members) else self._members[group][places])
        if num_bytes(start) != data.numel():
            raise PayloadError(f"a request for rows has {data.numel()} bytes, but its content takes {num_bytes(start)}")
        wanted = np.sort(np.concatenate(found))
        if (wanted[1:] == wanted[:-1]).any():
            raise PayloadError("a request has a row twice")
        return wanted

    def state_dict(self) -> dict[str, Any]:
        """The groups."""
        return {"rows": torch.from_numpy(self._rows.copy()), "groups": torch.from_numpy(self._groups.copy())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore saved groups."""
        self._rows, self._groups = state["rows"].numpy().copy(), state["groups"].numpy().copy()
        self._split_groups()

    def _split_groups(self) -> None:
        number = int(self._groups.max()) + 1 if self._groups.size else 0
        self._members = [self._rows[self._groups == group] for group in range(number)]
        self._sizes = [*(members.size for members in self._members), self.universe]
