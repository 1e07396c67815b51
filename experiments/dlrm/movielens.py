"""MovieLens 100K as clicks: would this user rate this film 4 or more?

Reads both forms of the set: GroupLens' own (``u.data``, ``u.user``, ``u.item``) and RecBole's
atomic files (``ml-100k.inter``, ``.user``, ``.item``). They give nine categories and seven dense
features. Counts, such as the ratings of a film, are counted over the training part alone.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.utilities import rank_zero_info

from dlrm.movielens_files import (
    Film,
    Rating,
    User,
    download,
    find_form,
    read_films,
    read_ratings,
    read_users,
)
from streams import Batch, Rows, ShuffledRows

POSITIVE_FROM = 4
"""Ratings from here up are clicks (55.4% of them)."""

_SECONDS_PER_DAY = 86_400
_SECONDS_PER_YEAR = 365.25 * _SECONDS_PER_DAY


def _number_values(values: list[Any]) -> tuple[npt.NDArray[np.int64], int]:
    """Replace values by their place among the sorted distinct ones; return the number of these,
    too.
    """
    distinct, numbers = np.unique(np.asarray(values), return_inverse=True)
    return numbers.astype(np.int64), len(distinct)


def make_features(
    ratings: list[Rating],
    users: dict[int, User],
    films: dict[int, Film],
    training: npt.NDArray[np.int64],
) -> tuple[Batch, list[int]]:
    """Turn ratings into rows for DLRM; counts and scales come from the ``training`` ratings alone.

    Returns:
        All rows as one batch, and the rows of each embedding table.
    """
    time = np.array([rating.timestamp for rating in ratings], dtype=np.float64)
    raters = [users[rating.user] for rating in ratings]
    rated = [films[rating.film] for rating in ratings]

    categories: list[list[Any]] = [
        [rating.user for rating in ratings],
        [rating.film for rating in ratings],
        [user.age // 5 for user in raters],
        [user.gender for user in raters],
        [user.occupation for user in raters],
        [user.zip_code[:2] for user in raters],
        [film.year if film.year is not None else 0 for film in rated],
        [film.genres[0] if film.genres else "" for film in rated],
        [" ".join(film.genres) for film in rated],
    ]
    numbered = [_number_values(values) for values in categories]
    categorical = np.stack([numbers for numbers, _ in numbered], axis=1)

    def count_in_training(column: int) -> npt.NDArray[np.float64]:
        counts = np.bincount(categorical[training, column], minlength=numbered[column][1])
        return np.log1p(counts)[categorical[:, column]]

    user_column = categorical[:, 0]
    first_seen = np.full(numbered[0][1], np.inf)
    np.minimum.at(first_seen, user_column[training], time[training])
    known = np.isfinite(first_seen[user_column])
    days_since_first = np.where(
        known,
        np.maximum(0, time - np.where(known, first_seen[user_column], 0)) / _SECONDS_PER_DAY,
        0,
    )
    film_age = [
        1970 + rating.timestamp / _SECONDS_PER_YEAR - film.year if film.year is not None else 0.0
        for rating, film in zip(ratings, rated, strict=True)
    ]
    dense = np.stack(
        [
            np.array([user.age for user in raters], dtype=np.float64),
            np.log1p(np.maximum(0, film_age)),
            np.array([len(film.genres) for film in rated], dtype=np.float64),
            time,
            count_in_training(0),
            count_in_training(1),
            np.log1p(days_since_first),
        ],
        axis=1,
    )
    mean = dense[training].mean(axis=0)
    deviation = dense[training].std(axis=0)
    dense = (dense - mean) / np.where(deviation > 0, deviation, 1)
    label = np.array([rating.stars >= POSITIVE_FROM for rating in ratings])
    arrays = {
        "dense": dense.astype(np.float32),
        "categorical": categorical,
        "label": label.astype(np.float32),
    }
    return {name: torch.from_numpy(values) for name, values in arrays.items()}, [
        size for _, size in numbered
    ]


class MovieLens(ShuffledRows):
    """MovieLens 100K: 80% to train, 10% to validate, 10% to test, drawn at random.

    Batches are ``{"dense": float32 [n, 7], "categorical": int64 [n, 9], "label": float32 [n]}``.

    The files in ``root`` are downloaded if it has none. ``seed`` chooses the split and the order.
    """

    num_dense = 7

    def __init__(
        self, root: str, batch_size: int = 128, eval_batch_size: int = 1024, seed: int = 0
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed)
        self.root = Path(root)
        self.table_rows: list[int] = []

    def prepare_data(self) -> None:
        """Download the files if they are not there: one process a node does, the others wait."""
        if find_form(self.root) is None:
            download(self.root)

    def setup(self, stage: str | None = None) -> None:
        if self.parts:
            return
        users = read_users(self.root)
        films = read_films(self.root)
        ratings = read_ratings(self.root, users, films)
        without_year = sum(film.year is None for film in films.values())
        rank_zero_info(
            f"MovieLens: {len(ratings)} ratings, {len(users)} users, {len(films)} films "
            f"({without_year} without a release year, which becomes a year of its own)"
        )
        order = np.random.default_rng(self.seed).permutation(len(ratings))
        first = int(0.8 * len(order))
        second = int(0.9 * len(order))
        self.parts = {"train": order[:first], "val": order[first:second], "test": order[second:]}
        self._clicks, self.table_rows = make_features(ratings, users, films, self.parts["train"])

    def rows(self, numbers: Rows) -> Batch:
        return {name: values[numbers] for name, values in self._clicks.items()}
