"""The planner's forecast of a launch: a recipe on a number of nodes → the training's layout and cost."""

from kielo.artifact.launch_files import Forecast
from kielo.plan.choose_layout import named, own
from kielo.plan.cost import cost, with_layout
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.text import imagined_text


def planned_run(recipe: Recipe, nodes: int, layout: str | None) -> tuple[Recipe, PlannedLayout | None, str]:
    """Return the recipe with its layout on `nodes`, that layout planned, and "".

    layout: a layout's name, or part of it; default: the recipe's own. If no card has the devices' speed, the
    plan is None, with the reason. Raises KieloError for a layout that cannot run or does not fit.
    """
    recipe = recipe.model_copy(update={"nodes": (nodes,)})
    try:
        run = RunToPlan.of_recipe(recipe)
    except KieloError as error:
        if layout is not None:
            raise
        _refuse_impossible(recipe, nodes)
        return recipe, None, str(error).partition(". Fix")[0]
    planned = own(run, nodes) if layout is None else named(run, nodes, layout)
    if isinstance(planned, str):
        other = _other(run, nodes)
        if "Fix: " in planned:
            other = other.replace(". Fix: ", ", or ")
        raise KieloError(f"{recipe.name} on {nodes} nodes of {run.site.name}: {planned}{other}")
    if not planned.fits:
        need, other = planned.need, _other(run, nodes)
        raise KieloError(
            f"{planned.name} of {recipe.name} does not fit {nodes} nodes of {run.site.name}: it needs "
            f"{need.bytes / 1e9:.1f} GB {need.where}, and {need.usable / 1e9:.1f} GB are usable{other}"
        )
    return (recipe if layout is None else with_layout(recipe, planned)), planned, ""


def forecast_of(planned: PlannedLayout, wall_hours: float) -> Forecast:
    """Compute what the run takes on this layout in jobs of `wall_hours`."""
    site = planned.run.site
    try:
        its_cost = cost(planned, wall_hours)
    except KieloError as error:
        raise KieloError(str(error).replace("--wall-hours", "--hours")) from None
    billed = site.billed_per_node_hour
    return Forecast(
        layout=planned.name,
        tokens_per_second=planned.tokens_per_second,
        step_seconds=planned.step_seconds,
        interval_seconds=[planned.low_seconds, planned.high_seconds],
        peak_gigabytes=planned.peak_bytes / 1e9,
        usable_gigabytes=planned.run.usable_bytes / 1e9,
        wall_hours=its_cost.wall_seconds / 3600,
        device_hours=its_cost.device_hours,
        safe_device_hours=its_cost.device_hours * planned.safe_share,
        billed=None if billed is None else its_cost.device_hours / site.devices_per_node * billed,
        billing_unit=site.billing_unit,
        jobs=its_cost.jobs,
        checkpoint_gigabytes=its_cost.checkpoint_bytes / 1e9,
        checkpoint_seconds=its_cost.checkpoint_seconds,
        save_stop_seconds=its_cost.stop_seconds,
    )


def _refuse_impossible(recipe: Recipe, nodes: int) -> None:
    site = cluster(recipe.cluster)
    card, ranks = accelerator(site.accelerator), nodes * site.devices_per_node
    try:
        resolve(recipe, "", ranks, card.device, card.name, text=imagined_text(recipe))
    except KieloError as error:
        raise KieloError(f"{recipe.name} on {nodes} nodes of {site.name}: {error}") from None


def _other(run: RunToPlan, nodes: int) -> str:
    """Return the fastest layout that fits, as a fix; empty if there is none."""
    ranked = search(run, [nodes]).ranked[nodes]
    return f". Fix: --layout {ranked[0].name}" if ranked else ""
