"""Which rows of a log are measured, and as what: each row of a made up run has seconds of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from kielo.artifact.attempt_files import Outcome
from kielo.artifact.stage_json import write_json
from kielo.plan.measured_run import has_measured, measured_speed, metrics_of, read_measured_run
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.resolve.memory_row import StepSize
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved, write
from kielo.resolve.text import imagined_text
from tests.launch.test_ladder import a_ladder

# Ten steps of one micro-batch of a sequence on each of two ranks, then twelve of three of two.
SHORT, LONG = StepSize(128, 1, 1), StepSize(256, 2, 3)
MODEL = {
    "model.hidden_size": 64, "model.intermediate_size": 128, "model.num_hidden_layers": 2,
    "model.num_attention_heads": 4, "model.num_key_value_heads": 4,
    "dataset.sequence_length": 256, "train.tokens_per_step": 256,
}  # fmt: skip


def resolved(train: dict[str, Any] | None = None, steps: tuple[int, int] = (10, 12), **last: Any) -> Resolved:
    """train: keys of [train]. last: keys of the second phase."""
    recipe = read_recipe("demo_estonian", [f"{key}={value}" for key, value in MODEL.items()]).recipe
    content = recipe.model_dump(exclude_unset=True)
    content["train"].pop("tokens")
    content["train"] |= train or {}
    content["phases"] = [
        {"tokens": number * size.sequence_length * size.micro_batch * size.micro_batches * 2,
         "tokens_per_step": size.sequence_length * size.micro_batch * size.micro_batches * 2,
         "sequence_length": size.sequence_length, "micro_batch_sequences": size.micro_batch}
        for number, size in zip(steps, (SHORT, LONG))
    ]  # fmt: skip
    content["phases"][1] |= last
    recipe = type(recipe).model_validate(content)
    return resolve(recipe, "none", world_size=2, device="cpu", text=imagined_text(recipe))


def log(
    folder: Path, of: Resolved, steps: list[int], ranks: float = 2.0, passed: tuple[int, ...] = ()
) -> Path:
    """A row for each of `steps`, of which step n took n tenths of a second."""
    path = folder / "train" / "metrics.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(of, folder / "resolved.toml")
    rows: list[dict[str, Any]] = []
    for step in steps:
        index = of.identity.phase_index(step)
        speed = of.identity.phases[index].tokens_per_step / (step / 10)
        flops = speed * of.placement.phases[index].flops_per_token
        row = {"step": step, "loss": 3.0, "tokens_per_second": speed, "seconds": float(step)}
        rows.append(row | {"tflops_per_second": flops / ranks / 1e12 if ranks else None})
        if step in passed:
            rows[-1] = {"step": step, "passed_over_from": step}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tenths(path: Path) -> dict[StepSize, list[int]]:
    """Returns the steps whose seconds count, by their size."""
    found = read_measured_run(path).seconds
    return {size: [round(10 * seconds) for seconds in times] for size, times in found.items()}


ALL = list(range(1, 23))


@pytest.mark.parametrize(
    ("steps", "short", "long"),
    [
        # two steps of a phase warm up
        (ALL, list(range(3, 11)), list(range(13, 23))),
        # a row is of the steps since the one before: 3 to 4, and of a phase's first steps 11 to 12
        (ALL[1::2], [4, 6, 8, 10], [14, 16, 18, 20, 22]),
        # 10 to 12 lie across two phases, and two rows of a size are too few
        (ALL[2::3], None, [15, 18, 21]),
        ([2, 4, 5, 6, 12, 14, 15], [4, 5, 6], None), ([1, 3, 4, 5], [4, 5], None),
        ([3, 4, 5, 6], [4, 5, 6], None),
        ([2, 3, 4, 5], [3, 4, 5], None),
    ],
)  # fmt: skip
def test_rows_after_the_first_steps_of_a_phase_count(steps, short, long, tmp_path):
    path = log(tmp_path, resolved(), steps)
    expected = {size: found for size, found in ((SHORT, short), (LONG, long)) if found and len(found) >= 3}
    if expected:
        assert tenths(path) == expected
    else:
        with pytest.raises(KieloError, match="has 3 rows after its first 2 steps. Fix: a longer"):
            read_measured_run(path)


def test_rows_of_frozen_modules_and_of_other_precisions_do_not_count(tmp_path):
    """Those before the first change do, and a row up to it."""
    frozen = log(tmp_path / "frozen", resolved(trainable=["embed", "head"]), ALL)
    assert tenths(frozen) == {SHORT: list(range(3, 11))}
    changed = log(
        tmp_path / "changed", resolved({"precision": "fp32", "precision_changes": [[17, "bf16"]]}), ALL
    )
    assert tenths(changed) == {SHORT: list(range(3, 11)), LONG: [13, 14, 15, 16]}
    early = resolved({"precision": "fp32", "precision_changes": [[6, "bf16"]]})
    early = log(tmp_path / "early", early, ALL)
    assert tenths(early) == {SHORT: [3, 4, 5]}


def test_a_row_after_steps_that_were_passed_over_is_of_its_own_steps(tmp_path):
    passed = log(tmp_path, resolved(), [2, 4, 5, 6, 7, 8], passed=(5,))
    assert tenths(passed) == {SHORT: [4, 6, 7, 8]}
    assert read_measured_run(passed).path == passed


@pytest.mark.parametrize(
    ("ranks", "is_refused"), [(2.79, False), (2.81, True), (1.44, False), (1.42, True), (0, False)]
)
def test_rows_of_another_number_of_ranks_are_refused(ranks, is_refused, tmp_path):
    """From 1.4 times as many or as few on; rows without FLOPs say nothing of it."""
    path = log(tmp_path, resolved(), ALL, ranks)
    if is_refused:
        said = f"its rows are for {ranks:.0f} ranks, its resolved.toml for 2. Fix: a run that was not"
        with pytest.raises(KieloError, match=said):
            read_measured_run(path)
    else:
        assert len(tenths(path)) == 2


def test_a_log_begins_anew_with_its_attempt(tmp_path):
    """Seconds that fall begin an attempt, and equal ones do not."""
    path = log(tmp_path, resolved(), ALL)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[:5]:
        row["seconds"] = 6.5 if row["step"] < 5 else 6.0  # as step 6
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # from step 5 on: it has no row before it
    assert tenths(path) == {SHORT: [6, 7, 8, 9, 10], LONG: list(range(13, 23))}


def test_plans_are_beside_the_log_or_above(tmp_path):
    path = log(tmp_path, resolved(), ALL)
    (tmp_path / "resolved.toml").rename(path.parent / "resolved.toml")
    assert tenths(path)[SHORT] == list(range(3, 11))
    emulated = log(tmp_path / "fp8", resolved({"precision": "fp8", "fp8": {"emulate": True}}), ALL)
    with pytest.raises(KieloError, match="FP8 was emulated, which says nothing about a machine. Fix: "):
        read_measured_run(emulated)


def finish(folder: Path, outcome: str = "finished") -> None:
    (folder / "train").mkdir(parents=True, exist_ok=True)
    code = {"finished": 0, "requeue": 75}[outcome]
    write_json(folder / "train", Outcome(outcome=outcome, step=1, tokens=1, exit_code=code, message=""))


def test_the_speed_of_a_rung_is_that_of_the_size_with_most_rows(tmp_path):
    """Ten rows of 13 to 22 tenths: 1.75 s for 3,072 tokens. Nothing is measured before the end."""
    of = resolved()
    log(tmp_path, of, ALL)
    assert measured_speed(tmp_path) is None and not has_measured(tmp_path)
    finish(tmp_path, "requeue")
    assert measured_speed(tmp_path) is None
    finish(tmp_path)
    found = measured_speed(tmp_path)
    assert (found.steps, found.step_seconds) == (10, pytest.approx(1.75))
    assert found.tokens_per_second == pytest.approx(3072 / 1.75)
    flops = of.placement.phases[1].flops_per_token
    assert found.tflops_per_device == pytest.approx(3072 / 1.75 * flops / 2 / 1e12)
    log(tmp_path, of, ALL[:14])  # eight rows of the first phase, two of the other
    assert measured_speed(tmp_path).tokens_per_second == pytest.approx(256 / 0.65)
    log(tmp_path, of, ALL[:3])
    assert measured_speed(tmp_path) is None


def test_ladders_stand_for_their_measured_rungs(tmp_path):
    """On a processor only for those of one node."""
    own, run = tmp_path / "mine.jsonl", tmp_path / "run"
    run.mkdir()
    assert metrics_of([own, run]) == ([own, run / "train" / "metrics.jsonl"], None)
    gpu, cpu = tmp_path / "gpu", tmp_path / "cpu"
    for folder, cluster in ((gpu, "lumi_g"), (cpu, "laptop")):
        folder.mkdir()
        write_json(folder, a_ladder().model_copy(update={"cluster": cluster}))
        finish(folder / "4_nodes" / "dp32")
    with pytest.raises(KieloError, match="cpu: no rung on one node is measured yet. Fix: `kielo status`"):
        metrics_of([cpu])
    found, site = metrics_of([own, gpu])
    assert found == [own, gpu / "4_nodes/dp32/train/metrics.jsonl"] and site.name == "lumi_g"
    for folder in (gpu, cpu):
        finish(folder / "1_nodes" / "dp8")
    assert metrics_of([cpu])[0] == [cpu / "1_nodes/dp8/train/metrics.jsonl"]
    names = ["1_nodes/dp8", "4_nodes/dp32"]
    assert metrics_of([gpu])[0] == [gpu / name / "train/metrics.jsonl" for name in names]
    empty = tmp_path / "empty"
    empty.mkdir()
    write_json(empty, a_ladder())
    with pytest.raises(KieloError, match="empty: no rung is measured yet"):
        metrics_of([empty])
