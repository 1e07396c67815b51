"""Harmed payloads and checkpoints end in an error that says what is wrong, or in a right answer;
see fuzz.py.
"""

from collections import Counter
from pathlib import Path

from reliability.fuzz import fuzz_checkpoints, fuzz_payloads


def test_payloads() -> None:
    """Oracle: the checks in wires.py; some of each verdict, so that neither the harm nor the checks
    are idle.
    """
    verdicts = Counter(outcome.verdict for outcome in fuzz_payloads(2_500, seed=1))
    assert verdicts.keys() == {"error", "right"}, verdicts
    assert min(verdicts.values()) > 100


def test_checkpoints(tmp_path: Path) -> None:
    """Oracle: the checks in states.py; a file's name in every error about its bytes."""
    outcomes = list(fuzz_checkpoints(180, seed=1, folder=tmp_path))
    assert {outcome.verdict for outcome in outcomes} <= {"error", "right"}, outcomes
    assert len({outcome.subject for outcome in outcomes}) == 6
