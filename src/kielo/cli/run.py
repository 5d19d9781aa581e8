"""`kielo run`: every stage that is not done yet, in order. Stages exchange folders on disk."""

import argparse
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kielo.api import STAGES, Recipe
from kielo.cli.flags import examples, takes_recipe
from kielo.cli.run_languages import run_languages
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_text
from kielo.recipe.errors import KieloError, Stopped
from kielo.recipe.read import recipe_languages
from kielo.train.signals import REQUEUE


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
        help="make this stage again though its inputs and settings did not change",
    )  # fmt: skip
    parser.add_argument(
        "--share", metavar="K/N",
        help="with --only pack: pack the K-th of N shares of the text, beside other machines; then --only "
        "pack without it joins them",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, default=1, help="processes for training on this machine")
    parser.add_argument("--json", action="store_true", help="print summary.json at the end instead of tables")


def run(options: argparse.Namespace) -> int:
    if options.ranks < 1:
        raise KieloError(f"--ranks {options.ranks}: give 1 or more")
    share = _share(options)
    if codes := recipe_languages(options.recipe, options.sets):
        _chosen(options)
        return run_languages(options, codes)
    recipe, chosen = Recipe.load(options.recipe, *options.sets), _chosen(options)
    if share is not None:
        with _ended_by_sigterm():  # no lease: a share's parts are stages of their own
            recipe.pack_share(*share)
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
    """Have SIGTERM end a stage as an exception does: its folder aside is removed and the lease given back.

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


def _share(options: argparse.Namespace) -> tuple[int, int] | None:
    if options.share is None:
        return None
    if options.only != "pack":
        raise KieloError("--share goes with --only pack, the stage that several machines do together")
    found = re.fullmatch(r"(\d+)/(\d+)", options.share)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise KieloError(f"--share {options.share}: give K/N with K from 1 to N, as 3/16")
    return int(found[1]), int(found[2])
