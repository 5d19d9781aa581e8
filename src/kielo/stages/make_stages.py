"""The stages of a run in their order, the checks before them, and their messages.

Stages exchange folders on disk.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kielo.artifact.lease import held
from kielo.artifact.manifest import expire, read_manifest
from kielo.artifact.run_format import refuse_other_start, write_run_recipe
from kielo.artifact.scores import STAGE_FOLDERS, Scores, StageTime, Summary
from kielo.artifact.stage_counts import CorpusCounts, RowMap
from kielo.artifact.stage_json import read_counts, read_json, read_stage_json
from kielo.artifact.trained_text import refuse_while_trained_on
from kielo.checkpoint.auto_tokenizer import compare_folder
from kielo.corpus.corpus_shares import run_corpus_share
from kielo.corpus.corpus_stage import run_corpus
from kielo.dataset.document_packer import BEGINS_WITH
from kielo.dataset.evaluation_texts import pack_evaluation_texts
from kielo.dataset.heldout_sets import EVALUATION_TEXTS
from kielo.dataset.pack import pack, pack_share
from kielo.dataset.pack_sequences import pack_sequences
from kielo.dataset.packed_sequences import packing_rows
from kielo.dataset.query import corpus_sample
from kielo.evaluate.evaluation import unscored_in_words
from kielo.recipe.errors import KieloError, Stopped, print_text
from kielo.recipe.read import RUN_RECIPE_NAME, read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.report.make_summary import print_summary
from kielo.resolve.resolve import refuse_before_text
from kielo.resolve.software import installed
from kielo.resolve.text import check_text_suffices
from kielo.stages import late
from kielo.stages.attempt import is_done, this_device, train_here, train_on_ranks, warn_of_weights
from kielo.stages.results import certify, evaluate, export_checkpoint, newest_checkpoint
from kielo.tokenizer.make_row_map import row_map_in_words
from kielo.tokenizer.stage_inputs import check_inputs, check_vectors
from kielo.tokenizer.train import train_tokenizer, unfilled_vocabulary
from kielo.train.signals import REQUEUE

# The stages that make the weights of a followed run.
_UP_TO_WEIGHTS = ("corpus", "tokenizer", "pack", "train", "export")


@dataclass
class Invocation:
    """One call of `kielo run`.

    `ranks` processes train. `stages` is filled as the stages end.
    """

    recipe: Recipe
    reference: str
    sets: Sequence[str]
    folder: Path
    ranks: int
    stages: dict[str, StageTime] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if Path(self.reference).is_dir():
            refuse_other_start(self.recipe, Path(self.reference))


def make(invocation: Invocation, chosen: Sequence[str], again: str | None = None) -> None:
    """Make the chosen stages that are not current, and first the run that the recipe follows.

    `chosen` has the stages in order. The stage `again` is made even if it is current. Refuse impossible work
    before the stages that take long. Raise `Stopped` if training stops on purpose.
    """
    _check_before(invocation, chosen)
    warn_of_weights(invocation.recipe)
    _run_stages(invocation, chosen, again)


def _run_followed(invocation: Invocation) -> None:
    """Run the recipe that this recipe follows, up to its export. Current stages are skipped.

    Raise KieloError if that recipe cannot be read, follows another recipe, or exports other weights than this
    recipe starts from.
    """
    recipe, reference = invocation.recipe, invocation.recipe.follows or ""
    weights = recipe.model.weights or ""
    try:
        first = read_recipe(reference).recipe
    except KieloError as error:
        raise KieloError(f"follows = {reference!r}: {error}") from None
    followed = Invocation(first, reference, [], run_folder(first), invocation.ranks)
    if first.follows:
        raise KieloError(
            f"follows = {reference!r}: {first.name} itself follows {first.follows!r}, and a followed run "
            f"cannot follow another. Fix: `kielo run {reference}`, then this with --set follows="
        )
    exported = followed.folder / "hf"
    if Path(weights.removeprefix("hf:")).resolve() != exported.resolve():
        raise KieloError(
            f"follows = {reference!r}: its run exports its weights to {exported}, and model.weights = "
            f"{weights!r}. Fix: --set model.weights=hf:{exported}, or --set follows="
        )
    print_text(f"══ {first.name}, which {recipe.name} follows")
    warn_of_weights(first)
    _run_stages(followed, _UP_TO_WEIGHTS)
    print_text(f"══ {recipe.name}")


def _run_stages(invocation: Invocation, chosen: Sequence[str], again: str | None = None) -> None:
    with held(invocation.folder):
        _make_again(again, invocation, chosen)
        for name in _MAKERS:
            _do(name, invocation, name in chosen)
            is_last = name == chosen[-1]
            # Not before a stage was made, or all were: a refusal changes nothing.
            is_due = name in chosen and (is_last or not invocation.stages[name].skipped)
            if is_due and not write_run_recipe(invocation.recipe, invocation.folder) and is_last:
                path = invocation.folder / RUN_RECIPE_NAME
                print(f"{path} was changed by hand and is kept", file=sys.stderr)
            if name == "corpus" and "train" in chosen:
                _check_budget(invocation)


def _make_again(name: str | None, invocation: Invocation, chosen: Sequence[str]) -> None:
    """Have the stage `name` made again though nothing changed. Later stages follow if its output changes."""
    if name is None:
        return
    if name not in chosen:
        raise KieloError(f"--again {name}: this stage is not among the chosen stages: {', '.join(chosen)}")
    folder = invocation.folder / STAGE_FOLDERS[name]
    if name in _BEFORE_TRAINING:
        refuse_while_trained_on(folder, f"--again {name}")
    expire(folder)


def _do(name: str, invocation: Invocation, is_chosen: bool) -> None:
    """Make the stage if it was chosen, and note its seconds; else note the seconds of the earlier stage."""
    folder = STAGE_FOLDERS.get(name)  # None: the report has none of its own
    before = read_manifest(invocation.folder / folder) if folder else None
    if not is_chosen:
        if before is not None:
            invocation.stages[name] = StageTime(seconds=before.wall_seconds, skipped=True)
        return
    started = time.monotonic()
    # Of a stage that was made before, the title waits for its first word: there may be nothing to do. Not
    # where ranks of a training write to the terminal themselves.
    title = f"── {name}"
    ranks = invocation.ranks if name == "train" else 1
    waits = before is not None and not (ranks > 1 and not is_done(invocation.recipe, ranks))
    with _after_title(title, waits) as titled:
        _MAKERS[name](invocation)
    seconds, skipped = time.monotonic() - started, False
    if before is not None and folder and read_manifest(invocation.folder / folder) == before:
        seconds, skipped = before.wall_seconds, True
    invocation.stages[name] = StageTime(seconds=round(seconds, 3), skipped=skipped)
    if skipped:
        again = "" if name == "train" else f"; --again {name} redoes it"
        begin = "  " if titled() else title + ":"
        print_text(f"{begin} nothing to do, same inputs and recipe{again}")
    elif not titled():  # it was made again without a word
        print_text(title)


@contextmanager
def _after_title(title: str, waits: bool) -> Iterator[Callable[[], bool]]:
    """Print `title` before the output of the block: at once, or before the first output.

    Yield a function that returns True if it was printed.
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
    """A stream that prints a title to stdout before the first text of the streams that share `printed`."""

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


def _corpus(invocation: Invocation) -> None:
    if not invocation.recipe.corpus.of_raw_text.sources:
        print_text("   nothing to do: all sources are ready tokens, which are read in place")
        return
    run_corpus(invocation.recipe, invocation.folder / "corpus", invocation.folder / "raw")


def _check_before(invocation: Invocation, chosen: Sequence[str]) -> None:
    """Make the run that this recipe follows, and refuse impossible work before the stages that take long.

    Refused are missing files, and numbers of the recipe that do not fit its model or the ranks that will
    train here.
    """
    recipe, has_tokenizer = invocation.recipe, "tokenizer" in chosen
    if has_tokenizer:
        check_vectors(recipe)
    if recipe.follows and list(chosen) != ["corpus"]:  # which needs no weights
        _run_followed(invocation)
    if has_tokenizer:
        check_inputs(recipe)
    if "train" in chosen:
        refuse_before_text(recipe, *_trains_here(invocation))
    elif chosen[0] in _BEFORE_TRAINING:
        refuse_before_text(recipe)


def _trains_here(invocation: Invocation) -> tuple[Any, ...]:
    """Return the ranks, device and software of the training, or () if it ended before, or without torch.

    Only torch knows the devices. A finished run does not wait for its import.
    """
    if read_manifest(invocation.folder / "train") is not None or not find_spec("torch"):
        return ()
    device = this_device()
    return invocation.ranks, device, installed(device)


def _check_budget(invocation: Invocation) -> None:
    corpus = read_counts(invocation.folder / "corpus", CorpusCounts)
    # Of ready tokens the pack stage counts how many there are.
    if corpus is not None and not invocation.recipe.corpus.token_sources:
        check_text_suffices(invocation.recipe, corpus.bytes_kept or 0, f"{invocation.folder / 'corpus'}")


def _tokenizer(invocation: Invocation) -> None:
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
    """Compare a ready tokenizer with AutoTokenizer before the text is packed, if transformers is installed.

    Training compares it again, with the packed ids.
    """
    has_corpus = read_manifest(folder / "corpus") is not None
    sample = corpus_sample(folder / "corpus") if has_corpus else []
    said, warnings = compare_folder(folder / "tokenizer", recipe.model.model_type, sample)
    print_text(f"tokenizer: {said}")
    for warning in warnings:
        print_text(f"warning: {warning}", sys.stderr)


def _pack(invocation: Invocation) -> None:
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


def make_share(invocation: Invocation, share: tuple[int, int]) -> None:
    """Make this machine's parts of the token shards, the k-th of n shares: other machines make the others."""
    _need(invocation, "corpus", "tokenizer")
    if not invocation.recipe.corpus.of_raw_text.sources:
        raise KieloError("--share: all sources are ready tokens, which are read in place. Fix: leave it out")
    folder, (k, n) = invocation.folder, share
    made = pack_share(invocation.recipe, folder / "corpus", folder / "tokenizer", folder / "tokens", share)
    print_text(
        f"share {k} of {n}: {made} parts of the token shards exist. When all shares exist, join them with: "
        f"kielo run {invocation.reference} --only pack"
        if made
        else f"share {k} of {n}: nothing to do"
    )


def make_corpus_share(invocation: Invocation, share: tuple[int, int]) -> None:
    """Do this machine's tasks of the corpus, the k-th of n shares, and what other machines leave."""
    if not invocation.recipe.corpus.of_raw_text.sources:
        raise KieloError("--share: all sources are ready tokens, which are read in place. Fix: leave it out")
    folder, (k, n) = invocation.folder, share
    done = run_corpus_share(invocation.recipe, folder / "corpus", folder / "raw", share)
    print_text(
        f"share {k} of {n}: {done} tasks done here, and all are done. Put the corpus together with: "
        f"kielo run {invocation.reference} --only corpus"
        if done
        else f"share {k} of {n}: nothing to do"
    )


def _need(invocation: Invocation, *folders: str) -> None:
    has_raw_text = bool(invocation.recipe.corpus.of_raw_text.sources)
    for folder in folders:
        if folder == "corpus" and not has_raw_text:
            continue
        if read_manifest(invocation.folder / folder) is None:
            raise KieloError(
                f"{invocation.folder / folder} is not finished, and this stage needs it. "
                f"Fix: kielo run {invocation.reference}, without --from and --only"
            )


def _train(invocation: Invocation) -> None:
    _need(invocation, "tokenizer", "tokens")
    recipe, ranks = invocation.recipe, invocation.ranks
    if ranks > 1:
        outcome = train_on_ranks(recipe, invocation.reference, invocation.sets, ranks)
    else:
        outcome = train_here(recipe)
    if outcome.exit_code == REQUEUE:
        raise Stopped(outcome.message)
    if outcome.exit_code:
        raise KieloError(f"training failed: {outcome.message}")


def _verify(invocation: Invocation) -> None:
    _need(invocation, "tokens", "train")
    if _is_encoder(invocation):
        print_text("   only decoders are compared with transformers")
        return
    certificate = certify(invocation.recipe, invocation.folder, shows_current=False)
    if not certificate.passed:
        first = certificate.first_difference
        raise KieloError(
            f"parity with Hugging Face failed: {first and first.content()}; "
            f"see {invocation.folder / 'verify' / certificate.FILE_NAME}"
        )


def _evaluate(invocation: Invocation) -> None:
    _need(invocation, "corpus", "tokenizer", "tokens", "train")
    evaluate(invocation.recipe, invocation.folder, newest_checkpoint(invocation.folder))
    for said in unscored_in_words(read_stage_json(invocation.folder / "evaluate", Scores)):
        print_text(said)


def _export(invocation: Invocation) -> None:
    _need(invocation, "tokenizer", "train")
    folder = invocation.folder
    export_checkpoint(newest_checkpoint(folder), folder / "hf", folder / "tokenizer", invocation.recipe)


def _report(invocation: Invocation) -> None:
    certified = [] if _is_encoder(invocation) else ["verify"]
    _need(invocation, "corpus", "tokenizer", "train", *certified, "evaluate", "hf")
    invocation.stages["report"] = StageTime(seconds=0.0, skipped=False)
    page = late.write_report(invocation.folder, invocation.recipe, invocation.stages)
    if (summary := read_json(invocation.folder, Summary)) is not None:
        print_summary(summary)
    print_text(f"report: {page}")


def _is_encoder(invocation: Invocation) -> bool:
    return invocation.recipe.train.objective == "masked_tokens"


_MAKERS: dict[str, Callable[[Invocation], None]] = {
    "corpus": _corpus,
    "tokenizer": _tokenizer,
    "pack": _pack,
    "train": _train,
    "verify": _verify,
    "evaluate": _evaluate,
    "export": _export,
    "report": _report,
}
_BEFORE_TRAINING = ("corpus", "tokenizer", "pack")
