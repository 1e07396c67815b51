"""A wire on which every frame travels for a given time, for kernels without ``netem``; one thread
carries all.
"""

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from contextlib import suppress

# From linux/if_tun.h: name an interface of whole frames, without a header of its own.
_TUNSETIFF = 0x400454CA
_IFF_TAP = 0x0002
_IFF_NO_PI = 0x1000
_LARGEST_FRAME = 65600


class DelayedWire(threading.Thread):
    """Interfaces on one Ethernet; a frame that one of them sends reaches all others after
    ``seconds``.

    The interfaces are made here, and removed when the wire is closed. An OSError means that this
    machine has no ``/dev/net/tun``, or that this user may not use it.
    """

    def __init__(self, interfaces: list[str], seconds: float) -> None:
        super().__init__(daemon=True, name="delayed wire")
        self._seconds = seconds
        self._ends: list[int] = []
        self._travelling: deque[tuple[float, int, bytes]] = deque()
        self._closing, self._closed = os.pipe()
        for name in interfaces:
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            self._ends.append(end)
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
        self.start()

    def run(self) -> None:
        while True:
            wait = (
                None
                if not self._travelling
                else max(0.0, self._travelling[0][0] - time.monotonic())
            )
            ready, _, _ = select.select([*self._ends, self._closing], [], [], wait)
            if self._closing in ready:
                return
            for end in ready:
                self._travelling.append(
                    (time.monotonic() + self._seconds, end, os.read(end, _LARGEST_FRAME))
                )
            while self._travelling and self._travelling[0][0] <= time.monotonic():
                _, origin, frame = self._travelling.popleft()
                for end in self._ends:
                    if end != origin:
                        # An interface may be down or full. Ethernet loses frames, too, and TCP
                        # sends them again.
                        with suppress(OSError):
                            os.write(end, frame)

    def close(self) -> None:
        os.write(self._closed, b"x")
        self.join()
        for end in (*self._ends, self._closing, self._closed):
            os.close(end)
