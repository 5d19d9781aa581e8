"""A save is planned once for a layout: later saves plan nothing, and write the same files."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from kielo.artifact.checkpoint_index import read_index
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.save_plan import HeldChunk, plan_all
from kielo.ranks.world import make_host_group, start_world
from kielo.recipe.errors import KieloError
from tests.started_ranks import run_ranks


def content(path: Path) -> tuple:
    """Returns all that a checkpoint's files hold, but save id and step."""
    files = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            files[file.name] = {key: opened.get_tensor(key).tolist() for key in opened.keys()}  # noqa: SIM118
    index = json.loads((path / "index.json").read_text())
    manifest = json.loads((path / "manifest.json").read_text())
    sizes = {name: record["bytes"] for name, record in manifest["files"].items()}
    return files, index | {"save_id": None, "step": None}, sizes, manifest["counts"]["tensor_bytes"]


def planned_on_ranks(folder: Path) -> list[int]:
    """Returns the chunks planned after the reservation and each of four saves; the last ones see others."""
    world = start_world(30, "cpu")
    replicas = 2 if world.size == 4 else 1
    mesh = init_device_mesh("cpu", (replicas, world.size // replicas), mesh_dim_names=("replicate", "shard"))
    values = torch.arange(70.0).view(7, 10)
    placements = [Replicate(), Shard(0)]
    tensors = {
        "model/a": distribute_tensor(values, mesh, placements),
        "model/b": distribute_tensor(values.bfloat16(), mesh, placements),
        "optimiser/step": torch.tensor(3.0),
    }
    tensors["model/tied"] = tensors["model/a"]
    group = make_host_group(world, "checkpoint", 30)
    checkpointer = Checkpointer(folder / "kept", keep_newest=9, group=group)
    checkpointer.reserve(tensors)
    planned = [checkpointer.planner.num_planned]
    for step in (1, 2):
        checkpointer.save(step, tensors, {})
        checkpointer.settle()
        planned.append(checkpointer.planner.num_planned)
    # One rank alone would plan other parts: all plan anew.
    wide = {"model/b": tensors["model/b"].to(torch.float32)}
    for step in (3, 4):
        checkpointer.save(step, tensors | wide, {})
        checkpointer.settle()
        planned.append(checkpointer.planner.num_planned)
    if world.size > 1:
        with pytest.raises(KieloError, match="model/odd is not the same tensor on rank 1"):
            checkpointer.reserve({"model/odd": torch.zeros(1 + world.rank)})
    alone = Checkpointer(folder / "alone", group=group)
    alone.save(2, tensors, {})
    alone.save(4, tensors | wide, {})
    alone.settle()
    return planned


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_an_unchanged_layout_is_planned_once(tmp_path, num_ranks):
    """Counted on rank 0; a changed dtype plans anew. What is written is what an unkept plan writes."""
    first, *others = run_ranks(planned_on_ranks, num_ranks, tmp_path, timeout_seconds=60)
    assert first == [4 * num_ranks] * 3 + [8 * num_ranks] * 2
    assert others == [[0] * 5] * (num_ranks - 1)
    kept = [tmp_path / "kept" / f"step_{step:08d}" for step in (1, 2, 3, 4)]
    alone = [tmp_path / "alone" / f"step_{step:08d}" for step in (2, 4)]
    assert content(kept[0]) == content(kept[1]) == content(alone[0])
    assert content(kept[2]) == content(kept[3]) == content(alone[1])
    assert read_index(kept[1]).entry("model/b").dtype == "BF16"
    assert read_index(kept[2]).entry("model/b").dtype == "F32"
    assert read_index(kept[0]).aliases == {"model/tied": "model/a"}


def held_by(num_replicas: int, num_shards: int, rows: int = 12) -> list[list[HeldChunk]]:
    """Returns the chunks of every rank: two tensors, cut by rows, with equal replicas."""
    size = rows // num_shards
    return [
        [HeldChunk(name, dtype, (rows, 8), (shard * size, 0), (size, 8)) for name, dtype in NAMES.items()]
        for _ in range(num_replicas)
        for shard in range(num_shards)
    ]


NAMES = {"model/a": "BF16", "model/b": "F32"}


def test_every_chunk_is_written_by_one_of_its_replicas():
    """Replicas share the bytes; wide dtypes come first in a file; a tied name is not written."""
    held = held_by(2, 3)
    written, whole = plan_all(held, {})
    chunks = [of_rank[position] for of_rank, positions in zip(held, written) for position in positions]
    assert len(chunks) == 6 == len({(chunk.name, chunk.offset) for chunk in chunks})
    assert sorted(map(len, written)) == [1] * 6
    assert whole.tensor_bytes == 12 * 8 * (2 + 4) and whole.num_files == 6
    entry = json.loads(whole.entries["model/a"])
    assert [chunk["offset"] for chunk in entry["chunks"]] == [[0, 0], [4, 0], [8, 0]]

    written, _ = plan_all(held_by(1, 3), {})
    assert written == [[1, 0]] * 3
    written, whole = plan_all(held_by(1, 3), {"model/a": "model/b"})
    assert written == [[1]] * 3 and list(whole.entries) == ["model/b"]


def test_parts_that_make_up_no_tensor_are_refused():
    """A part that no rank has, and ranks that do not mean the same tensor."""
    held = held_by(1, 3)
    with pytest.raises(KieloError, match="parts of model/a do not make up its shape"):
        plan_all([held[0], held[2]], {})
    for change in ({"dtype": "F16"}, {"whole": (12, 9)}, {"shape": (3, 8)}):
        other = [held[0][0]._replace(**change), held[0][1]]
        with pytest.raises(KieloError, match="model/a is not the same tensor on rank 3"):
            plan_all([*held, other], {})
