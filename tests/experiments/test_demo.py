"""What `make demo` shows, with figures that are made up, and that its runs are as long as the
package wants them.
"""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

import comparison.runs
import demo
from lightning_dct.callbacks.run_advice import notes_at_start
from lightning_dct.law import RunLength, UserSettings
from made_up_results import run_in_no_time


@pytest.mark.parametrize("name", demo.TRAININGS)
def test_no_run_is_too_short(name: str) -> None:
    with initialize_config_dir(str(Path(demo.__file__).parents[1] / "conf"), version_base="1.3"):
        config = compose("train", [*demo.TRAININGS[name][0].split(), *demo.COMMON, "strategy=dct"])
    steps = config.trainer.max_steps
    if steps < 0:
        steps = config.trainer.max_epochs * config.data.batches_per_epoch
    notes = notes_at_start(UserSettings.of({}), demo.RANKS, RunLength(steps), "cuda", "", "")
    assert not any("This run is short" in note for note in notes)


def test_the_table_and_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: 7 ms of computing, 2 of compressing.

    At 100 Mbit/s 8 kB take 0.64 ms, and 60 kB of rows 4.8.
    """
    started: list[str] = []

    def measured(settings: dict[str, str]) -> dict[str, float]:
        return (
            {"loss": 0.7368} if settings["experiment"] == "lm" else {"auc": 0.7368, "rows": 1500.0}
        )

    monkeypatch.setattr(comparison.runs, "run_alone", run_in_no_time(started, measured))
    assert demo.main(["--output", str(tmp_path)]) == 0
    assert len(started) == 4
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert all(line.count("|") <= 6 for line in lines)
    recommender, model = lines[2:4]
    assert (
        recommender
        == "| recommender (DLRM), 4 | auc 0.738 → 0.738, level | 68 → 2.5 | 27x | 12 → 9 |"
    )
    assert model == "| language model, 4 | loss 0.738 → 0.738, level | 8 → 1.0 | 8x | 8 → 9 |"
    assert (tmp_path / "demo.png").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "demo.png" in printed
    assert printed.rstrip().endswith(demo.NEXT)
    assert demo.main(["--output", str(tmp_path)]) == 0
    assert len(started) == 4


@pytest.mark.parametrize(
    ("metric", "dense", "dct", "said"),
    [
        ("auc", 0.72, 0.7192, "level"),
        ("auc", 0.72, 0.7185, "worse"),
        ("loss", 1.0, 1.02, "worse"),
        ("loss", 1, 0.98, "better"),
    ],
)
def test_what_is_lost_is_said(metric: str, dense: float, dct: float, said: str) -> None:
    one = demo.Shown(
        "a training", *({"metrics": {f"test/{metric}": value}} for value in (dense, dct))
    )
    assert one.quality.endswith(f", {said}")
