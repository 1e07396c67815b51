r"""Lets the ranks of several hosts meet before they make a process group, and finds what would keep
them from it.

A process group connects each pair of ranks at ports that the system chooses. What goes wrong there,
such as a firewall or an interface that only its own host knows, shows as silence until the group's
timeout. So the ranks talk first, in the store that they all reach anyway, at ``MASTER_ADDR`` and
``MASTER_PORT``:

    rank r     request/r = a new random word       the store may be full of stale keys of an earlier start
    rank 0     reply/word = the name of this start only a living rank 0 can answer that word
    rank r     note/r = its host, addresses, versions
    rank 0     plan = all notes, and what is wrong with them
    one rank of each host    tries to connect to the others as the group will, and says why it cannot
    rank 0     verdict = what is wrong, if anything

If something is wrong, all ranks raise the same error. While a rank waits it says for whom
(:mod:`lightning_dct.failures.waiting`).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import TCPStore

from lightning_dct.__about__ import __version__
from lightning_dct.failures.addresses import (
    VARIABLES,
    data_address,
    in_words,
    interfaces,
    is_loopback,
    machine,
    resolve,
)
from lightning_dct.failures.hosts import (
    MOST_NAMED,
    MeetingPlan,
    RankNote,
    must_connect,
    plan_of,
    unreachable,
)
from lightning_dct.failures.sockets import address_towards, listen
from lightning_dct.failures.waiting import knock, listed, say, waiting

PREFIX = "lightning_dct"
POLL_S = 0.01
SLOW_POLL_S = 0.2  # once the wait is long
REACH_S = 8.0  # for one host to connect to another
READ_S = 5.0  # for the others to read why the meeting has failed


@dataclass(frozen=True)
class Job:
    """What a rank knows of its job before it can talk to others.

    Attributes:
        host: Address or name of the host with rank 0, where ``port`` is the port of the store.
        has_store: The launcher holds the store, as torchrun's agents do; else rank 0 does.
    """

    rank: int
    world_size: int
    host: str
    port: int
    backend: str = "gloo"
    has_store: bool = False
    local_rank: int = 0

    @property
    def speaks(self) -> bool:
        """Whether this rank prints what concerns its host."""
        return self.local_rank == 0


class Meeting:
    """One rank's side of a meeting; ``name`` is new for each start of a job."""

    def __init__(self, job: Job, timeout: timedelta) -> None:
        self.job = job
        self.name = ""
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._timeout = timeout
        self._missing: list[int] = list(range(1, job.world_size))
        self._holds_store = job.rank == 0 and not job.has_store
        with self._waits(self._why_not_all if self._holds_store else self._why_no_store):
            self.store = self._connect()

    def hold(self, extra: Callable[[], Mapping[str, Any]] = dict) -> dict[str, Any]:
        """Meet all ranks, and return what rank 0 adds by ``extra``.

        Raises:
            RuntimeError: A rank has not come within the timeout, versions differ, or hosts cannot
                reach each other.
        """
        own = self._own_note()
        listener = _Listener() if own["is_first"] else None
        if listener is not None:
            own["port"] = listener.port
        try:
            plan = self._lead(own, extra) if self.job.rank == 0 else self._follow(own)
            if listener is not None and plan["is_split"]:
                listener.answer(self.name)
            if plan["problem"]:
                self._fail(plan["problem"])
            self._take_interface(plan)
            if plan["is_split"]:
                self._reach_others(plan, own)
        finally:
            if listener is not None:
                listener.close()
        return dict(plan["extra"])

    def _waits(self, describe: Callable[[], str]) -> Any:
        # All ranks of a host wait for the same, so one of them says it.
        return waiting(self.job.rank, describe) if self.job.speaks else nullcontext()

    def _connect(self) -> TCPStore:
        job = self.job
        if self._holds_store:
            try:
                return new_store(job.host, job.port, self._timeout)
            except RuntimeError as error:
                if "EADDRINUSE" not in str(error):
                    raise
                raise RuntimeError(
                    f"Rank 0 cannot listen at port {job.port}, because another process does: `ss"
                    f" -ltnp | grep {job.port}` names it. End it, or take another MASTER_PORT on"
                    " all hosts."
                ) from None
        # torch's own client prints warnings while nobody listens, and does not say why.
        while why := knock(job.host, job.port):
            if time.monotonic() > self._deadline:
                raise RuntimeError(f"{self._whom_at()}: {why}. {self._why_no_store()}")
            time.sleep(SLOW_POLL_S)
        return TCPStore(job.host, job.port, is_master=False, timeout=self._timeout)

    def _own_note(self) -> RankNote:
        known = interfaces()
        address, problem = data_address(self.job.backend, known)
        if problem:
            problem = (
                f"{problem} on host {socket.gethostname()!r}; name one of its interfaces:"
                f" {in_words(known)}"
            )
        towards = master = ""
        with suppress(OSError):
            master = resolve(self.job.host)
            towards = address_towards(master)
        return {
            "rank": self.job.rank,
            "host": socket.gethostname(),
            "machine": machine(),
            "is_first": self.job.speaks,
            "address": address,
            "problem": problem,
            "towards": towards,
            "master": master,
            "interfaces": known,
            "chosen": bool(os.environ.get(VARIABLES.get(self.job.backend, ""))),
            "versions": {"lightning_dct": __version__, "torch": torch.__version__},
            "port": None,
        }

    # Rank 0, and the others.

    def _lead(self, own: RankNote, extra: Callable[[], Mapping[str, Any]]) -> MeetingPlan:
        self.name = secrets.token_hex(8)
        answered: set[str] = set()

        def all_have_come() -> bool:
            for rank in self._missing:
                request = f"{PREFIX}/request/{rank}"
                if (
                    self.store.check([request])
                    and (word := self.store.get(request).decode()) not in answered
                ):
                    answered.add(word)
                    self.store.set(f"{PREFIX}/reply/{word}", self.name)
            self._missing = [
                rank for rank in self._missing if not self.store.check([self._key(f"note/{rank}")])
            ]
            return not self._missing

        with self._waits(self._why_not_all):
            self._until(all_have_come, self._why_not_all)
        others = [
            self.store.get(self._key(f"note/{rank}")) for rank in range(1, self.job.world_size)
        ]
        plan = plan_of([own, *map(json.loads, others)], self.job.backend)
        if not plan["problem"]:
            plan["extra"] = dict(extra())
        self.store.set(self._key("plan"), json.dumps(plan))
        return plan

    def _follow(self, own: RankNote) -> MeetingPlan:
        word = secrets.token_hex(16)
        reply = f"{PREFIX}/reply/{word}"
        self.store.set(f"{PREFIX}/request/{self.job.rank}", word)
        with self._waits(self._why_no_reply):
            self._until(lambda: self.store.check([reply]), self._why_no_reply)
            self.name = self.store.get(reply).decode()
            self.store.set(self._key(f"note/{self.job.rank}"), json.dumps(own))
        with self._waits(self._why_no_plan):
            self._until(lambda: self.store.check([self._key("plan")]), self._why_no_plan)
        plan: MeetingPlan = json.loads(self.store.get(self._key("plan")))
        return plan

    def _key(self, name: str) -> str:
        return f"{PREFIX}/{self.name}/{name}"

    def _until(self, is_done: Callable[[], bool], why: Callable[[], str]) -> None:
        began = time.monotonic()
        while not is_done():
            now = time.monotonic()
            if now > self._deadline:
                raise RuntimeError(
                    f"Rank {self.job.rank} has waited {self._timeout.total_seconds():.0f} s {why()}"
                )
            time.sleep(POLL_S if now < began + 1.0 else SLOW_POLL_S)

    def _fail(self, problem: str) -> NoReturn:
        """End a meeting by a problem (RuntimeError), which all ranks have read.

        The store ends with rank 0, if that holds it.
        """
        if not self._holds_store:
            self.store.set(self._key(f"read/{self.job.rank}"), "")
        else:
            keys = [self._key(f"read/{rank}") for rank in range(1, self.job.world_size)]
            given_up = time.monotonic() + READ_S
            while not self.store.check(keys) and time.monotonic() < given_up:
                time.sleep(POLL_S)
        raise RuntimeError(problem)

    def _take_interface(self, plan: MeetingPlan) -> None:
        """Take the interface by which this host reaches the others, if its name leads back to
        itself.
        """
        chosen = plan["interfaces"].get(machine())
        if chosen is None:
            return
        name, address = chosen
        os.environ[VARIABLES["gloo"]] = name
        if self.job.speaks:
            say(
                self.job.rank,
                "the name of this host resolves to an address that no other host reaches, so gloo"
                f" uses the interface {name} ({address}). Set {VARIABLES['gloo']} to choose"
                " another.",
            )

    # One rank of each host tries to reach the others.

    def _reach_others(self, plan: MeetingPlan, own: RankNote) -> None:
        firsts = plan["firsts"]
        me = firsts[own["machine"]]
        if me["rank"] == self.job.rank:
            found: dict[str, tuple[str, int, str]] = {}
            store = plan["extra"].get("store")
            threads = [
                threading.Thread(
                    target=lambda other=other: found.update(
                        {str(other["rank"]): self._reach_all_of(other, store)}
                    )
                )
                for other in firsts.values()
                if other["rank"] != me["rank"] and must_connect(me, other, self.job.backend)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.store.set(self._key(f"reach/{self.job.rank}"), json.dumps(found))
        if self.job.rank == 0:
            self.store.set(self._key("verdict"), self._failure_of(firsts))
        with self._waits(self._why_no_plan):
            self._until(lambda: self.store.check([self._key("verdict")]), self._why_no_plan)
        if problem := self.store.get(self._key("verdict")).decode():
            self._fail(problem)

    def _reach_all_of(self, other: RankNote, store: tuple[str, int] | None) -> tuple[str, int, str]:
        """Where this host has tried to connect to another one, and why it cannot; empty if it can.

        Rank 0 may have a store of this start, too, at a port that a firewall may not know.
        """
        assert other["port"] is not None
        why = self._reach(other)
        if why or store is None or other["rank"] != 0:
            return other["address"], other["port"], why
        return *store, knock(*store, REACH_S)

    def _reach(self, other: RankNote) -> str:
        """Why this host cannot connect to another one's listener; empty if it can."""
        port = other["port"]
        assert port is not None
        try:
            with socket.create_connection((other["address"], port), timeout=REACH_S) as connection:
                connection.settimeout(REACH_S)
                answer = connection.makefile("r").readline().strip()
        except (TimeoutError, ConnectionRefusedError):
            return knock(other["address"], port) or ""
        except OSError as error:
            return f"{error.strerror or error}".lower()
        return (
            ""
            if answer == self.name
            else "another host answers there: two networks have the same addresses"
        )

    def _failure_of(self, firsts: dict[str, RankNote]) -> str:
        keys = {one["rank"]: self._key(f"reach/{one['rank']}") for one in firsts.values()}
        with self._waits(self._why_no_plan):
            self._until(lambda: self.store.check(list(keys.values())), self._why_no_plan)
        by_rank = {one["rank"]: one for one in firsts.values()}
        failed: list[tuple[RankNote, RankNote, str]] = [
            (by_rank[rank], {**by_rank[int(other)], "address": address, "port": port}, why)
            for rank, key in keys.items()
            for other, (address, port, why) in json.loads(self.store.get(key)).items()
            if why
        ]
        return unreachable(failed, self.job.backend)

    # What a rank says while it waits.

    def _whom_at(self) -> str:
        return f"Rank {self.job.rank} waits for rank 0 at {self.job.host}, port {self.job.port}"

    def _why_no_store(self) -> str:
        job = self.job
        why = knock(job.host, job.port)
        with suppress(OSError):
            place = resolve(job.host)
            mine = [address for addresses in interfaces().values() for address in addresses]
            if why and (place in mine or is_loopback(place)):
                why = (
                    f"{why}. That is this host itself, {place}: give MASTER_ADDR as the address of"
                    " the host with rank 0, which another name may hide"
                )
        return (
            f"for rank 0 at {job.host}, port {job.port}: {why or 'it has just answered'}. Likely"
            " causes:"
            + listed(
                [
                    (
                        "Rank 0 has not been started, or has failed: look at its output. `ss -ltn`"
                        f" on its host shows whether it listens at {job.port}."
                    ),
                    (
                        "A firewall of its host: there `lightning-dct check --listen --port"
                        f" {job.port}` in place of rank 0, and here `lightning-dct check {job.host}"
                        f" --port {job.port}`. {_let_in(_own_address(job.host))}"
                    ),
                    (
                        f"MASTER_ADDR={job.host} or MASTER_PORT={job.port} is wrong: `ip -brief"
                        " address` on its host shows the addresses."
                    ),
                ]
            )
        )

    def _why_not_all(self) -> str:
        job = self.job
        known = interfaces()
        ranks = ", ".join(map(str, self._missing[:MOST_NAMED]))
        more = (
            f" and {len(self._missing) - MOST_NAMED} more"
            if len(self._missing) > MOST_NAMED
            else ""
        )
        whom = f"rank {ranks}" if len(self._missing) == 1 else f"ranks {ranks}{more}"
        own = ""
        with suppress(OSError):
            place = resolve(job.host)
            if is_loopback(place) and not job.has_store:
                own = (
                    f" MASTER_ADDR={job.host} is {place} here, which leads every other host to"
                    " itself."
                )
            elif place not in [address for addresses in known.values() for address in addresses]:
                own = f" MASTER_ADDR={job.host} is no address of this host, which has rank 0."
        return (
            f"for {whom} of {job.world_size} at {job.host}, port {job.port}, where this rank"
            f" listens.{own} This host has {in_words(known)}. Likely causes:"
            + listed(
                [
                    "They have not been started, or have failed: look at their output.",
                    (
                        "They have another MASTER_ADDR, MASTER_PORT or NODE_RANK: `env | grep -E"
                        f" 'MASTER|RANK'` there must show {job.host} and {job.port}, and a"
                        " NODE_RANK of its own on each host."
                    ),
                    (
                        f"A firewall of this host: on theirs `lightning-dct check {job.host} --port"
                        f" {job.port}`. {_let_in('THEIR_ADDRESS')}"
                    ),
                ]
            )
        )

    def _why_no_reply(self) -> str:
        job = self.job
        return (
            f"for rank 0: {job.host}, port {job.port} answers, but no rank 0 of this start has come"
            " there. Likely causes:"
            + listed(
                [
                    "Rank 0 has not come so far, or has failed: look at its output.",
                    (
                        f"An earlier start still holds the port: `ss -ltnp | grep {job.port}` on"
                        f" {job.host} names the process. End it, or take another MASTER_PORT on all"
                        " hosts."
                    ),
                    (
                        "Rank 0 has another version of lightning_dct, or `lifelines=False`: `pip"
                        " show lightning-dct` on both hosts."
                    ),
                ]
            )
        )

    def _why_no_plan(self) -> str:
        return (
            f"for the other ranks, which meet at {self.job.host}, port {self.job.port}. Rank 0"
            " names those that are missing: look at its output."
        )


def new_store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """A store in this process, at a port, 0 for any free one, that `init_process_group` can
    share.
    """
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, multi_tenant=True, timeout=timeout
    )


class _Listener:
    """Listens at a port that the system chooses, as the process group will, and tells callers the
    name of the start.
    """

    def __init__(self) -> None:
        self._socket = listen(0)
        self._socket.setblocking(True)
        self.port = int(self._socket.getsockname()[1])

    def answer(self, name: str) -> None:
        threading.Thread(target=partial(self._answer, f"{name}\n".encode()), daemon=True).start()

    def _answer(self, line: bytes) -> None:
        with suppress(OSError):  # it is closed
            while True:
                connection, _ = self._socket.accept()
                with suppress(OSError), connection:
                    connection.sendall(line)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # else a thread goes on accepting
        self._socket.close()


def _own_address(host: str) -> str:
    with suppress(OSError):
        return address_towards(host)
    return "THIS_HOST"


def _let_in(address: str) -> str:
    return f"`sudo ufw allow from {address}` lets it in."
