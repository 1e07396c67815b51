"""Runs every example under ``examples/`` on two ranks, as its users do."""

import json
import math
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from distributed.scripts import TIMEOUT_S, environment_of_users, run_here
from lightning_dct import Updates

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(ranks: Any, folder: Path, name: str, *arguments: str, world_size: int = 2) -> str:
    """What rank 0 prints when all ranks run an example in a folder."""
    return str(ranks(world_size).run(run_here, str(EXAMPLES / name), arguments, str(folder))[0])


def printed_by(command: list[str], folder: Path, typed: str = "", **variables: str) -> str:
    """What a process of its own prints, given what is typed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment_of_users() | variables,
        input=typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def table_of(output: str) -> dict[str, str]:
    """The rows of the table at the end of fit, which is there once, and what its title says."""
    title = r"^Synchronisation, rank 0 of (\d+), (\d+) optimizer steps\n((?:.+\n)*)"
    ((ranks, steps, rest),) = re.findall(title, output, re.MULTILINE)
    rows = re.findall(r"^(\S.*?) {2,}(\S.*)$", rest, re.MULTILINE)
    return {**dict(rows), "ranks": ranks, "steps": steps}


ON_CPU = ("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.enable_progress_bar=false")
ONE_STEP = (
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=1",
    "--trainer.limit_val_batches=1",
)
CLASS = "lightning_dct.DCTStrategy"
CLI: dict[str, list[str]] = {
    "name": ["--trainer.strategy=dct"],
    "class path": [f"--trainer.strategy={CLASS}", "--trainer.strategy.density=0.01"],
    "YAML": [f"--config={EXAMPLES / 'cli.yaml'}", "--trainer.strategy.density=0.1"],
}
# Of 32 x 512 and 512 x 2 weights a share, rounded up; of 512 and 2 biases too, 512 or all where
# settings say so. A run of one step takes one local step and 30%, unless they are given; with 4
# local steps its exchange sends a quarter.
ENTRIES_A_STEP = {
    "name": 4916 + 308 + 154 + 2,
    "class path": 164 + 11 + 6 + 2,
    "YAML": 410 + 26 + 512 + 2,
}


@pytest.mark.parametrize("case", CLI)
def test_cli(ranks: Any, tmp_path: Path, case: str) -> None:
    """Oracles: the shares of entries of one exact selection, worked out by hand; the settings that
    Lightning saves.
    """
    output = run_example(ranks, tmp_path, "cli.py", "fit", *CLI[case], *ON_CPU, *ONE_STEP)
    table = table_of(output)
    assert table["ranks"] == "2"
    assert table["entries sent"].startswith(
        f"{100 * ENTRIES_A_STEP[case] / 17_922:.3g}% of 17,922 due; "
    )
    (saved,) = tmp_path.rglob("config.yaml")
    strategy = yaml.safe_load(saved.read_text())["trainer"]["strategy"]
    if case == "name":
        assert strategy == "dct"
    else:
        # What LightningCLI finds out about settings we pass on must not change them.
        assert strategy["class_path"] == CLASS
        assert strategy["init_args"]["gradient_as_bucket_view"]


def test_fabric(ranks: Any, tmp_path: Path) -> None:
    """Oracles: the ratio lies where the default's does, the loss falls, and both ranks' state is
    saved.
    """
    output = run_example(ranks, tmp_path, "fabric.py")
    epochs = re.findall(r"epoch \d: loss ([\d.]+), (\d+)x fewer bytes", output)
    assert len(epochs) == 2
    assert float(epochs[1][0]) < 0.6
    assert float(epochs[1][1]) > 20
    assert len(list((tmp_path / "fabric.ckpt.module-0.dct").iterdir())) == 2


@pytest.mark.usefixtures("quick_python")
def test_plain_loop(tmp_path: Path) -> None:
    """As its first lines say.

    Oracles: the loss falls, and the ratio lies where the default's does.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    output = printed_by([*command, str(EXAMPLES / "plain_loop.py")], tmp_path)
    epochs = re.findall(r"epoch \d: loss ([\d.]+), (\d+)x fewer bytes", output)
    assert len(epochs) == 2
    assert float(epochs[1][0]) < min(0.5, float(epochs[0][0]))
    assert float(epochs[1][1]) > 20


@pytest.mark.parametrize(("arguments", "world_size"), [((), 2), (("--sharded",), 4)])
def test_huggingface(
    ranks: Any, tmp_path: Path, arguments: tuple[str, ...], world_size: int
) -> None:
    """Oracle: the loss of a model that guesses, ln 256 = 5.55 nats a byte; input and output share
    one matrix.
    """
    pytest.importorskip("transformers")
    output = run_example(ranks, tmp_path, "huggingface.py", *arguments, world_size=world_size)
    assert float(re.findall(r"([\d.]+) nats a byte", output)[0]) < 4.0
    assert table_of(output)["steps"] == "50"


def hugging_face(**arguments: Any) -> tuple[Any, Any]:
    """The example's Trainer without dropout, and its callback."""
    torch.manual_seed(0)
    example = runpy.run_path(str(EXAMPLES / "huggingface_trainer.py"))
    trainer = example["make_trainer"](max_steps=6, eval_steps=3, save_steps=3, **arguments)
    trainer.model_accepts_loss_kwargs = False  # the mean over a batch
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return trainer, example["ExchangeUpdates"](trainer, density=0.2, kernel="torch")


def under_hugging_face(
    folder: str, resume: str | None, arguments: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """The weights that a Trainer ends with, and the bytes sent."""
    trainer, exchange = hugging_face(output_dir=folder, **arguments)
    trainer.add_callback(exchange)
    trainer.train(resume_from_checkpoint=resume)
    return dict(trainer.model.state_dict()), exchange.updates.traffic.totals.bytes_sent


def in_a_loop(folder: str) -> tuple[dict[str, Any], int]:
    """The same with the same model, batches and optimizer in a plain loop."""
    trainer, _ = hugging_face(output_dir=folder)
    model = trainer.model.train()
    batches = trainer.get_train_dataloader()
    trainer.create_optimizer_and_scheduler(6)
    updates = Updates(model, trainer.optimizer, steps=6, density=0.2, kernel="torch")
    for _, batch in zip(range(6), batches, strict=False):
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        model.zero_grad()
    updates.close()
    return dict(model.state_dict()), updates.traffic.totals.bytes_sent


def test_huggingface_trainer(ranks: Any, tmp_path: Path) -> None:
    """Oracle: a plain loop.

    What is saved, a resumed run and the best checkpoint have its bits, on both ranks.
    """
    pytest.importorskip("accelerate")
    safetensors = pytest.importorskip("safetensors.torch")
    # The best is the first: the loss falls, and here a greater one is better.
    settings = {"load_best_model_at_end": True, "greater_is_better": True}
    best = ranks(2).run(under_hugging_face, str(tmp_path), None, settings)
    first, last = (
        safetensors.load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        for step in (3, 6)
    )
    shutil.rmtree(tmp_path / "checkpoint-6")
    resumed = ranks(2).run(under_hugging_face, str(tmp_path), str(tmp_path / "checkpoint-3"), {})
    loops = ranks(2).run(in_a_loop, str(tmp_path))
    for (weights, sent), (again, _), (theirs, their_bytes) in zip(
        best, resumed, loops, strict=True
    ):
        assert sent == their_bytes > 0
        for name, saved in last.items():
            assert torch.equal(saved, theirs[name])
            assert torch.equal(again[name], theirs[name])
            assert torch.equal(weights[name], first[name])
    assert not all(torch.equal(first[name], last[name]) for name in last)


def test_notebook(tmp_path: Path) -> None:
    """In an interactive interpreter: Lightning looks for ``sys.ps1``.

    Oracles: tables, accuracy, one refusal.
    """
    cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    refused = "L.Trainer(strategy='dct', accelerator='cpu', devices=2)"
    typed = "".join(f"exec({source!r}, globals())\n" for source in [*sources, refused])
    output = printed_by([sys.executable, "-W", "ignore", "-i", "-q"], tmp_path, typed)
    assert [float(accuracy) > 0.9 for accuracy in re.findall(r"accuracy ([\d.]+)", output)] == [
        True
    ]
    assert output.count("Synchronisation, rank 0") == 2
    # What `strategy="dct"` says there.
    assert "is not compatible with an interactive environment" in output
    assert output.count("Traceback") == 1


@pytest.mark.usefixtures("quick_python")
def test_notebook_on_one_device(tmp_path: Path) -> None:
    """Its file and its commands.

    Oracles: both trainings learn as well, and one of them sends less.
    """
    cells = json.loads((EXAMPLES / "one_gpu.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (written,) = [source for source in sources if source.startswith("%%writefile two_ranks.py\n")]
    (tmp_path / "two_ranks.py").write_text(written.split("\n", 1)[1])
    commands = [
        line[1:] for source in sources for line in source.splitlines() if line.startswith("!")
    ]
    starts = {
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
        "python": [sys.executable],
    }
    printed = ""
    for command in commands:
        program, *words = command.split()
        printed += printed_by([*starts[program], *words], tmp_path, OMP_NUM_THREADS="1")
    dense, compressed = (float(loss) for loss in re.findall(r"loss ([\d.]+) on", printed))
    assert compressed < 1.05 * dense < 0.7 * math.log(10)
    assert [int(ratio) > 10 for ratio in re.findall(r" (\d+)x fewer", printed)] == [False, True]
    assert "ms on the link" in printed


@pytest.mark.usefixtures("quick_python")
def test_slurm(tmp_path: Path) -> None:
    """``train.sbatch`` with an ``srun`` that starts its two tasks here, as two nodes.

    Oracles: one table; two files.
    """
    folder, bin_folder = copied("slurm", tmp_path)
    task = 'SLURM_PROCID=$task SLURM_NODEID=$task SLURM_LOCALID=0 "$@" & tasks+=($!)'
    script(
        bin_folder / "srun",
        f'for task in 0 1; do {task}; done; for task in "${{tasks[@]}}"; do wait $task; done',
    )
    script(bin_folder / "python", f'exec {sys.executable} "$@"')
    job = {
        "SLURM_JOB_ID": str(job_with_free_port()),
        "SLURM_JOB_NAME": "dct",
        "SLURM_NODELIST": "127.0.0.1",
    }
    job |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2"}
    table = table_of(
        printed_by(["bash", "train.sbatch"], folder, PATH=f"{bin_folder}:/usr/bin:/bin", **job)
    )
    assert table["ranks"] == "2"
    assert table["steps"] == "64"
    assert len(list((folder / "checkpoints" / "last.ckpt.dct").iterdir())) == 2


@pytest.mark.skipif(not find_spec("torchft"), reason="needs the extra `elastic`")
@pytest.mark.usefixtures("quick_python")
def test_elastic(tmp_path: Path) -> None:
    """A lighthouse and four ranks; the second fails at first.

    Oracles: it is started again; all end; one saves.
    """
    folder, _ = copied("elastic", tmp_path)
    fails = (
        'import os, sys\nif os.environ["LOCAL_RANK"] == "1" and not os.path.exists("failed"):\n   '
        ' os.mkdir("failed")\n'
    )
    (folder / "fails.py").write_text(f"{fails}    sys.exit(3)\n{(folder / 'train.py').read_text()}")
    printed = printed_by(
        [sys.executable, "start.py", "4", "fails.py"], folder, EPOCHS="2", OMP_NUM_THREADS="1"
    )
    assert "Rank 1 has ended with status 3, and starts again." in printed
    table = table_of(printed)
    assert table["ranks"] == "4"
    assert (folder / "checkpoints" / "last.ckpt.dct").is_dir()


def copied(name: str, folder: Path) -> tuple[Path, Path]:
    """Copy the examples to a folder: that of one example, and one for commands that take the place
    of others.
    """
    shutil.copytree(EXAMPLES, folder / "examples")
    (folder / "bin").mkdir()
    return folder / "examples" / name, folder / "bin"


def script(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/bash\nset -e\n{body}\n")
    path.chmod(0o755)


def job_with_free_port() -> int:
    """A job's number: Lightning's SLURMEnvironment makes ``15000 + its last four digits`` the port
    of rank 0.
    """
    for job in range(os.getpid() % 10_000, 20_000):  # not where another run of this test begins
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 15_000 + job % 10_000)):
                return job
    raise RuntimeError("no free port")


def test_recommender(ranks: Any, tmp_path: Path) -> None:
    """Oracles: a model that learns nothing has an AUC of 0.5; whole tables in files that torch
    reads.
    """
    output = run_example(ranks, tmp_path, "recommender.py", "--epochs=1")
    assert float(re.findall(r"^AUC ([\d.]+)$", output, re.MULTILINE)[0]) > 0.7
    shapes = {
        file.stem: list(torch.load(file, weights_only=True).shape)
        for file in (tmp_path / "serving").iterdir()
    }
    assert shapes == {"users": [4000, 16], "items": [2000, 16], "countries": [50, 16]}
    assert (tmp_path / "recommender.ckpt.dct").is_dir()
