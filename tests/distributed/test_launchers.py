"""Ranks started in every way that Lightning knows end well and print the table once (torchrun:
test_restarts.py).
"""

from pathlib import Path

import pytest

from distributed.harness import free_port
from distributed.scripts import Script

pytestmark = pytest.mark.usefixtures("quick_python")
SCRIPT = """
    import sys
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    import lightning_dct

    class Model(BoringModel):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(32, 300)

        def training_step(self, batch, batch_idx):
            if "fails" in sys.argv and self.global_rank == 1 and batch_idx == 1:
                raise RuntimeError("rank 1 has had enough")
            return super().training_step(batch, batch_idx)

    if __name__ == "__main__":
        settings = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        strategy, devices, nodes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        Trainer(
            strategy=strategy, accelerator="cpu", devices=devices, num_nodes=nodes, max_steps=3, logger=False,
            limit_val_batches=0, **settings,
        ).fit(Model())
    """

# Of what goes wrong, what the process that starts the ranks says in the end.
FAILING = """
    import sys
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import OnExceptionCheckpoint
    from lightning.pytorch.demos.boring_classes import BoringModel
    import lightning_dct

    class Model(BoringModel):
        def __init__(self, fails=False):
            super().__init__()
            split = lightning_dct.SplitPoint(density=0.5)
            self.layer = torch.nn.Sequential(torch.nn.Linear(32, 8), split, torch.nn.Linear(8, 2))
            self.fails = fails

        def on_train_start(self):
            if self.fails:
                raise ValueError("the user's own")

    def trainer(callbacks=()):
        settings = {"enable_progress_bar": False, "enable_model_summary": False}
        return Trainer(
            strategy=sys.argv[1], accelerator="cpu", devices=2, max_steps=1, logger=False, limit_val_batches=0,
            enable_checkpointing=bool(callbacks), callbacks=callbacks, **settings,
        )

    def told(work):
        try:
            work()
        except Exception as error:
            print("told:", type(error).__name__, str(error).strip().splitlines()[-1])

    if __name__ == "__main__":
        told(lambda: trainer([OnExceptionCheckpoint(".")]).fit(Model(fails=True)))
        if "pipeline" not in sys.argv[1]:
            again = trainer()
            again.fit(Model())
            told(lambda: again.fit(Model()))
            again.save_checkpoint("after.ckpt")
            again._checkpoint_connector.restore("after.ckpt")  # as Lightning's own tests do
            print("told: restored")
    """


def assert_one_table(output: str) -> None:
    assert output.count("Synchronisation, rank 0 of 2, 3 optimizer steps") == 1, output
    for row in ("bytes sent", "compression ratio", "entries sent"):
        assert output.count(f"\n{row} ") == 1, output
    (sent,) = (line for line in output.splitlines() if "entries sent" in line)
    assert "of 29,700 due" in sent  # exchanged after every step, as training warms up
    assert "100%" not in sent
    # What is the same in every run is not worth a line of it.
    assert "exchange='auto'" not in output


@pytest.mark.parametrize("strategy", ["dct", "dct_spawn", "dct_fork"])
def test_lightning_launches(tmp_path: Path, strategy: str) -> None:
    """Oracle: exit status 0, and one table that says 2 ranks and 3 steps."""
    status, output = Script(tmp_path, SCRIPT, strategy, "2", "1", COLUMNS="100").end()
    assert status == 0, output
    assert_one_table(output)


def test_exception_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    """Oracle: the launcher of `strategy="dct"` ends with a failing exit status when rank 1 raises
    in a step.
    """
    status, output = Script(tmp_path, SCRIPT, "dct", "2", "1", "fails").end()
    assert status != 0
    assert "rank 1 has had enough" in output


@pytest.mark.parametrize("strategy", ["ddp_spawn", "dct_spawn", "dct_fork", "dct_pipeline_spawn"])
def test_what_goes_wrong_is_told_where_ranks_are_started(tmp_path: Path, strategy: str) -> None:
    """Oracle: DDPStrategy, which tells the error of a rank, and those of a launch that Lightning
    refuses.
    """
    status, output = Script(tmp_path, FAILING, strategy, "2").end()
    assert status == 0, output
    told = [
        line.removeprefix("told: ") for line in output.splitlines() if line.startswith("told: ")
    ]
    assert told[0] == "ProcessRaisedException ValueError: the user's own", output
    if strategy != "dct_pipeline_spawn":  # whose batches of one example would not train
        assert told[1].startswith("NotImplementedError Calling `trainer.fit()` twice"), output
        assert told[2:] == ["restored"], output


def test_two_nodes_launch(tmp_path: Path) -> None:
    """Oracle: as above, the table from the first node only."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "COLUMNS": "100"}
    nodes = [
        Script(tmp_path, SCRIPT, "dct", "1", "2", NODE_RANK=str(node), **address)
        for node in range(2)
    ]
    (status, first), (other_status, second) = (node.end() for node in nodes)
    assert (status, other_status) == (0, 0), first + second
    assert_one_table(first)
    assert "Synchronisation" not in second
