"""The files of MovieLens 100K: finds, downloads and parses them, and names file and line where one is bad."""

from __future__ import annotations

import hashlib
import io
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
MD5 = "0e33842e24a9c977be4e0107933c0723"

GROUPLENS_FILES = ("u.data", "u.user", "u.item")
RECBOLE_FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")

_GENRES = [
    *(
        "unknown",
        "Action",
        "Adventure",
        "Animation",
        "Children's",
        "Comedy",
        "Crime",
        "Documentary",
        "Drama",
        "Fantasy",
    ),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
]

_NO_YEAR = ("", "unkonwn", "V")
"""What stands where two films have no release year: nothing in u.item, these (sic) in RecBole's file."""

_DOWNLOAD_TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class User:
    """A user as the files describe one."""

    age: int
    gender: str
    occupation: str
    zip_code: str


@dataclass(frozen=True)
class Film:
    """A film; ``year`` is None if the files have none."""

    year: int | None
    genres: tuple[str, ...]


@dataclass(frozen=True)
class Rating:
    """One rating; ``timestamp`` in seconds since 1970, ``stars`` from 1 to 5."""

    user: int
    film: int
    stars: int
    timestamp: int


class BadLineError(ValueError):
    """A line that cannot be read; the message names the file and the line, counted from 1."""

    def __init__(self, file: Path, line: int, problem: str) -> None:
        super().__init__(f"{file}, line {line}: {problem}")


def find_form(root: Path) -> str | None:
    """The form of the set that ``root`` holds: ``grouplens``, ``recbole``, or None when it holds neither.

    Raises:
        FileNotFoundError: Some files of a form are there and others are not.
    """
    for form, names in (("recbole", RECBOLE_FILES), ("grouplens", GROUPLENS_FILES)):
        missing = [name for name in names if not (root / name).is_file()]
        if not missing:
            return form
        if len(missing) < len(names):
            raise FileNotFoundError(f"data.root={root}: {', '.join(missing)} is missing beside the others")
    return None


def download(root: Path) -> None:
    """Download the set from GroupLens, check it, and put its three files into ``root``.

    Raises:
        ConnectionError: The download fails; the message names the files to put there.
        ValueError: The file has another MD5 sum.
    """
    try:
        with urllib.request.urlopen(URL, timeout=_DOWNLOAD_TIMEOUT_SECONDS) as response:
            content = response.read()
    except (urllib.error.URLError, OSError) as error:
        raise ConnectionError(
            f"data.root={root} has no MovieLens 100K, and {URL} cannot be reached ({error}). "
            f"Put {', '.join(GROUPLENS_FILES)} (from that archive) or {', '.join(RECBOLE_FILES)} (RecBole's atomic "
            f"files) into {root.resolve()}, or give a folder that has them as data.root=..."
        ) from error
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != MD5:
        raise ValueError(
            f"{URL}: the MD5 sum is {digest}, not {MD5}; nothing was kept. Fetch the archive by other means and put "
            f"{', '.join(GROUPLENS_FILES)} into {root.resolve()}"
        )
    root.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in GROUPLENS_FILES:
            (root / name).write_bytes(archive.read(f"ml-100k/{name}"))


def _integer(text: str, what: str, file: Path, line: int) -> int:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if number != number // 1:
        raise BadLineError(file, line, f"{what} is {text!r}, not a whole number")
    return int(number)


def _records(file: Path, separator: str, encoding: str) -> Iterator[tuple[int, list[str]]]:
    """Yield ``(line number, fields)`` of a text file."""
    with file.open(encoding=encoding, newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            yield number, line.rstrip("\r\n").split(separator)


def _recbole_records(file: Path, wanted: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield ``(line number, wanted columns)`` of an atomic file, whose header has entries ``name:type``."""
    records = _records(file, "\t", "utf-8")
    _, header = next(records, (1, [""]))
    names = [column.split(":")[0] for column in header]
    missing = [name for name in wanted if name not in names]
    if missing:
        raise BadLineError(file, 1, f"the header has no column {', '.join(missing)} (it has {', '.join(names)})")
    places = [names.index(name) for name in wanted]
    for line, fields in records:
        if len(fields) != len(names):
            raise BadLineError(file, line, f"{len(fields)} fields where the header has {len(names)}, tab separated")
        yield line, [fields[place] for place in places]


def _grouplens_records(file: Path, separator: str, num_fields: int) -> Iterator[tuple[int, list[str]]]:
    """Yield ``(line number, fields)`` of one of GroupLens' files, which have no header."""
    for line, fields in _records(file, separator, "latin-1"):
        if len(fields) != num_fields:
            raise BadLineError(file, line, f"{len(fields)} fields in place of {num_fields}, separated by {separator!r}")
        yield line, fields


def read_users(root: Path) -> dict[int, User]:
    """Read all users of ``root``, by id."""
    if find_form(root) == "recbole":
        file = root / "ml-100k.user"
        records = _recbole_records(file, ("user_id", "age", "gender", "occupation", "zip_code"))
    else:
        file = root / "u.user"
        records = _grouplens_records(file, "|", 5)
    return {
        _integer(fields[0], "the user id", file, line): User(
            _integer(fields[1], "the age", file, line), fields[2], fields[3], fields[4]
        )
        for line, fields in records
    }


def read_films(root: Path) -> dict[int, Film]:
    """Read all films of ``root``, by id."""
    films: dict[int, Film] = {}
    if find_form(root) == "recbole":
        file = root / "ml-100k.item"
        for line, (film, year, genres) in _recbole_records(file, ("item_id", "release_year", "class")):
            released = None if year in _NO_YEAR else _integer(year, "the release year", file, line)
            films[_integer(film, "the film id", file, line)] = Film(released, tuple(genres.split()))
        return films
    file = root / "u.item"
    first_flag = 5
    for line, fields in _grouplens_records(file, "|", first_flag + len(_GENRES)):
        flags = fields[first_flag:]
        if not set(flags) <= {"0", "1"}:
            raise BadLineError(file, line, "the genre flags are not all 0 or 1")
        # The date reads 01-Jan-1995.
        year = fields[2].rpartition("-")[2]
        released = None if year in _NO_YEAR else _integer(year, "the release year", file, line)
        genres = tuple(genre for genre, flag in zip(_GENRES, flags, strict=True) if flag == "1")
        films[_integer(fields[0], "the film id", file, line)] = Film(released, genres)
    return films


def read_ratings(root: Path, users: dict[int, User], films: dict[int, Film]) -> list[Rating]:
    """Read all ratings of ``root`` in the order of the file.

    Raises:
        BadLineError: A line has the wrong fields, stars outside 1 to 5, or an unknown user or film.
    """
    if find_form(root) == "recbole":
        file = root / "ml-100k.inter"
        records = _recbole_records(file, ("user_id", "item_id", "rating", "timestamp"))
    else:
        file = root / "u.data"
        records = _grouplens_records(file, "\t", 4)
    ratings = []
    for line, (user_text, film_text, stars_text, time_text) in records:
        user = _integer(user_text, "the user id", file, line)
        film = _integer(film_text, "the film id", file, line)
        stars = _integer(stars_text, "the rating", file, line)
        if user not in users:
            raise BadLineError(file, line, f"there is no user {user} in the file of users")
        if film not in films:
            raise BadLineError(file, line, f"there is no film {film} in the file of films")
        if not 1 <= stars <= 5:
            raise BadLineError(file, line, f"the rating is {stars}, not 1 to 5")
        ratings.append(Rating(user, film, stars, _integer(time_text, "the timestamp", file, line)))
    if not ratings:
        raise BadLineError(file, 1, "there is no rating in the file")
    return ratings
