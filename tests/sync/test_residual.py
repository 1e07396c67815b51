import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.compress.error_feedback import Residuals
from strategies_for_hypothesis import examples

SIZES = {"a": 1, "b": 3, "c": 4, "d": 4, "e": 7}
CPU = torch.device("cpu")

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


@given(generations=st.lists(st.tuples(bucket_lists, st.integers(1, 5)), min_size=1, max_size=6), reload=st.booleans())
@examples(60)
def test_every_residual_follows_its_name(generations: list[tuple[list[list[str]], int]], reload: bool) -> None:
    residuals = Residuals()
    expected = {name: torch.zeros(size) for name, size in SIZES.items()}
    number = 0.0
    for buckets, used in generations:
        for names in buckets[:used]:
            buffer = flat(residuals, names)
            for name, part in zip(names, buffer.split([SIZES[name] for name in names]), strict=True):
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
    assert len({view.untyped_storage().data_ptr() for view in residuals._flat.values()}) == len(residuals._flat) == 2


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
    residuals, resumed = Residuals(), Residuals()
    flat(residuals, ["c", "b"]).copy_(torch.arange(7.0))
    state = residuals.state_dict()
    residuals._flat[("c", "b")].zero_()
    assert {name: values.tolist() for name, values in state.items()} == {"c": [0, 1, 2, 3], "b": [4, 5, 6]}
    flat(resumed, ["a"]).fill_(9.0)
    resumed.load_state_dict(state)
    assert resumed.view("a") is None
    buffer = flat(resumed, ["a", "b"])
    assert buffer.tolist() == [0.0, 4.0, 5.0, 6.0]
    buffer.zero_()
    assert state["b"].tolist() == [4.0, 5.0, 6.0]
