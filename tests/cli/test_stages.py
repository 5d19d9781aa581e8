"""`kielo run` around stages whose work is known: which are made, with what, and what is said of it."""

import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from kielo.artifact.manifest import MANIFEST_NAME, read_manifest, write_stage
from kielo.artifact.scores import Scores
from kielo.artifact.stage_counts import RowMap
from kielo.cli.main import STAGES, main
from kielo.recipe.errors import KieloError
from kielo.resolve.software import installed
from tests.cli.test_run import write_recipe

FOLDERS = {"pack": "tokens", "export": "hf"}
SECONDS = 12.3456  # of a stage, by its manifest

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "vocab_size": 300,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip


class Stages:
    """Stands in for the work of each stage, which writes its folder once; notes what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[str] = []  # not those that were current
        self.asked: list[str] = []
        self.given: dict[str, tuple] = {}
        self.checked: list[tuple] = []
        self.during: dict[str, Callable[[], Any]] = {}
        self.outcome = SimpleNamespace(exit_code=0, message="")
        self.is_certified = True
        self.summary = {"of": "the run"}
        self._now = 100.0
        self._patch = monkeypatch.setattr
        self._patch("kielo.stages.make_stages.time", SimpleNamespace(monotonic=lambda: self._now))
        self._stage("kielo.stages.make_stages.run_corpus", "corpus", lambda recipe, folder, raw: folder)
        self._stage(
            "kielo.stages.make_stages.train_tokenizer", "tokenizer", lambda recipe, corpus, folder: folder
        )
        self._stage("kielo.stages.make_stages.pack", "pack", lambda *given: given[3])
        self._stage(
            "kielo.stages.make_stages.train_here", "train", lambda recipe: Path(recipe.folder) / "train"
        )
        ranks = "kielo.stages.make_stages.train_on_ranks"
        self._stage(ranks, "train", lambda recipe, *_: Path(recipe.folder) / "train")
        self._stage("kielo.stages.make_stages.certify", "verify", lambda recipe, run, **_: run / "verify")
        self._stage("kielo.stages.make_stages.evaluate", "evaluate", lambda recipe, run, _: run / "evaluate")
        self._stage("kielo.stages.make_stages.export_checkpoint", "export", lambda *given: given[1])
        self._patch("kielo.report.write.write_report", self._report)
        self._patch("kielo.stages.make_stages.print_summary", lambda of: print(f"of {of.content()}"))
        summary = SimpleNamespace(content=lambda: self.summary)
        self._patch("kielo.stages.make_stages.read_json", lambda *_: summary)
        self._patch("kielo.api.Run.summary", summary)
        self._patch("kielo.stages.make_stages.newest_checkpoint", lambda run: run / "newest")
        self._patch("kielo.stages.make_stages.unfilled_vocabulary", lambda recipe, made: "")
        self._patch("kielo.stages.make_stages.pack_sequences", lambda recipe, tokens: None)
        self._note("kielo.stages.make_stages.pack_evaluation_texts")
        for check in ("refuse_before_text", "check_text_suffices", "check_inputs", "check_vectors"):
            self._note(f"kielo.stages.make_stages.{check}")

    def _stage(self, function: str, name: str, folder_of: Callable[..., Path]) -> None:
        def work(*given: Any, **named: Any) -> Any:
            self.asked.append(name)
            self.given[name] = (*given[1:], *named.values())
            self.during.get(name, lambda: None)()
            self._now += 2.0004
            folder = folder_of(*given, **named)
            before = read_manifest(folder)
            if before is None or "expired" in before.inputs:
                with write_stage(folder, name, 1, {}, {}) as stage:
                    stage.counts["bytes_kept"] = 1234
                    if name == "export":
                        (stage.folder / "config.json").write_text(json.dumps(MODEL))
                content = json.loads((folder / MANIFEST_NAME).read_text())
                (folder / MANIFEST_NAME).write_text(json.dumps(content | {"wall_seconds": SECONDS}))
                self.made.append(name)
            if name == "train":
                return self.outcome
            if name == "verify":
                difference = SimpleNamespace(content=lambda: "layer 3")
                return SimpleNamespace(
                    passed=self.is_certified, first_difference=difference, FILE_NAME="parity.json"
                )
            return read_manifest(folder)

        self._patch(function, work)

    def _note(self, function: str) -> None:
        name = function.rpartition(".")[2]
        self._patch(function, lambda recipe, *given: self.checked.append((name, *given)))

    def _report(self, run: Path, recipe: Any, stages: Any) -> Path:
        self.asked.append("report")
        self.given["report"] = (run, {name: stage.content() for name, stage in stages.items()})
        return run / "report.html"


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    return Stages(monkeypatch)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path)


def run(recipe: Path, *words: str) -> int:
    return main(["run", str(recipe), *words])


def test_all_stages_are_made_in_order_and_each_gets_its_folders(stages, recipe, tmp_path, capsys) -> None:
    assert run(recipe) == 0
    folder = tmp_path / "run"
    assert stages.asked == list(STAGES) and stages.made == list(STAGES[:-1])
    corpus, tokenizer, tokens = (folder / name for name in ("corpus", "tokenizer", "tokens"))
    assert stages.given["corpus"] == (corpus, folder / "raw")
    assert stages.given["tokenizer"] == (corpus, tokenizer)
    assert stages.given["pack"] == (corpus, tokenizer, tokens)
    assert stages.given["train"] == ()  # in this process
    assert stages.given["verify"] == (folder, False)
    assert stages.given["evaluate"] == (folder, folder / "newest")
    to, with_tokenizer, for_card = stages.given["export"]
    assert (to, with_tokenizer, for_card.name) == (folder / "hf", tokenizer, "tiny")
    made, times = stages.given["report"]
    assert made == folder and list(times) == list(STAGES)
    assert times["corpus"] == {"seconds": 2.0, "skipped": False}
    said = capsys.readouterr()
    assert said.out == "".join(f"── {name}\n" for name in STAGES) + (
        f"of {stages.summary}\nreport: {folder / 'report.html'}\n"
    )
    assert said.err == ""


ASKED = {
    "--to corpus": ["corpus"],
    "--to pack": ["corpus", "tokenizer", "pack"],
    "--from pack --to train": ["pack", "train"],
    "--from evaluate": ["evaluate", "export", "report"],
    "--from train --to train": ["train"],
    "--only verify": ["verify"],
    "--only corpus": ["corpus"],
}


@pytest.mark.parametrize("words", ASKED)
def test_the_stages_that_are_asked_for_are_made(words, stages, recipe, capsys) -> None:
    assert run(recipe) == 0
    stages.asked.clear()
    assert run(recipe, *words.split()) == 0
    assert stages.asked == ASKED[words]


NO_SHARES = "machines can share the stages corpus and pack. Fix: --only corpus or --only pack"


def test_flags_that_contradict_each_other_are_refused(stages, recipe, tmp_path, capsys) -> None:
    order = ", ".join(STAGES)
    for words, said in {
        "--only pack --from corpus": "--only excludes --from and --to. Fix: one or the other",
        "--only pack --to train": "--only excludes --from and --to. Fix: one or the other",
        "--from train --to pack": f"--from train comes after --to pack; the order is: {order}",
        "--ranks 0": "--ranks 0: give 1 or more",
        "--again pack --to tokenizer": "--again pack: this stage is not among the chosen stages: corpus, "
        "tokenizer",
        "--share 1/2": f"--share: {NO_SHARES}",
        "--share 1/2 --only train": f"--share: {NO_SHARES}",
        "--share 0/2 --only pack": "--share 0/2: give K/N with K from 1 to N, as 3/16",
        "--share 3/2 --only pack": "--share 3/2: give K/N with K from 1 to N, as 3/16",
        "--share 1 --only pack": "--share 1: give K/N with K from 1 to N, as 3/16",
    }.items():
        assert run(recipe, *words.split()) == 1
        assert capsys.readouterr() == ("", f"kielo: {said}\n"), words
    assert stages.asked == [] and not (tmp_path / "run" / "recipe.toml").exists()


NEEDED = {
    "tokenizer": ["corpus"], "pack": ["corpus", "tokenizer"], "train": ["tokenizer", "tokens"],
    "verify": ["tokens", "train"], "evaluate": ["corpus", "tokenizer", "tokens", "train"],
    "export": ["tokenizer", "train"],
    "report": ["corpus", "tokenizer", "train", "verify", "evaluate", "hf"],
}  # fmt: skip


@pytest.mark.parametrize("stage", NEEDED)
def test_a_stage_is_refused_without_each_folder_that_it_needs(
    stage, stages, recipe, tmp_path, capsys
) -> None:
    assert run(recipe) == 0
    for name in NEEDED[stage]:
        folder = tmp_path / "run" / name
        folder.rename(tmp_path / "aside")
        stages.asked.clear()
        assert run(recipe, "--only", stage) == 1
        assert capsys.readouterr().err == (
            f"kielo: {folder} is not finished, and this stage needs it. Fix: kielo run {recipe}, without "
            "--from and --only\n"
        )
        assert stages.asked == []
        (tmp_path / "aside").rename(folder)
    assert run(recipe, "--only", stage) == 0


def test_a_second_run_says_which_stages_have_nothing_to_do(stages, recipe, capsys) -> None:
    """The seconds of a stage that is skipped are those that made it. A title stands before its words."""
    assert run(recipe) == 0
    capsys.readouterr()
    stages.during = {"tokenizer": lambda: print("hash differs"), "pack": lambda: print("", end="")}
    assert run(recipe, "--to", "train", "--json") == 0
    said = capsys.readouterr()
    skipped = {"seconds": 12.346, "skipped": True}
    times = json.loads(said.out)["stages"]
    assert list(times) == list(STAGES[:-1])
    assert all(times[name] == skipped for name in ("corpus", "tokenizer", "pack", "train"))
    assert all(times[name]["seconds"] == SECONDS for name in ("verify", "evaluate", "export"))
    same = "nothing to do, same inputs and recipe"
    assert said.err == (
        f"── corpus: {same}; --again corpus redoes it\n"
        f"── tokenizer\nhash differs\n   {same}; --again tokenizer redoes it\n"
        f"── pack: {same}; --again pack redoes it\n"
        f"── train: {same}\n"
    )
    assert run(recipe, "--from", "export", "--json") == 0  # stages before it are as they were made
    assert json.loads(capsys.readouterr().out) == stages.summary
    times = stages.given["report"][1]
    assert times["export"] == skipped and times["corpus"]["skipped"] and not times["report"]["skipped"]
    assert run(recipe, "--only", "tokenizer") == 0
    assert capsys.readouterr().out.startswith("── tokenizer\nhash differs\n")


def test_a_task_without_a_score_is_told(stages, recipe, monkeypatch, capsys) -> None:
    found = {Scores: SimpleNamespace(unscored_tasks={"b": "no data"})}
    monkeypatch.setattr("kielo.stages.make_stages.read_stage_json", lambda _, kind: found.get(kind))
    assert run(recipe) == 0
    assert "── evaluate\nno score of b: no data\n" in capsys.readouterr().out


class Late(io.StringIO):
    """A stream whose text arrives when it is flushed, as that of a pipe."""

    def __init__(self, arrived: list[str]) -> None:
        super().__init__()
        self._arrived = arrived

    def flush(self) -> None:
        if text := self.getvalue():
            self._arrived.append(text)
            self.seek(0)
            self.truncate()


def test_words_of_a_stage_on_stderr_come_after_its_title(stages, recipe, monkeypatch) -> None:
    """Also where stdout waits until it is flushed."""
    assert run(recipe, "--to", "corpus") == 0
    arrived: list[str] = []
    monkeypatch.setattr(sys, "stdout", Late(arrived))
    monkeypatch.setattr(sys, "stderr", Late(arrived))
    stages.during = {"corpus": lambda: [print(word, file=sys.stderr, flush=True) for word in ("one", "two")]}
    assert run(recipe, "--to", "corpus") == 0
    assert arrived[:3] == ["── corpus\n", "one\n", "two\n"] and "nothing to do" in arrived[3]


def test_ranks_are_started_for_more_than_one(stages, recipe, monkeypatch, capsys) -> None:
    """The title of a training that starts ranks does not wait: they write to the terminal themselves."""
    monkeypatch.setattr("kielo.stages.make_stages.is_done", lambda recipe, ranks: False)
    sets = ["--set", "seed=3", "--set", "report.license=mit"]
    assert run(recipe, *sets, "--to", "train", "--ranks", "2") == 0
    assert stages.given["train"] == (str(recipe), ("seed=3", "report.license=mit"), 2)
    capsys.readouterr()
    for ranks, is_done, title in (("2", False, "── train\n   nothing"), ("2", True, "── train: nothing"),
                                  ("1", False, "── train: nothing")):  # fmt: skip
        monkeypatch.setattr("kielo.stages.make_stages.is_done", lambda recipe, ranks, done=is_done: done)
        assert run(recipe, "--only", "train", "--ranks", ranks) == 0
        assert capsys.readouterr().out.startswith(title)
    assert stages.given["train"] == ()


def test_a_stop_and_a_failure_of_training_end_the_run(stages, recipe, tmp_path, capsys) -> None:
    for code, said in ((75, "── stopped after step 7\n"), (1, ""), (76, "")):
        stages.outcome = SimpleNamespace(exit_code=code, message="stopped after step 7")
        assert run(recipe, "--from", "corpus") == (75 if code == 75 else 1)
        printed = capsys.readouterr()
        assert printed.out.endswith(said) and "verify" not in stages.asked
        assert printed.err == ("" if said else "kielo: training failed: stopped after step 7\n")


def test_a_certificate_that_fails_ends_the_run(stages, recipe, tmp_path, capsys) -> None:
    stages.is_certified = False
    assert run(recipe) == 1
    certificate = tmp_path / "run" / "verify" / "parity.json"
    said = f"kielo: parity with Hugging Face failed: layer 3; see {certificate}\n"
    assert capsys.readouterr().err == said
    assert stages.asked[-1] == "verify"


def test_a_stage_is_made_again(stages, recipe, tmp_path, capsys) -> None:
    """Not one whose result was trained on; the others stay as they are."""
    assert run(recipe) == 0
    stages.made.clear()
    assert run(recipe, "--again", "verify") == 0
    assert stages.made == ["verify"]
    assert run(recipe, "--only", "export", "--again", "export") == 0
    assert stages.made == ["verify", "export"]
    assert run(recipe, "--again", "pack", "--to", "pack") == 0
    assert stages.made[2:] == ["pack"]
    (tmp_path / "run" / "train" / "checkpoints" / "step_00000010").mkdir(parents=True)
    capsys.readouterr()
    for stage in ("corpus", "tokenizer", "pack"):
        assert run(recipe, "--again", stage) == 1
        folder = tmp_path / "run" / FOLDERS.get(stage, stage)
        assert f"{folder}: would be made again (--again {stage})" in capsys.readouterr().err
    assert stages.made[3:] == []


def test_a_run_by_its_folder_from_elsewhere_takes_no_other_text(
    stages, tmp_path, monkeypatch, capsys
) -> None:
    """It may be moved, alone or with the folder in which it was started. Absolute paths lead anywhere."""
    project, other = tmp_path / "project", tmp_path / "other"
    for folder in (project, other):
        folder.mkdir()
        (folder / "ok.txt").write_text("x\n")
    recipe = write_recipe(tmp_path)
    monkeypatch.chdir(project)
    sets = ["--set", "corpus.sources=ok.txt", "--set", "folder=runs/a"]
    assert run(recipe, *sets, "--to", "corpus") == 0 == run(Path("runs/a"), "--to", "corpus")
    assert run(Path("runs/a"), "--set", "folder=runs/b", "--to", "corpus") == 0  # as another run
    monkeypatch.chdir(other)
    capsys.readouterr()
    assert run(Path("../project/runs/a"), "--set", "folder=b", "--to", "corpus") == 1
    assert run(Path("../project/runs/a"), "--to", "corpus") == 1
    said = capsys.readouterr().err
    assert f"started in {project}, and its path ok.txt begins there, not in {other}. Fix: " in said
    assert f"Fix: cd {project} && kielo run runs/a" in said
    absolute = ["--set", f"corpus.sources={project / 'ok.txt'}"]
    shutil.copytree(project, tmp_path / "copy")
    assert run(Path("../project/runs/a"), *absolute, "--to", "corpus") == 0
    monkeypatch.chdir(tmp_path / "copy")
    shutil.move("runs/a", tmp_path / "alone")
    assert run(tmp_path / "alone", "--to", "corpus") == 1
    shutil.copytree(tmp_path / "alone", "runs/a")
    assert run(Path("runs/a"), "--to", "corpus") == 0
    monkeypatch.chdir(project)
    assert run(tmp_path / "alone", "--to", "corpus") == 0


def test_the_recipe_is_written_after_a_stage_that_was_made(stages, recipe, tmp_path, capsys) -> None:
    """Not by a refusal before; one that a person changed stays, which is said once, at the end."""
    path = tmp_path / "run" / "recipe.toml"
    seen: list[bool] = []
    for stage in ("corpus", "tokenizer", "pack"):
        stages.during[stage] = lambda: seen.append(path.exists())
    assert run(recipe, "--to", "pack") == 0
    assert seen == [False, True, True]
    path.unlink()
    seen.clear()
    assert run(recipe, "--to", "pack") == 0  # all are current
    assert seen == [False, False, False] and path.exists()
    path.write_text(path.read_text() + "# mine\n")
    capsys.readouterr()
    assert run(recipe, "--to", "train") == 0
    assert capsys.readouterr().err == f"{path} was changed by hand and is kept\n"
    assert path.read_text().endswith("# mine\n")
    path.unlink()
    stages.during["tokenizer"] = lambda: (_ for _ in ()).throw(KieloError("no"))
    assert run(recipe) == 1 and not path.exists()


def test_what_cannot_work_is_refused_before_the_stages(stages, recipe, tmp_path) -> None:
    """Files of the tokenizer, modules to train, and a budget that the clean text cannot give."""
    assert run(recipe, "--only", "corpus") == 0 and stages.checked == [("refuse_before_text",)]
    stages.checked.clear()
    assert run(recipe, "--only", "tokenizer") == 0
    assert stages.checked == [("check_vectors",), ("check_inputs",), ("refuse_before_text",)]
    stages.checked.clear()
    assert run(recipe, "--only", "pack") == 0
    texts = ("pack_evaluation_texts", tmp_path / "run" / "tokenizer", tmp_path / "run" / "evaluation_texts")
    assert [one[0] for one in stages.checked] == ["refuse_before_text", "pack_evaluation_texts"]
    assert stages.checked[1][1] == texts[1] and stages.checked[1][2].parent == tmp_path / "run"
    stages.checked.clear()
    assert run(recipe, "--only", "train") == 0
    budget = ("check_text_suffices", 1234, str(tmp_path / "run" / "corpus"))
    (asked, ranks, device, software), found = stages.checked
    assert (asked, ranks, device) == ("refuse_before_text", 1, "cpu") and found == budget
    assert software == installed("cpu")
    stages.during = {"tokenizer": lambda: stages.checked.append(("tokenizer",))}
    stages.checked.clear()
    assert run(recipe, "--to", "train") == 0  # the text is judged as soon as it is clean
    assert [one[0] for one in stages.checked] == [
        "check_vectors", "check_inputs", "refuse_before_text", "check_text_suffices", "tokenizer",
        "pack_evaluation_texts",
    ]  # fmt: skip


def test_a_tokenizers_shortage_and_row_map_are_told_when_it_is_made(stages, recipe, capsys, monkeypatch):
    made = RowMap(method="mean", old_tokenizer="", old_vocabulary_size=4, rows=[[1], [2]], control_tokens={})
    monkeypatch.setattr(
        "kielo.stages.make_stages.unfilled_vocabulary", lambda of, _: f"few words for {of.name}"
    )
    monkeypatch.setattr("kielo.stages.make_stages.read_stage_json", lambda folder, kind: made)
    assert run(recipe, "--to", "tokenizer") == 0
    said = capsys.readouterr()
    assert said.err == "tokenizer: few words for tiny\n"
    assert "\ntransplant: 2 rows of the new vocabulary: 2 (100.0%) are rows of the same text" in said.out
    assert run(recipe, "--to", "tokenizer") == 0
    said = capsys.readouterr()
    assert said.err == "" and "transplant" not in said.out
    monkeypatch.setattr("kielo.stages.make_stages.unfilled_vocabulary", lambda recipe, made: "")
    monkeypatch.setattr("kielo.stages.make_stages.read_stage_json", lambda folder, kind: None)
    assert run(recipe, "--to", "tokenizer", "--again", "tokenizer") == 0
    assert capsys.readouterr() == ("── corpus: nothing to do, same inputs and recipe; --again corpus redoes "
                                   "it\n── tokenizer\n", "")  # fmt: skip


def test_sequences_that_are_packed_are_told(stages, recipe, capsys, monkeypatch) -> None:
    rows = [SimpleNamespace(sentence=lambda: "a: 1"), SimpleNamespace(sentence=lambda: "b: 2")]
    monkeypatch.setattr("kielo.stages.make_stages.pack_sequences", lambda recipe, tokens: tokens.name)
    monkeypatch.setattr("kielo.stages.make_stages.packing_rows", lambda of: rows * (of == "tokens"))
    assert run(recipe, "--to", "pack") == 0
    assert capsys.readouterr().out.endswith("── pack\na: 1\nb: 2\n")


@pytest.mark.parametrize(("share", "made", "said"), [
    ("1/1", 3, "share 1 of 1: 3 parts of the token shards exist. When all shares exist, join them with: "
     "kielo run RECIPE --only pack"),
    ("2/16", 0, "share 2 of 16: nothing to do"),
])  # fmt: skip
def test_a_share_of_the_text_is_packed(share, made, said, stages, recipe, tmp_path, capsys, monkeypatch):
    given = []
    monkeypatch.setattr(
        "kielo.stages.make_stages.pack_share", lambda recipe, *rest: given.append(rest) or made
    )
    assert run(recipe, "--only", "pack", "--share", share) == 1
    assert "is not finished, and this stage needs it" in capsys.readouterr().err and given == []
    assert run(recipe, "--to", "tokenizer") == 0
    capsys.readouterr()
    assert run(recipe, "--only", "pack", "--share", share) == 0
    folders = tuple(tmp_path / "run" / name for name in ("corpus", "tokenizer", "tokens"))
    assert given == [(*folders, tuple(map(int, share.split("/"))))]
    assert capsys.readouterr().out == said.replace("RECIPE", str(recipe)) + "\n"


@pytest.mark.parametrize(("done", "said"), [
    (3, "share 2 of 16: 3 tasks done here, and all are done. Put the corpus together with: "
     "kielo run RECIPE --only corpus"),
    (0, "share 2 of 16: nothing to do"),
])  # fmt: skip
def test_a_share_of_the_corpus_is_made(done, said, stages, recipe, tmp_path, capsys, monkeypatch):
    given = []
    monkeypatch.setattr(
        "kielo.stages.make_stages.run_corpus_share", lambda recipe, *rest: given.append(rest) or done
    )
    assert run(recipe, "--only", "corpus", "--share", "2/16") == 0
    assert given == [(tmp_path / "run" / "corpus", tmp_path / "run" / "raw", (2, 16))]
    assert capsys.readouterr().out == said.replace("RECIPE", str(recipe)) + "\n"


def test_ready_tokens_need_no_corpus(stages, recipe, tmp_path, capsys, monkeypatch) -> None:
    """Nothing is cleaned, no stage asks for its folder, the budget waits for the count.

    The ready tokenizer is compared, which says so.
    """
    compared = []
    monkeypatch.setattr(
        "kielo.stages.make_stages.compare_folder", lambda *of: compared.append(of) or ("compared", [])
    )
    ready = recipe.with_name("ready.toml")
    source = f'sources = [{{name = "text", tokens = "{tmp_path}/data"}}]'
    Tokenizer(WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>")).save(
        str(tmp_path / "tokenizer.json")
    )
    path = f'path = "{tmp_path}"'
    text = recipe.read_text().replace(f'sources = "{tmp_path / "text.txt"}"', source)
    ready.write_text(text.replace("vocab_size = 320", path), encoding="utf-8")
    assert run(ready) == 0
    said = capsys.readouterr().out
    assert "── corpus\n   nothing to do: all sources are ready tokens, which are read in place\n" in said
    assert "corpus" not in stages.asked and stages.asked[-1] == "report"
    assert compared == [(tmp_path / "run" / "tokenizer", "llama", [])] and "tokenizer: compared\n" in said
    assert "check_text_suffices" not in [name for name, *_ in stages.checked]
    assert run(ready, "--only", "pack", "--share", "1/2") == 1
    assert "--share: all sources are ready tokens" in capsys.readouterr().err


def test_an_encoder_has_no_certificate(stages, recipe, capsys) -> None:
    encoder = ["model.model_type=ltg_bert", "model.position_bucket_size=8", "train.objective=masked_tokens"]
    assert run(recipe, *(word for one in encoder for word in ("--set", one))) == 0
    assert "verify" not in stages.asked and stages.asked[-1] == "report"
    said = capsys.readouterr().out
    assert "── verify\n   only decoders are compared with transformers\n── evaluate\n" in said


def test_sigterm_ends_a_stage_with_75_and_the_handler_comes_back(stages, recipe, tmp_path, capsys) -> None:
    before = signal.getsignal(signal.SIGTERM)
    stages.during["tokenizer"] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    assert run(recipe) == 75
    assert stages.made == ["corpus"] and signal.getsignal(signal.SIGTERM) is before
    said = "── stopped by SIGTERM; the same command makes the missing stages\n"
    assert capsys.readouterr().err == said
    assert not list((tmp_path / "run").glob("lease.*"))
    stages.during.clear()
    assert run(recipe) == 0 and stages.made[1] == "tokenizer"


def test_keys_that_weights_replace_are_told_before_the_stages(stages, recipe, capsys, monkeypatch) -> None:
    monkeypatch.setattr("kielo.stages.attempt.overridden_in_words", lambda model: "hidden_size = 9")
    stages.during["corpus"] = lambda: print("cleaned", file=sys.stderr)
    assert run(recipe, "--only", "corpus") == 0
    assert capsys.readouterr().err == "warning: hidden_size = 9\ncleaned\n"


def test_a_recipe_that_follows_another_makes_its_weights_first(
    stages, recipe, tmp_path, capsys, monkeypatch
) -> None:
    """As far as its export, with this run's ranks and none of its settings; not to clean the text alone."""
    monkeypatch.setattr("kielo.stages.attempt.overridden_in_words", lambda model: f"{model.weights}")
    second = recipe.with_name("second.toml")
    second.write_text(
        f'extends = "{recipe}"\nname = "second"\nfolder = "{tmp_path}/second"\nfollows = "{recipe}"\n'
        f'[model]\nweights = "hf:{tmp_path}/run/hf"\ntransplant = "mean"\n[tokenizer]\nvocab_size = 300\n',
        encoding="utf-8",
    )
    assert run(second, "--only", "corpus") == 0 and not (tmp_path / "run").exists()
    stages.asked.clear()
    capsys.readouterr()
    assert run(second, "--to", "pack") == 0
    up_to_weights = ["corpus", "tokenizer", "pack", "train", "export"]
    assert stages.asked == [*up_to_weights, "corpus", "tokenizer", "pack"]
    said, err = capsys.readouterr()
    assert err == f"warning: None\nwarning: hf:{tmp_path}/run/hf\n"  # of both
    assert said.startswith("══ tiny, which second follows\n── corpus\n")
    assert "── export\n══ second\n── corpus: nothing to do" in said
    checks = [name for name, *_ in stages.checked]
    assert checks.index("check_vectors") < checks.index("check_text_suffices") < checks.index("check_inputs")
    stages.asked.clear()
    assert run(second, "--only", "tokenizer") == 0
    assert stages.asked == [*up_to_weights, "tokenizer"]
