"""The subjects of `watch/history.jsonl`, and the inputs by which a row is known; no torch."""

from pathlib import Path
from typing import NamedTuple

from kielo.artifact.checkpoint_folder import step_folders
from kielo.artifact.manifest import MANIFEST_NAME, hash_json, hash_manifest
from kielo.evaluate.evaluation import wanted_scores
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe


class Subject(NamedTuple):
    """A checkpoint's folder, or the weights from which the run started."""

    name: str
    path: Path
    is_base: bool = False


def inputs_of(recipe: Recipe, run_folder: Path, subject: Subject) -> dict[str, str]:
    """Return the hash of each input of the subject's scores. KieloError if they do not belong together."""
    # The base model's text and settings are the checkpoints'.
    checkpoint = _any_checkpoint(run_folder) if subject.is_base else subject.path
    wanted = wanted_scores(recipe, run_folder, checkpoint)
    inputs = wanted.inputs | {"settings": hash_json(wanted.section)}
    if not subject.is_base:
        return inputs
    del inputs["checkpoint"], inputs["tokenizer"]
    return inputs | {"weights": _hash_of_weights(subject.path)}


def _any_checkpoint(run_folder: Path) -> Path:
    if not (found := step_folders(run_folder / "train" / "checkpoints")):
        raise KieloError(f"{run_folder}: no checkpoint yet, so the base model is not scored")
    return found[0]


def _hash_of_weights(folder: Path) -> str:
    if (folder / MANIFEST_NAME).is_file():
        return hash_manifest(folder)
    return hash_json(sorted((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file()))
