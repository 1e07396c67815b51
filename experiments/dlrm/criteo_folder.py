"""A folder of prepared rows: what it holds is what its manifest says, at every moment, whatever is killed when.

A file is written under a temporary name, brought to the disk and renamed; then the manifest that names it is, the same
way. A file that the manifest does not name is made again. The manifest holds nothing that differs from run to run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from dlrm.criteo_lines import NUM_CATEGORIES, NUM_INTEGERS

FORMAT = 1
"""Goes up when rows would come out differently, so that older folders are left alone."""

MANIFEST, QUARANTINE = "manifest.json", "quarantine.tsv"
STAGES = ("read", "count", "encode", "done")

ROW = np.dtype([("label", "<f4"), ("dense", "<f4", (NUM_INTEGERS,)), ("categorical", "<i4", (NUM_CATEGORIES,))])
"""A prepared row: 160 bytes side by side, so that one at random costs one access to the disk."""

_TEMPORARY, _LOCK = ".part", ".lock"


@dataclass(frozen=True)
class PrepareSettings:
    """What decides how rows are prepared.

    Args:
        days: Equal days that the file is cut into by position.
        min_count: Values that come less often in training share the id of rare ones.
        max_rows_per_table: The most rows of an embedding table, the 2 reserved ones included; None for no bound.
        shard_bytes: Bytes of text that are prepared and recorded at a time.

    Raises:
        ValueError: If a setting is out of range.
    """

    days: int = 7
    min_count: int = 10
    max_rows_per_table: int | None = None
    shard_bytes: int = 2**26

    def __post_init__(self) -> None:
        for name, lowest, why in (
            ("days", 2, "the last day is held out"),
            ("min_count", 1, "1 keeps every value"),
            ("max_rows_per_table", 3, "2 rows are for missing and rare values; null sets no bound"),
            ("shard_bytes", 1, "2**26 is the default"),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"data.{name}={value}: must be at least {lowest} ({why})")


@dataclass(frozen=True)
class Shard:
    """Some consecutive lines of the input.

    Attributes:
        rows: Rows in it.
        lines: Lines it was made of.
        end: Offset in the unpacked text behind them, in bytes.
        quarantined: Lines that gave no row.
        stripped: Rows from lines that had lost their empty last fields.
        crc: CRC-32 of its file, as it is at this stage.
        encoded: Whether that file holds table rows, and no longer the values that were read.
    """

    rows: int
    lines: int
    end: int
    quarantined: int
    stripped: int
    crc: int
    encoded: bool = False


@dataclass(frozen=True)
class Table:
    """Vocabulary of one category: ``values`` it keeps, of ``distinct`` ones in training, and its file's CRC-32."""

    values: int
    distinct: int
    crc: int


@dataclass
class Manifest:
    """What has been done so far.

    Attributes:
        source: Name, size and time of the last change of the input.
        settings: A :class:`PrepareSettings` as a dictionary.
        stage: One of ``STAGES``: what is being done.
        damage: How a gzip file was damaged, where it was read to that place; else None.
        shards: The shards that are finished, in order.
        tables: The vocabularies that are finished, in order.
    """

    source: dict[str, Any]
    settings: dict[str, Any]
    stage: str = STAGES[0]
    damage: str | None = None
    shards: list[Shard] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    format: int = FORMAT

    @property
    def rows(self) -> int:
        """Rows so far."""
        return sum(shard.rows for shard in self.shards)

    @property
    def parts(self) -> dict[str, range]:
        """Rows of all days but the last to train, of the last day's first half to validate, of its second to test.

        As in the reference DLRM, rows that do not divide by the days go to the first days. (Its halves of the last
        day are the other way round: it tests on the first.)
        """
        first = self.rows - self.rows // self.settings["days"]
        second = (first + self.rows) // 2
        return {"train": range(first), "val": range(first, second), "test": range(second, self.rows)}

    @property
    def quarantined(self) -> int:
        """Lines that gave no row."""
        return sum(shard.quarantined for shard in self.shards)


def describe_source(path: Path) -> dict[str, Any]:
    """Say which file this is, by what changes when it does."""
    status = path.stat()
    return {"name": path.name, "bytes": status.st_size, "modified_ns": status.st_mtime_ns}


def folder_of(path: Path, cache_dir: Path, settings: PrepareSettings) -> Path:
    """Name the folder for an input and settings: another file, or other settings, have another one."""
    key = [FORMAT, str(path.resolve()), describe_source(path), asdict(settings)]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_dir / f"criteo-{path.name.split('.')[0]}-{digest[:12]}"


class Folder:
    """Reads and writes the files of one folder.

    Args:
        root: The folder; made when it is missing.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; the lock goes with the process, however that ends."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / _LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def keep_only(self, names: set[str]) -> None:
        """Delete every file that has none of these names."""
        for file in self.root.iterdir():
            if file.name not in names and file.name != _LOCK:
                file.unlink()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Open a file that comes to be under its name in one step, when the block ends well."""
        temporary = self.root / (name + _TEMPORARY)
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.root / name)

    def write_array(self, name: str, array: npt.NDArray) -> int:
        """Write an array as ``.npy``, and give the CRC-32 of its entries."""
        with self.writing(name) as file:
            np.save(file, array, allow_pickle=False)
        return crc_of(array)

    def read_array(self, name: str, crc: int | None = None) -> npt.NDArray:
        """Read an array: into memory and checked where ``crc`` is given, else memory-mapped.

        Raises:
            ValueError: If the file is missing or is not what was written.
        """
        try:
            array = np.load(self.root / name, mmap_mode=None if crc is not None else "r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise self.damaged(name, str(error)) from error
        if crc is not None and crc_of(array) != crc:
            raise self.damaged(name, "its checksum differs")
        return array

    def damaged(self, name: str, problem: str) -> ValueError:
        """Make the error for a file that is not what the manifest says."""
        return ValueError(f"{self.root / name} is damaged ({problem}); delete {self.root} to prepare the rows again")

    def write_manifest(self, manifest: Manifest) -> None:
        """Record what has been done."""
        with self.writing(MANIFEST) as file:
            file.write(json.dumps(asdict(manifest), indent=1).encode() + b"\n")

    def read_manifest(self) -> Manifest | None:
        """Read what has been done; None where nothing has.

        Raises:
            ValueError: If the file cannot be understood.
        """
        try:
            content = json.loads((self.root / MANIFEST).read_bytes())
            manifest = Manifest(**content)
            manifest.shards = [Shard(**shard) for shard in content["shards"]]
            manifest.tables = [Table(**table) for table in content["tables"]]
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise self.damaged(MANIFEST, str(error)) from error
        return manifest

    def delete(self, name: str) -> None:
        """Delete a file that may be gone already."""
        (self.root / name).unlink(missing_ok=True)


def crc_of(array: npt.NDArray) -> int:
    """CRC-32 of an array's entries."""
    return zlib.crc32(array.reshape(-1).view(np.uint8))
