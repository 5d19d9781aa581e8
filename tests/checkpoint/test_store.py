"""A checkpoint comes back on any layout bit for bit, and no accident costs more than the newest one."""

import errno
import json
import math
import os
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from kielo.artifact.checkpoint_index import list_checkpoints, newest_complete, read_index
from kielo.checkpoint import store as store_module
from kielo.checkpoint.store import Store, read_plain, read_tensors
from kielo.recipe.errors import KieloError
from tests.checkpoint.layouts import config, model_on_ranks, values
from tests.ranks import run_ranks

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
    Store(folder).save(7, tensors, PLAIN)
    return whole(tensors)


def restore_on_ranks(folder: Path, *sizes: int) -> dict[str, bytes]:
    tensors = state_on_ranks(*sizes, seed=None)
    store = Store(folder)
    path = store.newest()
    assert store.restore(path, tensors) == PLAIN
    return whole(tensors)


def test_saved_on_four_ranks_it_comes_back_bit_for_bit_on_any_layout(tmp_path):
    """Any layout restores any checkpoint; a tied head and equal shards on replicas are stored once."""
    saved = run_ranks(save_on_ranks, 4, tmp_path / "four", 1, 4)[0]
    run_ranks(save_on_ranks, 4, tmp_path / "hybrid", 2, 2)
    run_ranks(save_on_ranks, 4, tmp_path / "tensor", 1, 2, 1, 2)
    run_ranks(save_on_ranks, 4, tmp_path / "context", 1, 1, 2, 2)
    for folder in (tmp_path / name for name in ("four", "hybrid", "tensor", "context")):
        path = newest_complete(folder)[0]
        index = read_index(path)
        assert index.aliases == {"model/head.weight": "model/embed.weight"}
        stored_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        assert stored_bytes < sum(map(len, saved.values())) + 4 * 16_384, "each piece is stored once"
        whole_tensors = read_tensors(path)
        assert whole(whole_tensors) == saved and whole_tensors["few"].dtype == torch.bfloat16
    for folder, *sizes in [
        ("four", 1, 1), ("four", 1, 2), ("hybrid", 1, 3), ("four", 2, 1), ("tensor", 1, 3), ("tensor", 1, 1, 2, 1),
        ("four", 1, 2, 1, 2), ("context", 2, 1, 1, 2),
    ]:  # fmt: skip
        for restored in run_ranks(restore_on_ranks, math.prod(sizes), tmp_path / folder, *sizes):
            assert restored == saved


def small(value: float, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "model/a": torch.full((64, 8), value),
        "model/b": torch.full((5,), value, dtype=torch.bfloat16),
    } | more


def filled_store(folder: Path) -> Store:
    store = Store(folder, keep_newest=2)
    store.save(100, small(1.0), {"step": 100})
    store.save(200, small(2.0), {"step": 200})
    return store


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
    path = Store(tmp_path).save(1, small(1.0), PLAIN)
    tensors = small(0.0)
    assert Store(tmp_path).restore(path, tensors) == PLAIN
    assert tensors["model/a"].eq(1).all() and tensors["model/b"].eq(1).all()
    assert sorted(file.name for file in path.iterdir()) == [
        "index.json",
        "manifest.json",
        "rank_00000.safetensors",
    ]
    json.loads((path / "index.json").read_text())


def _edit(path: Path, change) -> None:
    content = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(content)))


def _flip_middle(content: bytearray) -> bytearray:
    content[len(content) // 2] ^= 1
    return content


DAMAGES = {
    "flipped bit in a tensor": ("rank_00000.safetensors", _flip_middle),
    "zeroed block": ("rank_00000.safetensors", lambda content: content[:-256] + bytes(256)),
    "cut short": ("rank_00000.safetensors", lambda content: content[:-1]),
    "flipped bit in the index": ("index.json", _flip_middle),
    "manifest cut short": ("manifest.json", lambda content: content[:-20]),
    "file gone": ("rank_00000.safetensors", None),
    "manifest gone": ("manifest.json", None),
    "file of the older checkpoint": ("rank_00000.safetensors", "older"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, kind):
    """Never loaded, whatever the damage: newest() falls back, sets it aside and names the file."""
    store = filled_store(tmp_path)
    newest = tmp_path / "step_00000200"
    name, change = DAMAGES[kind]
    if change is None:
        (newest / name).unlink()
    elif change == "older":
        shutil.copy(tmp_path / "step_00000100" / name, newest / name)
    else:
        _edit(newest / name, change)
    for reader in (Store(tmp_path).restore, lambda path, tensors: read_tensors(path)):
        with pytest.raises(KieloError, match=name):
            reader(newest, small(0.0))
    assert newest_complete(tmp_path)[0] == tmp_path / "step_00000100"
    assert store.newest() == tmp_path / "step_00000100"
    assert len(store.warnings) == 1 and name in store.warnings[0] and "step_00000200" in store.warnings[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000100", "step_00000200.damaged"]
    assert store.newest() == tmp_path / "step_00000100" and not store.warnings
    assert read_plain(store.newest()) == {"step": 100}


def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    """Also when the same step is saved again: at every write, sync, rename and removal something whole remains."""

    class Killed(BaseException):
        pass

    left = [0]

    def counted(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed  # and so does all that comes after: a killed process does nothing more
            return function(*args, **kwargs)

        return call

    for owner, name in (
        (os, "fsync"),
        (Path, "rename"),
        (Path, "mkdir"),
        (shutil, "rmtree"),
        (os, "replace"),
        (store_module.shutil, "disk_usage"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    for step in (100, 200):
        for survived in range(40):
            left[0] = 10**9
            shutil.rmtree(tmp_path / "run", ignore_errors=True)
            store = Store(tmp_path / "run", keep_newest=1)
            store.save(100, small(1.0), {})
            left[0] = survived
            killed = False
            try:
                store.save(step, small(2.0), {})
            except Killed:
                killed = True
            left[0] = 10**9
            path = Store(tmp_path / "run").newest()
            tensors = small(0.0)
            Store(tmp_path / "run").restore(path, tensors)
            assert tensors["model/a"].unique().tolist() in ([1.0], [2.0])
            Store(tmp_path / "run", keep_newest=1).save(300, small(3.0), {})
            assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["step_00000300"]
            if not killed:
                break
        assert not killed and survived > 5


def save_with_small_file_limit(folder: Path) -> tuple[str, bool]:
    tensors = state_on_ranks(1, 2, seed=5)
    store = Store(folder)
    store.save(100, tensors, {})
    if torch.distributed.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    try:
        store.save(200, tensors, {})
    except KieloError as error:
        return str(error), store.newest() == folder / "step_00000100"
    return "saved", False


def test_a_full_disk_on_one_rank_stops_the_save_on_all_and_spoils_nothing(tmp_path):
    """All ranks raise the same message with folder, needed and free bytes; the partial folder is gone."""
    outcomes = run_ranks(save_with_small_file_limit, 2, tmp_path, timeout_seconds=60)
    assert outcomes[0] == outcomes[1]
    message, earlier_is_whole = outcomes[0]
    assert earlier_is_whole
    for part in ("disk full", str(tmp_path), "bytes, ", "are free", "rank 1", "keep_newest"):
        assert part in message
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000100"]


def test_a_disk_that_cannot_hold_it_is_foreseen(tmp_path, monkeypatch):
    """Before a byte is written; and an error that is not about space says what it is."""
    store = filled_store(tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(KieloError, match="needs 2,058 bytes, 100 are free"):
            store.save(300, small(3.0), {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(errno.EIO, "I/O error")))
        with pytest.raises(KieloError, match="step_00000300 was not saved .*I/O error"):
            store.save(300, small(3.0), {})
    with pytest.raises(TypeError):
        store.save(300, small(3.0), {"not JSON": object()})
    assert [row["state"] for row in list_checkpoints(tmp_path)] == ["complete"] * 2
    assert len(list(tmp_path.iterdir())) == 2


def test_only_the_newest_are_kept(tmp_path):
    """keep_newest counts up to the step just saved; an older start never loses what it has just written."""
    store = filled_store(tmp_path)
    store.save(300, small(3.0), {})
    assert [row["step"] for row in list_checkpoints(tmp_path)] == [300, 200]
    Store(tmp_path, keep_newest=1).save(250, small(2.5), {})
    assert [row["step"] for row in list_checkpoints(tmp_path)] == [300, 250]


def refusals_on_ranks(folder: Path) -> list[str]:
    store = Store(folder)
    path = store.newest()
    messages = []
    for more in (
        {"model/c": torch.zeros(2), "model/d": torch.zeros(2)},
        {"model/b": torch.zeros(6)},
        {"model/a": torch.zeros(64, 8, dtype=torch.bfloat16)},
    ):
        tensors = small(0.0) | (more if torch.distributed.get_rank() == 1 else {})
        try:
            store.restore(path, tensors)
        except KieloError as error:
            messages.append(str(error))
        assert not any(tensor.any() for tensor in tensors.values()), "nothing changes before the refusal"
    return messages


def start_and_refuse(folder: Path) -> list[str]:
    model_on_ranks(config(), 1, 2)
    return refusals_on_ranks(folder)


def test_what_a_checkpoint_cannot_fill_is_refused_on_all_ranks(tmp_path):
    """Missing names, other shapes and lossy dtypes, seen by one rank, are named on both; and no rank hangs."""
    filled_store(tmp_path)
    first, second = run_ranks(start_and_refuse, 2, tmp_path, timeout_seconds=60)
    assert first == second and len(first) == 3
    assert "model/c, model/d" in first[0] and "rank 1" in first[0]
    assert "model/b has the shape [5], not [6]" in first[1]
    assert "model/a is stored as F32, which torch.bfloat16 cannot hold" in first[2]
    with pytest.raises(KieloError, match="model/z"):
        read_tensors(tmp_path / "step_00000200", ["model/z"])
