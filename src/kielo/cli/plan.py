"""`kielo plan`: layouts that fit a machine, with their speed and cost; or the numbers of one. No torch.

The first argument is a recipe, or one of `SUBVERBS`.
"""

import argparse
import math
import shlex
from collections.abc import Iterable
from pathlib import Path

from kielo.artifact.lease import held
from kielo.artifact.trained_text import has_trained
from kielo.cli import plan_tables as tables
from kielo.cli.flags import VerbParser, takes
from kielo.cli.ideas import TAKES_IDEA, check_nodes, read_idea, with_flags
from kielo.cli.plan_data import plan_budget
from kielo.cli.plan_variants import plan_variants, refuse_flags
from kielo.cli.run_languages import chosen_in, kind_of
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.plan.batch_sizes import batch_sizes, laws_of
from kielo.plan.calibrate import measure, write_machine
from kielo.plan.choose_layout import different_axes, named, nothing_runs, own
from kielo.plan.compare import compare as compared_rows
from kielo.plan.compare import strong_and_weak, verdict
from kielo.plan.cost import cost, with_expectation, with_layout
from kielo.plan.explain import explain as explained
from kielo.plan.failures import rate_of
from kielo.plan.measured_run import metrics_of
from kielo.plan.planned_layout import PlannedLayout
from kielo.plan.remedies import speed_advice
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import Found, search
from kielo.recipe.cards import Cluster, accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.layout_on_nodes import on_devices
from kielo.recipe.places import place
from kielo.recipe.read import read_recipe, recipe_choices, run_folder
from kielo.resolve.resolve import resolve as resolved_run
from kielo.resolve.resolved import write
from kielo.resolve.shares import uneven_steps
from kielo.stages import late

SUBVERBS = {
    "data": ("plan_data:data", "the text by source and phase: tokens, shares, epochs"),
    "compare": ("plan:compare", "layouts side by side, with a verdict"),
    "explain": ("plan:explain", "what bounds the speed of one layout"),
    "calibrate": ("plan:calibrate", "a card of your own machine, from what your runs measured"),
    "resolve": ("plan:resolve", "every number of a run, written into its folder until it trains"),
}
# Numbers of layouts in the table: for one number of nodes, and for each of several.
_LISTED, _LISTED_IN_SHORT = (12, 3), (3, 1)
_MOST_NODE_COUNTS = 12


_MACHINE = """
    --cluster CLUSTER  cluster card (see `kielo clusters`); default: the recipe's
    --nodes N          16, or 4,8,12, or 4..256 (doubled from the first to the last); default: the recipe's
                       nodes
    --machine CARD     card of your own machine, by `kielo plan calibrate`
    --json             print all figures as JSON, in seconds and bytes
"""
_WALL_HOURS = "--wall-hours H:float  hours of the longest job; default: the site's limit"


def plan_flags(parser: VerbParser) -> None:
    parser.takes(f"""
        $ kielo plan estonian_llama31_70b --nodes 4..256
        $ kielo plan --params 3B --cluster lumi_g --nodes 16
        $ kielo plan estonian_llama31_70b --nodes 16 --all
        $ kielo plan estonian_llama31_70b --nodes 128 --failures
        $ kielo plan compare estonian_llama31_70b tp8pp4 tp8pp8 --nodes 16
        $ kielo plan --budget 20000h --corpus 6.6B --cluster lumi_g
        {TAKES_IDEA}
        {_MACHINE}
        --budget COMPUTE    in place of layouts: the size and the tokens that scaling laws advise for this
                            much compute, device-hours such as 20000h or FLOPs such as 1e22, and the
                            expected loss
        --corpus TOKENS     with --budget: number of different tokens, such as 6.6B; default: RECIPE's text
        --wide              more layouts, seconds by part, and why others are left out
        --top K:count       list K layouts for each number of nodes
        --all               as --wide, with every other layout
        --plot DIR          draw the scaling into this folder, as SVG
        --batch             in place of layouts: smaller and larger steps, with their speed by the plan and
                            the tokens that they cost by two published laws
        --failures [RATE=]  rate of failures: llama3 or another published rate, or failures of a device in
                            1,000 days; default: the cluster card's rate, or llama3
        {_WALL_HOURS}
    """)
    parser.may_begin_with(SUBVERBS)


def plan(options: argparse.Namespace) -> int:
    if options.budget is not None or options.corpus is not None:
        return plan_budget(options)
    choices = recipe_choices(options.recipe, options.sets) if options.recipe else ()
    if choices and kind_of(choices) == "variants":
        if options.batch:
            raise KieloError(f"--batch is about one run. Fix: --set {choices[0]}")
        return plan_variants(options, {choice: _run_and_nodes(options, choice) for choice in choices})
    codes = tuple(map(chosen_in, choices))  # of several languages, which the first stands for
    options.sets = [*options.sets, *choices[:1]]
    run, nodes = _run_and_nodes(options)
    if options.batch:
        refuse_flags(
            options, ("plot", "failures", "top", "wide", "all"), "--batch lists no layouts", "leave it out"
        )
        return _plan_batch(run, nodes, options.json)
    rate = None if options.failures is None else rate_of(options.failures, run.site)
    found = search(run, nodes)
    if not any(found.ranked.values()):
        raise nothing_runs(run, nodes, found)
    is_full = options.wide or options.all or options.json
    many = options.top or (_LISTED if is_full else _LISTED_IN_SHORT)[len(nodes) > 1]

    def costed(several: Iterable[PlannedLayout | str]) -> list[tables.Costed]:
        of = [one for one in several if isinstance(one, PlannedLayout)]
        return [(planned, cost(planned, options.wall_hours, rate)) for planned in of]

    layouts = [planned for number in nodes for planned in different_axes(found.ranked[number])[:many]]
    listed, owns = costed(layouts), {number: own(run, number) for number in nodes}
    plots = [_plot_scaling(options.plot, run, nodes, found)] if options.plot else []
    of_all = None
    if codes:
        fastest = [planned for ranked in found.ranked.values() for planned in ranked[:1]]
        of_all = tables.of_all_languages(codes, costed([*fastest, *owns.values()]))
    if options.json:
        content = tables.plan_json(run, found, listed, owns, options.all) | {"plots": plots}
        print_json(content | ({"languages": of_all} if of_all else {}))
        return 0
    print_table(("", ""), tables.facts(run, nodes, found))
    print_table(*tables.hours_rows(run, listed))
    print_text(tables.engine_note(run, layouts[0]))
    own_costs = costed(owns.values()) if is_full or len(nodes) == 1 else []
    lines = tables.notes(run, layouts, owns)
    if is_full:
        print_table(*tables.layout_rows(listed, own_costs, found, options.all), is_wide=True)
        lines.append(tables.assumptions(run, layouts[0], rate is not None))
    else:
        print_table(*tables.best_rows(run, listed, own_costs))
    more = [] if is_full else ["--wide"]
    if options.recipe is not None:  # `explain` takes no idea
        explain = f"{_explaining(options, layouts[0].name)} --nodes {layouts[0].nodes}"
        more.append(f"`{explain}` explains a layout and prints its lines for the recipe.")
    if more:
        lines.append(f"More: {'; '.join(more)}")
    if rate is not None:
        table, said = tables.failure_table(run, listed)
        print_table(*table)
        lines += said
    if of_all:
        print_text(f"All {len(codes)} languages, a run each, by the plan of {codes[0]}:")
        print_table(*tables.languages_rows(run, of_all))
    for line in [*lines, *(f"wrote {path}" for path in plots)]:
        print_text(line)
    return 0


def _plan_batch(run: RunToPlan, nodes: list[int], is_json: bool) -> int:
    if len(nodes) != 1:
        raise KieloError("--batch is about one number of nodes. Fix: --nodes 16")
    is_masked = run.recipe.train.objective == "masked_tokens"
    (both, loss), found = laws_of(run), batch_sizes(run, nodes[0])
    if is_json:
        names = [law.name for law in both]
        rows = [
            {
                "tokens_per_step": one.tokens_per_step,
                "layout": one.planned and one.planned.name,
                "speed": one.speed,
                "tokens": dict(zip(names, one.tokens, strict=True)),
            }
            for one in found
        ]
        print_json({"batches": rows, "critical": {law.name: law.critical for law in both}, "loss": loss})
        return 0
    print_table(*tables.batch_rows(run, nodes[0], found, both))
    critical = " and ".join(f"{law.critical / 1e6:,.1f} million by {law.name}" for law in both)
    of_masked = " This model learns hidden tokens, and both laws are of next tokens." * is_masked
    print_text(
        f"More tokens, for the same loss as steps of {run.phase.tokens_per_step:,}. Critical batch: "
        f"{critical} (at {loss:.2f} nats a token, expected by Chinchilla's law). Both laws are of English "
        "text and of models trained from scratch. A larger batch also needs another learning rate."
        f"{of_masked}"
    )
    return 0


@takes(f"""
    $ kielo plan compare estonian_llama31_70b tp8pp4 tp8pp8 --nodes 16
    $ kielo plan compare estonian_llama31_70b tp8pp4 tp8pp8 --nodes 16,128,256 --plot pictures
    RECIPE
    {_MACHINE}
    LAYOUT... as layouts  (part of) a layout's name, such as tp8pp4
    --plot DIR            draw the parts of the steps into this folder, as SVG
    {_WALL_HOURS}
""")
def compare(options: argparse.Namespace) -> int:
    run, nodes = _run_and_nodes(options)
    several = [named(run, number, name, or_nearest=True) for number in nodes for name in options.layouts]
    if len(options.layouts) > 1 and len({(planned.nodes, planned.name) for planned in several}) == len(nodes):
        raise KieloError(
            f"{' and '.join(options.layouts)} are one layout, {several[0].name}. Fix: two different layouts"
        )
    plots = []
    if options.plot:
        plots.append(str(_new_file(options.plot, "compared.svg")))
        late.parts_svg(several, Path(plots[0]))
    if options.json:
        compared = [tables.planned_json(planned, cost(planned, options.wall_hours)) for planned in several]
        print_json({"compared": compared, "plots": plots})
        return 0
    print_table(*compared_rows(several))
    for number in nodes:
        print_text(f"{number} nodes: {verdict([planned for planned in several if planned.nodes == number])}")
    for path in plots:
        print_text(f"wrote {path}")
    return 0


@takes(f"""
    $ kielo plan explain estonian_llama31_70b tp8pp4 --nodes 16
    $ kielo plan explain estonian_llama31_70b tp8pp4 --nodes 16 --plot pictures
    RECIPE
    {_MACHINE}
    LAYOUT      (part of) the layout's name, such as tp8pp4
    --plot DIR  draw the pipeline's timeline into this folder, as SVG
    {_WALL_HOURS}
""")
def explain(options: argparse.Namespace) -> int:
    run, nodes = _run_and_nodes(options)
    if len(nodes) != 1:
        raise KieloError("--nodes: `kielo plan explain` is about one number of nodes. Fix: --nodes 16")
    planned = named(run, nodes[0], options.layout)
    best = search(run, nodes).ranked[nodes[0]]
    rows = explained(planned, [other for other in different_axes(best)[:3] if other.name != planned.name])
    plots = []
    if options.plot:
        plots.append(str(_new_file(options.plot, f"timeline_{planned.name.replace('/', '_')}.svg")))
        late.timeline_svg(planned, Path(plots[0]))
    if options.json:
        content = tables.planned_json(planned, cost(planned, options.wall_hours))
        print_json({"planned": content, "why": [row._asdict() for row in rows], "plots": plots})
        return 0
    print_table(("part", "seconds", "share", "reason"), [row.cells(planned) for row in rows])
    print("\nIn the recipe:\n" + tables.layout_toml(planned))
    for path in plots:
        print_text(f"wrote {path}")
    return 0


@takes("""
    $ kielo plan calibrate runs/demo_estonian --to my_machine.toml
    $ kielo plan calibrate runs/poro_34b/launch/ladder_lumi_g --to lumi_measured.toml
    RUN... as metrics  folders of your runs on one machine or of a ladder, or metrics.jsonl
    --to CARD!         card to write, for --machine
""")
def calibrate(options: argparse.Namespace) -> int:
    paths, site = metrics_of([Path(path) for path in options.metrics])
    machine = measure(paths, site)
    write_machine(machine, place(options.to))
    print_text(f"wrote {options.to}; plan with it: kielo plan RECIPE --machine {options.to}")
    return 0


@takes(f"""
    $ kielo plan resolve demo_estonian --ranks 2
    $ kielo plan resolve estonian_llama31_70b --nodes 16 --layout tp8pp4
    RECIPE
    {_MACHINE}
    --layout LAYOUT    this layout in place of the recipe's
    --ranks RANKS:int  ranks in place of --nodes; default: 1
""")
def resolve(options: argparse.Namespace) -> int:
    """Print every number of a run on the recipe's layout or --layout. Write them before its training."""
    sets = with_flags(options, cluster=options.cluster, machine=options.machine)
    recipe = read_recipe(options.recipe, sets).recipe
    site, folder = cluster(recipe.cluster), run_folder(recipe)
    ranks = options.ranks
    if options.layout:
        if ranks is not None:
            raise KieloError("--layout is chosen for --nodes. Fix: leave --ranks out")
        chosen = named(RunToPlan.of_recipe(recipe), _nodes(options.nodes, site)[0], options.layout)
        recipe = with_layout(recipe, chosen)
    if ranks is None:
        ranks = _nodes(options.nodes, site)[0] * site.devices_per_node if options.nodes else 1
    device = accelerator(site.accelerator).device
    resolved = with_expectation(resolved_run(recipe, folder, world_size=ranks, device=device), recipe)
    is_trained = has_trained(folder)
    if not is_trained:
        with held(folder):
            write(resolved, folder / "resolved.toml")
    if options.json:
        print_json(resolved.model_dump(mode="json"))
        return 0
    for table in tables.identity_and_placement(resolved):
        print_table(*table)
    train = resolved.identity.train
    has_fp8 = "fp8" in (train.precision, *(precision for _, precision in train.precision_changes))
    for advice in speed_advice(
        resolved.identity.model, on_devices(recipe, ranks).layout, resolved.placement.accelerator, has_fp8
    ):
        print_text(f"advice: {advice}")
    for sentence in uneven_steps(resolved):
        print_text(f"batches: {sentence}")
    path = folder / "resolved.toml"
    print_text(f"{path} stays as it is: the run has trained" if is_trained else f"wrote {path}")
    if options.layout:
        print("to train on this layout, put it into the recipe:\n" + tables.layout_toml(chosen))
    return 0


def _run_and_nodes(options: argparse.Namespace, *choice: str) -> tuple[RunToPlan, list[int]]:
    """Return the run of the options, or of one of the recipe's variants, and the numbers of nodes."""
    options = argparse.Namespace(**{**vars(options), "sets": [*options.sets, *choice]})
    if options.wall_hours is not None and not 0 < options.wall_hours < math.inf:
        raise KieloError(f"--wall-hours {options.wall_hours:g}: give a number above 0")
    run = RunToPlan.of_recipe(read_idea(options, cluster=options.cluster, machine=options.machine))
    usual = [number for number in run.recipe.nodes if number <= run.site.nodes]
    if options.nodes is None and usual:
        return run, sorted(usual)
    return run, _nodes(options.nodes, run.site)


def _explaining(options: argparse.Namespace, layout: str) -> str:
    """Return `kielo plan explain` of a layout of the same recipe."""
    given = {"--cluster": options.cluster, "--machine": options.machine}
    sets = [*options.sets, *([f"model.params={options.params}"] if options.params else [])]
    words = [word for flag, value in given.items() if value for word in (flag, value)]
    words += [word for one in sets for word in ("--set", one)]
    return shlex.join(["kielo", "plan", "explain", options.recipe, layout, *words])


def _nodes(text: str | None, site: Cluster) -> list[int]:
    """Return the numbers of nodes in "16", "4,8,12" or "4..256" (doubled from the first to the last)."""
    if text is None:
        if site.nodes == 1:
            return [1]
        raise KieloError(
            f"--nodes is missing; {site.name} has 1 to {site.nodes} nodes. Fix: --nodes 16, or --nodes 4..256"
        )
    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            if first > last:
                raise KieloError(f"--nodes {text}: begin with the smaller number. Fix: {last}..{first}")
            numbers = [first * 2**power for power in range(20) if first * 2**power < last] + [last]
        else:
            numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise KieloError(f"--nodes {text}: not understood. Fix: 16, or 4,8,12, or 4..256") from None
    check_nodes(text, numbers, site)
    if len(numbers) > _MOST_NODE_COUNTS or numbers != sorted(numbers):
        raise KieloError(f"--nodes {text}: give at most {_MOST_NODE_COUNTS} numbers, from few to many nodes")
    return numbers


def _plot_scaling(folder: str, run: RunToPlan, nodes: list[int], found: Found) -> str:
    if len(nodes) < 2:
        raise KieloError("--plot draws scaling over several numbers of nodes. Fix: --nodes 4..256")
    path = _new_file(folder, f"scaling_{run.recipe.name}_{run.site.name}.svg")
    late.scaling_svg(*strong_and_weak(run, nodes, found), path)
    return str(path)


def _new_file(folder: str, name: str) -> Path:
    place(folder).mkdir(parents=True, exist_ok=True)
    return place(folder) / name
