"""`kielo train`: which ranks are started with what, what is printed, and the exit code. None trains here."""

import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.attempt_files import REFUSAL_FILE, Outcome
from kielo.artifact.manifest import write_stage
from kielo.cli.main import main
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.stages.attempt import is_done, train_here, train_on_ranks
from kielo.train.start_ranks import RESTARTS
from tests.cli.test_run import write_recipe


def outcome(what: str = "finished", code: int = 0, message: str = "") -> Outcome:
    return Outcome(outcome=what, step=3, tokens=384, exit_code=code, message=message)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for both ways of training: `here` and `on_ranks` have what each was given."""
    noted = SimpleNamespace(here=[], on_ranks=[], outcome=outcome(), said="a word of the training")

    def train(kind: list, *given: Any) -> Outcome:
        print(noted.said)
        kind.append(given[1:])
        return noted.outcome

    monkeypatch.setattr("kielo.cli.train.train_here", lambda *given: train(noted.here, *given))
    monkeypatch.setattr("kielo.cli.train.train_on_ranks", lambda *given: train(noted.on_ranks, *given))
    return noted


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """The variables that torchrun sets."""
    words = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "here", "MASTER_PORT": 9}
    for name, value in words.items():
        monkeypatch.setenv(name, str(value))


def train(recipe: Path, *words: str) -> int:
    return main(["train", str(recipe), *words])


HERE = {"": (0, None), "--ranks 1": (0, None), "--profile 4": (4, None), "--profile": (10, None),
        "--measure 2": (0, 2), "--profile 1 --profile-ranks 0": (1, None)}  # fmt: skip


@pytest.mark.parametrize("words", HERE)
def test_one_rank_trains_in_this_process(words, asked, recipe) -> None:
    assert train(recipe, *words.split()) == 0
    assert asked.here == [HERE[words]] and asked.on_ranks == []


RANKS = {
    "--ranks 2": ([], 600, None),
    "--ranks 2 --restarts 0 --shutdown-seconds 5": ([], 5, 0),
    "--ranks 2 --profile 4 --profile-ranks 0,1": (["--profile", "4", "--profile-ranks", "0,1"], 600, None),
    "--ranks 2 --profile 4 --profile-ranks 1": (["--profile", "4", "--profile-ranks", "1"], 600, None),
    "--ranks 2 --measure 1": (["--measure", "1"], 600, None),
}  # fmt: skip


@pytest.mark.parametrize("words", RANKS)
def test_several_ranks_are_started(words, asked, recipe) -> None:
    assert train(recipe, *words.split(), "--set", "seed=3") == 0
    assert asked.on_ranks == [(str(recipe), ["seed=3"], 2, *RANKS[words])] and asked.here == []


def test_a_rank_of_a_launcher_starts_no_others(asked, recipe, monkeypatch) -> None:
    """Only ranks that were chosen record a profile."""
    as_rank(monkeypatch, 2, 4)
    for words, steps in {"--profile-ranks 2,3": 7, "--profile-ranks 0,1": 0, "": 7}.items():
        assert train(recipe, "--ranks", "4", "--profile", "7", *words.split()) == 0
        assert asked.here.pop() == (steps, None) and asked.on_ranks == []


REFUSED = {
    "--ranks 0": "--ranks 0: give 1 or more",
    "--ranks 2 --shutdown-seconds -1": "--shutdown-seconds -1: give 0 or more",
    "--ranks 2 --restarts -1": "--restarts -1: give 0 or more, and --ranks of 2 or more",
    "--ranks 1 --restarts 2": "--restarts 2: give 0 or more, and --ranks of 2 or more",
    "--restarts 0": "--restarts 0: give 0 or more, and --ranks of 2 or more",
    "--profile 0": "--profile 0: give 1 or more",
    "--measure 0": "--measure 0: give 1 or more",
    "--profile-ranks 0": "--profile-ranks 0: give --profile, and ranks from 0 to 0, as 0,1",
    "--profile 2 --profile-ranks 1": "--profile-ranks 1: give --profile, and ranks from 0 to 0, as 0,1",
    "--ranks 3 --profile 2 --profile-ranks 0,3": "--profile-ranks 0,3: give --profile, and ranks from 0 "
    "to 2, as 0,1",
    "--ranks 3 --profile 2 --profile-ranks a": "--profile-ranks a: give --profile, and ranks from 0 "
    "to 2, as 0,1",
}  # fmt: skip


def test_numbers_that_cannot_work_are_refused(asked, recipe, capsys) -> None:
    for words, said in REFUSED.items():
        assert train(recipe, *words.split()) == 1
        assert capsys.readouterr() == ("", f"kielo: {said}\n"), words
    assert asked.here == asked.on_ranks == []


@pytest.mark.parametrize(("ended", "out", "err"), [
    (outcome(), "", ""),
    (outcome(message="nothing to do"), "nothing to do\n", ""),
    (outcome("requeue", 75, "saved"), "saved\n", ""),
    (outcome("failed", 1, "no disk"), "", "kielo: training failed: no disk\n"),
    (outcome("hung", 76, "rank 1"), "", "kielo: training failed: rank 1\n"),
])  # fmt: skip
def test_an_outcome_is_told_and_is_the_exit_code(ended, out, err, asked, recipe, capsys) -> None:
    """As JSON nothing else is on stdout."""
    asked.outcome = ended
    assert train(recipe) == ended.exit_code
    assert capsys.readouterr() == (f"{asked.said}\n{out}", err)
    assert train(recipe, "--ranks", "2", "--json") == ended.exit_code
    said = capsys.readouterr()
    assert json.loads(said.out) == ended.content() and said.err == f"{asked.said}\n"


def test_one_of_several_ranks_tells_the_outcome(asked, recipe, capsys, monkeypatch, tmp_path) -> None:
    """The first; none below a parent that tells it."""
    asked.outcome = outcome(message="nothing to do")
    for rank, times in ((0, 1), (1, 0)):
        as_rank(monkeypatch, rank, 2)
        assert train(recipe) == 0
        assert capsys.readouterr().out.count("nothing to do") == times
    as_rank(monkeypatch, 0, 2)
    monkeypatch.setenv(REFUSAL_FILE, str(tmp_path / "refusal"))
    assert train(recipe) == 0
    assert "nothing to do" not in capsys.readouterr().out


def test_one_of_several_ranks_warns_of_keys_that_weights_replace(
    asked, recipe, capsys, monkeypatch, tmp_path
) -> None:
    monkeypatch.setattr("kielo.stages.attempt.overridden_in_words", lambda model: "hidden_size = 9")
    assert train(recipe) == 0
    assert capsys.readouterr().err == "warning: hidden_size = 9\n"
    as_rank(monkeypatch, 1, 2)
    assert train(recipe) == 0 and capsys.readouterr().err == ""
    as_rank(monkeypatch, 0, 2)
    assert train(recipe) == 0 and capsys.readouterr().err != ""
    monkeypatch.setenv(REFUSAL_FILE, str(tmp_path / "refusal"))
    assert train(recipe) == 0 and capsys.readouterr().err == ""


# --- What a rank does, and the parent of ranks


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the resolved run and its training. asked: what each of them was given."""
    train = SimpleNamespace(precision="bf16")
    phases = [SimpleNamespace(packing="one_stream", sequence_length=16, mixture={"a": 1.0}),
              SimpleNamespace(packing="best_fit", sequence_length=32, mixture={"b": 1.0})]  # fmt: skip
    of = SimpleNamespace(
        identity=SimpleNamespace(train=train, phases=phases),
        placement=SimpleNamespace(tokens_folder="tokens"), asked=[], uneven=[], memory="", outcome=outcome(),
    )  # fmt: skip

    def resolve(recipe: Any, folder: Any, ranks: int, device: str, name: Any = None, **_: Any) -> Any:
        of.asked.append((ranks, device, name))
        return of

    def note(kind: str) -> Any:
        def noted(resolved: Any, *given: Any, **named: Any) -> Outcome:
            of.asked.append((kind, *given, *named.values()))
            return of.outcome

        return noted

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("kielo.stages.attempt.resolve", resolve)
    chosen = "kielo.stages.attempt.chosen_precision"
    monkeypatch.setattr(chosen, lambda recipe, *_: ("bf16", f"{recipe.name} has AMX"))
    monkeypatch.setattr("kielo.stages.attempt.uneven_steps", lambda _: of.uneven)
    for file in ("cli.train", "stages.attempt"):
        monkeypatch.setattr(f"kielo.{file}.memory_warning", lambda *_: of.memory)
    monkeypatch.setattr("kielo.stages.attempt.with_expectation", lambda resolved, recipe: resolved)
    monkeypatch.setattr("kielo.train.run.train", note("train"))
    monkeypatch.setattr("kielo.train.run.measure", note("measure"))
    return of


def test_a_rank_resolves_the_recipe_for_its_world_and_trains(resolved, recipe, capsys, monkeypatch) -> None:
    """The first of the ranks says what was chosen, and warns."""
    resolved.uneven, resolved.memory = ["3 or 4 sequences", "then 5"], "too little memory"
    told = "batches: 3 or 4 sequences\nbatches: then 5\n"
    assert train(recipe, "--profile", "6") == 0
    assert resolved.asked == [(1, "cpu", None), ("train", 6)]
    assert capsys.readouterr() == (told, "warning: too little memory\n")  # its precision is the recipe's
    recipe.write_text(recipe.read_text().replace('precision = "fp32"', ""), encoding="utf-8")
    assert train(recipe) == 0
    assert capsys.readouterr().out == f"precision: bf16, for tiny has AMX\n{told}"
    as_rank(monkeypatch, 1, 2)
    resolved.asked.clear()
    assert train(recipe, "--measure", "2") == 0
    assert resolved.asked == [(2, "cpu", None), ("measure", 2, 0)]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("error", "is_written"), [
    (KieloError("no such source"), True),
    (OSError(errno.ENOSPC, "full"), True),
    (OSError(errno.EACCES, "locked"), True),
    (OSError(errno.EIO, "a device"), False),
])  # fmt: skip
def test_a_refusal_is_written_down_for_the_parent(error, is_written, resolved, recipe, tmp_path, monkeypatch):
    """A failure that may go away is not: the parent starts the ranks again."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("kielo.train.run.train", fail)
    read = read_recipe(str(recipe)).recipe
    with pytest.raises(type(error)):
        train_here(read)
    assert not (tmp_path / "refusal").exists()
    monkeypatch.setenv(REFUSAL_FILE, str(tmp_path / "refusal"))
    with pytest.raises(type(error)):
        train_here(read)
    assert (tmp_path / "refusal").exists() == is_written
    if is_written:
        assert str(error.args[-1]) in (tmp_path / "refusal").read_text()


def test_ranks_of_a_node_ask_the_hub_for_weights_once(resolved, recipe, monkeypatch) -> None:
    """Within four hours, before the recipe is resolved."""
    asked = []
    monkeypatch.setattr("kielo.stages.attempt.resolve_weights", lambda weights: f"here: {weights}")
    monkeypatch.setattr("kielo.ranks.world.meet", lambda place, seconds: (place.size, seconds))
    once = "kielo.ranks.world.once_a_node"
    monkeypatch.setattr(
        once, lambda what, find, *rest: asked.append((what, find(), len(resolved.asked), *rest))
    )
    read = read_recipe(str(recipe)).recipe
    model = read.model.model_copy(update={"weights": "hf:a/b"})
    train_here(read.model_copy(update={"model": model}))
    ((what, found, before, place, (size, _), limit),) = asked
    assert (what, found, before, size, limit) == ("find hf:a/b", "here: hf:a/b", 0, 1, 14_400)
    assert place.rank == 0 and resolved.asked[-1] == ("train", 0)
    asked.clear()
    train_here(read)
    assert asked == []


@pytest.mark.parametrize("is_json", [False, True])
def test_the_parent_hands_its_settings_to_the_ranks(is_json, recipe, monkeypatch) -> None:
    given: list[tuple] = []
    start = "kielo.stages.attempt.start_ranks"
    monkeypatch.setattr(start, lambda recipe, *rest: given.append(rest) or outcome())
    if is_json:
        monkeypatch.setattr(sys, "stdout", sys.stderr)
    read = read_recipe(str(recipe)).recipe
    assert train_on_ranks(read, "r", ["a=1", "b=2"], 3, ["--measure", "4"], 7, 0) == outcome()
    assert train_on_ranks(read, "r", [], 2) == outcome()
    sets = ["--set", "a=1", "--set", "b=2"]
    assert given == [("r", [*sets, "--measure", "4"], 3, 7, is_json, 0), ("r", [], 2, 600, is_json, RESTARTS)]


def test_a_finished_run_starts_no_rank(resolved, recipe, tmp_path, monkeypatch) -> None:
    """It is known from its files, for any number of ranks, with the devices that it was trained on.

    A run is not finished without these files, and if they cannot be read; a measurement takes steps anyway.
    """
    placement = SimpleNamespace(device="cuda", accelerator="h100")
    ends = SimpleNamespace(is_finished=True)
    monkeypatch.setattr("kielo.stages.attempt.start_ranks", lambda *_: outcome(message="started"))
    monkeypatch.setattr("kielo.stages.attempt.read", lambda path: SimpleNamespace(placement=placement))
    monkeypatch.setattr("kielo.stages.attempt.is_finished", lambda _: ends.is_finished)
    said = {id(resolved): outcome(message="nothing to do")}
    monkeypatch.setattr("kielo.stages.attempt.nothing_to_do", lambda of: said[id(of)])
    read = read_recipe(str(recipe)).recipe

    def both() -> tuple[str, bool]:
        return train_on_ranks(read, "r", [], 2).message, is_done(read, 2)

    assert both() == ("started", False) and resolved.asked == []
    with write_stage(tmp_path / "run" / "train", "train", 1, {}, {}):
        pass
    assert both() == ("started", False) and resolved.asked == []
    (tmp_path / "run" / "resolved.toml").touch()
    assert both() == ("nothing to do", True) and resolved.asked == [(2, "cuda", "h100")] * 2
    assert train_on_ranks(read, "r", [], 2, ["--measure", "1"]).message == "started"
    assert train_here(read).message == "nothing to do"
    resolved.outcome = outcome(message="measured")
    assert train_here(read, 0, 1).message == "measured"
    ends.is_finished = False
    assert both() == ("started", False)

    def refuse(*_: object) -> None:
        raise KieloError("it cannot be read")

    ends.is_finished = True
    monkeypatch.setattr("kielo.stages.attempt.read", refuse)
    assert both() == ("started", False)


FOUND = {
    "device": "cuda", "accelerator": "h100", "ranks": 8, "precision": "bf16", "compile": True,
    "steps": 12_345, "tokens": 99, "goes_on_after_step": 1234, "micro_batch_sequences": 4,
    "micro_batches_per_step": 5, "peak_bytes": 61_250_000_000, "usable_bytes": 72_340_000_000,
    "first_batch": {"sequences": 20, "sequence_length": 4096, "counted_tokens": 81_900,
                    "largest_token": 128_000, "vocabulary": 128_256},
}  # fmt: skip


def test_a_dry_run_tells_what_would_be_trained(resolved, recipe, capsys, monkeypatch) -> None:
    """On the ranks that are asked for or those of a launcher, of which the first alone tells it."""
    overview = SimpleNamespace(rows=lambda: [("model", "llama")])
    row = SimpleNamespace(sentence=lambda: "b: filled", source="b", sequence_length=32)
    others = [SimpleNamespace(source=name, sequence_length=length) for name, length in (("b", 16), ("a", 32))]
    monkeypatch.setattr("kielo.cli.train.overview_of_run", lambda identity: overview)
    monkeypatch.setattr("kielo.cli.train.packing_manifest", lambda folder: folder)
    monkeypatch.setattr("kielo.cli.train.packing_rows", lambda _: [row, *others])
    monkeypatch.setattr("kielo.cli.train.dry_run", lambda resolved: FOUND)
    resolved.memory = "it is tight"
    assert train(recipe, "--dry-run", "--ranks", "8") == 0
    assert resolved.asked == [(8, "cpu", None)]
    said = capsys.readouterr()
    assert said.out == (
        "model\tllama\npacking\tb: filled\ndevice\t8 × h100 (cuda)\n"
        "precision\tbf16: tiny has AMX, layers are compiled\n"
        "a rank's step\t5 micro-batches of 4 sequences\n"
        "memory\t61.25 GB at the peak of a rank; 72.3 GB are usable\n"
        "first batch\t20 sequences of 4,096, 81,900 tokens that count, the largest id 128,000 of 128,256\n"
        "begins\tafter step 1,234 of 12,345\n"
        "nothing was trained or written. To start: the same command without --dry-run\n"
    )
    assert said.err == "warning: it is tight\n"
    resolved.memory, resolved.identity.phases = "", resolved.identity.phases[:1]
    other = FOUND | {"compile": False, "usable_bytes": None}
    monkeypatch.setattr("kielo.cli.train.dry_run", lambda resolved: other)
    as_rank(monkeypatch, 0, 16)
    assert train(recipe, "--dry-run") == 0
    said = capsys.readouterr()
    assert resolved.asked[1:] == [(16, "cpu", None)] and said.err == "" and "packing" not in said.out
    assert (
        "\nprecision\tbf16: tiny has AMX\n" in said.out
        and "peak of a rank; its memory is the machine's\n" in said.out
    )
    assert train(recipe, "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out) == other | {"why_precision": "tiny has AMX"}
    as_rank(monkeypatch, 1, 16)
    assert train(recipe, "--dry-run") == 0 and capsys.readouterr() == ("", "")


def test_a_gpu_is_named_and_a_missing_compiler_is_told_once(resolved, recipe, capsys, monkeypatch) -> None:
    software = SimpleNamespace(missing_compiler="no C compiler", has_amx=False)
    monkeypatch.setattr("kielo.stages.attempt.installed", lambda device: software)
    assert train(recipe) == 0 and capsys.readouterr().err == ""  # no GPU: nothing is compiled anyway
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H100")
    monkeypatch.setattr("kielo.stages.attempt.settle_allocator", lambda settings: "expandable")
    assert train(recipe) == 0
    assert resolved.asked[-2] == (1, "cuda", "H100")
    said = "device memory: expandable\n", "warning: layers are not compiled; no C compiler\n"
    assert capsys.readouterr() == said
    assert train(recipe, "--set", "layout.compile=true") == 0
    assert capsys.readouterr().err == ""
    as_rank(monkeypatch, 1, 2)
    assert train(recipe) == 0 and capsys.readouterr() == ("", "")
