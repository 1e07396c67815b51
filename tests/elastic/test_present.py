"""What a rank makes of meetings that fail; one process, without a lighthouse."""

import warnings
from datetime import timedelta
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_dct.elastic.present import (
    LONGEST_TRANSFER_S,
    TRANSFER_S,
    PresentRanks,
    _transport,
    import_torchft,
)


def meeting(error: str) -> tuple[PresentRanks, Any]:
    """A rank whose meetings end with this error, or well if it is empty."""
    present = object.__new__(PresentRanks)
    failed = SimpleNamespace(error=error, allowed=[])
    present.failed_meetings = present._failed_in_a_row = 0
    present.trouble = ""
    present.transfer_s = TRANSFER_S
    present._manager = SimpleNamespace(
        errored=lambda: RuntimeError(failed.error) if failed.error else None,
        should_commit=lambda: not failed.error,
    )
    present._group = SimpleNamespace(set_timeout=failed.allowed.append)
    present._transport = SimpleNamespace(_checkpoint_lock=SimpleNamespace(timeout=TRANSFER_S))
    return present, failed


def test_a_transfer_that_times_out_gets_more_time() -> None:
    present, failed = meeting(
        "[unbound_buffer.cc:81] Timed out waiting 8000ms for recv operation to complete"
    )
    with warnings.catch_warnings(record=True):
        for _ in range(10):
            assert not present.should_commit()
    assert failed.allowed[:2] == [
        timedelta(seconds=2 * TRANSFER_S),
        timedelta(seconds=4 * TRANSFER_S),
    ]
    assert present._manager._timeout == failed.allowed[-1] == timedelta(seconds=LONGEST_TRANSFER_S)
    assert present._transport._checkpoint_lock.timeout == LONGEST_TRANSFER_S


def test_a_rank_that_dies_does_not_make_the_others_wait_longer_for_the_next() -> None:
    present, failed = meeting("Connection closed by peer")
    with pytest.warns(UserWarning, match="Connection closed by peer"):
        assert not present.should_commit()
    assert not failed.allowed


def test_the_first_failure_of_a_streak_warns_and_some_later_ones() -> None:
    present, failed = meeting("Connection closed by peer")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            present.should_commit()
        assert len(caught) == 1
        present.should_commit()
        assert len(caught) == 2
        failed.error = ""
        assert present.should_commit()
        failed.error = "Connection closed by peer"
        present.should_commit()
    assert len(caught) == 3
    assert "Connection closed by peer" in str(caught[0].message)
    assert "lower `density`" in str(caught[0].message)


@pytest.mark.skipif(
    find_spec("torchft") is None, reason="torchft has wheels for some platforms only"
)
def test_a_peer_that_reads_for_too_long_can_read_again() -> None:
    import_torchft()
    transport = _transport("127.0.0.1")
    lock = transport._checkpoint_lock
    transport.send_checkpoint([1], 1, {}, timedelta(seconds=1))
    lock.r_acquire()
    lock.timeout = 0.01
    with pytest.raises(TimeoutError):
        transport.disallow_checkpoint()
    transport.send_checkpoint([1], 2, {}, timedelta(seconds=1))
    lock.r_release()
    transport.disallow_checkpoint()
    transport.send_checkpoint([1], 3, {}, timedelta(seconds=1))
    with lock.r_lock():
        assert transport._step == 3
    transport.shutdown()
