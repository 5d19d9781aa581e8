"""Shipped recipes are jobs: on the nodes that each names, its layout fits, is nearly the best, launches."""

import pytest

from kielo.artifact.launch_files import Ladder, Launch
from kielo.artifact.stage_json import read_json
from kielo.cli.main import main
from kielo.models.parameter_shapes import parameters
from kielo.plan.choose_layout import own
from kielo.plan.cost import cost, with_layout
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.recipe.cards import accelerator, cluster, clusters
from kielo.recipe.read import read_recipe
from tests.shipped import ON_ACCELERATORS, RUNS, on_accelerators

MOST_BEHIND = 0.1
# The formula is within 5 % of rehearsals, as others hold. So what needs less of a device has room.
LEAST_REHEARSED = 0.9
LONG = "llmjp_172b_fp8"  # its search takes as long as all other searches
SHIPPED = [pytest.param(name, marks=pytest.mark.full) if name == LONG else name for name in ON_ACCELERATORS]
# One of each family and accelerator. The searches of all, on all their nodes, are in make test-full.
SEARCHED = (
    "estonian_llama31_70b", "llmjp_172b", "ltg_bert_base", "lumi_140b_scaling", "norwegian_7b", "poro_34b",
    "swedish_oscar_gpt2", "swedish_oscar_opt",
)  # fmt: skip


def planned(run: RunToPlan, nodes: int) -> PlannedLayout:
    found = own(run, nodes)
    assert isinstance(found, PlannedLayout), f"{run.recipe.name} on {nodes} nodes: {found}"
    return found


def check_beside_the_best(run: RunToPlan, nodes: int) -> None:
    """At most 10 % slower than the best that the search finds, which has a price and a usual speed."""
    mine, best = planned(run, nodes), search(run, [nodes]).ranked[nodes][0]
    behind = 1 - mine.tokens_per_second / best.tokens_per_second
    assert behind <= MOST_BEHIND, f"{nodes} nodes: {mine.name} is {behind:.1%} behind {best.name}"
    assert 0.14 < best.mfu < 0.75 and cost(best).days > 0
    assert with_layout(run.recipe, best).layout == best.layout


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_run_fits_and_is_launched(name, tmp_path, monkeypatch):
    """On each number of nodes within memory; on the most nodes launched so, and nearly the best."""
    recipe = on_accelerators(name)
    assert recipe.nodes, f"{name} does not say on how many nodes of {recipe.cluster} it is meant to run"
    run = RunToPlan.of_recipe(recipe)
    for nodes in recipe.nodes:
        mine = planned(run, nodes)
        need = mine.need
        assert mine.fits, (
            f"{nodes} nodes: {need.bytes / 1e9:.1f} of {need.usable / 1e9:.1f} GB on {mine.fullest}"
        )
    if name in SEARCHED:
        check_beside_the_best(run, max(recipe.nodes))
    monkeypatch.chdir(tmp_path)
    site = recipe.cluster if cluster(recipe.cluster).jobs else "abci3"  # of the same number of devices a node
    words = ["launch", name, "--set", f"language={recipe.language}", "--cluster", site, "--dry-run"]
    words += ["--account", cluster(site).jobs.account_example, "--nodes", str(max(recipe.nodes))]
    assert main(words) == 0
    folder = tmp_path / "runs" / recipe.name / "launch" / "0001"
    launched = read_json(folder, Launch)
    assert launched.nodes == max(recipe.nodes) and launched.forecast.tokens_per_second > 0
    assert read_recipe(folder / "recipe.toml").recipe.name == recipe.name
    assert site != recipe.cluster or launched.forecast.layout == mine.name


def test_strong_scaling_of_the_140b_is_a_ladder(tmp_path, monkeypatch):
    """On the fewest and the most published nodes: three layouts each, at the same 768 sequences."""
    monkeypatch.chdir(tmp_path)
    words = ["launch", "lumi_140b_scaling", "--ladder", "48,768", "--dry-run"]
    assert main([*words, "--account", "project_462000000"]) == 0
    ladder = read_json(tmp_path / "runs/lumi_140b_scaling/launch/ladder_lumi_g", Ladder)
    assert [rung.nodes for rung in ladder.rungs] == [48] * 3 + [768] * 3
    assert ladder.tokens_per_step == 768 * 5120 and all(rung.planned for rung in ladder.rungs)


@pytest.mark.full
@pytest.mark.parametrize("name", ON_ACCELERATORS)
def test_every_shipped_layout_is_nearly_the_best_on_all_nodes_that_it_names(name):
    """Also on other clusters, which entries of [[layouts]] name."""
    recipe = on_accelerators(name)
    named = {recipe.cluster: {*recipe.nodes}}
    for entry in recipe.layouts:
        named.setdefault(entry.cluster, set()).update(entry.nodes)
    for site, numbers in named.items():
        run = RunToPlan.of_recipe(recipe.model_copy(update={"cluster": site}))
        for nodes in sorted(numbers):
            check_beside_the_best(run, nodes)


WITHOUT_FP8 = [name for name in ON_ACCELERATORS if name != LONG]
CLUSTERS = [name for name in clusters() if accelerator(cluster(name).accelerator).device == "cuda"]


@pytest.mark.parametrize(
    ("site", "names", "wanted"),
    [(site, ("viking_7b",), (16,)) for site in CLUSTERS]
    + [pytest.param(site, WITHOUT_FP8, (4, 16, 64), marks=pytest.mark.full) for site in CLUSTERS],
)
def test_every_cluster_plans_every_recipe_that_fits(site, names, wanted):
    """On few or many of its nodes. What does not run there is too large for all of them."""
    for name in names:
        run = RunToPlan.of_recipe(on_accelerators(name).model_copy(update={"cluster": site}))
        most = run.site.nodes
        counts = [number for number in wanted if number < most] or [most]
        found = search(run, counts)
        fits = [ranked for ranked in found.ranked.values() if ranked]
        if not fits:
            state = 16 * parameters(run.model)  # bytes of weights, gradients and Adam's moments
            assert state > 0.8 * counts[-1] * run.site.devices_per_node * run.usable_bytes, (site, name)
        for ranked in fits:
            assert ranked[0].fits and 0 < ranked[0].mfu < 0.8 and cost(ranked[0]).device_hours > 0


def test_a_recipe_of_one_machine_names_no_nodes():
    """What runs on a laptop or on any GPU has no layout to hold."""
    assert not [name for name in RUNS if name not in ON_ACCELERATORS and read_recipe(name).recipe.nodes]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ON_ACCELERATORS)
def test_the_tightest_rank_fits_as_rehearsed(name):
    """The rank that the plan says needs most, on the nodes where it needs most: rehearsed, it fits. Where the
    plan leaves a tenth of a device, it is not rehearsed: its bytes are within 5 % (tests/verify).
    """
    from kielo.resolve.resolve import resolve
    from kielo.resolve.text import imagined_text
    from kielo.verify.rehearse import rehearse

    recipe = on_accelerators(name)
    run = RunToPlan.of_recipe(recipe)
    tightest = max((planned(run, nodes) for nodes in recipe.nodes), key=lambda one: one.peak_bytes)
    if (share := tightest.need.bytes / tightest.need.usable) < LEAST_REHEARSED:
        pytest.skip(f"{name} needs {share:.0%} of a device by the plan")
    resolved = resolve(recipe, "", tightest.devices, "cuda", run.card.name, text=imagined_text(recipe))
    found = rehearse(resolved, int(tightest.fullest.split()[1]))
    assert found["fits"], f"{found['needed_bytes'] / 1e9:.1f} of {found['usable_bytes'] / 1e9:.1f} GB"
