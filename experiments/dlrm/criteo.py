"""Criteo's Kaggle clicks: ``data=criteo data.path=train.txt``, converted once to rows that are
memory-mapped.

A line is a label, 13 integers and 26 hashes of 8 hexadecimal digits, separated by tabs; all but the
label may be empty. Copies with stripped lines lack up to three empty fields at the end. The file
has 7 days in the order of time without marks between them, so days are equal parts of it. All but
the last are for training and vocabularies; the last is half for validation and half for test.
"""

import fcntl
import gzip
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_warn

from streams import Batch, Rows, ShuffledRows, check_at_least

NUM_INTEGERS = 13
NUM_CATEGORIES = 26
NUM_FIELDS = 1 + NUM_INTEGERS + NUM_CATEGORIES
ROW = np.dtype(
    [("label", "<f4"), ("dense", "<f4", (NUM_INTEGERS,)), ("categorical", "<i4", (NUM_CATEGORIES,))]
)
MISSING_ID = 0
RARE_ID = 1
NUM_RESERVED = 2
ON_ERROR = ("raise", "skip")
# Bytes of text that are converted, and remembered as done, at a time.
SHARD_BYTES = 2**24
_LINE = re.compile(rb"[01](?:\t(?:-?\d{1,18})?){13}(?:\t(?:[0-9a-f]{8})?){23,26}")
_FORMAT = 2  # goes up when rows would come out differently


def parse(lines: list[bytes]) -> tuple[npt.NDArray[np.uint32], list[int]]:
    """Read lines as the reference does: integers become ``log(1 + x)``; missing or negative ones
    and missing hashes 0.

    Returns:
        uint32 ``[40, rows]``: the label and the integers as the bits of float32, then the hashes;
        and the indices of the lines that are no rows.
    """
    good = []
    bad = []
    for index, line in enumerate(lines):
        text = line.rstrip(b"\r\n")
        if _LINE.fullmatch(text):
            good.append(text + b"\t" * (NUM_FIELDS - 1 - text.count(b"\t")))
        else:
            bad.append(index)
    columns = np.empty((NUM_FIELDS, len(good)), dtype=np.uint32)
    if good:
        fields = np.array(b"\t".join(good).split(b"\t"), dtype="S19").reshape(-1, NUM_FIELDS)
        numbers = fields[:, : 1 + NUM_INTEGERS]
        hashes = fields[:, 1 + NUM_INTEGERS :].astype("S8")
        numbers = (
            np.where(numbers == b"", b"0", numbers).astype(np.int64).clip(min=0).astype(np.float32)
        )
        numbers[:, 1:] = np.log1p(numbers[:, 1:])
        hashes[hashes == b""] = b"0" * 8
        columns[: 1 + NUM_INTEGERS] = numbers.T.copy().view(np.uint32)
        columns[1 + NUM_INTEGERS :] = (
            np.frombuffer(bytes.fromhex(hashes.tobytes().decode()), ">u4").reshape(-1, 26).T
        )
    return columns, bad


def choose_values(
    values: npt.NDArray[np.uint32], min_count: int, max_rows: int | None
) -> npt.NDArray[np.uint32]:
    """The hashes that get a row of an embedding table, the most frequent first; the one at ``i``
    gets the id ``i + 2``.

    Example:
        >>> choose_values(np.uint32([7, 7, 7, 9, 5, 9, 5, 3, 0, 0]), min_count=2, max_rows=None).tolist()
        [7, 5, 9]
    """
    distinct, counts = np.unique(values[values != 0], return_counts=True)
    distinct = distinct[counts >= min_count]
    counts = counts[counts >= min_count]
    order = np.argsort(-counts, kind="stable")
    return distinct[order if max_rows is None else order[: max_rows - NUM_RESERVED]]


class Folder:
    """A folder of converted rows, which an interrupted conversion continues; for the settings of
    :class:`Criteo`.
    """

    def __init__(self, root: Path, path: Path, settings: dict[str, Any]) -> None:
        self.root = root
        self.path = path
        self.settings = settings

    @property
    def notes(self) -> dict[str, Any]:
        """The progress: the shards that are read, the first bad line, and in the end the tables'
        rows.
        """
        file = self.root / "notes.json"
        return json.loads(file.read_text()) if file.exists() else {"shards": [], "bad": ""}

    @property
    def parts(self) -> dict[str, range]:
        """Numbers of the rows of each part; rows that do not divide by the days go to the first
        days.
        """
        rows = sum(shard["rows"] for shard in self.notes["shards"])
        first = rows - rows // self.settings["days"]
        second = (first + rows) // 2
        return {"train": range(first), "val": range(first, second), "test": range(second, rows)}

    def convert(self) -> None:
        """Convert the text, or the rest of it; another process waits meanwhile.

        Raises:
            ValueError: A line is no row (with ``on_error="raise"``), the gzip file is damaged, or
                rows are too few.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if "table_rows" in self.notes:
                return
            self._read()
            rows = self.parts["test"].stop
            days = self.settings["days"]
            if rows < 2 * days:
                raise ValueError(
                    f"data.path={self.path}: {rows} rows are too few for data.days={days}"
                )
            kept = [self._vocabulary(category) for category in range(NUM_CATEGORIES)]
            self._encode(rows, kept)
            self._note(
                {**self.notes, "table_rows": [len(values) + NUM_RESERVED for values in kept]}
            )
            for file in [*self.root.glob("read-*.npy"), *self.root.glob("vocabulary-*.npy")]:
                file.unlink()

    def _read(self) -> None:
        """Write the columns of each shard, from the first that is missing on."""
        notes = self.notes
        shards = notes["shards"]
        with self._text() as text:
            text.seek(shards[-1]["end"] if shards else 0)
            while lines := self._lines(text):
                columns, bad = parse(lines)
                if bad and not notes["bad"]:
                    number = 1 + bad[0] + sum(shard["lines"] for shard in shards)
                    notes["bad"] = f"{self.path}, line {number}: {lines[bad[0]][:60]!r} is no row"
                    if self.settings["on_error"] == "raise":
                        raise ValueError(
                            f"{notes['bad']}; data.on_error=skip leaves such lines out and counts"
                            " them"
                        )
                self._write(
                    f"read-{len(shards):05d}.npy",
                    lambda file, columns=columns: np.save(file, columns),
                )
                shards.append(
                    {
                        "rows": columns.shape[1],
                        "lines": len(lines),
                        "bad": len(bad),
                        "end": text.tell(),
                    }
                )
                self._note(notes)

    def _text(self) -> BinaryIO:
        with self.path.open("rb") as file:
            is_gzip = file.read(2) == b"\x1f\x8b"
        return gzip.open(self.path) if is_gzip else self.path.open("rb")  # type: ignore[return-value]

    def _lines(self, text: BinaryIO) -> list[bytes]:
        try:
            return text.readlines(SHARD_BYTES)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(
                f"data.path={self.path}: the gzip file is damaged ({error}); get it again"
            ) from error

    def _vocabulary(self, category: int) -> npt.NDArray[np.uint32]:
        """The chosen values of a category, counted over the training days; takes 12 bytes for each
        row.
        """
        name = f"vocabulary-{category}.npy"
        if not (self.root / name).exists():
            values = [
                self._columns(shard)[1 + NUM_INTEGERS + category]
                for shard in range(len(self.notes["shards"]))
            ]
            training = np.concatenate(values)[: self.parts["train"].stop]
            kept = choose_values(
                training, self.settings["min_count"], self.settings["max_rows_per_table"]
            )
            self._write(name, lambda file: np.save(file, kept))
        return np.load(self.root / name)

    def _columns(self, shard: int) -> npt.NDArray[np.uint32]:
        return np.load(self.root / f"read-{shard:05d}.npy", mmap_mode="r")

    def _encode(self, num_rows: int, kept: list[npt.NDArray[np.uint32]]) -> None:
        """Write all rows, with ids in place of hashes."""
        part = self.root / "rows.part"
        rows = np.lib.format.open_memmap(part, mode="w+", dtype=ROW, shape=(num_rows,))
        orders = [np.argsort(values, kind="stable") for values in kept]
        ends = [*accumulate((shard["rows"] for shard in self.notes["shards"]), initial=0)]
        for shard, (start, stop) in enumerate(pairwise(ends)):
            columns = self._columns(shard)
            here = rows[start:stop]
            here["label"] = columns[0].view(np.float32)
            here["dense"] = columns[1 : 1 + NUM_INTEGERS].view(np.float32).T
            for category, (values, order) in enumerate(zip(kept, orders, strict=True)):
                hashes = columns[1 + NUM_INTEGERS + category]
                ids = here["categorical"][:, category]
                ids[:] = RARE_ID
                if values.size:
                    places = order[
                        np.searchsorted(values, hashes, sorter=order).clip(max=values.size - 1)
                    ]
                    ids[:] = np.where(values[places] == hashes, places + NUM_RESERVED, RARE_ID)
                ids[hashes == 0] = MISSING_ID
        rows.flush()
        os.replace(part, self.root / "rows.npy")

    def _note(self, notes: dict[str, Any]) -> None:
        self._write("notes.json", lambda file: file.write(json.dumps(notes, indent=1).encode()))

    def _write(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        """Write a file that has its name only once it is whole."""
        part = self.root / f"{name}.part"
        with part.open("wb") as file:
            write(file)
        os.replace(part, self.root / name)


class Criteo(ShuffledRows):
    """Criteo's Kaggle Display Advertising Challenge.

    Batches are ``{"dense": float32 [n, 13], "categorical": int64 [n, 26], "label": float32 [n]}``.
    In every table, id 0 is a missing value, id 1 a value that is rare or was never seen in
    training, and the others follow from the most frequent in training to the least.

    One process a node converts the text, and the others wait, without a time limit. A row takes 160
    bytes on the disk (7.3 GB for the whole file), and twice that during the conversion.

    Args:
        path: The training file, plain or gzip.
        days: Equal days that the file is cut into by position.
        min_count: Values that come less often in training share id 1; 1 keeps every value, as the
            reference does.
        max_rows_per_table: The most rows of a table, the 2 reserved ones included. None for no
            bound.
        on_error: ``raise`` stops at a line that is no row; ``skip`` leaves such lines out and
            counts them.
        batch_size: Training rows a rank.
        eval_batch_size: Validation rows a rank, at most.
        seed: Chooses the order of training.
        cache_dir: Holds the folders of converted rows, ``criteo-*``, one for each input and
            settings; they may be deleted.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A setting is out of range.
    """

    num_dense = NUM_INTEGERS

    def __init__(
        self,
        path: str | None,
        days: int = 7,
        min_count: int = 10,
        max_rows_per_table: int | None = None,
        on_error: str = "raise",
        batch_size: int = 128,
        eval_batch_size: int = 1024,
        seed: int = 0,
        cache_dir: str = "outputs/cache",
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed)
        check_at_least(2, days=days)
        check_at_least(1, min_count=min_count)
        if max_rows_per_table is not None:
            check_at_least(3, max_rows_per_table=max_rows_per_table)
        if on_error not in ON_ERROR:
            raise ValueError(f"data.on_error={on_error!r}: choose one of {', '.join(ON_ERROR)}")
        if path is None:
            raise ValueError(
                "data.path=null: give train.txt of Criteo's Kaggle challenge, data.path=train.txt"
            )
        text = Path(path)
        if not text.is_file():
            raise FileNotFoundError(
                f"data.path={path}: there is no such file (looked for {text.resolve()}); give"
                " train.txt of Criteo's Kaggle Display Advertising Challenge"
            )
        settings = {"days": days, "min_count": min_count, "max_rows_per_table": max_rows_per_table}
        settings["on_error"] = on_error
        status = text.stat()
        key = json.dumps(
            [_FORMAT, str(text.resolve()), status.st_size, status.st_mtime_ns, settings]
        )
        digest = hashlib.sha256(key.encode()).hexdigest()[:12]
        self.folder = Folder(
            Path(cache_dir) / f"criteo-{text.name.split('.')[0]}-{digest}", text, settings
        )
        self.table_rows: list[int] = []

    def prepare_data(self) -> None:
        """Convert the text if that is not done: one process a node does, the others wait."""
        self.folder.convert()

    def setup(self, stage: str | None = None) -> None:
        """Open the converted rows, which gives ``table_rows`` and ``parts``."""
        if self.parts:
            return
        notes = self.folder.notes
        if "table_rows" not in notes:
            raise RuntimeError(
                f"the rows in {self.folder.root} are not there; call Criteo.prepare_data() first"
            )
        self._rows = np.load(self.folder.root / "rows.npy", mmap_mode="r")
        self.table_rows = notes["table_rows"]
        self.parts = self.folder.parts
        if bad := sum(shard["bad"] for shard in notes["shards"]):
            rank_zero_warn(f"{bad} lines of the text are left out, the first is {notes['bad']}")

    def rows(self, numbers: Rows) -> Batch:
        """The rows with these numbers, counted from the start of the file, as a batch."""
        rows = self._rows[numbers]
        return {
            "dense": torch.from_numpy(np.ascontiguousarray(rows["dense"])),
            "categorical": torch.from_numpy(rows["categorical"].astype(np.int64)),
            "label": torch.from_numpy(np.ascontiguousarray(rows["label"])),
        }
