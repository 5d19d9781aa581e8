"""What is gathered from a run folder: rows of stages, curves of the training, versions, by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from kielo import __version__
from kielo.artifact.manifest import MANIFEST_NAME, write_manifest
from kielo.artifact.scores import StageTime
from kielo.report.gather import STAGE_FOLDERS, gather, summarise
from tests.report.synthetic_run import RECIPE, STAGES


def rows_of_stages(folder: Path, stages: dict[str, StageTime]) -> dict[str, tuple[str, float | None]]:
    rows = gather(folder, RECIPE, stages).stage_rows
    return {row.name: (row.state, row.seconds) for row in rows}


def test_a_stage_is_done_already_done_or_not_finished(tmp_path: Path) -> None:
    """Seconds of a skipped stage are those of the run that made its folder."""
    for folder, seconds in (("corpus", 12.5), ("tokenizer", 3.25), ("train", 70.0)):
        (tmp_path / folder).mkdir()
        write_manifest(tmp_path / folder, folder, 1, {}, {}, {}, seconds)
    stages = {
        "extra": StageTime(seconds=1.5, skipped=False), "corpus": StageTime(seconds=0.1, skipped=True),
        "train": StageTime(seconds=80.0, skipped=False), "verify": StageTime(seconds=0.2, skipped=True),
    }  # fmt: skip
    found = rows_of_stages(tmp_path, stages)
    assert list(found) == [*STAGE_FOLDERS, "extra"]
    assert found == {
        "corpus": ("already done", 12.5), "tokenizer": ("already done", 3.25),
        "pack": ("not finished", None), "train": ("done", 80.0), "verify": ("already done", None),
        "evaluate": ("not finished", None), "export": ("not finished", None), "extra": ("done", 1.5),
    }  # fmt: skip


def training(
    folder: Path, rows: list[dict[str, Any]], counts: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Writes a training's metrics, and its manifest where there are counts; returns what is gathered."""
    (folder / "train").mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "train" / "metrics.jsonl").write_text(lines, encoding="utf-8")
    if counts is not None:
        write_manifest(folder / "train", "train", 1, {}, {}, counts, 1.0)
    return gather(folder, RECIPE, {}).training


def step(number: int, speed: float, loss: float = 2.0) -> dict[str, Any]:
    return {"step": number, "loss": loss, "tokens_per_second": speed, "seconds": 1.0}


@pytest.mark.parametrize(
    ("speeds", "counts", "expected"),
    [
        ([], None, None), ([7.0], None, 7.0), ([7.0, 90.0], None, 90.0),
        ([7.0, 90.0, 50.0, 60.0], None, 60.0), ([7.0, 0.0, 50.0, 60.0], {}, 55.0),
        ([7.0, 90.0], {"tokens_per_second": 33.0}, 33.0), ([7.0, 90.0], {"tokens_per_second": None}, 90.0),
        ([0.0], None, None),
    ],
)  # fmt: skip
def test_the_speed_is_a_median_without_the_first_row(
    tmp_path: Path, speeds: list[float], counts: dict[str, Any] | None, expected: float | None
) -> None:
    """The first counts only where it is alone; the stage's own figure goes before."""
    rows = [step(number, speed) for number, speed in enumerate(speeds, start=1)]
    assert training(tmp_path, rows, counts).tokens_per_second == expected


def test_steps_that_were_written_again_count_once(tmp_path: Path) -> None:
    """The later row is that of the model; rows stand in the order of their steps."""
    passed = [{"step": 9, "passed_over_from": 8}, {"step": 5, "passed_over_from": 5}]
    heldout = [{"step": 4, "heldout_loss": 1.5}, {"step": 2, "heldout_loss": 2.5}]
    again = [step(3, 1.0, 9.0), step(1, 1.0, 8.0), step(3, 1.0, 7.0)]
    found = training(tmp_path, [*again, *passed, *heldout], {"steps": 3})
    assert [(row.step, row.loss) for row in found.steps] == [(1, 8.0), (3, 7.0)]
    assert [row.step for row in found.passed_over] == [5, 9]
    assert [row.step for row in found.heldout] == [2, 4]
    assert found.precisions == []


def test_versions_of_stages_that_differ_stand_beside_each_other(tmp_path: Path) -> None:
    for folder, versions in (
        ("corpus", {"torch": "2.1", "numpy": "1.5"}), ("tokenizer", {"torch": "2.2"}),
        ("train", {"torch": "2.1", "abc": "3"}),
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        write_manifest(tmp_path / folder, folder, 1, {}, {}, {}, 1.0)
        path = tmp_path / folder / MANIFEST_NAME
        path.write_text(json.dumps(json.loads(path.read_text()) | {"versions": versions}), encoding="utf-8")
    found = gather(tmp_path, RECIPE, {}).versions
    assert list(found.items()) == [("abc", "3"), ("numpy", "1.5"), ("torch", "2.1, 2.2")]


def test_an_empty_folder_gives_nothing(tmp_path: Path) -> None:
    found = gather(tmp_path, RECIPE, {})
    empty = ("packing", "chronicle", "versions", "stages")
    assert all(not getattr(found, key) and getattr(found, key) is not None for key in empty)
    nothing = {"corpus", "funnel", "tokenizer", "row_map", "tokens", "overview", "training",
               "parity", "parity_on_ranks", "scores", "masked_scores", "export"}  # fmt: skip
    assert {key for key, value in vars(found).items() if value is None} == nothing
    assert found.run_folder == str(tmp_path) and found.kielo_version == __version__
    summary = summarise(found)
    assert summary.parameters is summary.tokens is summary.masked_tokens is summary.tokens_per_second is None


def test_a_run_that_was_trained_has_a_size(run_folder: Path, tmp_path: Path) -> None:
    """From resolved.toml, once the training's manifest is there: epochs of the text that was packed."""
    found = gather(run_folder, RECIPE, STAGES)
    # 736 steps of 4,096 tokens, and 510,000 that were packed
    assert found.overview.tokens == 736 * 4096
    assert found.overview.epochs == {"help": pytest.approx(736 * 4096 / 510_000, rel=0.01)}
    summary = summarise(found)
    assert (summary.tokens, summary.export) == (736 * 4096, str(run_folder / "hf"))
    assert summary.parameters == found.overview.parameters > 6_000_000
    text = (run_folder / "resolved.toml").read_text(encoding="utf-8")
    (tmp_path / "resolved.toml").write_text(text, encoding="utf-8")
    assert gather(tmp_path, RECIPE, {}).overview is None
    (tmp_path / "train").mkdir()
    write_manifest(tmp_path / "train", "train", 1, {}, {}, {}, 1.0)
    alone = gather(tmp_path, RECIPE, {}).overview
    assert alone.tokens == 736 * 4096 and not alone.epochs
    (tmp_path / "resolved.toml").unlink()
    assert gather(tmp_path, RECIPE, {}).overview is None
