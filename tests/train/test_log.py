"""Metrics tell one story over many attempts; speeds are sums done right."""

import io
import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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
    read_metrics,
)
from kielo.artifact.scores import TaskScore
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainPlacement
from kielo.train import meter as meter_module
from kielo.train.log import Log, MetricsFile, PlainLines, ProgressBar, TensorBoard, Wandb, describe
from kielo.train.meter import Meter
from kielo.train.records import usual_tokens_per_second, wall_seconds


def row(step: int, loss: float = 2.0) -> TrainingStep:
    return TrainingStep(
        step=step, loss=loss, gradient_norm=1.0, learning_rate=1e-3, tokens_per_second=1234.5, seconds=1.0,
        tflops_per_second=0.01, mfu=None, skipped=1, seconds_left=100.0,
    )  # fmt: skip


def no_alert(step: int, text: str) -> None:
    raise AssertionError(text)


def test_rows_beyond_the_restored_step_are_dropped(tmp_path: Path) -> None:
    """Later rows, half a line of a killed attempt and what JSON cannot say are dropped; a stream gets one
    plain line a row.
    """
    path = tmp_path / "metrics.jsonl"
    stream = io.StringIO()
    log = Log(TrainPlacement(log_every_steps=10), 25, [MetricsFile(path, no_alert), PlainLines(25, stream)])
    log.start(0)
    for step in (10, 20):
        log.write(row(step))
    log.close()
    path.write_text(path.read_text() + '{"step": 30, "lo')
    log.start(10)
    assert read_metrics(path) == [row(10)]
    log.write(row(20, float("nan")))
    log.write(HeldOutLoss(step=20, heldout_loss=1.5))
    log.close()
    assert [json.loads(line).get("loss", "held-out") for line in path.read_text().splitlines()] == [
        2.0,
        None,
        "held-out",
    ]
    assert [step for step in range(1, 26) if log.due(step)] == [1, 10, 20, 25]
    assert stream.getvalue().splitlines()[-3:] == [
        "resuming after step 10 of 25",
        "step 20/25  loss nan  norm 1.00  lr 1.00e-03  1,234 tokens/s  0.01 TFLOP/s  skipped 1  "
        "left 1 min 40 s",
        "step 20/25  held-out loss 1.5000",
    ]


@pytest.fixture
def limit_file_bytes() -> Iterator[Callable[[int], None]]:
    """Limits the bytes of a file that this process writes: a write beyond is cut, the next one fails."""
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_rows_wait_for_a_disk_that_is_full(tmp_path: Path, limit_file_bytes: Callable[[int], None]) -> None:
    """A row that is cut and those after it are in memory; with room again the file has each once and whole.

    One alert a time; rows that never could be written are an error at the end of the training.
    """
    path, alerts = tmp_path / "metrics.jsonl", []
    log = Log(TrainPlacement(), 25, [MetricsFile(path, lambda step, text: alerts.append((step, text)))])
    log.start(0)
    log.write(row(1))
    limit_file_bytes(path.stat().st_size + 10)
    for step in (2, 3):
        log.write(row(step))
    with pytest.raises(KieloError, match=r"metrics\.jsonl: its last 2 rows .*File too large"):
        log.refuse_lost_rows()
    assert len(path.read_text().splitlines()[-1]) == 10
    assert [step for step, _ in alerts] == [2] and "wait in memory" in alerts[0][1]
    limit_file_bytes(1 << 20)
    log.write(row(4))
    log.refuse_lost_rows()
    log.close()
    assert read_metrics(path) == [row(step) for step in (1, 2, 3, 4)]


def test_tensorboard_that_takes_no_more_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread's error comes out of a later call; one alert, and rows after it are dropped there."""
    alerts = []
    sink = TensorBoard(tmp_path, lambda step, text: alerts.append((step, text)))
    sink.start(0)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", refuse)
    for step in (2, 3):
        sink.write(row(step))
    sink.close()
    assert [step for step, _ in alerts] == [2] and "No space left" in alerts[0][1]


def test_the_progress_bar_cuts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure is on the screen in 80 columns, where one line is too short for them."""

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = ProgressBar(25, screen := Screen())
    bar.start(0)
    bar.write(row(10))
    bar.close()
    for figure in ("loss 2.0000", "1,234 tokens/s", "skipped 1", "left 1 min 40 s"):
        assert figure in screen.getvalue()
    assert "…" not in screen.getvalue()


def test_speed_leaves_out_what_is_not_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens a second over all ranks, TFLOP/s of one, MFU against one peak, time left;
    pauses do not count.
    """
    clock = [100.0]
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: clock[0])
    meter = Meter(ranks=2, total_tokens=10_000, device=torch.device("cpu"))
    meter.start(tokens=1000)
    meter.use(2e9, 1000, 4.0, 2100.0)
    clock[0] += 0.5
    with meter.paused():
        clock[0] += 60
    clock[0] += 0.5
    assert meter.lap(3000) == pytest.approx(
        {
            "tokens_per_second": 2000,
            "planned_tokens_per_second": 2100,
            "tflops_per_second": 2.0,
            "mfu": 0.5,
            "seconds": 1.0,
            "seconds_left": 3.5,
        }
    )
    # A phase of other FLOPs from token 4,000 on, after 500 tokens that were passed over.
    meter.pass_over(3500, 4000)
    meter.use(4e9, 4000, 4.0)  # of which nobody planned the speed
    clock[0] += 1.0
    row = meter.lap(4500)
    assert (row["tokens_per_second"], row["tflops_per_second"]) == pytest.approx(
        (1000, (500 * 2e-3 + 500 * 4e-3) / 2)
    )


def test_the_manifest_counts_attempts_apart() -> None:
    """The first row of each attempt warms up and is left out of the usual speed;
    seconds add up over attempts.
    """
    rows = [
        TrainingStep(step=1, loss=2.0, seconds=seconds, tokens_per_second=speed)
        for seconds, speed in ((5.0, 1), (6.0, 100), (7.0, 102), (4.0, 2), (5.0, 104))
    ]
    assert usual_tokens_per_second(rows) == 102
    assert wall_seconds(rows) == 12.0


STEP = {
    "step": 7, "tokens": 896, "samples": 56, "phase": 1, "loss": 3.12344, "gradient_norm": 0.844,
    "learning_rate": 9.12e-4, "tokens_per_second": 12_345.6, "tflops_per_second": 0.1144, "seconds": 9.0,
    "seconds_left": 180.0,
}  # fmt: skip
SPEED = "loss 3.1234  norm 0.84  lr 9.12e-04  12,346 tokens/s"
SETS = {
    "news": HeldOutScore(loss=2.0, bits_per_byte=1.3984, languages=["fi"]),
    "mixed": HeldOutScore(loss=None, bits_per_byte=1.44, languages=["fi", "en"]),
    "code": HeldOutScore(loss=1.5),
}
TASKS = [
    TaskScore(task="belebele", metric="acc,none", value=0.5, standard_error=0.1, chance=0.25, questions=9,
              shots=0),
    TaskScore(task="b", metric="exact,strict", value=0.25, questions=9, shots=0),
]  # fmt: skip
ROWS: list[tuple[Row, str]] = [
    (TrainingStep(**STEP), f"{SPEED}  0.114 TFLOP/s  left 3 min 00 s"),
    (
        TrainingStep(**STEP | {"planned_tokens_per_second": 20_000.0, "mfu": 0.4321, "skipped": 2}),
        f"{SPEED} (20,000 planned)  0.114 TFLOP/s  MFU 43.2%  skipped 2  left 3 min 00 s",
    ),
    *(
        (TrainingStep(**STEP | {"seconds_left": seconds}), f"{SPEED}  0.114 TFLOP/s  left {left}")
        for seconds, left in (
            (59.4, "59 s"), (60.0, "1 min 00 s"), (7199.0, "1 h 59 min"), (7200.0, "2 h 00 min"),
            (9000.0, "2 h 30 min"),
        )  # fmt: skip
    ),
    (HeldOutLoss(step=7, heldout_loss=3.12), "held-out loss 3.1200"),
    (
        HeldOutLoss(step=7, heldout_loss=3.12, heldout_bits_per_byte=1.4124, heldout_sets=SETS),
        "held-out loss 3.1200  1.412 bits per byte (news 1.398, mixed 1.440)",
    ),
    (
        PassedOver(step=9, passed_over_from=7, passed_over_for="spike"),
        "passed over from step 7, after a spike",
    ),
    (PassedOver(step=9, passed_over_from=7), "passed over from step 7, as train.skip_steps says"),
    (
        Spike(
            step=9, spike_from=5, spike_to=8, outcome="went back", highest_loss=7.25, usual_loss=2.5,
            highest_loss_step=6,
        ),
        "spike of steps 5 to 8 went back: loss up to 7.2500, usual 2.5000",
    ),
    (
        Fp8GradientProbe(step=9, fp8_gradient_cosine=0.998765),
        "gradients in fp8 and in bf16: cosine 0.99877",
    ),
    (
        PrecisionVerdict(
            step=9, precision="fp8", precision_from=5, outcome="kept", loss_rise=-0.01234,
            gradient_norm_rise=0.5,
        ),
        "fp8 since step 5 kept: loss -1.23%, gradient norm +50.0% at most",
    ),
    (PrecisionChange(step=9, precision="fp8"), "from here on in fp8"),
    (
        TaskScores(step=9, scored_task="belebele", task_scores=TASKS, unscored="c failed"),
        "task belebele  acc 0.5000 ± 0.1000 (chance 0.2500)  b exact,strict 0.2500  no score: c failed",
    ),
]  # fmt: skip


IDS = [f"{number} {type(row).__name__}" for number, (row, _) in enumerate(ROWS)]


@pytest.mark.parametrize(("row", "line"), ROWS, ids=IDS)
def test_each_kind_of_row_in_words(row: Row, line: str) -> None:
    stream = io.StringIO()
    lines = PlainLines(20, stream)
    lines.start(0)
    assert stream.getvalue() == ""
    lines.start(6)
    lines.write(row)
    assert describe(row) == line
    assert stream.getvalue() == f"resuming after step 6 of 20\nstep {row.step}/20  {line}\n"


def test_scalars_are_what_is_a_number_in_each_row_of_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out sets by language, then by name; a language that is not known is "other"."""
    found: list[dict[str, float]] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None, log=found.append)
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: run))
    sink = Wandb("project", "name", tmp_path)
    sink.start(0)
    for row in (
        TrainingStep(**STEP | {"mfu": None, "skipped": 0}),
        HeldOutLoss(step=7, heldout_loss=3.0, heldout_sets=SETS),
        ROWS[11][0],
        ROWS[-1][0],
    ):
        sink.write(row)
    assert found == [
        {
            "step": 7, "train/tokens": 896, "train/phase": 1, "train/loss": 3.12344,
            "train/gradient_norm": 0.844, "train/learning_rate": 9.12e-4,
            "train/tokens_per_second": 12_345.6, "train/tflops_per_second": 0.1144, "train/skipped": 0,
        },
        {
            "step": 7, "heldout/loss": 3.0, "heldout_loss/fi/news": 2.0,
            "heldout_bits_per_byte/fi/news": 1.3984, "heldout_bits_per_byte/fi-en/mixed": 1.44,
            "heldout_loss/other/code": 1.5,
        },
        {"step": 9, "train/highest_loss": 7.25, "train/usual_loss": 2.5},
        {"step": 9, "task/belebele/acc": 0.5, "task/b/exact_strict": 0.25},
    ]  # fmt: skip


def test_the_first_the_last_and_every_nth_step_are_logged() -> None:
    log = Log(TrainPlacement(log_every_steps=4), 10, [])
    assert [step for step in range(1, 11) if log.due(step)] == [1, 4, 8, 10]
