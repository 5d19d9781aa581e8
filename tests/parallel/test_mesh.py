"""Ranks on the axes of a mesh, counted by hand, by one rank of a world that does nothing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kielo.parallel import mesh as mesh_module
from kielo.parallel.mesh import (
    alike_communicators,
    build_mesh,
    communicators,
    data_rank,
    data_ranks,
    sum_over,
    sum_over_data,
)
from kielo.ranks.communicator import Startup
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout
from kielo.verify.torch_fakes import fake_world

# Two stages, three replicas, two shards, two context ranks and two tensor ranks: 48. Rank 29 is
# 1 × 24 + 0 × 8 + 1 × 4 + 0 × 2 + 1.
SIZES = {"pipeline": 2, "replicate": 3, "shard": 2, "context": 2, "tensor": 2}
RANK, SIZE = 29, 48
GROUPS = {
    "pipeline": (5, 29), "replicate": (29, 37, 45), "shard": (25, 29), "context": (29, 31),
    "tensor": (28, 29),
}  # fmt: skip
MERGED = (25, 27, 29, 31)  # shard and context, for weights


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def test_a_rank_has_a_group_along_each_axis() -> None:
    """Weights are split over shard and context together; each group is made once."""
    with fake_world(RANK, SIZE, has_pipeline=True) as world:
        mesh = build_mesh(world, Layout(**SIZES))
        assert {axis: ranks_of(mesh[axis].get_group()) for axis in GROUPS} == GROUPS
        assert {axis: mesh[axis].get_local_rank() for axis in GROUPS} == {
            "pipeline": 1, "replicate": 0, "shard": 1, "context": 0, "tensor": 1,
        }  # fmt: skip
        of_weights = {axis: ranks_of(mesh.of_parameters(axis).get_group()) for axis in ("replicate", "shard")}
        assert of_weights == {"replicate": GROUPS["replicate"], "shard": MERGED}
        assert "context" not in mesh.parameters.mesh_dim_names and mesh["expert"].size() == 1
        assert mesh["tensor"] is mesh["tensor"] and mesh[("replicate", "shard")].size() == 6
        assert mesh.of_parameters("shard") is mesh.of_parameters("shard")
        assert mesh.of_parameters(("replicate", "shard")).size() == 12
        assert (data_ranks(mesh), data_rank(mesh)) == (6, 0 * 2 + 1)
        everyone = {ranks_of(group) for group in communicators(mesh)}
        assert everyone == {tuple(range(SIZE)), *GROUPS.values(), MERGED, (RANK,)}
        assert len(communicators(mesh)) == len(everyone)
        alike = {ranks_of(group) for group in alike_communicators(mesh)}
        assert alike == everyone - {GROUPS["pipeline"]}


def test_samples_are_numbered_over_replicas_and_shards() -> None:
    """Rank 19 of 24 is the third of six replicas of two shards of two tensor ranks: 4 × 4 + 1 × 2 + 1."""
    with fake_world(19, 24, has_pipeline=False) as world:
        mesh = build_mesh(world, Layout(replicate=6, shard=2, tensor=2))
        assert (data_ranks(mesh), data_rank(mesh)) == (12, 9)
        assert mesh.ranks is mesh.parameters
        groups = [ranks_of(group) for group in alike_communicators(mesh)]
        assert groups == [ranks_of(group) for group in communicators(mesh)]
        assert set(groups) == {tuple(range(24)), (3, 7, 11, 15, 19, 23), (17, 19), (18, 19), (19,)}


def test_sums_ask_each_axis_that_has_several_ranks_from_the_last_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leave what they are given as it is."""
    asked: list[tuple[int, ...]] = []

    def all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        asked.append(ranks_of(group))
        tensor.mul_(10)

    with fake_world(RANK, SIZE, has_pipeline=True) as world:
        mesh = build_mesh(world, Layout(**SIZES))
        monkeypatch.setattr(dist, "all_reduce", all_reduce)
        given = torch.tensor([2.0, 3.0], requires_grad=True)
        assert sum_over_data(given, mesh).tolist() == [2000.0, 3000.0]
        assert asked == [GROUPS["context"], GROUPS["shard"], GROUPS["replicate"]]
        asked.clear()
        total = sum_over(given, [mesh["tensor"], mesh["expert"], mesh["pipeline"]])
        assert total.tolist() == [200.0, 300.0] and not total.requires_grad
        assert asked == [GROUPS["pipeline"], GROUPS["tensor"]] and given.tolist() == [2.0, 3.0]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (
            {"shard": 3},
            r"shard 3 × context 1 × tensor 1 × expert 1\) needs 3 ranks, but 4 are running. Fix: layout.sh",
        ),
        ({"shard": 4, "tensor": 2}, "needs 8 ranks, but 4 are running"),
    ],
)
def test_a_layout_that_does_not_fit_the_world_is_refused(sizes: dict[str, int], reason: str) -> None:
    with (
        fake_world(0, 4, has_pipeline=False) as world,
        pytest.raises(KieloError, match=reason),
    ):
        build_mesh(world, Layout(**sizes))


def test_communicators_of_several_ranks_are_started_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group with all its rows, in the order of the axes, and messages of a pipeline after that."""
    started: list[tuple[str, ...]] = []
    rows: list[list[int]] = []

    def raise_it(startup: Startup, name: str, ranks: list[int], make: Callable[[], Any]) -> Any:
        started.append((name, *ranks))
        return make()

    def warm(startup: Startup, name: str, ranks: list[int], group: Any) -> None:
        started.append((f"messages of {name}", *ranks))

    monkeypatch.setattr(mesh_module, "raise_communicator", raise_it)
    monkeypatch.setattr(mesh_module, "warm_messages", warm)
    with fake_world(5, 8, has_pipeline=False) as world:
        new_group = dist.new_group
        monkeypatch.setattr(dist, "new_group", lambda row, **keys: rows.append(row) or new_group(row, **keys))
        real = replace(world, is_rehearsed=False, timeout_seconds=30.0)
        build_mesh(real, Layout(pipeline=2, shard=4))
        assert started == [("pipeline", 1, 5), ("shard", 4, 5, 6, 7), ("messages of pipeline", 1, 5)]
        assert rows == [[0, 4], [1, 5], [2, 6], [3, 7], [5], [0, 1, 2, 3], [4, 5, 6, 7]]
        started.clear()
        build_mesh(real, Layout(shard=2, replicate=2, context=2))
        names = ["replicate", "shard", "context", "shard"]  # and shard × context for weights
        assert [name for name, *_ in started] == names and started[3] == ("shard", 4, 5, 6, 7)
