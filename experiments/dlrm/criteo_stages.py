"""The stages that make rows of text: read, count, encode; each goes on from what the folder's manifest says is done.

1. read: the text becomes numbers, shard by shard. Only then is it known which rows are the training days.
2. count: the values of one category after the other are counted over the training days, and get their ids.
3. encode: shard by shard, values become ids, and rows lie as training reads them.

Memory is bounded by a shard (about 5 times its text), in stage 2 by 50 bytes a distinct value of one category, in stage
3 by 8 bytes a kept value of all categories; never by the size of the file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from dlrm.criteo_blocks import BadLine, Rows, parse_block
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
)
from dlrm.criteo_input import BLOCK_BYTES, LineReader
from dlrm.criteo_lines import FIELD_NAMES, MAX_LINE_BYTES, NUM_CATEGORIES, NUM_INTEGERS
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
        self._check_rows()
        if self.manifest.quarantined:
            with self.folder.writing(QUARANTINE) as whole:
                for index, shard in enumerate(shards):
                    if shard.quarantined:
                        with (self.folder.root / _bad_lines_name(index)).open("rb") as part:
                            shutil.copyfileobj(part, whole)
        self._record("count")
        self._remove_leftovers()

    def _check_rows(self) -> None:
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
