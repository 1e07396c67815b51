"""Where ranks may stop together: places through which all of them go, counted, and agreed on without a collective.

A signal reaches ranks at different moments, one in step 7, another in step 8. The hub asks every rank how many places
it has passed, and answers with the first that none can have passed: the largest count, plus one. A rank that has been
asked waits at its next place for the answer, so that it cannot go too far meanwhile:

    rank 0    7 passed ── asked: 7 ─────────── place 8: waits, hears 9 ─── place 9: stops
    rank 1    8 passed ──── asked: 8 ── hears 9 ────────────────────────── place 9: stops

As long as nobody asks, a place costs a lock that nobody else wants.
"""

from __future__ import annotations

import threading


class Places:
    """One rank's count, and what is to be done at which place; its main thread passes, another one listens."""

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._passed = 0
        self._asked: set[int] = set()
        self._due: dict[int, list[int]] = {}
        self._released = False

    def passed(self) -> list[int]:
        """Pass one more place, as soon as it is known what is to be done there.

        Returns:
            The signals that all ranks act on here, mostly none.
        """
        with self._turn:
            self._passed += 1
            while self._asked and not self._released:
                self._turn.wait()
            return sorted(self._due.pop(self._passed, []))

    def ask(self, signal_number: int) -> int:
        """How many places this rank has passed; at the next one it waits for :meth:`settle`."""
        with self._turn:
            self._asked.add(signal_number)
            return self._passed

    def settle(self, signal_number: int, place: int) -> None:
        """All ranks act on a signal when they have passed so many places."""
        with self._turn:
            self._asked.discard(signal_number)
            self._due.setdefault(place, []).append(signal_number)
            self._turn.notify_all()

    def release(self) -> None:
        """Wait for no answer any more: none will come."""
        with self._turn:
            self._released = True
            self._turn.notify_all()
