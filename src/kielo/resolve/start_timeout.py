"""How long ranks wait for each other at the start of a job: as the recipe says, or its cluster's card."""

from kielo.recipe.cards import cluster
from kielo.recipe.sections import Recipe

_USUAL_SECONDS = 1800.0


def start_timeout_seconds(recipe: Recipe) -> float:
    """Returns the limit of the meeting, of each communicator's start and of the first steps' collectives."""
    of_cluster = cluster(recipe.cluster).start_timeout_seconds
    return recipe.train.start_timeout_seconds or of_cluster or _USUAL_SECONDS
