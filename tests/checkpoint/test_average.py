"""Averaged weights are the mean, whole or not there at all, and a checkpoint that every reader takes."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kielo.artifact.checkpoint_folder import step_folder_name
from kielo.artifact.checkpoint_index import read_index, read_plain
from kielo.artifact.checkpoint_inspection import check_checkpoint
from kielo.artifact.run_format import FORMAT_VERSION, with_version
from kielo.checkpoint import average as average_module
from kielo.checkpoint import export_tensors
from kielo.checkpoint.average import average
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.checkpoint.safetensors_storage import SafetensorsStream
from kielo.checkpoint.tensor_table import read_table
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import as_stored_now
from tests.bar import bars_of
from tests.checkpoint.layouts import config, model_on_ranks, values
from tests.resolve.golden_runs import GOLDEN
from tests.started_ranks import run_ranks

IDENTITY = with_version({"name": "tiny", "learning_rate": 1e-3, "model": {"hidden_size": 16}})


def save_on_ranks(folder: Path, step: int, tensor: int) -> None:
    """A tied model on as many ranks, with a moment and a loss beside the weights."""
    model, _ = model_on_ranks(config(tied=True, vocab_size=70), 1, 1, values(config(), step), tensor=tensor)
    tensors = {f"model/{name}": value for name, value in model.state_dict().items()}
    tensors["model/scale"] = torch.tensor(float(step))
    tensors["model/half"] = torch.linspace(0, step, 33).bfloat16()
    tensors["optimiser/embed.weight/exp_avg"] = model.embed.weight.detach().clone()
    save(folder, step, tensors)


def save(folder: Path, step: int, tensors: dict[str, torch.Tensor], **identity: object) -> Path:
    plain = {"step": step, "tokens": 10 * step, "loss": 2.5, "guard": {}, "identity": IDENTITY | identity}
    checkpointer = Checkpointer(folder, keep_newest=9)
    checkpointer.save(step, tensors, plain)
    checkpointer.settle()
    return folder / step_folder_name(step)


def small(value: float, shape: tuple[int, ...] = (4, 3), **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"model/a": torch.full(shape, value), "optimiser/a/exp_avg": torch.zeros(2)} | more


def test_it_is_the_mean_whatever_layout_saved_the_sources(tmp_path, monkeypatch):
    """Three checkpoints of 1 and 2 ranks, small blocks: within one ulp of the mean; same ties, dtypes."""
    for step, ranks in ((3, 1), (7, 2), (5, 2)):
        run_ranks(save_on_ranks, ranks, tmp_path / "checkpoints", step, ranks)
    sources = sorted((tmp_path / "checkpoints").glob("step_*"))
    assert len(read_index(sources[1]).entry("model/embed.weight").chunks) == 2
    written = []
    monkeypatch.setattr(export_tensors, "BLOCK_BYTES", 256)
    monkeypatch.setattr(SafetensorsStream, "write_rows", seen(written, SafetensorsStream.write_rows))
    to = average([sources[2], sources[0], sources[1]], tmp_path / "averages" / "three")

    assert max(written) <= 256 and len(written) > 80
    assert check_checkpoint(to) is None
    found, given = read_tensors(to), [read_tensors(source) for source in sources]
    assert set(found) == {name for name in given[0] if name.startswith("model/")}
    for name, tensor in found.items():
        mean = torch.stack([tensors[name].double() for tensors in given]).mean(0).to(tensor.dtype)
        ulp = torch.nextafter(mean.abs(), torch.full_like(mean, torch.inf)) - mean.abs()
        assert tensor.dtype == given[0][name].dtype and ((tensor - mean).abs() <= ulp).all(), name
    assert read_index(to).aliases == {"model/head.weight": "model/embed.weight"}
    plain = read_plain(to)
    assert [(source["name"], source["step"]) for source in plain["averaged_from"]] == [
        (step_folder_name(step), step) for step in (3, 5, 7)
    ]
    assert plain["averaged_from"][0]["save_id"] == read_index(sources[0]).save_id
    assert plain["identity"] == IDENTITY and plain["step"] == 7 and "loss" not in plain


def seen(sizes: list[int], write_rows):
    def note(stream: SafetensorsStream, rows: torch.Tensor) -> None:
        sizes.append(rows.nbytes)
        write_rows(stream, rows)

    return note


def test_what_does_not_fit_together_is_refused_by_name(tmp_path):
    """Another identity, shape, dtype or tensor; one given twice or alone; integers; a place that is taken."""
    one = save(tmp_path / "run", 1, small(1.0))
    others = {
        "learning_rate": save(tmp_path / "other", 2, small(2.0), learning_rate=1.0),
        "model.hidden_size": save(tmp_path / "wider", 2, small(2.0), model={"hidden_size": 32}),
        "model/a": save(tmp_path / "shape", 2, small(2.0, (3, 4))),
        "model/b": save(tmp_path / "tensor", 2, small(2.0, **{"model/b": torch.zeros(1)})),
        "given twice": one,
    }
    for named, other in others.items():
        with pytest.raises(KieloError, match=named):
            average([one, other], tmp_path / "to")
    with pytest.raises(KieloError, match="at least two"):
        average([one], tmp_path / "to")
    counts = [save(tmp_path / "counts", step, {"model/n": torch.arange(3)}) for step in (1, 2)]
    with pytest.raises(KieloError, match="model/n"):
        average(counts, tmp_path / "to")
    two = save(tmp_path / "run", 2, small(2.0))
    with pytest.raises(KieloError, match="step_00000009.*Fix: another name"):
        average([one, two], tmp_path / "run" / "step_00000009")
    assert not (tmp_path / "to").exists()
    average([one, two], tmp_path / "to")
    assert read_tensors(tmp_path / "to")["model/a"].eq(1.5).all()
    with pytest.raises(KieloError, match="exists already"):
        average([one, two], tmp_path / "to")


def test_checkpoints_of_all_versions_of_the_format_are_of_one_run(tmp_path):
    """A run that went on with a newer Kielo is averaged over both; the result has the newest format."""
    golden = sorted(GOLDEN.glob("version_*/checkpoint"))
    plain = read_plain(average(golden, tmp_path / "to"))
    assert len(plain["averaged_from"]) == len(golden)
    assert plain["identity"]["format_version"] == FORMAT_VERSION
    newest = read_plain(golden[-1])["identity"]
    assert as_stored_now(plain["identity"], "average") == as_stored_now(newest, "newest")


def test_a_damaged_source_or_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    """The damaged file is named before anything is written; a partial result on a full disk is removed."""
    sources = [save(tmp_path / "run", step, small(float(step))) for step in (1, 2)]
    file = next(sources[0].glob("*.safetensors"))
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(KieloError, match=rf"{sources[0].name} is damaged: {file.name}.*block 0"):
        average(sources, tmp_path / "averages" / "to")
    assert not (tmp_path / "averages").exists()
    file.write_bytes(sound)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SafetensorsStream, "write_rows", full)
    with pytest.raises(KieloError, match="disk full"):
        average(sources, tmp_path / "averages" / "to")
    assert list((tmp_path / "averages").iterdir()) == []


def test_the_sum_is_wider_than_the_weights(tmp_path):
    """Small weights beside large ones: summed in fp32, 1 + 3 × 2^-24 would come out as 1."""
    sources = [
        save(tmp_path / "run", step, small(value))
        for step, value in enumerate((1.0, 2.0**-24, 2.0**-24, 2.0**-24), start=1)
    ]
    found = read_tensors(average(sources, tmp_path / "to"))["model/a"][0, 0].item()
    assert found == torch.tensor((1 + 3 * 2.0**-24) / 4).item() != 0.25


def test_why_checkpoints_are_not_of_one_run(tmp_path):
    """Whole sentences; a table in the place of a value is another identity too."""
    one = save(tmp_path / "run", 1, small(1.0))
    of_run = "Fix: checkpoints of one run"
    wider = {"model/b": torch.zeros(1), "model/a": torch.zeros(4, 3).bfloat16()}
    for other, told in (
        (
            save(
                tmp_path / "a", 2, small(2.0), learning_rate={"first": 1.0}, model={"hidden_size": 16, "x": 2}
            ),
            f"is of another run than {one} (the identity differs in learning_rate, model.x). {of_run}",
        ),
        (
            save(tmp_path / "b", 2, small(2.0), model=5),
            f"is of another run than {one} (the identity differs in model). {of_run}",
        ),
        (
            save(tmp_path / "c", 2, wider),
            f"other names, shapes, dtypes or ties than in {one}: model/a, model/b. {of_run}",
        ),
    ):
        # they are compared in the order of their paths
        first, second = sorted([one, other])
        expected = f"{second}: {told.replace(str(one), str(first))}"
        with pytest.raises(KieloError) as caught:
            average([one, other], tmp_path / "to")
        assert str(caught.value) == expected
    alone = [save(tmp_path / "d", step, {"optimiser/a": torch.zeros(2)}) for step in (1, 2)]
    with pytest.raises(KieloError, match=f"^{alone[0]}: has no model tensors$"):
        average(alone, tmp_path / "to")
    with pytest.raises(KieloError, match="^an average needs at least two checkpoints$"):
        average([one], tmp_path / "to")
    whole = {"model/n": torch.arange(3), "model/a": torch.ones(2), "model/on": torch.tensor([True])}
    counts = [save(tmp_path / "e", step, whole) for step in (1, 2)]
    with pytest.raises(
        KieloError, match=r"whole numbers and switches have no useful mean: model/n, model/on$"
    ):
        average(counts, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_the_room_of_an_average(tmp_path, monkeypatch):
    """48 bytes of weights, 1,024 of a tensor's description and four files, each with a block's end."""
    sources = [save(tmp_path / "run", step, small(float(step))) for step in (1, 2)]
    bars = bars_of(monkeypatch, average_module)

    def disk(free_bytes: int, free_files: int) -> None:
        found = SimpleNamespace(f_bavail=free_bytes, f_frsize=1, f_files=99, f_favail=free_files)
        monkeypatch.setattr(os, "statvfs", lambda path: found)

    needed = 48 + 1024 + 4 * 4096
    for free_bytes, free_files, told in (
        (needed - 1, 4, "disk full: it needs about 17,456 bytes, 17,455 are free"),
        (needed, 3, "too few inodes: it needs 4, 3 are free"),
    ):
        disk(free_bytes, free_files)
        with pytest.raises(KieloError, match=f"checkpoint to was not saved in .*: {told}"):
            average(sources, tmp_path / "to")
    disk(needed, 4)
    average(sources, tmp_path / "to")
    (bar,) = bars
    assert bar.updates == [48] and bar.options == {
        "total": 48, "unit": "B", "unit_scale": True, "desc": "averaging", "disable": None,
    }  # fmt: skip


def test_wide_tensors_come_first_in_the_file(tmp_path):
    """So that each begins aligned; the index and the newest's names stay."""
    tensors = {
        "model/half": torch.ones(3).bfloat16(),
        "model/wide": torch.ones(2).double(),
        "model/b": torch.ones(5),
    }
    sources = [
        save(tmp_path / "run", step, {name: value * step for name, value in tensors.items()})
        for step in (2, 10)
    ]
    to = average(sources[::-1], tmp_path / "to")
    assert [name.partition("@")[0] for name in read_table(to / "rank_00000.safetensors")] == [
        "model/wide", "model/b", "model/half",
    ]  # fmt: skip
    assert {name: value.tolist() for name, value in read_tensors(to).items()} == {
        "model/half": [6.0] * 3, "model/wide": [6.0] * 2, "model/b": [6.0] * 5,
    }  # fmt: skip
    index = read_index(to)
    assert index.step == 10 and list(index.tensors) == list(tensors)
    assert check_checkpoint(to) is None
