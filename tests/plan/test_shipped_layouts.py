"""Shipped recipes are jobs: on the nodes that each names, its layout runs, fits, and is nearly the best."""

import pytest

from kielo.models.parameter_shapes import parameters
from kielo.plan.choose_layout import own
from kielo.plan.cost import cost, with_layout
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.recipe.cards import accelerator, cluster, clusters
from kielo.recipe.read import read_first_language, shipped_recipes
from kielo.recipe.sections import Recipe

MOST_BEHIND = 0.1


def on_accelerators(name: str) -> Recipe | None:
    """Returns the recipe if it is meant for a cluster of GPUs."""
    recipe = read_first_language(name).recipe
    return recipe if accelerator(cluster(recipe.cluster).accelerator).device == "cuda" else None


SHIPPED = [name for name in shipped_recipes() if on_accelerators(name)]
LONG = "bloom_176b_finnish"  # its search takes as long as those of all others


def planned(run: RunToPlan, nodes: int) -> PlannedLayout:
    found = own(run, nodes)
    assert isinstance(found, PlannedLayout), f"{run.recipe.name} on {nodes} nodes: {found}"
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name == LONG else name for name in SHIPPED]
)
def test_every_shipped_layout_fits_and_is_nearly_the_best(name):
    """On each number of nodes and cluster that the recipe names: within memory, and at most 10 % slower than
    the best that the search finds, which has a price and a speed that such devices reach.
    """
    recipe = on_accelerators(name)
    assert recipe.nodes, f"{name} does not say on how many nodes of {recipe.cluster} it is meant to run"
    places = {(recipe.cluster, nodes) for nodes in recipe.nodes}
    places |= {(entry.cluster, nodes) for entry in recipe.layouts for nodes in entry.nodes}
    for site, nodes in sorted(places):
        run = RunToPlan.of_recipe(recipe.model_copy(update={"cluster": site}))
        mine, best = planned(run, nodes), search(run, [nodes]).ranked[nodes][0]
        need = mine.need
        assert mine.fits, (
            f"{nodes} nodes: {need.bytes / 1e9:.1f} of {need.usable / 1e9:.1f} GB on {mine.fullest}"
        )
        behind = 1 - mine.tokens_per_second / best.tokens_per_second
        assert behind <= MOST_BEHIND, f"{nodes} nodes: {mine.name} is {behind:.1%} behind {best.name}"
        assert 0.14 < best.mfu < 0.75 and cost(best).days > 0
        assert with_layout(run.recipe, best).layout == best.layout


CLUSTERS = [name for name in clusters() if accelerator(cluster(name).accelerator).device == "cuda"]


@pytest.mark.parametrize(
    ("site", "names"),
    [(site, ("viking_7b",)) for site in CLUSTERS]
    + [pytest.param(site, SHIPPED, marks=pytest.mark.full) for site in CLUSTERS],
)
def test_every_cluster_plans_every_recipe_that_fits(site, names):
    """On few or many of its nodes. What does not run there is too large for all of them."""
    for name in names:
        run = RunToPlan.of_recipe(read_first_language(name, [f"cluster={site}"]).recipe)
        most = run.site.nodes
        counts = [number for number in (4, 16, 64) if number < most] or [most]
        found = search(run, counts)
        fits = [ranked for ranked in found.ranked.values() if ranked]
        if not fits:
            state = 16 * parameters(run.model)  # bytes of weights, gradients and Adam's moments
            assert state > 0.8 * counts[-1] * run.site.devices_per_node * run.usable_bytes, (site, name)
        for ranked in fits:
            assert ranked[0].fits and 0 < ranked[0].mfu < 0.8 and cost(ranked[0]).device_hours > 0


def test_a_recipe_of_one_machine_names_no_nodes():
    """What runs on a laptop or on any GPU has no layout to hold."""
    assert not [
        name for name in shipped_recipes() if name not in SHIPPED and read_first_language(name).recipe.nodes
    ]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SHIPPED)
def test_the_tightest_rank_fits_as_rehearsed(name):
    """The rank that the plan says needs most, on the nodes where it needs most: rehearsed, it fits."""
    from kielo.resolve.resolve import resolve
    from kielo.resolve.text import imagined_text
    from kielo.verify.rehearse import rehearse

    recipe = on_accelerators(name)
    run = RunToPlan.of_recipe(recipe)
    tightest = max((planned(run, nodes) for nodes in recipe.nodes), key=lambda one: one.peak_bytes)
    resolved = resolve(recipe, "", tightest.devices, "cuda", run.card.name, text=imagined_text(recipe))
    found = rehearse(resolved, int(tightest.fullest.split()[1]))
    assert found["fits"], f"{found['needed_bytes'] / 1e9:.1f} of {found['usable_bytes'] / 1e9:.1f} GB"
