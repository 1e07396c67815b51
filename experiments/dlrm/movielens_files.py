"""The files of MovieLens 100K: finds, downloads and parses them, and names file and line where one
is bad.
"""

import hashlib
import io
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

URL = "https://files.grouplens.org/datasets/movielens/ml-100k.zip"
MD5 = "0e33842e24a9c977be4e0107933c0723"

GROUPLENS_FILES = ("u.data", "u.user", "u.item")
RECBOLE_FILES = ("ml-100k.inter", "ml-100k.user", "ml-100k.item")

_GENRES = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip

_NO_YEAR = ("", "unkonwn", "V")
"""The release years of films without one: nothing in u.item, these (sic) in RecBole's file."""

_DOWNLOAD_TIMEOUT_SECONDS = 30
_FIRST_FLAG = 5  # of the genres in u.item


class User(NamedTuple):
    """A user as the files describe one."""

    age: int
    gender: str
    occupation: str
    zip_code: str


class Film(NamedTuple):
    """A film; ``year`` is None if the files have none."""

    year: int | None
    genres: tuple[str, ...]


class Rating(NamedTuple):
    """One rating; ``timestamp`` in seconds since 1970, ``stars`` from 1 to 5."""

    user: int
    film: int
    stars: int
    timestamp: int


class BadLineError(ValueError):
    """A line that cannot be read; the message names the file and the line, counted from 1."""


class Line(NamedTuple):
    """A line of a file, and its fields."""

    file: Path
    number: int
    fields: list[str]

    def bad(self, problem: str) -> BadLineError:
        return BadLineError(f"{self.file}, line {self.number}: {problem}")

    def integer(self, place: int, what: str) -> int:
        text = self.fields[place]
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if number != number // 1:
            raise self.bad(f"{what} is {text!r}, not a whole number")
        return int(number)


def find_form(root: Path) -> str | None:
    """The form of the set that ``root`` holds: ``grouplens``, ``recbole``, or None when it holds
    neither.

    Raises:
        FileNotFoundError: Some files of a form are there and others are not.
    """
    for form, names in (("recbole", RECBOLE_FILES), ("grouplens", GROUPLENS_FILES)):
        missing = [name for name in names if not (root / name).is_file()]
        if not missing:
            return form
        if len(missing) < len(names):
            raise FileNotFoundError(
                f"data.root={root}: {', '.join(missing)} is missing beside the others"
            )
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
            f"data.root={root} has no MovieLens 100K, and {URL} cannot be reached ({error}). Put"
            f" {', '.join(GROUPLENS_FILES)} (from that archive) or {', '.join(RECBOLE_FILES)}"
            f" (RecBole's atomic files) into {root.resolve()}, or give a folder that has them as"
            " data.root=..."
        ) from error
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != MD5:
        raise ValueError(
            f"{URL}: the MD5 sum is {digest}, not {MD5}; nothing was kept. Fetch the archive by"
            f" other means and put {', '.join(GROUPLENS_FILES)} into {root.resolve()}"
        )
    root.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for name in GROUPLENS_FILES:
            (root / name).write_bytes(archive.read(f"ml-100k/{name}"))


def _lines(file: Path, separator: str, encoding: str) -> Iterator[Line]:
    with file.open(encoding=encoding, newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            yield Line(file, number, line.rstrip("\r\n").split(separator))


def _recbole(file: Path, *wanted: str) -> Iterator[Line]:
    """The wanted columns of an atomic file, whose header has entries ``name:type``."""
    lines = _lines(file, "\t", "utf-8")
    header = next(lines, Line(file, 1, [""]))
    names = [column.split(":")[0] for column in header.fields]
    if missing := [name for name in wanted if name not in names]:
        raise header.bad(
            f"the header has no column {', '.join(missing)} (it has {', '.join(names)})"
        )
    places = [names.index(name) for name in wanted]
    for line in lines:
        if len(line.fields) != len(names):
            raise line.bad(
                f"{len(line.fields)} fields where the header has {len(names)}, tab separated"
            )
        yield Line(file, line.number, [line.fields[place] for place in places])


def _grouplens(file: Path, separator: str, num_fields: int) -> Iterator[Line]:
    """The lines of one of GroupLens' files, which have no header."""
    for line in _lines(file, separator, "latin-1"):
        if len(line.fields) != num_fields:
            raise line.bad(
                f"{len(line.fields)} fields in place of {num_fields}, separated by {separator!r}"
            )
        yield line


def read_users(root: Path) -> dict[int, User]:
    """Read all users of ``root``, by id."""
    if find_form(root) == "recbole":
        lines = _recbole(
            root / "ml-100k.user", "user_id", "age", "gender", "occupation", "zip_code"
        )
    else:
        lines = _grouplens(root / "u.user", "|", 5)
    return {
        line.integer(0, "the user id"): User(line.integer(1, "the age"), *line.fields[2:])
        for line in lines
    }


def read_films(root: Path) -> dict[int, Film]:
    """Read all films of ``root``, by id."""
    films: dict[int, Film] = {}
    if find_form(root) == "recbole":
        lines = _recbole(root / "ml-100k.item", "item_id", "release_year", "class")
    else:
        lines = map(
            _with_year_and_genres, _grouplens(root / "u.item", "|", _FIRST_FLAG + len(_GENRES))
        )
    for line in lines:
        year = None if line.fields[1] in _NO_YEAR else line.integer(1, "the release year")
        films[line.integer(0, "the film id")] = Film(year, tuple(line.fields[2].split()))
    return films


def _with_year_and_genres(line: Line) -> Line:
    """A line of GroupLens' films in RecBole's columns; the date reads 01-Jan-1995."""
    flags = line.fields[_FIRST_FLAG:]
    if not set(flags) <= {"0", "1"}:
        raise line.bad("the genre flags are not all 0 or 1")
    genres = " ".join(genre for genre, flag in zip(_GENRES, flags, strict=True) if flag == "1")
    return Line(line.file, line.number, [line.fields[0], line.fields[2].rpartition("-")[2], genres])


def read_ratings(root: Path, users: dict[int, User], films: dict[int, Film]) -> list[Rating]:
    """Read all ratings of ``root`` in the order of the file.

    Raises:
        BadLineError: A line has the wrong fields, stars outside 1 to 5, or an unknown user or film.
    """
    if find_form(root) == "recbole":
        lines = _recbole(root / "ml-100k.inter", "user_id", "item_id", "rating", "timestamp")
    else:
        lines = _grouplens(root / "u.data", "\t", 4)
    ratings = []
    for line in lines:
        names = ("the user id", "the film id", "the rating", "the timestamp")
        rating = Rating(*(line.integer(place, name) for place, name in enumerate(names)))
        if rating.user not in users:
            raise line.bad(f"there is no user {rating.user} in the file of users")
        if rating.film not in films:
            raise line.bad(f"there is no film {rating.film} in the file of films")
        if not 1 <= rating.stars <= 5:
            raise line.bad(f"the rating is {rating.stars}, not 1 to 5")
        ratings.append(rating)
    if not ratings:
        raise BadLineError(f"data.root={root}: there is no rating in the file")
    return ratings
