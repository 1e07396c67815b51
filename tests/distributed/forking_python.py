"""A ``python`` in which Lightning is imported already: what it runs is forked, which saves seconds
of each start.

The command that takes the place of ``sys.executable`` hands its arguments, its folder, its
environment, the files that it inherits and its namespaces to a server, which forks. It passes on
the signals that it gets, and ends as the fork does. What it does not understand goes to Python
itself.
"""

import atexit
import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np

from distributed.harness import PYTHON, TESTS, started

COMMAND = """#!{python} -IS
import json, os, resource, signal, socket, sys
words = sys.argv[1:]
while words[:1] in (["-u"], ["-B"]):
    del words[0]
if not words or words[0].startswith("-") and words[0] not in ("-c", "-m"):
    os.execv("{python}", ["{python}", *sys.argv[1:]])
files = []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        files += [number] * (number > 2 and os.get_inheritable(number))
    except OSError:  # that of the folder
        pass
server = socket.socket(socket.AF_UNIX)
server.connect("{address}")
asked = json.dumps([words, os.getcwd(), dict(os.environ), files]).encode()
spaces = [os.open(f"/proc/self/ns/{{name}}", os.O_RDONLY) for name in ("net", "mnt")]
socket.send_fds(server, [len(asked).to_bytes(8, "big")], [*spaces, 0, 1, 2, *files])
for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), lambda number, _: server.sendall(bytes([number])))
server.sendall(asked)
status = json.loads(server.recv(64) or "1")
if status < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if status != -signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""


class ForkingPython:
    """The command, and the server that forks for it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "python"
        address = folder / "server"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen(64)
        self._server = started(_serve, listener, str(self.path))
        listener.close()
        self.path.write_text(COMMAND.format(python=PYTHON, address=address))
        self.path.chmod(0o755)

    def stop(self) -> None:
        self._server.kill()
        self._server.join()


def _serve(listener: socket.socket, command: str) -> NoReturn:
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    parent: Any = multiprocessing.parent_process()
    selector.register(parent.sentinel, selectors.EVENT_READ, None)
    while True:
        for key, _ in selector.select():
            if key.fileobj == parent.sentinel:  # pytest was killed
                for fork in [
                    one.data[0]
                    for one in selector.get_map().values()
                    if isinstance(one.data, tuple)
                ]:
                    os.kill(fork, signal.SIGKILL)
                os._exit(1)
            elif key.fileobj is listener:
                _begin(listener, selector, command)
            elif isinstance(key.fileobj, int):  # a fork has ended
                pid, asker = key.data
                _, status = os.waitpid(pid, 0)
                with contextlib.suppress(OSError):
                    asker.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                with contextlib.suppress(KeyError):
                    selector.unregister(asker)
                selector.unregister(key.fileobj)
                os.close(key.fileobj)
                asker.close()
            elif key.fd in selector.get_map():  # its fork may have ended in this very round
                _pass_on(key.fileobj, key.data, selector)


def _pass_on(asker: Any, pid: int, selector: selectors.BaseSelector) -> None:
    try:
        numbers = asker.recv(64)
    except OSError:
        numbers = b""
    if not numbers:  # the command was killed
        selector.unregister(asker)
    for number in numbers or [signal.SIGKILL]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _begin(listener: socket.socket, selector: selectors.BaseSelector, command: str) -> None:
    asker, _ = listener.accept()
    header, files, _, _ = socket.recv_fds(asker, 8, 64)
    asked = b""
    while len(asked) < int.from_bytes(header, "big"):
        asked += asker.recv(1 << 16)
    if pid := os.fork():
        for file in files:
            os.close(file)
        selector.register(asker, selectors.EVENT_READ, pid)
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asker))
        return
    others = [key.fileobj for key in selector.get_map().values()]
    selector.close()
    for other in (*others, asker):
        os.close(other) if isinstance(other, int) else other.close()  # type: ignore[union-attr]
    _run(*json.loads(asked), files, command)


def _run(
    words: list[str],
    folder: str,
    environment: dict[str, str],
    numbers: list[int],
    files: list[int],
    command: str,
) -> NoReturn:
    os.setsid()
    for name, file in zip(("net", "mnt"), files[:2], strict=True):
        if os.fstat(file).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino:
            assert not ctypes.CDLL(None).setns(file, 0)
    # Out of the way first, because one may lie where another belongs.
    given = [fcntl.fcntl(file, fcntl.F_DUPFD, 200) for file in files[2:]]
    for file in files:
        os.close(file)
    for file, number in zip(given, [0, 1, 2, *numbers], strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = os.fdopen(0, closefd=False)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # What is cleaned up when the server ends, such as W&B's folder for tables, is not this
    # process's.
    for cleaning in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        cleaning.detach()
    if (wandb_types := sys.modules.get("wandb.sdk.data_types._private")) is not None:
        atexit.unregister(wandb_types.MEDIA_TMP.cleanup)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    np.random.seed()
    sys.executable = command
    multiprocessing.set_executable(command)
    sys.argv = {"-m": words[1:], "-c": ["-c", *words[2:]]}.get(words[0], words)
    first = folder if words[0] in ("-c", "-m") else str(Path(words[0]).resolve().parent)
    ours = {"", str(TESTS), str(TESTS.parent / "experiments")}
    given = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [first, *filter(None, given), *(entry for entry in sys.path if entry not in ours)]
    status: Any = 0
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(words[1], main.__dict__)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ending:
        status = ending.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)
