import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from criteo_reference import make_lines, prepare_rows
from dlrm.criteo_folder import ROW, Folder, PrepareSettings, folder_of
from dlrm.criteo_lines import MAX_LINE_BYTES
from dlrm.criteo_prepare import prepare
from dlrm.criteo_stages import DamagedInputError, rows_name, vocabulary_name
from dlrm.movielens_files import BadLineError

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SCRIPT = EXPERIMENTS / "dlrm" / "criteo_prepare.py"
LINES = make_lines(700)
SETTINGS = PrepareSettings(min_count=3, shard_bytes=30_000)
BAD = {3: b"", 4: b"\0\xff", 250: b"x\ty", 699: LINES[0] + b"\t"}
"""Lines that are none, by their number once they are put in."""


def write(path: Path, lines: list[bytes]) -> Path:
    content = b"\n".join(lines) + b"\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def with_bad_lines(lines: list[bytes]) -> list[bytes]:
    lines = list(lines)
    for number, text in BAD.items():
        lines.insert(number - 1, text)
    return lines


def rows_in(root: Path) -> np.ndarray:
    manifest = Folder(root).read_manifest()
    assert manifest.stage == "done"
    return np.concatenate([np.load(root / rows_name(index)) for index in range(len(manifest.shards))])


def content_of(root: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in root.iterdir()}


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
@pytest.mark.parametrize("shard_bytes", [30_000, 2**26])
def test_rows_and_tables_are_those_of_the_plain_way(name: str, shard_bytes: int, tmp_path: Path) -> None:
    # Values that come in the last day only must not be known.
    lines = make_lines(600) + make_lines(100, seed=1, values=80)
    settings = PrepareSettings(days=7, min_count=3, max_rows_per_table=30, shard_bytes=shard_bytes)
    root = prepare(write(tmp_path / name, lines), tmp_path / "cache", settings, show_progress=False)
    rows, (expected, table_rows) = rows_in(root), prepare_rows(lines, 7, 3, 30)
    assert rows.dtype == ROW
    assert ROW.itemsize == 160
    np.testing.assert_array_equal(rows["label"], expected["label"])
    np.testing.assert_allclose(rows["dense"], expected["dense"], rtol=1e-6)
    np.testing.assert_array_equal(rows["categorical"], expected["categorical"])
    manifest = Folder(root).read_manifest()
    assert [table.values + 2 for table in manifest.tables] == table_rows
    assert max(table_rows) == 30
    assert min(len(np.load(root / vocabulary_name(category))) for category in range(26)) > 5
    assert (len(manifest.shards) >= 3) == (shard_bytes == 30_000)
    assert [len(part) for part in manifest.parts.values()] == [600, 50, 50]


def test_days_are_equal_parts_and_the_rest_goes_to_the_first(tmp_path: Path) -> None:
    for rows, parts in ((14, (12, 1, 1)), (20, (18, 1, 1)), (22, (19, 1, 2))):
        root = prepare(write(tmp_path / f"{rows}.txt", LINES[:rows]), tmp_path, SETTINGS, show_progress=False)
        train, val, test = Folder(root).read_manifest().parts.values()
        assert (len(train), len(val), len(test)) == parts
        assert [*train, *val, *test] == list(range(rows))
    with pytest.raises(ValueError, match=r"13 rows .* too few for data\.days=7"):
        prepare(write(tmp_path / "13.txt", LINES[:13]), tmp_path, SETTINGS, show_progress=False)


@pytest.mark.parametrize("number", BAD)
def test_a_bad_line_is_named(number: int, tmp_path: Path) -> None:
    lines = list(LINES)
    lines.insert(number - 1, BAD[number])
    with pytest.raises(BadLineError, match=rf"train\.txt, line {number}: .*data\.on_error=quarantine"):
        prepare(write(tmp_path / "train.txt", lines), tmp_path, SETTINGS, show_progress=False)


def test_bad_lines_are_set_aside_and_counted(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    path = write(tmp_path / "train.txt", with_bad_lines(LINES))
    with pytest.raises(BadLineError):
        prepare(path, tmp_path, SETTINGS, show_progress=False)
    root = prepare(path, tmp_path, SETTINGS, "quarantine")
    assert "4 lines quarantined" in capfd.readouterr().err.replace("\n", " ")
    aside = [line.split(b"\t", 2) for line in (root / "quarantine.tsv").read_bytes().splitlines()]
    assert [(int(number), text) for number, _, text in aside] == list(BAD.items())
    assert aside[0][1] == b"the line is empty"
    assert Folder(root).read_manifest().quarantined == 4
    clean = prepare(write(tmp_path / "clean.txt", LINES), tmp_path, SETTINGS, show_progress=False)
    np.testing.assert_array_equal(rows_in(root), rows_in(clean))
    assert not (clean / "quarantine.tsv").exists()
    with pytest.raises(ValueError, match=r"4 lines of it were set aside under .*data\.on_error=quarantine"):
        prepare(path, tmp_path, SETTINGS, show_progress=False)


def test_a_file_that_is_no_text_is_set_aside_in_bounded_space(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(5_000_000 * b"x" + b"\n" + b"\n".join(LINES))
    root = prepare(path, tmp_path, SETTINGS, "quarantine", show_progress=False)
    assert Folder(root).read_manifest().quarantined == 1
    assert (root / "quarantine.tsv").stat().st_size < 2 * MAX_LINE_BYTES
    assert len(rows_in(root)) == len(LINES)


def test_a_truncated_gzip_file(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt.gz", LINES)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DamagedInputError, match=r"data\.path=.*truncated.*after [\d,]+ bytes.*data\.on_error"):
        prepare(path, tmp_path, SETTINGS, show_progress=False)
    root = prepare(path, tmp_path, SETTINGS, "quarantine", show_progress=False)
    manifest = Folder(root).read_manifest()
    assert "ended before" in manifest.damage
    assert b"breaks off in this line" in (root / "quarantine.tsv").read_bytes()
    assert 200 < manifest.rows < 500
    whole = prepare(write(tmp_path / "start.txt", LINES[: manifest.rows]), tmp_path, SETTINGS, show_progress=False)
    np.testing.assert_array_equal(rows_in(root), rows_in(whole))
    with pytest.raises(ValueError, match="set aside"):
        prepare(path, tmp_path, SETTINGS, show_progress=False)


KILLED_EVERYWHERE = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from dlrm.criteo_folder import PrepareSettings
from dlrm.criteo_prepare import prepare

path, root, settings = Path(sys.argv[2]), Path(sys.argv[3]), PrepareSettings(min_count=3, shard_bytes=30_000)

def run_until(event, folder):
    '''Prepare in a process of its own that kills itself at the event-th step to the disk; say whether it came there.'''
    child = os.fork()
    if child == 0:
        left = event
        def step(function):
            def stepped(*arguments, **options):
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)
            return stepped
        # Before a file is whole (nothing of its last buffer is in it yet), before it has its name, after, and before
        # it is deleted. Bringing it to the disk takes time and is no matter here: the machine goes on.
        os.fsync = step(lambda number: None)
        os.replace = step(os.replace)
        os.unlink = step(os.unlink)
        Path.unlink = step(Path.unlink)
        code = 1
        try:
            prepare(path, folder, settings, "quarantine", show_progress=False)
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False

def content(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}

assert not run_until(10**9, root / "whole")
expected = content(root / "whole")
# Killed once at an event, for many events.
event, kills = 1, 0
while run_until(event, root / f"once{event}"):
    assert not run_until(10**9, root / f"once{event}")
    assert content(root / f"once{event}") == expected, event
    event, kills = event + int(sys.argv[4]), kills + 1
# Killed again and again on the way.
again = 0
while run_until(17, root / "again"):
    again += 1
assert content(root / "again") == expected
print(kills, again)
"""


@pytest.mark.parametrize(("name", "stride"), [("train.txt", 11), ("train.txt.gz", 31)])
def test_killed_at_any_moment_the_result_is_the_same_to_the_byte(name: str, stride: int, tmp_path: Path) -> None:
    path = write(tmp_path / name, with_bad_lines(LINES))
    (tmp_path / "runs").mkdir()
    command = [
        sys.executable,
        "-c",
        KILLED_EVERYWHERE,
        str(EXPERIMENTS),
        str(path),
        str(tmp_path / "runs"),
        str(stride),
    ]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    kills, again = map(int, completed.stdout.split())
    assert kills >= 150 // stride
    assert again >= 8


def test_the_command_killed_from_outside_goes_on_where_it_was(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", with_bad_lines(LINES * 20))
    settings = PrepareSettings(min_count=3, shard_bytes=100_000)
    expected = content_of(prepare(path, tmp_path / "whole", settings, "quarantine", show_progress=False))
    arguments = ["--min-count", "3", "--shard-bytes", "100000", "--on-error", "quarantine", "--cache-dir"]
    command = [sys.executable, str(SCRIPT), str(path), *arguments, str(tmp_path / "killed")]
    folder = Folder(folder_of(path, tmp_path / "killed", settings))
    choose = random.Random(0)
    progress: list[int] = []
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = folder.read_manifest()
        while process.poll() is None and folder.read_manifest() == before:
            time.sleep(0.001)
        time.sleep(0.03 * choose.random())
        process.send_signal(signal.SIGKILL)
        if process.wait() != -signal.SIGKILL:
            break
        manifest = folder.read_manifest()
        progress.append(len(manifest.shards) + len(manifest.tables) + sum(shard.encoded for shard in manifest.shards))
    assert len(progress) >= 2
    assert progress == sorted(set(progress))
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert completed.stdout.strip() == str(folder.root), completed.stderr
    assert content_of(folder.root) == expected


def test_two_at_once_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", LINES)
    command = [sys.executable, str(SCRIPT), str(path), "--cache-dir", str(tmp_path / "cache"), "--shard-bytes", "9000"]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    (first, second) = (process.communicate(timeout=60)[0] for process in processes)
    assert first == second != ""
    assert [process.returncode for process in processes] == [0, 0]
    assert len(rows_in(Path(first.strip()))) == len(LINES)


def test_the_command_says_what_is_wrong_without_a_traceback(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", with_bad_lines(LINES))
    command = [sys.executable, str(SCRIPT), str(path), "--cache-dir", str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert completed.returncode == 1
    assert f"error: {path}, line 3: the line is empty" in completed.stderr
    assert "Traceback" not in completed.stderr


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for copies in (2, 10):
        path = write(tmp_path / f"{copies}.txt", LINES * copies)
        tracemalloc.start()
        prepare(path, tmp_path, SETTINGS, show_progress=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # Five times the rows; only the manifest has more to say.
    assert peaks[1] < 1.25 * peaks[0]


def test_another_file_or_other_settings_have_another_folder(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", LINES)
    first = folder_of(path, tmp_path, SETTINGS)
    assert folder_of(path, tmp_path, SETTINGS) == first
    assert folder_of(path, tmp_path, PrepareSettings(min_count=4, shard_bytes=30_000)) != first
    os.utime(path, ns=(0, 0))
    assert folder_of(path, tmp_path, SETTINGS) != first


def test_a_damaged_folder_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", LINES)
    root = prepare(path, tmp_path, SETTINGS, show_progress=False)
    manifest = root / "manifest.json"
    content = json.loads(manifest.read_text())
    # As if killed before encoding the last shard, whose file then went bad.
    content["stage"] = "encode"
    content["shards"][-1]["encoded"] = False
    manifest.write_text(json.dumps(content))
    np.save(root / f"read-{len(content['shards']) - 1:05d}.npy", np.zeros((41, 5), dtype=np.uint32))
    with pytest.raises(ValueError, match=r"read-.* is damaged \(its checksum differs\); delete .* to prepare"):
        prepare(path, tmp_path, SETTINGS, show_progress=False)
    manifest.write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        prepare(path, tmp_path, SETTINGS, show_progress=False)


@pytest.mark.parametrize(
    ("setting", "value"), [("days", 1), ("min_count", 0), ("max_rows_per_table", 2), ("shard_bytes", 0)]
)
def test_bad_settings_are_named(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"data\.{setting}={value}: must be at least"):
        PrepareSettings(**{setting: value})
