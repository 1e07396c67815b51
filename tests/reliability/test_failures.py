"""A rank that dies or fails brings the others down within seconds, and they say which rank it
was.
"""

import socket
from pathlib import Path

import pytest

from reliability.failing import WAYS, train
from reliability.processes import Ended, run_to_the_end

# Far more than all of it takes on a quiet machine, and far less than a process group's timeout.
TIMEOUT_S = 400
GRACE_S = 1.5


def job(way: str, rank: int, world_size: int, folder: Path) -> list[Ended]:
    return run_to_the_end(
        train,
        way,
        rank,
        str(folder),
        GRACE_S,
        world_size=world_size,
        failing=rank,
        folder=folder,
        timeout_s=TIMEOUT_S,
    )


@pytest.mark.parametrize("way", WAYS)
def test_the_others_end_and_name_the_rank(way: str, tmp_path: Path) -> None:
    """Oracle: exit statuses, and the failing rank's number and reason in the output of all other
    ranks.
    """
    rank, world_size = (
        (0, 2) if way in ("exit", "raise at setup") else (1, 3 if way == "kill" else 2)
    )
    ended = job(way, rank, world_size, tmp_path)
    for other, (exit_status, _, output) in enumerate(ended):
        if other == rank:
            continue
        assert exit_status == 1, f"rank {other}: {exit_status}\n{output}"
        if way == "disk full":  # which a save tells all ranks
            assert "OSError: The checkpoint " in output, output
            assert (
                f"because rank {rank} on {socket.gethostname()} cannot write its part" in output
            ), output
            continue
        reason = {"kill": "has died", "exit": "has died"}.get(
            way.split()[0].strip(","), "has failed: RuntimeError: I have had enough"
        )
        assert f"lightning_dct, rank {other}: Rank {rank} (process " in output, output
        assert reason in output, output
