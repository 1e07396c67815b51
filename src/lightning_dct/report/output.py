"""Checks the file that a command is asked to write: what a user has made by other means is not lost."""

from __future__ import annotations

from pathlib import Path


def check_output(file: Path, beginning: bytes, kind: str) -> None:
    """Refuse to overwrite anything but an empty file or one of the command's own: a log, a checkpoint, a folder.

    Args:
        file: What would be written.
        beginning: What the command's own files begin with, in lower case and without white space.
        kind: What these files are, in words.

    Raises:
        ValueError: Something else is there.
        OSError: The file cannot be read.
    """
    if not file.exists():
        return
    if not file.is_file():
        raise ValueError(f"{'this is a folder' if file.is_dir() else 'this cannot be replaced'}; name a file")
    with file.open("rb") as content:
        found = b"".join(content.read(4 * len(beginning)).split()).lower()
        if found[: len(beginning)] != beginning and (found or content.read(1)):
            raise ValueError(f"this file is not {kind}, and its content would be lost. Name another file, or remove it")
