"""A corpus by several machines on one disk: any of them may come late, end early or never come."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kielo.corpus import corpus_parts, corpus_tasks
from kielo.corpus.corpus_shares import corpus_progress, run_corpus_share
from kielo.corpus.corpus_stage import plan_corpus, run_corpus
from kielo.corpus.corpus_tasks import CorpusTasks
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe

SHARE = """
import sys
from pathlib import Path
from kielo.corpus.corpus_shares import run_corpus_share
from kielo.recipe.sections import Recipe
recipe, place = Recipe.model_validate_json(sys.argv[1]), Path(sys.argv[2])
print(run_corpus_share(recipe, place / "corpus", place / "raw", (int(sys.argv[3]), 3), progress=False))
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Twelve files of lines, of which each third line is a copy of one in another file."""
    text = tmp_path / "text"
    text.mkdir()
    for file in range(12):
        lines = [f"line {number % 3 and file} of number {number}, which is text" for number in range(60)]
        (text / f"{file:02d}.txt").write_text("\n".join(lines) + "\n")
    source = {"name": "a", "path": str(text), "clean": False}
    return Recipe(name="t", language="et", corpus={"sources": [source], "workers": 1})


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_parts, "LEAST_PART_BYTES", 3000)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "documents").iterdir())}


def put_together(recipe: Recipe, place: Path) -> int:
    """Finish the corpus, and return the number of tasks that were left for that."""
    progress = corpus_progress(recipe, place / "corpus")
    run_corpus(recipe, place / "corpus", place / "raw", progress=False)
    assert corpus_progress(recipe, place / "corpus") == (0, 0, True, {})
    assert sorted(path.name for path in place.iterdir()) == ["corpus", "raw"]
    return progress.parts - progress.finished


def test_one_share_of_three_does_all_if_the_others_never_come(recipe, small_parts, tmp_path) -> None:
    """Byte for byte as one process without shares and parts; the progress counts tasks by round."""
    run_corpus(recipe, tmp_path / "whole" / "corpus", tmp_path / "whole" / "raw", progress=False)
    place = tmp_path / "shared"
    tasks = plan_corpus(recipe, place / "corpus", place / "raw", progress=False)[0]
    assert tasks.num_tasks("clean") >= 6
    started = corpus_progress(recipe, place / "corpus")
    assert started.finished == 0 and not started.is_joined and "write" not in started.rounds
    assert run_corpus_share(recipe, place / "corpus", place / "raw", (2, 3), progress=False) > 10
    found = corpus_progress(recipe, place / "corpus")
    assert found.finished == found.parts == sum(all_of for _, all_of in found.rounds.values())
    assert put_together(recipe, place) == 0
    assert content(place / "corpus") == content(tmp_path / "whole" / "corpus")
    counts = json.loads((place / "corpus" / "manifest.json").read_text())["counts"]
    assert counts["documents_in"] == 12 * 60 and counts["documents_kept"] == 12 * 40 + 20
    assert run_corpus_share(recipe, place / "corpus", place / "raw", (1, 3), progress=False) == 0


@pytest.mark.parametrize("killed", [1, pytest.param(6, marks=pytest.mark.full)])
def test_shares_that_are_killed_anywhere_are_made_up_for(recipe, small_parts, tmp_path, killed) -> None:
    """A process of this machine that died holds no task back; of each killed share another begins again."""
    place, draw = tmp_path / "shared", random.Random(killed)
    tasks = plan_corpus(recipe, place / "corpus", place / "raw", progress=False)[0]
    words = [sys.executable, "-c", SHARE, recipe.model_dump_json(exclude_unset=True), str(place)]
    for number in range(killed):
        victim = subprocess.Popen([*words, str(1 + number % 3)], stdout=subprocess.DEVNULL)
        before = tasks.num_done()
        while tasks.num_done() == before and victim.poll() is None:
            time.sleep(0.001)
        time.sleep(draw.random() * 0.02)
        victim.kill()
        victim.wait()
    assert tasks.num_done() > 0
    begun = time.monotonic()
    assert run_corpus_share(recipe, place / "corpus", place / "raw", (3, 3), progress=False) >= 0
    assert time.monotonic() - begun < 30, "nobody waits for the dead"
    assert put_together(recipe, place) == 0
    run_corpus(recipe, tmp_path / "whole" / "corpus", tmp_path / "whole" / "raw", progress=False)
    assert content(place / "corpus") == content(tmp_path / "whole" / "corpus")


@pytest.mark.parametrize("when", ["before", "middle"])
def test_a_share_ends_well_if_the_corpus_is_put_together(recipe, tmp_path, monkeypatch, when) -> None:
    """Before or in the middle of a task. Nothing of the removed work comes back."""
    run, write, left = CorpusTasks.run, corpus_tasks.bring_tree_to_disk, [when]

    def join() -> None:
        left.clear()
        with monkeypatch.context() as process:  # another
            process.setattr(os, "getpid", lambda: 1)
            run_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", progress=False)

    def joined_before(tasks, round, number) -> None:
        if left == ["before"] and round == "borders":
            join()
        run(tasks, round, number)

    def joined_in_the_middle(folder) -> None:
        if left == ["middle"] and folder.parent.name == "borders":
            join()
        write(folder)

    monkeypatch.setattr(CorpusTasks, "run", joined_before)
    monkeypatch.setattr(corpus_tasks, "bring_tree_to_disk", joined_in_the_middle)
    assert run_corpus_share(recipe, tmp_path / "corpus", tmp_path / "raw", (1, 1), progress=False) > 1
    assert not left and sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "raw", "text"]


def test_a_share_whose_work_was_removed_says_so(recipe, tmp_path, monkeypatch) -> None:
    run = CorpusTasks.run

    def removed(tasks, round, number) -> None:
        shutil.rmtree(tasks.work)
        run(tasks, round, number)

    monkeypatch.setattr(CorpusTasks, "run", removed)
    with pytest.raises(KieloError, match="was removed while its tasks were done"):
        run_corpus_share(recipe, tmp_path / "corpus", tmp_path / "raw", (1, 1), progress=False)


@pytest.mark.parametrize("place_of", ["another.host", os.uname().nodename, f"{os.uname().nodename}-01234567"])
def test_a_task_that_another_machine_is_at_is_left_to_it(recipe, small_parts, tmp_path, place_of) -> None:
    """Until it shows no sign of an end for five times the longest task here. A container with the name of
    this host is another machine, and its processes are none of here.
    """
    place = tmp_path / "shared"
    tasks = plan_corpus(recipe, place / "corpus", place / "raw", progress=False)[0]
    elsewhere = tasks.work / "clean" / f".00001.{place_of}.{2**22 + 1}"
    elsewhere.mkdir(parents=True)
    words = [sys.executable, "-c", SHARE, recipe.model_dump_json(exclude_unset=True), str(place), "1"]
    waiting = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        while tasks.undone("clean") != [1]:
            assert waiting.poll() is None
            time.sleep(0.01)
        time.sleep(0.3)
        assert tasks.undone("clean") == [1]
        tasks.run("clean", 1)  # by the other machine
        assert int(waiting.communicate(timeout=60)[0]) == tasks.num_done() - 1
    finally:
        waiting.kill()
