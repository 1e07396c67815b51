"""The source tree stays small: no file is long, and the whole only shrinks."""

from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "lightning_dct"
# Lower these with each removal.
MOST_LINES, MOST_FILES = 27_000, 140
LONGEST = 600
LONGER = {"kernels/numba_cpu.py"}


def test_the_size_of_the_source_tree() -> None:
    lines = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")}
    assert sum(lines.values()) <= MOST_LINES
    assert len(lines) <= MOST_FILES
    assert {name for name, count in lines.items() if count > LONGEST} == LONGER
