"""The evaluate stage: a run's checkpoint and texts → `evaluate/scores.json`; also the scores of other models.

Every contender scores the same held-out documents under the convention of `contender.py`. Encoders have
`evaluate/masked_scores.json` instead, of `score.py`; those of the hybrid objective have both.
"""

from pathlib import Path

from kielo.artifact.checkpoint_index import read_state
from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.artifact.manifest import hash_file, hash_manifest, is_current, read_manifest, write_stage
from kielo.artifact.scores import MaskedScores, Scores
from kielo.artifact.stage_json import read_stage_json, write_json
from kielo.dataset.heldout_sets import EVALUATION_TEXTS
from kielo.dataset.provenance import check_recipe, check_tokenizer, check_tokens
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import longest_sequence_length
from kielo.recipe.sections import Recipe
from kielo.resolve import resolved as resolved_file

KIND, VERSION = "scores", 3


def evaluate(recipe: Recipe, run_folder: Path, checkpoint: Path | None = None) -> Scores | MaskedScores:
    """Score the run's checkpoint (default: the newest whole one) beside three baselines given the same text.

    Writes `run_folder/evaluate`, of an encoder of the hybrid objective also the scores of its causal use. A
    current folder is read back instead. Raises KieloError when a stage that
    it needs is not finished, and when text, tokenizer and checkpoint do not belong together.
    """
    run_folder = Path(run_folder)
    folder = run_folder / "evaluate"
    checkpoint = newest_checkpoint(run_folder) if checkpoint is None else Path(checkpoint)
    check_recipe(recipe, run_folder)
    check_tokens(read_state(checkpoint), run_folder)
    inputs = {name: hash_manifest(run_folder / name) for name in ("tokenizer", "tokens")}
    if recipe.corpus.of_raw_text.sources:
        inputs["corpus"] = hash_manifest(run_folder / "corpus")
    inputs["checkpoint"] = hash_manifest(checkpoint)
    if read_manifest(run_folder / EVALUATION_TEXTS) is not None:
        inputs[EVALUATION_TEXTS] = hash_manifest(run_folder / EVALUATION_TEXTS)
    inputs |= {f"evaluate.{key}": _own_file(key, path) for key, path in recipe.evaluate.encoder_files.items()}
    section = recipe.evaluate.model_dump(mode="json") | {"seed": recipe.seed}
    is_masked = recipe.train.objective == "masked_tokens"
    if is_current(folder, KIND, VERSION, inputs, section):
        return read_stage_json(folder, MaskedScores if is_masked else Scores)
    # torch, which a finished stage does without
    from kielo.evaluate.contender import causal_use, load_checkpoint
    from kielo.evaluate.score import score, score_encoder

    with write_stage(folder, KIND, VERSION, inputs, section) as stage:
        resolved = resolved_file.read(run_folder / "resolved.toml")
        contender = load_checkpoint(checkpoint, resolved, run_folder / "tokenizer")
        if is_masked:
            scores = score_encoder(contender, checkpoint.name, recipe, resolved.identity, run_folder)
            write_json(stage.folder, scores)
            stage.counts |= {"accuracy": scores.accuracy.content()}
            if not resolved.identity.train.causal_share:
                return scores
            contender = causal_use(contender, recipe)
            # The recipe's prompts have mask tokens: samples go on from openings of held-out documents.
            settings = recipe.evaluate.model_copy(update={"prompts": ()})
            recipe = recipe.model_copy(update={"evaluate": settings})
        in_turn = score(contender, checkpoint.name, recipe, run_folder)
        write_json(stage.folder, in_turn)
        stage.counts |= {
            "bits_per_byte": in_turn.bits_per_byte.content(),
            "heldout_bytes": in_turn.heldout_bytes,
        }
    return scores if is_masked else in_turn


def _own_file(key: str, path: str) -> str:
    """Returns the hash of a person's file. Raises KieloError where it is not there."""
    if not (place := Path(path).expanduser()).is_file():
        raise KieloError(f"evaluate.{key} = {path!r}: no such file")
    return hash_file(place)


def evaluate_hugging_face(recipe: Recipe, run_folder: Path, model: Path) -> Scores:
    """Score any Hugging Face folder in the same way, on the held-out text of a run. Writes nothing.

    Bits per byte compare models whose tokenizers differ. Windows are as long as the run's sequences.
    """
    from kielo.evaluate.contender import load_hugging_face
    from kielo.evaluate.score import score

    if recipe.train.objective == "masked_tokens":
        raise KieloError(
            f"{model}: the recipe's text is an encoder's, for which bits per byte are not defined; what "
            "would work: a run of an encoder, with its recipe alone"
        )
    check_recipe(recipe, run_folder)
    check_tokenizer(run_folder)
    contender = load_hugging_face(Path(model), longest_sequence_length(recipe))
    return score(contender, str(model), recipe, Path(run_folder))
