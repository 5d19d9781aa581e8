"""Copies of a run's state in the memory of its nodes: what a restart finds, and what it must not find."""

import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from kielo.artifact.attempt_files import read_attempts
from kielo.artifact.checkpoint_inspection import newest_complete
from kielo.checkpoint import node_memory
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.node_memory import NodeMemory
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.ranks.world import make_host_group, start_world
from kielo.recipe.errors import KieloError
from kielo.train import loop
from kielo.train.run import train
from tests.checkpoint.test_checkpointer import small
from tests.started_ranks import run_ranks
from tests.train.tiny_run import resolve, write_tokens

RANKS_A_NODE = 2


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(node_memory, "MEMORY_FOLDER", folder)
    return folder


def checkpointer_in(folder: Path, alerts: list | None = None) -> Checkpointer:
    """One process, with a checkpoint of step 100 on the disk."""
    alerts = [] if alerts is None else alerts
    checkpointer = Checkpointer(folder, on_alert=lambda step, message: alerts.append(message))
    checkpointer.use_memory(0)
    checkpointer.save(100, small(1.0), {"step": 100})
    return checkpointer


def copied(checkpointer: Checkpointer, step: int, value: float) -> None:
    checkpointer.copy_to_memory(step, small(value), {"step": step})
    checkpointer.close()  # as a process that dies later, when the copy is done


def newest_after_restart(folder: Path) -> tuple[str, float]:
    """Returns the name of the checkpoint that a new process goes on from, and a value in it."""
    checkpointer = Checkpointer(folder)
    checkpointer.use_memory(0)
    path = checkpointer.newest()
    return path.name, read_tensors(path)["model/a"][0, 0].item()


def files_in(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_a_restart_goes_on_from_the_newest_copy_and_removes_it(tmp_path, memory):
    checkpointer = checkpointer_in(tmp_path / "run")
    checkpointer.copy_to_memory(110, small(2.0), {"step": 110})
    copied(checkpointer, 120, 3.0)
    assert len({path.parent for path in memory.rglob("*.safetensors")}) == 1, "the older copy stays no longer"
    assert newest_after_restart(tmp_path / "run") == ("step_00000120", 3.0)
    assert files_in(memory) == []


def test_no_copy_is_made_before_the_first_checkpoint(tmp_path, memory):
    """A folder that was emptied, to begin anew, would find the copy of the run that was in it."""
    checkpointer = Checkpointer(tmp_path / "run")
    checkpointer.use_memory(0)
    copied(checkpointer, 10, 2.0)
    assert files_in(memory) == []


def test_a_copy_of_another_history_is_not_used(tmp_path, memory):
    """Somebody moved the checkpoint away that the copy follows: the run is to go on from an older one."""
    checkpointer = checkpointer_in(tmp_path / "run")
    checkpointer.save(200, small(2.0), {"step": 200})
    copied(checkpointer, 210, 3.0)
    (tmp_path / "run" / "step_00000200").rename(tmp_path / "step_00000200")
    assert newest_after_restart(tmp_path / "run") == ("step_00000100", 1.0)
    assert files_in(memory) == []


@pytest.mark.parametrize("go_back", [lambda one: one.go_back_to(100), lambda one: one.go_back_before(105)])
def test_going_back_removes_the_copies(tmp_path, memory, go_back):
    """After a spike the run goes back to the very checkpoint that the copy follows."""
    checkpointer = checkpointer_in(tmp_path / "run")
    checkpointer.copy_to_memory(110, small(2.0), {"step": 110})
    assert go_back(checkpointer).name == "step_00000100"
    assert files_in(memory) == []


def test_a_copy_that_fails_is_told_and_the_one_before_stays(tmp_path, memory):
    alerts = []
    checkpointer = checkpointer_in(tmp_path / "run", alerts)
    checkpointer.copy_to_memory(110, small(2.0), {"step": 110})
    copied(checkpointer, 120, float("nan"))
    (alert,) = alerts
    assert "step 120 was not copied" in alert and "not finite" in alert
    assert newest_after_restart(tmp_path / "run") == ("step_00000110", 2.0)


def test_a_copy_does_not_hide_that_a_save_failed(tmp_path):
    checkpointer = checkpointer_in(tmp_path / "run")
    checkpointer.save(200, small(float("inf")), {"step": 200})
    checkpointer.copy_to_memory(210, small(2.0), {"step": 210})
    with pytest.raises(KieloError, match="step_00000200 was not saved"):
        checkpointer.settle()


def test_memory_without_room_gets_no_copy(tmp_path, memory, monkeypatch):
    alerts, real = [], os.statvfs
    checkpointer = checkpointer_in(tmp_path / "run", alerts)
    checkpointer.copy_to_memory(110, small(2.0), {"step": 110})
    checkpointer.reserve(small(1.0))  # waits for the copy
    monkeypatch.setattr(
        os, "statvfs", lambda path: _full(real(path)) if memory in Path(path).parents else real(path)
    )
    copied(checkpointer, 120, 3.0)
    assert "has room for 0 bytes" in alerts[0] and "checkpoint.memory_every_steps = 0" in alerts[0]
    assert newest_after_restart(tmp_path / "run") == ("step_00000110", 2.0)


def _full(system: os.statvfs_result) -> os.statvfs_result:
    fields = list(system)
    fields[4] = 0  # f_bavail
    return os.statvfs_result(fields)


@pytest.mark.parametrize("spoil", ["cut", "gone", "flipped"])
def test_a_spoilt_copy_is_not_gone_on_from(tmp_path, memory, spoil):
    copied(checkpointer_in(tmp_path / "run"), 110, 2.0)
    (file,) = memory.rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    if spoil == "gone":
        file.unlink()
    else:
        content[-1] ^= 1
        file.write_bytes(content if spoil == "flipped" else content[:-1])
    assert newest_after_restart(tmp_path / "run") == ("step_00000100", 1.0)


def test_the_end_of_a_run_removes_the_copies_of_this_run_only(tmp_path, memory):
    other = checkpointer_in(tmp_path / "other")
    copied(other, 110, 2.0)
    checkpointer = checkpointer_in(tmp_path / "run")
    checkpointer.copy_to_memory(110, small(2.0), {"step": 110})
    checkpointer.reserve(small(1.0))  # waits for the copy
    assert len(list(memory.rglob("*.safetensors"))) == 2
    checkpointer.settle()
    assert len(list(memory.rglob("*.safetensors"))) == 1
    assert newest_after_restart(tmp_path / "other") == ("step_00000110", 2.0)


def shards(value: float) -> dict[str, torch.Tensor]:
    """Tensors over all ranks: of 7 rows, which no number of ranks here divides, and one that all hold."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = torch.arange(35.0).reshape(7, 5) + value
    return {"model/rows": distribute_tensor(rows, mesh, [Shard(0)]), "model/all": torch.tensor([value])}


def on_nodes(folder: Path, memory: Path) -> Checkpointer:
    """The checkpointer of a rank of a node of two ranks."""
    node_memory.MEMORY_FOLDER = memory
    world = start_world(60, "cpu")
    checkpointer = Checkpointer(folder, group=make_host_group(world, "checkpoint", 60))
    checkpointer.use_memory(world.rank % RANKS_A_NODE)
    return checkpointer


def copy_on_nodes(folder: Path, memory: Path) -> None:
    checkpointer = on_nodes(folder, memory)
    checkpointer.save(100, shards(1.0), {"step": 100})
    checkpointer.copy_to_memory(110, shards(2.0), {"step": 110})
    checkpointer.close()


def restart_on_nodes(folder: Path, memory: Path) -> tuple[str, torch.Tensor]:
    path = on_nodes(folder, memory).newest()
    return path.name, read_tensors(path)["model/rows"]


@pytest.fixture(scope="module")
def copies_of_six_ranks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("six")
    (folder / "shm").mkdir()
    run_ranks(copy_on_nodes, 6, folder / "run", folder / "shm")
    return folder


@pytest.mark.parametrize(
    ("lost", "step"),
    [([0], 110), ([4], 110), ([0, 2], 100), ([0, 4], 100)],
    ids=str,
)
def test_one_of_three_nodes_may_be_lost(tmp_path, memory, copies_of_six_ranks, lost, step):
    """Each node holds the files of its own ranks and of those of the node before: 4 and 0 are neighbours."""
    shutil.copytree(copies_of_six_ranks, tmp_path, dirs_exist_ok=True)
    (of_run,) = memory.glob("kielo_*/*")
    of_run = of_run.rename(NodeMemory(tmp_path / "run", 0).folder)
    for first_rank in lost:
        shutil.rmtree(of_run / f"node_{first_rank:05d}")
    for name, rows in run_ranks(restart_on_nodes, 4, tmp_path / "run", memory):
        assert name == f"step_00000{step}"
        assert torch.equal(rows, torch.arange(35.0).reshape(7, 5) + (2.0 if step == 110 else 1.0))
    assert files_in(memory) == []


LOST_STEP = 13  # copied after 12, saved after 10


def train_as_nodes(folder: Path, memory: Path, layout: dict, dies_in_step: int | None) -> str:
    """Trains the tiny run on nodes of two ranks; returns why it ended."""
    node_memory.MEMORY_FOLDER = memory
    os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % RANKS_A_NODE)
    resolved = resolve(folder, **layout, every_steps=10, memory_every_steps=4)
    undisturbed, steps = loop.optimiser_step, []

    def step_or_die(*parts):
        steps.append(parts)
        if len(steps) == dies_in_step:
            raise RuntimeError("the node is gone")
        return undisturbed(*parts)

    loop.optimiser_step = step_or_die
    try:
        return train(resolved).outcome
    except RuntimeError as error:
        return str(error)


@pytest.mark.full
def test_a_run_that_loses_a_node_ends_with_the_weights_of_one_that_did_not(tmp_path, memory):
    """Bitwise, and from the copy of step 12: the checkpoint of step 10 is older."""
    for name in ("lost", "undisturbed"):
        write_tokens(tmp_path / name / "tokens")
    four = {"shard": 2, "replicate": 2}
    run_ranks(train_as_nodes, 4, tmp_path / "undisturbed", memory, four, None)
    ends = run_ranks(train_as_nodes, 4, tmp_path / "lost", memory, four, LOST_STEP)
    assert set(ends) == {"the node is gone"}
    (node,) = memory.glob("kielo_*/*/node_00002")
    shutil.rmtree(node)
    assert set(run_ranks(train_as_nodes, 4, tmp_path / "lost", memory, four, None)) == {"finished"}
    begun = [
        line.from_step for line in read_attempts(tmp_path / "lost" / "train") if hasattr(line, "from_step")
    ]
    assert begun == [0, 12]
    one, two = (
        read_tensors(newest_complete(tmp_path / name / "train" / "checkpoints")[0])
        for name in ("lost", "undisturbed")
    )
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert files_in(memory) == []
