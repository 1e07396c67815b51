"""What a rank remembers: undone, sent out, saved and taken over by another owner."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.compress.bucket_plan import Bucket, BucketPlan, OwnedPiece
from lightning_dct.compress.codec import compress
from lightning_dct.compress.error_feedback import (
    ErrorFeedback,
    Residuals,
    add_pieces,
    pieces_extent,
)
from lightning_dct.kernels import cpu_kernel
from strategies_for_hypothesis import examples

CPU = torch.device("cpu")
PIECES = {"a[2:5]": OwnedPiece("a[2:5]", "a", 2, 5, 0), "b": OwnedPiece("b", "b", 0, 3, 0)}
BUCKET = BucketPlan(("b", "a"), (3, 6), (0, 0), torch.float32, "fp32")
SHARD = BucketPlan(("b", "a[2:5]"), (3, 3), (0, 0), torch.float32, "fp32")


def feedback(undoable: bool = False) -> ErrorFeedback:
    """Of its own gradients 1 everywhere, of sums 10."""
    made = ErrorFeedback(PIECES, adapt_threshold=True, undoable=undoable)
    made.begin()
    made.residual_of(BUCKET, CPU).fill_(1.0)
    made.owned_of(SHARD, CPU).fill_(10.0)
    made.commit()
    return made


def state(**owned: dict[int, list[float]]) -> dict[str, Any]:
    return {
        "thresholds": {"values": {}, "targets": {}},
        "residuals": {"a": torch.ones(6)},
        "owned": {
            name: {start: torch.tensor(part) for start, part in parts.items()}
            for name, parts in owned.items()
        },
    }


def test_state() -> None:
    saved = feedback().state_dict()
    assert {name: residual.tolist() for name, residual in saved["residuals"].items()} == {
        "b": [1.0] * 3,
        "a": [1.0] * 6,
    }
    assert {
        name: {start: piece.tolist() for start, piece in parts.items()}
        for name, parts in saved["owned"].items()
    } == {"b": {0: [10.0] * 3}, "a": {2: [10.0] * 3}}
    again = ErrorFeedback(PIECES, adapt_threshold=True, undoable=False)
    again.load_state_dict(saved, {"a": 6, "b": 3})
    assert str(again.state_dict()) == str(saved)
    assert sum(norm**2 for norm in again.norms().values()) == pytest.approx(9 * 1.0 + 6 * 100.0)


def test_the_kernel_that_was_asked_for_is_the_one_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = BucketPlan(("b", "a"), (3, 6), (1, 1), torch.float32, "fp32")

    def compressed(kernel: str) -> tuple[torch.Tensor, int | torch.Tensor]:
        made = ErrorFeedback(PIECES, adapt_threshold=True, undoable=False, kernel=kernel)
        made.begin()
        return compress(
            made, Bucket([torch.ones(9)], [made.residual_of(plan, CPU)], 1.0), plan, set()
        )

    assert compressed("torch")[1] == 2
    cpu_kernel.cache_clear()  # another test may have asked for numba, where it is installed
    monkeypatch.setattr("lightning_dct.kernels._numba_error", lambda: ImportError("none"))
    with pytest.raises(ValueError, match="`kernel='numba'` needs the package numba"):
        compressed("numba")


def test_pieces_of_another_owner_become_residuals() -> None:
    taken = feedback()
    taken.load_state_dict(
        state(a={2: [5.0, 6.0, 7.0], 0: [3.0, 4.0]}, b={1: [9.0, 9.0]}), {"a": 6, "b": 3}
    )
    assert taken.owned.view("a[2:5]").tolist() == [5.0, 6.0, 7.0]
    assert taken.owned.view("b") is None
    assert taken.residuals.view("a").tolist() == [4.0, 5.0, 1.0, 1.0, 1.0, 1.0]
    assert taken.residuals.view("b").tolist() == [0.0, 9.0, 9.0]


def test_pieces_beyond_the_parameter_are_refused() -> None:
    with pytest.raises(
        ValueError, match="residual of parameter 'a' has 7 entries, the model's parameter has 6"
    ):
        feedback().load_state_dict(state(a={5: [1.0, 1.0]}), {"a": 6, "b": 3})


@pytest.mark.parametrize("owned", [True, False])
def test_what_is_held_back_goes_out_once(owned: bool) -> None:
    held = feedback()
    held.begin()
    buffer = torch.zeros(9)
    held.send_out(buffer, BUCKET, deferred={0}, scale=0.5, owned=owned)
    ten = 20.0 if owned else 0.0
    assert buffer.tolist() == [0.0, 0.0, 0.0, 2.0, 2.0, 2.0 + ten, 2.0 + ten, 2.0 + ten, 2.0]
    held.commit()
    assert held.residuals.view("b").tolist() == [1.0] * 3
    assert (held.residuals.view("a") is not None) == owned
    buffer.zero_()
    held.send_out(buffer, BUCKET, deferred={0}, scale=0.5, owned=owned)
    assert not buffer.any()


def test_roll_back() -> None:
    held = feedback(undoable=True)
    before = str(held.state_dict())
    held.begin(refresh=True)
    held.send_out(torch.zeros(9), BUCKET, deferred=set(), scale=1.0, owned=False)
    held.residual_of(BUCKET, CPU).fill_(7.0)
    held.owned_of(SHARD, CPU).add_(7.0)
    held.thresholds.set("a", 1, 2.0)
    held.roll_back()
    assert str(held.state_dict()) == before


def test_adding_pieces() -> None:
    pieces = {3: torch.tensor([1.0, 2.0]), 0: torch.tensor([5.0])}
    assert pieces_extent(pieces) == 5
    whole = torch.ones(5, dtype=torch.float64)
    assert add_pieces(whole, pieces) is whole
    assert whole.tolist() == [6.0, 1.0, 1.0, 2.0, 3.0]


SIZES = {"a": 1, "b": 3, "c": 4, "d": 4, "e": 7}

# Buckets: the names in any order, cut anywhere; a second generation may hold only some of them.
bucket_lists = st.permutations(list(SIZES)).flatmap(
    lambda names: st.lists(st.integers(0, len(names)), max_size=3).map(
        lambda cuts: [
            names[start:stop]
            for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), len(names)], strict=True)
            if start < stop
        ]
    )
)


def flat(residuals: Residuals, names: list[str], dtype: torch.dtype = torch.float32) -> Tensor:
    return residuals.flat(names, [SIZES[name] for name in names], dtype, CPU)


def test_the_same_bucket_gets_the_same_buffer() -> None:
    residuals = Residuals()
    buffer = flat(residuals, ["a", "b"])
    assert flat(residuals, ["a", "b"]) is buffer
    assert flat(residuals, ["c", "d"]) is not buffer
    assert flat(residuals, ["a", "b"]) is buffer
    assert flat(residuals, ["b", "a"]) is not buffer


@given(
    generations=st.lists(st.tuples(bucket_lists, st.integers(1, 5)), min_size=1, max_size=6),
    reload=st.booleans(),
)
@examples(60)
def test_every_residual_follows_its_name(
    generations: list[tuple[list[list[str]], int]], reload: bool
) -> None:
    residuals = Residuals()
    expected = {name: torch.zeros(size) for name, size in SIZES.items()}
    number = 0.0
    for buckets, used in generations:
        for names in buckets[:used]:
            buffer = flat(residuals, names)
            for name, part in zip(
                names, buffer.split([SIZES[name] for name in names]), strict=True
            ):
                assert torch.equal(part, expected[name])
                number += 1
                part += number
                expected[name] = expected[name] + number
        state = residuals.state_dict()
        assert all(torch.equal(state[name], expected[name]) for name in state)
        if reload:
            residuals = Residuals()
            residuals.load_state_dict(state)


def test_buffers_that_lost_a_name_are_forgotten() -> None:
    residuals = Residuals()
    flat(residuals, ["a", "b"]).fill_(1.0)
    flat(residuals, ["c"]).fill_(2.0)
    flat(residuals, ["b", "c"]).add_(10.0)
    assert flat(residuals, ["a", "b"]).tolist() == [1.0, 11.0, 11.0, 11.0]
    assert flat(residuals, ["c"]).tolist() == [12.0] * 4
    assert (
        len({view.untyped_storage().data_ptr() for view in residuals._flat.values()})
        == len(residuals._flat)
        == 2
    )


def test_dtype_of_a_new_buffer() -> None:
    residuals = Residuals()
    flat(residuals, ["a"]).fill_(0.5)
    assert flat(residuals, ["a", "b"], torch.float64).tolist() == [0.5, 0.0, 0.0, 0.0]
    assert flat(residuals, ["a", "b"]).dtype == torch.float64


def test_norms() -> None:
    residuals = Residuals()
    flat(residuals, ["b"]).copy_(torch.tensor([3.0, 4.0, 0.0]))
    flat(residuals, ["a"]).fill_(12.0)
    assert residuals.norms() == {"b": 5.0, "a": 12.0}
    flat(residuals, ["b"]).fill_(1e30)  # whose square is beyond fp32
    assert math.isclose(residuals.norms()["b"], math.sqrt(3) * 1e30, rel_tol=1e-6)


def test_state_round_trip() -> None:
    residuals = Residuals()
    resumed = Residuals()
    flat(residuals, ["c", "b"]).copy_(torch.arange(7.0))
    state = residuals.state_dict()
    residuals._flat[("c", "b")].zero_()
    assert {name: values.tolist() for name, values in state.items()} == {
        "c": [0, 1, 2, 3],
        "b": [4, 5, 6],
    }
    flat(resumed, ["a"]).fill_(9.0)
    resumed.load_state_dict(state)
    assert resumed.view("a") is None
    buffer = flat(resumed, ["a", "b"])
    assert buffer.tolist() == [0.0, 4.0, 5.0, 6.0]
    buffer.zero_()
    assert state["b"].tolist() == [4.0, 5.0, 6.0]
