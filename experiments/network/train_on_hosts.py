"""Runs an experiment on hosts made of network namespaces.

    sudo python experiments/network/train_on_hosts.py --hosts 2 experiment=lm

Starts ``experiments/train.py`` under torchrun with the given overrides of Hydra, one process on
each host (Linux, as root). The table at the end compares the bytes that the strategy counted with
those that the hosts' interfaces sent, less the Ethernet, IPv4 and TCP headers. Not counted are

* gloo's own framing: 48 bytes with each message, and 48 for each notice that a peer is ready to
  receive one;
* the buffers of the model, which DistributedDataParallel copies from rank 0 before every forward,
  unless ``+strategy.broadcast_buffers=false``;
* in a pipeline, the loss and the logged values, which the last stage sends to the others;
* outside the training steps, parameters, checkpoints, settings and metrics.
"""

import argparse
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `network` is

from lightning_dct.traffic import format_bytes, plain_table
from network.hosts import Link, make_hosts, parse_link, shared_folder, why_not
from network.ledger import OTHER, SET_UP, STEPS, Sent, read_ledgers, without_headers
from network.running import HostFailedError, run_ranks

TRAIN = Path(__file__).resolve().parent.parent / "train.py"
# Settings that --hosts decides.
LAUNCHERS_OWN = ("trainer.num_nodes", "trainer.devices")


def words_for(count: int, overrides: list[str], folder: Path, skip: int) -> list[str]:
    """The script and its arguments for each host; ledgers go to the folder and leave out the first
    steps.

    Raises:
        ValueError: An override is the launcher's own.
    """
    for override in overrides:
        if override.lstrip("+").split("=")[0] in LAUNCHERS_OWN:
            raise ValueError(
                f"`{override}`: leave it out; `--hosts {count}` sets {' and '.join(LAUNCHERS_OWN)}."
            )
    ledger = f"+callbacks.ledger={{_target_:network.ledger.Ledger,folder:{folder},skip:{skip}}}"
    # The hosts share one machine, and cannot share a GPU. The user's overrides come later and take
    # precedence.
    return [
        *(str(TRAIN), "trainer.accelerator=cpu", *overrides),
        *(f"trainer.num_nodes={count}", "trainer.devices=1", ledger),
    ]


def tabulate(ledgers: list[dict[str, Sent]]) -> str:
    """The bytes counted beside the bytes sent, for each host and each part of the run."""
    rows = [
        [
            "part",
            "host",
            "steps",
            "gradients",
            "inside",
            "evaluation",
            "interface",
            "not counted",
            "off by",
        ]
    ]
    for part in (SET_UP, STEPS, OTHER):
        hosts = [(str(host), ledger[part]) for host, ledger in enumerate(ledgers)]
        total = sum((sent for _, sent in hosts), Sent())
        for host, sent in [*hosts, ("all", replace(total, steps=hosts[0][1].steps))]:
            more = without_headers(sent) - sent.counted
            figures = map(
                format_bytes,
                (sent.gradients, sent.inside, sent.evaluation, without_headers(sent), more),
            )
            off = f"{100 * more / sent.counted:+.2f}%" if part == STEPS and sent.counted else "-"
            rows.append([part, host, str(sent.steps), *figures, off])
    return plain_table(rows)


def conclude(ledgers: list[dict[str, Sent]]) -> str:
    """How far apart the two figures are in the training steps, all hosts together."""
    total = sum((ledger[STEPS] for ledger in ledgers), Sent())
    if not total.counted:
        return "No step was compared: train for more steps than --skip leaves out."
    more = without_headers(total) - total.counted
    return (
        f"In the steps of training the interfaces sent {1 + more / total.counted:.4f} times what"
        f" was counted: {more / total.steps:,.0f} bytes more a step and host."
    )


def main() -> int:
    """Train, and print the table; 1 when a host fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hosts", type=int, default=2, help="how many hosts to make, one rank on each"
    )
    parser.add_argument(
        "--link",
        type=parse_link,
        default=Link(),
        help="Mbit/s, and after a colon ms each way: 10:50",
    )
    parser.add_argument(
        "--skip", type=int, default=5, help="first steps that count as set-up in the table"
    )
    parser.add_argument(
        "overrides", nargs="+", help="of Hydra, as in experiment=dlrm model.tables=sharded"
    )
    arguments = parser.parse_args()
    if arguments.hosts < 2:
        parser.error(f"--hosts {arguments.hosts}: give at least 2")
    if arguments.skip < 0:
        parser.error(f"--skip {arguments.skip}: must not be negative")
    if reason := why_not():
        print(f"This script needs network namespaces, and {reason}.", file=sys.stderr)
        return 2
    # Remove the hosts also on SIGTERM, as on ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    count = arguments.hosts
    link = arguments.link
    threads = int(os.environ.get("OMP_NUM_THREADS", max(1, (os.cpu_count() or 1) // count)))
    with shared_folder() as folder, make_hosts(count, link.megabits, link.delay_ms / 1000) as hosts:
        try:
            words = words_for(count, arguments.overrides, folder, arguments.skip)
            run_ranks(
                hosts,
                words,
                1,
                threads,
                {"PYTHONUNBUFFERED": "1"},
                partial(print, end="", flush=True),
            )
        except (ValueError, HostFailedError) as error:
            print(error, file=sys.stderr)
            return 1
        ledgers = read_ledgers(folder, count)
    print(tabulate(ledgers))
    print(conclude(ledgers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
