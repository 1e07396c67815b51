"""Trains for long on two hosts while ranks are killed, links are cut and their number changes.

    sudo python tests/reliability/soak.py --minutes 20

One training goes on from phase to phase, under torchrun, on one or two network namespaces: 2, 4, 3
ranks or 1. In a phase ranks are killed at random moments and start again from the last checkpoint;
a host's link is cut for some seconds, now and then for so long that the job has to end. In the end
what has become of every gradient is added up, and the loss is compared with that of an undisturbed
run of as many steps on one rank; see soak_training.py.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import torch
from rich.console import Console
from rich.table import Table

from network.hosts import Host, make_hosts

SCRIPT = Path(__file__).with_name("soak_training.py")
PORT = 29400
# More steps than any phase gets to.
ENDLESS = 900_000
# Steps of the last phase, which nobody disturbs.
LAST_STEPS = 30
# Start-up and a few steps.
SHORTEST_PHASE_S = 30.0
# Cuts of the link: one that TCP gets over, and one that ends the job.
CUTS_S = (2.0, 5.0, 25.0)


class Layout(NamedTuple):
    """How many hosts take part in a phase, and how many ranks on each of them."""

    hosts: int
    ranks: int


LAYOUTS = (Layout(2, 1), Layout(2, 2), Layout(1, 3), Layout(1, 1))


class Soak:
    """One training in a folder, on some hosts."""

    def __init__(self, hosts: list[Host], folder: Path, seed: int) -> None:
        self._hosts = hosts
        self._folder = folder
        self._log = folder / "output.log"
        self._chance = random.Random(seed)
        self._phases = 0
        self.events: Counter[str] = Counter()

    def phase(self, layout: Layout, seconds: float) -> None:
        """Train with so many ranks and disturb them; then kill all of them."""
        agents = self._start(layout, ENDLESS)
        self.events[f"phases with {layout.hosts * layout.ranks} ranks"] += 1
        end = time.monotonic() + seconds
        while time.monotonic() < end and all(agent.poll() is None for agent in agents):
            time.sleep(self._chance.uniform(6.0, 15.0))
            self._disturb(layout)
        self.events["phases that ended by themselves"] += any(
            agent.poll() is not None for agent in agents
        )
        for host, agent in zip(self._hosts, agents, strict=False):
            host.end(agent)
        for agent in agents:
            agent.wait()

    def last_phase(self, steps: int) -> None:
        """Train undisturbed, to an end."""
        agents = self._start(LAYOUTS[0], steps)
        statuses = [agent.wait() for agent in agents]
        if any(statuses):
            raise RuntimeError(
                f"The last phase failed: {self._log.read_text(errors='replace')[-3000:]}"
            )

    def saved_steps(self) -> int:
        """How far the last checkpoint is."""
        checkpoint = self._folder / "checkpoints" / "last.ckpt"
        if not checkpoint.exists():
            return 0
        return int(torch.load(checkpoint, weights_only=True, mmap=True)["global_step"])

    def _start(self, layout: Layout, steps: int) -> list[subprocess.Popen[str]]:
        self._phases += 1
        return [self._agent(host, layout, steps) for host in self._hosts[: layout.hosts]]

    def _agent(self, host: Host, layout: Layout, steps: int) -> subprocess.Popen[str]:
        rendezvous = (
            ["--standalone"]
            if layout.hosts == 1
            else [
                *(
                    "--nnodes",
                    str(layout.hosts),
                    "--rdzv-backend",
                    "c10d",
                    "--rdzv-id",
                    f"phase-{self._phases}",
                ),
                *(
                    "--rdzv-endpoint",
                    f"{self._hosts[0].address}:{PORT}",
                    "--local-addr",
                    host.address,
                ),
                # The address is not what the host's name resolves to, so torchrun does not see it
                # by itself.
                *("--rdzv-conf", f"is_host={int(host is self._hosts[0])}"),
            ]
        )
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(layout.ranks),
        ]
        command += [*rendezvous, "--max-restarts", "20", str(SCRIPT), str(self._folder), str(steps)]
        # A pipe that nobody reads would fill up and stop them.
        logged = ["sh", "-c", 'exec "$@" >> "$0" 2>&1', str(self._log), *command]
        return host.start(
            logged, {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        )

    def _disturb(self, layout: Layout) -> None:
        if layout.hosts > 1 and self._chance.random() < 0.3:
            seconds = self._chance.choice(CUTS_S)
            host = self._chance.choice(self._hosts)
            outside = host.namespace.replace("-", "p")
            subprocess.run(["ip", "link", "set", outside, "down"], check=True)
            time.sleep(seconds)
            subprocess.run(["ip", "link", "set", outside, "up"], check=True)
            self.events[f"links cut for {seconds:.0f} s"] += 1
            return
        ranks = [process for host in self._hosts for process in _ranks_on(host)]
        if ranks:
            with suppress(ProcessLookupError):
                os.kill(self._chance.choice(ranks), signal.SIGKILL)
                self.events["ranks killed"] += 1

    def count_in_log(self) -> None:
        """Add what the ranks have said to the events."""
        output = self._log.read_text(errors="replace")
        self.events["times a rank has named the one to blame"] = output.count("This rank ends too.")
        self.events["times a rank has resumed"] = output.count(
            "Restored all states from the checkpoint"
        )


def _ranks_on(host: Host) -> list[int]:
    """The processes that train on a host, by their command lines."""
    listed = subprocess.run(
        ["ip", "netns", "pids", host.namespace], capture_output=True, text=True
    ).stdout
    found = []
    for process in map(int, listed.split()):
        with suppress(OSError):
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            if str(SCRIPT).encode() in words and b"torch.distributed.run" not in words:
                found.append(process)
    return found


def undisturbed(folder: Path, steps: int) -> dict[str, float]:
    """The same training on one rank."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(SCRIPT), str(folder), str(steps)],
        env=environment,
        check=True,
        capture_output=True,
    )
    return json.loads((folder / "result.json").read_text())


def main() -> int:
    """Soak, and print what has happened; the exit status is 1 when anything was lost."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # Hosts are to be removed when this is told to stop, as after ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as name, make_hosts(2) as hosts:
        folder = Path(name)
        folder.chmod(0o777)  # under sudo the hosts' processes are the user's
        soak = Soak(hosts, folder, options.seed)
        while (left := end - time.monotonic()) > SHORTEST_PHASE_S:
            for layout in LAYOUTS:
                soak.phase(layout, min(max(left / len(LAYOUTS), SHORTEST_PHASE_S), 75.0))
        steps = soak.saved_steps() + LAST_STEPS
        soak.last_phase(steps)
        result = json.loads((folder / "result.json").read_text())
        other = folder / "undisturbed"
        other.mkdir()
        calm = undisturbed(other, steps)
        soak.count_in_log()
    table = Table(title=f"{options.minutes:g} minutes, seed {options.seed}")
    table.add_column("what")
    table.add_column("", justify="right")
    for event, times in sorted(soak.events.items()):
        table.add_row(event, f"{times}")
    table.add_section()
    table.add_row("optimizer steps in the end", f"{result['steps']:,}")
    table.add_row("largest entry of all gradients that is lost", f"{result['lost']:.1e}")
    table.add_row("distance from the solution", f"{result['distance']:.4f}")
    table.add_row("the same, undisturbed", f"{calm['distance']:.4f}")
    Console().print(table)
    return int(result["lost"] > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
