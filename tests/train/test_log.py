"""Metrics tell one story over many attempts; speeds are sums done right."""

import io
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kielo.artifact.metrics import HeldOutLoss, TrainingStep, read_metrics
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainPlacement
from kielo.train import meter as meter_module
from kielo.train.log import Log, MetricsFile, PlainLines, ProgressBar, TensorBoard
from kielo.train.manifest import usual_tokens_per_second, wall_seconds
from kielo.train.meter import Meter


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
        "going on after step 10 of 25",
        "step 20/25  loss nan  norm 1.00  lr 1.00e-03  1,234 tokens/s  0.01 TFLOP/s  skipped 1  left 2 min",
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
    for figure in ("loss 2.0000", "1,234 tokens/s", "skipped 1", "left 2 min"):
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
