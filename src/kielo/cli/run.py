"""`kielo run`: every stage that is not done yet, in order. Each stage meets the next one in a
folder on disk.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kielo.artifact.lease import held
from kielo.artifact.manifest import expire, read_manifest
from kielo.artifact.trained_text import refuse_while_trained_on
from kielo.cli.flags import examples, takes_recipe
from kielo.cli.main import REQUEUE, STAGES
from kielo.cli.terminal import keep_stdout_for_json, print_json
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe


@dataclass
class Job:
    """What every stage may know; `stages` fills as they end."""

    recipe: Recipe
    reference: str
    sets: list[str]
    folder: Path
    ranks: int
    stages: dict[str, dict] = field(default_factory=dict)


class Requeue(Exception):
    """Training stopped on purpose; the later stages have to wait."""


def run_flags(parser: argparse.ArgumentParser) -> None:
    examples(parser, "kielo run demo_estonian --set corpus.sources=my_text.txt")
    takes_recipe(parser)
    parser.add_argument("--from", dest="first", choices=STAGES, metavar="STAGE", help="begin with this stage")
    parser.add_argument("--to", dest="last", choices=STAGES, metavar="STAGE", help="end with this stage")
    parser.add_argument(
        "--only", choices=STAGES, metavar="STAGE", help="this stage alone; one of " + ", ".join(STAGES)
    )
    parser.add_argument(
        "--again", choices=[stage for stage in STAGES if stage not in ("train", "report")], metavar="STAGE",
        help="make this stage anew though its inputs and settings did not change",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help="processes for training on this machine")
    parser.add_argument("--json", action="store_true", help="print summary.json at the end instead of tables")


def run(options: argparse.Namespace) -> int:
    recipe = read_recipe(options.recipe, options.sets).recipe
    if options.ranks < 1:
        raise KieloError(f"--ranks {options.ranks}: give 1 or more")
    job = Job(recipe, options.recipe, options.sets, run_folder(recipe), options.ranks)
    chosen = _chosen(options)
    with keep_stdout_for_json(options.json), _ended_by_sigterm(), held(job.folder):
        try:
            _make_again(options.again, job, chosen)
            for name in STAGES:
                _do(name, job, name in chosen)
        except Requeue as stop:
            print(f"── {stop}")
            return REQUEUE
    if options.json:
        summary = job.folder / "summary.json"
        print_json(
            json.loads(summary.read_text(encoding="utf-8")) if "report" in chosen else {"stages": job.stages}
        )
    return 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a stage as an exception does, so that what it began is cleared away and the lease given
    back.

    Training takes the signal over while it runs.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(REQUEUE))
    try:
        yield
    except SystemExit:
        print("── stopped by SIGTERM; the same command makes the stages that are missing", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _make_again(name: str | None, job: Job, chosen: tuple[str, ...]) -> None:
    """Let the stage `name` be made anew though nothing changed. Those after it are, where what they read is
    another then.
    """
    if name is None:
        return
    if name not in chosen:
        raise KieloError(f"--again {name}: this stage is not among those to run: {', '.join(chosen)}")
    folder = job.folder / _STAGES[name][0]
    if name in STAGES[: STAGES.index("train")]:
        refuse_while_trained_on(folder, f"--again {name}")
    expire(folder)


def _do(name: str, job: Job, is_chosen: bool) -> None:
    """Make the stage if it was chosen, and note its seconds; those of a stage that was made before, if it was
    not.
    """
    folder, make = _STAGES[name]
    before = read_manifest(job.folder / folder) if folder else None
    if not is_chosen:
        if before is not None:
            job.stages[name] = {"seconds": before.wall_seconds, "skipped": True}
        return
    print(f"── {name}", flush=True)
    started = time.monotonic()
    make(job)
    skipped = before is not None and read_manifest(job.folder / folder) == before
    seconds = before.wall_seconds if skipped else time.monotonic() - started
    job.stages[name] = {"seconds": round(seconds, 3), "skipped": skipped}
    if skipped:
        again = "" if name == "train" else f"; --again {name} makes it anew"
        print(f"   nothing to do: made before from the same inputs and recipe{again}", flush=True)


def _chosen(options: argparse.Namespace) -> tuple[str, ...]:
    if options.only:
        if options.first or options.last:
            raise KieloError("--only does not go with --from or --to; give one or the other")
        return (options.only,)
    first = STAGES.index(options.first) if options.first else 0
    last = STAGES.index(options.last) if options.last else len(STAGES) - 1
    if first > last:
        raise KieloError(
            f"--from {options.first} comes after --to {options.last}; the order is: {', '.join(STAGES)}"
        )
    return STAGES[first : last + 1]


def _corpus(job: Job) -> None:
    from kielo.corpus.run import run_corpus

    run_corpus(job.recipe, job.folder / "corpus", job.folder / "raw")


def _tokenizer(job: Job) -> None:
    from kielo.tokenizer.train import train_tokenizer

    _need(job, "corpus")
    train_tokenizer(job.recipe, job.folder / "corpus", job.folder / "tokenizer")


def _pack(job: Job) -> None:
    from kielo.dataset.pack import pack

    _need(job, "corpus", "tokenizer")
    pack(job.recipe, job.folder / "corpus", job.folder / "tokenizer", job.folder / "tokens")


def _train(job: Job) -> None:
    from kielo.cli.train import start_ranks, train_here

    _need(job, "tokenizer", "tokens")
    if job.ranks > 1:
        outcome = start_ranks(job.recipe, job.reference, job.sets, job.ranks)
    else:
        outcome = train_here(job.recipe)
    if outcome["exit_code"] == REQUEUE:
        raise Requeue(outcome["message"])
    if outcome["exit_code"]:
        raise KieloError(f"training failed: {outcome['message']}")


def _verify(job: Job) -> None:
    from kielo.cli.verify import certify

    _need(job, "tokens", "train")
    certificate = certify(job.recipe, job.folder)
    if not certificate["passed"]:
        raise KieloError(
            f"parity with Hugging Face failed: {certificate['first_difference']}; "
            f"see {job.folder / 'verify' / 'parity.json'}"
        )


def _evaluate(job: Job) -> None:
    from kielo.cli.checkpoint import newest_checkpoint
    from kielo.evaluate.run import evaluate

    _need(job, "corpus", "tokenizer", "tokens", "train")
    evaluate(job.recipe, job.folder, newest_checkpoint(job.folder))


def _export(job: Job) -> None:
    from kielo.cli.checkpoint import newest_checkpoint
    from kielo.cli.export import export_checkpoint

    _need(job, "tokenizer", "train")
    export_checkpoint(newest_checkpoint(job.folder), job.folder / "hf", job.folder / "tokenizer")


def _report(job: Job) -> None:
    from kielo.report.summary import print_summary
    from kielo.report.write import write_report

    _need(job, "corpus", "tokenizer", "train", "verify", "evaluate", "hf")
    job.stages["report"] = {"seconds": 0.0, "skipped": False}
    page = write_report(job.folder, job.recipe, job.stages)
    print_summary(json.loads((job.folder / "summary.json").read_text(encoding="utf-8")))
    print(f"report: {page}")


def _need(job: Job, *folders: str) -> None:
    for folder in folders:
        if read_manifest(job.folder / folder) is None:
            raise KieloError(
                f"{job.folder / folder} is not finished, and this stage needs it; "
                f"run `kielo run {job.reference}` without --from and --only"
            )


_STAGES: dict[str, tuple[str, Callable[[Job], None]]] = {
    "corpus": ("corpus", _corpus),
    "tokenizer": ("tokenizer", _tokenizer),
    "pack": ("tokens", _pack),
    "train": ("train", _train),
    "verify": ("verify", _verify),
    "evaluate": ("evaluate", _evaluate),
    "export": ("hf", _export),
    "report": ("", _report),
}
