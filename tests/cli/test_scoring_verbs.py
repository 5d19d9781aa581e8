"""`kielo evaluate`, `generate`, `rehearse` and `preflight` around known results: what is asked and told."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.attempt_files import REFUSAL_FILE
from kielo.artifact.checkpoint_folder import INDEX_NAME
from kielo.artifact.scores import (
    FluencyScores,
    MadePairScores,
    MaskedScores,
    MinimalPairScores,
    PairAccuracy,
    Scores,
    TaskScore,
)
from kielo.artifact.verify_results import BAD_NODES_NAME, Preflight
from kielo.cli.main import main
from kielo.cli.rehearse import chosen_ranks
from kielo.recipe.errors import KieloError
from tests.cli.test_run import write_recipe
from tests.cli.test_train_verb import as_rank


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return write_recipe(tmp_path)


def said(capsys: pytest.CaptureFixture, *words: str | Path) -> str:
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


NOT_ASKED = {
    "minimal_pairs": None, "made_pairs": None, "fluency": None, "tasks": [], "unscored_tasks": {},
}  # fmt: skip


def has(**content: Any) -> SimpleNamespace:
    return SimpleNamespace(**content, content=lambda: content)


# --- evaluate


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the scores. asked: the model of each, and whether it is transformers'."""
    sample = SimpleNamespace(prompt="Kord", text="oli")
    scores = has(bits_per_byte=has(model=1.23456, xz=2), sets=[], samples=[sample], **NOT_ASKED)
    of = SimpleNamespace(scores=scores, asked=[], causal=None)
    monkeypatch.setattr("kielo.stages.results.newest_checkpoint", lambda run: run / "newest")
    monkeypatch.setattr("kielo.cli.evaluate.read_stage_json", lambda folder, kind: of.causal)
    monkeypatch.setattr(
        "kielo.stages.results.evaluate", lambda *given: of.asked.append((*given[1:], False)) or of.scores
    )
    theirs = "kielo.evaluate.score.evaluate_hugging_face"
    monkeypatch.setattr(theirs, lambda *given: of.asked.append((*given[1:], True)) or of.scores)
    return of


def test_a_run_a_checkpoint_and_a_folder_of_weights_are_scored(scored, recipe, tmp_path, capsys) -> None:
    run, checkpoint, weights = tmp_path / "run", tmp_path / "step", tmp_path / "hf"
    for folder, name in ((checkpoint, INDEX_NAME), (weights, "config.json")):
        folder.mkdir()
        (folder / name).touch()
    table = "contender\tbits per byte\nmodel\t1.235\nxz\t2.000\n\nKord ▸ oli\n"
    assert said(capsys, "evaluate", recipe) == table
    assert said(capsys, "evaluate", checkpoint, recipe) == table
    assert said(capsys, "evaluate", weights, recipe) == table
    assert scored.asked == [(run, run / "newest", False), (run, checkpoint, False), (run, weights, True)]
    scored.scores.sets = [SimpleNamespace(name="news", languages=["et", "fi"], bits_per_byte=0.98765)]
    sets = "held-out set\tlanguages\tbits per byte\nnews\tet fi\t0.988\n"
    assert sets in said(capsys, "evaluate", recipe)
    scored.causal = has(other=1)  # of another use, which these are not
    assert "causal" not in json.loads(said(capsys, "evaluate", recipe, "--json"))


def test_a_watch_prints_a_line_for_each_checkpoint(recipe, tmp_path, capsys, monkeypatch) -> None:
    """And a line for each task, and for each without a score, by which it exits with 1.

    As JSON the rows alone are on stdout. The watch has no use for a recipe.
    """
    tasks = [has(task="belebele", metric="acc,none", value=0.5, standard_error=0.0125, chance=0.25)]
    scores = has(
        bits_per_byte=has(model=1.23456), sets=[has(name="news", bits_per_byte=0.98765)], tasks=tasks,
        unscored_tasks={},
        minimal_pairs=has(all=has(likelihood=0.75)), fluency=has(languages={"et": 0.875, "en": 0.125}),
    )  # fmt: skip
    more = {"is_base": False, "masked_scores": None, "scores": scores, "seconds": 7.0}
    row = SimpleNamespace(step=200, tokens=409_600, **more, content=lambda: {"step": 200})
    asked = []

    def run(watch: Any, is_once: bool) -> None:
        asked.append((watch.run_folder, is_once, watch.recipe.evaluate.tasks))
        watch.without_task = len(scores.unscored_tasks)
        watch.show(row)
        watch.tell("the end")

    monkeypatch.setattr("kielo.evaluate.watch_run.Watch.run", run)
    assert said(capsys, "evaluate", recipe, "--watch") == (
        "step 200 · 409.6K tokens · bits per byte 1.235 · news 0.988 · minimal pairs 75.0 % · "
        "writes et 88 %, en 12 % · 7.0 s\n  belebele acc,none 0.500 ± 0.013, chance 0.250\nthe end\n"
    )
    assert said(capsys, "evaluate", recipe, "--watch", "--once", "--json") == '{"step": 200}\n'
    scores.unscored_tasks = {"b": "no data"}
    assert main(["evaluate", str(recipe), "--watch", "--tasks", "belebele,b"]) == 1
    assert capsys.readouterr().out.endswith("chance 0.250\n  no score of b: no data\nthe end\n")
    run_folder = tmp_path / "run"
    assert asked == [(run_folder, False, ()), (run_folder, True, ()), (run_folder, False, ("belebele", "b"))]
    for words, told in (
        (("--once",), "--once needs --watch. Fix: "),
        ((recipe, "--watch"), "--watch scores a run's own checkpoints. Fix: "),
    ):
        assert main([*map(str, ("evaluate", recipe, *words))]) == 1
        assert told in capsys.readouterr().err


def test_tasks_are_tabled_and_those_without_a_score_are_named(scored, recipe, capsys, monkeypatch) -> None:
    """The tasks of --tasks take the place of the recipe's; the exit code says that some have no score."""
    asked = []
    ours = "kielo.stages.results.evaluate"
    monkeypatch.setattr(ours, lambda of, *_: asked.append(of.evaluate.tasks) or scored.scores)
    one = {"task": "xcopa_et", "metric": "acc,none", "questions": 1500, "shots": 3, "measures": "reading"}
    scored.scores = Scores.model_construct(
        bits_per_byte=has(model=1.5), sets=[], samples=[], unscored_tasks={"b": "no data"},
        tasks=[TaskScore(**one, value=0.51234, standard_error=0.02, chance=0.5), TaskScore(**one, value=1)],
    )  # fmt: skip
    assert main(["evaluate", str(recipe), "--tasks", "xcopa_et,bundle:et"]) == 1
    assert capsys.readouterr().out.split("\n")[2:] == [
        "task\tmeasures\tmetric\tvalue\tstandard error\tchance\tquestions\tshots",
        "xcopa_et\treading\tacc,none\t0.5123\t0.0200\t0.5000\t1,500\t3",
        "xcopa_et\treading\tacc,none\t1.0000\t\t\t1,500\t3",
        "no score of b: no data", "",
    ]  # fmt: skip
    assert main(["evaluate", str(recipe), "--json"]) == 1
    assert asked == [("xcopa_et", "bundle:et"), ()]
    assert main(["evaluate", str(recipe), "--tasks", "bundle:xx"]) == 1
    assert "no bundle is called 'bundle:xx'. Fix: bundle:da, bundle:en" in capsys.readouterr().err


def test_json_of_ranks_is_alone_on_stdout(scored, recipe, capsys, monkeypatch) -> None:
    def make(*_: Any) -> SimpleNamespace:
        print("task b: 9 questions")
        return has(bits_per_byte=1.5)

    monkeypatch.setattr("kielo.cli.evaluate.placed_here", lambda *_: None)
    monkeypatch.setattr("kielo.evaluate.score_on_ranks.make_scores_on_ranks", make)
    assert main(["evaluate", str(recipe), "--ranks", "1", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == {"bits_per_byte": 1.5} and "task b: 9 questions\n" in told.err


def test_a_rank_without_a_known_reason_tells_its_error(recipe, tmp_path, monkeypatch) -> None:
    """Such as a file system's error without a number."""

    def make(*_: Any) -> None:
        raise OSError("cannot be read")

    monkeypatch.setattr("kielo.cli.evaluate.placed_here", lambda *_: None)
    monkeypatch.setattr("kielo.evaluate.score_on_ranks.make_scores_on_ranks", make)
    monkeypatch.setenv(REFUSAL_FILE, str(tmp_path / "refusal"))
    assert main(["evaluate", str(recipe), "--ranks", "1"]) == 1
    assert "OSError: cannot be read" in (tmp_path / "refusal").read_text()


def test_euroeval_is_told_and_run_if_it_is_here(scored, recipe, tmp_path, capsys, monkeypatch) -> None:
    export = tmp_path / "run" / "hf"
    assert main(["evaluate", str(recipe), "--euroeval"]) == 1
    assert f"{export}: no exported model. Fix: kielo export {export.parent} --to" in capsys.readouterr().err
    export.mkdir()
    (export / "config.json").touch()
    command = f"euroeval --model {export} --language et"
    assert said(capsys, "evaluate", recipe, "--euroeval").split("\n")[:2] == [
        command, "EuroEval is not installed. Fix: pip install 'euroeval[all]' in an environment of its own"
    ]  # fmt: skip
    program = tmp_path / "euroeval"
    program.write_text('#!/bin/sh\necho "$0 $@" > asked\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", str(recipe), "--euroeval"]) == 3
    assert (tmp_path / "asked").read_text() == f"{tmp_path}/{command}\n" and scored.asked == []


def test_what_cannot_be_scored_is_refused(scored, recipe, tmp_path, capsys) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    (run / "recipe.toml").write_text(recipe.read_text())
    for words, told in {
        (other,): f"{other} is a folder, and no recipe names its held-out text. Fix: kielo evaluate",
        (other, recipe): f"{other}: neither a checkpoint (no {INDEX_NAME}) nor a Hugging Face folder",
        (run, recipe): f"{run}: a run folder, scored by its own text. Fix: ",
        (tmp_path / "gone", recipe): f"{tmp_path / 'gone'}: no such folder. Fix: a recipe, a checkpoint",
    }.items():
        assert main(["evaluate", *map(str, words)]) == 1
        assert capsys.readouterr().err.startswith(f"kielo: {told}")
    (other / "config.json").touch()
    assert main(["evaluate", str(other)]) == 1
    assert f"{other} is a Hugging Face folder, and no recipe" in capsys.readouterr().err
    assert scored.asked == []
    assert main(["evaluate", str(run)]) == 0


def test_fluency_is_tabled_or_told_to_be_missing(scored, recipe, capsys) -> None:
    """Terms before paradigms; the wanted number of made pairs beside those that there are."""
    asked = ("--set", "evaluate.made_pairs=1000", "--set", "evaluate.fluency_texts=5")
    assert (
        "made pairs: none, because no held-out sentence fits the rules\n"
        "continuations: none, because all held-out documents are too short\n"
    ) in said(capsys, "evaluate", recipe, *asked)
    pair = PairAccuracy(pairs=1234, likelihood=0.625, standard_error=0.0125, fewer_tokens=0.5)
    titles = "pairs\tgood likelier\tstandard error\tgood has fewer tokens\n"
    cells = "1,234\t62.5 %\t1.2 %\t50.0 %\n"
    scored.scores.minimal_pairs = MinimalPairScores(
        file="blimp.zip", all=pair, groups={"npi_1": pair}, terms={"npi": pair}
    )
    scored.scores.made_pairs = MadePairScores(
        file="", all=pair, groups={"word_order": pair}, wanted=1000, sentences=2000, in_training=30
    )
    scored.scores.fluency = FluencyScores(
        texts=5, repeated=0.125, repeated_in_heldout=0.0, languages={"et": 0.75, "en": 0.25},
        languages_in_heldout={"et": 1.0},
    )  # fmt: skip
    assert (
        f"minimal pairs of blimp.zip\t{titles}npi\t{cells}npi_1\t{cells}all\t{cells}"
        f"made pairs\t{titles}word_order\t{cells}"
        "made pairs: 1,000 asked for of each rule; 2,000 held-out sentences; left out because the training "
        "text has them: 30\n"
        "5 continuations\tmodel\theld-out text\nwords in repeated 4-grams\t12.5 %\t0.0 %\n"
        "text in et\t75.0 %\t100.0 %\ntext in en\t25.0 %\t0.0 %\n"
    ) in said(capsys, "evaluate", recipe, *asked)


def test_an_encoders_scores_are_tabled(scored, recipe, capsys) -> None:
    """Each measure that there is; with those of its causal use."""
    shares = {"accuracy": has(model=0.4567, most_frequent=0.1), "loss": 1.23456}
    none = {"pseudo_bits_per_byte": None, "minimal_pairs": None, "part_of_speech": None, "filled_masks": []}
    first = (
        "contender\thidden tokens predicted\nmodel\t45.7 %\nmost_frequent\t10.0 %\n"
        "loss of the model: 1.235 nats per hidden token\n"
    )
    scored.scores = MaskedScores.model_construct(**shares, **none)
    assert said(capsys, "evaluate", recipe) == first
    pair = SimpleNamespace(pairs=1234, token=0.5, within_word=0.625)
    more = {
        "pseudo_bits_per_byte": SimpleNamespace(token=1.5, within_word=2.25),
        "minimal_pairs": SimpleNamespace(groups={"case": pair}, all=pair),
        "part_of_speech": SimpleNamespace(accuracy=0.9123, words=4321, baseline=0.85),
        "filled_masks": [SimpleNamespace(sentence=lambda: "a [MASK]", truth=truth, likeliest=lambda: "b, c")
                         for truth in ("b", None)],
    }  # fmt: skip
    scored.scores = MaskedScores.model_construct(**shares, **more)
    scored.causal = has(bits_per_byte=has(model=1.5), sets=[], samples=[], **NOT_ASKED)
    pairs = "1,234\t50.0 %\t62.5 %\n"
    assert said(capsys, "evaluate", recipe) == first + (
        "pseudo bits per byte: 1.500; with the later tokens of a word also hidden: 2.250\n"
        f"minimal pairs\tpairs\tgood likelier\twithin word\ncase\t{pairs}all\t{pairs}"
        "parts of speech: 91.2 % of 4,321 words; the most frequent tag of each: 85.0 %\n"
        "hidden word\ttruth\tfillings\na [MASK]\tb\tb, c\na [MASK]\t–\tb, c\n"
        "contender\tbits per byte\nmodel\t1.500\n"
    )
    scored.scores = MaskedScores.model_construct(loss=1.5)
    found = json.loads(said(capsys, "evaluate", recipe, "--json"))
    assert (found["loss"], found["causal"]["samples"]) == (1.5, [])


# --- generate


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What each continuation was given: folder, prompt, sampling, and whether it prints."""
    asked: list[tuple] = []

    def continue_text(folder: Path, prompt: str, sampling: Any, prints: bool) -> str:
        asked.append((folder, prompt, sampling, prints))
        if prints:
            print(" oli.")
        return " oli."

    monkeypatch.setattr("kielo.evaluate.generate.continue_text", continue_text)
    monkeypatch.setattr("kielo.stages.results.newest_checkpoint", lambda run: run / "newest")
    monkeypatch.setattr(
        "kielo.stages.results.export_checkpoint", lambda _, hf, *__: (hf.parent / "made").touch()
    )
    return asked


def test_a_prompt_is_continued(writes, recipe, tmp_path, capsys) -> None:
    """By a folder of weights, or an export of the newest checkpoint, which is removed again."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").touch()
    assert said(capsys, "generate", tmp_path / "hf", "Kord") == "Kord oli.\n"
    folder, prompt, sampling, prints = writes.pop()
    assert (folder, prompt, prints) == (tmp_path / "hf", "Kord", True)
    assert tuple(vars(sampling).values()) == (200, 0.8, 50, 1)
    words = "--tokens=1", "--top-k=1", "--temperature=0", "--seed=3", "--json"
    assert main(["generate", str(recipe), "Kord", *words]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"prompt": "Kord", "text": " oli."}
    assert err == f"the model is {tmp_path / 'run' / 'newest'}\n"
    folder, _, sampling, prints = writes.pop()
    assert tuple(vars(sampling).values()) == (1, 0.0, 1, 3) and not prints
    assert folder.name == "hf" and not folder.parent.exists()


def test_numbers_that_cannot_sample_are_refused(writes, recipe, capsys) -> None:
    for flag, value in {"--tokens": "0", "--top-k": "0", "--temperature": "100"}.items():
        assert main(["generate", str(recipe), "Kord", flag, value]) == 1
        assert capsys.readouterr().err.startswith(f"kielo: {flag} {value}: give ")
    assert main(["generate", str(recipe), "Kord", "--temperature=-0.1"]) == 1
    assert main(["generate", str(recipe), "Kord", "--temperature=99.9"]) == 0 and len(writes) == 1


def test_an_encoder_fills_its_mask(writes, recipe, tmp_path, capsys, monkeypatch) -> None:
    path = recipe.with_name("encoder.toml")
    text = recipe.read_text().replace("[model]", '[model]\nmodel_type = "ltg_bert"\nposition_bucket_size = 8')
    text = text.replace("[train]", '[train]\nobjective = "masked_tokens"')
    path.write_text(text.replace("sample_tokens = 4", ""), encoding="utf-8")
    fillings = [has(text="oli", probability=0.5), has(text="on", probability=0.0625)]
    filled = SimpleNamespace(fillings=fillings)
    monkeypatch.setattr(
        "kielo.evaluate.encoder.load_encoder", lambda recipe, run, checkpoint: checkpoint.name
    )
    monkeypatch.setattr("kielo.evaluate.encoder.fill_prompts", lambda *_: [filled])
    assert said(capsys, "generate", path, "Kord [MASK]") == "token\tprobability\noli\t50.0 %\non\t6.2 %\n"
    found = json.loads(said(capsys, "generate", path, "Kord [MASK]", "--json"))
    assert found == {"prompt": "Kord [MASK]", "fillings": [one.content() for one in fillings]}
    assert writes == []


# --- rehearse


def layout(pipeline: int, layers: list[int] | None = None, schedule: str = "1f1b", of_rank: int = 1) -> Any:
    """Each pipeline rank has two ranks of the tensor axis."""
    axes = {"tensor": 2, "context": 1, "shard": 1, "replicate": 1, "pipeline": pipeline}
    of = SimpleNamespace(
        **axes, pipeline_layers=layers, pipeline_schedule=schedule, pipeline_stages_per_rank=of_rank
    )
    return SimpleNamespace(placement=SimpleNamespace(layout=of))


def test_a_rank_of_each_stage_is_chosen(monkeypatch) -> None:
    monkeypatch.setattr("kielo.cli.rehearse.rank_of_stage", lambda layout, number: 10 * number)
    monkeypatch.setattr("kielo.cli.rehearse.rank_of_each_stage", lambda *_: [0, 1, 1, 0])
    one, two = layout(1), layout(2, [1, 1, 1, 1], "zbv", 2)
    assert chosen_ranks(one, None, None, False) == [0] and chosen_ranks(one, 3, None, False) == [3]
    assert chosen_ranks(one, None, 0, False) == [0] and chosen_ranks(one, None, None, True) == [0]
    assert chosen_ranks(two, None, None, True) == [0, 10]
    assert [chosen_ranks(two, None, stage, False) for stage in range(4)] == [[0], [10], [10], [0]]
    for of, stage, last in ((one, 1, 0), (two, 4, 3), (two, -1, 3)):
        with pytest.raises(KieloError, match=f"--stage {stage}: the layout has stages 0 to {last}"):
            chosen_ranks(of, None, stage, False)


@pytest.mark.parametrize(("words", "ranks"), [
    (["--nodes", "1"], 8), (["--nodes", "2978"], 8 * 2978), (["--nodes", "2", "--ranks", "5"], 5),
    (["--set", "nodes=[9,3,2979]"], 24), (["--set", "nodes=[2979]"], 8), ([], 8),
])  # fmt: skip
def test_a_rehearsal_has_the_ranks_of_its_nodes(words, ranks, recipe, capsys, monkeypatch) -> None:
    """The fewest of the recipe's that the site has, or one."""
    asked = []

    def resolve(recipe: Any, folder: Any, number: int, device: str, **_: Any) -> None:
        asked.append((number, device))
        raise KieloError("that is enough")

    monkeypatch.setattr("kielo.cli.rehearse.resolve", resolve)
    assert main(["rehearse", str(recipe), "--cluster", "lumi_g", *words]) == 1
    assert asked == [(ranks, "cuda")] and capsys.readouterr().err == "kielo: that is enough\n"


def test_nodes_that_a_site_lacks_are_not_rehearsed(recipe, capsys) -> None:
    for nodes, near in (("0", 1), ("2979", 2978)):
        assert main(["rehearse", str(recipe), "--cluster", "lumi_g", "--nodes", nodes]) == 1
        said = f"kielo: --nodes {nodes}: lumi_g has 1 to 2978 nodes. Fix: {near}\n"
        assert capsys.readouterr().err == said


# --- preflight


@pytest.mark.parametrize("has_passed", [True, False])
def test_a_preflight_of_this_rank_tells_its_verdict(
    has_passed, recipe, tmp_path, capsys, monkeypatch
) -> None:
    """The first rank alone does. Without packed text an imagined one is resolved for."""
    asked = []

    def resolve(recipe: Any, folder: Any, ranks: int, device: str, name: Any, text: Any, _: Any) -> None:
        asked.append((ranks, device, name, text is None))

    screen = "kielo.verify.screens"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("kielo.cli.preflight.resolve", resolve)
    monkeypatch.setattr(
        "kielo.verify.preflight.check_nodes.preflight", lambda *_: print("checking") or has_passed
    )
    monkeypatch.setattr("kielo.cli.preflight.read_json", lambda folder, kind: has(nodes=3))
    monkeypatch.setattr(f"{screen}.check_rows", lambda of: [("a", "b")])
    monkeypatch.setattr(f"{screen}.CHECK_TITLES", ("check", "result"))
    monkeypatch.setattr(f"{screen}.verdict_lines", lambda of: ["one", "two"])
    code, run = 1 - has_passed, tmp_path / "run"
    assert main(["preflight", str(recipe)]) == code
    files = f"{run / Preflight.FILE_NAME}, {run / BAD_NODES_NAME}"
    assert capsys.readouterr().out == f"checking\ncheck\tresult\na\tb\none\ntwo\nverdict: {files}\n"
    (run / "tokens").mkdir()
    assert main(["preflight", str(recipe), "--ranks", "1", "--json"]) == code
    out, err = capsys.readouterr()
    assert json.loads(out) == {"nodes": 3} and err == "checking\n"
    as_rank(monkeypatch, 1, 4)
    assert main(["preflight", str(recipe), "--ranks", "4"]) == code
    assert capsys.readouterr().out == "checking\n"
    assert asked == [(1, "cpu", None, False), (1, "cpu", None, True), (4, "cpu", None, True)]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "H100")
    assert main(["preflight", str(recipe)]) == code and asked[-1][:3] == (4, "cuda", "H100")


@pytest.mark.parametrize("failure", [None, "node 3"])
def test_a_preflight_starts_ranks(failure, recipe, capsys, monkeypatch) -> None:
    """None before the job is resolved; none is left behind."""
    done: list[Any] = []

    class Ranks:
        def __init__(self, *given: Any, stop_code: int) -> None:
            done.append((*given, stop_code))

        def __getattr__(self, name: str) -> Any:
            return lambda *given: done.append((name, *given)) or (failure if name == "wait" else None)

    monkeypatch.setattr("kielo.cli.preflight.Ranks", Ranks)
    monkeypatch.setattr("kielo.cli.preflight.resolve", lambda *given: done.append(given[2]))
    words = ["preflight", str(recipe), "--set", "seed=3", "--ranks", "2"]
    assert main(words) == (1 if failure else 0)
    arguments = ["-m", "kielo", *words[:4]]
    assert done == [2, (arguments, 2, 0), ("start",), ("wait", 10), ("close",)]
    done.clear()
    assert main([*words, "--json"]) == (1 if failure else 0)
    assert done[1] == ([*arguments, "--json"], 2, 0)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Ranks, "start", interrupt, raising=False)
    done.clear()
    assert main(words) == 130 and done[-1] == ("kill",)
    assert main(["preflight", str(recipe), "--ranks", "0"]) == 1
    assert "--ranks 0: give 1 or more" in capsys.readouterr().err
