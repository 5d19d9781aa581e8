"""Tasks of the harness on a model whose answers are known: values by hand, and what cannot be scored."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kielo.artifact.task_result import QUESTIONS_NAME
from kielo.evaluate.contender import Contender
from kielo.evaluate.tasks import Place, score_tasks
from kielo.evaluate.tasks_data import harness_surroundings, quiet_bars
from kielo.recipe.cards import BundledTask, TaskBundle, task_bundle, task_bundles
from kielo.recipe.sections import Evaluate
from tests.evaluate.harness_data import write_cached
from tests.evaluate.test_bits_per_byte import VOCAB, contender
from tests.evaluate.test_own_tasks import GOOD, write_own

pytestmark = pytest.mark.full
pytest.importorskip("lm_eval")

# Bytes that this model finds likelier than all others, whatever comes before: "T" before "a".
LIKED = "Taluke"


def likes_letters(tokens_bs: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
    """Logits of a model that spells LIKED letter by letter, then a line's end, and else likes nothing."""
    whole = contender(None).tokenizer.whole
    ids = [whole.token_to_id(letter) for letter in (*LIKED, "Ċ")]
    after = dict(zip(ids, ids[1:]))
    logits = torch.zeros(*tokens_bs.shape, VOCAB)
    for row, tokens in enumerate(tokens_bs.tolist()):
        for place, token in enumerate(tokens):
            logits[row, place, after.get(token, ids[0])] = 9.0
    return logits


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contender:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{}")
    found = contender(likes_letters, sequence_length=400)
    found.tokenizer.folder = tmp_path / "tokenizer"
    (tmp_path / "datasets").mkdir()
    (tmp_path / "prefetched.json").write_text('{"brought": [], "made_at": ""}')
    monkeypatch.setenv("KIELO_PREFETCHED", str(tmp_path))
    return found


DATA = "dataset_path: json\ndataset_kwargs: {data_files: {test: FOLDER/%s.jsonl}}\n"
BAD_TASKS = {
    "empty": DATA % "none",
    "failing": DATA % "one" + "doc_to_text: '{{nothing.there}}'",
    "lacking": "dataset_path: json\nprocess_docs: !function utils.needs",
    "sampling": DATA % "one"
    + "doc_to_text: q\ndoc_to_target: q\noutput_type: generate_until\n"
    + "generation_kwargs: {do_sample: true, temperature: 0.5, until: ['x']}",
    "unfinished": DATA % "one"
    + "doc_to_text: q\ndoc_to_target: q\noutput_type: loglikelihood\n"
    + "process_results: !function more.unfinished",
    "broken": "  a: [",
}
Found = tuple[dict[tuple[str, str], Any], dict[str, str]]


def scored(model: Contender, folder: Path, *names: str, **settings: Any) -> Found:
    place = Place(folder / "results", {"checkpoint": "1"})
    found, unscored = score_tasks(model, Evaluate(tasks=names, **settings), place)
    return {(one.task, one.metric): one for one in found}, unscored


def test_own_tasks_of_each_kind(model: Contender, tmp_path: Path) -> None:
    """The model likes "Taluke": right in the first question of each kind, wrong in the second."""
    two = GOOD | {"choices": ["Narva", "Taluke"]}
    more = 'before = "K: "\nlanguage = "et"\nmeasures = "culture"\n'
    write_own(tmp_path / "a", two | {"answer": 1}, two | {"answer": 0}, more=more)
    cloze = {"text": "____.", "choices": ["Narva", "Taluke"]}
    write_own(tmp_path / "b", cloze | {"answer": "Taluke"}, cloze | {"answer": "Narva"}, kind="cloze")
    first, second = ({"question": "Mis?", "answer": answer} for answer in (["Tartu", "taluke."], "Narva"))
    write_own(tmp_path / "c", first, second, kind="generation")
    for letter, name in zip("abc", ("choice", "cloze", "words")):
        path = tmp_path / letter / "capitals.toml"
        path.write_text(path.read_text().replace('"capitals"', f'"{name}"', 1))
    folders = tuple(str(tmp_path / letter) for letter in "abc")
    found, unscored = scored(model, tmp_path, "choice", "cloze", "words", task_folders=folders)
    assert unscored == {}
    first = found["choice", "acc,none"]
    assert (first.language, first.measures, first.chance, first.shots) == ("et", "culture", 0.5, 0)
    for name, metric in (("choice", "acc,none"), ("cloze", "acc,none"), ("words", "exact_match,none")):
        one = found[name, metric]
        # of two answers, one right: half, with the standard error of a sample of two
        assert (one.value, one.questions) == (0.5, 2) and one.standard_error == pytest.approx(0.5)
    shown, _ = scored(model, tmp_path, "choice", task_folders=folders, shots=1)
    assert shown["choice", "acc,none"].shots == 1
    limited, _ = scored(model, tmp_path, "choice", task_folders=folders, task_limit=1)
    assert (limited["choice", "acc,none"].value, limited["choice", "acc,none"].questions) == (1.0, 1)
    assert len(list((tmp_path / "results").glob("choice-*"))) == 3  # results of other settings stay


def test_culture_probes_are_asked_in_both_languages(model: Contender, tmp_path: Path) -> None:
    """Without a folder in the recipe. A person's task of the same name is asked in their place."""
    names = ("culture_et", "culture_et_in_english")
    found, unscored = scored(model, tmp_path, *names)
    assert unscored == {}
    for name, language in zip(names, ("et", "en")):
        one = found[name, "acc,none"]
        assert (one.language, one.measures, one.questions, one.chance) == (language, "culture", 40, 0.25)
    (folder,) = (tmp_path / "results").glob("culture_et-*")
    line = json.loads((folder / QUESTIONS_NAME).read_text().splitlines()[0])
    assert line["arguments"][2] == [
        "Küsimus: Mis kuupäeval on Eesti iseseisvuspäev?\nVastus:",
        " 24. veebruaril",
    ]
    write_own(tmp_path / "mine", GOOD)
    path = tmp_path / "mine" / "capitals.toml"
    path.write_text(path.read_text().replace('"capitals"', '"culture_et"', 1))
    found, _ = scored(model, tmp_path, "culture_et", task_folders=(str(path.parent),))
    assert found["culture_et", "acc,none"].questions == 1


def test_a_scored_task_is_not_asked_again(model: Contender, tmp_path: Path) -> None:
    """Nor is it lost when a later task ends the program. A changed task is asked."""
    write_own(tmp_path / "a", GOOD, GOOD)
    write_own(tmp_path / "b", GOOD)
    path = tmp_path / "b" / "capitals.toml"
    path.write_text(path.read_text().replace('"capitals"', '"broken"', 1))
    folders = (str(tmp_path / "a"), str(tmp_path / "b"))
    calls = []

    def logits(tokens_bs: torch.Tensor, documents: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(tokens_bs))
        if len(calls) > 2:
            raise RuntimeError("a device failed")
        return likes_letters(tokens_bs, documents)

    failing = replace(model, logits=logits)
    with pytest.raises(RuntimeError):
        scored(failing, tmp_path, "capitals", "broken", task_folders=folders)
    found, _ = scored(failing, tmp_path, "capitals", task_folders=folders)
    (folder,) = (tmp_path / "results").glob("capitals-*")
    lines = [json.loads(line) for line in (folder / QUESTIONS_NAME).read_text().splitlines()]
    assert [line["acc"] for line in lines] == [found["capitals", "acc,none"].value] * 2
    write_own(tmp_path / "a", GOOD, GOOD, GOOD)
    with pytest.raises(RuntimeError):
        scored(failing, tmp_path, "capitals", task_folders=folders)


def test_what_cannot_be_scored_is_named_and_the_rest_goes_on(
    model: Contender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown task with the nearest names, missing data, an empty set, failing files, another version."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name, body in BAD_TASKS.items():
        text = body.replace("FOLDER", str(tmp_path))
        (theirs / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{text}\n")
    (tmp_path / "none.jsonl").write_text("")
    (tmp_path / "one.jsonl").write_text('{"q": "a"}\n')
    (theirs / "utils.py").write_text("import no_such_package\n")
    (theirs / "more.py").write_text("def unfinished(*_):\n    raise NotImplementedError('later')\n")
    write_own(theirs, GOOD)
    row = {"flores_passage": "a", "question": "b", "correct_answer_num": "1"}
    rows = [row | {f"mc_answer{number}": "c" for number in range(1, 5)}]
    write_cached(tmp_path / "datasets", "facebook/belebele", "fin_Latn", rows)
    pinned = BundledTask(measures="reading", version="7")
    other = TaskBundle(language="et", harness="0.4.12", tasks={"belebele_fin_Latn": pinned})
    monkeypatch.setattr("kielo.evaluate.tasks_wanted.task_bundle", lambda code: other)
    names = ["belebele_est_Latin", "belebele_est_Latn", "bundle:et", "capitals", *BAD_TASKS]
    found, unscored = scored(model, tmp_path, *names, task_folders=(str(theirs),))
    assert {task for task, _ in found} == {"capitals"}
    told = {name: unscored.pop(name) for name in list(unscored)}
    assert "neither lm-eval 0.4.13 nor evaluate.task_folders have such a task" in told["belebele_est_Latin"]
    assert "Fix: belebele_est_Latn or " in told["belebele_est_Latin"]
    assert f"{theirs / 'broken.yaml'} cannot be read" in told["belebele_est_Latin"]
    assert told["belebele_est_Latn"].startswith("its data are not on this machine (")
    assert "kielo prefetch RECIPE --to DIR" in told["belebele_est_Latn"]
    assert "empty" in told["empty"]
    assert "nothing" in told["failing"]
    assert told["unfinished"] == "NotImplementedError: later"
    assert told["lacking"] == "its file needs the package no_such_package. Fix: pip install no_such_package"
    assert told["sampling"].startswith("the task asks for samples, and a checkpoint is continued greedily")
    assert told["belebele_fin_Latn"].startswith(
        "its bundle is made for version 7 (lm-eval 0.4.12), and lm-eval"
    )


def test_a_group_may_ask_a_task_with_other_shots(model: Contender, tmp_path: Path) -> None:
    """Its result does not stand in for the task's own, nor the other way round."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    text = DATA % "two" + "doc_to_text: q\ndoc_to_target: '0'\ndoc_to_choice: [T, a]\n"
    text += "output_type: multiple_choice\nfewshot_split: test\n"
    text = text.replace("FOLDER", str(tmp_path))
    (theirs / "one.yaml").write_text(f"task: one\ntest_split: test\n{text}")
    (theirs / "both.yaml").write_text("group: both\ntask:\n  - task: one\n    num_fewshot: 1\n")
    (tmp_path / "two.jsonl").write_text('{"q": "a"}\n{"q": "b"}\n')
    settings = Evaluate(tasks=("one", "both"), task_folders=(str(theirs),))
    found, unscored = score_tasks(model, settings, Place(tmp_path / "results", {}))
    assert unscored == {}
    assert [(one.task, one.shots) for one in found if one.metric == "acc,none"] == [("one", 0), ("one", 1)]


def test_standard_errors_need_no_processes(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The process of a watch cannot have children."""
    from lm_eval.api.metrics import bootstrap_stderr, mean

    monkeypatch.setattr("multiprocessing.Pool", None)
    with harness_surroundings(), quiet_bars():
        # of a half: the root of 1/4 over 100 answers
        assert bootstrap_stderr(mean, [0.0, 1.0] * 50, 200) == pytest.approx(0.05, rel=0.3)
    assert capsys.readouterr().out == "" and "DISABLE_MULTIPROC" not in os.environ


def test_the_tasks_of_bundles_exist_with_their_versions() -> None:
    """In the harness's own index of all its files."""
    from lm_eval.tasks import TaskManager

    index = TaskManager().task_index
    for code in task_bundles():
        for name, of in task_bundle(code).tasks.items():
            assert str(index[name].cfg["metadata"]["version"]) == of.version, name
