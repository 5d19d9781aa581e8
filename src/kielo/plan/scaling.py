"""Strong and weak scaling of a run over numbers of nodes; no torch."""

from collections.abc import Sequence

from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import Found, search
from kielo.recipe.sections import Phase, Recipe, Train


def strong_and_weak(
    run: RunToPlan, nodes: Sequence[int], found: Found
) -> tuple[list[PlannedLayout], list[PlannedLayout]]:
    """Returns the fastest layouts on each number of nodes: (with the run's batch, with a batch that grows).

    `found` is the result of a search over `nodes`. Numbers of nodes on which nothing runs are left out.
    """
    strong = [found.ranked[number][0] for number in nodes if found.ranked[number]]
    first = strong[0].nodes
    weak = []
    for planned in strong:
        grown = RunToPlan.of(_grown(run.recipe, planned.nodes, first), run.model)
        weak += search(grown, [planned.nodes]).ranked[planned.nodes][:1]
    return strong, weak


def _grown(recipe: Recipe, nodes: int, first: int) -> Recipe:
    """Returns the recipe with nodes / first times the tokens in each step of each phase."""

    def larger(part: Train | Phase) -> Train | Phase:
        tokens = part.tokens_per_step
        return part.model_copy(update={"tokens_per_step": tokens and tokens * nodes // first})

    phases = tuple(larger(phase) for phase in recipe.phases)
    return recipe.model_copy(update={"train": larger(recipe.train), "phases": phases})
