"""How long ranks wait for each other at the start of a job: as the recipe says, or its cluster's card."""

from kielo.recipe.cards import cluster
from kielo.recipe.sections import Recipe

_USUAL_SECONDS = 1800.0


def start_timeout_seconds(recipe: Recipe) -> float:
    """Returns the limit of the meeting, of each communicator's start and of the first steps' collectives."""
    card = cluster(recipe.cluster)
    return recipe.train.start_timeout_seconds or card.start_timeout_seconds or _USUAL_SECONDS
