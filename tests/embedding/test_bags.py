import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dct.embedding.bags import Bags, Features, read_bags
from lightning_dct.embedding.tables import described_tables
from strategies_for_hypothesis import examples

DIM = 3
POOLINGS = ["sum", "mean"]


def form(sizes: list[int], pooling: str) -> Features:
    return Features.of(described_tables(sizes, DIM, pooling, None))


@st.composite
def bags_of_rows(draw: st.DrawFn) -> tuple[list[int], list[list[list[int]]]]:
    """Table sizes, and the rows in the bag of each table and sample: ``[table][sample]``, some of
    them empty.
    """
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    samples = draw(st.integers(0, 5))
    return sizes, [
        draw(
            st.lists(
                st.lists(st.integers(0, rows - 1), max_size=4), min_size=samples, max_size=samples
            ),
            label="table",
        )
        for rows in sizes
    ]


def laid_flat(bags: list[list[list[int]]]) -> tuple[Tensor, Tensor]:
    flat = [row for table in bags for bag in table for row in bag]
    lengths = [len(bag) for table in bags for bag in table]
    return torch.tensor(flat, dtype=torch.int64), torch.tensor(
        [0, *np.cumsum(lengths)], dtype=torch.int64
    )


def looked_up(bags: Bags, tables: list[Tensor]) -> Tensor:
    rows = [
        tables[table][row]
        for table, row in zip(bags.tables.tolist(), bags.rows.tolist(), strict=True)
    ]
    return torch.stack(rows) if rows else torch.empty(0, DIM, dtype=tables[0].dtype)


def some_tables(sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [torch.randn(rows, DIM, generator=generator, dtype=dtype) for rows in sizes]


@given(case=bags_of_rows(), pooling=st.sampled_from(POOLINGS))
@examples(60)
def test_bags_as_torch_pools_them(
    case: tuple[list[int], list[list[list[int]]]], pooling: str
) -> None:
    sizes, content = case
    ids, offsets = laid_flat(content)
    bags = read_bags(ids, offsets, form(sizes, pooling))
    samples = len(content[0])
    assert bags.shape == (samples, len(sizes))
    tables = some_tables(sizes, torch.float64)
    pooled = bags.pool(looked_up(bags, tables))
    assert pooled.shape == (samples, len(sizes), DIM)
    for table, (weight, own) in enumerate(zip(tables, content, strict=True)):
        flat, starts = laid_flat([own])
        oracle = nn.EmbeddingBag.from_pretrained(
            weight, mode=pooling, include_last_offset=True, freeze=False
        )
        expected = oracle(flat, starts) if samples else torch.empty(0, DIM, dtype=torch.float64)
        torch.testing.assert_close(pooled[:, table], expected, rtol=1e-15, atol=1e-15)
        if not samples:
            continue
        # The gradient of each look-up, summed by row, is that of the table.
        gradient = torch.randn(
            samples, DIM, generator=torch.Generator().manual_seed(table), dtype=torch.float64
        )
        expected.backward(gradient)
        whole = torch.zeros_like(pooled)
        whole[:, table] = gradient
        mine = torch.zeros_like(weight)
        for which, row, part in zip(bags.tables, bags.rows, bags.spread(whole), strict=True):
            if which == table:
                mine[row] += part
            else:
                assert not part.any()
        torch.testing.assert_close(mine, oracle.weight.grad, rtol=1e-14, atol=1e-14)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    data=st.data(),
    pooling=st.sampled_from(POOLINGS),
)
@examples(60)
def test_one_row_of_each_table_a_sample(
    sizes: list[int], data: st.DataObject, pooling: str
) -> None:
    drawn = data.draw(
        st.lists(st.tuples(*(st.integers(0, rows - 1) for rows in sizes)), max_size=6)
    )
    ids = torch.tensor(
        drawn, dtype=data.draw(st.sampled_from([torch.int64, torch.int32, torch.uint8]))
    )
    bags = read_bags(ids.reshape(-1, len(sizes)), None, form(sizes, pooling))
    tables = some_tables(sizes, torch.float32)
    rows = looked_up(bags, tables)
    pooled = bags.pool(rows)
    assert pooled.shape == (len(drawn), len(sizes), DIM)
    for sample, chosen in enumerate(drawn):
        for table, row in enumerate(chosen):
            assert torch.equal(pooled[sample, table], tables[table][row])
    assert torch.equal(bags.spread(pooled).view_as(rows), rows)
    # As bags of one row each.
    flat, offsets = laid_flat(
        [[[chosen[table]] for chosen in drawn] for table in range(len(sizes))]
    )
    same = read_bags(flat, offsets, form(sizes, pooling))
    assert torch.equal(same.pool(looked_up(same, tables)), pooled)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pooling_keeps_the_dtype(pooling: str, dtype: torch.dtype) -> None:
    bags = read_bags(torch.tensor([0, 1, 2]), torch.tensor([0, 3, 3]), form([4], pooling))
    pooled = bags.pool(torch.ones(3, DIM, dtype=dtype))
    assert pooled.dtype == bags.spread(pooled).dtype == dtype
    assert pooled[:, 0, 0].tolist() == [3 if pooling == "sum" else 1, 0]


def test_a_third_has_as_many_digits_as_the_rows() -> None:
    bags = read_bags(torch.tensor([0, 1, 2]), torch.tensor([0, 3]), form([4], "mean"))
    assert bags.spread(torch.ones(1, 1, 1, dtype=torch.float64)).tolist() == [[1 / 3]] * 3


ONE = torch.tensor([1])


@pytest.mark.parametrize(
    ("ids", "offsets", "message"),
    [
        (
            torch.ones(2, 2),
            None,
            "`ids` must be whole numbers, int64 or int32; they are torch.float32",
        ),
        (torch.ones(2, 2, dtype=torch.bool), None, "`ids` must be whole numbers.*torch.bool"),
        (ONE, torch.tensor([0.0, 0.5, 1.0]), "`offsets` must be whole numbers.*torch.float32"),
        (
            torch.ones(2, 3, dtype=torch.int64),
            None,
            r"shape \[samples, 2\].*they have \[2, 3\]. Give `offsets`",
        ),
        (ONE, None, r"Without `offsets`, .*they have \[1\]"),
        (
            ONE.view(1, 1),
            torch.tensor([0, 1, 1]),
            r"`offsets` \[2 \* samples \+ 1\]; they have \[1, 1\] and \[3\]",
        ),
        (ONE, torch.tensor([[0, 1, 1]]), r"they have \[1\] and \[1, 3\]"),
        (ONE, torch.tensor([0, 1]), r"they have \[1\] and \[2\]"),
        (ONE, torch.tensor(0), r"they have \[1\] and \[\]"),
        (ONE, torch.empty(0, dtype=torch.int64), r"they have \[1\] and \[0\]"),
        (ONE, torch.tensor([1, 1, 1]), "`offsets` must ascend from 0 to the number of look-ups, 1"),
        (ONE, torch.tensor([0, 0, 0]), "`offsets` must ascend"),
        (ONE, torch.tensor([0, 1, 2]), "`offsets` must ascend"),
        (ONE, torch.tensor([0, 2, 1]), "`offsets` must ascend"),
    ],
)
def test_malformed_input(ids: Tensor, offsets: Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_bags(ids, offsets, form([5, 2], "sum"))


@pytest.mark.parametrize("bad", [-1, 2, 2**40])
def test_ids_out_of_range(bad: int) -> None:
    message = re.escape(
        f"Id {bad} is out of range: table 1 has 2 rows (2 of 6 ids are out of range). Correct"
        " the ids"
    )
    with pytest.raises(IndexError, match=message):
        read_bags(torch.tensor([[4, 1], [0, bad], [5, 0]]), None, form([5, 2], "sum"))
    with pytest.raises(IndexError, match=message):
        read_bags(
            torch.tensor([4, 0, 1, bad, 0, 2]), torch.tensor([0, 2, 2, 4, 6]), form([5, 2], "sum")
        )
