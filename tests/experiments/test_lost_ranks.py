"""The figures of a run with lost ranks, from rows that are made up."""

from pathlib import Path

import pytest

from lost_ranks_figures import figures, read


def write(
    folder: Path, rank: int, rows: list[tuple[float, int, int, int, int, int, int, str]]
) -> None:
    lines = [",".join(map(str, (*row, 2.5))) for row in rows]
    (folder / f"steps-{rank}.csv").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("other", ["aaaa", "bbbb"])
def test_figures_count_lives_gaps_and_digests(tmp_path: Path, other: str) -> None:
    """Two ranks with steps of half a second; the second one dies, comes back, and has failed to
    exchange once.
    """
    first = [(1.0, 1, 1, 1, 2, 1, 0, "0000"), (1.5, 2, 1, 1, 2, 1, 0, "0000")]
    write(tmp_path, 0, [*first, (2.0, 3, 1, 2, 2, 2, 0, "aaaa"), (8.0, 4, 1, 3, 1, 3, 0, "cccc")])
    back = [(5.0, 4, 0, 3, 2, 0, 0, ""), (6.0, 5, 1, 3, 2, 0, 1, "")]
    write(tmp_path, 1, [*first, (2.0, 3, 1, 2, 2, 2, 0, other), *back])
    (tmp_path / "events.csv").write_text("2.5,kill,1\n4.0,start,1\n")
    lives, events = read(tmp_path)
    assert [len(life) for life in lives[1]] == [3, 2]
    found = figures(lives, events, 0)
    assert found["what happened"] == "kill: 1, start: 1"
    assert found["steps trained, all ranks"] == "8"
    assert found["steps passed over, all ranks"] == "1"
    assert found["rounds in which several ranks took part"] == "1"
    assert found["of these with equal digests"] == str(int(other == "aaaa"))
    assert (found["exchanges of a rank, committed"], found["exchanges of a rank, failed"]) == (
        "5",
        "1",
    )
    assert found["longest time between two batches of a present rank, s"] == "6.0"
    # In 7 and 2 seconds the ranks could have trained 18 steps; they have trained 6 after the first
    # of each life.
    assert found["median seconds of a step without exchange"] == "0: 0.500, 1: 0.500"
    assert (
        found["throughput after the warm-up, of the speeds of the present ranks added"]
        == f"{6 / 18:.1%}"
    )
