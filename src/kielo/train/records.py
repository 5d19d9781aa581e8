"""Records of the training stage: notes of attempts, `resolved.toml`, `outcome.json`, a manifest at its end.

Torch-free. A note that cannot be written is a warning and never ends the training. The manifest lists only
the last checkpoint's manifest, which checksums the rest, because reading terabytes of weights again adds
nothing.
"""

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from kielo.artifact.attempt_files import (
    EXIT_CODES,
    STARTED_BY,
    Beginning,
    Change,
    End,
    Ending,
    Outcome,
    append,
    now,
    read_attempts,
)
from kielo.artifact.checkpoint_folder import NEWEST_NAME, step_folders
from kielo.artifact.chronicle import write_chronicle
from kielo.artifact.lease import held
from kielo.artifact.manifest import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    as_json,
    hash_file,
    installed_versions,
    is_current,
    read_manifest,
    write_json_atomically,
)
from kielo.artifact.metrics import (
    METRICS_NAME,
    HeldOutLoss,
    TrainingStep,
    of_kind,
    read_metrics,
    split_metrics,
)
from kielo.artifact.stage_json import read_json, write_json
from kielo.recipe.errors import KieloError
from kielo.resolve.resolve import flat
from kielo.resolve.resolved import Resolved, as_stored_now, stored_identity, write
from kielo.resolve.resolved import read as read_resolved
from kielo.resolve.software import RESOLVED_NAME

logger = logging.getLogger(__name__)
KIND, VERSION = "train", 1
NOTHING_TO_DO = "nothing to do: the run was finished before"
_MOST_CHANGES = 40


def note_beginning(resolved: Resolved, from_step: int, hosts: Sequence[str]) -> None:
    """Note that an attempt begins on `hosts`, on one rank, before its `resolved.toml` is written."""
    folder = Path(resolved.placement.train_folder)
    with _only_warns(folder):
        is_first = not read_attempts(folder)
        seen_step, seen_at = _last_seen(folder / METRICS_NAME)
        append(
            folder,
            Beginning(
                began_at=now(),
                from_step=from_step,
                ranks=len(hosts),
                hosts=list(hosts),
                versions=installed_versions(),
                seen_step=seen_step,
                seen_at=seen_at,
                changes=[] if is_first else _changes(folder.parent / RESOLVED_NAME, resolved),
            ),
        )
        write_chronicle(folder, resolved.identity.name)


def note_end(resolved: Resolved, outcome: Outcome) -> None:
    folder = Path(resolved.placement.train_folder)
    with _only_warns(folder):
        lines = read_attempts(folder)
        if not lines or isinstance(lines[-1], End):
            return
        end = End(ended_at=now(), outcome=outcome.outcome, step=outcome.step, message=outcome.message)
        append(folder, end)
        write_chronicle(folder, resolved.identity.name)


@contextmanager
def _only_warns(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, KieloError) as error:
        logger.warning("%s: the chronicle is not up to date: %s", folder.parent, error)


def _last_seen(metrics: Path) -> tuple[int | None, str | None]:
    steps = of_kind([row for row, _ in split_metrics(metrics)[0]], TrainingStep)
    if not steps:
        return None, None
    seen = datetime.fromtimestamp(metrics.stat().st_mtime, UTC)
    return max(row.step for row in steps), seen.isoformat(timespec="seconds")


def _changes(path: Path, resolved: Resolved) -> list[Change]:
    with suppress(KieloError, OSError):
        before, after = _flat(read_resolved(path)), _flat(resolved)
        keys = [key for key in dict.fromkeys((*before, *after)) if before.get(key) != after.get(key)]
        found = [Change(key=key, before=before.get(key, ""), after=after.get(key, "")) for key in keys]
        left = len(found) - _MOST_CHANGES
        more = [Change(key=f"and {left} keys more", before="", after="")] if left > 0 else []
        return found[:_MOST_CHANGES] + more
    return []


def _flat(resolved: Resolved) -> dict[str, str]:
    parts = (resolved.identity, resolved.placement)  # both can have keys of one section
    values = [flat(part.model_dump(mode="json", exclude_none=True)).items() for part in parts]
    return {key: json.dumps(value, ensure_ascii=False) for items in values for key, value in items}


def is_finished(resolved: Resolved) -> bool:
    folder, migrate = resolved.placement.train_folder, partial(_migrated, resolved)
    inputs = {"tokens": resolved.identity.tokens_hash}
    return is_current(folder, KIND, VERSION, inputs, _section(resolved), migrate=migrate)


def nothing_to_do(resolved: Resolved, is_first: bool = True) -> Outcome:
    done, message = (resolved.identity.total_steps, resolved.identity.total_tokens), NOTHING_TO_DO
    if not is_first:
        return settle(resolved, "finished", done, message, is_writing=False)
    with held(Path(resolved.placement.train_folder).parent):
        write_plan(resolved)
        return settle(resolved, "finished", done, message)


def write_plan(resolved: Resolved) -> None:
    write(resolved, Path(resolved.placement.train_folder).parent / RESOLVED_NAME)


def settle(
    resolved: Resolved,
    what: Ending,
    done: tuple[int, int],
    message: str = "",
    is_writing: bool = True,
    blamed_nodes: Sequence[str] = (),
) -> Outcome:
    step, tokens = done
    outcome = Outcome(
        outcome=what,
        step=step,
        tokens=tokens,
        exit_code=EXIT_CODES[what],
        message=message,
        started_by=os.environ.get(STARTED_BY, ""),
        blamed_nodes=list(blamed_nodes),
    )
    if is_writing:
        write_json(resolved.placement.train_folder, outcome)
        note_end(resolved, outcome)
    return outcome


def withdraw_manifest(resolved: Resolved) -> None:
    """Remove this run's manifest, because a resumed run is not finished. Another run's stays."""
    folder = Path(resolved.placement.train_folder)
    manifest = read_manifest(folder)
    if manifest is not None and _migrated(resolved, manifest.section) == _section(resolved):
        (folder / MANIFEST_NAME).unlink(missing_ok=True)


def refuse_lost_checkpoints(resolved: Resolved) -> None:
    """Raise KieloError if training had saved and no checkpoint is left, because it must not restart unasked.

    A job that was killed before its first save leaves metrics of few steps, and may begin again.
    """
    folder = Path(resolved.placement.train_folder)
    if step_folders(folder / "checkpoints"):
        return
    if signs := _signs(resolved):
        raise KieloError(
            f"{folder / 'checkpoints'} contains no checkpoint, but training had saved there "
            f"({', '.join(signs)}). Fix: put a checkpoint back, from a backup or under its first name. To "
            f"begin at step 0, move {folder} away or give the recipe another folder"
        )


def _signs(resolved: Resolved) -> list[str]:
    """Return signs of earlier saves: remains of checkpoints, unless of a killed save, and records."""
    folder, signs = Path(resolved.placement.train_folder), []
    with suppress(FileNotFoundError, NotADirectoryError):
        names = sorted(os.listdir(folder / "checkpoints"))
        remains = [name for name in names if name.startswith(("step_", NEWEST_NAME))]
        signs += [name for name in remains if not name.endswith(".partial")]
    if read_manifest(folder) is not None:
        signs.append(f"{MANIFEST_NAME} belongs to a finished run")
    with suppress(OSError, KieloError):
        outcome = read_json(folder, Outcome)
        if outcome is not None and outcome.outcome in ("finished", "requeue") and outcome.step:
            signs.append(f"outcome.json says that it stopped at step {outcome.step}")
    steps = [row.step for row in of_kind(read_metrics(folder / METRICS_NAME), TrainingStep)]
    # the second save begins only when the first is complete
    if steps and steps[-1] - steps[0] > 2 * resolved.placement.checkpoint.every_steps:
        signs.append(f"metrics.jsonl continues to step {steps[-1]}")
    return signs


def has_outcome(resolved: Resolved) -> bool:
    return (Path(resolved.placement.train_folder) / Outcome.FILE_NAME).exists()


def forget_outcome(resolved: Resolved) -> None:
    """Remove an earlier attempt's outcome, which a new attempt that is killed would seem to have."""
    (Path(resolved.placement.train_folder) / Outcome.FILE_NAME).unlink(missing_ok=True)


def write_train_manifest(resolved: Resolved, checkpoint: Path) -> Manifest:
    folder = Path(resolved.placement.train_folder)
    rows = read_metrics(folder / METRICS_NAME)
    steps, heldout = of_kind(rows, TrainingStep), of_kind(rows, HeldOutLoss)
    sets = (heldout[-1].heldout_sets if heldout else None) or {}
    last = checkpoint / MANIFEST_NAME
    record = FileRecord(bytes=last.stat().st_size, xxh3_128=hash_file(last))
    manifest = Manifest(
        kind=KIND,
        version=VERSION,
        inputs={"tokens": resolved.identity.tokens_hash},
        section=_section(resolved),
        counts={
            "steps": resolved.identity.total_steps,
            "tokens": resolved.identity.total_tokens,
            "skipped_steps": steps[-1].skipped or 0 if steps else 0,
            "tokens_per_second": usual_tokens_per_second(steps),
            "loss": steps[-1].loss if steps else None,
            "heldout_loss": heldout[-1].heldout_loss if heldout else None,
            "heldout_sets": {name: score.model_dump() for name, score in sets.items()},
            "ranks": resolved.placement.world_size,
            "parameters": resolved.placement.parameters,
        },
        wall_seconds=round(wall_seconds(steps), 3),
        versions=installed_versions(),
        files={last.relative_to(folder).as_posix(): record},
        written_at=now(),
    )
    write_json_atomically(folder / MANIFEST_NAME, manifest.content())
    return manifest


def usual_tokens_per_second(steps: list[TrainingStep]) -> float | None:
    """Return the median over the logged steps, without the first of each attempt, which warms up."""
    settled = [row for before, row in pairwise(steps) if row.seconds > before.seconds]
    return median(row.tokens_per_second for row in settled or steps) if steps else None


def wall_seconds(steps: list[TrainingStep]) -> float:
    """Return the seconds of training over all attempts. Each attempt counts from zero."""
    ends = [row.seconds for row, after in pairwise(steps) if after.seconds < row.seconds]
    return sum(ends) + (steps[-1].seconds if steps else 0.0)


def _migrated(resolved: Resolved, section: dict[str, object]) -> dict[str, object]:
    return as_stored_now(section, Path(resolved.placement.train_folder) / MANIFEST_NAME)


def _section(resolved: Resolved) -> dict[str, object]:
    return as_json(stored_identity(resolved.identity))
