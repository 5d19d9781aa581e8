"""A person's own tasks and bundles, before the harness is needed."""

import json
from pathlib import Path

import pytest

from kielo.evaluate.tasks import Place
from kielo.evaluate.tasks_data import quiet_bars
from kielo.evaluate.tasks_harness import Harness
from kielo.evaluate.tasks_own import harness_task, own_tasks_of, read_own_task
from kielo.evaluate.tasks_wanted import hash_task_folder, wanted_tasks
from kielo.recipe.cards import PROBES, task_bundle, task_bundles
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Evaluate

GOOD = {"question": "Mis on pealinn?", "choices": ["Tartu", "Tallinn"], "answer": "Tallinn"}

NONE = " of the choices. Fix: a choice or its number from 0"


def write_own(folder: Path, *lines: dict | str, kind: str = "multiple_choice", more: str = "") -> Path:
    """Write an own task "capitals" of such lines. Return its TOML file."""
    folder.mkdir(exist_ok=True)
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "capitals.jsonl").write_text(text)
    path = folder / "capitals.toml"
    path.write_text(f'name = "capitals"\nkind = "{kind}"\nquestions = "capitals.jsonl"\n{more}')
    return path


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("[1]", "not a JSON object. Fix: one object on each line"),
        ("{", "not a JSON object. Fix: one object on each line"),
        (GOOD | {"question": 3}, "question is missing or of another type"),
        (GOOD | {"choices": ["Tallinn"]}, "choices does not fit. Fix: two texts or more"),
        (GOOD | {"choices": ["Tartu", ""]}, "choices does not fit. Fix: two texts or more"),
        (GOOD | {"answer": "Narva"}, "answer = 'Narva' is none" + NONE),
        (GOOD | {"answer": 2}, "answer = 2 is none" + NONE),
    ],
)  # fmt: skip
def test_a_wrong_question_is_refused_by_its_line(line: dict | str, told: str, tmp_path: Path) -> None:
    path = write_own(tmp_path, GOOD, "", line)
    with pytest.raises(KieloError) as caught:
        harness_task(path)
    assert str(caught.value) == f"{tmp_path / 'capitals.jsonl'}, line 3: {told}"


def test_a_wrong_own_task_is_refused(tmp_path: Path) -> None:
    """A key or a file that is wrong, a set without questions, and a name that two have."""
    for kind, more, told in (
        ("choice", "", "not an own task (kind: "),
        ("cloze", "frm = 1", "not an own task (frm: "),
        ("cloze", "= 1", "not valid TOML: "),
    ):
        with pytest.raises(KieloError) as caught:
            own_tasks_of([write_own(tmp_path, GOOD, kind=kind, more=more).parent])
        assert str(caught.value).startswith(f"{tmp_path / 'capitals.toml'}: {told}")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "theirs"\n')  # another program's
    with pytest.raises(KieloError, match=r"capitals.jsonl: no questions$"):
        harness_task(write_own(tmp_path, ""))
    with pytest.raises(KieloError, match=r"capitals.jsonl, line 1: text has 2 blanks. Fix: one ____$"):
        harness_task(write_own(tmp_path, GOOD | {"text": "____ ja ____"}, kind="cloze"))
    other = write_own(tmp_path / "other", GOOD).parent
    write_own(tmp_path, GOOD)
    with pytest.raises(KieloError, match=f"^{other / 'capitals.toml'}: another own task, .*, has the name"):
        own_tasks_of([tmp_path, other])


def test_the_shipped_probes_ask_the_same_in_both_languages() -> None:
    """The right choice has the same number, and each number is right equally often."""
    found = own_tasks_of([PROBES])
    assert set(found) == {"culture_et", "culture_et_in_english"}
    rows = {}
    for name, path in found.items():
        assert read_own_task(path).measures == "culture"
        rows[name] = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    pairs = list(zip(*rows.values(), strict=True))
    places = [[one["choices"].index(one["answer"]) for one in pair] for pair in pairs]
    assert all(first["id"] == second["id"] and first["see"] for first, second in pairs)
    assert all(len(set(one["choices"])) == 4 for pair in pairs for one in pair)
    assert all(first == second for first, second in places)
    assert len(pairs) == len({first["question"] for first, _ in pairs}) == 40
    assert {places.count([place, place]) for place in range(4)} == {10}


def test_bundles_have_languages_and_abilities() -> None:
    """A task that is asked for by its name has no pinned version; each task comes once."""
    assert {"et", "fi", "sv", "nb", "nn", "da", "is", "ja", "en"} == set(task_bundles())
    for code in task_bundles():
        found = wanted_tasks([f"bundle:{code}"])
        assert [one.name for one in found] == list(task_bundle(code).tasks)
        assert all(one.language == code and one.measures and one.version for one in found)
    own, by_name, *rest = wanted_tasks(["mine", "xcopa_et", "bundle:et", "mine"])
    assert (own.name, own.language, own.version) == ("mine", "", "")
    assert (by_name.name, by_name.language, by_name.version) == ("xcopa_et", "et", "1.0")
    assert len(rest) == len(task_bundle("et").tasks) - 1
    assert wanted_tasks(["xcopa_et"])[0].version == ""


def test_finished_scores_stay_current_without_tasks(tmp_path: Path) -> None:
    """The settings of a run without tasks are as before there were any. A folder counts with its content."""
    assert Evaluate().section == {
        "texts": [], "ngram_order": 6, "prompts": [], "sample_tokens": 80, "temperature": 0.7, "top_k": 50,
        "pseudo_tokens": 2048, "minimal_pairs": "",
        "part_of_speech": {"train": "", "dev": "", "from_layer": None, "pieces": "mean"},
    }  # fmt: skip
    assert Evaluate(tasks=("a",), shots=0).section.items() >= {"tasks": ["a"], "shots": 0}.items()
    write_own(tmp_path, GOOD)
    before = hash_task_folder(str(tmp_path))
    write_own(tmp_path, GOOD, GOOD)
    assert hash_task_folder(str(tmp_path)) != before
    with pytest.raises(KieloError, match="^evaluate.task_folders: no such folder"):
        hash_task_folder(str(tmp_path / "gone"))


def test_results_in_another_precision_have_another_place(tmp_path: Path) -> None:
    place = Place(tmp_path, {"checkpoint": "1"})
    assert place.in_precision("fp32") == place
    assert place.in_precision("bf16").inputs == {"checkpoint": "1", "precision": "bf16"}


def test_what_task_files_print_is_hidden(capsys: pytest.CaptureFixture) -> None:
    with quiet_bars():
        print("bootstrapping for stddev: mean")
    assert capsys.readouterr() == ("", "")


def test_the_harness_is_asked_for_before_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KieloError) as caught:
        Harness(Evaluate(tasks=("xcopa_et",)))
    assert str(caught.value) == "evaluate.tasks: lm-eval is not installed. Fix: pip install 'kielo[evaluate]'"
