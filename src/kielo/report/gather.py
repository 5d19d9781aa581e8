"""The facts of a run folder, for the page, the card and the summary.

Run folder (manifests, funnel.json, measure.json, metrics.jsonl, parity.json, scores.json, …) → `Gathered`. A
stage that has not run yet is None, and the page says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from kielo import __version__
from kielo.artifact.chronicle import Table, chronicle
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import Manifest, read_manifest
from kielo.artifact.metrics import (
    METRICS_NAME,
    HeldOutLoss,
    Kind,
    PassedOver,
    PrecisionChange,
    TaskScores,
    TrainingStep,
    of_kind,
    read_metrics,
)
from kielo.artifact.score_history import ScoredCheckpoint, read_history
from kielo.artifact.scores import (
    STAGE_FOLDERS,
    BitsPerByteSummary,
    CorpusSummary,
    MaskedScores,
    ParitySummary,
    Scores,
    StageTime,
    Summary,
)
from kielo.artifact.stage_counts import Funnel, RowMap, TokenizerMeasure
from kielo.artifact.stage_json import JsonObject, read_stage_json
from kielo.artifact.verify_results import PARITY_ON_RANKS, Parity
from kielo.dataset.packed_sequences import FOLDER as PACKING
from kielo.dataset.packed_sequences import PackingRow, packing_rows
from kielo.recipe.sections import Recipe
from kielo.resolve.overview import Overview, overview_of_run
from kielo.resolve.resolved import read as read_resolved
from kielo.resolve.text import Text, sequences_by_length


@dataclass(frozen=True)
class Training:
    """Rows of metrics.jsonl, one a step in order."""

    steps: list[TrainingStep]
    heldout: list[HeldOutLoss]
    passed_over: list[PassedOver]
    precisions: list[PrecisionChange]
    tokens_per_second: float | None
    tasks: list[TaskScores] = field(default_factory=list)


class StageRow(NamedTuple):
    name: str
    state: str
    seconds: float | None


@dataclass(frozen=True)
class Gathered:
    """The facts of a run folder, None for a stage that has not run."""

    recipe: Recipe
    run_folder: str
    kielo_version: str
    stages: dict[str, StageTime]  # this run's
    stage_rows: list[StageRow]
    corpus: JsonTable | None  # counts in the manifest, as `tokens`
    funnel: Funnel | None
    tokenizer: TokenizerMeasure | None
    row_map: RowMap | None
    tokens: JsonTable | None
    packing: list[PackingRow]
    overview: Overview | None
    training: Training | None
    chronicle: list[Table]
    parity: Parity | None
    scores: Scores | None
    masked_scores: MaskedScores | None
    export: str | None
    versions: dict[str, str]  # of packages, in the manifests
    history: list[ScoredCheckpoint] = field(default_factory=list)
    parity_on_ranks: Parity | None = None


def gather(run_folder: Path, recipe: Recipe, stages: dict[str, StageTime]) -> Gathered:
    """Collect the run folder's content.

    `stages` are this run's. Manifests have the seconds of skipped stages.
    """
    manifests = {stage: read_manifest(run_folder / folder) for stage, folder in STAGE_FOLDERS.items()}
    corpus, tokens, export = (manifests[stage] for stage in ("corpus", "pack", "export"))
    packing = read_manifest(run_folder / PACKING)
    return Gathered(
        recipe=recipe,
        run_folder=str(run_folder),
        kielo_version=__version__,
        stages=stages,
        stage_rows=_stage_rows(manifests, stages),
        corpus=corpus.counts if corpus else None,
        funnel=read_stage_json(run_folder / "corpus", Funnel),
        tokenizer=read_stage_json(run_folder / "tokenizer", TokenizerMeasure),
        row_map=read_stage_json(run_folder / "tokenizer", RowMap),
        tokens=tokens.counts if tokens else None,
        packing=packing_rows(packing) if packing else [],
        overview=_overview(run_folder, manifests),
        training=_training(run_folder / "train", manifests["train"]),
        chronicle=chronicle(run_folder / "train"),
        parity=read_stage_json(run_folder / "verify", Parity),
        scores=read_stage_json(run_folder / "evaluate", Scores),
        masked_scores=read_stage_json(run_folder / "evaluate", MaskedScores),
        export=str(run_folder / "hf") if export else None,
        versions=_versions(manifests),
        history=read_history(run_folder),
        parity_on_ranks=read_stage_json(run_folder / PARITY_ON_RANKS, Parity),
    )


def summarise(gathered: Gathered) -> Summary:
    scores, training, overview = gathered.scores, gathered.training, gathered.overview
    masked = gathered.masked_scores
    return Summary(
        stages=gathered.stages,
        parameters=overview.parameters if overview else None,
        tokens=overview.tokens if overview else None,
        corpus=CorpusSummary(**_pick(gathered.corpus, CorpusSummary)),
        bits_per_byte=BitsPerByteSummary(
            **_pick(scores.bits_per_byte.content() if scores else None, BitsPerByteSummary)
        ),
        masked_tokens=masked.accuracy if masked else None,
        parity=ParitySummary(**_pick(gathered.parity.content() if gathered.parity else None, ParitySummary)),
        tokens_per_second=training.tokens_per_second if training else None,
        export=gathered.export,
        kielo_version=gathered.kielo_version,
    )


def _pick(content: JsonTable | None, kind: type[JsonObject]) -> JsonTable:
    return {key: (content or {}).get(key) for key in kind.model_fields}


def _overview(run_folder: Path, manifests: dict[str, Manifest | None]) -> Overview | None:
    if manifests["train"] is None or not (run_folder / "resolved.toml").is_file():
        return None
    sources = manifests["pack"].counts["sources"] if manifests["pack"] else {}
    tokens = {name: counts["tokens"] for name, counts in sources.items()}
    packing = read_manifest(run_folder / PACKING)
    packed = sequences_by_length(packing) if packing else {}
    identity = read_resolved(run_folder / "resolved.toml").identity
    return overview_of_run(identity, Text(tokens, 0, "", 0, 0, packed_sequences=packed))


def _training(folder: Path, manifest: Manifest | None) -> Training | None:
    path = folder / METRICS_NAME
    if not path.is_file():
        return None
    rows = read_metrics(path)
    steps = _by_step(of_kind(rows, TrainingStep))
    # The first row includes warming up. It counts only if no other exists.
    speeds = [row.tokens_per_second for row in steps if row.tokens_per_second]
    counts = manifest.counts if manifest else {}
    return Training(
        steps,
        _by_step(of_kind(rows, HeldOutLoss)),
        _by_step(of_kind(rows, PassedOver)),
        _by_step(of_kind(rows, PrecisionChange)),
        counts.get("tokens_per_second") or (median(speeds[1:] or speeds) if speeds else None),
        _tasks(of_kind(rows, TaskScores)),
    )


def _by_step(rows: Sequence[Kind]) -> list[Kind]:
    """Return one row a step. A resumed run writes steps again, and the later row is the model's."""
    last = {row.step: row for row in rows}
    return [last[step] for step in sorted(last)]


def _tasks(rows: Sequence[TaskScores]) -> list[TaskScores]:
    """Return one row of each task a step."""
    last = {(row.step, row.scored_task): row for row in rows}
    return [last[key] for key in sorted(last)]


def _stage_rows(manifests: dict[str, Manifest | None], stages: dict[str, StageTime]) -> list[StageRow]:
    """Return a row for each stage: the seconds that made its folder, and if this run did it."""
    names = list(dict.fromkeys([*STAGE_FOLDERS, *stages]))
    rows = []
    for name in names:
        manifest, asked = manifests.get(name), stages.get(name)
        if manifest is None and asked is None:
            state, seconds = "not finished", None
        elif asked is None or asked.skipped:
            state, seconds = "already done", manifest.wall_seconds if manifest else None
        else:
            state, seconds = "done", asked.seconds
        rows.append(StageRow(name, state, seconds))
    return rows


def _versions(manifests: dict[str, Manifest | None]) -> dict[str, str]:
    seen: dict[str, dict[str, None]] = {}
    for manifest in manifests.values():
        for package, number in (manifest.versions if manifest else {}).items():
            seen.setdefault(package, {})[number] = None
    return {package: ", ".join(numbers) for package, numbers in sorted(seen.items())}
