"""Holds the counted bytes against the network interface's own counters: ``python experiments/network/verify_bytes.py``.

Trains a 9.4-million-parameter MLP across hosts made of network namespaces (Linux, as root) and compares, between the
same two steps, what ``strategy.traffic`` counted with what each host's interface sent, less 66 bytes a packet for the
Ethernet, IPv4 and TCP headers. What remains of a difference is Lightning's own small messages and acknowledgements.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `network` and `peers` are

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_dct  # noqa: F401  (registers the strategies with Lightning)
from lightning_dct import DCTStrategy
from lightning_dct.tables import format_bytes
from network.hosts import HEADER_BYTES, make_hosts, sent_by_interface, why_not
from peers import CountedDDPStrategy

FIRST_STEP, LAST_STEP = 5, 25
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "dct 10% bf16": {"density": 0.1},
    "dct 1% bf16": {"density": 0.01},
    "dct 1% int8": {"density": 0.01, "value_format": "int8"},
    "dct 1% 1bit": {"density": 0.01, "value_format": "1bit"},
    "dct 0.1% bf16": {"density": 0.001},
}


class MLP(LightningModule):
    """9.4 million parameters in three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048), torch.nn.ReLU()
        )
        self.head = torch.nn.Linear(2048, 512)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Fit random targets: only the traffic is of interest."""
        return torch.nn.functional.mse_loss(self.head(self.layers(batch[0])), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Ledger(Callback):
    """Notes both counts after the first and the last step of interest."""

    def __init__(self) -> None:
        self.counted: list[int] = []
        self.on_interface: list[tuple[int, int]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the counters while the hosts wait for one another."""
        if trainer.global_step in (FIRST_STEP, LAST_STEP):
            trainer.strategy.barrier()
            self.counted.append(trainer.strategy.traffic.totals.bytes_sent)
            self.on_interface.append(sent_by_interface())
            trainer.strategy.barrier()


def train_on_this_host(case: str, num_hosts: int) -> None:
    """Run one rank and print its ledger as the last line, in JSON."""
    seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    strategy = (
        CountedDDPStrategy(synchronisation="fp32")
        if case == "ddp"
        else DCTStrategy(compress="gradients", **CASES[case])
    )
    ledger = Ledger()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=num_hosts,
        max_steps=LAST_STEP,
        callbacks=[ledger],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(8 * LAST_STEP * num_hosts, 2048), torch.randn(8 * LAST_STEP * num_hosts, 512))
    trainer.fit(MLP(), DataLoader(data, batch_size=8))
    frames, packets = (after - before for before, after in zip(*ledger.on_interface, strict=True))
    steps = LAST_STEP - FIRST_STEP
    dense = trainer.strategy.traffic.totals.bytes_dense // LAST_STEP * steps
    print(
        json.dumps(
            {"counted": ledger.counted[1] - ledger.counted[0], "frames": frames, "packets": packets, "dense": dense}
        )
    )


def main() -> int:
    """Run all cases on the hosts and print the table; 1 if any count is off by more than 5%."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts to make, one rank on each")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        train_on_this_host(arguments.case, arguments.hosts)
        return 0
    if reason := why_not():
        print(f"This script needs network namespaces, and {reason}. It shows nothing without them.", file=sys.stderr)
        return 2

    table = Table(title=f"Bytes one rank sends in {LAST_STEP - FIRST_STEP} steps, {arguments.hosts} hosts")
    for column in ("strategy", "rank", "counted", "interface", "no headers", "off by", "ratio"):
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    worst = 0.0
    with make_hosts(arguments.hosts) as hosts:
        for port, case in enumerate(CASES, start=29400):
            command = [sys.executable, __file__, "--hosts", str(arguments.hosts), "--case", case]
            environment = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(port)}
            ranks = [host.start(command, {**environment, "NODE_RANK": str(i)}) for i, host in enumerate(hosts)]
            outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
            if any(rank.returncode for rank in ranks):
                print("\n".join(outputs), file=sys.stderr)
                return 1
            for index, output in enumerate(outputs):
                ledger = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith("{")))
                bare = ledger["frames"] - HEADER_BYTES * ledger["packets"]
                difference = bare / ledger["counted"] - 1
                worst = max(worst, abs(difference))
                table.add_row(
                    case,
                    str(index),
                    format_bytes(ledger["counted"]),
                    format_bytes(ledger["frames"]),
                    format_bytes(bare),
                    f"{100 * difference:+.2f}%",
                    f"{ledger['dense'] / ledger['counted']:.1f}x",
                )
    Console().print(table)
    return int(worst > 0.05)


if __name__ == "__main__":
    sys.exit(main())
