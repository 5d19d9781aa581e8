"""A person's own step in a corpus: what it drops and changes, its hash, and its faults by file and line."""

import json
import signal
import sys

import pytest

from kielo.artifact.documents import read_documents
from kielo.artifact.stage_counts import Funnel
from kielo.artifact.stage_json import read_json
from kielo.corpus.corpus_stage import run_corpus
from kielo.recipe.errors import KieloError
from tests.corpus.texts import estonian_document, recipe

STEP = """
def judge(text, metadata):
    return "a third" if metadata["number"] % 3 == 0 else None

def change(text):
    return text.replace("Vanaema", "Vanaisa")
"""


def cleaned(tmp_path, step: str, **keys):
    """Return the texts that a corpus of nine documents keeps with one step, and its funnel."""
    source, file = tmp_path / "in.jsonl", tmp_path / "my_step.py"
    texts = (estonian_document(number) for number in range(9))
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    file.write_text(step)
    run_corpus(recipe(source, own_steps=(str(file),), **keys), tmp_path / "corpus", tmp_path / "raw", False)
    files = sorted((tmp_path / "corpus" / "documents").iterdir())
    kept = [document["text"] for path in files for document in read_documents(path)]
    return kept, read_json(tmp_path / "corpus", Funnel)


def test_documents_are_judged_and_changed(tmp_path):
    kept, funnel = cleaned(tmp_path, STEP)
    right = [estonian_document(number).replace("Vanaema", "Vanaisa") for number in (0, 1, 3, 4, 6, 7)]
    assert kept == right
    rows = {row.reason: row for row in funnel.steps if row.name == "own step"}
    assert rows["my_step.py: a third"].documents == 3
    words = sum(len(estonian_document(number).split()) for number in (2, 5, 8))
    assert rows["my_step.py: a third"].words == words
    assert funnel.settings["own_steps"][0][0] == "my_step.py"


def test_a_step_may_define_dataclasses(tmp_path):
    """dataclasses looks for the module of a class in sys.modules if annotations are text."""
    step = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Third:
    number: int

def judge(text, metadata):
    return "a third" if Third(metadata["number"]).number % 3 == 0 else None
"""
    assert len(cleaned(tmp_path, step)[0]) == 6


def test_a_signal_in_the_middle_of_a_step_ends_the_process(tmp_path):
    """The exit of the handler of SIGTERM is no fault of the file."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    step = "import os, signal\ndef judge(text, metadata):\n    os.kill(os.getpid(), signal.SIGTERM)\n"
    try:
        with pytest.raises(SystemExit) as ended:
            cleaned(tmp_path, step)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 75


def test_a_changed_step_rebuilds_the_corpus(tmp_path):
    assert len(cleaned(tmp_path, STEP)[0]) == 6
    assert len(cleaned(tmp_path, "def judge(text, metadata):\n    return None\n")[0]) == 9


@pytest.mark.full
def test_each_worker_loads_the_step(tmp_path):
    assert len(cleaned(tmp_path, STEP, workers=2)[0]) == 6


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ("def judge(text, metadata):\n    return 1 / 0\n", "my_step.py, line 2: ZeroDivisionError"),
        ("def judge(text, metadata)\n    pass", "my_step.py, line 1: "),
        ("import no_such_module", "my_step.py, line 1: ModuleNotFoundError"),
        ("import sys\nsys.exit(0)\n" + STEP, "my_step.py, line 2: SystemExit: 0"),
        ("def judge(text, metadata):\n    raise SystemExit", "my_step.py, line 2: SystemExit, at document"),
        ("def filter(text):\n    pass", "has neither judge nor change"),
        ("def judge(text, metadata):\n    return False", "judge returned bool, not None or a reason"),
        ("def change(text):\n    return None", "change returned NoneType, not text"),
    ],
)
def test_faults_name_the_file_and_the_line(tmp_path, step, said):
    with pytest.raises(KieloError, match="my_step.py.*") as caught:
        cleaned(tmp_path, step)
    assert said in str(caught.value) and not (tmp_path / "corpus").exists()


def test_a_step_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(KieloError, match=r"no\.py: No such file"):
        run_corpus(recipe(tmp_path, own_steps=("no.py",)), tmp_path / "corpus", tmp_path / "raw", False)
