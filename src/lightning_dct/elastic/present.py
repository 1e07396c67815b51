"""The ranks that are present: a quorum of torchft, and a group of theirs that is made anew when it
changes.

    meet      wait for the others, in a quorum; a rank that is behind first takes the state of a peer
    gather    every rank's bytes, in the group of this quorum
    agree     whether this rank takes what was gathered; a rank that does not is behind at the next meeting

Each rank is a replica group of its own, with a ``Manager`` and a store. The *lighthouse* forms the
quorums.
"""

import logging
import os
import socket
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions, BroadcastOptions  # type: ignore[attr-defined]

from lightning_dct.failures.sockets import name_of_this_host

VERSION = "0.2.0"
LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
# Set to 1 in a process that was started again: it joins a run, and begins none.
RESTARTED = "LIGHTNING_DCT_RESTARTED"
# How long an exchange waits for a rank that is alive and has not come.
PATIENCE_S = 10.0
# A rank that is not heard of for so long is gone: half a second is not enough where two cores run
# four ranks.
HEARTBEAT_S = 2.0
# How long a collective or a transfer may wait for a rank that has stopped since the quorum: at
# first, and at most after some have timed out, because a rank cannot tell one that has stopped from
# a slow link.
TRANSFER_S = 8.0
LONGEST_TRANSFER_S = 128.0
# How many failed meetings in a row bring one more warning.
WARN_EVERY = 10
# A lighthouse that has not answered gets less time, because each exchange asks it again.
UNLIT_S = 2.0
# How long a rank waits for the others' next exchange, which may be a validation away; and how often
# it looks meanwhile whether the lighthouse is there, because a manager whose lighthouse dies does
# not answer any more.
MEETING_S = 3600.0
LOOK_S = 10.0


def import_torchft() -> Any:
    """torchft, quiet: it would print a line for each request.

    Raises:
        ImportError: It is not installed, or another version is.
    """
    os.environ.setdefault("RUST_LOG", "error")
    try:
        found = version("torchft")
    except PackageNotFoundError:
        found = ""
    if found != VERSION:
        other = f", and {found} is installed" if found else ""
        raise ImportError(
            f"`strategy='dct_elastic'` needs torchft {VERSION}{other}: `pip install '.[elastic]'`"
            " in a clone of lightning_dct."
        )
    import torchft

    logging.getLogger("torchft").setLevel(logging.CRITICAL)
    return torchft


def start_lighthouse(host: str = "127.0.0.1", patience_s: float = PATIENCE_S) -> tuple[Any, str]:
    """A lighthouse, by default for this machine alone, which lives as long as the first result, and
    its address.
    """
    import_torchft()
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        bind=f"{host}:0",
        min_replicas=1,
        join_timeout_ms=int(1000 * patience_s),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=int(1000 * HEARTBEAT_S),
    )
    return server, f"http://{host}:{server.address().rpartition(':')[2]}"


class PresentRanks:
    """This rank among those that are present; a :class:`~lightning_dct.exchange.collectives.Link`
    takes it as a group.

    Args:
        rank: This rank's number among those that were asked for.
        lighthouse: Its address, such as ``http://10.0.0.1:29510``.
        give: Returns the state for a rank that is behind; called in a thread while this rank waits
            in :meth:`start_quorum`.
        take: Takes that state from a peer, within :meth:`start_quorum`.

    Attributes:
        failed_meetings: Meetings of this rank that have brought nothing.
        trouble: Why the last of them has not.
        transfer_s: How long a collective or a transfer may wait, in seconds.
    """

    def __init__(
        self, rank: int, lighthouse: str, give: Callable[[], Any], take: Callable[[Any], None]
    ) -> None:
        torchft = import_torchft()
        where = urlsplit(lighthouse)
        if not where.hostname or not where.port:
            raise ValueError(
                f"{LIGHTHOUSE} must be an address such as 'http://10.0.0.1:29510'; got"
                f" {lighthouse!r}."
            )
        host = name_of_this_host(where.hostname)
        self._lighthouse = lighthouse
        self._is_lit = True
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        self._group = torchft.ProcessGroupGloo(timeout=timedelta(seconds=TRANSFER_S))
        self._transport = _transport(host)
        self._manager = torchft.Manager(
            pg=self._group,
            load_state_dict=take,
            state_dict=give,
            min_replica_size=1,
            use_async_quorum=False,
            timeout=timedelta(seconds=TRANSFER_S),
            quorum_timeout=timedelta(seconds=LOOK_S),
            connect_timeout=timedelta(seconds=TRANSFER_S),
            rank=0,
            world_size=1,
            store_addr=host,
            store_port=self._store.port,
            lighthouse_addr=lighthouse,
            # Quorums are in the order of these names, so the lowest rank that is present comes
            # first.
            replica_id=f"{rank:06}",
            hostname=host,
            checkpoint_transport=self._transport,
            init_sync=False,
        )
        _tell_quorums_apart(self._manager, self._group)
        self._size = 1
        self._rank = 0
        self.failed_meetings = self._failed_in_a_row = 0
        self.trouble = ""
        self.transfer_s = TRANSFER_S

    def size(self) -> int:
        """The number of ranks in the last quorum."""
        return self._size

    def rank(self) -> int:
        """This rank's place among them."""
        return self._rank

    @property
    def quorum_step(self) -> int:
        """The number of meetings with an agreement, on all ranks that are not behind."""
        return int(self._manager.current_step())

    @property
    def quorum(self) -> int:
        """The number of the group of the last quorum; a failed meeting is followed by another
        group.
        """
        return int(self._manager._quorum_id)

    def start_quorum(self) -> bool:
        """Wait for the other ranks that are alive, and return whether there is a group with
        them.
        """
        began = time.monotonic()
        while self._answers() and time.monotonic() < began + MEETING_S:
            try:
                self._manager.start_quorum()
                self._size = self._manager.num_participants()
                self._rank = self._manager.participating_rank()
            except Exception as error:  # torchft's clients raise many kinds of errors
                self.trouble = _first_line(error)
                self._manager._quorum_future = (
                    None  # it would raise the same error at the next meeting
                )
                continue
            return self._manager.errored() is None or self.should_commit()
        self.failed_meetings += 1
        return False

    def all_gather(self, sent: Tensor, patience_s: float | None = None) -> Tensor | None:
        """The tensors that all ranks of the meeting have sent: shape ``[ranks, *sent.shape]``; None
        if that has failed.

        ``patience_s`` is how long to wait for the others, by default as for any transfer.
        """
        received = [torch.empty_like(sent) for _ in range(self._size)]
        options = AllgatherOptions()
        if patience_s is not None:
            options.timeout = timedelta(seconds=patience_s)
        try:
            self._group.allgather([received], [sent], options).wait()
        except Exception as error:
            self._manager.report_error(error)
            return None
        return torch.stack(received)

    def spread(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first rank of the meeting."""
        try:
            self._group.broadcast([tensor], BroadcastOptions()).wait()
        except Exception as error:
            self._manager.report_error(error)

    def spread_text(self, text: str) -> str:
        """The text of the first rank of the meeting; any text if that fails."""
        own = text.encode()
        lengths = self.all_gather(torch.tensor([len(own)]))
        if lengths is None:
            return text
        length = int(lengths[0])
        spread = torch.tensor(list(own[:length].ljust(length)), dtype=torch.uint8)
        self.spread(spread)
        return bytes(spread.tolist()).decode(errors="replace")

    def should_commit(self) -> bool:
        """End a meeting, and return whether this rank takes its result; if not, it is behind."""
        failed = self._manager.errored()
        try:
            if self._manager.should_commit():
                self._failed_in_a_row = 0
                return True
        except Exception as error:
            failed = error
        self.trouble = _first_line(failed) if failed else "a rank has left"
        self.failed_meetings += 1
        # Let transfers take twice as long from the next group on.
        if "timed out" in self.trouble.lower():
            self.transfer_s = min(2 * self.transfer_s, LONGEST_TRANSFER_S)
            self._manager._timeout = longer = timedelta(seconds=self.transfer_s)
            self._group.set_timeout(longer)
            # For which a giver waits for its reader.
            self._transport._checkpoint_lock.timeout = self.transfer_s
        if self._failed_in_a_row % WARN_EVERY == 0:
            warnings.warn(
                f"An exchange has failed: {self.trouble}. Nothing is lost. This rank tries again at"
                f" the next one, in which a transfer may take {self.transfer_s:g} seconds. If this"
                " goes on, check the links between the ranks, or send less with a lower"
                " `density`.",
                stacklevel=2,
            )
        self._failed_in_a_row += 1
        return False

    def invalidate(self) -> None:
        """Be behind again: a peer had nothing to give."""
        self._manager.load_state_dict({"step": 0, "batches_committed": 0})

    def close(self) -> None:
        """Leave: the others go on without this rank."""
        with suppress(Exception):
            self._manager.shutdown(wait=False)

    def _answers(self) -> bool:
        was_lit = self._is_lit
        where = urlsplit(self._lighthouse)
        patience_s = TRANSFER_S if was_lit else UNLIT_S
        try:
            socket.create_connection((where.hostname, where.port), timeout=patience_s).close()
            self._is_lit = True
        except OSError as error:
            self._is_lit = False
            self.trouble = f"the lighthouse at {self._lighthouse} does not answer ({error})"
        if was_lit and not self._is_lit:
            rank_zero_warn(
                f"An exchange is lost: {self.trouble}. This rank trains on by itself until the"
                " lighthouse is back."
            )
        return self._is_lit


def _tell_quorums_apart(manager: Any, group: Any) -> None:
    """Have a group look for its ranks by the round, too.

    A lighthouse that was started again counts quorums anew, and a store still has the addresses of
    the earlier ones.
    """
    client = manager._client
    configure = group.configure
    latest = [0]

    def ask(**asked: Any) -> Any:
        found = client._quorum(**asked)
        latest[0] = found.max_step
        return found

    manager._client = SimpleNamespace(_quorum=ask, should_commit=client.should_commit)
    group.configure = lambda address, *rest: configure(f"{address}/{latest[0]}", *rest)


def _transport(host: str) -> Any:
    """Gives this rank's state to a peer by HTTP, without a line for each request."""
    from torchft.checkpointing import HTTPTransport

    made: Any = HTTPTransport(timeout=timedelta(seconds=TRANSFER_S), num_chunks=0)
    port = made._server.socket.getsockname()[1]
    # Its own is a name, which peers may not know.
    made.address = lambda: f"http://{host}:{port}/checkpoint/"
    made._server.RequestHandlerClass.log_message = lambda *_: None
    disallow = made.disallow_checkpoint

    def disallow_or_leave() -> None:
        try:
            disallow()
        except TimeoutError:
            made._disallowed = (
                False  # or it would release the lock of a slow reader, and never give again
            )
            raise

    made.disallow_checkpoint = disallow_or_leave
    return made


def _first_line(error: BaseException) -> str:
    return str(getattr(error, "original_exception", error)).strip().split("\n")[0][:200]
