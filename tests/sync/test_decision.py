"""What follows an optimizer step: a table of cases, which is the method."""

from typing import Any

import pytest

from lightning_dct import DCTConfig
from lightning_dct.sync.decision import Length, decide

APART = {"local_steps": 8, "warmup_steps": 0, "density": 0.3}
EVERY_STEP = {"local_steps": 1, "warmup_steps": 20, "density": 0.1}


@pytest.mark.parametrize(
    ("step", "settings", "more", "expected"),
    [
        # Apart: exchanges every eight steps, with buffers, and the mean goes by senders.
        (7, APART, {}, {"length": 8, "is_exchanged": False}),
        (
            8,
            APART,
            {},
            {
                "is_exchanged": True,
                "averages_buffers": True,
                "mean": Length.BY_SENDERS,
                "kept": 1.0,
            },
        ),
        (8, APART, {}, {"measures": False, "agrees_on_decay": False}),
        (128, APART, {}, {"agrees_on_decay": True}),
        (8, APART, {"is_scale_invariant": False}, {"mean": Length.PLAIN}),
        # During the warm-up ranks exchange after every step, and residuals decay. Buffers keep
        # their pace.
        (
            7,
            {**APART, "warmup_steps": 9},
            {},
            {"length": 1, "is_exchanged": True, "averages_buffers": False},
        ),
        (7, {**APART, "warmup_steps": 9}, {}, {"kept": 0.8, "mean": Length.BY_SENDERS}),
        (7, {**APART, "warmup_steps": 9}, {"is_scale_invariant": False}, {"kept": 0.95}),
        (7, {**APART, "warmup_steps": 9, "residual_decay": 0.5}, {}, {"kept": 0.5}),
        # After every step: the mean's length is measured, often at first.
        (
            3,
            EVERY_STEP,
            {},
            {"measures": True, "agrees_on_decay": True, "mean": Length.MEASURED, "kept": 0.9},
        ),
        (21, EVERY_STEP, {}, {"measures": False, "mean": Length.MEASURED, "kept": 1.0}),
        (24, EVERY_STEP, {}, {"measures": True}),
        (68, EVERY_STEP, {}, {"measures": False}),
        (80, EVERY_STEP, {}, {"measures": True}),
        # Few entries: one gain for all tensors, unless ranks pull apart.
        (3, {**EVERY_STEP, "density": 0.01}, {}, {"measures": True, "mean": Length.OF_ALL}),
        (
            3,
            {**EVERY_STEP, "density": 0.01},
            {"are_opposed": True},
            {"mean": Length.MEASURED, "holds_back": True},
        ),
        (80, EVERY_STEP, {"is_ending": True}, {"measures": False, "mean": Length.PLAIN}),
        # SGD's mean is long enough; clipping by the norm of the mean needs the measurement.
        (3, EVERY_STEP, {"is_scale_invariant": False}, {"measures": False, "mean": Length.PLAIN}),
        (
            3,
            EVERY_STEP,
            {"is_scale_invariant": False, "clips_by_norm": True},
            {"measures": True, "mean": Length.PLAIN},
        ),
        # Ranks that pull apart train on the shared weights, and lose nothing of what they have not
        # sent.
        (3, EVERY_STEP, {"are_opposed": True}, {"holds_back": True, "kept": 1.0}),
        (8, {**APART, "overlap_steps": 2}, {"are_opposed": True}, {"holds_back": False}),
    ],
)
def test_what_follows_a_step(
    step: int, settings: dict[str, Any], more: dict[str, bool], expected: Any
) -> None:
    decision = decide(step, DCTConfig(**settings), **{"is_scale_invariant": True, **more})
    found = decision._asdict()
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name
