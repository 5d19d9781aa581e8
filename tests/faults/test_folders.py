"""Folders: a user's files are never replaced, emptied or removed; links are kept; a disk error is reported in
a sentence.

A stage writes its folder anew, so whatever else lies there, or under the names that Kielo works with, is in
danger.
"""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.trial import Outcome, belongings, refused, went_well

# Stage → its folder in the run.
STAGES = {
    "corpus": "corpus", "tokenizer": "tokenizer", "pack": "tokens", "verify": "verify",
    "evaluate": "evaluate", "export": "hf",
}  # fmt: skip
EVERY_STAGE = pytest.mark.parametrize("stage", STAGES)
DATA_STAGES = pytest.mark.parametrize("stage", ("corpus", "tokenizer", "pack", "evaluate"))


def make_stale(folder: Path) -> None:
    """The stage has to be made again, as after a change of the recipe.
    Nothing is trained on it, or it would be refused.
    """
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    (folder / min(listed)).unlink()
    untrain(folder)


def untrain(folder: Path) -> None:
    """Takes the checkpoints of a data stage's run away: what one was trained on is not replaced."""
    if folder.name in ("corpus", "tokenizer", "tokens"):
        shutil.rmtree(folder.parent / "train" / "checkpoints", ignore_errors=True)


def in_place_of(workplace: Path, stage: str) -> Path:
    """The run without the folder of the stage."""
    folder = workplace / "run" / STAGES[stage]
    shutil.rmtree(folder)
    untrain(folder)
    return folder


def only(stage: str) -> tuple[str, ...]:
    return "run", "tiny.toml", "--only", stage


# What a person has under the name of a stage's folder, or in it.


@EVERY_STAGE
def test_a_persons_folder_under_a_stages_name_is_refused(finished, here, stage):
    folder = in_place_of(finished, stage)
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "mine.txt").write_text("the only copy")
    before = belongings(finished)
    refused(
        here(finished, *only(stage)),
        "stage did not write or which was changed since",
        STAGES[stage],
        "deep",
        "Fix: move it away",
    )
    assert belongings(finished) == before


@EVERY_STAGE
def test_a_persons_file_in_a_stages_folder_is_refused(finished, here, stage):
    folder = finished / "run" / STAGES[stage]
    make_stale(folder)
    (folder / "mine.txt").write_text("the only copy")
    before = belongings(finished)
    refused(
        here(finished, *only(stage)),
        "stage did not write or which was changed since",
        STAGES[stage],
        "mine.txt",
    )
    assert belongings(finished) == before
    (folder / "mine.txt").rename(finished / "mine.txt")
    went_well(here(finished, *only(stage)))


@EVERY_STAGE
@pytest.mark.parametrize("aside", (".old", ".partial", ".replaced"))
def test_a_persons_folder_beside_a_stage_is_left_alone(finished, here, stage, aside):
    make_stale(finished / "run" / STAGES[stage])
    mine = finished / "run" / (STAGES[stage] + aside)
    mine.mkdir()
    (mine / "mine.txt").write_text("the only copy")
    before = belongings(mine)
    went_well(here(finished, *only(stage)))
    assert belongings(mine) == before


@EVERY_STAGE
def test_a_folder_aside_that_is_not_ours_is_refused(finished, here, stage):
    folder = finished / "run" / STAGES[stage]
    make_stale(folder)
    mine = folder.with_name(f".{folder.name}.kielo") / "new"
    mine.mkdir(parents=True)
    (mine / "mine.txt").write_text("the only copy")
    before = belongings(finished)
    refused(here(finished, *only(stage)), "is not Kielo's, which would work there", f".{folder.name}.kielo")
    assert belongings(finished) == before


@EVERY_STAGE
def test_what_a_killed_attempt_left_is_used_or_removed(finished, here, stage):
    folder = finished / "run" / STAGES[stage]
    make_stale(folder)
    aside = folder.with_name(f".{folder.name}.kielo")
    (aside / "new" / "deep").mkdir(parents=True)
    (aside / "new" / "deep" / "half").write_text("h")
    (aside / "journal.jsonl").write_text('{"stage"')
    folder.rename(aside / "old")
    went_well(here(finished, *only(stage)))
    assert not aside.exists() and (folder / "manifest.json").is_file() and not (folder / "deep").exists()


@pytest.mark.parametrize(
    "text", ("not JSON", "[]", '{"name": "my web application"}', '{"kind": "poem", "files": {}}')
)
def test_a_manifest_of_another_program_is_not_ours(workplace, here, text):
    mine = workplace / "run" / "corpus"
    mine.mkdir(parents=True)
    (mine / "manifest.json").write_text(text)
    (mine / "mine.txt").write_text("the only copy")
    message = refused(
        here(workplace, "run", "tiny.toml", "--to", "corpus"), "not a readable manifest of Kielo's", "corpus"
    )
    assert "delete" not in message and (mine / "mine.txt").read_text() == "the only copy"


def test_another_stages_folder_is_not_replaced(finished, here):
    """A corpus that was moved to the tokens' name is still a corpus."""
    folder = in_place_of(finished, "pack")
    shutil.copytree(finished / "run" / "corpus", folder)
    before = belongings(finished)
    refused(
        here(finished, *only("pack")),
        "manifest.json of a corpus stage, which Kielo's tokens stage",
        "tokens",
        "corpus",
    )
    assert belongings(finished) == before


# What the recipe names lies where a stage writes.


@pytest.mark.parametrize(
    "pattern", ("corpus/text.txt", "corpus", "corpus/*.txt", "./corpus/../corpus/text.txt", "tokens/text.txt")
)
def test_text_in_a_folder_that_a_stage_replaces(workplace, here, pattern):
    folder = workplace / Path(pattern.replace("corpus/../", "")).parts[0]
    folder.mkdir()
    (workplace / "text.txt").rename(folder / "text.txt")
    before = belongings(workplace)
    outcome = here(
        workplace,
        "run",
        "tiny.toml",
        "--set",
        "folder=.",
        "--set",
        f"corpus.sources={pattern}",
        "--to",
        "corpus",
    )
    refused(outcome, "a folder of this run that Kielo replaces", "corpus.sources", folder.name)
    assert belongings(workplace) == before


@pytest.mark.parametrize("pattern", ("corpus/text.txt", "corpus"))
def test_text_behind_a_link_to_a_folder_that_a_stage_replaces(workplace, here, pattern):
    (workplace / "mine").mkdir()
    (workplace / "text.txt").rename(workplace / "mine" / "text.txt")
    (workplace / "run").mkdir()
    (workplace / "run" / "corpus").symlink_to(workplace / "mine")
    before = belongings(workplace)
    source = pattern.replace("corpus", "mine")
    refused(
        here(workplace, "run", "tiny.toml", "--set", f"corpus.sources={source}", "--to", "corpus"),
        "a folder of this run that Kielo replaces",
        "mine",
        "run/corpus",
    )
    assert belongings(workplace) == before


def test_a_source_that_holds_the_run_is_refused_at_once(workplace, here):
    """Else the second run would read what the first one wrote."""
    outcome = here(workplace, "run", "tiny.toml", "--set", "corpus.sources=.", "--to", "corpus")
    refused(outcome, "contains the run's own folder run", "corpus.sources", "run")
    assert not (workplace / "run").exists() or not any((workplace / "run").iterdir())


def test_a_pattern_that_finds_the_runs_own_files_is_refused(packed, here):
    before = belongings(packed)
    refused(
        here(packed, "run", "tiny.toml", "--set", "corpus.sources=**/*.jsonl.zst", "--to", "corpus"),
        "is in run/corpus, which Kielo writes and replaces",
        "corpus.sources",
        "run/",
    )
    assert belongings(packed) == before


def test_text_in_the_run_folder_itself_or_in_raw_is_fine(workplace, here):
    """Nothing replaces these: a person may keep text there."""
    (workplace / "raw").mkdir()
    (workplace / "raw" / "hashes.json").write_text('{"mine": true}')
    shutil.copy(workplace / "text.txt", workplace / "raw" / "text.txt")
    for source in ("text.txt", "raw/text.txt", "raw"):
        went_well(
            here(
                workplace,
                "run",
                "tiny.toml",
                "--set",
                "folder=.",
                "--set",
                f"corpus.sources={source}",
                "--to",
                "corpus",
            )
        )
    assert (workplace / "raw" / "hashes.json").read_text() == '{"mine": true}'


def test_a_tokenizer_in_the_folder_of_the_tokenizer_stage(packed, here):
    mine = packed / "tokenizer"
    shutil.copytree(packed / "run" / "tokenizer", mine)
    (mine / "manifest.json").unlink()
    (mine / "tokenizer.model").write_text("the only copy")
    before = belongings(packed)
    refused(
        here(packed, "run", "tiny.toml", "--set", "folder=.", "--set", "tokenizer.path=tokenizer"),
        "a folder of this run that Kielo replaces",
        "tokenizer.path",
    )
    assert belongings(packed) == before


def test_weights_in_the_folder_of_the_export(finished, here):
    shutil.copytree(finished / "run" / "hf", finished / "given")
    before = belongings(finished)
    sets = ("model.weights=hf:run/hf", "tokenizer.path=given", "train.tokens=5120")
    outcome = here(finished, "train", "tiny.toml", *(word for one in sets for word in ("--set", one)))
    refused(outcome, "a folder of this run that Kielo replaces", "model.weights", "run/hf")
    assert belongings(finished) == before


# `kielo export --to X` and the other verbs that write where a person says.


@pytest.mark.parametrize("aside", (".partial", ".replaced", ".old"))
def test_export_leaves_a_persons_folders_beside_it_alone(trained, here, aside):
    mine = trained / f"model{aside}"
    mine.mkdir()
    (mine / "mine.txt").write_text("the only copy")
    went_well(here(trained, "export", "run", "--to", "model"))
    assert [path.name for path in mine.iterdir()] == ["mine.txt"]


TAKEN = {
    "folder": "stage did not write or which was changed since",
    "file": "a file, but the export stage makes a folder",
    "dangling link": "a symbolic link to gone, which is no folder",
    "link to a file": "a symbolic link to text.txt, which is no folder",
    "other export": "exists already and is not this export",
    ".": "no name of a folder",
}


@pytest.mark.parametrize("kind", TAKEN)
def test_export_to_a_place_that_is_taken(trained, here, kind):
    to = trained / "model"
    if kind == "folder":
        to.mkdir()
        (to / "mine.txt").write_text("mine")
    elif kind == "file":
        to.write_text("mine")
    elif kind == "dangling link":
        to.symlink_to("gone")
    elif kind == "link to a file":
        to.symlink_to("text.txt")
    elif kind == "other export":
        went_well(here(trained, "export", "run/train/checkpoints/step_00000015", "--to", "model"))
    before = belongings(trained)
    refused(
        here(trained, "export", "run", "--to", "." if kind == "." else "model"),
        TAKEN[kind],
        "--to ." if kind == "." else "model",
    )
    assert belongings(trained) == before


@pytest.mark.parametrize("is_link", (False, True))
def test_export_into_an_empty_folder(trained, here, is_link):
    (trained / "scratch").mkdir()
    if is_link:
        (trained / "model").symlink_to("scratch")
    to = "model" if is_link else "scratch"
    went_well(here(trained, "export", "run", "--to", to))
    assert (trained / "scratch" / "model.safetensors").is_file() and (
        trained / "model"
    ).is_symlink() == is_link
    went_well(here(trained, "export", "run", "--to", to))


# Behind a folder that is not there, `..` leads nowhere until Kielo makes the folder. Words → where they lead.
AROUND = {
    "export": (("export", "run", "--to", "{to}"), "which Kielo's export stage did not write"),
    "average": (("checkpoint", "average", "{steps}", "--to", "{to}"), "Fix: name a new folder"),
    "run": (("run", "tiny.toml", "--set", "folder={to}", "--to", "corpus"), "corpus"),
    "site": (("site", "karolina", "--to", "{to}"), "site.sh"),
}


@pytest.mark.parametrize("way", ("nope/../mine", "nope/no/../../mine", "run/gone/../../mine", "link/../mine"))
@pytest.mark.parametrize("verb", AROUND)
def test_a_persons_folder_is_the_same_by_any_way(verb, way, trained, here):
    """Nothing of it is replaced, also where a part of the way is not there, or is a link to another place."""
    words, reason = AROUND[verb]
    mine = trained / "mine"
    (mine / "corpus" if verb == "run" else mine).mkdir(parents=True)
    for name in ("corpus/manifest.json",) if verb == "run" else ("model.safetensors", "site.sh"):
        (mine / name).write_text("mine")
    (trained / "deep" / "inside").mkdir(parents=True)
    (trained / "link").symlink_to("deep/inside")
    if way.startswith("link"):  # leads to deep/mine
        mine.rename(trained / "deep" / "mine")
    before = belongings(trained)
    steps = sorted(map(str, (trained / "run" / "train" / "checkpoints").glob("step_*")))
    given = [word.format(to=way) for word in words if word != "{steps}"]
    if "{steps}" in words:
        given[2:2] = steps
    refused(here(trained, *given), " ", reason)
    assert belongings(trained) == before


@pytest.mark.parametrize("kind", ("folder", "empty folder", "file", "dangling link"))
def test_average_to_a_place_that_is_taken(trained, here, kind):
    to = trained / "mean"
    if "folder" in kind:
        to.mkdir()
    if kind == "folder":
        (to / "mine.txt").write_text("mine")
    if kind == "file":
        to.write_text("mine")
    if kind == "dangling link":
        to.symlink_to("gone")
    before = belongings(trained)
    steps = sorted((trained / "run" / "train" / "checkpoints").glob("step_*"))
    refused(
        here(trained, "checkpoint", "average", *steps, "--to", "mean"),
        "Fix: name a new folder",
        "mean",
    )
    assert belongings(trained) == before


@pytest.mark.parametrize("aside", (".replaced", ".partial", ".removed"))
def test_average_leaves_a_persons_folders_beside_it_alone(trained, here, aside):
    mine = trained / f"mean{aside}"
    mine.mkdir()
    (mine / "mine.txt").write_text("the only copy")
    steps = sorted((trained / "run" / "train" / "checkpoints").glob("step_*"))
    went_well(here(trained, "checkpoint", "average", *steps, "--to", "mean"))
    assert (mine / "mine.txt").read_text() == "the only copy"


@pytest.mark.parametrize("kind", ("folder", "file", "dangling link"))
def test_round_trip_keeps_nothing_over_what_is_there(finished, here, kind):
    keep = finished / "keep"
    if kind == "folder":
        keep.mkdir()
    if kind == "file":
        keep.write_text("mine")
    if kind == "dangling link":
        keep.symlink_to("gone")
    before = belongings(finished)
    refused(
        here(finished, "verify", "round-trip", "run/hf", "--keep", "keep"),
        "exists already. Fix: --keep with a new folder",
        "keep",
    )
    assert belongings(finished) == before


@pytest.mark.parametrize("kind", ("file", "dangling link"))
def test_a_copied_recipe_replaces_nothing(workplace, here, kind):
    target = workplace / "demo_estonian.toml"
    target.write_text("mine") if kind == "file" else target.symlink_to("gone.toml")
    before = belongings(workplace)
    refused(
        here(workplace, "recipes", "--copy", "demo_estonian"),
        "exists already, and nothing was written",
        "demo_estonian.toml",
    )
    assert belongings(workplace) == before


@pytest.mark.parametrize("is_ours", (False, True))
def test_a_machines_card_replaces_only_one_of_ours(trained, here, is_ours):
    """Twice the same card is fine; another file, or a card that a person changed, stays."""
    metrics = trained / "run" / "train" / "metrics.jsonl"
    row = next(row for line in metrics.read_text().splitlines() if "loss" in (row := json.loads(line)))
    metrics.write_text("".join(json.dumps(row | {"step": step}) + "\n" for step in range(1, 21)))
    measure = ("plan", "calibrate", "run/train/metrics.jsonl", "--to", "card.toml")
    card = trained / "card.toml"
    if not is_ours:
        card.write_text("[mine]\n")
        refused(here(trained, *measure), "exists, and Kielo did not write it", "card.toml")
        assert card.read_text() == "[mine]\n"
        return
    went_well(here(trained, *measure))
    went_well(here(trained, *measure))
    card.write_text(card.read_text().replace("\n", "\n# as I know it\n", 1))
    changed = card.read_text()
    refused(here(trained, *measure), "exists, and Kielo did not write it", "card.toml")
    assert card.read_text() == changed


def test_a_plot_replaces_only_one_of_ours(workplace, here):
    plot = (
        "plan",
        "compare",
        "estonian_llama31_70b",
        "tp8pp4",
        "tp8pp8",
        "--nodes",
        "16",
        "--plot",
        "pictures",
    )
    went_well(here(workplace, *plot))
    went_well(here(workplace, *plot))
    picture = workplace / "pictures" / "compared.svg"
    assert picture.read_text().startswith("<?xml")
    picture.write_text("<svg>mine</svg>\n")
    refused(here(workplace, *plot), "exists, and Kielo did not write it", "compared.svg")
    assert picture.read_text() == "<svg>mine</svg>\n"


# What the report and the planner write into the run folder.


@pytest.mark.parametrize("name", ("report.html", "summary.json"))
@pytest.mark.parametrize("text", ("mine\n", "[]", '{"mine": 1}'))
def test_the_report_replaces_no_file_of_a_person(finished, here, name, text):
    (finished / "run" / name).write_text(text)
    before = belongings(finished)
    refused(here(finished, *only("report")), "exists, and Kielo did not write it", name, "move it away")
    assert belongings(finished) == before


def test_a_model_card_that_a_person_changed_stays(finished, here):
    card = finished / "run" / "hf" / "README.md"
    card.write_text(card.read_text() + "\n## What we learned\n")
    changed = card.read_text()
    outcome = went_well(here(finished, *only("report")))
    assert card.read_text() == changed and "README.md was changed by hand" in outcome.told
    make_stale(finished / "run" / "hf")
    refused(here(finished, *only("export")), "stage did not write or which was changed since", "README.md")
    assert card.read_text() == changed


def test_a_plan_replaces_no_file_of_a_person(packed, here):
    (packed / "run" / "resolved.toml").write_text("[mine]\n")
    refused(
        here(packed, "plan", "resolve", "tiny.toml"),
        "exists, and Kielo did not write it",
        "resolved.toml",
    )
    refused(here(packed, "train", "tiny.toml"), "exists, and Kielo did not write it", "resolved.toml")
    assert (packed / "run" / "resolved.toml").read_text() == "[mine]\n"


def test_a_certificate_of_layouts_replaces_no_file_of_a_person(packed, here):
    (packed / "run" / "layouts").mkdir()
    (packed / "run" / "layouts" / "layouts.json").write_text('{"mine": 1}')
    refused(
        here(packed, "verify", "layouts", "tiny.toml", "--case", "shard2"),
        "exists, and Kielo did not write it",
        "layouts.json",
    )
    assert (packed / "run" / "layouts" / "layouts.json").read_text() == '{"mine": 1}'


# Links to another disk.


@EVERY_STAGE
def test_a_stage_folder_that_is_a_link_stays_one(finished, here, stage):
    """Twice: where it leads is empty, and holds the stage.
    Nothing lies beside the link, and nothing is to do then.
    """
    folder = in_place_of(finished, stage)
    place = finished / "scratch" / "my data"
    place.mkdir(parents=True)
    folder.symlink_to(place)
    names = sorted(path.name for path in (finished / "run").iterdir())
    for _ in range(2):
        went_well(here(finished, *only(stage)))
        assert folder.is_symlink() and (place / "manifest.json").is_file()
        assert sorted(path.name for path in (finished / "run").iterdir()) == names
        assert [path.name for path in place.parent.iterdir()] == ["my data"]
        if stage != "verify":
            assert "nothing to do" in went_well(here(finished, *only(stage))).told
        make_stale(place)


@EVERY_STAGE
@pytest.mark.parametrize("kind", ("dangling", "file", "itself"))
def test_a_link_that_leads_to_no_folder(finished, here, stage, kind):
    folder = in_place_of(finished, stage)
    folder.symlink_to({"dangling": "/gone/for/good", "file": "../tiny.toml", "itself": folder.name}[kind])
    told = "Too many levels of symbolic links" if kind == "itself" else "which is no folder. Is its disk"
    before = belongings(finished)
    refused(here(finished, *only(stage)), told, f"run/{folder.name}")
    assert belongings(finished) == before


@pytest.mark.parametrize("stage", ("corpus", "pack", "train", "report"))
def test_a_run_folder_that_is_a_link_works(finished, here, stage):
    (finished / "run").rename(finished / "scratch")
    (finished / "run").symlink_to("scratch")
    if stage in STAGES:
        make_stale(finished / "run" / STAGES[stage])
    went_well(here(finished, *only(stage)))
    assert (finished / "run").is_symlink()


RUN_VERBS = pytest.mark.parametrize(
    "verb", (("run", "tiny.toml"), ("train", "tiny.toml"), ("plan", "resolve", "tiny.toml"),
        ("evaluate", "tiny.toml"),
             ("verify", "parity", "tiny.toml"), ("data", "tiny.toml", "--step", "1")),
             ids=lambda verb: verb[0],
)  # fmt: skip


@RUN_VERBS
@pytest.mark.parametrize("kind", ("file", "dangling", "below a file", "link to itself"))
def test_a_run_folder_that_is_no_folder(workplace, here, verb, kind):
    folder = "run"
    if kind == "file":
        (workplace / "run").write_text("mine")
    elif kind == "below a file":
        folder = "text.txt/run"
    else:
        (workplace / "run").symlink_to("/gone/for/good" if kind == "dangling" else "run")
    told = "is a file. Fix: move it" if "file" in kind else "which does not exist. Is its disk mounted?"
    before = belongings(workplace)
    refused(here(workplace, *verb, "--set", f"folder={folder}"), told, "folder = ", folder)
    assert belongings(workplace) == before


# A disk that refuses.


@contextmanager
def files_up_to(num_bytes: int):
    """No file of this process grows beyond so much (ulimit -f)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@EVERY_STAGE
def test_a_file_larger_than_allowed(finished, here, stage):
    folder = finished / "run" / STAGES[stage]
    make_stale(folder)
    before = belongings(folder)
    with files_up_to(1000):
        outcome = here(finished, *only(stage), "--set", "evaluate.sample_tokens=200")
    told = (
        "was not written: File too large" if stage != "export" else "the export was not finished: disk full"
    )
    refused(outcome, told, STAGES[stage])
    assert belongings(folder) == before
    went_well(here(finished, *only(stage)))


@EVERY_STAGE
@pytest.mark.parametrize(
    "number", (errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.EDQUOT), ids=errno.errorcode.get
)
def test_a_disk_that_refuses_the_new_folder(finished, here, monkeypatch, stage, number):
    folder = finished / "run" / STAGES[stage]
    make_stale(folder)
    before = belongings(folder)
    mkdir = os.mkdir

    def refusing(path, *arguments, **keywords):
        if ".kielo" in str(path) or ".partial" in str(path):
            raise OSError(number, os.strerror(number), str(path))
        mkdir(path, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", refusing)
        message = refused(
            here(finished, *only(stage)),
            "was not written" if stage != "export" else "was not finished",
            STAGES[stage],
        )
    assert os.strerror(number) in message or "disk full" in message
    assert belongings(folder) == before


@EVERY_STAGE
def test_a_disk_that_fails_when_the_folder_takes_its_name(finished, here, monkeypatch, stage):
    """The content before is still in its place."""
    folder = finished / "run" / STAGES[stage]
    make_stale(folder)
    before = belongings(folder)
    replace = os.replace

    def failing(source, target):
        if Path(target).name == STAGES[stage] and not str(source).endswith("old"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(target))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        refused(here(finished, *only(stage)), os.strerror(errno.EIO), STAGES[stage])
    assert belongings(folder) == before
    went_well(here(finished, *only(stage)))


def mounted(workplace: Path, how: str, *arguments: str) -> Outcome:
    """`kielo` in a process with file systems of its own; `how` is a line of shell that mounts them."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode
    ):
        pytest.skip("no file system may be mounted here")
    script = f'{{ {how}; }} >/dev/null 2>&1 || exit 77; exec "$0" -m kielo "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, sys.executable, *arguments]
    outcome = subprocess.run(command, cwd=workplace, capture_output=True, text=True, timeout=120)
    if outcome.returncode == 77:
        pytest.skip("no file system may be mounted here")
    return Outcome(outcome.returncode, outcome.stdout, outcome.stderr)


@DATA_STAGES
def test_a_disk_that_is_full(finished, stage):
    folder = finished / "run" / STAGES[stage]
    make_stale(folder)
    before = belongings(folder)
    folder.rename(finished / "kept")
    folder.symlink_to("../small/stage")
    (finished / "small").mkdir()
    fill = (
        "mount -t tmpfs -o size=8k tmpfs small && mkdir small/stage && "
        "{ head -c 8k /dev/zero > small/filler || true; }"
    )
    # Parts of the tokens are written first.
    place = "small/stage.parts/00000" if stage == "pack" else f"run/{STAGES[stage]}"
    refused(mounted(finished, fill, *only(stage)), "No space left on device", place, "free some space")
    assert belongings(finished / "kept") == before


@pytest.mark.parametrize("stage", ("corpus", "tokenizer", "pack", "report"))
def test_a_disk_that_is_read_only(finished, stage):
    if stage in STAGES:
        make_stale(finished / "run" / STAGES[stage])
    before = belongings(finished / "run")
    outcome = mounted(finished, "mount --bind run run && mount -o remount,bind,ro run", *only(stage))
    refused(outcome, "ead-only file system", "run")
    assert belongings(finished / "run") == before


@pytest.mark.parametrize("stage", ("corpus", "pack"))
def test_a_stage_folder_that_is_a_mount_is_refused_before_the_work(finished, stage):
    """It cannot be renamed, and nothing can be renamed to it."""
    make_stale(finished / "run" / STAGES[stage])
    folder = f"run/{STAGES[stage]}"
    mount = f"cp -r {folder} copy && mount -t tmpfs tmpfs {folder} && cp -r copy/. {folder}"
    refused(mounted(finished, mount, *only(stage)), "the root of a file system", folder)


def test_a_run_folder_that_vanishes_during_a_stage(workplace, here, monkeypatch):
    from kielo.corpus import corpus_stage

    write_funnel = corpus_stage.write_json

    def vanishing(*arguments):
        write_funnel(*arguments)
        shutil.rmtree(workplace / "run")

    monkeypatch.setattr(corpus_stage, "write_json", vanishing)
    refused(
        here(workplace, "run", "tiny.toml", "--to", "corpus"),
        "was not written: No such file or directory",
        "run/corpus",
    )


def test_a_manifest_that_cannot_be_read(packed, here):
    """A folder has its name, as some archivers leave them."""
    manifest = packed / "run" / "corpus" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    refused(here(packed, *only("corpus")), "cannot be read (Is a directory)", "manifest.json")
