"""Makes memory-mapped rows of Criteo's Kaggle file: ``python experiments/dlrm/criteo_prepare.py train.txt``.

Three stages, each of which continues where it was interrupted, and a folder that is the same to the byte however often
that was (``criteo_folder``):

1. read: the text becomes numbers, shard by shard. Only then is it known which rows are the training days.
2. count: the values of one category after the other are counted over the training days, and get their ids.
3. encode: shard by shard, values become ids, and rows lie as training reads them.

Memory is bounded by a shard (about 300 MB at 64 MiB of text), by 50 bytes a distinct value of the largest category in
stage 2 and by 8 bytes a value of all categories in stage 3; never by the size of the file. On the disk a row takes 160
bytes (7.3 GB for all of Kaggle's 45.8 million), and the text is read once.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # experiments/, where `dlrm` is

import numpy as np
import numpy.typing as npt
from rich.console import Console

from dlrm.criteo_folder import (
    MANIFEST,
    QUARANTINE,
    ROW,
    Folder,
    Manifest,
    PrepareSettings,
    Shard,
    Table,
    describe_source,
    folder_of,
)
from dlrm.criteo_input import BLOCK_BYTES, LineReader, check_input
from dlrm.criteo_lines import (
    FIELD_NAMES,
    MAX_LINE_BYTES,
    NUM_CATEGORIES,
    NUM_INTEGERS,
    BadLine,
    Rows,
    parse_block,
)
from dlrm.criteo_progress import StageProgress
from dlrm.criteo_vocabulary import ValueCounter, Vocabulary, choose_values
from dlrm.movielens_files import BadLineError

ON_ERROR = ("raise", "quarantine")

# A shard between stages 1 and 3 is uint32 [41, n], a column after the other: what stage 2 reads lies side by side.
_DENSE = slice(1, 1 + NUM_INTEGERS)
_FIRST_CATEGORY = 1 + NUM_INTEGERS
_MISSING = _FIRST_CATEGORY + NUM_CATEGORIES
_NUM_COLUMNS = _MISSING + 1


class DamagedInputError(ValueError):
    """A gzip file that breaks off or is not what its checksum says."""


def dense_features(integers: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Turn integers into what the model sees: ``log(1 + x)``, with missing and negative ones as 0.

    So does the reference (``X_int[X_int < 0] = 0`` in facebookresearch/dlrm's ``data_utils.py``, empty fields read as
    "0"): -1 and -2 of I2 are markers, not counts.
    """
    return np.log1p(np.maximum(integers, 0)).astype(np.float32)


def _columns(parts: list[Rows]) -> npt.NDArray[np.uint32]:
    """Lay rows out for stage 2."""
    columns = np.empty((_NUM_COLUMNS, sum(len(part.label) for part in parts)), dtype=np.uint32)
    start = 0
    for part in parts:
        stop = start + len(part.label)
        columns[0, start:stop] = part.label.astype(np.float32).view(np.uint32)
        columns[_DENSE, start:stop] = dense_features(part.integers).view(np.uint32).T
        columns[_FIRST_CATEGORY:_MISSING, start:stop] = part.values.T
        columns[_MISSING, start:stop] = part.missing
        start = stop
    return columns


def _is_missing(bits: npt.NDArray[np.uint32], category: int) -> npt.NDArray[np.bool_]:
    return (bits & np.uint32(1 << category)) != 0


def rows_name(shard: int) -> str:
    """Name the file of a shard's prepared rows."""
    return f"rows-{shard:05d}.npy"


def _read_name(shard: int) -> str:
    return f"read-{shard:05d}.npy"


def _bad_lines_name(shard: int) -> str:
    return f"quarantine-{shard:05d}.tsv"


def vocabulary_name(category: int) -> str:
    """Name the file of a category's values in the order of their ids."""
    return f"vocabulary-{FIELD_NAMES[_FIRST_CATEGORY + category]}.npy"


class Preparation:
    """Takes the folder of one input from wherever it is to the end.

    Args:
        path: The text.
        folder: Where the rows go; the caller holds its lock.
        settings: How.
        on_error: ``raise`` or ``quarantine``.
        progress: Shown to the user.
    """

    def __init__(
        self, path: Path, folder: Folder, settings: PrepareSettings, on_error: str, progress: StageProgress
    ) -> None:
        self.path, self.folder, self.settings, self.on_error = path, folder, settings, on_error
        self.progress = progress
        self.manifest = folder.read_manifest() or Manifest(describe_source(path), asdict(settings))

    def run(self) -> None:
        """Do what is left to do.

        Raises:
            BadLineError: If a line is no row, under ``raise``.
            DamagedInputError: If a gzip file breaks off, under ``raise``.
            ValueError: If the input changed meanwhile or has too few rows, or if a file in the folder is damaged.
        """
        self._remove_leftovers()
        for stage, work in (("read", self._read), ("count", self._count), ("encode", self._encode)):
            if self.manifest.stage == stage:
                work()

    def _remove_leftovers(self) -> None:
        """Delete what the manifest does not name: half-written files, and what a later stage has replaced."""
        manifest = self.manifest
        named = {MANIFEST, *(vocabulary_name(category) for category in range(len(manifest.tables)))}
        for index, shard in enumerate(manifest.shards):
            named.add(rows_name(index) if shard.encoded else _read_name(index))
            if manifest.stage == "read":
                named.add(_bad_lines_name(index))
        if manifest.stage != "read":
            named.add(QUARANTINE)
        self.folder.keep_only(named)

    def _record(self, stage: str | None = None) -> None:
        if stage is not None:
            self.manifest.stage = stage
        self.folder.write_manifest(self.manifest)

    def _read(self) -> None:
        shards = self.manifest.shards
        block_bytes = min(BLOCK_BYTES, max(self.settings.shard_bytes, MAX_LINE_BYTES + 1))
        with LineReader(self.path, shards[-1].end if shards else 0, block_bytes) as reader:
            advance = self.progress.stage("read", self.manifest.source["bytes"], reader.bytes_read)
            while self._read_shard(reader, advance):
                self._record()
        if describe_source(self.path) != self.manifest.source:
            raise ValueError(f"data.path={self.path}: the file changed while it was read; start again")
        rows, days = self.manifest.rows, self.settings.days
        if rows < 2 * days:
            raise ValueError(
                f"data.path={self.path}: {rows} rows ({self.manifest.quarantined} lines quarantined) are too few for "
                f"data.days={days}; the last day needs 2, one to validate and one to test"
            )
        if rows >= 2**32:
            raise ValueError(f"data.path={self.path}: {rows} rows are more than can be counted; split the file")
        if self.manifest.quarantined:
            with self.folder.writing(QUARANTINE) as whole:
                for index, shard in enumerate(shards):
                    if shard.quarantined:
                        with (self.folder.root / _bad_lines_name(index)).open("rb") as part:
                            shutil.copyfileobj(part, whole)
        self._record("count")
        self._remove_leftovers()

    def _read_shard(self, reader: LineReader, advance: Callable[[int, int], None]) -> bool:
        """Read, store and note one shard; say whether there was anything left to read."""
        shards = self.manifest.shards
        index, start = len(shards), reader.offset
        first_line = line = 1 + sum(shard.lines for shard in shards)
        parts: list[Rows] = []
        quarantined = 0
        with self.folder.writing(_bad_lines_name(index)) as bad_lines:
            while reader.offset - start < self.settings.shard_bytes:
                block = reader.next_block()
                if reader.damage is not None and self.on_error == "raise":
                    raise DamagedInputError(
                        f"data.path={self.path}: the gzip file is truncated or damaged ({reader.damage}) after "
                        f"{reader.offset:,} bytes of text; get it again, or take data.on_error=quarantine to use the "
                        "part that can be read"
                    )
                self.manifest.damage = reader.damage
                if block is None:
                    break
                rows = parse_block(block.data, line)
                line += rows.lines
                bad = rows.bad
                if block.cut is not None:
                    bad = [*bad, BadLine(line, "the gzip file breaks off in this line", block.cut)]
                    line += 1
                for bad_line in bad:
                    self._set_aside(bad_line, bad_lines)
                quarantined += len(bad)
                parts.append(replace(rows, bad=[]))
                advance(reader.bytes_read, len(rows.label))
        if not quarantined:
            self.folder.delete(_bad_lines_name(index))
        if reader.offset == start:
            return False
        columns = _columns(parts)
        shards.append(
            Shard(
                rows=columns.shape[1],
                lines=line - first_line,
                end=reader.offset,
                quarantined=quarantined,
                stripped=sum(part.stripped for part in parts),
                crc=self.folder.write_array(_read_name(index), columns),
            )
        )
        return True

    def _set_aside(self, bad: BadLine, file: BinaryIO) -> None:
        if self.on_error == "raise":
            raise BadLineError(
                self.path, bad.number, f"{bad.problem}; data.on_error=quarantine sets such lines aside and goes on"
            )
        file.write(f"{bad.number}\t{bad.problem}\t".encode() + bad.text[:MAX_LINE_BYTES] + b"\n")

    def _count(self) -> None:
        manifest = self.manifest
        training = len(manifest.parts["train"])
        advance = self.progress.stage("count", NUM_CATEGORIES * training, len(manifest.tables) * training)
        for category in range(len(manifest.tables), NUM_CATEGORIES):
            counter, left = ValueCounter(), training
            for index, shard in enumerate(manifest.shards):
                rows = min(shard.rows, left)
                if rows == 0:
                    continue
                columns = self.folder.read_array(_read_name(index))
                values = columns[_FIRST_CATEGORY + category, :rows]
                counter.add(values[~_is_missing(columns[_MISSING, :rows], category)])
                left -= rows
                advance((category + 1) * training - left, rows / NUM_CATEGORIES)
            values, counts = counter.result()
            kept = choose_values(values, counts, self.settings.min_count, self.settings.max_rows_per_table)
            crc = self.folder.write_array(vocabulary_name(category), kept)
            manifest.tables.append(Table(len(kept), len(values), crc))
            self._record()
        self._record("encode")

    def _encode(self) -> None:
        manifest = self.manifest
        vocabularies = [
            Vocabulary(self.folder.read_array(vocabulary_name(category), table.crc))
            for category, table in enumerate(manifest.tables)
        ]
        done = sum(shard.rows for shard in manifest.shards if shard.encoded)
        advance = self.progress.stage("encode", manifest.rows, done)
        for index, shard in enumerate(manifest.shards):
            if shard.encoded:
                continue
            columns = self.folder.read_array(_read_name(index), shard.crc)
            rows = np.empty(shard.rows, dtype=ROW)
            rows["label"] = columns[0].view(np.float32)
            rows["dense"] = columns[_DENSE].view(np.float32).T
            for category, vocabulary in enumerate(vocabularies):
                missing = _is_missing(columns[_MISSING], category)
                rows["categorical"][:, category] = vocabulary.look_up(columns[_FIRST_CATEGORY + category], missing)
            crc = self.folder.write_array(rows_name(index), rows)
            manifest.shards[index] = replace(shard, crc=crc, encoded=True)
            self._record()
            self.folder.delete(_read_name(index))
            done += shard.rows
            advance(done, shard.rows)
        self._record("done")


def prepare(
    path: Path,
    cache_dir: Path,
    settings: PrepareSettings | None = None,
    on_error: str = "raise",
    show_progress: bool = True,
) -> Path:
    """Prepare a file, or continue to, unless that is done; a second process meanwhile waits.

    Args:
        path: The text, plain or gzip.
        cache_dir: Where the folder lies or comes to lie.
        settings: How; None for the defaults.
        on_error: ``raise`` stops at the first line that is no row; ``quarantine`` copies such lines to
            ``quarantine.tsv`` (number, reason, line), and of a damaged gzip file uses what can be read.
        show_progress: Show a progress bar, and a summary at the end.

    Returns:
        The folder.

    Raises:
        BadLineError: If a line is no row, under ``raise``.
        DamagedInputError: If a gzip file breaks off, under ``raise``.
        FileNotFoundError: If there is no such file.
        ValueError: If a setting, the input or the folder is no good.
    """
    if on_error not in ON_ERROR:
        raise ValueError(f"data.on_error={on_error!r}: choose one of {', '.join(ON_ERROR)}")
    check_input(path)
    settings = settings or PrepareSettings()
    folder = Folder(folder_of(path, cache_dir, settings))
    console = Console(stderr=True, quiet=not show_progress)
    with folder.locked():
        with StageProgress(console) as progress:
            preparation = Preparation(path, folder, settings, on_error, progress)
            manifest = preparation.manifest
            if on_error == "raise" and (manifest.quarantined or manifest.damage):
                raise ValueError(
                    f"data.path={path}: {manifest.quarantined} lines of it were set aside under {folder.root}, when it "
                    "was read with data.on_error=quarantine; keep that setting, or repair the file"
                )
            was_done = manifest.stage == "done"
            started = time.perf_counter()
            preparation.run()
        if not was_done:
            console.print(f"{summary(manifest)}, in {time.perf_counter() - started:.1f} s: {folder.root}")
    return folder.root


def summary(manifest: Manifest) -> str:
    """Say in a line what came of an input."""
    tables = sum(table.values for table in manifest.tables)
    text = f"{manifest.source['name']}: {manifest.rows:,} rows, {tables:,} category values kept"
    if stripped := sum(shard.stripped for shard in manifest.shards):
        text += f", {stripped:,} lines had lost their empty last fields"
    if manifest.quarantined:
        text += f", {manifest.quarantined:,} lines quarantined in {QUARANTINE}"
    if manifest.damage is not None:
        text += f", read only to where the gzip file is damaged ({manifest.damage})"
    return text


def main() -> None:
    """Prepare a file from the command line, as ``data=criteo`` with the same settings would."""
    defaults = PrepareSettings()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="train.txt of Criteo's Kaggle challenge, plain or gzip")
    parser.add_argument("--cache-dir", type=Path, default=Path("outputs/cache"), help="data.cache_dir (%(default)s)")
    parser.add_argument("--days", type=int, default=defaults.days, help="data.days (%(default)s)")
    parser.add_argument("--min-count", type=int, default=defaults.min_count, help="data.min_count (%(default)s)")
    parser.add_argument("--max-rows-per-table", type=int, help="data.max_rows_per_table (no bound)")
    parser.add_argument("--shard-bytes", type=int, default=defaults.shard_bytes, help="data.shard_bytes (%(default)s)")
    parser.add_argument("--on-error", choices=ON_ERROR, default=ON_ERROR[0], help="data.on_error (%(default)s)")
    arguments = parser.parse_args()
    try:
        settings = PrepareSettings(
            arguments.days, arguments.min_count, arguments.max_rows_per_table, arguments.shard_bytes
        )
        print(prepare(arguments.path, arguments.cache_dir, settings, arguments.on_error))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
