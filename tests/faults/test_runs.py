"""A run's own text, tokenizer and folder: a mismatch is refused, and everything that a run needs is kept."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kielo.verify.parity  # noqa: F401 - transformers and what it loads warn at first, and not in the middle of a case
from kielo.artifact.lease import HANDED_DOWN, held
from kielo.artifact.manifest import read_manifest
from kielo.artifact.token_shards import TokenShardWriter
from kielo.cli.main import main
from tests.faults.trial import Outcome, belongings, kielo, refused, start, went_well
from tests.started_ranks import run_ranks

EXPORT_NEWEST = ["export", "run", "--to", "mine"]
EXPORT_STEP = ["export", "run/train/checkpoints/step_00000015", "--to", "mine"]


def results(workplace: Path) -> dict[str, str]:
    """All but the cache of the sources' hashes, which is renewed where a folder was copied."""
    return {
        name: content
        for name, content in belongings(workplace).items()
        if not name.endswith("raw/.kielo-hashes.json")
    }


# --- the tokenizer and the tokens
# -------------------------------------------------------------------------------------


def swap_two_tokens(folder: Path) -> None:
    """Another tokenizer of the same size, to the byte: two of its tokens have each other's ids."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = (token for token, number in vocabulary.items() if number in (301, 302))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def another_end_of_text(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text(encoding="utf-8").replace("<|endoftext|>", "Ġ"), encoding="utf-8")


def made_of_another_text(folder: Path) -> None:
    """Finished and with a manifest of its own, as the tokenizer stage would leave it."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    swap_two_tokens(folder)
    manifest["inputs"]["corpus"] = "0" * 32
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


USERS_OF_THE_TOKENIZER = [
    ["train", "tiny.toml"], ["run", "tiny.toml", "--from", "train"], ["run", "tiny.toml", "--only", "verify"],
    ["run", "tiny.toml", "--only", "evaluate"], ["run", "tiny.toml", "--only", "export"],
    ["verify", "parity", "tiny.toml"],
    ["evaluate", "tiny.toml"], EXPORT_NEWEST, EXPORT_STEP, ["data", "tiny.toml", "--step", "3"],
]  # fmt: skip


@pytest.mark.parametrize("change", [swap_two_tokens, another_end_of_text, made_of_another_text])
@pytest.mark.parametrize("verb", USERS_OF_THE_TOKENIZER, ids=" ".join)
def test_another_tokenizer_than_the_tokens_is_refused(trained, here, verb, change):
    """Put in place of the run's own, whatever its size: no verb uses it, and nothing is written."""
    change(trained / "run" / "tokenizer")
    before = belongings(trained)
    refused(here(trained, *verb), "is not the tokenizer that made", "run/tokenizer")
    assert belongings(trained) == before


@pytest.mark.parametrize(
    "verb",
    [["train", "tiny.toml"], ["verify", "parity", "tiny.toml"], ["data", "tiny.toml", "--step", "3"]],
    ids=" ".join,
)
def test_a_tokenizer_of_which_nothing_is_known_is_refused(trained, here, verb):
    """Files without the stage's manifest; an export compares the files themselves."""
    (trained / "run" / "tokenizer" / "manifest.json").unlink()
    refused(
        here(trained, *verb),
        "this is a tokenizer without manifest.json",
        "run/tokenizer",
        "manifest.json",
    )
    went_well(here(trained, *EXPORT_NEWEST))


def test_a_finished_run_does_not_take_another_tokenizer(finished, here):
    """`kielo run` on a finished run: refused, and the export that there is stays."""
    made_of_another_text(finished / "run" / "tokenizer")
    before = results(finished)
    refused(
        here(finished, "run", "tiny.toml"),
        "would be made again (changed since it was made",
        "tokenizer",
        "step_00000020",
    )
    assert results(finished) == before


@pytest.mark.parametrize(
    "is_old", [False, True], ids=["checkpoint names it", "checkpoint of an earlier version"]
)
@pytest.mark.parametrize("change", [None, swap_two_tokens, another_end_of_text, "chat template"])
def test_a_tokenizer_given_by_hand_is_the_tokens_own(trained, here, monkeypatch, change, is_old):
    """`kielo export --tokenizer DIR`: a copy will do, also with a chat template; another
    tokenizer will not.
    """
    given = shutil.copytree(trained / "run" / "tokenizer", trained / "given")
    if change == "chat template":
        (given / "chat_template.jinja").write_text("{{ messages }}")
        settings = json.loads((given / "tokenizer_config.json").read_text()) | {
            "chat_template": "{{ messages }}"
        }
        (given / "tokenizer_config.json").write_text(json.dumps(settings))
    elif change is not None:
        change(given)
    if is_old:
        from kielo.artifact import checkpoint_index

        whole, old = checkpoint_index.read_state, {"tokenizer_hash": None}
        monkeypatch.setattr(checkpoint_index, "read_state", lambda path: whole(path).model_copy(update=old))
    outcome = here(trained, *EXPORT_NEWEST, "--tokenizer", given)
    if callable(change):
        refused(outcome, "is not the tokenizer that made", str(given), "the run's own")
        assert not (trained / "mine").exists()
    else:
        went_well(outcome)
        assert (trained / "mine" / "chat_template.jinja").exists() == (change == "chat template")


def test_an_export_away_from_its_run_knows_the_tokenizer(trained, here):
    """A checkpoint alone, with its tokenizer and with another."""
    alone = shutil.copytree(
        trained / "run" / "train" / "checkpoints" / "step_00000020", trained / "alone" / "step_00000020"
    )
    given = shutil.copytree(trained / "run" / "tokenizer", trained / "given")
    shutil.rmtree(trained / "run")
    went_well(here(trained, "export", alone, "--to", "mine", "--tokenizer", given))
    swap_two_tokens(given)
    refused(
        here(trained, "export", alone, "--to", "other", "--tokenizer", given),
        "is not the tokenizer that made",
        "given",
        "tokenizer",
    )


@pytest.mark.parametrize(
    "verb", [["run", "tiny.toml", "--only", "verify"], ["evaluate", "tiny.toml"]], ids=" ".join
)
def test_other_tokens_than_the_checkpoints_are_refused(trained, here, verb):
    """The tokens folder of another run in place of this one's, with the tokenizer that belongs to it."""
    manifest = trained / "run" / "tokens" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 7}))
    refused(here(trained, *verb), "are other tokens")


# --- what a run trains on stays
# ---------------------------------------------------------------------------------------


def append_a_line(workplace: Path) -> None:
    with open(workplace / "text.txt", "a", encoding="utf-8") as text:
        text.write(
            "Üks uus rida, mis jõudis siia alles pärast seda, "
            "kui treening oli juba pooleli ja pool teed käidud.\n"
        )


CHANGES = {
    "one more line": (append_a_line, []),
    "another text": (
        lambda workplace: (workplace / "text.txt").write_text("Lugu jätkub siin teisiti. " * 9),
        [],
    ),
    "language": (None, ["--set", "language=fi"]),
    "corpus settings": (None, ["--set", "corpus.min_document_characters=200"]),
    "vocabulary": (None, ["--set", "tokenizer.vocab_size=300"]),
    "held-out share": (None, ["--set", "dataset.heldout_share=0.3"]),
    "corpus again": (None, ["--again", "corpus"]),
    "tokenizer again": (None, ["--again", "tokenizer"]),
    "pack again": (None, ["--again", "pack"]),
}


def half_trained(workplace: Path) -> Path:
    """Leaves the run as a kill after step 15 would."""
    train = workplace / "run" / "train"
    shutil.rmtree(train / "checkpoints" / "step_00000020")
    for name in ("manifest.json", "outcome.json"):
        (train / name).unlink()
    return workplace


@pytest.mark.parametrize("change", CHANGES)
def test_the_text_of_a_run_in_progress_is_not_replaced(trained, here, change):
    """Refused before any stage begins, with the fix;
    the run goes on afterwards as if nothing had been.
    """
    workplace = half_trained(trained)
    apply, arguments = CHANGES[change]
    if apply:
        apply(workplace)
    before = results(workplace / "run")
    refused(
        here(workplace, "run", "tiny.toml", *arguments),
        "which was trained on it. Nothing was changed",
        "step_00000015",
        "--from train",
        "--set name=",
    )
    assert results(workplace / "run") == before
    if apply:
        went_well(here(workplace, "run", "tiny.toml", "--from", "train", "--to", "train"))
        assert (workplace / "run" / "train" / "checkpoints" / "step_00000020").is_dir()


@pytest.mark.parametrize("change", ["one more line", "vocabulary", "held-out share"])
def test_without_checkpoints_a_changed_text_is_made_anew(packed, here, change):
    """The changed text is packed anew as ever; and another folder takes it beside a trained run."""
    apply, arguments = CHANGES[change]
    if apply:
        apply(packed)
    before = belongings(packed / "run" / "tokens")
    went_well(here(packed, "run", "tiny.toml", "--to", "pack", *arguments))
    assert belongings(packed / "run" / "tokens") != before


def test_what_is_missing_may_be_made_again(trained, here):
    """Tokens that were moved away: packed again from the same corpus, they are the same, and the
    run goes on.
    """
    before = read_manifest(trained / "run" / "tokens").files
    shutil.rmtree(trained / "run" / "tokens")
    went_well(here(trained, "run", "tiny.toml", "--to", "train"))
    assert read_manifest(trained / "run" / "tokens").files == before


# --- altered token files
# ----------------------------------------------------------------------------------------------


def flip_a_bit(path: Path, keeps_times: bool = False) -> None:
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    if keeps_times:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("keeps_times", [False, True], ids=["new times", "old times"])
@pytest.mark.parametrize("name", ["text.bin", "heldout.bin"])
def test_altered_tokens_are_not_trained_on(packed, here, name, keeps_times):
    """The checksum in the manifest is compared at first use, and no step is taken."""
    flip_a_bit(packed / "run" / "tokens" / name, keeps_times)
    refused(here(packed, "train", "tiny.toml"), "Its checksum differs from", name, "altered")
    assert not (packed / "run" / "train" / "checkpoints").exists()


@pytest.mark.parametrize("keeps_times", [False, True], ids=["new times", "old times"])
def test_tokens_altered_between_two_attempts_are_not_trained_on(trained, here, keeps_times):
    """They were sound once, and are read again because a time of change or status change moved."""
    workplace = half_trained(trained)
    flip_a_bit(workplace / "run" / "tokens" / "text.bin", keeps_times)
    before = belongings(workplace / "run" / "train" / "checkpoints")
    refused(here(workplace, "train", "tiny.toml"), "Its checksum differs from", "text.bin", "altered")
    assert belongings(workplace / "run" / "train" / "checkpoints") == before


def test_unchanged_tokens_are_read_once(trained, here, monkeypatch):
    """A job that is requeued reads none of them again."""
    from kielo.train import start_checks

    workplace, read = half_trained(trained), []
    whole = start_checks.hash_unless_stopped
    monkeypatch.setattr(
        start_checks,
        "hash_unless_stopped",
        lambda path, *rest: (read.append(path.name), whole(path, *rest))[1],
    )
    went_well(here(workplace, "train", "tiny.toml"))
    first = sorted(read)
    half_trained(workplace)
    read.clear()
    went_well(here(workplace, "train", "tiny.toml"))
    # A copied folder has other inodes, so the first attempt read all.
    assert first == ["heldout.bin", "heldout.idx", "text.bin", "text.idx"] and read == []


def check_on_rank(folder: Path) -> str:
    from kielo.checkpoint.agreement import Agreement
    from kielo.recipe.errors import KieloError
    from kielo.train.start_checks import TokenCheck
    from tests.train.tiny_run import resolve

    with TokenCheck(resolve(folder, shard=2), Agreement()) as tokens:
        try:
            tokens.finish()
        except KieloError as error:
            return str(error)
        return ""


def test_ranks_share_the_reading_and_are_refused_together(tmp_path):
    """Two ranks on an altered file that only one of them reads."""
    from tests.train.tiny_run import write_tokens

    write_tokens(tmp_path / "tokens")
    flip_a_bit(tmp_path / "tokens" / "news.bin")
    first, second = run_ranks(check_on_rank, 2, tmp_path)
    assert "news.bin" in first and first == second
    assert not (tmp_path / "train" / "tokens_verified.json").exists()


def shorter_pair(folder: Path) -> None:
    """A pair of files that fit each other, and not the manifest."""
    with TokenShardWriter(folder / "text", 320) as shard:
        shard.add(np.arange(1, 200))


def longer_data(folder: Path) -> None:
    with open(folder / "text.bin", "ab") as file:
        file.write(b"\0" * 64)


def missing_index(folder: Path) -> None:
    (folder / "text.idx").unlink()


READERS_OF_TOKENS = [
    ["train", "tiny.toml"], ["verify", "parity", "tiny.toml"], ["evaluate", "tiny.toml"],
    ["data", "tiny.toml", "--step", "3"],
]  # fmt: skip


@pytest.mark.parametrize("change", [shorter_pair, longer_data, missing_index])
@pytest.mark.parametrize("verb", READERS_OF_TOKENS, ids=" ".join)
def test_tokens_of_another_size_are_refused(trained, here, verb, change):
    """Every verb that reads them refuses before anything is computed with them."""
    workplace = half_trained(trained)
    change(workplace / "run" / "tokens")
    refused(here(workplace, *verb), ", but the stage wrote", "run/tokens/text")


def test_held_out_tokens_of_another_size_are_refused(trained, here):
    os.truncate(half_trained(trained) / "run" / "tokens" / "heldout.bin", 10)
    refused(here(trained, "train", "tiny.toml"), "it has 10 bytes, but the stage wrote", "heldout.bin")


def test_held_out_text_of_another_size_is_refused(trained, here):
    """`kielo evaluate` scores on the documents of the pack stage and no others."""
    os.truncate(trained / "run" / "tokens" / "heldout.jsonl.zst", 100)
    refused(
        here(trained, "evaluate", "tiny.toml"), "it has 100 bytes, but the stage wrote", "heldout.jsonl.zst"
    )


# --- one job at a time
# ------------------------------------------------------------------------------------------------

WRITERS = [
    ["run", "tiny.toml"], ["run", "tiny.toml", "--only", "corpus"], ["run", "tiny.toml", "--only", "report"],
    ["train", "tiny.toml"], ["verify", "parity", "tiny.toml"], ["evaluate", "tiny.toml"],
]  # fmt: skip
READERS = [
    ["show", "tiny.toml"], ["data", "tiny.toml", "--step", "3"], ["checkpoint", "list", "run"],
    ["checkpoint", "verify", "run"],
    ["checkpoint", "show", "run"], EXPORT_NEWEST, ["plan", "resolve", "tiny.toml", "--ranks", "2"],
]  # fmt: skip


@contextmanager
def as_another_job() -> Iterator[None]:
    """Takes this process, meanwhile, out of the lease that it holds."""
    token = os.environ.pop(HANDED_DOWN)
    try:
        yield
    finally:
        os.environ[HANDED_DOWN] = token


def leases(workplace: Path) -> list[str]:
    return sorted(path.relative_to(workplace).as_posix() for path in workplace.rglob("lease.*"))


@pytest.mark.parametrize("verb", WRITERS, ids=" ".join)
def test_a_second_job_is_refused_before_it_changes_a_file(finished, here, verb):
    """It names the process of the first and since when."""
    with held(finished / "run"), as_another_job():
        before = belongings(finished)
        refused(
            here(finished, *verb), "another job works in this folder", f"process {os.getpid()} on", "since 20"
        )
        assert belongings(finished) == before
    assert leases(finished) == []


def test_a_second_job_resolves_nothing_for_a_run_that_has_not_trained(packed, here):
    """Before the training `plan resolve` writes resolved.toml; afterwards it is a reader."""
    with held(packed / "run"), as_another_job():
        before = belongings(packed)
        refused(
            here(packed, "plan", "resolve", "tiny.toml", "--ranks", "2"), "another job works in this folder"
        )
        assert belongings(packed) == before


@pytest.mark.parametrize("verb", READERS, ids=" ".join)
def test_readers_need_no_lease(finished, here, verb):
    with held(finished / "run"), as_another_job():
        went_well(here(finished, *verb))


@pytest.mark.parametrize(("before", "stage", "folder"), [
    ("packed", "corpus", "corpus"), ("packed", "tokenizer", "tokenizer"), ("packed", "pack", "tokens"),
    ("finished", "verify", "verify"), ("finished", "evaluate", "evaluate"), ("finished", "export", "hf"),
])  # fmt: skip
def test_every_stage_is_under_the_lease(request, here, monkeypatch, before, stage, folder):
    """A second `kielo run` is refused while the stage writes; afterwards the folder is free."""
    workplace, codes_of_second, fsync = request.getfixturevalue(before), [], os.fsync

    def fsync_beside_a_second_job(descriptor: int) -> None:
        is_of_stage = f".{folder}.kielo" in os.readlink(f"/proc/self/fd/{descriptor}")
        if is_of_stage and not codes_of_second:
            with as_another_job():
                codes_of_second.append(main(["run", "tiny.toml", "--only", "report"]))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync_beside_a_second_job)
    outcome = went_well(here(workplace, "run", "tiny.toml", "--only", stage, "--again", stage))
    assert codes_of_second == [1] and "another job works in this folder" in outcome.err
    assert leases(workplace) == []


def test_training_goes_on_under_the_lease_of_its_run(packed, here):
    """The same process is not refused by the job that started it. (Ranks of their own: test_file_systems.)"""
    went_well(here(packed, "run", "tiny.toml", "--to", "train"))
    assert leases(packed) == []


@pytest.mark.parametrize("stage", ["corpus", "pack"])
def test_sigterm_in_a_stage_gives_the_lease_back(packed, here, monkeypatch, stage):
    """Exit code 75, nothing half-made, and the next job is not kept waiting."""
    from kielo.corpus import corpus_stage as corpus
    from kielo.tokenizer import piece_cache

    def work(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("not ended")

    monkeypatch.setattr(*{"corpus": (corpus, "describe_read"), "pack": (piece_cache, "encode")}[stage], work)
    before = results(packed / "run")
    outcome = went_well(here(packed, "run", "tiny.toml", "--again", stage), code=75)
    assert "the same command" in outcome.err
    after = results(packed / "run")
    # which says that it is to be made
    manifest = {"corpus": "corpus/manifest.json", "pack": "tokens/manifest.json"}[stage]
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    # Finished tasks of a corpus stay for the next job.
    assert {name for name in changed if not name.startswith(".corpus.tasks/")} <= {manifest}
    assert leases(packed) == []
    monkeypatch.undo()
    went_well(here(packed, "run", "tiny.toml", "--to", "pack"))
    assert not (packed / "run" / ".corpus.tasks").exists()


def killed_holder(folder: Path) -> None:
    script = "import os, sys; from kielo.artifact.lease import Lease; Lease.take(sys.argv[1]); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", script, str(folder)]).returncode == 9
    assert list(folder.glob("lease.*"))


@pytest.mark.parametrize("place", ["run", "run/train"], ids=["", "of an earlier version"])
@pytest.mark.parametrize(
    "verb", [["run", "tiny.toml", "--to", "train"], ["train", "tiny.toml"]], ids=" ".join
)
def test_a_killed_jobs_lease_keeps_nobody_out(trained, here, verb, place):
    killed_holder(trained / place)
    went_well(here(trained, *verb))
    assert leases(trained) == []


def test_a_live_job_of_an_earlier_version_is_seen(trained, here):
    """It holds its lease in run/train."""
    with held(trained / "run" / "train"):
        refused(here(trained, "run", "tiny.toml"), "another job works in this folder")


def test_two_runs_started_at_once_leave_one_sound_run(workplace):
    """One works, the other is refused or comes after it; then all is as one alone would have left it."""
    processes = [start(workplace, "run", "tiny.toml", "--to", "pack") for _ in range(2)]
    outcomes = [
        Outcome(process.returncode, out, err)
        for process in processes
        for out, err in [process.communicate(timeout=120)]
    ]
    assert 0 in [outcome.code for outcome in outcomes]
    for outcome in outcomes:
        went_well(outcome) if outcome.code == 0 else refused(outcome, "another job works in this folder")
    told = went_well(kielo(workplace, "run", "tiny.toml", "--to", "pack")).out
    assert told.count("nothing to do") == 3 and leases(workplace) == []


# --- what is current
# --------------------------------------------------------------------------------------------------


def rewritten(path: Path, through: Callable[[Path, bytes], object]) -> None:
    """The same size and times, other content."""
    status, content = path.stat(), path.read_bytes()
    position = content.rindex(b"k")
    through(path, content[:position] + b"p" + content[position + 1 :])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


def replace_file(path: Path, content: bytes) -> None:
    aside = path.with_suffix(".new")
    aside.write_bytes(content)
    aside.replace(path)


@pytest.mark.parametrize("through", [Path.write_bytes, replace_file], ids=["in place", "put in its place"])
def test_a_source_of_the_same_size_and_time_is_another(packed, here, through):
    """Other text under the same name, size and time of change is no reason for "nothing to do"."""
    assert "nothing to do" in went_well(here(packed, "run", "tiny.toml", "--to", "corpus")).out
    rewritten(packed / "text.txt", through)
    before = read_manifest(packed / "run" / "corpus").inputs
    went_well(here(packed, "run", "tiny.toml", "--to", "corpus"))
    assert read_manifest(packed / "run" / "corpus").inputs != before


@pytest.mark.parametrize(
    ("stage", "file"),
    [
        ("corpus", "corpus/funnel.json"),
        ("tokenizer", "tokenizer/measure.json"),
        ("pack", "tokens/text.ids.txt"),
    ],
)
def test_a_small_file_of_a_stage_that_was_altered_is_made_again(packed, here, stage, file):
    """The stage is made again although the file's size is the same."""
    path = packed / "run" / file
    whole = path.read_bytes()
    flip_a_bit(path, keeps_times=True)
    went_well(here(packed, "run", "tiny.toml", "--only", stage))
    assert path.read_bytes() == whole


@pytest.mark.parametrize("stage", ["corpus", "tokenizer", "pack"])
def test_again_makes_a_data_stage_anew(packed, here, stage):
    """Only that stage is made, where its result is the same as before."""
    folder = {"pack": "tokens"}.get(stage, stage)
    place = packed / "run" / folder
    before, inode = read_manifest(place).files, place.stat().st_ino
    told = went_well(here(packed, "run", "tiny.toml", "--to", "pack", "--again", stage)).out
    assert told.count("nothing to do") == 2 and f"{stage} makes it again" not in told
    assert read_manifest(place).files == before and place.stat().st_ino != inode


@pytest.mark.parametrize("stage", ["verify", "evaluate", "export"])
def test_again_makes_a_stage_after_training_anew(finished, here, stage):
    place = finished / "run" / {"export": "hf"}.get(stage, stage)
    inode = place.stat().st_ino
    told = went_well(here(finished, "run", "tiny.toml", "--only", stage, "--again", stage)).out
    assert "nothing to do" not in told and place.stat().st_ino != inode


@pytest.mark.parametrize(
    ("arguments", "reason", "named"),
    [
        (["--again", "train"], "invalid choice: 'train'", "--again"),
        (["--again", "report"], "invalid choice: 'report'", "--again"),
        (["--again", "corpse"], "invalid choice: 'corpse'", "--again"),
        (["--again", "corpus", "--from", "train"], "is not among the chosen stages", "--again corpus"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_again_of_a_stage_that_is_not_meant(packed, here, arguments, reason, named):
    before = belongings(packed)
    refused(here(packed, "run", "tiny.toml", *arguments), reason, named)
    assert belongings(packed) == before


# --- the recipe and what was packed
# -----------------------------------------------------------------------------------

OTHERWISE = {
    "dataset.heldout_share": "0.3",
    "language": "fi",
    "corpus.sources": "other.txt",
    "corpus.min_line_characters": "20",
    "corpus.deduplicate_lines": "false",
    "corpus.max_foreign_character_share": "0.5",
    "tokenizer.vocab_size": "300",
    "tokenizer.min_frequency": "3",
}


@pytest.mark.parametrize("key", OTHERWISE)
def test_a_recipe_that_would_have_made_another_text_does_not_train(packed, here, key):
    """`kielo train` alone: the key and both values are named; nothing was trained on held-out text."""
    refused(
        here(packed, "train", "tiny.toml", "--set", f"{key}={OTHERWISE[key]}"), "was packed by a recipe", key
    )
    assert not (packed / "run" / "train").exists()


@pytest.mark.parametrize(
    "verb",
    [["data", "tiny.toml", "--step", "3"], ["evaluate", "tiny.toml"], ["train", "tiny.toml", "--ranks", "2"]],
    ids=" ".join,
)
def test_other_verbs_ask_the_recipe_too(trained, here, verb):
    before = belongings(trained)
    refused(
        here(trained, *verb, "--set", "dataset.heldout_share=0.3"),
        "was packed by a recipe with other values",
        "dataset.heldout_share: was 0.2, is now 0.3",
    )
    assert belongings(trained) == before


@pytest.mark.parametrize("verb", [["train", "tiny.toml"], ["data", "tiny.toml", "--step", "3"]], ids=" ".join)
def test_a_corpus_made_anew_after_packing_is_noticed(packed, here, verb):
    """Training is refused; without the corpus, which a run may do without, it trains."""
    went_well(
        here(
            packed,
            "run",
            "tiny.toml",
            "--only",
            "corpus",
            "--set",
            "corpus.min_document_characters=200",
        )
    )
    refused(here(packed, *verb), "was made again after", "run/corpus", "--to pack")
    shutil.rmtree(packed / "run" / "corpus")
    went_well(here(packed, *verb))


# --- refusals write nothing
# -------------------------------------------------------------------------------------------

REFUSALS = {
    "identity": (["--set", "train.learning_rate=0.5"], "peak: was 0.001, is now 0.5", "learning_rate"),
    "name": (["--set", "name=other"], "name: was 'tiny', is now 'other'", "run/train"),
    "seed": (["--set", "seed=9"], "seed: was 1, is now 9", "run/train"),
    "layout": (["--set", "layout.tensor=4"], "does not make up 1 ranks", "layout.tensor"),
    "steps": (["--set", "train.tokens=5120"], "phases.1.steps: was 20, is now 40", "run/train"),
    "skipped steps": (["--set", "train.skip_steps=[[2,3]]"], "skipped different steps", "skip_steps"),
    "profile": (["--profile", "0"], "give 1 or more", "--profile"),
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(
    "make", [lambda workplace: workplace, half_trained], ids=["finished", "half-trained"]
)
def test_a_refused_command_changes_no_run(trained, here, make, refusal):
    """Outcome, plan, manifest and checkpoints are byte for byte what they were."""
    workplace = make(trained)
    before = belongings(workplace)
    arguments, reason, named = REFUSALS[refusal]
    refused(here(workplace, "train", "tiny.toml", *arguments), reason, named)
    assert belongings(workplace) == before


def test_ranks_that_are_refused_change_no_run(trained):
    """Two of them, by torchrun; the message is the parent's own last word."""
    before = belongings(trained)
    outcome = kielo(trained, "train", "tiny.toml", "--ranks", "2", "--set", "seed=9")
    refused(outcome, "contains a different run", "training failed", "seed: was 1, is now 9")
    assert belongings(trained) == before
