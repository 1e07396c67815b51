"""An update passes the functions that CONTRIBUTING.md lists, in their order, and no other file."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback

import lightning_dct
from distributed.training import Module, loader, trainer_for
from lightning_dct import DCTStrategy

SOURCE = Path(lightning_dct.__file__).parent
SECTION = Path(__file__).parents[2] / "CONTRIBUTING.md"
# An exchange long after the last comparison of weights: nothing happens for the first time, and
# nothing that happens now and then.
LOCAL_STEPS = 2
TRACED = 30 * LOCAL_STEPS
Call = tuple[str, str]


def section() -> str:
    """The text of "The life of one update"."""
    _, _, rest = SECTION.read_text().partition("## The life of one update\n")
    text, _, _ = rest.partition("\n## ")
    assert text
    return text


def listed() -> list[Call]:
    """Files and functions of the numbered list."""
    steps = re.findall(r"^(\d+)\. `([\w/]+\.py)`: `([\w.]+)`", section(), re.MULTILINE)
    assert [int(number) for number, _, _ in steps] == [*range(1, len(steps) + 1)]
    return [(file, function.rpartition(".")[2]) for _, file, function in steps]


class Trace(Callback):
    """Notes what is called in the package from the beginning of a batch until its end."""

    reads_weights = False

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == TRACED - 1:
            sys.setprofile(self._see)

    def on_train_batch_end(self, *_: Any) -> None:
        sys.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        # Optimizers of tables that earlier tests have left see the steps of all others.
        is_left = file.is_relative_to(SOURCE / "embedding")
        if event == "call" and file.is_relative_to(SOURCE) and not is_left:
            self.calls.append((str(file.relative_to(SOURCE)), frame.f_code.co_name))


def traced() -> list[Call]:
    """The calls of a step with an exchange, on one rank."""
    trace = Trace()
    strategy = DCTStrategy(
        local_steps=LOCAL_STEPS, warmup_steps=0, density=0.1, exchange="all_gather", kernel="torch"
    )
    trainer_for(strategy, callbacks=[trace]).fit(Module(), loader(TRACED + 1, 40, 8))
    return trace.calls


def test_an_update_lives_as_the_page_says(ranks: Any) -> None:
    """Oracle: each rank calls the functions of the page in its order, and the step passes the files
    that the page names.
    """
    for calls in ranks(2).run(traced):
        rest = iter(calls)
        for step in listed():
            assert step in rest, f"{step} is not called, or not after the step before it"
        named = set(re.findall(r"`([\w/]+\.py)`", section()))
        assert {file for file, _ in calls} == {file for file in named if file[:6] != "tests/"}
