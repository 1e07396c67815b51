import math

import numpy as np
import pytest
import torch
from torchmetrics.functional import auroc

from dlrm.data import FIRST_ROW, MISSING_ID, NUM_DENSE, ClickTeacher, SyntheticClicks
from dlrm.model import DLRM
from dlrm.other_tables import FORMATS, GROUP, QuantisedTables, ThresholdedTables
from streams import TrainingStream, batches_to_cover, rank_rows

TABLES = [50, 2000, 3, 10, 400]


@pytest.mark.parametrize("total", [103, 5])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_evaluation_reads_every_row_once_in_equally_many_batches(
    world_size: int, total: int
) -> None:
    """And every rank some in each batch, as long as there are enough: many models refuse a batch
    without rows.
    """
    size = 8
    batches = batches_to_cover(total, batch_size=size, world_size=world_size)
    rows = [
        rank_rows(batch, batch_size=size, rank=rank, world_size=world_size, total=total)
        for batch in range(batches)
        for rank in range(world_size)
    ]
    np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(total))
    assert all(0 < len(own) <= size for own in rows)


def test_fewer_rows_than_ranks_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="3 rows of evaluation data leave some of 4 ranks without any"
    ):
        batches_to_cover(3, batch_size=8, world_size=4)


def test_a_row_is_a_pure_function_of_seed_and_number() -> None:
    rows = np.arange(1000, 1064)
    together = ClickTeacher(TABLES, seed=5).batch(rows)
    teacher = ClickTeacher(TABLES, seed=5)
    teacher.batch(np.arange(99))  # Nothing that was drawn before may matter.
    order = np.random.default_rng(0).permutation(len(rows))
    apart = teacher.batch(rows[order])
    for name, values in together.items():
        assert torch.equal(apart[name], values[torch.from_numpy(order)]), name
    other_seed = ClickTeacher(TABLES, seed=6).batch(rows)
    assert not torch.equal(other_seed["categorical"], together["categorical"])


def test_the_parts_are_disjoint_and_differ() -> None:
    assert len(set(FIRST_ROW.values())) == len(FIRST_ROW)
    data = SyntheticClicks(
        TABLES, batch_size=16, eval_batch_size=16, batches_per_epoch=2, eval_rows=32
    )
    first = [
        next(iter(loader))["categorical"]
        for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    ]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])


def test_shapes_types_and_ranges() -> None:
    batch = ClickTeacher(TABLES).batch(np.arange(5000))
    assert batch["dense"].shape == (5000, NUM_DENSE)
    assert batch["dense"].dtype == torch.float32
    assert batch["categorical"].shape == (5000, len(TABLES))
    assert batch["categorical"].dtype == torch.int64
    assert (batch["categorical"] < torch.tensor(TABLES)).all()
    assert (batch["categorical"] >= 0).all()
    assert set(batch["label"].unique().tolist()) == {0.0, 1.0}
    assert torch.isfinite(batch["dense"]).all()
    assert (batch["dense"] >= 0).all()


def test_ids_follow_zipf() -> None:
    exponent = 1.05
    ids = ClickTeacher([100_000], zipf_exponent=exponent, missing_rate=0.0).batch(
        np.arange(400_000)
    )["categorical"]
    counts = np.bincount(ids[:, 0].numpy(), minlength=1001)
    # Slope of the frequencies in the double logarithmic plot, over two decades.
    ranks = np.arange(10, 1000)
    slope = np.polyfit(np.log(ranks), np.log(counts[ranks] + 0.5), 1, w=np.sqrt(counts[ranks]))[0]
    assert slope == pytest.approx(-exponent, abs=0.08)


def test_missing_values_come_at_the_rate_asked_for() -> None:
    none = ClickTeacher(TABLES, missing_rate=0.0).batch(np.arange(5000))
    assert (none["categorical"] != MISSING_ID).all()
    some = ClickTeacher([1000] * 26, missing_rate=0.2).batch(np.arange(5000))
    share = (some["categorical"] == MISSING_ID).float().mean(dim=0)
    assert share.mean().item() == pytest.approx(0.2, abs=0.06)
    assert share.max() <= 0.42
    assert share.max() - share.min() > 0.1  # Each column has its own rate.


def test_click_rate_and_the_truth_behind_it() -> None:
    batch = ClickTeacher(TABLES, click_rate=0.25).batch(np.arange(60_000))
    assert batch["label"].mean().item() == pytest.approx(0.25, abs=0.015)
    # Calibration: among rows with probability near p, a share of p are clicks.
    likely = batch["probability"] > 0.5
    assert batch["label"][likely].mean().item() == pytest.approx(
        batch["probability"][likely].mean().item(), abs=0.02
    )


def test_no_trained_model_beats_the_teacher() -> None:
    torch.manual_seed(0)
    data = SyntheticClicks(
        TABLES, batch_size=512, eval_batch_size=4096, batches_per_epoch=250, eval_rows=20_000
    )
    model = DLRM(
        data.num_dense, data.table_rows, embedding_dim=8, bottom_sizes=(16,), top_sizes=(16,)
    )
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for batch in data.train_dataloader():
        logits = model(batch["dense"], batch["categorical"])
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    batches = list(data.test_dataloader())
    labels = torch.cat([batch["label"] for batch in batches]).int()
    with torch.no_grad():
        scores = torch.cat([model(batch["dense"], batch["categorical"]) for batch in batches])
    best = auroc(
        torch.cat([batch["probability"] for batch in batches]), labels, task="binary"
    ).item()
    reached = auroc(scores.sigmoid(), labels, task="binary").item()
    assert 0.65 < reached < best


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("missing_rate", 0.9),
        ("click_rate", 0.0),
        ("zipf_exponent", -1.0),
        ("batch_size", 0),
        ("eval_rows", 0),
    ],
)
def test_bad_settings_are_named(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"data\.{setting}="):
        SyntheticClicks(TABLES, **{setting: value})


def test_a_table_needs_two_rows() -> None:
    with pytest.raises(ValueError, match=r"data\.table_rows"):
        SyntheticClicks([5, 1])


def test_a_stream_continues_within_and_after_an_epoch() -> None:
    def stream() -> TrainingStream:
        return TrainingStream(lambda batch: {"number": batch}, batches_per_epoch=4)

    reference = stream()
    numbers = [batch["number"] for _ in range(3) for batch in reference]
    assert numbers == list(range(12))
    for consumed in (2, 4, 6):
        first = stream()
        seen: list[int] = []
        while len(seen) < consumed:
            for batch in first:
                seen.append(batch["number"])
                if len(seen) == consumed:
                    break
        second = stream()
        second.load_state_dict(first.state_dict())
        seen += [batch["number"] for batch in second]
        assert seen == list(range((consumed // 4 + 1) * 4))


def test_the_model_is_the_reference_architecture() -> None:
    model = DLRM(13, TABLES, embedding_dim=16, bottom_sizes=(64, 32), top_sizes=(64, 32))
    pairs = 6 * 5 // 2
    assert model.top[0].in_features == 16 + pairs
    bags = sum(TABLES) * 16
    networks = (13 * 64 + 64) + (64 * 32 + 32) + (32 * 16 + 16)
    networks += ((16 + pairs) * 64 + 64) + (64 * 32 + 32) + (32 + 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == bags + networks
    for table in model.tables:
        assert table.weight.abs().max() <= table.num_embeddings**-0.5
    vectors = torch.randn(2, 6, 16)
    interactions = model.interact(vectors)
    expected = [vectors[0, i] @ vectors[0, j] for i in range(6) for j in range(i)]
    torch.testing.assert_close(interactions[0], torch.stack(expected))


def test_thresholded_tables_send_the_largest_pooled_entries_of_each_and_their_gradients() -> None:
    """Oracle: whole rows, masked by sorting; what is counted is the masks' payloads, both ways,
    without ids.
    """
    tables = ThresholdedTables([50, 7], 4, density=0.25, value_format="fp32", seed=1)
    tables.rows.materialize()
    ids = torch.tensor([[3, 1], [9, 2], [4, 2]])
    pooled = tables.request(ids).pooled()
    pooled.sum().backward()
    places = torch.stack([ids[:, 0], 50 + ids[:, 1]], dim=1)
    rows = tables.rows.weight.detach()[places]
    expected = torch.zeros(57, 4)
    for table in range(2):
        part = rows[:, table].flatten()
        kept = part.abs() >= part.abs().sort(descending=True).values[2]
        assert torch.equal(pooled[:, table].flatten(), part * kept)
        expected.index_add_(0, places[:, table], kept.view(3, 4).float())
    assert torch.equal(tables.rows.weight.grad.to_dense(), expected)
    layout = tables.masks[0].layout((3, 4))
    words, left_over = layout.on_the_wire
    assert sum(mask.traffic.totals.bytes_sent for mask in tables.masks) == 2 * (
        8 * words + left_over
    )
    with torch.no_grad():
        assert int((tables.request(ids).pooled() != 0).sum()) == 6


def rounded_as(value_format: str, group: list[float]) -> list[float]:
    """Value by value, in doubles."""
    if value_format == "fp16":
        return [float(np.float16(value)) for value in group]
    if value_format == "int8":
        step = (max(group) - min(group)) / 255
        return [min(group) + round((value - min(group)) / step) * step for value in group]
    scale = 2.0 ** (math.ceil(math.log2(max(map(abs, group)))) - 2)
    levels = [sign * level * scale for level in (0, 0.5, 1, 1.5, 2, 3, 4, 6) for sign in (1, -1)]
    return [min(levels, key=lambda level: abs(level - value)) for value in group]


@pytest.mark.parametrize(("value_format", "ratio"), [("fp16", 2.0), ("int8", 3.2), ("mx4", 7.53)])
def test_quantised_tables_round_pooled_entries_and_their_gradients(
    value_format: str, ratio: float
) -> None:
    tables = QuantisedTables([50, 7], 16, value_format, density=0.05)
    tables.rows.materialize()
    ids = torch.tensor([[3, 1], [9, 2], [4, 0]])
    pooled = tables.request(ids).pooled()
    gradient = torch.randn(3, 2, 16)
    pooled.backward(gradient)
    places = torch.stack([ids[:, 0], 50 + ids[:, 1]], dim=1)
    rows = tables.rows.weight.detach()[places]

    def expected(values: torch.Tensor) -> torch.Tensor:
        groups = values.view(-1, GROUP).tolist()
        return torch.tensor([rounded_as(value_format, group) for group in groups]).view_as(values)

    torch.testing.assert_close(pooled, expected(rows))
    torch.testing.assert_close(tables.rows.weight.grad.to_dense()[places], expected(gradient))
    totals = tables.codec.traffic.totals
    assert totals.bytes_dense == 2 * 3 * 2 * 16 * 4 + 3 * 2 * 8
    assert (totals.bytes_dense - 48) / (totals.bytes_sent - 48) == pytest.approx(ratio, abs=0.005)


@pytest.mark.parametrize("value_format", FORMATS)
def test_zeros_stay_zeros_and_a_last_group_may_be_short(value_format: str) -> None:
    tables = QuantisedTables([50], 4, value_format)
    values = torch.cat([torch.zeros(GROUP), torch.full((4,), 3.0)]).view(-1, 1, 4)
    assert torch.equal(tables.codec(values), values)


def test_an_unknown_format_of_quantised_tables_is_named() -> None:
    with pytest.raises(ValueError, match="value_format='1bit': choose one of fp16, int8, mx4"):
        QuantisedTables([50], 4, "1bit")
