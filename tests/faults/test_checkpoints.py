"""Checkpoints: an unreadable file does not count as damaged, training never restarts over existing work, and
bad steps remove no good checkpoint.

`trained` has 20 steps, checkpoints 15 and 20, and a save every 5 steps.
"""

import builtins
import errno
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kielo.artifact.checkpoint_inspection import check_checkpoint
from kielo.artifact.manifest import hash_json
from kielo.train import forward_backward
from kielo.train.optimiser import Optimiser
from tests.faults.trial import belongings, refused, went_well

TRAIN = ("train", "tiny.toml")
SAVE_ID = "0123456789abcdef"
RANK_FILE, INDEX, MANIFEST = "rank_00000.safetensors", "index.json", "manifest.json"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def checkpoints(workplace: Path) -> Path:
    return workplace / "run" / "train" / "checkpoints"


def names(workplace: Path) -> list[str]:
    return sorted(path.name for path in checkpoints(workplace).iterdir())


def both(workplace: Path) -> list[Path]:
    return [checkpoints(workplace) / name for name in ("step_00000015", "step_00000020")]


def steps(workplace: Path) -> list[int]:
    lines = (workplace / "run" / "train" / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if "loss" in row]


def unfinished(workplace: Path) -> Path:
    """Makes the run look as if the job had ended between its last save and its manifest."""
    for name in ("manifest.json", "outcome.json"):
        (workplace / "run" / "train" / name).unlink()
    return workplace


def kept(workplace: Path) -> dict[str, str]:
    """All that training must not touch when it refuses; `outcome.json` says that it did."""
    found = belongings(workplace / "run" / "train")
    return {name: digest for name, digest in found.items() if name not in ("outcome.json", "alerts.jsonl")}


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 8
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


# --- Nothing that can be used
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [RANK_FILE, INDEX, MANIFEST])
@pytest.mark.parametrize("damage", [flip, cut, Path.unlink])
def test_training_does_not_begin_anew_over_damaged_checkpoints(trained, here, damage: Callable, name: str):
    """All are named with their reasons; nothing is renamed, and a second try says the same."""
    unfinished(trained)
    for path in both(trained):
        damage(path / name)
    before = kept(trained)
    for _ in range(2):
        message = refused(
            here(trained, *TRAIN),
            "training does not start over them",
            "step_00000015",
            "step_00000020",
            name,
            "backup",
            "another folder",
        )
        assert "[" not in message and kept(trained) == before


def _set_aside(folder: Path) -> None:
    for path in folder.glob("step_*"):
        path.rename(path.with_name(path.name + ".damaged"))


def _only_the_link(folder: Path) -> None:
    for path in folder.glob("step_*"):
        shutil.rmtree(path)


def _dangling_links(folder: Path) -> None:
    for path in folder.glob("step_*"):
        shutil.rmtree(path)
        path.symlink_to("/not/mounted")


def _no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _half_removed(folder: Path) -> None:
    (folder / "newest").unlink()
    for path in folder.glob("step_*"):
        path.rename(path.with_name(f"{path.name}.{SAVE_ID}.removed"))


def _elsewhere(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.symlink_to("/not/mounted")


PAPERS = {"manifest.json", "outcome.json", "metrics.jsonl"}


@pytest.mark.parametrize(("loss", "papers"), [
    *((loss, set()) for loss in (_set_aside, _only_the_link, _dangling_links, _half_removed)),
    *((loss, PAPERS) for loss in (_no_folder, _empty, _elsewhere)),
    *((_no_folder, {paper}) for paper in sorted(PAPERS)),
])  # fmt: skip
def test_training_does_not_begin_anew_where_checkpoints_went_missing(
    trained, here, loss: Callable, papers: set[str]
):
    """The checkpoints that are left, or the papers beside them, tell that training had saved;
    no file is changed.
    """
    loss(checkpoints(trained))
    for paper in PAPERS - papers:
        (trained / "run" / "train" / paper).unlink()
    before = belongings(trained / "run" / "train")
    for _ in range(2):
        refused(
            here(trained, *TRAIN),
            "contains no checkpoint, but training had saved there",
            "checkpoints",
            "backup",
            "another folder",
        )
        assert belongings(trained / "run" / "train") == before


def test_moving_the_folder_away_begins_anew(trained, here):
    """The way out that the refusal proposes works."""
    _only_the_link(checkpoints(trained))
    refused(
        here(trained, *TRAIN),
        "contains no checkpoint, but training had saved there",
        str(Path("run") / "train"),
    )
    (trained / "run" / "train").rename(trained / "before")
    went_well(here(trained, *TRAIN))
    assert steps(trained)[0] == 1 and "step_00000020" in names(trained)


@pytest.mark.parametrize("was_saving", [False, True])
def test_a_job_killed_before_its_first_save_begins_anew(packed, here, was_saving: bool):
    """Metrics of a few steps, and a save that was under way, are no checkpoint that is missed."""
    checkpoints(packed).mkdir(parents=True)
    rows = [{"step": step, "loss": 5.0} for step in range(1, 8 if was_saving else 5)]
    (packed / "run" / "train" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if was_saving:
        (checkpoints(packed) / f"step_00000005.{SAVE_ID}.partial").mkdir()
    went_well(here(packed, *TRAIN))
    assert steps(packed) == [1, 10, 20] and names(packed) == ["newest", "step_00000015", "step_00000020"]


# --- Damage, of one
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [RANK_FILE, INDEX, MANIFEST])
def test_a_damaged_newest_is_set_aside_beside_earlier_ones(
    trained, here, name: str, monkeypatch, fault_times
):
    """The one before is used, its steps stand in the metrics once,
    and what was set aside before is still there.
    """
    unfinished(trained)
    earlier = checkpoints(trained) / "step_00000020.damaged"
    earlier.mkdir()
    (earlier / "note.txt").write_text("mine")
    flip(both(trained)[1] / name)
    fault_times.watch_training(monkeypatch.setattr)
    fault_times.note("planted")
    outcome = went_well(here(trained, *TRAIN))
    assert "resuming after step 15 of 20" in outcome.out
    alerts = (trained / "run" / "train" / "alerts.jsonl").read_text()
    assert "step_00000020 is damaged" in alerts and name in alerts and "step_00000020.damaged.2" in alerts
    assert (earlier / "note.txt").read_text() == "mine"
    assert check_checkpoint(checkpoints(trained) / "step_00000020.damaged.2").kind == "damaged"
    assert check_checkpoint(both(trained)[1]) is None and steps(trained) == [1, 10, 20]


def test_a_flipped_version_number_is_damage(trained, here):
    """The manifest's own checksum tells it from a manifest of another version."""
    path = both(trained)[1] / MANIFEST
    path.write_text(path.read_text().replace('"version": 2', '"version": 3', 1))
    unfinished(trained)
    went_well(here(trained, *TRAIN))
    assert "step_00000020.damaged" in names(trained)


# --- The file system says no
# ----------------------------------------------------------------------------------------


@contextmanager
def failing(number: int, end: str) -> Iterator[None]:
    """Opening or listing what ends with `end` fails with errno `number`."""

    def guarded(call: Callable) -> Callable:
        def checked(path, *arguments, **options):
            if isinstance(path, str | os.PathLike) and str(path).endswith(end):
                raise OSError(number, os.strerror(number), str(path))
            return call(path, *arguments, **options)

        return checked

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((builtins, "open"), (io, "open"), (os, "scandir"), (os, "listdir")):
            patch.setattr(module, name, guarded(getattr(module, name)))
        yield


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOTCONN, errno.ETIMEDOUT])
@pytest.mark.parametrize("name", [RANK_FILE, INDEX, MANIFEST])
def test_training_renames_nothing_that_it_cannot_read(trained, here, number: int, name: str):
    """One refusal with file, error and what to do; when the file system is back, the same command goes on."""
    unfinished(trained)
    before = kept(trained)
    with failing(number, f"step_00000020/{name}"):
        refused(
            here(trained, *TRAIN),
            "is unreadable: ",
            "step_00000020",
            name,
            errno.errorcode[number],
            "retry",
        )
    assert kept(trained) == before
    assert "resuming after step 20" in went_well(here(trained, *TRAIN)).out


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_folder_that_cannot_be_listed_is_not_empty(trained, here, number: int):
    unfinished(trained)
    before = kept(trained)
    with failing(number, "train/checkpoints"):
        refused(
            here(trained, *TRAIN),
            "retry when the file system is back",
            "checkpoints",
            errno.errorcode[number],
        )
    assert kept(trained) == before


def other_version(checkpoint: Path, version: int, has_digest: bool = True) -> None:
    """The manifest as a Kielo of that version would have written it."""
    path = checkpoint / MANIFEST
    content = json.loads(path.read_text())
    del content["xxh3_128"]
    content |= {"version": version, "versions": content["versions"] | {"kielo": "9.9"}}
    digest = {"xxh3_128": hash_json(content)} if has_digest else {}
    path.write_text(json.dumps(content | digest, indent=1, ensure_ascii=False) + "\n")


@pytest.mark.parametrize(("version", "has_digest"), [(1, False), (3, True)])
@pytest.mark.parametrize("which", [[1], [0, 1]])
def test_a_checkpoint_of_another_version_is_refused(
    trained, here, version: int, has_digest: bool, which: list[int]
):
    """It is not damaged: not passed over for an older one, not renamed, and not begun anew over."""
    unfinished(trained)
    for number in which:
        other_version(both(trained)[number], version, has_digest)
    before = kept(trained)
    refused(
        here(trained, *TRAIN),
        "is of another version: manifest.json is of",
        "step_00000020",
        f"version {version}",
        "kielo 9.9",
        "Fix: the Kielo that wrote it",
    )
    assert kept(trained) == before


@contextmanager
def faulty_newest(workplace: Path, fault: str, name: str) -> Iterator[None]:
    """The newest checkpoint is of another "version", or its file `name` cannot be opened: an errno's name."""
    if fault == "version":
        other_version(both(workplace)[1], 3)
        yield
    else:
        with failing(getattr(errno, fault), f"step_00000020/{name}"):
            yield


READERS = [("export", "run", "--to", "hf"), ("evaluate", "tiny.toml")]


@pytest.mark.parametrize("verb", READERS, ids=lambda verb: verb[0])
@pytest.mark.parametrize("fault", ["ESTALE", "EACCES", "version"])
def test_readers_do_not_take_an_older_one_instead(trained, here, verb: tuple[str, ...], fault: str):
    """Export and evaluation of a run refuse, and change nothing, where the newest may well be whole."""
    with faulty_newest(trained, fault, RANK_FILE):
        before = names(trained)
        refused(
            here(trained, *verb),
            "is of another version" if fault == "version" else "is unreadable",
            "step_00000020",
            "another version" if fault == "version" else fault,
        )
    assert (
        names(trained) == before
        and not (trained / "hf").exists()
        and not (trained / "run" / "evaluate").exists()
    )


@pytest.mark.parametrize("name", [RANK_FILE, INDEX, MANIFEST])
@pytest.mark.parametrize("fault", ["ESTALE", "EACCES", "version"])
def test_list_show_and_verify_say_which_it_is(trained, here, fault: str, name: str):
    """Unreadable and another version are states of their own, none is called damaged, and nothing changes."""
    state = "of another version: " if fault == "version" else "unreadable: "
    with faulty_newest(trained, fault, name):
        rows = json.loads(went_well(here(trained, "checkpoint", "list", "run", "--verify", "--json")).out)
        went_well(here(trained, "checkpoint", "list", "run"))
        went_well(here(trained, "checkpoint", "show", "run"))
        outcome = went_well(here(trained, "checkpoint", "verify", "run"), code=1)
    assert rows[0]["state"].startswith(state) and rows[1]["state"] == "verified"
    assert [row["newest"] for row in rows] == [False, True]
    assert state in outcome.out and "damaged" not in outcome.out
    assert names(trained) == ["newest", "step_00000015", "step_00000020"]


def test_a_folder_that_may_not_be_entered_is_listed(trained, here):
    """Permissions are no damage, and no traceback."""
    if os.geteuid() == 0:
        pytest.skip("root may enter any folder")
    both(trained)[1].chmod(0)
    try:
        rows = json.loads(went_well(here(trained, "checkpoint", "list", "run", "--json")).out)
    finally:
        both(trained)[1].chmod(0o755)
    assert rows[0]["state"].startswith("unreadable: ") and rows[0]["bytes"] is None


# --- What a person put there
# ----------------------------------------------------------------------------------------


THEIRS = (
    "step_00000015.mine", "step_00000015.partial", "step_00000015.replaced", "step_00000015.removed",
    "step_00000099.partial",
    "step_00000020.old.partial", "step_00000015.mine.removed", f"mine.{SAVE_ID}.partial",
    "step_00000007.replaced",
    "step_00000020.damaged", "best",
)  # fmt: skip


def test_leftovers_are_known_by_their_save_id(trained, here):
    """A start and its saves remove what killed saves left, and nothing that a person named."""
    for name in THEIRS:
        (checkpoints(trained) / name).mkdir()
        (checkpoints(trained) / name / "weights").write_text("mine")
    for step, what in ((20, "partial"), (15, "replaced"), (10, "removed")):
        (checkpoints(trained) / f"step_{step:08d}.{SAVE_ID}.{what}").mkdir()
    unfinished(trained)
    flip(both(trained)[1] / RANK_FILE)  # so that a save follows
    went_well(here(trained, *TRAIN))
    assert names(trained) == sorted(
        [*THEIRS, "newest", "step_00000015", "step_00000020", "step_00000020.damaged.2"]
    )
    assert all((checkpoints(trained) / name / "weights").read_text() == "mine" for name in THEIRS)


def test_a_kill_between_two_renames_is_undone(trained, here):
    """The older checkpoint of a step gets its name back."""
    both(trained)[1].rename(checkpoints(trained) / f"step_00000020.{SAVE_ID}.replaced")
    unfinished(trained)
    assert "resuming after step 20" in went_well(here(trained, *TRAIN)).out
    assert names(trained) == ["newest", "step_00000015", "step_00000020"]


def test_a_link_and_a_folder_called_newest_stay(trained, here):
    """A checkpoint that was moved to another disk, and a copy instead of the link `newest`,
    are not pruned or replaced.
    """
    unfinished(trained)
    shutil.move(both(trained)[0], trained / "step_00000015")
    both(trained)[0].symlink_to(trained / "step_00000015")
    (checkpoints(trained) / "newest").unlink()
    shutil.copytree(both(trained)[1], checkpoints(trained) / "newest")
    went_well(here(trained, *TRAIN, "--set", "checkpoint.every_steps=1"))
    before = belongings(trained)
    flip(both(trained)[1] / RANK_FILE)
    (trained / "run" / "train" / "manifest.json").unlink()
    went_well(here(trained, *TRAIN, "--set", "checkpoint.every_steps=1"))
    assert both(trained)[0].is_symlink() and names(trained) == [
        "newest", "step_00000015", "step_00000019", "step_00000020", "step_00000020.damaged"
    ]  # fmt: skip
    after = belongings(trained)
    theirs = [name for name in before if name.startswith(("step_", "run/train/checkpoints/newest/"))]
    assert theirs and all(after[name] == before[name] for name in theirs)


# --- Bad steps
# ------------------------------------------------------------------------------------------------------


@pytest.fixture
def spoilt_update(monkeypatch) -> Callable[[int, float], None]:
    """spoilt_update(step, value): the update of that step sets all weights to `value`;
    its loss and norm are finite.
    """

    def start(step: int, value: float) -> None:
        original, calls = Optimiser.step, iter(range(1, 1000))

        def spoiling(self: Optimiser, *arguments) -> None:
            original(self, *arguments)
            if next(calls) == step:
                with torch.no_grad():
                    for parameter in self.parameters.values():
                        parameter.fill_(value)

        monkeypatch.setattr(Optimiser, "step", spoiling)

    return start


def saved_steps(workplace: Path) -> list[int]:
    return [int(name[5:]) for name in names(workplace) if name.startswith("step_")]


def every_weight_is_finite(workplace: Path) -> bool:
    from kielo.checkpoint.read_checkpoint import read_tensors

    paths = checkpoints(workplace).glob("step_*")
    return all(tensor.isfinite().all() for path in paths for tensor in read_tensors(path).values())


@pytest.mark.parametrize("every_steps", [1, 2, 3, 5])
def test_a_spoilt_update_costs_no_good_checkpoint(packed, here, spoilt_update, monkeypatch, every_steps: int):
    """Finite but far too large at step 12: nothing is saved or pruned after it,
    and what the message proposes works.
    """
    with monkeypatch.context():
        spoilt_update(12, 1e30)
        sets = ("--set", f"checkpoint.every_steps={every_steps}")
        message = refused(
            here(packed, *TRAIN, *sets), "not finite 3 steps in a row", "step 15", "newest checkpoint"
        )
    good = max(step for step in range(every_steps, 12, every_steps))
    assert good in saved_steps(packed) and max(saved_steps(packed)) <= 12
    assert f"step_{good:08d} is the newest checkpoint" in message
    if 12 in saved_steps(packed):
        assert "Move step_00000012 out of" in message
        (checkpoints(packed) / "step_00000012").rename(packed / "step_00000012")
    monkeypatch.undo()
    outcome = went_well(here(packed, *TRAIN, *sets))
    assert f"resuming after step {good} of 20" in outcome.out and every_weight_is_finite(packed)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("step", [10, 20])
def test_weights_that_are_not_finite_are_not_published(packed, here, spoilt_update, step: int, value: float):
    """A save inside the run reports it and the run ends by its next steps; at the last save the run fails."""
    spoilt_update(step, value)
    told = "not finite 3 steps in a row" if step == 10 else "has values that are not finite"
    message = refused(here(packed, *TRAIN), told)
    alerts = (packed / "run" / "train" / "alerts.jsonl").read_text()
    assert f"step_{step:08d} was not saved" in alerts and "model/" in alerts
    assert (
        step not in saved_steps(packed) and step - 5 in saved_steps(packed) and every_weight_is_finite(packed)
    )
    assert not (packed / "run" / "train" / "manifest.json").exists()
    if step == 10:
        assert "step_00000005 is the newest checkpoint" in message


@pytest.fixture
def bad_losses(monkeypatch) -> Callable[[set[int]], None]:
    """bad_losses(steps): the loss of each is no number;
    with one micro-batch a step and nothing of held-out text.
    """

    def start(bad_steps: set[int]) -> None:
        original, calls = forward_backward.chunked_loss, iter(range(1, 1000))
        monkeypatch.setattr(
            forward_backward, "chunked_loss",
            lambda *arguments: original(*arguments) * (math.nan if next(calls) in bad_steps else 1.0),
        )  # fmt: skip

    return start


QUIET = (
    "--set", "train.heldout_every_steps=1000", "--set", "train.micro_batch_sequences=8",
    "--set", "train.max_skipped_steps_in_a_row=9", "--set", "train.log_every_steps=1",
)  # fmt: skip


@pytest.mark.parametrize(("bad_steps", "expected"), [
    ({10}, [15, 20]),
    ({20}, [10, 15, 20]),
    ({9, 10, 11}, [15, 20]),
    ({14, 15, 16}, [10, 17, 20]),  # too few sound steps since
    ({18}, [15, 20]),
    ({11, 12, 14, 15, 17, 18}, [10, 16, 20]),  # 16 is between bad steps
    ({17, 18, 19, 20}, [10, 15, 20]),  # the last save must be; it removes none
])  # fmt: skip
def test_bad_steps_are_no_reason_to_save_or_prune(
    packed, here, bad_losses, bad_steps: set[int], expected: list[int]
):
    """A save that falls on one waits for a sound step;
    the checkpoint from before them stays until sound steps followed.
    """
    bad_losses(bad_steps)
    went_well(here(packed, *TRAIN, *QUIET))
    assert saved_steps(packed) == expected
    rows = [
        json.loads(line) for line in (packed / "run" / "train" / "metrics.jsonl").read_text().splitlines()
    ]
    assert {row["step"] for row in rows if "loss" in row and row["loss"] is None} == bad_steps


# --- What is kept
# ---------------------------------------------------------------------------------------------------


def test_a_recipe_that_keeps_one_checkpoint_is_refused(packed, here):
    refused(
        here(packed, *TRAIN, "--set", "checkpoint.keep_newest=1"),
        "a number greater than or equal to 2",
        "checkpoint.keep_newest",
    )


def test_by_default_every_tenth_checkpoint_stays(packed, here):
    went_well(here(packed, *TRAIN, "--set", "checkpoint.every_steps=1"))
    assert saved_steps(packed) == [10, 19, 20]


def test_zero_keeps_no_others(packed, here):
    went_well(
        here(packed, *TRAIN, "--set", "checkpoint.every_steps=1", "--set", "checkpoint.keep_every_steps=0")
    )
    assert saved_steps(packed) == [19, 20]
