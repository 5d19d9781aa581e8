"""The table of a run's text, before the training: recipe + the available text → rows; no torch.

It has a row for each source, and for each source of each phase. Packed tokens are counted; tokens of a corpus
or of raw files are estimated. The value of repeated text is the law of Muennighoff et al. 2023
(arXiv:2305.16264, equation 5): U tokens read 1 + R times teach as much as U + U · r (1 - exp(-R / r))
different tokens, with r = 15.39 from runs of up to 8.7 billion parameters.
"""

import glob
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from kielo.artifact.manifest import Manifest, read_manifest
from kielo.artifact.stage_counts import CorpusCounts, TokenizerCounts
from kielo.artifact.stage_json import read_counts
from kielo.dataset.batches import packed_counts
from kielo.dataset.packed_sequences import PackingRow, packing_folder, packing_manifest, packing_rows
from kielo.dataset.provenance import check_recipe
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import full_phases
from kielo.recipe.sections import PACKED, Recipe, Source
from kielo.resolve import text as texts
from kielo.resolve.planned_phases import epochs, plan_phases
from kielo.resolve.resolved import PlannedPhase
from kielo.resolve.rules import StepCase, Steps, complaints, mixture_has_text, repeats_of_sources

WORTH_OF_REPEATS = 15.387756  # r above, from the authors' code
BYTES_PER_TOKEN = 4.0  # typical, for text without a tokenizer
COMPRESSION = 3.0  # typical, of text by gzip, zstd and parquet


@dataclass(frozen=True)
class SourceAmount:
    """The text of a source for training. None: not known, or for tokens_with_loss all tokens carry loss."""

    tokens: int
    bytes: int
    documents: int | None = None
    words: int | None = None
    tokens_with_loss: int | None = None

    @property
    def tokens_per_word(self) -> float | None:
        return self.tokens / self.words if self.words else None


@dataclass(frozen=True)
class SourceRow:
    """A source in the run. effective_tokens: different tokens that would teach the same as read_tokens."""

    source: str
    amount: SourceAmount
    read_tokens: int
    epochs: float
    allowed_epochs: float
    effective_tokens: int


@dataclass(frozen=True)
class PhaseRow:
    """A source in a phase, its share of a step's sequences, and their number in the phase's full steps."""

    phase: int
    source: str
    share: float
    sequences_per_step: float
    tokens: int
    epochs: float


@dataclass(frozen=True)
class MixtureTable:
    """The table. `origin` is the counted or estimated text. `complaints` are `kielo train`'s about the text.

    packing: result of best-fit packing for each source; () before the pack stage, and for one stream.
    """

    origin: str
    is_estimate: bool
    tokens: int
    sources: tuple[SourceRow, ...]
    phases: tuple[PhaseRow, ...]
    packing: tuple[PackingRow, ...] = field(default=())
    complaints: tuple[str, ...] = field(default=())


def mixture_table(recipe: Recipe, run_folder: Path) -> MixtureTable:
    """Return the table of the run.

    Raises KieloError for a source about which nothing is known, for packed text of another recipe, and for
    text too short for a step.
    """
    amounts, origin, is_estimate = _amounts(recipe, run_folder)
    tokens = {name: amount.tokens for name, amount in amounts.items()}
    # Only the budget looks at these facts. A hash that is not empty says that the text is not imagined.
    packing = _packing(recipe, run_folder / "tokens")
    by_length = texts.sequences_by_length(packing) if packing else {}
    if recipe.dataset.packing == "as_is":
        by_length = texts.blocks_as_they_are(recipe, tokens)
    lengths = texts.tokens_per_document({name: (of.tokens, of.documents) for name, of in amounts.items()})
    text = texts.Text(tokens, 0, origin, 0, 0, packed_sequences=by_length, tokens_per_document=lengths)
    recipe = texts.with_budget(recipe, text)
    asked = full_phases(recipe)
    case = StepCase(recipe, asked, text, run_folder / "tokens")
    if found := complaints(case, [mixture_has_text]):
        raise KieloError("; ".join(found))
    mixtures = [texts.mixture_of(phase, text, recipe.dataset) for phase in asked]
    phases = plan_phases(asked, mixtures, recipe.train.batch_ramp, recipe.seed, text.epoch_tokens)
    too_often = complaints(replace(case, steps=Steps(phases)), [repeats_of_sources])
    phase_rows = [row for number in range(1, len(asked) + 1) for row in _phase_rows(phases, number, text)]
    rows = tuple(_source_row(recipe, name, amount, phase_rows) for name, amount in amounts.items())
    total = sum(row.read_tokens for row in rows)
    packed = tuple(packing_rows(packing)) if packing else ()
    return MixtureTable(origin, is_estimate, total, rows, tuple(phase_rows), packed, tuple(too_often))


def _packing(recipe: Recipe, tokens_folder: Path) -> Manifest | None:
    """Return the manifest of the packed sequences, or None before they are made, and for one stream."""
    if recipe.dataset.packing not in PACKED or read_manifest(packing_folder(tokens_folder)) is None:
        return None
    texts.packed_sequences(recipe, tokens_folder)  # checks that they belong to the recipe and the tokens
    return packing_manifest(tokens_folder)


def effective_tokens(unique_tokens: float, times_read: float) -> float:
    """Return the number of different tokens that teach as much as `unique_tokens` read `times_read` times."""
    if times_read <= 1:
        return unique_tokens * times_read
    repeats = times_read - 1
    return unique_tokens * (1 + WORTH_OF_REPEATS * (1 - math.exp(-repeats / WORTH_OF_REPEATS)))


def _phase_rows(phases: tuple[PlannedPhase, ...], number: int, text: texts.Text) -> list[PhaseRow]:
    """Return the rows of phase `number`. Its batch ramp is several entries of `phases`."""
    of_phase = [phase for phase in phases if phase.number == number]
    mixture, sequences = of_phase[-1].mixture, of_phase[-1].sequences_per_step
    read = epochs(of_phase, text.epoch_tokens)
    drawn = sum(phase.steps * phase.tokens_per_step for phase in of_phase)
    rows = []
    for name, weight in mixture.items():
        share, times = weight / sum(mixture.values()), float(read[name][0])
        rows.append(PhaseRow(number, name, share, share * sequences, round(share * drawn), times))
    return rows


def _source_row(recipe: Recipe, name: str, amount: SourceAmount, rows: list[PhaseRow]) -> SourceRow:
    mine = [row for row in rows if row.source == name]
    times, read = sum(row.epochs for row in mine), sum(row.tokens for row in mine)
    effective = round(effective_tokens(amount.tokens, times))
    return SourceRow(name, amount, read, times, texts.allowed_epochs(recipe, name), effective)


def _amounts(recipe: Recipe, run_folder: Path) -> tuple[dict[str, SourceAmount], str, bool]:
    """Return (source → its amount, its origin, True if it is an estimate)."""
    packed = read_manifest(run_folder / "tokens")
    if packed is not None:
        check_recipe(recipe, run_folder)
        counted = {
            name: SourceAmount(of.tokens, of.bytes or 0, of.documents, of.words, of.tokens_with_loss)
            for name, of in packed_counts(run_folder / "tokens").sources.items()
        }
        return counted, f"packed tokens of {run_folder / 'tokens'}", False
    share, per_token = 1 - recipe.dataset.heldout_share, BYTES_PER_TOKEN
    tokens = texts.ready_tokens(recipe)
    ready = {name: SourceAmount(of, round(of * BYTES_PER_TOKEN)) for name, of in tokens.items()}
    cleaned = read_counts(run_folder / "corpus", CorpusCounts)
    if cleaned is not None and cleaned.sources:
        tokenizer = read_counts(run_folder / "tokenizer", TokenizerCounts)
        how = f"at {BYTES_PER_TOKEN:g} bytes a token"
        if tokenizer is not None and tokenizer.bytes_per_token:
            per_token = tokenizer.bytes_per_token
            how = f"at the {per_token:.2f} bytes a token that were measured for {run_folder / 'tokenizer'}"
        estimated = {
            source.name: _estimate(share * source.bytes_kept, per_token, round(share * source.documents_kept))
            for source in cleaned.sources
        } | ready
        return estimated, f"clean text of {run_folder / 'corpus'}, {how}", True
    raw = {
        source.name: _estimate(share * _raw_bytes(source, run_folder / "raw" / source.name), per_token, None)
        for source in recipe.corpus.of_raw_text.sources
    }
    if not raw:
        return ready, "ready token files", False
    return raw | ready, f"raw files, nothing cleaned, at {BYTES_PER_TOKEN:g} bytes a token", True


def _estimate(num_bytes: float, bytes_per_token: float, documents: int | None) -> SourceAmount:
    return SourceAmount(round(num_bytes / bytes_per_token), round(num_bytes), documents)


def _raw_bytes(source: Source, fetched: Path) -> float:
    """Return the estimated bytes of text in a source's files. KieloError if they are not on this machine."""
    if source.local_path:
        place = Path(source.local_path).expanduser()
        places = [place] if place.exists() else [Path(path) for path in glob.glob(str(place), recursive=True)]
        if not places:
            raise KieloError(
                f"corpus.sources, {source.name}: {source.path}: no such file or folder to estimate its "
                "tokens from"
            )
    elif fetched.is_dir():
        places = [fetched]
    else:
        raise KieloError(
            f"corpus.sources, {source.name}: "
            f"{source.debian_package or source.huggingface_dataset or source.path}"
            " is not on this machine yet, so its tokens cannot be estimated. Fix: `kielo run RECIPE --to "
            "corpus`, which downloads it, then `kielo plan data RECIPE`"
        )
    found = (file for entry in places for file in ([entry] if entry.is_file() else entry.rglob("*")))
    packed = dict.fromkeys((".gz", ".zst", ".parquet"), COMPRESSION)
    return sum(file.stat().st_size * packed.get(file.suffix, 1) for file in found if file.is_file())
