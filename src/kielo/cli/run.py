"""`kielo run`: every stage that is not done yet, in order. Stages exchange folders on disk."""

import argparse
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kielo.artifact.lease import held
from kielo.artifact.manifest import expire, read_manifest
from kielo.artifact.run_format import write_run_recipe
from kielo.artifact.scores import StageTime, Summary
from kielo.artifact.stage_counts import CorpusCounts
from kielo.artifact.stage_json import read_counts, read_json
from kielo.artifact.trained_text import refuse_while_trained_on
from kielo.cli.flags import examples, takes_recipe
from kielo.cli.main import REQUEUE, STAGES
from kielo.cli.run_languages import run_languages
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_text
from kielo.cli.train import warn_of_weights
from kielo.recipe.errors import KieloError
from kielo.recipe.read import RUN_RECIPE_NAME, read_recipe, recipe_languages, run_folder
from kielo.recipe.sections import Recipe

# The stages that make the weights of a run which another one follows.
_UP_TO_WEIGHTS = ("corpus", "tokenizer", "pack", "train", "export")


@dataclass
class Invocation:
    """One call of `kielo run`; `stages` fills as they end.

    share: (k, n) where this machine makes the parts of token shards that are the k-th of n machines'.
    """

    recipe: Recipe
    reference: str
    sets: list[str]
    folder: Path
    ranks: int
    share: tuple[int, int] | None = None
    stages: dict[str, StageTime] = field(default_factory=dict)


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
    recipe = read_recipe(options.recipe, options.sets).recipe
    invocation = Invocation(recipe, options.recipe, options.sets, run_folder(recipe), options.ranks, share)
    chosen = _chosen(options)
    if share is not None:
        with _ended_by_sigterm():  # no lease: a share's parts are stages of their own
            return _pack_share(invocation)
    with keep_stdout_for_json(options.json), _ended_by_sigterm():
        try:
            _check_before(invocation, chosen)
            warn_of_weights(recipe)
            _run_stages(invocation, chosen, options.again)
        except Requeue as stop:
            print_text(f"── {stop}")
            return REQUEUE
    if options.json:
        if "report" in chosen:
            print_json(read_json(invocation.folder, Summary).content())
        else:
            print_json({"stages": {name: stage.content() for name, stage in invocation.stages.items()}})
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


def _run_followed(invocation: Invocation) -> None:
    """Run the recipe that this one follows as far as its export; stages that are current are skipped.

    Raises KieloError for one that cannot be read, that follows another one itself, or whose weights are not
    those that this recipe starts from.
    """
    recipe, reference = invocation.recipe, invocation.recipe.follows
    try:
        first = read_recipe(reference).recipe
    except KieloError as error:
        raise KieloError(f"follows = {reference!r}: {error}") from None
    followed = Invocation(first, reference, [], run_folder(first), invocation.ranks)
    if first.follows:
        raise KieloError(
            f"follows = {reference!r}: {first.name} itself follows {first.follows!r}, and only one run is "
            f"made before another; what would work: `kielo run {reference}`, then this with --set follows="
        )
    exported = followed.folder / "hf"
    if Path(recipe.model.weights.removeprefix("hf:")).resolve() != exported.resolve():
        raise KieloError(
            f"follows = {reference!r}: its run exports its weights to {exported}, and model.weights = "
            f"{recipe.model.weights!r}; what would work: --set model.weights=hf:{exported}, or --set follows="
        )
    print_text(f"══ {first.name}, which {recipe.name} follows")
    warn_of_weights(first)
    _run_stages(followed, _UP_TO_WEIGHTS)
    print_text(f"══ {recipe.name}")


def _run_stages(invocation: Invocation, chosen: tuple[str, ...], again: str | None = None) -> None:
    """Make the chosen stages in order, and write the recipe into the run folder; one job at a time."""
    with held(invocation.folder):
        _make_again(again, invocation, chosen)
        for name in STAGES:
            _do(name, invocation, name in chosen)
            is_last = name == chosen[-1]
            # Not before a stage was made, or all were: a refusal changes nothing.
            if name in chosen and (is_last or not invocation.stages[name].skipped):
                _note_recipe(invocation, is_last)
            if name == "corpus" and "train" in chosen:
                _check_budget(invocation)


def _note_recipe(invocation: Invocation, says_if_not: bool) -> None:
    """Write the recipe into the run folder, unless a person changed the one there."""
    if not write_run_recipe(invocation.recipe, invocation.folder) and says_if_not:
        path = invocation.folder / RUN_RECIPE_NAME
        print(f"{path} was changed by hand and stays as it is", file=sys.stderr)


def _make_again(name: str | None, invocation: Invocation, chosen: tuple[str, ...]) -> None:
    """Have the stage `name` made again though nothing changed; later stages follow if its output changes."""
    if name is None:
        return
    if name not in chosen:
        raise KieloError(f"--again {name}: this stage is not among those to run: {', '.join(chosen)}")
    folder = invocation.folder / _STAGES[name][0]
    if name in STAGES[: STAGES.index("train")]:
        refuse_while_trained_on(folder, f"--again {name}")
    expire(folder)


def _do(name: str, invocation: Invocation, is_chosen: bool) -> None:
    """Make the stage if it was chosen, and note its seconds; else note those of the stage made before."""
    folder, make = _STAGES[name]
    before = read_manifest(invocation.folder / folder) if folder else None
    if not is_chosen:
        if before is not None:
            invocation.stages[name] = StageTime(seconds=before.wall_seconds, skipped=True)
        return
    started = time.monotonic()
    # Of a stage that was made before, the title waits for its first word: there may be nothing to do. Not
    # where ranks of a training write to the terminal themselves.
    title = f"── {name}"
    waits = before is not None and not (name == "train" and _starts_ranks(invocation))
    with _after_title(title, waits) as titled:
        make(invocation)
    skipped = before is not None and read_manifest(invocation.folder / folder) == before
    seconds = before.wall_seconds if skipped else time.monotonic() - started
    invocation.stages[name] = StageTime(seconds=round(seconds, 3), skipped=skipped)
    if skipped:
        again = "" if name == "train" else f"; --again {name} redoes it"
        begin = "  " if titled() else title + ":"
        print_text(f"{begin} nothing to do, same inputs and recipe{again}")
    elif not titled():  # it was made again without a word
        print_text(title)


@contextmanager
def _after_title(title: str, waits: bool) -> Iterator[Callable[[], bool]]:
    """Print `title` before the output of the block: at once, or when there is some.

    Yields a function that returns True if it was printed.
    """
    if not waits:
        print_text(title)
        yield lambda: True
        return
    printed: list[str] = []
    streams = [_TitledStream(stream, title, printed) for stream in (sys.stdout, sys.stderr)]
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        yield lambda: bool(printed)


class _TitledStream:
    """A stream that prints a title to stdout before the first text of any of those that share `printed`."""

    def __init__(self, stream: Any, title: str, printed: list[str]):
        self._stream, self._title, self._printed, self._stdout = stream, title, printed, sys.stdout

    def write(self, text: str) -> int:
        if text and not self._printed:
            self._printed.append(self._title)
            self._stdout.write(self._title + "\n")
            self._stdout.flush()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


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


def _corpus(invocation: Invocation) -> None:
    from kielo.corpus.corpus_stage import run_corpus

    if not invocation.recipe.corpus.of_raw_text.sources:
        print_text("   nothing to do: all sources are ready tokens, which are read in place")
        return
    run_corpus(invocation.recipe, invocation.folder / "corpus", invocation.folder / "raw")


def _check_before(invocation: Invocation, chosen: tuple[str, ...]) -> None:
    """Make the run that this one follows, and refuse before the stages that take long what cannot work.

    That are files which are not there, and every number of the recipe that does not fit its model, or the
    ranks that will train here.
    """
    from kielo.resolve.resolve import refuse_before_text
    from kielo.tokenizer.stage_inputs import check_inputs, check_vectors

    recipe, has_tokenizer = invocation.recipe, "tokenizer" in chosen
    if has_tokenizer:
        check_vectors(recipe)
    if recipe.follows and chosen != ("corpus",):  # which needs no weights
        _run_followed(invocation)
    if has_tokenizer:
        check_inputs(recipe)
    if "train" in chosen:
        refuse_before_text(recipe, *_trains_here(invocation))
    elif STAGES.index(chosen[0]) < STAGES.index("train"):
        refuse_before_text(recipe)


def _trains_here(invocation: Invocation) -> tuple[Any, ...]:
    """Return the ranks, device and software of the training; nothing if it ended before, or without torch.

    Only torch knows the devices. A run that has nothing to do does not wait for its import.
    """
    if read_manifest(invocation.folder / "train") is not None or not find_spec("torch"):
        return ()
    import torch

    from kielo.resolve.software import installed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return invocation.ranks, device, installed(device)


def _check_budget(invocation: Invocation) -> None:
    """Refuse a token budget that the text cannot give, before the stages that take longer."""
    from kielo.resolve.budget import check_text_suffices

    corpus = read_counts(invocation.folder / "corpus", CorpusCounts)
    # Of ready tokens the pack stage counts how many there are.
    if corpus is not None and not invocation.recipe.corpus.token_sources:
        check_text_suffices(invocation.recipe, corpus.bytes_kept or 0, f"{invocation.folder / 'corpus'}")


def _tokenizer(invocation: Invocation) -> None:
    from kielo.artifact.stage_json import read_stage_json
    from kielo.artifact.tokenizer_files import RowMap
    from kielo.tokenizer.make_row_map import row_map_in_words
    from kielo.tokenizer.train import train_tokenizer, unfilled_vocabulary

    _need(invocation, "corpus")
    recipe, folder = invocation.recipe, invocation.folder / "tokenizer"
    before = read_manifest(folder)
    made = train_tokenizer(recipe, invocation.folder / "corpus", folder)
    if made != before and (said := unfilled_vocabulary(recipe, made)):
        print_text(f"tokenizer: {said}", sys.stderr)
    row_map = read_stage_json(folder, RowMap)
    if made != before and row_map is not None:
        print_text(f"transplant: {row_map_in_words(row_map)}")
    if recipe.tokenizer.ready and read_manifest(invocation.folder / "tokens") is None:
        _compare_tokenizer(recipe, invocation.folder)


def _compare_tokenizer(recipe: Recipe, folder: Path) -> None:
    """Compare a ready tokenizer with AutoTokenizer before the text is packed, where transformers is here.

    Training compares it again, with the packed ids.
    """
    from kielo.checkpoint.auto_tokenizer import compare_folder
    from kielo.dataset.packed_documents import corpus_sample

    has_corpus = read_manifest(folder / "corpus") is not None
    sample = corpus_sample(folder / "corpus") if has_corpus else []
    said, warnings = compare_folder(folder / "tokenizer", recipe.model.model_type, sample)
    print_text(f"tokenizer: {said}")
    for warning in warnings:
        print_text(f"warning: {warning}", sys.stderr)


def _pack(invocation: Invocation) -> None:
    from kielo.dataset.encoded_documents import BEGINS_WITH
    from kielo.dataset.evaluation_texts import pack_evaluation_texts
    from kielo.dataset.heldout_sets import EVALUATION_TEXTS
    from kielo.dataset.pack import pack
    from kielo.dataset.pack_sequences import pack_sequences
    from kielo.dataset.packed_sequences import packing_rows

    _need(invocation, "corpus", "tokenizer")
    packed = pack(
        invocation.recipe,
        invocation.folder / "corpus",
        invocation.folder / "tokenizer",
        invocation.folder / "tokens",
    )
    packing = pack_sequences(invocation.recipe, invocation.folder / "tokens")
    for row in packing_rows(packing) if packing else []:
        print_text(row.sentence())
    pack_evaluation_texts(
        invocation.recipe,
        invocation.folder / "tokenizer",
        invocation.folder / EVALUATION_TEXTS,
        packed.section.get(BEGINS_WITH, ()),
    )


def _share(options: argparse.Namespace) -> tuple[int, int] | None:
    if options.share is None:
        return None
    if options.only != "pack":
        raise KieloError("--share goes with --only pack, the stage that several machines do together")
    found = re.fullmatch(r"(\d+)/(\d+)", options.share)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise KieloError(f"--share {options.share}: give K/N with K from 1 to N, as 3/16")
    return int(found[1]), int(found[2])


def _pack_share(invocation: Invocation) -> int:
    """Make this machine's parts of the token shards. Other machines do so at the same time."""
    from kielo.dataset.pack import pack_share

    _need(invocation, "corpus", "tokenizer")
    if not invocation.recipe.corpus.of_raw_text.sources:
        raise KieloError("--share: all sources are ready tokens, which are read in place; leave it out")
    folder = invocation.folder
    made = pack_share(
        invocation.recipe, folder / "corpus", folder / "tokenizer", folder / "tokens", invocation.share
    )
    k, n = invocation.share
    print_text(
        f"share {k} of {n}: {made} parts of the token shards are there; when all shares are, `kielo run "
        f"{invocation.reference} --only pack` joins them"
        if made
        else f"share {k} of {n}: nothing to do"
    )
    return 0


def _train(invocation: Invocation) -> None:
    from kielo.cli.train import train_here, train_on_ranks

    _need(invocation, "tokenizer", "tokens")
    if invocation.ranks > 1:
        outcome = train_on_ranks(invocation.recipe, invocation.reference, invocation.sets, invocation.ranks)
    else:
        outcome = train_here(invocation.recipe)
    if outcome.exit_code == REQUEUE:
        raise Requeue(outcome.message)
    if outcome.exit_code:
        raise KieloError(f"training failed: {outcome.message}")


def _starts_ranks(invocation: Invocation) -> bool:
    from kielo.cli.train import is_done

    return invocation.ranks > 1 and not is_done(invocation.recipe, invocation.ranks)


def _verify(invocation: Invocation) -> None:
    from kielo.cli.verify import certify

    _need(invocation, "tokens", "train")
    if _is_encoder(invocation):
        print_text("   training is compared with transformers for decoders only")
        return
    certificate = certify(invocation.recipe, invocation.folder, shows_current=False)
    if not certificate.passed:
        raise KieloError(
            f"parity with Hugging Face failed: {certificate.first_difference.content()}; "
            f"see {invocation.folder / 'verify' / certificate.FILE_NAME}"
        )


def _evaluate(invocation: Invocation) -> None:
    from kielo.cli.checkpoint import newest_checkpoint
    from kielo.evaluate.evaluation import evaluate

    _need(invocation, "corpus", "tokenizer", "tokens", "train")
    evaluate(invocation.recipe, invocation.folder, newest_checkpoint(invocation.folder))


def _export(invocation: Invocation) -> None:
    from kielo.cli.checkpoint import newest_checkpoint
    from kielo.cli.export import export_checkpoint

    _need(invocation, "tokenizer", "train")
    export_checkpoint(
        newest_checkpoint(invocation.folder),
        invocation.folder / "hf",
        invocation.folder / "tokenizer",
        invocation.recipe,
    )


def _report(invocation: Invocation) -> None:
    from kielo.report.make_summary import print_summary
    from kielo.report.write import write_report

    certified = [] if _is_encoder(invocation) else ["verify"]
    _need(invocation, "corpus", "tokenizer", "train", *certified, "evaluate", "hf")
    invocation.stages["report"] = StageTime(seconds=0.0, skipped=False)
    page = write_report(invocation.folder, invocation.recipe, invocation.stages)
    print_summary(read_json(invocation.folder, Summary))
    print_text(f"report: {page}")


def _is_encoder(invocation: Invocation) -> bool:
    return invocation.recipe.train.objective == "masked_tokens"


def _need(invocation: Invocation, *folders: str) -> None:
    has_raw_text = bool(invocation.recipe.corpus.of_raw_text.sources)
    for folder in folders:
        if folder == "corpus" and not has_raw_text:
            continue
        if read_manifest(invocation.folder / folder) is None:
            raise KieloError(
                f"{invocation.folder / folder} is not finished, and this stage needs it; "
                f"run `kielo run {invocation.reference}` without --from and --only"
            )


_STAGES: dict[str, tuple[str, Callable[[Invocation], None]]] = {
    "corpus": ("corpus", _corpus),
    "tokenizer": ("tokenizer", _tokenizer),
    "pack": ("tokens", _pack),
    "train": ("train", _train),
    "verify": ("verify", _verify),
    "evaluate": ("evaluate", _evaluate),
    "export": ("hf", _export),
    "report": ("", _report),
}
