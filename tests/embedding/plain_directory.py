"""Growing tables without arrays: which ids have rows, in dicts, and all ranks' rows and messages in
one process.
"""

from collections import defaultdict

from torch import Tensor

from embedding.reference import Emulation
from lightning_dct.embedding.owners import RowOwners
from lightning_dct.reference import Settings


class PlainCache:
    """Keys with slots, the times of their last requests, and counts."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.time = 0
        self.slots: dict[int, int] = {}
        self.last_used: dict[int, int] = {}
        self.counts: dict[int, int] = defaultdict(int)

    def admit(self, wanted: list[int]) -> list[int]:
        """Admit keys, and give those that were evicted: the oldest, of equally old ones that in the
        lowest slot.
        """
        self.time += 1
        new = [key for key in wanted if key not in self.slots]
        excess = len(self.slots) + len(new) - max(self.capacity, len(wanted))
        old = sorted(
            set(self.slots) - set(wanted), key=lambda key: (self.last_used[key], self.slots[key])
        )
        evicted = old[: max(excess, 0)]
        for key in evicted:
            del self.slots[key], self.last_used[key], self.counts[key]
        for key in new:
            self.slots[key] = next(slot for slot in range(10**6) if slot not in self.slots.values())
        for key in wanted:
            self.last_used[key] = self.time
            self.counts[key] += 1
        return evicted


class PlainDirectory:
    """Keys with rows, and keys that are being counted."""

    def __init__(self, capacity: int, admit_after: int) -> None:
        self.admit_after = admit_after
        self.rows = PlainCache(capacity)
        self.counted = PlainCache(capacity)

    def request(self, keys: list[int]) -> tuple[list[int], list[int]]:
        """The keys that get a row, and those that lose it."""
        there = [key for key in keys if key in self.rows.slots]
        due = [key for key in keys if key not in self.rows.slots]
        if self.admit_after > 1:
            self.counted.admit(due)
            due = [key for key in due if self.counted.counts[key] >= self.admit_after]
        made = due[: self.rows.capacity - len(there)]
        return made, self.rows.admit(sorted(there + made))


class GrowingEmulation(Emulation):
    """All ranks of growing tables at once, for some ids that may occur: ``ids[table]``, in the
    order of their keys.
    """

    def __init__(
        self,
        ids: list[Tensor],
        defaults: Tensor,
        placement: RowOwners,
        settings: Settings,
        room: int,
        admit_after: int,
    ) -> None:
        tables = [row.repeat(len(known), 1) for row, known in zip(defaults, ids, strict=True)]
        super().__init__(tables, [known.numpy() for known in ids], placement, settings)
        self.defaults = defaults
        self.directories = [PlainDirectory(room, admit_after) for _ in self.world]
        self.admitted = [0 for _ in self.world]
        self.evicted = [0 for _ in self.world]

    def forward(self, step: int, bags: dict[int, list], pooling: str) -> dict[int, Tensor]:
        """Make and evict rows, then as for tables of fixed size."""
        self.where = {
            int(key): (table, row)
            for table, keys in enumerate(self.keys)
            for row, key in enumerate(keys.tolist())
        }
        for owner in self.world:
            asked = {
                int(self.keys[table][row])
                for samples in bags.values()
                for table, rows in self._asked(owner, samples).items()
                for row in rows
            }
            made, evicted = self.directories[owner].request(sorted(asked))
            self.admitted[owner] += len(made)
            self.evicted[owner] += len(evicted)
            for key in evicted:
                table, row = self.where[key]
                self.tables[table][row] = self.defaults[table]
                self.seen -= {(user, table, row) for user in self.world}
        return super().forward(step, bags, pooling)

    def backward(
        self, bags: dict[int, list], gradients: dict[int, Tensor], pooling: str
    ) -> list[Tensor]:
        """As for tables of fixed size, without what arrives for ids without rows."""
        total = super().backward(bags, gradients, pooling)
        there = {self.where[key] for directory in self.directories for key in directory.rows.slots}
        for table, gradient in enumerate(total):
            for row in range(len(gradient)):
                if (table, row) not in there:
                    gradient[row] = 0
        return total
