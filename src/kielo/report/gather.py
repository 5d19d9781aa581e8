"""Everything that a run folder says about itself, as one plain dict for the page, the card and the summary.

Run folder (manifests, funnel.json, measure.json, metrics.jsonl, parity.json, scores.json) -> dict.
Torch-free. A stage that has not run yet is None in the dict: the page says so instead of failing.
"""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from kielo.artifact.manifest import Manifest, read_manifest
from kielo.artifact.metrics import read_metrics
from kielo.artifact.stage_json import read_stage_json
from kielo.recipe.sections import Recipe

# Stage, in the order of a run -> its folder.
STAGE_FOLDERS = {
    "corpus": "corpus",
    "tokenizer": "tokenizer",
    "pack": "tokens",
    "train": "train",
    "verify": "verify",
    "evaluate": "evaluate",
    "export": "hf",
}
BASELINES = ("unigram", "xz", "ngram")


def gather(run_folder: Path, recipe: Recipe, stages: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Collects the run folder's content.

    `stages` is name -> {"seconds", "skipped"} of this run; manifests have the seconds of skipped stages.
    """
    run_folder = Path(run_folder)
    manifests = {stage: read_manifest(run_folder / folder) for stage, folder in STAGE_FOLDERS.items()}
    return {
        "recipe": recipe,
        "run_folder": str(run_folder),
        "kielo_version": kielo_version(),
        "stages": stages,
        "stage_rows": _stage_rows(manifests, stages),
        "corpus": manifests["corpus"].counts if manifests["corpus"] else None,
        "funnel": read_stage_json(run_folder / "corpus", "funnel.json"),
        "tokenizer": read_stage_json(run_folder / "tokenizer", "measure.json"),
        "tokens": manifests["pack"].counts if manifests["pack"] else None,
        "training": _training(run_folder / "train", manifests["train"]),
        "parity": _parity(read_stage_json(run_folder / "verify", "parity.json")),
        "scores": read_stage_json(run_folder / "evaluate", "scores.json"),
        "export": str(run_folder / "hf") if manifests["export"] else None,
        "export_counts": manifests["export"].counts if manifests["export"] else {},
        "versions": _versions(manifests),
    }


def summarise(gathered: dict[str, Any]) -> dict[str, Any]:
    """Returns the content of summary.json; the values of stages that have not run are None."""
    corpus, parity, scores = gathered["corpus"], gathered["parity"], gathered["scores"]
    training = gathered["training"]
    return {
        "stages": gathered["stages"],
        "corpus": _pick(corpus, ("bytes_in", "documents_in", "bytes_kept", "documents_kept")),
        "bits_per_byte": _pick(scores and scores["bits_per_byte"], ("model", *BASELINES)),
        "parity": _pick(parity, ("max_relative_loss_difference", "steps", "passed")),
        "tokens_per_second": training["tokens_per_second"] if training else None,
        "export": gathered["export"],
        "kielo_version": gathered["kielo_version"],
    }


def beats_all(bits_per_byte: dict[str, float]) -> bool:
    """Returns True if the model needs fewer bits per byte than every baseline."""
    return all(bits_per_byte["model"] < bits_per_byte[name] for name in BASELINES)


def kielo_version() -> str:
    try:
        return version("kielo")
    except PackageNotFoundError:  # run from a bare checkout
        return "unknown"


def _pick(content: dict[str, Any] | None, keys: Sequence[str]) -> dict[str, Any]:
    return {key: (content or {}).get(key) for key in keys}


def _training(folder: Path, manifest: Manifest | None) -> dict[str, Any] | None:
    """Returns curves of metrics.jsonl, the median tokens per second and the stage's counts.

    Curves are {"rows", "heldout", "passed_over", "precisions"}, by step.
    """
    path = folder / "metrics.jsonl"
    if not path.is_file():
        return None
    rows: dict[int, dict] = {}
    heldout: dict[int, dict] = {}
    passed_over: dict[int, dict] = {}
    precisions: dict[int, dict] = {}
    for row in read_metrics(path):
        # A resumed run writes steps again; the later row is the one that led to the model.
        kinds = {
            "heldout_loss": heldout,
            "passed_over_from": passed_over,
            "precision": precisions,
            "loss": rows,
        }
        for key, kind in kinds.items():
            if key in row:
                kind[row["step"]] = row
    ordered = [rows[step] for step in sorted(rows)]
    # The first row pays for warming up; it counts only where there is no other.
    speeds = [row["tokens_per_second"] for row in ordered if row.get("tokens_per_second")]
    counts = manifest.counts if manifest else {}
    return {
        "rows": ordered,
        "heldout": [heldout[step] for step in sorted(heldout)],
        "passed_over": [passed_over[step] for step in sorted(passed_over)],
        "precisions": [precisions[step] for step in sorted(precisions)],
        "tokens_per_second": counts.get("tokens_per_second")
        or (median(speeds[1:] or speeds) if speeds else None),
        "counts": counts,
    }


def _parity(certificate: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the certificate with `setting_rows`: (setting, ours, theirs, True if they differ)."""
    if certificate is None:
        return None
    settings = certificate["settings"]
    ours, theirs, differing = settings["ours"], settings["theirs"], settings.get("differing", ())
    names = dict.fromkeys([*ours, *theirs])
    rows = [(name, ours.get(name), theirs.get(name), name in differing) for name in names]
    return certificate | {"setting_rows": rows}


def _stage_rows(
    manifests: dict[str, Manifest | None], stages: dict[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a row for each stage: the seconds that made its folder, and if this run did it."""
    names = list(dict.fromkeys([*STAGE_FOLDERS, *stages]))
    rows = []
    for name in names:
        manifest, asked = manifests.get(name), stages.get(name)
        if manifest is None and asked is None:
            state, seconds = "not finished", None
        elif asked is None or asked.get("skipped"):
            state, seconds = "already done", manifest.wall_seconds if manifest else None
        else:
            state, seconds = "done", asked["seconds"]
        rows.append({"name": name, "state": state, "seconds": seconds})
    return rows


def _versions(manifests: dict[str, Manifest | None]) -> dict[str, str]:
    """Returns the package versions that the stages ran with; several, if stages differ."""
    seen: dict[str, list[str]] = {}
    for manifest in manifests.values():
        for package, number in (manifest.versions if manifest else {}).items():
            found = seen.setdefault(package, [])
            if number not in found:
                found.append(number)
    return {package: ", ".join(numbers) for package, numbers in sorted(seen.items())}
