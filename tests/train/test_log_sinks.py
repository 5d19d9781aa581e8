"""Where the rows of a log go: what each sink writes, and what is told when it can no more."""

import io
import logging
import os
import re
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.artifact.metrics import HeldOutLoss, PassedOver, TrainingStep, read_metrics
from kielo.recipe.sections import TrainPlacement
from kielo.train.log import Log, MetricsFile, PlainLines, ProgressBar, TensorBoard, Terminal
from tests.train.test_log import no_alert, row

PASSED_OVER = PassedOver(step=9, passed_over_from=7)
LINE = "loss 2.0000  norm 1.00  lr 1.00e-03  1,234 tokens/s  0.01 TFLOP/s  skipped 1  left 1 min 40 s"


class Screen(io.StringIO):
    """A terminal, or a file; `fails`: it takes nothing any more."""

    def __init__(self, is_terminal: bool, fails: bool = False):
        super().__init__()
        self.is_terminal, self.fails, self.flushed = is_terminal, fails, 0

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        if self.fails:
            raise OSError(5, "Input/output error")
        return super().write(text)

    def flush(self) -> None:
        self.flushed += 1


def test_rows_go_back_with_the_run(tmp_path: Path) -> None:
    """To step 10, and on from there; each sink is closed and begun again."""
    path, begun = tmp_path / "metrics.jsonl", []
    other = SimpleNamespace(
        start=lambda step: begun.append(step), write=lambda row: begun.append(row.step),
        close=lambda: begun.append("close"),
    )  # fmt: skip
    log = Log(TrainPlacement(), 25, [MetricsFile(path, no_alert), other])
    log.start(0)
    for step in (9, 10, 11):
        log.write(row(step))
    log.go_back(10)
    log.write(row(11, 3.0))
    log.refuse_lost_rows()
    log.close()
    assert read_metrics(path) == [row(9), row(10), row(11, 3.0)]
    assert begun == [0, 9, 10, 11, "close", 10, 11, "close"]
    log.close()


def test_rows_of_another_run_are_moved_aside(tmp_path: Path, caplog) -> None:
    """All of them, once a step that stays has other tokens; rows beyond the checkpoint go anyway."""
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.odd"
    metrics = MetricsFile(path, no_alert, lambda step: 50 if step == 5 else 7)
    metrics.start(0)
    rows = [row(step).model_copy(update={"tokens": 10 * step}) for step in (5, 6)]
    for one in rows:
        metrics.write(one)
    metrics.close()
    whole = path.read_bytes()
    metrics.start(5)
    metrics.close()
    assert read_metrics(path) == rows[:1] and not aside.exists()
    path.write_bytes(whole)
    with caplog.at_level(logging.WARNING):
        metrics.start(6)
    metrics.close()
    assert path.read_bytes() == b"" and aside.read_bytes() == whole
    assert "step 6 ends at 60 tokens there, and at 7 here). Moved to metrics.jsonl.odd" in caplog.text


def test_lines_that_are_no_rows_are_moved_aside(tmp_path: Path, caplog, monkeypatch) -> None:
    """Behind those of an earlier time; what is left are the rows."""
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl.odd"
    metrics = MetricsFile(path, no_alert)
    metrics.start(0)
    metrics.write(row(5))
    metrics.close()
    good = path.read_bytes()
    path.write_bytes(b"a note\n" + good + b"another\n")
    aside.write_bytes(b"old\n")
    fsync, on_disk = os.fsync, []

    def noted(file: int) -> None:
        on_disk.append(os.fstat(file).st_size)
        fsync(file)

    monkeypatch.setattr(os, "fsync", noted)
    with caplog.at_level(logging.WARNING):
        metrics.start(5)
    metrics.close()
    assert on_disk[0] == len(b"old\na note\nanother\n")  # before the lines are taken from the first file
    assert path.read_bytes() == good and aside.read_bytes() == b"old\na note\nanother\n"
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith(f"{path}: ") and told.endswith(". Moved to metrics.jsonl.odd")
    caplog.clear()
    metrics.start(5)
    metrics.close()
    assert not caplog.records and aside.read_bytes() == b"old\na note\nanother\n"


def test_rows_that_wait_are_written_when_the_log_is_closed(tmp_path: Path) -> None:
    path, alerts = tmp_path / "metrics.jsonl", []
    metrics = MetricsFile(path, lambda *alert: alerts.append(alert))
    metrics.start(0)
    metrics.write(row(1))
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, most))
        metrics.write(row(2))
        metrics.write(row(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reason = f"{path} cannot be written (File too large). Its rows wait in memory until it can"
    assert alerts == [(2, reason)] and read_metrics(path) == [row(1)]
    metrics.close()
    assert read_metrics(path) == [row(1), row(2), row(3)]


class Writer:
    """In place of TensorBoard's."""

    made: list["Writer"] = []

    def __init__(self, **options: Any):
        self.options, self.scalars, self.is_closed = options, [], False
        Writer.made.append(self)

    def add_scalar(self, *scalar: Any) -> None:
        self.scalars.append(scalar)

    def close(self) -> None:
        self.is_closed = True


def test_tensorboard_hides_the_rows_beyond_the_step_that_a_run_resumes_from(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter", Writer)
    Writer.made.clear()
    board = TensorBoard(tmp_path, no_alert)
    board.close()
    board.write(row(1))
    for step in (0, 7):
        board.start(step)
        board.write(HeldOutLoss(step=9, heldout_loss=2.5, heldout_bits_per_byte=1.25))
        board.close()
    scalars = [("heldout/loss", 2.5, 9), ("heldout/bits_per_byte", 1.25, 9)]
    assert [(writer.scalars, writer.is_closed) for writer in Writer.made] == [(scalars, True)] * 2
    folder = str(tmp_path)
    assert [writer.options for writer in Writer.made] == [
        {"log_dir": folder, "purge_step": None}, {"log_dir": folder, "purge_step": 8},
    ]  # fmt: skip


def test_a_file_gets_lines_and_each_at_once() -> None:
    screen = Screen(is_terminal=False)
    terminal = Terminal(25, no_alert, screen)
    terminal.start(0)
    terminal.write(row(10))
    flushed = screen.flushed
    terminal.write(PASSED_OVER)
    terminal.close()
    assert screen.flushed == flushed + 1 > 1
    assert screen.getvalue() == (
        f"step 10/25  {LINE}\nstep 9/25  passed over from step 7, as train.skip_steps says\n"
    )
    PlainLines(25, screen).start(3)
    assert screen.getvalue().endswith("resuming after step 3 of 25\n")


def shown(screen: Screen) -> list[str]:
    """The lines of a screen, without colours, and without what was drawn over."""
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    return [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]


def test_a_terminal_gets_a_bar_that_moves_with_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve wide, from the step that the run goes on from; other rows are lines above it."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(is_terminal=True)
    terminal = Terminal(24, no_alert, screen)
    terminal.start(6)
    terminal.write(PASSED_OVER)
    begun = shown(screen)
    assert any("6/24" in line and "starting" in line for line in begun)
    assert "step 9: passed over from step 7, as train.skip_steps says" in begun
    terminal.write(row(18))
    terminal.close()
    last = [line for line in shown(screen) if line.startswith("train")][-1]
    bar = last.split()[1]
    assert last == f"train {bar} 18/24 {LINE}" and len(bar) == 12 and set(bar) <= set("━╸╺")
    assert "\x1b[?25h" in screen.getvalue()  # the cursor is given back


@pytest.mark.parametrize(("begins", "told_at"), [(False, 6), (True, 5)])
def test_a_terminal_that_is_gone_is_told_once(begins: bool, told_at: int) -> None:
    """At the first row that it did not take, or at the beginning."""
    alerts: list[tuple] = []
    screen = Screen(is_terminal=False, fails=begins)
    terminal = Terminal(25, lambda *alert: alerts.append(alert), screen)
    terminal.start(5)
    screen.fails = True
    for step in (6, 7):
        terminal.write(row(step))
    terminal.close()
    reason = "the terminal takes no more output ([Errno 5] Input/output error). Training continues without it"
    assert alerts == [(told_at, reason)]


def test_a_log_is_due_at_steps_of_its_own() -> None:
    log = Log(TrainPlacement(log_every_steps=3), 8, [])
    assert [step for step in range(1, 9) if log.due(step)] == [1, 3, 6, 8]


def test_the_bar_of_a_training_that_is_done_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("FORCE_COLOR", "1")
    bar = ProgressBar(4, screen := Screen(is_terminal=True))
    bar.start(0)
    bar.write(TrainingStep(**row(4).model_dump()))
    bar.close()
    assert f"train {'━' * 12} 4/4 {LINE}" in shown(screen)
