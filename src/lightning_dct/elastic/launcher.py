"""Starts the ranks of one machine beside a process that starts them again.

    this process, rank 0 --- supervisor ---+--- rank 1        each starts again when it dies, rank 0 too
                                           +--- rank 2
                                           +--- lighthouse, unless TORCHFT_LIGHTHOUSE names another

If this process dies, or leaves on SIGTERM, the others go on. If it fails with an exception or is interrupted, all end.
One supervisor serves all trainers of this process, and hears from it once more: when it ends or fails. With
``LOCAL_RANK`` or another launcher's environment, as with one process for each machine, nothing is started.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_dct.elastic import supervisor
from lightning_dct.elastic.present import HEARTBEAT_S, LIGHTHOUSE
from lightning_dct.lightning_private import (
    ScriptLauncher,
    basic_subprocess_command,
    hydra_subprocess_command,
    set_num_threads_if_needed,
)


class RestartingLauncher(ScriptLauncher):
    """Lightning's launcher of scripts, with a supervisor for its processes.

    ``patience`` is that of the strategy, and ``restarts`` how many times processes are started again, together.
    """

    # Of the process, because a second trainer finds the ranks started.
    _supervisor: ClassVar[subprocess.Popen[str] | None] = None

    def __init__(self, environment: Any, processes: int, nodes: int, patience: float, restarts: int) -> None:
        super().__init__(environment, processes, nodes)
        self._patience, self._restarts = patience, restarts

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks if nobody else does, and call the function as rank 0 of this machine."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        try:
            if not self.cluster_environment.creates_processes_externally and (
                self.num_processes > 1 or (not os.environ.get(LIGHTHOUSE) and self.num_nodes == 1)
            ):
                self._start_supervisor()
            set_num_threads_if_needed(num_processes=self.num_processes)
            return function(*args, **kwargs)
        except SIGTERMException:
            _tell("left")
            raise
        except BaseException:
            _tell("stop")
            raise

    def kill(self, signum: Any) -> None:
        """End the other ranks, unless Lightning only passes on the SIGTERM with which this rank leaves them."""
        if signum != signal.SIGTERM:
            _tell("stop")

    def _start_supervisor(self) -> None:
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ["NODE_RANK"] = str(environment.node_rank())
        os.environ["LOCAL_RANK"] = str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        task = {
            "commands": [_command(rank) for rank in range(self.num_processes)],
            "lighthouse": None if os.environ.get(LIGHTHOUSE) else [int(1000 * self._patience), int(1000 * HEARTBEAT_S)],
            "restarts": self._restarts,
        }
        reads, writes = os.pipe()
        RestartingLauncher._supervisor = subprocess.Popen(
            [sys.executable, str(Path(supervisor.__file__)), str(writes)],
            stdin=subprocess.PIPE,
            text=True,
            pass_fds=(writes,),
        )
        os.close(writes)
        _tell(json.dumps(task))
        with os.fdopen(reads) as answer:
            address = answer.readline().strip()
        if not address:
            raise RuntimeError("The supervisor of the ranks has not started. Its error is above.")
        os.environ[LIGHTHOUSE] = address
        # Not after a trainer function, because another may follow, with the same ranks.
        atexit.register(_tell, "done")


def _tell(line: str) -> None:
    told = RestartingLauncher._supervisor
    if told is not None and told.stdin is not None:
        try:
            told.stdin.write(line + "\n")
            told.stdin.flush()
        except OSError:  # it has ended, as it does when it is interrupted
            RestartingLauncher._supervisor = None


def _command(rank: int) -> tuple[list[str], str | None]:
    """What starts a rank, and in which folder."""
    if "hydra" in sys.modules:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            command, folder = hydra_subprocess_command(rank)
            return list(command), folder
    return list(basic_subprocess_command()), None
