"""Who owns what: everything has one owner, owners carry alike, and buckets do not matter."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dct.compress.bucket_plan import BucketPlan, plan_bucket
from lightning_dct.exchange.sharding import SMALLEST_PIECE, cut, owned_by, share_out
from strategies_for_hypothesis import FORMATS, examples


def plan_of(sizes: list[int], density: float = 0.05, **settings: Any) -> BucketPlan:
    settings = {
        "dtype": torch.float32,
        "value_format": "bf16",
        "min_tensor_size": 128,
        "link_traversals": 2,
        **settings,
    }
    return plan_bucket(
        [f"p{index}" for index in range(len(sizes))], sizes, [density] * len(sizes), **settings
    )


models = st.builds(
    plan_of,
    st.lists(st.integers(1, 20_000), min_size=1, max_size=12),
    st.sampled_from([0.001, 0.05, 0.3, 1.0]),
    value_format=st.sampled_from(FORMATS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
numbers_of_owners = st.integers(1, 9)


@given(model=models, owners=numbers_of_owners)
@examples(60)
def test_every_entry_has_one_owner(model: BucketPlan, owners: int) -> None:
    pieces = share_out(model, owners)
    assert set(pieces) == set(model.names)
    for name, size in zip(model.names, model.sizes, strict=True):
        assert [piece.start for piece in pieces[name]] == [
            0,
            *(piece.stop for piece in pieces[name][:-1]),
        ]
        assert pieces[name][-1].stop == size
        assert all(piece.start < piece.stop and piece.name == name for piece in pieces[name])
        assert len({piece.owner for piece in pieces[name]}) == len(pieces[name])
        labels = [piece.label for piece in pieces[name]]
        assert labels == (
            [name] if len(labels) == 1 else [f"{name}[{p.start}:{p.stop}]" for p in pieces[name]]
        )
    everyone = [owned_by(pieces, owner) for owner in range(owners)]
    assert sum(map(len, everyone)) == len({label for owned in everyone for label in owned})


@given(model=models, owners=numbers_of_owners)
@examples(60)
def test_shards_hold_the_bucket_once_and_send_what_it_would(model: BucketPlan, owners: int) -> None:
    shards, whole, sums = divided = cut(model, share_out(model, owners), owners)
    seen = torch.zeros(sum(model.sizes))
    sent = [0] * len(model.names)
    for shard in shards:
        assert list(shard.plan.bounds) == sorted(shard.plan.bounds)
        for index, (start, stop) in enumerate(shard.plan.bounds):
            seen[start:stop] += 1
            tensor = shard.tensors[index]
            assert model.bounds[tensor][0] <= start < stop <= model.bounds[tensor][1]
            assert bool(shard.plan.targets[index]) == bool(model.targets[tensor])
            assert shard.plan.targets[index] <= stop - start
            sent[tensor] += shard.plan.targets[index]
        assert shard.packed.layout == shard.plan.layout
        # Of sums three times as many are sent, at most three quarters unless ranks send more.
        for size, target, of_sum in zip(
            shard.plan.sizes, shard.plan.targets, shard.sums.targets, strict=True
        ):
            assert of_sum == min(3 * target, max(target, 3 * size // 4))
        assert shard.sums.value_format == (
            "2bit" if model.value_format == "1bit" else model.value_format
        )
        assert set(shard.sums.names).isdisjoint(shard.plan.names)
    assert bool((seen == 1).all())
    assert [part.layout for part in sums.parts] == [shard.sums.layout for shard in shards]
    assert divided.of({0}) == {
        index for index, name in enumerate(whole.names) if name.split("[")[0] == "p0"
    }
    for target, total, size in zip(model.targets, sent, model.sizes, strict=True):
        assert target <= total <= target + owners
        assert total == target or total <= target * (1 + 1 / SMALLEST_PIECE) + 1, size


@given(model=models, owners=numbers_of_owners, data=st.data())
@examples(60)
def test_a_piece_is_the_same_in_any_bucket(
    model: BucketPlan, owners: int, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(model.names))))[
        : data.draw(st.integers(1, len(model.names)))
    ]
    bucket = BucketPlan(
        tuple(model.names[i] for i in order),
        tuple(model.sizes[i] for i in order),
        tuple(model.targets[i] for i in order),
        model.dtype,
        model.value_format,
    )
    pieces = share_out(model, owners)
    for whole, part in zip(
        cut(model, pieces, owners).shards, cut(bucket, pieces, owners).shards, strict=True
    ):
        known = dict(
            zip(
                whole.plan.names,
                zip(whole.plan.sizes, whole.plan.targets, strict=True),
                strict=True,
            )
        )
        for name, size, target in zip(
            part.plan.names, part.plan.sizes, part.plan.targets, strict=True
        ):
            assert known[name] == (size, target)


def test_owners_carry_alike() -> None:
    """A transformer's tensors: two large tables, layers, many small vectors."""
    sizes = [256 * 128, 128 * 128] + 4 * [
        3 * 128 * 128,
        3 * 128,
        128 * 128,
        128,
        128,
        512 * 128,
        512,
        512 * 128,
    ]
    for owners in (2, 3, 4, 8):
        for density in (0.01, 0.1):
            model = plan_of(sizes, density)
            loads = [
                shard.plan.layout.num_bytes
                for shard in cut(model, share_out(model, owners), owners).shards
            ]
            assert max(loads) < 1.1 * min(loads), (owners, density, loads)
            assert sum(loads) < 1.05 * model.layout.num_bytes


def test_bytes_of_a_rank_from_2_to_8_ranks() -> None:
    """Beside a ring all-reduce, which grows alike with (W - 1) / W: a ratio flat within 2%, for
    every rank.
    """
    model = plan_of([1024 * 4096, 4096, 4096 * 1024, 1024, 1024 * 1000, 1000], 0.01)
    ratios = []
    for owners in range(2, 9):
        sizes = [
            shard.plan.layout.num_bytes
            for shard in cut(model, share_out(model, owners), owners).shards
        ]
        dense = 2 * (owners - 1) / owners * 4 * sum(model.sizes)
        ratios += [dense / (sum(sizes) - own + (owners - 1) * own) for own in sizes]
    assert max(ratios) < 1.02 * min(ratios)
    assert min(ratios) > 120
