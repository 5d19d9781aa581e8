"""`kielo run`: every unfinished stage, in order. Stages exchange folders on disk."""

import argparse
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kielo.api import STAGES, Recipe
from kielo.cli.flags import VerbParser
from kielo.cli.run_languages import run_languages
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_text
from kielo.recipe.errors import KieloError, Stopped
from kielo.recipe.read import recipe_choices
from kielo.train.signals import REQUEUE


def run_flags(parser: VerbParser) -> None:
    parser.takes("$ kielo run demo_estonian --set corpus.sources=my_text.txt\nRECIPE")
    parser.add_argument("--from", dest="first", choices=STAGES, metavar="STAGE", help="begin with this stage")
    parser.add_argument("--to", dest="last", choices=STAGES, metavar="STAGE", help="end with this stage")
    parser.add_argument(
        "--only", choices=STAGES, metavar="STAGE", help="this stage alone: " + ", ".join(STAGES)
    )
    parser.add_argument(
        "--again",
        choices=[stage for stage in STAGES if stage not in ("train", "report")],
        metavar="STAGE",
        help="repeat this stage even if its inputs and settings did not change",
    )
    parser.takes("""
        --share K/N            do the K-th of N shares of the stage, beside other machines; --only STAGE
                               without it then joins the shares. Only with --only corpus or --only pack
        --ranks RANKS:count=1  number of training processes on this machine; default: 1
        --json                 print summary.json at the end instead of tables
    """)


def run(options: argparse.Namespace) -> int:
    share = _share(options)
    if choices := recipe_choices(options.recipe, options.sets):
        _chosen(options)
        return run_languages(options, choices)
    recipe, chosen = Recipe.load(options.recipe, *options.sets), _chosen(options)
    if share is not None:
        with _ended_by_sigterm():  # without a lease: each share is a stage of its own
            recipe.corpus_share(*share) if options.only == "corpus" else recipe.pack_share(*share)
        return 0
    with keep_stdout_for_json(options.json), _ended_by_sigterm():
        try:
            made = recipe.make(*chosen, ranks=options.ranks, again=options.again)
        except Stopped as stop:
            print_text(f"── {stop}")
            return REQUEUE
    if options.json:
        summary = made.summary if "report" in chosen else None
        stages = {name: stage.content() for name, stage in made.stages.items()}
        print_json(summary.content() if summary else {"stages": stages})
    return 0


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a stage as an exception does: it removes its partial folder and returns the lease.

    Training handles the signal itself.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(REQUEUE))
    try:
        yield
    except SystemExit:
        print("── stopped by SIGTERM; the same command makes the missing stages", file=sys.stderr)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _chosen(options: argparse.Namespace) -> tuple[str, ...]:
    if options.only:
        if options.first or options.last:
            raise KieloError("--only excludes --from and --to. Fix: one or the other")
        return (options.only,)
    first = STAGES.index(options.first) if options.first else 0
    last = STAGES.index(options.last) if options.last else len(STAGES) - 1
    if first > last:
        raise KieloError(
            f"--from {options.first} comes after --to {options.last}; the order is: {', '.join(STAGES)}"
        )
    return STAGES[first : last + 1]


def _share(options: argparse.Namespace) -> tuple[int, int] | None:
    if options.share is None:
        return None
    if options.only not in ("corpus", "pack"):
        raise KieloError(
            "--share: machines can share the stages corpus and pack. Fix: --only corpus or --only pack"
        )
    found = re.fullmatch(r"(\d+)/(\d+)", options.share)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise KieloError(f"--share {options.share}: give K/N with K from 1 to N, as 3/16")
    return int(found[1]), int(found[2])
