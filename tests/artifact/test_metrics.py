"""Each kind of row of metrics.jsonl is told apart, read and written back to the same bytes."""

import pytest
from pydantic import ValidationError

from kielo.artifact.metrics import (
    Fp8GradientProbe,
    HeldOutLoss,
    HeldOutScore,
    PassedOver,
    PrecisionChange,
    PrecisionVerdict,
    Row,
    Spike,
    TaskScores,
    TrainingStep,
    describe_odd,
    of_kind,
    read_metrics,
    read_row,
    split_metrics,
    write_row,
)

# Lines of real runs; the second is of a Kielo before phases and plans.
LINES = {
    b'{"step": 20, "tokens": 2560, "samples": 160, "phase": 1, "loss": 4.31, "gradient_norm": null, '
    b'"learning_rate": 1e-05, "tokens_per_second": 61377.5, "planned_tokens_per_second": null, '
    b'"tflops_per_second": 0.005, "mfu": null, "seconds": 0.4, "seconds_left": 0.0, '
    b'"skipped": 0}': TrainingStep,
    b'{"step": 1, "tokens": 128, "samples": 8, "loss": null, "gradient_norm": 0.9, "learning_rate": 0.001, '
    b'"tokens_per_second": 1e+20, "tflops_per_second": 0.1, "mfu": 0.5, "seconds": 2.0, '
    b'"seconds_left": 1.5, "skipped": 1}': TrainingStep,
    b'{"step": 20, "tokens": 2560, "heldout_loss": 4.25}': HeldOutLoss,
    b'{"step": 12, "tokens": 1536, "samples": 96, "phase": 2, "passed_over_from": 9}': PassedOver,
    b'{"step": 12, "left_out_sample": 95, "source": "web", "documents": [], "reason": "web.bin: cut"}': Row,
    b'{"step": 8, "tokens": 1024, "precision": "fp8"}': PrecisionChange,
    b'{"step": 8, "tokens": 1024, "precision": "fp8", "precision_from": 9, "outcome": "taken back", '
    b'"loss_rise": 0.31, "gradient_norm_rise": null}': PrecisionVerdict,
    b'{"step": 12, "fp8_gradient_cosine": 0.998}': Fp8GradientProbe,
    b'{"step": 12, "tokens": 1536, "scored_task": "a", "task_scores": [{"task": "a", "metric": "acc,none", '
    b'"value": 0.5, "questions": 2, "shots": 0}], "unscored": "b failed"}': TaskScores,
    b'{"step": 3, "of_a_newer_kielo": 1.5}': Row,
}  # fmt: skip


@pytest.mark.parametrize(("line", "kind"), LINES.items(), ids=[kind.__name__ for kind in LINES.values()])
def test_a_line_is_read_as_its_kind(line, kind):
    """And written again it has the same bytes."""
    row = read_row(line)
    assert type(row) is kind
    if kind is not Row:
        assert write_row(row).encode() == line + b"\n"


def test_what_is_not_finite_is_null():
    row = PrecisionVerdict(
        step=1, precision="fp8", precision_from=1, outcome="kept", loss_rise=float("inf"),
        gradient_norm_rise=float("nan"),
    )  # fmt: skip
    written = read_row(write_row(row).encode())
    assert (written.loss_rise, written.gradient_norm_rise) == (None, None)


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 3.5, "heldout_loss": 1.0}',
        b'{"step": "3", "heldout_loss": 1.0}',
        b'{"step": 3, "heldout_loss": "1.0"}',
        b'{"step": 3, "heldout_loss": true}',
        b'{"step": 3, "passed_over_from": null}',
        b'{"step": 3, "precision": "fp8", "outcome": "kept"}',
        b'{"step": 3, "loss": 1.0, "seconds": 1.0}',
        b'{"heldout_loss": 1.0}',
        b'[{"step": 3}]',
        b"",
    ],
)
def test_a_damaged_line_is_no_row(line):
    assert read_row(line) is None


def test_a_file_keeps_the_order_and_the_half_line_is_left_out(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"\n".join([*LINES, b"a note", b'{"step": 9, "lo']))
    rows = read_metrics(path)
    assert [type(row) for row in rows] == list(LINES.values())
    assert "1 line is no row of a run (number 11)" in caplog.text
    # A verdict is about a change of precision.
    assert [row.step for row in of_kind(rows, PrecisionChange)] == [8, 8]
    assert read_metrics(tmp_path / "none.jsonl") == []


ROWS = {
    TrainingStep: '"loss": 1.0, "tokens_per_second": 1.0, "seconds": 1.0',
    HeldOutLoss: '"heldout_loss": null',
    TaskScores: '"scored_task": "a", "task_scores": []',
    PassedOver: '"passed_over_from": 1', Fp8GradientProbe: '"fp8_gradient_cosine": 0.5',
    Spike: '"spike_from": 1, "spike_to": 2, "outcome": "told", "highest_loss": 1.0, "usual_loss": 1.0, '
    '"highest_loss_step": 1',
    PrecisionChange: '"precision": "bf16"',
    PrecisionVerdict: '"precision": "bf16", "precision_from": 1, "outcome": "kept", "loss_rise": 0.1, '
    '"gradient_norm_rise": 0.1',
    Row: '"other": 1',
}  # fmt: skip


def test_rows_of_a_log(tmp_path) -> None:
    """Each kind by its key; what is no number is null; half a line at the end is not odd, a person's is."""
    for kind, keys in ROWS.items():
        assert type(read_row(f'{{"step": 3, {keys}}}'.encode())) is kind
    for line in (b"", b"[1]", b'{"loss": 1.0}', b'{"step": "3"}', b'{"step": 3, "loss": "x"}'):
        assert read_row(line) is None
    row = TrainingStep(step=3, loss=float("nan"), tokens_per_second=float("inf"), seconds=1.0)
    assert write_row(row) == '{"step": 3, "loss": null, "tokens_per_second": null, "seconds": 1.0}\n'
    path, whole = tmp_path / "metrics.jsonl", '{"step": 3, "other": 1}'
    for half in ("", '{"st', '{"step": 4, "lo'):
        path.write_text(f"{whole}\n{half}")
        rows, odd = split_metrics(path)
        assert [line for _, line in rows] == [whole.encode()] and odd == []
    path.write_text(f'mine\n{whole}\n\n{{"step": 4, "lo\n  \nno')
    assert split_metrics(path)[1] == [(1, b"mine"), (4, b'{"step": 4, "lo'), (6, b"no")]
    assert split_metrics(tmp_path / "gone") == ([], [])
    assert describe_odd([(4, b"")]) == "1 line is no row of a run (number 4)"
    odd = [(number, b"") for number in range(1, 12)]
    assert describe_odd(odd[:10]) == "10 lines are no row of a run (number 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)"
    assert describe_odd(odd) == "11 lines are no row of a run (number 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, …)"


def test_rows_and_lines_that_are_none_are_told_in_numbers(tmp_path, caplog) -> None:
    """Nothing is told of a file of rows alone; a nested number that is not finite is null too."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 2}\n')
    assert [row.step for row in read_metrics(path)] == [1] and caplog.text == ""
    path.write_text('mine\n{"step": 1, "x": 2}\n\nyours\n')
    assert [row.step for row in read_metrics(path)] == [1]
    assert caplog.messages == [f"{path}: 2 lines are no row of a run (number 1, 4); skipped"]
    row = HeldOutLoss(
        step=2, heldout_loss=1.5, heldout_sets={"a": {"loss": float("nan")}, "b": {"loss": 2.5}}
    )
    assert write_row(row) == (
        '{"step": 2, "heldout_loss": 1.5, "heldout_sets": {"a": {"loss": null}, "b": {"loss": 2.5}}}\n'
    )


def test_rows_are_never_changed() -> None:
    """Nor are values bent to their type."""
    row, score = PrecisionChange(step=1, precision="bf16"), HeldOutScore(loss=1.0)
    for one, key in ((row, "step"), (score, "loss")):
        with pytest.raises(ValidationError, match="Instance is frozen"):
            setattr(one, key, 2)
        with pytest.raises(ValidationError, match="Input should be a valid"):
            type(one).model_validate(one.model_dump() | {key: "2"})
