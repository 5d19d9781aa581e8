"""Restart of learned positions in each document: the recipe's key → the identity's."""

from kielo.models.families import module
from kielo.recipe.sections import DatasetIdentity, Model


def learns_positions(model_type: str) -> bool:
    """Returns True for families with an embedding of positions."""
    return "position_table" in module(model_type, "tensor_parallel_plan").TENSOR_PARALLEL_PLAN


def with_positions(dataset: DatasetIdentity, model: Model) -> DatasetIdentity:
    """Returns the section with restart_positions filled in: true, or None where positions do not begin anew.

    Identities that were stored before this key existed have None: their positions continue.
    """
    applies = dataset.mask_documents and learns_positions(model.model_type)
    restarts = True if applies and dataset.restart_positions is not False else None
    return dataset.model_copy(update={"restart_positions": restarts})
