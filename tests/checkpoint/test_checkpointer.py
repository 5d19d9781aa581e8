"""A checkpoint is restored on any layout bit for bit; saving and its failures do not stop training."""

import errno
import json
import math
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import Shard, distribute_tensor

from kielo.artifact import checkpoint_folder
from kielo.artifact.checkpoint_folder import FaultyCheckpoint
from kielo.artifact.checkpoint_index import read_index, read_plain
from kielo.artifact.checkpoint_inspection import (
    check_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    newest_complete,
)
from kielo.artifact.manifest import hash_json
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.read_checkpoint import fill, read_tensors
from kielo.checkpoint.safetensors_storage import SafetensorsStream
from kielo.ranks.world import make_host_group, start_world
from kielo.recipe.errors import KieloError
from tests.checkpoint.layouts import config, model_on_ranks, values
from tests.started_ranks import run_ranks

PLAIN = {"step": 7, "samples": 10**12, "guard": {"skipped": [3, 5]}, "loss": 1 / 3}


def state_on_ranks(
    replicate: int, shard: int, context: int = 1, tensor: int = 1, *, seed: int | None
) -> dict[str, torch.Tensor]:
    """Weights, moments and a step counter; besides, bf16, and a vector with fewer rows than ranks.

    70 rows do not divide by 3 or 4 ranks, nor the 35 of a tensor rank by 2.
    """
    model_config = config(tied=True, vocab_size=70)
    fill = seed and values(model_config, seed)
    model, mesh = model_on_ranks(model_config, replicate, shard, fill, context, tensor)
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        moment = parameter.detach().clone()
        tensors[f"optimiser/{name}/exp_avg"] = moment.mul_(3) if seed else moment
        tensors[f"optimiser/{name}/step"] = torch.tensor(float(seed or 0))
    few = torch.arange(2.0, dtype=torch.bfloat16) + (seed or 0)
    tensors["few"] = distribute_tensor(few, mesh["shard"], [Shard(0)])
    return tensors


def whole(tensors: dict) -> dict[str, bytes]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value)
        .detach()
        .reshape(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
        for name, value in tensors.items()
    }


def save_on_ranks(folder: Path, *sizes: int) -> dict[str, bytes]:
    tensors = state_on_ranks(*sizes, seed=5)
    checkpointer = Checkpointer(folder)
    checkpointer.save(7, tensors, PLAIN)
    checkpointer.settle()
    return whole(tensors)


def restore_on_ranks(folder: Path, *sizes: int) -> dict[str, bytes]:
    tensors = state_on_ranks(*sizes, seed=None)
    checkpointer = Checkpointer(folder)
    path = checkpointer.newest()
    assert checkpointer.restore(path, tensors) == PLAIN
    return whole(tensors)


# Sizes of the mesh that saves → of the meshes that restore: replicate, shard, context, tensor.
@pytest.mark.parametrize(
    "meshes",
    [
        {(2, 2): [(1, 3)], (1, 2, 1, 2): [(1, 1, 2, 1)]},
        pytest.param({(1, 4): [(1, 1), (1, 2, 1, 2)], (1, 1, 2, 2): [(2, 1, 1, 2)]}, marks=pytest.mark.full),
    ],
)
def test_saved_on_four_ranks_it_comes_back_bit_for_bit_on_any_layout(tmp_path, meshes):
    """Any layout restores any checkpoint; a tied head and equal shards on replicas are stored once."""
    for sizes, restored_on in meshes.items():
        folder = tmp_path / str(sizes)
        saved = run_ranks(save_on_ranks, 4, folder, *sizes)[0]
        path = newest_complete(folder)[0]
        index = read_index(path)
        assert index.aliases == {"model/head.weight": "model/embed.weight"}
        stored_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        assert stored_bytes < sum(map(len, saved.values())) + 4 * 16_384, "each chunk is stored once"
        whole_tensors = read_tensors(path)
        assert whole(whole_tensors) == saved and whole_tensors["few"].dtype == torch.bfloat16
        for others in restored_on:
            for restored in run_ranks(restore_on_ranks, math.prod(others), folder, *others):
                assert restored == saved


def small(value: float, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "model/a": torch.full((64, 8), value),
        "model/b": torch.full((5,), value, dtype=torch.bfloat16),
    } | more


def filled_checkpointer(folder: Path) -> Checkpointer:
    checkpointer = Checkpointer(folder, keep_newest=2)
    checkpointer.save(100, small(1.0), {"step": 100})
    checkpointer.save(200, small(2.0), {"step": 200})
    checkpointer.settle()
    return checkpointer


def test_nothing_is_pickled_or_unpickled(tmp_path, monkeypatch):
    """A checkpoint from a stranger runs no code: only safetensors and JSON are written and read."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("pickle was used")

    for module, names in (
        (pickle, ("dump", "dumps", "load", "loads", "Pickler", "Unpickler")),
        (torch, ("save", "load")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, small(1.0), PLAIN)
    path = checkpointer.settle()
    tensors = small(0.0)
    assert Checkpointer(tmp_path).restore(path, tensors) == PLAIN
    assert tensors["model/a"].eq(1).all() and tensors["model/b"].eq(1).all()
    assert sorted(file.name for file in path.iterdir()) == [
        "index.json",
        "manifest.json",
        "rank_00000.safetensors",
    ]
    json.loads((path / "index.json").read_text())


def test_a_rank_is_filled_from_the_lines_of_its_own_tensors(tmp_path):
    """A rank of a pipeline parses no entry of another stage's tensors: those are spoilt here."""
    path = filled_checkpointer(tmp_path).settle()
    index = path / "index.json"
    head, a, b, end = index.read_bytes().splitlines(keepends=True)
    index.write_bytes(head + a + b"x" * (len(b) - 1) + b"\n" + end)
    tensors = {"model/a": torch.zeros(64, 8)}
    assert fill(path, tensors, Agreement()) == {"step": 200} and tensors["model/a"].eq(2).all()
    with pytest.raises(KieloError, match="not a checkpoint index"):
        fill(path, small(0.0), Agreement())


@contextmanager
def writing_waits_for(event: threading.Event) -> Iterator[None]:
    """Every save inside has been planned, and writes nothing before `event` is set."""
    original = SafetensorsStream.write_rows

    def write_rows(self, rows):
        assert event.wait(30)
        original(self, rows)

    SafetensorsStream.write_rows = write_rows
    try:
        yield
    finally:
        SafetensorsStream.write_rows = original


def test_tensors_and_state_may_change_while_they_are_written(tmp_path):
    """The values at the call of save() are stored, though training changes all; the next save waits."""
    tensors, plain, go = small(1.0), {"refused_changes": [1]}, threading.Event()
    checkpointer = Checkpointer(tmp_path)
    with writing_waits_for(go):
        checkpointer.save(100, tensors, plain)
        for tensor in tensors.values():
            tensor.fill_(2.0)
        plain["refused_changes"].append(2)
        assert newest_complete(tmp_path)[0] is None
        threading.Timer(0.1, go.set).start()
        checkpointer.save(200, tensors, plain)
        assert newest_complete(tmp_path)[0] == tmp_path / "step_00000100"
        tensors["model/a"].fill_(3.0)
        assert checkpointer.settle() == tmp_path / "step_00000200"
    for step, value, changes in ((100, 1.0, [1]), (200, 2.0, [1, 2])):
        path = tmp_path / f"step_{step:08d}"
        assert all(tensor.eq(value).all() for tensor in read_tensors(path).values())
        assert read_plain(path) == {"refused_changes": changes}


def train_while_saving(folder: Path) -> list[float]:
    world = start_world(30, "cpu")
    checkpointer = Checkpointer(folder, group=make_host_group(world, "checkpoint", 30))
    sums, done = [], threading.Event()
    with writing_waits_for(done):
        checkpointer.save(100, small(1.0), {})
        for step in range(100):
            total = torch.full((), float(step * (world.rank + 1)))
            dist.all_reduce(total)
            sums.append(total.item())
        done.set()
        checkpointer.save(200, small(2.0), {})
        assert checkpointer.settle().name == "step_00000200"
    return sums


def test_training_talks_while_a_save_is_under_way(tmp_path):
    """Collectives of the ranks' world and of a save do not meet: the save has a group of its own."""
    assert (
        run_ranks(train_while_saving, 2, tmp_path, timeout_seconds=60)
        == [[3.0 * step for step in range(100)]] * 2
    )
    assert [row["step"] for row in list_checkpoints(tmp_path)] == [200, 100]


def failing_saves_on_ranks(folder: Path) -> tuple[list[str], str, str]:
    world = start_world(30, "cpu")
    alerts = []
    group = make_host_group(world, "checkpoint", 30)
    checkpointer = Checkpointer(folder, group=group, on_alert=lambda step, message: alerts.append(message))
    tensors = {"model/a": torch.ones(64, 64), "model/b": torch.ones(64, 64)}
    checkpointer.save(100, tensors, {})
    checkpointer.settle()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    checkpointer.save(200, tensors, {})
    checkpointer.save(300, tensors, {})  # the failure of 200 does not stop it, nor does its own
    with pytest.raises(KieloError) as last:
        checkpointer.settle()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    left = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    checkpointer.save(400, tensors, {})
    assert left == ["newest", "step_00000100"]
    return alerts, str(last.value), checkpointer.settle().name


def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_spoils_nothing(tmp_path):
    """Rank 0 gets an alert for each failed save; all ranks raise the last one's; a later save succeeds.

    Nothing of a failed save stays.
    """
    (alerts, message, newest), (silent, same_message, same_newest) = run_ranks(
        failing_saves_on_ranks, 2, tmp_path, timeout_seconds=60
    )
    assert (message, newest) == (same_message, same_newest) and newest == "step_00000400"
    assert len(alerts) == 2 and alerts[1] == message and not silent
    for part in (
        "step_00000300",
        "disk full",
        str(tmp_path),
        "need 32,768 bytes, ",
        "are free",
        "rank 1",
        "keep_newest",
    ):
        assert part in message
    assert [row["state"] for row in list_checkpoints(tmp_path, checksums=True)] == ["verified"] * 2


def test_other_errors_are_told_as_they_are(tmp_path, monkeypatch):
    """An I/O error fails the save alone; what is no fault of the disk is raised; nothing stays of either."""
    checkpointer = filled_checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        checkpointer.save(300, small(3.0), {})
        with pytest.raises(KieloError, match="step_00000300 was not saved .*untouched: .*I/O error"):
            checkpointer.settle()
    with pytest.raises(TypeError):
        checkpointer.save(300, small(3.0), {"not JSON": object()})
    assert [row["state"] for row in list_checkpoints(tmp_path, checksums=True)] == ["verified"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "step_00000100", "step_00000200"]
    checkpointer.save(300, small(3.0), {})
    assert checkpointer.settle() == tmp_path / "step_00000300"


def test_a_job_that_lost_its_folder_publishes_nothing(tmp_path):
    """The permission is asked before each save, which it may refuse, and again before publication."""
    answers = [None, KieloError("the lease is lost"), KieloError("the lease is lost")]

    def permit() -> None:
        if (answer := answers.pop(0)) is not None:
            raise answer

    checkpointer = Checkpointer(tmp_path, permit=permit)
    checkpointer.save(100, small(1.0), {})
    with pytest.raises(KieloError, match="step_00000100 was not saved .*the lease is lost"):
        checkpointer.settle()
    with pytest.raises(KieloError, match="the lease is lost"):
        checkpointer.save(200, small(1.0), {})
    assert list(tmp_path.iterdir()) == [] and answers == []


def test_every_file_names_its_save_and_damage_has_a_place(tmp_path, monkeypatch):
    """Tensors, index and manifest hold one save id; a flipped bit and a stale file are named.

    Of a flipped bit the message gives the block and its bytes.
    """
    monkeypatch.setattr(checkpoint_folder, "BLOCK_BYTES", 256)
    newest = filled_checkpointer(tmp_path).settle()
    tensors = newest / "rank_00000.safetensors"
    manifest = json.loads((newest / "manifest.json").read_text())
    with safe_open(tensors, framework="pt") as file:
        assert file.metadata() == {"save_id": read_index(newest).save_id}
    ids = {record["save_id"] for record in manifest["files"].values()}
    assert ids == {read_index(newest).save_id, manifest["counts"]["save_id"]}
    assert (
        len(manifest["files"][tensors.name]["xxh3_64_blocks"]) == math.ceil(tensors.stat().st_size / 256) > 8
    )

    content = bytearray(tensors.read_bytes())
    content[1100] ^= 1
    tensors.write_bytes(content)
    assert check_checkpoint(newest).reason == (
        f"{tensors.name} is not what was written: block 4 (bytes 1,024 to 1,279) has another checksum"
    )
    assert check_checkpoint(newest, checksums=False) is None
    tensors.write_bytes((tmp_path / "step_00000100" / tensors.name).read_bytes())
    old_id, new_id = (read_index(tmp_path / f"step_00000{step}").save_id for step in (100, 200))
    assert (
        check_checkpoint(newest, checksums=False).reason
        == f"{tensors.name} is of another save ({old_id} instead of {new_id})"
    )


def test_the_newest_and_the_milestones_are_kept(tmp_path):
    """keep_newest counts up to the step just saved, and multiples of keep_every_steps stay.

    `newest` leads to the newest.
    """
    checkpointer = filled_checkpointer(tmp_path)
    checkpointer.save(300, small(3.0), {"tokens": 30, "loss": 0.5})
    assert checkpointer.settle() == (tmp_path / "newest").resolve()
    assert os.readlink(tmp_path / "newest") == "step_00000300"
    rows = list_checkpoints(tmp_path)
    assert [(row["step"], row["tokens"], row["loss"], row["state"]) for row in rows] == [
        (300, 30, 0.5, "complete"), (200, None, None, "complete")
    ]  # fmt: skip
    checkpointer = Checkpointer(tmp_path, keep_newest=1, keep_every_steps=200)
    for step in (250, 400, 500, 600, 700):  # an older start never loses what it has just written
        checkpointer.save(step, small(2.5), {})
        checkpointer.settle()
        assert list_checkpoints(tmp_path)[0]["step"] == max(step, 300)
    assert [row["step"] for row in list_checkpoints(tmp_path)] == [700, 600, 400, 200]


def test_the_last_sound_checkpoint_is_kept_as_long_as_it_is_asked_for(tmp_path):
    """The newest up to `kept_step` is kept beside the newest; or all are, reported with the reason."""
    alerts = []
    checkpointer = Checkpointer(tmp_path, on_alert=lambda step, message: alerts.append((step, message)))
    for step in (100, 200, 300, 400, 500):
        checkpointer.save(step, small(1.0), {}, kept_step=250)
    checkpointer.save(600, small(1.0), {}, kept_step=50, keep_all="bad steps")
    checkpointer.settle()
    assert [row["step"] for row in list_checkpoints(tmp_path)] == [600, 500, 400, 200] and alerts == [
        (600, "bad steps")
    ]
    checkpointer.save(700, small(1.0), {}, kept_step=0)
    checkpointer.settle()
    assert [row["step"] for row in list_checkpoints(tmp_path)] == [700, 600]


def test_going_back_removes_later_ones_only_once_its_target_is_known_to_be_whole(tmp_path, monkeypatch):
    """Going back to a damaged checkpoint removes nothing; an unreadable one is refused; a whole one works."""
    alerts = []
    checkpointer = Checkpointer(
        tmp_path, keep_newest=3, on_alert=lambda step, message: alerts.append(message)
    )
    for step in (100, 200, 300):
        checkpointer.save(step, small(float(step)), {})
    checkpointer.settle()
    later = sorted(path.name for path in tmp_path.iterdir())
    tensors = tmp_path / "step_00000100" / "rank_00000.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1])
    assert checkpointer.go_back_to(100) is None and "is damaged: rank_00000.safetensors" in alerts[0]
    tensors.write_bytes(whole)
    with monkeypatch.context() as patch, pytest.raises(FaultyCheckpoint, match="unreadable.*EIO.*retry"):
        patch.setattr(checkpoint_folder, "first_wrong_block", io_error)
        checkpointer.go_back_to(100)
    assert sorted(path.name for path in tmp_path.iterdir()) == later
    assert checkpointer.go_back_to(150) is None and checkpointer.go_back_to(100) == tmp_path / "step_00000100"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "step_00000100"]


def io_error(path: Path, expected: list[str]) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def unreadable_on_one_rank(folder: Path, is_other_damaged: bool) -> list[str]:
    """Returns the messages of `newest` and `restore` where rank 1 gets I/O errors; rank 0 may see damage."""
    world = start_world(30, "cpu")
    checkpointer = Checkpointer(folder, group=make_host_group(world, "checkpoint", 30))
    if world.rank == 1:
        checkpoint_folder.first_wrong_block = io_error
    elif is_other_damaged:
        checkpoint_folder.first_wrong_block = lambda path, expected: 0
    messages = []
    for read in (checkpointer.newest, lambda: checkpointer.restore(folder / "step_00000200", small(0.0))):
        with pytest.raises(FaultyCheckpoint) as refusal:
            read()
        messages.append(str(refusal.value))
    return messages


@pytest.mark.parametrize("is_other_damaged", [False, True])
def test_an_io_error_on_one_rank_refuses_on_all(tmp_path, is_other_damaged):
    """Both ranks raise one message with the rank; nothing is renamed, also if the other saw damage."""
    run_ranks(save_on_ranks, 2, tmp_path / "made", 1, 2)
    for step in (100, 200):
        shutil.copytree(tmp_path / "made" / "step_00000007", tmp_path / "run" / f"step_{step:08d}")
        restamp(tmp_path / "run" / f"step_{step:08d}", step)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    first, second = run_ranks(
        unreadable_on_one_rank, 2, tmp_path / "run", is_other_damaged, timeout_seconds=60
    )
    assert first == second and all(
        "unreadable" in text and "EIO" in text and "rank 1" in text for text in first
    )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def restamp(folder: Path, step: int) -> None:
    """Let a copied checkpoint be one of `step`, so that it is whole under its new name."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["xxh3_128"]
    content["counts"]["step"] = step
    path.write_text(
        json.dumps(content | {"xxh3_128": hash_json(content)}, indent=1, ensure_ascii=False) + "\n"
    )


def overflowed_on_one_rank(folder: Path) -> tuple[list[str], str]:
    world = start_world(30, "cpu")
    alerts = []
    checkpointer = Checkpointer(
        folder,
        group=make_host_group(world, "checkpoint", 30),
        on_alert=lambda step, text: alerts.append(text),
    )
    tensors = {
        "model/a": torch.ones(64, 64),
        "model/b": torch.ones(64, 64, dtype=torch.bfloat16),
        "few": torch.zeros(0),
    }
    checkpointer.save(100, tensors, {})
    checkpointer.settle()
    if world.rank == 1:
        tensors["model/b"][3, 5] = -math.inf
    checkpointer.save(200, tensors, {})
    with pytest.raises(KieloError, match="not finite") as last:
        checkpointer.settle()
    return alerts, str(last.value)


def test_a_tensor_that_is_not_finite_on_one_rank_fails_the_save_on_all(tmp_path):
    """Named with its rank, and earlier checkpoints are untouched."""
    (alerts, message), (silent, same) = run_ranks(overflowed_on_one_rank, 2, tmp_path, timeout_seconds=60)
    assert message == same and alerts == [message] and not silent
    assert all(word in message for word in ("step_00000200 was not saved", "model/b", "rank 1"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "step_00000100"]


def test_the_newest_whole_checkpoint_of_a_run_is_found_or_named(tmp_path):
    """newest_checkpoint warns of the damaged one that it skips, and names each fault when none is whole."""
    filled_checkpointer(tmp_path / "train" / "checkpoints")
    warnings = []
    (tmp_path / "train/checkpoints/step_00000200/index.json").unlink()
    assert newest_checkpoint(tmp_path, warnings.append).name == "step_00000100"
    assert len(warnings) == 1 and "index.json" in warnings[0]
    (tmp_path / "train/checkpoints/step_00000100/manifest.json").unlink()
    with pytest.raises(KieloError, match="no complete checkpoint.*manifest.json is missing"):
        newest_checkpoint(tmp_path)


def refusals_on_ranks(folder: Path) -> list[str]:
    checkpointer = Checkpointer(folder)
    path = checkpointer.newest()
    messages = []
    for more in (
        {"model/c": torch.zeros(2), "model/d": torch.zeros(2)},
        {"model/b": torch.zeros(6)},
        {"model/a": torch.zeros(64, 8, dtype=torch.bfloat16)},
    ):
        tensors = small(0.0) | (more if torch.distributed.get_rank() == 1 else {})
        try:
            checkpointer.restore(path, tensors)
        except KieloError as error:
            messages.append(str(error))
        assert not any(tensor.any() for tensor in tensors.values()), "nothing changes before the refusal"
    return messages


def start_and_refuse(folder: Path) -> list[str]:
    model_on_ranks(config(), 1, 2)
    return refusals_on_ranks(folder)


def test_what_a_checkpoint_cannot_fill_is_refused_on_all_ranks(tmp_path):
    """Missing names, other shapes and lossy dtypes on one rank are named on both; no rank hangs."""
    filled_checkpointer(tmp_path)
    first, second = run_ranks(start_and_refuse, 2, tmp_path, timeout_seconds=60)
    assert first == second and len(first) == 3
    assert "model/c, model/d" in first[0] and "rank 1" in first[0]
    assert "model/b has the shape [5], not [6]" in first[1]
    assert "model/a is stored as F32, which torch.bfloat16 cannot hold" in first[2]
    with pytest.raises(KieloError, match="model/z"):
        read_tensors(tmp_path / "step_00000200", ["model/z"])
