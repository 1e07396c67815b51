import hashlib
import io
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm import movielens_files
from dlrm.movielens import MovieLens
from dlrm.movielens_files import BadLineError, read_films, read_ratings, read_users

GENRES = movielens_files._GENRES
USERS = [
    (1, 24, "M", "technician", "85711"),
    (2, 53, "F", "other", "94043"),
    (3, 23, "M", "writer", "T8H1N"),
]
FILMS = [
    (1, "Toy Story", 1995, ("Animation", "Children's", "Comedy")),
    (2, "Film with é", 1931, ("Drama",)),
    (3, "unkonwn", None, ("unknown",)),
]
RATINGS = [(user, film, 1 + (user * film + n) % 5, 875_000_000 + 9999 * n) for n in range(8) for user in (1, 2, 3)
           for film in (1, 2, 3)]  # fmt: skip


def write_recbole(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "ml-100k.inter").write_text(
        "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        + "".join("\t".join(map(str, rating)) + "\n" for rating in RATINGS)
    )
    (root / "ml-100k.user").write_text(
        "user_id:token\tage:token\tgender:token\toccupation:token\tzip_code:token\n"
        + "".join("\t".join(map(str, user)) + "\n" for user in USERS)
    )
    (root / "ml-100k.item").write_text(
        "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        + "".join(
            f"{film}\t{title}\t{year or 'unkonwn'}\t{' '.join(genres)}\n"
            for film, title, year, genres in FILMS
        ),
        encoding="utf-8",
    )
    return root


def write_grouplens(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "u.data").write_text("".join("\t".join(map(str, rating)) + "\n" for rating in RATINGS))
    (root / "u.user").write_text("".join("|".join(map(str, user)) + "\n" for user in USERS))
    lines = []
    for film, title, year, genres in FILMS:
        date = f"01-Jan-{year}" if year else ""
        flags = "|".join("1" if genre in genres else "0" for genre in GENRES)
        lines.append(f"{film}|{title}|{date}||http://example.org|{flags}\n")
    (root / "u.item").write_text("".join(lines), encoding="latin-1")
    return root


def test_both_forms_read_alike(tmp_path: Path) -> None:
    recbole = write_recbole(tmp_path / "recbole")
    grouplens = write_grouplens(tmp_path / "grouplens")
    assert read_users(recbole) == read_users(grouplens)
    assert read_films(recbole) == read_films(grouplens)
    users = read_users(recbole)
    films = read_films(recbole)
    assert users[3].zip_code == "T8H1N"
    assert films[1].genres == ("Animation", "Children's", "Comedy")
    assert films[3].year is None
    assert read_ratings(recbole, users, films) == read_ratings(grouplens, users, films)


def test_rows_features_and_split(tmp_path: Path) -> None:
    data = MovieLens(str(write_recbole(tmp_path)), batch_size=8, eval_batch_size=4)
    data.prepare_data()
    data.setup()
    numbers = np.concatenate([data.parts[part] for part in ("train", "val", "test")])
    np.testing.assert_array_equal(np.sort(numbers), np.arange(len(RATINGS)))
    assert [len(data.parts[part]) for part in ("train", "val", "test")] == [57, 7, 8]
    batch = data.rows(np.arange(len(RATINGS)))
    assert batch["dense"].shape == (72, data.num_dense) == (72, 7)
    assert batch["categorical"].shape == (72, len(data.table_rows)) == (72, 9)
    assert (batch["categorical"] < torch.tensor(data.table_rows)).all()
    assert torch.isfinite(batch["dense"]).all()
    assert batch["label"].tolist() == [float(rating[2] >= 4) for rating in RATINGS]


@pytest.mark.parametrize(
    ("file", "bad", "problem"),
    [
        ("ml-100k.inter", "1\t2\t3", "3 fields"),
        ("ml-100k.inter", "1\t2\tfive\t875000000", "the rating is 'five'"),
        ("ml-100k.inter", "1\t2\t9\t875000000", "the rating is 9"),
        ("ml-100k.inter", "77\t2\t3\t875000000", "no user 77"),
        ("ml-100k.inter", "1\t78\t3\t875000000", "no film 78"),
        ("ml-100k.user", "4\told\tM\twriter\t12345", "the age is 'old'"),
        ("ml-100k.item", "4\tFilm\tlong ago\tDrama", "the release year is 'long ago'"),
        ("u.data", "1 2 3 4", "1 fields"),
        ("u.user", "4|23|M|writer", "4 fields"),
        ("u.item", "9|x|||url|1", "6 fields"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, file: str, bad: str, problem: str) -> None:
    (write_grouplens if file.startswith("u.") else write_recbole)(tmp_path)
    lines = (tmp_path / file).read_text(encoding="latin-1").splitlines()
    lines.insert(2, bad)
    (tmp_path / file).write_text("\n".join(lines) + "\n", encoding="latin-1")
    with pytest.raises(BadLineError, match=rf"{file}, line 3: .*{problem}"):
        MovieLens(str(tmp_path)).setup()


def archive() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as writer:
        for name in movielens_files.GROUPLENS_FILES:
            writer.writestr(f"ml-100k/{name}", "x")
    return content.getvalue()


def test_offline_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(ConnectionError, match=r"u\.data, u\.user, u\.item.*into .*empty") as error:
        MovieLens(str(tmp_path / "empty")).prepare_data()
    assert "ml-100k.inter" in str(error.value)


def test_a_download_is_checked_and_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = archive()
    monkeypatch.setattr(urllib.request, "urlopen", lambda *args, **kwargs: io.BytesIO(content))
    with pytest.raises(ValueError, match="MD5"):
        MovieLens(str(tmp_path)).prepare_data()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(movielens_files, "MD5", hashlib.md5(content).hexdigest())
    MovieLens(str(tmp_path)).prepare_data()
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(
        movielens_files.GROUPLENS_FILES
    )
