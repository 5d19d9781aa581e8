"""The log of a run: rows of numbers, on rank 0 only, to the terminal, metrics.jsonl, TensorBoard and W&B."""

import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TextIO

import xxhash

from kielo.artifact.manifest import write_text_atomically
from kielo.artifact.metrics import (
    Fp8GradientProbe,
    HeldOutLoss,
    PassedOver,
    PrecisionChange,
    PrecisionVerdict,
    Row,
    Spike,
    TaskScores,
    TrainingStep,
    describe_odd,
    split_metrics,
    write_row,
)
from kielo.artifact.scores import TaskScore
from kielo.recipe.amounts import format_seconds
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import TrainPlacement
from kielo.train.failsafe_stream import FailsafeStream

logger = logging.getLogger(__name__)


class Sink(Protocol):
    def start(self, step: int) -> None:
        """Begin before the first row. `step` is the step that the run resumes at, or 0."""

    def write(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Log:
    """The sinks and the steps to log. Writing enters `at_files` (`Progress.at_files`)."""

    def __init__(
        self,
        train: TrainPlacement,
        total_steps: int,
        sinks: Sequence[Sink],
        at_files: Callable[[], AbstractContextManager[object]] = nullcontext,
    ):
        self._every_steps = train.log_every_steps
        self._total_steps = total_steps
        self._sinks, self._at_files = sinks, at_files

    def start(self, step: int) -> None:
        for sink in self._sinks:
            sink.start(step)

    def go_back(self, step: int) -> None:
        self.close()
        self.start(step)

    def due(self, step: int) -> bool:
        return step % self._every_steps == 0 or step in (1, self._total_steps)

    def write(self, row: Row) -> None:
        with self._at_files():
            for sink in self._sinks:
                sink.write(row)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def refuse_lost_rows(self) -> None:
        for sink in self._sinks:
            if isinstance(sink, MetricsFile):
                sink.refuse_lost_rows()


class MetricsFile:
    """`metrics.jsonl`: one JSON object a line, appended. NaN and infinity, which JSON lacks, are null.

    Rows that cannot be written, for example on a full disk, wait in memory. `alert` is called once each time.
    tokens_after: step → tokens of the run until then.
    """

    def __init__(
        self, path: Path, alert: Callable[[int, str], None], tokens_after: Callable[[int], int] | None = None
    ):
        self._path, self._alert, self._tokens_after = path, alert, tokens_after
        self._file: BinaryIO | None = None
        self._waiting = b""

    def start(self, step: int) -> None:
        """Drop rows of an earlier attempt beyond `step`, and a half-written last line.

        Lines that are not rows of a run move to `metrics.jsonl.odd`. So do all lines if one row belongs to
        another run, where the same step has other tokens.
        """
        rows, odd = split_metrics(self._path)
        if odd:
            self._move_aside([line for _, line in odd], describe_odd(odd))
        if why := next(filter(None, (self._foreign(row) for row, _ in rows if row.step <= step)), ""):
            self._move_aside([line for _, line in rows], f"its rows are of another run ({why})")
            rows = []
        kept = [line.decode() + "\n" for row, line in rows if row.step <= step]
        write_text_atomically(self._path, "".join(kept))
        self._waiting = b""
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 - closed by close()

    def _foreign(self, row: Row) -> str:
        """Return how a row shows that it belongs to another run, or an empty string."""
        if self._tokens_after is not None and isinstance(row, TrainingStep) and row.tokens is not None:
            here = self._tokens_after(row.step)
            if row.tokens != here:
                return f"step {row.step:,} ends at {row.tokens:,} tokens there, and at {here:,} here"
        return ""

    def _move_aside(self, lines: Sequence[bytes], why: str) -> None:
        aside = self._path.with_name(self._path.name + ".odd")
        with open(aside, "ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        logger.warning("%s: %s. Moved to %s", self._path, why, aside.name)

    def write(self, row: Row) -> None:
        was_waiting = bool(self._waiting)
        self._waiting += write_row(row).encode()
        error = self._write_waiting()
        if error is not None and not was_waiting:
            why = f"{self._path} cannot be written ({error.strerror}). Its rows wait in memory until it can"
            self._alert(row.step, why)

    def _write_waiting(self) -> OSError | None:
        """Write the waiting rows, the last possibly in part. Return the error that stopped it."""
        try:
            while self._waiting and self._file is not None:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            return error
        return None

    def refuse_lost_rows(self) -> None:
        if (error := self._write_waiting()) is not None:
            rows = self._waiting.count(b"\n")
            raise KieloError(
                f"{self._path}: its last {rows} rows cannot be written ({error.strerror}) and are lost. All "
                "checkpoints exist. Fix: free some space"
            )

    def close(self) -> None:
        if self._file is not None:
            self._write_waiting()  # an error was already logged
            with suppress(OSError):
                self._file.close()
            self._file = None


_NO_SCALARS = re.compile(
    r"step|samples|seconds(_left)?|passed_over_(from|for)|spike_(from|to)|highest_loss_step|precision(_from)?"
    r"|outcome"
)


def _scalars(row: Row) -> Iterator[tuple[str, float]]:
    if isinstance(row, TaskScores):
        yield from task_scalars(row.task_scores)
        return
    for key, value in row.model_dump().items():
        if key == "heldout_sets":
            yield from set_scalars(value or {})
        elif value is not None and not _NO_SCALARS.fullmatch(key):
            yield key.replace("heldout_", "heldout/") if key.startswith("heldout_") else f"train/{key}", value


def _imported(module: str, package: str, setting: str, off: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        why = f"{setting} needs the package {package}, which is not installed"
        raise KieloError(f"{why}. Fix: `pip install {package}`, or --set {off}") from None


class TensorBoard:
    """Scalars under train/ and heldout/, hidden beyond the step where a run resumes, until a write fails."""

    def __init__(self, folder: Path, alert: Callable[[int, str], None]):
        key = "train.tensorboard"
        found = _imported("torch.utils.tensorboard", "tensorboard", f"{key} = true", f"{key}=false")
        self._make_writer = found.SummaryWriter
        self._folder, self._alert = folder, alert
        self._writer: Any = None

    def start(self, step: int) -> None:
        self._writer = self._make_writer(log_dir=str(self._folder), purge_step=step + 1 if step else None)

    def write(self, row: Row) -> None:
        if self._writer is None:
            return
        try:
            for name, value in _scalars(row):
                self._writer.add_scalar(name, value, row.step)
        except OSError as error:  # raised by the thread that writes
            self._alert(row.step, f"{self._folder} takes no more scalars ({error}). metrics.jsonl has them")
            self._writer = None

    def close(self) -> None:
        if self._writer is not None:
            with suppress(OSError):
                self._writer.close()


class Wandb:
    """TensorBoard's scalars for Weights & Biases. Each attempt continues the W&B run of its folder.

    W&B numbers rows by itself and never removes one, so `step` is a value, the x axis of all charts.
    """

    def __init__(self, project: str, name: str, folder: Path):
        self._wandb = _imported("wandb", "wandb", f"train.wandb = {project!r}", 'train.wandb=""')
        self._project, self._name, self._folder = project, name, folder
        self._run: Any = None

    def start(self, step: int) -> None:
        identity = xxhash.xxh3_64_hexdigest(str(self._folder.resolve()).encode(errors="surrogateescape"))
        self._run = self._wandb.init(
            project=self._project, name=self._name, id=identity, resume="allow", dir=str(self._folder)
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Row) -> None:
        self._run.log({"step": row.step, **dict(_scalars(row))})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None


def task_scalars(scores: Sequence[TaskScore]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of tasks, such as task/belebele_est_Latn/acc. A filter follows its metric."""
    for one in scores:
        yield f"task/{one.task}/{one.metric.removesuffix(',none').replace(',', '_')}", one.value


def set_scalars(scores: dict[str, dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield (tag, value) of held-out sets, such as heldout_bits_per_byte/fi/news: language, then set."""
    for name, score in scores.items():
        language = "-".join(score["languages"]) or "other"
        for key in ("loss", "bits_per_byte"):
            if score[key] is not None:
                yield f"heldout_{key}/{language}/{name}", score[key]


class PlainLines:
    def __init__(self, total_steps: int, stream: TextIO | FailsafeStream):
        self._total_steps, self._stream = total_steps, stream

    def start(self, step: int) -> None:
        if step:
            text = f"resuming after step {step} of {self._total_steps}"
            print(text, file=self._stream, flush=True)

    def write(self, row: Row) -> None:
        text = f"step {row.step}/{self._total_steps}  {describe(row)}"
        print(text, file=self._stream, flush=True)

    def close(self) -> None: ...


class ProgressBar:
    def __init__(self, total_steps: int, stream: TextIO | FailsafeStream):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.table import Column

        # On a narrow terminal the figures wrap to a second line.
        figures = TextColumn("{task.description}", table_column=Column(overflow="fold"))
        console = Console(file=stream)  # type: ignore[arg-type]  # it needs only what a FailsafeStream has
        columns = (TextColumn("train"), BarColumn(bar_width=12), MofNCompleteColumn(), figures)
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("starting", total=total_steps)

    def start(self, step: int) -> None:
        self._bar.update(self._task, completed=step)
        self._bar.start()

    def write(self, row: Row) -> None:
        if isinstance(row, TrainingStep):
            self._bar.update(self._task, completed=row.step, description=describe(row))
        else:
            self._bar.console.print(f"step {row.step}: {describe(row)}")

    def close(self) -> None:
        self._bar.stop()


class Terminal:
    def __init__(self, total_steps: int, alert: Callable[[int, str], None], stream: TextIO | None = None):
        stream = sys.stdout if stream is None else stream
        self._stream = stream if isinstance(stream, FailsafeStream) else FailsafeStream(stream)
        self._sink = (ProgressBar if stream.isatty() else PlainLines)(total_steps, self._stream)
        self._alert, self._has_failed = alert, False

    def start(self, step: int) -> None:
        self._sink.start(step)
        self._check(step)

    def write(self, row: Row) -> None:
        self._sink.write(row)
        self._check(row.step)

    def close(self) -> None:
        self._sink.close()

    def _check(self, step: int) -> None:
        if self._stream.failure is not None and not self._has_failed:
            self._has_failed = True
            failure = self._stream.failure
            self._alert(step, f"the terminal takes no more output ({failure}). Training continues without it")


def describe(row: Row) -> str:
    """Return e.g. "loss 3.120  norm 0.84  lr 9.1e-04  12,300 tokens/s  0.11 TFLOP/s  left 3 min 12 s"."""
    match row:
        case TrainingStep():
            return _describe_step(row)
        case HeldOutLoss():
            return _describe_heldout(row)
        case TaskScores():
            return _describe_tasks(row)
        case PassedOver():
            reason = "after a spike" if row.passed_over_for == "spike" else "as train.skip_steps says"
            return f"passed over from step {row.passed_over_from}, {reason}"
        case Spike():
            return (
                f"spike of steps {row.spike_from} to {row.spike_to} {row.outcome}: loss up to "
                f"{row.highest_loss:.4f}, usual {row.usual_loss:.4f}"
            )
        case Fp8GradientProbe():
            return f"gradients in fp8 and in bf16: cosine {row.fp8_gradient_cosine:.5f}"
        case PrecisionVerdict():
            return (
                f"{row.precision} since step {row.precision_from} {row.outcome}: loss "
                f"{row.loss_rise:+.2%}, gradient norm {row.gradient_norm_rise:+.1%} at most"
            )
        case PrecisionChange():
            return f"from here on in {row.precision}"
    raise TypeError(f"no description of {type(row).__name__}")


def _describe_step(row: TrainingStep) -> str:
    planned = row.planned_tokens_per_second
    parts = [
        "no label counts" if row.loss is None else f"loss {row.loss:.4f}",
        f"norm {row.gradient_norm:.2f}",
        f"lr {row.learning_rate:.2e}",
        f"{row.tokens_per_second:,.0f} tokens/s" + (f" ({planned:,.0f} planned)" if planned else ""),
        f"{row.tflops_per_second:.3g} TFLOP/s",
    ]
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.1%}")
    if row.skipped:
        parts.append(f"skipped {row.skipped}")
    if row.without_labels:
        parts.append(f"without labels {row.without_labels}")
    if row.seconds_left is not None:
        parts.append(f"left {format_seconds(row.seconds_left)}")
    return "  ".join(parts)


def _describe_heldout(row: HeldOutLoss) -> str:
    """Return e.g. "held-out loss 3.1200  1.412 bits per byte (fi 1.398, en 1.440)"."""
    if row.heldout_loss is None:
        return "held-out text: no label counts"
    line = f"held-out loss {row.heldout_loss:.4f}"
    if row.heldout_bits_per_byte is not None:
        line += f"  {row.heldout_bits_per_byte:.3f} bits per byte"
    sets = {} if row.heldout_sets is None else row.heldout_sets
    each = [
        f"{name} {score.bits_per_byte:.3f}" for name, score in sets.items() if score.bits_per_byte is not None
    ]
    return line + (f" ({', '.join(each)})" if each else "")


def _describe_tasks(row: TaskScores) -> str:
    """Return e.g. "task belebele_est_Latn  acc 0.3100 ± 0.0154 (chance 0.2500)  acc_norm 0.3300 ± 0.0157"."""
    parts = [f"task {row.scored_task}"]
    for one in row.task_scores:
        error = "" if one.standard_error is None else f" ± {one.standard_error:.4f}"
        chance = "" if one.chance is None else f" (chance {one.chance:.4f})"
        name = "" if one.task == row.scored_task else f"{one.task} "
        parts.append(f"{name}{one.metric.removesuffix(',none')} {one.value:.4f}{error}{chance}")
    return "  ".join([*parts, *([f"no score: {row.unscored}"] if row.unscored else [])])
