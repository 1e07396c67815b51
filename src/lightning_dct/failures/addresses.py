"""The interfaces and addresses of this host, and those that torch's backends will use."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import uuid
from contextlib import suppress
from pathlib import Path

VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
_GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface of this host, by its name, IPv4 first; on Linux only,
    elsewhere none.
    """
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    if not Path("/proc/net").exists():
        return found
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, addresses in found.items():
            with suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                addresses.append(socket.inet_ntoa(answer[20:24]))
    with suppress(OSError):  # this kernel has no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20":  # addresses of a link alone need its name, too
                found.setdefault(name, []).append(str(ipaddress.ip_address(bytes.fromhex(digits))))
    return found


def in_words(known: dict[str, list[str]]) -> str:
    """Interfaces and their addresses, for a message: ``lo 127.0.0.1, eth0 10.0.0.1``."""
    return ", ".join(" ".join([name, *addresses[:1]]) for name, addresses in known.items())


def machine() -> str:
    """An identity of this host, which its processes share: of a container, if that has a network of
    its own.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.getnode():x}"


def resolve(host: str) -> str:
    """The first address of a host; an OSError if its name is not known."""
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def is_loopback(address: str) -> bool:
    """Whether an address leads back to the host that uses it; a name does not."""
    with suppress(ValueError):
        return ipaddress.ip_address(address).is_loopback
    return False


def data_address(backend: str, known: dict[str, list[str]]) -> tuple[str, str]:
    """The address of this host at which other ranks will reach this one, and what is wrong with it,
    in words.

    That is the first interface in the backend's variable (``GLOO_SOCKET_IFNAME``,
    ``NCCL_SOCKET_IFNAME``), else what this host's own name resolves to. NCCL then looks for an
    interface by itself.
    """
    variable = VARIABLES.get(backend, VARIABLES["gloo"])
    # NCCL takes prefixes, "^" for all but these, and "=" for exact names.
    wanted = [
        word.strip() for word in os.environ.get(variable, "").lstrip("=").split(",") if word.strip()
    ]
    if not wanted or wanted[0].startswith("^"):
        return _address_of_name(), ""
    for name, addresses in known.items():
        if addresses and (name == wanted[0] or (backend == "nccl" and name.startswith(wanted[0]))):
            return addresses[0], ""
    if wanted[0] in known:
        return "", f"`{variable}={wanted[0]}` names an interface that has no address" if any(
            known.values()
        ) else ""
    return "", f"`{variable}={wanted[0]}` names an interface that does not exist"


def _address_of_name() -> str:
    """What this host's name resolves to, if it is an address of this host; gloo takes the loopback
    otherwise.
    """
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(
            socket.gethostname(), 0, type=socket.SOCK_STREAM
        ):
            with suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
                return str(place[0])
    return "127.0.0.1"
