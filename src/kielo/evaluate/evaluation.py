"""The scores of a run as a stage: their inputs, and a check that they are current; no torch.

`score.py` makes them: every contender scores the same held-out documents under its convention. Encoders have
`evaluate/masked_scores.json` instead. Encoders of the hybrid objective have both.
"""

from dataclasses import dataclass
from pathlib import Path

from kielo.artifact.checkpoint_index import read_state
from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import hash_file, hash_json, hash_manifest, is_current, read_manifest
from kielo.artifact.scores import MaskedScores, Scores
from kielo.artifact.stage_json import read_stage_json
from kielo.dataset.heldout_sets import EVALUATION_TEXTS
from kielo.dataset.provenance import check_recipe, check_tokens
from kielo.evaluate.pair_files import files_of_folder
from kielo.evaluate.tasks_wanted import hash_task_folder
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe

KIND, VERSION = "scores", 3


@dataclass(frozen=True)
class WantedScores:
    recipe: Recipe
    run_folder: Path
    checkpoint: Path
    inputs: dict[str, str]
    section: JsonTable

    @property
    def folder(self) -> Path:
        return self.run_folder / "evaluate"

    @property
    def is_masked(self) -> bool:
        return self.recipe.train.objective == "masked_tokens"

    def current(self) -> Scores | MaskedScores | None:
        """Read the existing scores; None if they are not of these inputs and settings, or lack a task."""
        if not is_current(self.folder, KIND, VERSION, self.inputs, self.section):
            return None
        scores = read_stage_json(self.folder, Scores)  # of an encoder: of its causal use
        if scores is not None and scores.unscored_tasks:
            return None
        return read_stage_json(self.folder, MaskedScores) if self.is_masked else scores


def wanted_scores(recipe: Recipe, run_folder: Path, checkpoint: Path | None = None) -> WantedScores:
    """Describe the scores of the run's checkpoint (default: the newest complete checkpoint).

    Raise KieloError if a stage that they need is not finished, or if text, tokenizer and checkpoint do not
    belong together.
    """
    checkpoint = newest_checkpoint(run_folder) if checkpoint is None else checkpoint
    check_recipe(recipe, run_folder)
    check_tokens(read_state(checkpoint), run_folder)
    inputs = {name: hash_manifest(run_folder / name) for name in ("tokenizer", "tokens")}
    if recipe.corpus.of_raw_text.sources:
        inputs["corpus"] = hash_manifest(run_folder / "corpus")
    inputs["checkpoint"] = hash_manifest(checkpoint)
    if read_manifest(run_folder / EVALUATION_TEXTS) is not None:
        inputs[EVALUATION_TEXTS] = hash_manifest(run_folder / EVALUATION_TEXTS)
    inputs |= {f"evaluate.{key}": _own_file(key, path) for key, path in recipe.evaluate.own_files.items()}
    for number, given in enumerate(recipe.evaluate.task_folders):
        inputs[f"evaluate.task_folders.{number}"] = hash_task_folder(given)
    section = recipe.evaluate.section | {"seed": recipe.seed}
    return WantedScores(recipe, run_folder, checkpoint, inputs, section)


def unscored_in_words(scores: Scores | None) -> list[str]:
    """Return a sentence for each task of the recipe that has no score."""
    unscored = scores.unscored_tasks if scores else {}
    return [f"no score of {name}: {reason}" for name, reason in unscored.items()]


def _own_file(key: str, path: str) -> str:
    place = Path(path).expanduser()
    if key == "minimal_pairs" and place.is_dir():
        return hash_json({file.name: hash_file(file) for file in files_of_folder(place)})
    if not place.is_file():
        raise KieloError(f"evaluate.{key} = {path!r}: no such file")
    return hash_file(place)
