import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_dct.activations.module import CompressedModule
from strategies_for_hypothesis import examples


def module(refresh_every: int = 10) -> CompressedModule:
    return CompressedModule(refresh_every)


def selected_at(compressed: CompressedModule, steps: list[int]) -> list[int]:
    """The steps whose forward selects thresholds anew."""
    found = []
    for step in steps:
        compressed.advance(step)
        if compressed.refresh_requested:
            compressed.refreshed()
            found.append(step)
    return found


@pytest.mark.parametrize("refresh_every", [1, 7, 40])
def test_refreshes_at_the_first_step_and_in_time(refresh_every: int) -> None:
    expected = list(range(0, 150, refresh_every))
    compressed = module(refresh_every)
    assert selected_at(compressed, list(range(150))) == expected
    assert compressed.traffic.totals.refreshes == len(expected)


@pytest.mark.parametrize(
    ("refresh_every", "steps", "expected"),
    [(3, [0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 4], [0, 3]), (10, [0, 7, 25, 26, 34, 35], [0, 25, 35]),
     (10, [0, 4, 8, 0, 4, 9, 10], [0, 0, 10])],
    ids=["batches of one step", "steps that are skipped", "another fit"],
)  # fmt: skip
def test_refreshes_come_late_but_once(
    refresh_every: int, steps: list[int], expected: list[int]
) -> None:
    assert selected_at(module(refresh_every), steps) == expected


def test_a_refresh_waits_for_a_training_forward() -> None:
    compressed = module(5)
    compressed.advance(0)
    compressed.refreshed()
    compressed.advance(5)
    compressed.advance(6)  # no forward in between
    assert compressed.refresh_requested
    compressed.refreshed()
    assert compressed.refreshed_at == 6
    assert not compressed.refresh_requested
    compressed.refresh_requested = True
    assert selected_at(compressed, [7, 8]) == [7]


@given(refresh_every=st.integers(1, 20), cut=st.integers(2, 59) | st.just(0))
@examples(100)
def test_the_clock_travels_with_the_model(refresh_every: int, cut: int) -> None:
    straight = nn.Sequential(module(refresh_every))
    expected = selected_at(straight[0], list(range(60)))
    first, second = (nn.Sequential(module(refresh_every)) for _ in range(2))
    before = selected_at(first[0], list(range(cut)))
    saved = first.state_dict()
    assert list(saved) == ["0._extra_state"]
    selected_at(first[0], [cut, 1000])  # a saved state stays as it was
    second.load_state_dict(saved)
    assert before + selected_at(second[0], list(range(cut, 60))) == expected


def test_a_model_saved_after_its_first_step_goes_on_with_its_thresholds() -> None:
    saved = module(10)
    resumed = module(10)
    assert selected_at(saved, [0]) == [0]
    resumed.load_state_dict(saved.state_dict())
    assert selected_at(resumed, [1, 2, 10]) == [10]


def test_a_refresh_that_was_asked_for_outlives_a_checkpoint() -> None:
    saved = module(10)
    selected_at(saved, [0, 1, 2, 3])
    saved.refresh_requested = True
    resumed = module(10)
    resumed.load_state_dict(saved.state_dict())
    assert selected_at(resumed, [4, 5]) == [4]


def test_a_module_without_memory() -> None:
    compressed = module()
    assert compressed.thresholds_in_use() == []
    assert compressed.residual_norm() == 0.0
    assert compressed.compression_state() == {}
    compressed.load_compression_state([{}])
    assert compressed.name == "CompressedModule"
    assert not list(compressed.parameters())
