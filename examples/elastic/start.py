"""Starts ranks of ``dct_elastic`` on this machine, and starts one again that has died.

On one machine, here with ``Trainer(devices=4)``, a lighthouse is started, too::

    python start.py 4 train.py

On several, one that stays runs the lighthouse, and each starts its own ranks, here with
``Trainer(devices=4, num_nodes=2)``. Its number is in ``NODE_RANK``, or, under SLURM, in
``SLURM_NODEID``::

    torchft_lighthouse --bind "[::]:29510" --min_replicas 1 --join_timeout_ms 10000 --heartbeat_timeout_ms 2000
    TORCHFT_LIGHTHOUSE=http://10.0.0.1:29510 NODE_RANK=1 python start.py 4 train.py
    TORCHFT_LIGHTHOUSE=http://10.0.0.1:29510 srun --no-kill --kill-on-bad-exit=0 python start.py 4 train.py

An exchange waits 10 seconds for a rank that is alive, and 2 seconds for one that is not heard of.
"""

import os
import signal
import subprocess
import sys
import time

from lightning_dct.elastic.present import LIGHTHOUSE, RESTARTED, start_lighthouse

RESTARTS = 10  # of all ranks together


def start(rank: int, again: bool = False) -> subprocess.Popen:
    """The process of a rank."""
    environment = {**os.environ, "LOCAL_RANK": str(rank)} | ({RESTARTED: "1"} if again else {})
    return subprocess.Popen([sys.executable, *sys.argv[2:]], env=environment)


def main() -> int:
    """Start the ranks, and return the exit status: 1 if one has failed and was not started
    again.
    """
    # Processes of Lightning's own environment, not tasks of SLURM: it would number them otherwise.
    os.environ["NODE_RANK"] = os.environ.get("NODE_RANK") or os.environ.get("SLURM_NODEID") or "0"
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        del os.environ[name]
    lighthouse = None
    if not os.environ.get(LIGHTHOUSE):
        lighthouse, os.environ[LIGHTHOUSE] = start_lighthouse()
    running = {rank: start(rank) for rank in range(int(sys.argv[1]))}
    restarts = RESTARTS
    is_over = False
    failed = 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while running:
            time.sleep(0.2)
            for rank, process in list(running.items()):
                if (status := process.poll()) is None:
                    continue
                del running[rank]
                is_over = is_over or status == 0  # no rank would be left to join
                if status and restarts and not is_over:
                    print(
                        f"Rank {rank} has ended with status {status}, and starts again.",
                        file=sys.stderr,
                        flush=True,
                    )
                    restarts -= 1
                    running[rank] = start(rank, again=True)
                elif status:
                    failed += 1
    finally:
        for process in running.values():
            process.kill()
        del lighthouse  # which was there until now
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
