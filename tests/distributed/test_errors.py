"""Wrong settings and ranks that disagree end in an error that says what to do; nothing hangs."""

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import lightning_dct.fabric
from distributed.harness import elastic_environment, free_port
from distributed.training import Module, fit, perceptron, rank
from lightning_dct import DCTPipelineStrategy, DCTStrategy, ThresholdRefresh

# Far more than anything here takes on a quiet machine.
TIMEOUT_S = 200


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"density": 0}, ValueError, ["`density`", "(0, 1]", "got 0"]),
        ({"density": 2}, ValueError, ["`density`", "(0, 1]", "got 2"]),
        ({"density": "x"}, TypeError, ["`density`", "(0, 1]", "got 'x'"]),
        ({"density": float("nan")}, ValueError, ["`density`", "got nan"]),
        ({"refresh_every": 0}, ValueError, ["`refresh_every`", "at least 1", "got 0"]),
        ({"refresh_every": 2.5}, TypeError, ["`refresh_every`", "whole number", "got 2.5"]),
        ({"value_format": "fp8"}, ValueError, ["`value_format`", "'bf16'", "'1bit'", "got 'fp8'"]),
        ({"density_per_parameter": {"a": 3}}, ValueError, ["density_per_parameter['a']", "got 3"]),
        ({"density_per_parameter": 0.1}, TypeError, ["`density_per_parameter`", "got 0.1"]),
        ({"warmup_steps": -1}, ValueError, ["`warmup_steps`", "at least 0"]),
        ({"guard": "yes"}, TypeError, ["`guard`", "got 'yes'"]),
        ({"ddp_comm_hook": print}, ValueError, ["`ddp_comm_hook`", "`DDPStrategy`"]),
        ({"densty": 0.1}, TypeError, ["`DCTStrategy` has no setting `densty`", "`density`"]),
        ({"find_unused_parameter": True}, TypeError, ["`find_unused_parameter`", "`find_unused_parameters`"]),
        ({"device_ids": [0]}, TypeError, ["no setting `device_ids`"]),
    ],
)
def test_wrong_setting_is_named(settings: dict[str, Any], error: type[Exception], says: list[str]) -> None:
    """Oracle: the setting's name, what it may be, and what it was."""
    with pytest.raises(error) as caught:
        DCTStrategy(**settings)
    for words in says:
        assert words in str(caught.value)


def test_other_strategies_name_an_unknown_setting_too() -> None:
    with pytest.raises(TypeError, match=r"`DCTStrategy` has no setting `densty`. Did you mean `density`"):
        lightning_dct.fabric.DCTStrategy(densty=0.1)
    with pytest.raises(TypeError, match=r"`DCTPipelineStrategy` has no setting `stage`. Did you mean `stages`"):
        DCTPipelineStrategy(stage=2)


def test_what_ddp_takes_is_taken() -> None:
    """Oracle: the constructors themselves."""
    given = {"bucket_cap_mb": 1, "broadcast_buffers": False, "timeout": timedelta(1), "start_method": "spawn"}
    for kind in (DCTStrategy, lightning_dct.fabric.DCTStrategy, DCTPipelineStrategy):
        kind(**given)


def test_refresh_interval_is_checked() -> None:
    with pytest.raises(ValueError, match=r"every_n_steps.*at least 1; got 0"):
        ThresholdRefresh(every_n_steps=0)


def run_alone(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(dedent(script))
    return subprocess.run(
        [sys.executable, str(path)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_wrong_trainer_and_string_before_the_import(tmp_path: Path) -> None:
    """Oracle: each error comes before any process is started, and the last two name the right Trainer."""
    done = run_alone(
        tmp_path,
        """
        import lightning.pytorch
        import pytorch_lightning

        def say(case, make):
            try:
                make()
            except Exception as error:
                print("@", case, "@", type(error).__name__, "@", " ".join(str(error).split()))

        settings = {"devices": 2, "accelerator": "cpu", "logger": False}
        say("before", lambda: lightning.pytorch.Trainer(strategy="dct", **settings))
        from lightning_dct import DCTStrategy
        lightning.pytorch.Trainer(strategy="dct", **settings)
        say("string", lambda: pytorch_lightning.Trainer(strategy="dct", **settings))
        say("instance", lambda: pytorch_lightning.Trainer(strategy=DCTStrategy(), **settings))
        """,
    )
    assert done.returncode == 0, done.stderr
    said = {line.split(" @ ")[0][2:]: line for line in done.stdout.splitlines() if line.startswith("@")}
    assert set(said) == {"before", "string", "instance"}, done.stdout
    assert "invalid strategy name: `strategy='dct'`" in said["before"]
    assert "lightning.pytorch" in said["string"]
    assert "pytorch_lightning" in said["string"]
    assert "lightning.pytorch.Trainer" in said["instance"]


def message_of(function: Callable[..., Any], *arguments: Any) -> str:
    try:
        function(*arguments)
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


def disagree_on_density() -> str:
    return message_of(fit, DCTStrategy(density=0.01 * (1 + rank())), Module(), 3)


def disagree_on_refresh_callback() -> str:
    return message_of(lambda: fit(DCTStrategy(), Module(), 3, callbacks=[ThresholdRefresh(10 * (1 + rank()))]))


def disagree_on_model() -> str:
    return message_of(fit, DCTStrategy(), Module(perceptron(hidden=24 + rank())), 3)


def disagree_on_frozen() -> str:
    module = Module()
    module.model.first.weight.requires_grad = rank() == 0
    return message_of(fit, DCTStrategy(), module, 3)


def pattern_for_nothing() -> str:
    return message_of(fit, DCTStrategy(density_per_parameter={"*.embedding.*": 0.1}), Module(), 3)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (disagree_on_density, ["`density`", "rank 0: 0.01", "rank 1: 0.02"]),
        (disagree_on_refresh_callback, ["ThresholdRefresh", "rank 0: [10]", "rank 1: [20]"]),
        (disagree_on_model, ["`parameter ", "rank 0: ", "rank 1: "]),
        (disagree_on_frozen, ["frozen", "rank 0: ", "rank 1: "]),
        (pattern_for_nothing, ["'*.embedding.*'", "'model.first.weight'", "Mend the pattern"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_disagreement_is_an_error_on_every_rank(ranks: Any, function: Callable[[], str], says: list[str]) -> None:
    """Oracle: what differs and each rank's value; the harness fails a rank that waits for the other."""
    for message in ranks(2).run(function, timeout_s=TIMEOUT_S):
        for words in says:
            assert words in message


PREAMBLE = """
import os
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_dct import DCTStrategy

settings = {"accelerator": "cpu", "devices": 2, "max_steps": 3, "logger": False, "enable_checkpointing": False}
settings |= {"enable_progress_bar": False, "enable_model_summary": False}
"""


def test_processes_that_disagree_end(tmp_path: Path) -> None:
    """Oracle: two real processes, both with a failing exit status and the setting with both values in their output."""
    script = tmp_path / "script.py"
    script.write_text(
        PREAMBLE + "Trainer(strategy=DCTStrategy(density=float(sys.argv[1])), **settings).fit(BoringModel())\n"
    )
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), density],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", **elastic_environment(me, 2, port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for me, density in enumerate(("0.01", "0.25"))
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode != 0
        assert "The ranks disagree on `density` (rank 0: 0.01, rank 1: 0.25)" in output


def test_exception_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    """Oracle: the launcher of `strategy="dct"` ends with a failing exit status when rank 1 raises in a step."""
    done = run_alone(
        tmp_path,
        PREAMBLE
        + """
class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            raise RuntimeError("rank 1 has had enough")
        return super().training_step(batch, batch_idx)

Trainer(strategy="dct", **settings).fit(Model())
""",
    )
    assert done.returncode != 0
    assert "rank 1 has had enough" in done.stdout + done.stderr


def refuse_corrupt_payload() -> str:
    """Rank 1's payload says that it was made for another layout."""
    from lightning_dct.gradients import compression
    from lightning_dct.wire import pack

    def damaged(*arguments: Any) -> Any:
        payload, received = pack(*arguments)
        if rank() == 1:
            payload[8] ^= 1
        return payload, received

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compression, "pack", damaged)
        return message_of(fit, DCTStrategy(), Module(), 3)


def test_corrupt_payload_is_an_error_on_every_rank(ranks: Any) -> None:
    """Oracle: an error that names the sender, on all ranks alike."""
    for message in ranks(2).run(refuse_corrupt_payload, timeout_s=TIMEOUT_S):
        assert "Updates from rank 1" in message
        assert "use the same model and settings on every rank" in message
