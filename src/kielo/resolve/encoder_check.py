"""Checks of layout, objective and dropout by what encoders have and decoders have not: torch-free."""

from collections.abc import Iterator

from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Layout, TrainIdentity


def encoder_complaints(model_type: str, layout: Layout) -> Iterator[str]:
    """Yields why an encoder cannot have the layout; nothing for a decoder.

    Relative positions are computed for whole sequences, of which the longest that were published have 512
    tokens.
    """
    if layout.context > 1 and FAMILIES[model_type].has_relative_positions:
        yield (
            f"layout.context = {layout.context}: model.model_type = {model_type!r} has relative positions, "
            "for which a rank needs whole sequences; what would work: layout.context = 1"
        )


def dropout_complaints(model_type: str, attention_dropout: float) -> Iterator[str]:
    """Yields why attention's weights are not dropped in such a model."""
    if attention_dropout and not FAMILIES[model_type].is_encoder:
        yield (
            f"train.attention_dropout = {attention_dropout}: model.model_type = {model_type!r} is a decoder, "
            "and only encoders' attention drops weights; what would work: train.attention_dropout = 0 and "
            f"train.hidden_dropout = {attention_dropout}"
        )


def objective_complaints(model_type: str, train: TrainIdentity) -> Iterator[str]:
    """Yields why the objective does not train such a model: encoders see the tokens after each."""
    family, objective = FAMILIES[model_type], train.objective
    if family.is_encoder and objective == "next_token":
        yield (
            f"model.model_type = {model_type!r} is an encoder, which sees the next token that it would learn "
            'to predict; what would work: train.objective = "masked_tokens"'
        )
    if not family.is_encoder and objective == "masked_tokens":
        encoders = ", ".join(name for name, one in FAMILIES.items() if one.is_encoder)
        yield (
            f'train.objective = "masked_tokens" is for encoders, and model.model_type = {model_type!r} sees '
            f"only the tokens before each; what would work: model.model_type = {encoders}"
        )
    if train.causal_share and objective == "next_token":
        yield (
            f"train.causal_share = {train.causal_share:g} is for a model that predicts hidden tokens too; "
            'what would work: train.objective = "masked_tokens", or train.causal_share = 0'
        )
