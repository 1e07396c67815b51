"""Reads whole lines out of a text file, plain or gzip, in blocks of bounded size and from any offset.

Where a block ends depends on where it begins and on nothing else, so a reader that starts at the end of some block
hands out the same blocks as one that came from the start of the file.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path

from dlrm.criteo_lines import MAX_LINE_BYTES

BLOCK_BYTES = 2**20
"""About 4,000 rows: what parsing makes of them stays near the processor's caches."""

_GZIP_MAGIC = b"\x1f\x8b"
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)
_ZIP_MAGIC = b"PK\x03\x04"
_TAR_MAGIC, _TAR_MAGIC_AT = b"ustar", 257


@dataclass(frozen=True)
class Block:
    """Some whole lines.

    Attributes:
        data: Their bytes with newlines; the last line of the file may lack it. A line that does not fit into a block is
            here by its beginning only, and still longer than ``MAX_LINE_BYTES``.
        end: Offset behind them in the (unpacked) text, in bytes.
        cut: The beginning of one more line, where a damaged gzip file breaks off in the middle of it; else None.
    """

    data: bytes
    end: int
    cut: bytes | None = None


def check_input(path: Path) -> None:
    """See that there is a file of text to read.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is empty or an archive.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"data.path={path}: there is no such file (looked for {path.resolve()}); give train.txt of Criteo's Kaggle "
            "Display Advertising Challenge, https://go.criteo.net/criteo-research-kaggle-display-advertising-challenge-"
            "dataset.tar.gz"
        )
    with path.open("rb") as file:
        start = file.read(_TAR_MAGIC_AT + len(_TAR_MAGIC))
    if not start:
        raise ValueError(f"data.path={path}: the file is empty; give one with rows in it")
    if start.startswith(_GZIP_MAGIC):
        try:
            with gzip.open(path) as file:
                start = file.read1(_TAR_MAGIC_AT + len(_TAR_MAGIC))
        except _DAMAGE:
            start = b""  # Reading it will say so.
    if start[_TAR_MAGIC_AT:] == _TAR_MAGIC:
        raise ValueError(f"data.path={path}: this is a tar archive; unpack it (tar xf) and give the train.txt in it")
    if start.startswith(_ZIP_MAGIC):
        raise ValueError(f"data.path={path}: this is a zip archive; unpack it (unzip) and give the train.txt in it")


class LineReader:
    """Hands out the lines of a file; use it as a context manager.

    Args:
        path: A plain or a gzip file (told apart by its first bytes).
        offset: Where to begin in the unpacked text, at the end of an earlier block. A gzip file is unpacked from its
            start to get there.
        block_bytes: Upper bound of a block.

    Attributes:
        damage: What is wrong with the gzip file, once that was met: it is read as if it ended there.
    """

    def __init__(self, path: Path, offset: int = 0, block_bytes: int = BLOCK_BYTES) -> None:
        if block_bytes <= MAX_LINE_BYTES:
            raise ValueError(f"block_bytes={block_bytes}: must be more than a line, {MAX_LINE_BYTES} bytes")
        self._block_bytes = block_bytes
        self._raw = path.open("rb")
        is_gzip = self._raw.peek(2)[:2] == _GZIP_MAGIC
        self._gzip = gzip.GzipFile(fileobj=self._raw) if is_gzip else None
        self._rest = b""
        self._offset = offset
        self.damage: str | None = None
        if self._gzip is None:
            self._raw.seek(offset)
        else:
            self._skip(offset)

    def __enter__(self) -> LineReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._gzip is not None:
            self._gzip.close()
        self._raw.close()

    @property
    def offset(self) -> int:
        """Offset in the unpacked text behind the blocks handed out so far."""
        return self._offset

    @property
    def bytes_read(self) -> int:
        """Position in the file itself, packed or not."""
        return self._raw.tell()

    def _skip(self, size: int) -> None:
        while size and (skipped := len(self._read(min(size, self._block_bytes)))):
            size -= skipped

    def _read(self, size: int) -> bytes:
        """Read ``size`` bytes, fewer only at the end."""
        if self._gzip is None:
            return self._raw.read(size)
        pieces: list[bytes] = []
        while size and self.damage is None:
            try:
                # read() would drop what it has when the file breaks off; read1() hands it out first.
                piece = self._gzip.read1(size)
            except _DAMAGE as error:
                self.damage = str(error)
                break
            if not piece:
                break
            pieces.append(piece)
            size -= len(piece)
        return b"".join(pieces)

    def next_block(self) -> Block | None:
        """Read on.

        Returns:
            The next lines; None at the end of the file.
        """
        wanted = self._block_bytes - len(self._rest)
        new = self._read(wanted)
        data, self._rest = self._rest + new, b""
        is_end = len(new) < wanted
        if not data:
            return None
        whole = data.rfind(b"\n") + 1
        if is_end:
            self._offset += len(data)
            if self.damage is not None and whole < len(data):
                return Block(data[:whole], self._offset, cut=data[whole:][: MAX_LINE_BYTES + 1])
            return Block(data, self._offset)
        if not whole:
            return self._skip_line(data)
        self._rest = data[whole:]
        self._offset += whole
        return Block(data[:whole], self._offset)

    def _skip_line(self, beginning: bytes) -> Block:
        """Pass over a line that does not fit into a block, keeping enough to show that it is too long."""
        self._offset += len(beginning)
        while piece := self._read(self._block_bytes):
            stop = piece.find(b"\n") + 1
            self._offset += stop or len(piece)
            if stop:
                self._rest = piece[stop:]
                break
        return Block(beginning[: MAX_LINE_BYTES + 1] + b"\n", self._offset)
