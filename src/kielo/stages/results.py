"""Results of a run's checkpoint: the certificate of parity, the scores, and the Hugging Face folder.

A current result is read. Only making a result loads torch.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console

from kielo.artifact import checkpoint_inspection
from kielo.artifact.checkpoint_folder import run_around
from kielo.artifact.checkpoint_index import read_state
from kielo.artifact.scores import MaskedScores, Scores
from kielo.artifact.verify_results import PARITY_ON_RANKS, Parity
from kielo.checkpoint.export_stage import CARD_FILE, ExportOptions, IdsProof, wanted_export
from kielo.dataset.provenance import check_tokenizer_of_checkpoint, check_tokens
from kielo.evaluate.evaluation import wanted_scores
from kielo.recipe.errors import KieloError, print_text
from kielo.recipe.sections import CompleteModel, Precision, Recipe
from kielo.report.model_card import card_languages, export_card, write_model_card
from kielo.resolve.resolved import Resolved, read
from kielo.stages import late
from kielo.verify.certificate import ParityOptions, current_certificate, print_parity
from kielo.verify.parity_size import RanksOptions


def newest_checkpoint(run_folder: Path) -> Path:
    """Return the run's newest complete checkpoint, with a warning for each newer damaged checkpoint.

    Raise KieloError if none is complete.
    """
    return checkpoint_inspection.newest_checkpoint(
        run_folder, warn=lambda warning: print_text(f"warning: {warning}")
    )


def certify(
    recipe: Recipe, folder: Path, steps: int | None = None, is_quiet: bool = False, shows_current: bool = True
) -> Parity:
    """Certify the parity of the run's newest checkpoint with Hugging Face. Print it unless quiet.

    shows_current: print an existing certificate, too.
    """
    _refuse_encoder(recipe)
    section, checkpoint = recipe.verify, newest_checkpoint(folder)
    check_tokens(read_state(checkpoint), folder)
    options = ParityOptions(
        steps=steps or section.parity_steps,
        sequences_per_step=section.parity_sequences_per_step,
        sequence_length=section.parity_sequence_length,
        tolerance=section.tolerance,
    )
    what = read(folder / "resolved.toml"), folder / "verify", checkpoint, options
    certificate = current_certificate(*what)
    is_shown = certificate is None or shows_current
    if certificate is None:
        certificate = late.verify_parity(*what)
    if is_shown and not is_quiet:
        print_parity(certificate)
    return certificate


def certify_on_ranks(
    recipe: Recipe, folder: Path, resolved: Resolved, asked: Any, is_quiet: bool = False
) -> Parity | None:
    """Certify parity on the ranks of this job, in its placement `resolved`. Rank 0 gets the certificate.

    asked: has the flags steps, precision and sequence_length of `kielo verify parity`, None if not given.
    """
    _refuse_encoder(recipe)
    section, first = recipe.verify, resolved.identity.train.precision
    precision: Precision = asked.precision or ("fp32" if first == "fp32" else "bf16")
    options = RanksOptions(
        steps=asked.steps or section.parity_steps,
        sequences_per_step=section.parity_sequences_per_step,
        tolerance=section.tolerance,
        sequence_length=asked.sequence_length,
        precision=precision,
    )

    def checkpoint() -> Path:
        found = newest_checkpoint(folder)
        check_tokens(read_state(found), folder)
        return found

    console = None if is_quiet else Console()
    return late.verify_parity_on_ranks(resolved, folder / PARITY_ON_RANKS, checkpoint, options, console)


def _refuse_encoder(recipe: Recipe) -> None:
    if recipe.train.objective == "masked_tokens":
        raise KieloError(
            'train.objective = "masked_tokens": only decoders are compared with transformers. '
            "Fix: kielo verify layouts, or kielo verify round-trip"
        )


def evaluate(recipe: Recipe, run_folder: Path, checkpoint: Path | None = None) -> Scores | MaskedScores:
    wanted = wanted_scores(recipe, run_folder, checkpoint)
    return wanted.current() or late.make_scores(wanted)


def export_checkpoint(
    checkpoint: Path, to: Path, tokenizer_folder: Path, recipe: Recipe | None, **how: Any
) -> CompleteModel:
    """Export a checkpoint to the folder `to`, and return the model's settings, which the checkpoint has.

    If `to` has that export already, only its card is renewed if the recipe has changed.

    The card uses the run's `recipe`, None if not known. `how` has fields of `ExportOptions`. Raise KieloError
    if another tokenizer made the tokens.
    """
    model = _exported_model(checkpoint, tokenizer_folder)
    wanted = wanted_export(checkpoint, to, model, tokenizer_folder, ExportOptions(**how))
    card = export_card(wanted, recipe)
    if not wanted.stage.is_done():
        late.export_hugging_face(checkpoint, to, model, tokenizer_folder, wanted.options, card)
    elif recipe is not None and (to / CARD_FILE).exists():
        run = run_around(to)
        if run is None or to.resolve() != run / "hf":  # that folder has the report's card, with results
            write_model_card(to, card)
    return model


def export_gguf(
    checkpoint: Path, to: Path, tokenizer_folder: Path, recipe: Recipe | None, dtype: str | None
) -> IdsProof | None:
    """Export a checkpoint as the folder `to` with a GGUF file, unless it is there. Return what ids proved."""
    model = _exported_model(checkpoint, tokenizer_folder)
    about: dict[str, Any] = {"name": to.name}
    if recipe is not None:
        about |= {"license": recipe.report.license, "languages": card_languages(recipe)}
    options = ExportOptions(dtype, is_replacing=False, is_gguf=True, about=about)
    return late.export_gguf(wanted_export(checkpoint, to, model, tokenizer_folder, options))


def _exported_model(checkpoint: Path, tokenizer_folder: Path) -> CompleteModel:
    state = read_state(checkpoint)
    if not state.identity:
        raise KieloError(f"{checkpoint}: does not name its model, so it cannot be exported")
    check_tokenizer_of_checkpoint(state, run_around(checkpoint), tokenizer_folder)
    try:
        return CompleteModel.model_validate(state.identity["model"])
    except (KeyError, TypeError, ValidationError) as error:
        raise KieloError(f"{checkpoint}: its model is not a model of this Kielo ({error})") from None
