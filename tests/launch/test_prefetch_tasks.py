"""The data of evaluation tasks as `kielo prefetch` brings them: read by the harness without a network."""

import json
from pathlib import Path

import pytest

from kielo.artifact.prefetched import Prefetched
from kielo.artifact.stage_json import read_json
from kielo.cli.main import main
from kielo.evaluate.tasks_data import harness_surroundings
from kielo.evaluate.tasks_harness import Harness, NotScored
from kielo.evaluate.tasks_wanted import WantedTask
from kielo.recipe.sections import Evaluate
from tests.launch.hub import COMMIT, TEXT

pytestmark = pytest.mark.full
pytest.importorskip("lm_eval")

TASK = "dataset_path: org/one\ntest_split: train\noutput_type: loglikelihood_rolling\ndoc_to_text: ''\n"


def test_the_data_of_a_task_are_brought_with_their_commit(hub, tmp_path: Path, monkeypatch, capsys) -> None:
    """A task whose data the hub lacks is named, and the other's are brought, listed, and found offline."""
    import datasets

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hub.files["datasets/train.jsonl"] = TEXT.encode()
    folder = tmp_path / "theirs"
    folder.mkdir()
    for name, repository in (("wiki", "org/one"), ("gone", "org/two")):
        text = TASK.replace("org/one", repository)
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{text}doc_to_target: '{{{{text}}}}'\n")
    (tmp_path / "a.txt").write_text("Kord elas kuningas\n")
    sets = [
        "corpus.sources=a.txt",
        'evaluate.tasks=["wiki","gone"]',
        f"evaluate.task_folders={json.dumps([str(folder)])}",
    ]
    flags = [part for value in sets for part in ("--set", value)]
    assert main(["prefetch", "own_text", *flags, "--to", "brought"]) == 0
    out, err = capsys.readouterr()
    assert f"copy the recipe's own files yourself: a.txt, {folder}" in out
    assert "task gone: not brought: " in err
    (one,) = read_json(tmp_path / "brought", Prefetched).brought
    assert (one.kind, one.name, one.origin) == ("task", "wiki", f"Hugging Face hub: org/one, commit {COMMIT}")
    assert (tmp_path / "brought" / one.folder).is_dir() and one.bytes > 1000
    asked = len(hub.asked)
    monkeypatch.setenv("KIELO_PREFETCHED", str(tmp_path / "brought"))
    with harness_surroundings():
        harness = Harness(Evaluate(tasks=("wiki",), task_folders=(str(folder),)))
        assert len(harness.load(WantedTask("wiki")).tasks["wiki"].eval_docs) == 40
        with pytest.raises(NotScored, match="^its data are not on this machine"):
            harness.load(WantedTask("gone"))
    assert len(hub.asked) == asked
