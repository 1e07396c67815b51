import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dct.kernels.bits import pack_bits, unpack_bits
from strategies_for_hypothesis import examples

flag_lists = st.lists(st.integers(0, 1), max_size=70)


class NotCpu(str):
    """Names the CPU to torch and something else to code that looks at ``device.type``."""

    type = "accelerator"


class OffCpu(Tensor):
    """A tensor in main memory that says it lies elsewhere: runs the branch for GPUs without one."""

    device = property(lambda self: NotCpu("cpu"))


def packed_by_loop(flags: list[int]) -> list[int]:
    packed = [0] * ((len(flags) + 7) // 8)
    for index, flag in enumerate(flags):
        packed[index // 8] += flag << index % 8
    return packed


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
@pytest.mark.parametrize("device_class", [Tensor, OffCpu])
@given(flags=flag_lists)
@examples(60)
def test_pack_equals_a_loop(
    device_class: type[Tensor], dtype: torch.dtype, flags: list[int]
) -> None:
    packed = pack_bits(torch.tensor(flags, dtype=dtype).as_subclass(device_class))
    assert packed.dtype == torch.uint8
    assert packed.tolist() == packed_by_loop(flags)


@pytest.mark.parametrize("device_class", [Tensor, OffCpu])
@given(flags=flag_lists)
@examples(60)
def test_unpack_undoes_pack(device_class: type[Tensor], flags: list[int]) -> None:
    packed = torch.tensor(packed_by_loop(flags), dtype=torch.uint8).as_subclass(device_class)
    unpacked = unpack_bits(packed, len(flags))
    assert unpacked.dtype == torch.uint8
    assert unpacked.tolist() == flags


def test_the_trick_reaches_the_other_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_dct.kernels.bits.np", None)
    ones = torch.ones(9, dtype=torch.uint8)
    assert unpack_bits(pack_bits(ones.as_subclass(OffCpu)), 9).tolist() == [1] * 9
    with pytest.raises(AttributeError):
        pack_bits(ones)
