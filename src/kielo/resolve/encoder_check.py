"""Checks that a layout and an objective are ones that an encoder can have: torch-free."""

from collections.abc import Iterator

from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Layout, Objective


def encoder_complaints(model_type: str, layout: Layout) -> Iterator[str]:
    """Yields each axis of the layout that encoders do not have; nothing for a decoder.

    An encoder's layers share the table of relative positions, which is on the first pipeline stage alone, and
    the largest that was published has 323 M parameters.
    """
    if not FAMILIES[model_type].is_encoder:
        return
    for axis in ("pipeline", "context", "tensor"):
        ranks = getattr(layout, axis)
        if ranks > 1:
            yield (
                f"layout.{axis} = {ranks}: model.model_type = {model_type!r} is an encoder, which only "
                f"layout.shard and layout.replicate spread over ranks; what would work: layout.{axis} = 1"
            )


def objective_complaints(model_type: str, objective: Objective) -> Iterator[str]:
    """Yields why the objective does not train such a model: encoders see the tokens after each."""
    if FAMILIES[model_type].is_encoder and objective == "next_token":
        yield (
            f"model.model_type = {model_type!r} is an encoder, which sees the next token that it would learn "
            'to predict; what would work: train.objective = "masked_tokens"'
        )
    if not FAMILIES[model_type].is_encoder and objective == "masked_tokens":
        encoders = ", ".join(name for name, family in FAMILIES.items() if family.is_encoder)
        yield (
            f'train.objective = "masked_tokens" is for encoders, and model.model_type = {model_type!r} sees '
            f"only the tokens before each; what would work: model.model_type = {encoders}"
        )
