"""TCP connections of the lifelines: lines of JSON, with keep-alive probes that notice a lost
host.
"""

import ipaddress
import json
import math
import os
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lightning_dct.failures.messages import Hello, Welcome

# A host that does not answer the kernel's probes for 5 + 3 * 4 seconds counts as lost; so does one
# that acknowledges no bytes for as many milliseconds.
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 4, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 17_000}
# Of a caller that has not shown yet that it is a rank. Questions of ranks list all ranks, and have
# no limit.
LONGEST_LINE = 1 << 16
WELCOME: Welcome = {"welcome": True}  # the hub's answer to the hello of a rank
AGAIN_S = 0.02  # until a rank calls again, after the hub has hung up

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def listen(port: int) -> socket.socket:
    """Listen on a port, 0 for any free one, over IPv6 and IPv4 if both exist; an OSError if the
    port is taken.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = _noted(socket.create_server(("", port), family=family, dualstack_ipv6=both))
    listener.setblocking(False)  # a caller may close its connection before it is accepted
    return listener


def pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection within this process."""
    one, other = socket.socketpair()
    return _noted(one), _noted(other)


def accept(listener: socket.socket) -> socket.socket:
    """Accept a waiting connection."""
    return _noted(_kept_alive(listener.accept()[0]))


def connect(addresses: list[str], port: int, timeout_s: float) -> socket.socket:
    """Connect to the first address that answers; an OSError if none does.

    Each has its share of the time that is left: a firewall may drop what goes to the first.
    """
    error: OSError = OSError("no address was given")
    deadline = time.monotonic() + timeout_s
    for number, address in enumerate(addresses):
        share = max(deadline - time.monotonic(), AGAIN_S) / (len(addresses) - number + 1)
        try:
            connection = socket.create_connection((address, port), timeout=share)
        except OSError as failure:
            error = failure
            continue
        connection.settimeout(None)
        return _noted(_kept_alive(connection))
    raise error


def join_hub(addresses: list[str], port: int, hello: Hello, timeout_s: float) -> socket.socket:
    """Connect, say hello and wait for the welcome; an OSError if it has not come after
    ``timeout_s``.

    A hub with many callers hangs up on those that have not sent anything yet. So the hello follows
    the connection at once, and a rank that is hung up on calls again.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        connection = connect(addresses, port, timeout_s)
        try:
            connection.settimeout(max(deadline - time.monotonic(), AGAIN_S))
            write_line(connection, hello)
            # Unbuffered, because what follows the welcome belongs to the next reader.
            answer = connection.makefile("rb", buffering=0).readline(LONGEST_LINE)
            if answer == _line(WELCOME):
                connection.settimeout(None)
                return connection
            if answer:
                raise OSError("the process that answers there is not rank 0")
        except ConnectionError:
            pass
        except OSError:
            # The welcome may be on its way: it must not look as if this rank had died.
            with suppress(OSError):
                write_line(connection, {"left": True})
            connection.close()
            raise
        connection.close()
        if time.monotonic() >= deadline:
            raise ConnectionError("it hangs up before the welcome")
        time.sleep(AGAIN_S)


def address_towards(host: str) -> str:
    """This host's own address as ``host`` sees it, without sending a packet; an OSError if there is
    no route.
    """
    family, kind, *_, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def name_of_this_host(host: str) -> str:
    """A name by which others reach this host: ``host`` if that is this one, else the address that
    ``host`` sees.
    """
    own = address_towards(host)
    here = {str(place[0]) for *_, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)}
    return host if own in here or ipaddress.ip_address(own).is_loopback else own


def write_line(connection: socket.socket, message: Mapping[str, object]) -> None:
    """Send one message; an OSError if the connection is gone."""
    connection.sendall(_line(message))


def receive(
    connection: socket.socket,
    buffer: bytearray,
    handle: Callable[[Any], None],
    longest: float = math.inf,
) -> str:
    """Handle the messages that have arrived; the result says how the connection has ended, empty if
    it has not.

    One that sends a line of more than ``longest`` bytes counts as lost.
    """
    try:
        received = connection.recv(1 << 16)
        for message in read_lines(buffer, received, longest):
            handle(message)
    except ConnectionError:
        return "has died"
    except Exception:
        # The kernel's probes got no answer, or an unknown caller sent something else.
        return "cannot be reached any more"
    return "" if received else "has died"


def read_lines(
    buffer: bytearray, received: bytes, longest: float = math.inf
) -> list[dict[str, Any]]:
    """The messages that ``received`` completes, or a ValueError; ``buffer`` keeps an incomplete
    one.
    """
    buffer += received
    *lines, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    messages = [json.loads(line) for line in lines]
    if len(buffer) > longest or not all(isinstance(message, dict) for message in messages):
        raise ValueError("this is not a message between ranks")
    return messages


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):  # only Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _noted(connection: socket.socket) -> socket.socket:
    _open.add(connection)
    return connection


def _close_in_child() -> None:
    """A forked worker of a DataLoader must not keep the connections of a dead rank open."""
    for connection in list(_open):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
