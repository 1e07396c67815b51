"""Judges what the hosts of a job say of themselves: versions, interfaces, and whom they can
reach.
"""

from __future__ import annotations

import ipaddress
from typing import Any, TypedDict

from lightning_dct.failures.addresses import VARIABLES, in_words, is_loopback

MOST_NAMED = 8  # hosts or ranks in a message


class RankNote(TypedDict):
    """What a rank says of itself and of its host when it comes to the meeting."""

    rank: int
    host: str
    machine: str  # an identity of the host, the same for all of its ranks
    is_first: bool  # whether this is the rank that speaks for its host
    address: str  # at which the process group will have the others reach it
    problem: str  # what is wrong with that address; empty if nothing is
    towards: str  # the host's address as rank 0's host sees it; empty if there is no way
    master: str  # the address of ``MASTER_ADDR``, as this host knows it
    interfaces: dict[str, list[str]]  # addresses by interface
    chosen: bool  # whether the user has chosen an interface
    versions: dict[str, str]  # of packages, by name
    port: int | None  # at which the rank that speaks for its host listens


class MeetingPlan(TypedDict):
    """What rank 0 makes of all ranks' notes."""

    problem: str  # an error for all ranks; empty if nothing is wrong
    is_split: bool  # whether there are several hosts
    interfaces: dict[str, tuple[str, str]]  # by machine, the interface to take, and its address
    firsts: dict[str, RankNote]  # by machine, the note of the rank that speaks for it
    extra: dict[str, Any]  # what rank 0 adds


def plan_of(notes: list[RankNote], backend: str) -> MeetingPlan:
    """What rank 0 makes of all ranks' notes, without what it adds.

    Interfaces are those of hosts whose name leads back to them.
    """
    firsts: dict[str, RankNote] = {}
    for note in sorted(notes, key=lambda one: (not one["is_first"], one["rank"])):
        firsts.setdefault(note["machine"], note)
    problems = [note["problem"] for note in firsts.values() if note["problem"]]
    for package in notes[0]["versions"]:
        found = {note["versions"].get(package) for note in notes}
        if len(found) > 1:
            each = ", ".join(
                f"{one['host']} has {one['versions'].get(package)}" for one in firsts.values()
            )
            problems.append(
                f"the hosts have different versions of {package}: {each}. Install the same one"
                " on all"
            )
    chosen: dict[str, tuple[str, str]] = {}
    is_split = len(firsts) > 1
    if is_split and not problems and backend == "gloo":
        for one in firsts.values():
            if is_loopback(one["address"]):
                if one["chosen"] or (found_one := _leads_out(one, notes)) is None:
                    problems.append(_no_way_out(one))
                else:
                    chosen[one["machine"]] = found_one
                    one["address"] = found_one[1]
    return {
        "problem": f"The ranks cannot start: {'; '.join(problems)}." if problems else "",
        "is_split": is_split,
        "interfaces": chosen,
        "firsts": firsts,
        "extra": {},
    }


def _leads_out(note: RankNote, notes: list[RankNote]) -> tuple[str, str] | None:
    """The interface of a host, and its address, by which the hosts reach each other: on the way to
    ``MASTER_ADDR``.
    """
    candidates = [
        note["towards"],
        *(one["master"] for one in notes if one["machine"] != note["machine"]),
    ]
    for candidate in candidates:
        for name, addresses in note["interfaces"].items():
            if candidate in addresses and not is_loopback(candidate):
                return name, candidate
    return None


def _no_way_out(note: RankNote) -> str:
    return (
        f"the ranks on {note['host']!r} would have the address {note['address']}, which leads every"
        f" other host to itself. Put `{VARIABLES['gloo']}=NAME` before the command on"
        f" {note['host']!r}; its interfaces are {in_words(note['interfaces'])}. If none of them is"
        " in a network that the other hosts reach, as behind NAT, join the hosts by a VPN"
    )


def must_connect(one: RankNote, other: RankNote, backend: str) -> bool:
    """Whether ranks of the first host connect to the other: all to rank 0; gloo's to those of
    smaller addresses.
    """
    if other["rank"] == 0 or backend != "gloo":
        return True
    try:
        mine, theirs = (ipaddress.ip_address(host["address"]).packed for host in (one, other))
    except ValueError:
        return True
    return mine > theirs


def unreachable(failed: list[tuple[RankNote, RankNote, str]], backend: str) -> str:
    """The error for hosts that cannot connect to others: who, to whom, and why; empty if all
    can.
    """
    if not failed:
        return ""
    variable = VARIABLES.get(backend, VARIABLES["gloo"])
    each = "; ".join(
        f"host {one['host']!r} cannot connect to {other['host']!r} at {other['address']}, port"
        f" {other['port']} ({why})"
        for one, other, why in failed[:MOST_NAMED]
    )
    callers = " ".join(sorted({one["towards"] or one["address"] for one, _, _ in failed}))
    called = {other["machine"]: other for _, other, _ in failed}
    where = "; ".join(
        f"{other['host']!r} has {in_words(other['interfaces'])}" for other in called.values()
    )
    return (
        f"The ranks cannot start: {each}. The ranks connect at ports that the system chooses, not"
        " only at MASTER_PORT. If that is a firewall, let the other hosts in at all ports (`sudo"
        f" ufw allow from {callers}` on the host that is called). If it is the wrong address, name"
        f" the interface: {where}; put `{variable}=NAME` before the command there."
    )
