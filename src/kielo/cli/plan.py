"""`kielo plan`: which layouts fit a machine, how fast, at what cost and why; or one layout's numbers, for `train`. No torch."""

import argparse
import math
from pathlib import Path
from typing import Any

from kielo.cli.plan_tables import (
    different_axes,
    heading,
    identity_and_placement,
    layout_toml,
    notes,
    part_rows,
    plan_json,
    planned_json,
    ranking_rows,
    refusal_rows,
)  # fmt: skip
from kielo.cli.terminal import print_json, print_table
from kielo.plan.layout_name import matches
from kielo.plan.planned import Job, Planned, plan_layouts
from kielo.recipe.cards import Cluster, accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import full_phases
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe

_LISTED, _LISTED_OF_EACH = 12, 3  # layouts for one number of nodes, and for each of several
_MOST_NODE_COUNTS = 12


def plan(options: argparse.Namespace) -> int | None:
    if options.from_measurement:
        return _from_measurement(options)
    if options.recipe is None:
        raise KieloError("which recipe? Give its path or the name of a shipped one (see `kielo recipes`)")
    if options.top is not None and options.top < 1:
        raise KieloError(f"--top {options.top}: give 1 layout or more")
    if options.wall_hours is not None and not 0 < options.wall_hours < math.inf:
        raise KieloError(f"--wall-hours {options.wall_hours:g}: give a number above 0")
    given = {"cluster": options.cluster, "machine": options.machine}
    sets = [*options.sets, *(f'{key}="{value}"' for key, value in given.items() if value)]
    recipe = read_recipe(options.recipe, sets).recipe
    if options.resolve:
        return _resolve(options, recipe)
    for key in ("ranks", "layout"):
        if getattr(options, key) is not None:
            raise KieloError(f"--{key} goes with --resolve; for a ranking give --nodes, for one layout --why LAYOUT")
    job, nodes = _job(options, recipe), _nodes(options.nodes, cluster(recipe.cluster))
    if options.why:
        return _why(options, job, nodes)
    if options.compare:
        return _compare(options, job, nodes)
    return _ranking(options, job, nodes)


def _job(options: argparse.Namespace, recipe: Recipe) -> Job:
    from kielo.plan.resolve import complete_model, imagined_text

    complaints: list[str] = []
    model = complete_model(recipe, full_phases(recipe), imagined_text(recipe).vocabulary_size, complaints)
    if complaints:
        raise KieloError("; ".join(complaints))
    return Job.of(recipe, model)


def _nodes(text: str | None, site: Cluster) -> list[int]:
    """"16", "4,8,12", or "4..256": doubled from the first to the last."""
    if text is None:
        if site.nodes == 1:
            return [1]
        raise KieloError(f"on how many nodes of {site.name}? For example --nodes 16 or --nodes 4..256; it has {site.nodes}")
    try:
        if ".." in text:
            first, last = (int(part) for part in text.split(".."))
            if first > last:
                raise KieloError(f"--nodes {text}: begin with the smaller number; what would work: {last}..{first}")
            numbers = [first * 2**power for power in range(20) if first >= 1 and first * 2**power < last] + [last]
        else:
            numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise KieloError(f"--nodes {text}: not understood; what would work: 16, or 4,8,12, or 4..256") from None
    for number in (min(numbers), max(numbers)):
        if not 1 <= number <= site.nodes:
            raise KieloError(f"--nodes {text}: {site.name} has 1 to {site.nodes} nodes; what would work: {min(max(number, 1), site.nodes)}")
    if len(numbers) > _MOST_NODE_COUNTS or numbers != sorted(numbers):
        raise KieloError(f"--nodes {text}: give at most {_MOST_NODE_COUNTS} numbers, from few to many nodes")
    return numbers


def _ranking(options: argparse.Namespace, job: Job, nodes: list[int]) -> int:
    from kielo.plan.cost import cost
    from kielo.plan.search import search

    found = search(job, nodes)
    if not any(found.ranked.values()):
        raise _nothing_runs(job, nodes, found)
    many = options.top or (_LISTED if len(nodes) == 1 else _LISTED_OF_EACH)
    listed = [planned for number in nodes for planned in different_axes(found.ranked[number])[:many]]
    costs = [cost(planned, options.wall_hours) for planned in listed]
    own = {number: _own(job, number) for number in nodes}
    plots = [_plot_scaling(options.plot, job, nodes, found)] if options.plot else []
    if options.json:
        print_json(plan_json(job, found, listed, costs, own, options.all) | {"plots": plots})
        return 0
    print(heading(job, found))
    print_table(*ranking_rows(listed, costs))
    print("seconds of a step by part")
    print_table(*part_rows(listed))
    print_table(*refusal_rows(found, options.all))
    for line in [*notes(job, listed, costs, own, found), *(f"wrote {path}" for path in plots)]:
        print(line)
    return 0


def _why(options: argparse.Namespace, job: Job, nodes: list[int]) -> int:
    from kielo.plan.cost import cost
    from kielo.plan.explain import why
    from kielo.plan.search import search

    if len(nodes) != 1:
        raise KieloError("--why tells of one number of nodes: give --nodes one number")
    found = search(job, nodes, matches(options.why))
    ranked = found.ranked.get(nodes[0], [])
    if not ranked:
        raise _refused(options.why, job, nodes[0], found)
    planned, best = ranked[0], search(job, nodes).ranked[nodes[0]]
    others = [other for other in different_axes(best)[:3] if other.name != planned.name]
    lines = why(planned, others)
    plots = []
    if options.plot:
        from kielo.report.plan_figures import timeline_svg

        plots.append(str(_new_file(options.plot, f"timeline_{planned.name.replace('/', '_')}.svg")))
        timeline_svg(planned, Path(plots[0]))
    if options.json:
        print_json({"planned": planned_json(planned, cost(planned, options.wall_hours)), "why": lines, "plots": plots})
        return 0
    for line in lines:
        print(line)
    print("\nIn the recipe:\n" + layout_toml(planned))
    for path in plots:
        print(f"wrote {path}")
    return 0


def _compare(options: argparse.Namespace, job: Job, nodes: list[int]) -> int:
    from kielo.plan.cost import cost
    from kielo.plan.search import search
    from kielo.plan.side_by_side import compare, verdict

    several: list[Planned] = []
    for number in nodes:
        for name in options.compare.split(","):
            found = search(job, [number], matches(name))
            ranked = found.ranked.get(number, [])
            if not ranked and number not in found.nearest:
                raise _refused(name, job, number, found)
            several.append(ranked[0] if ranked else found.nearest[number])
    plots = []
    if options.plot:
        from kielo.report.plan_figures import parts_svg

        plots.append(str(_new_file(options.plot, "compared.svg")))
        parts_svg(several, Path(plots[0]))
    if options.json:
        print_json({"compared": [planned_json(planned, cost(planned, options.wall_hours)) for planned in several], "plots": plots})
        return 0
    print_table(*compare(several))
    for number in nodes:
        print(f"{number} nodes: {verdict([planned for planned in several if planned.nodes == number])}")
    for path in plots:
        print(f"wrote {path}")
    return 0


def _resolve(options: argparse.Namespace, recipe: Recipe) -> int:
    """The recipe's own layout, or --layout's, in numbers for `train`, written into the run folder."""
    from kielo.plan.cost import with_layout
    from kielo.plan.expected import with_expectation
    from kielo.plan.layout_check import shape_advice
    from kielo.plan.resolve import resolve
    from kielo.plan.resolved import write
    from kielo.plan.search import search

    site, folder = cluster(recipe.cluster), run_folder(recipe)
    ranks = options.ranks
    if options.layout:
        if ranks is not None:
            raise KieloError("--layout is chosen for --nodes; leave --ranks out")
        nodes = _nodes(options.nodes, site)
        job = _job(options, recipe)
        found = search(job, nodes[:1], matches(options.layout))
        if not found.ranked.get(nodes[0]):
            raise _refused(options.layout, job, nodes[0], found)
        recipe = with_layout(recipe, found.ranked[nodes[0]][0])
    if ranks is None:
        ranks = _nodes(options.nodes, site)[0] * site.devices_per_node if options.nodes else 1
    device = accelerator(site.accelerator).device
    resolved = with_expectation(resolve(recipe, folder, world_size=ranks, device=device), recipe)
    write(resolved, folder / "resolved.toml")
    if options.json:
        print_json(resolved.model_dump(mode="json"))
        return 0
    for table in identity_and_placement(resolved):
        print_table(*table)
    for advice in shape_advice(resolved.identity.model, recipe.layout, resolved.placement.accelerator):
        print(f"advice: {advice}")
    print(f"wrote {folder / 'resolved.toml'}")
    if options.layout:
        print("to train on this layout, put it into the recipe:\n" + layout_toml(found.ranked[nodes[0]][0]))
    return 0


def _from_measurement(options: argparse.Namespace) -> int:
    from kielo.plan.measured import measure, write_machine

    if options.to is None:
        raise KieloError("--from-measurement needs --to FILE: where the machine's card is written")
    machine = measure([Path(path) for path in options.from_measurement])
    write_machine(machine, Path(options.to))
    print(f"wrote {options.to}; plan with it: kielo plan RECIPE --machine {options.to}")
    return 0


def _own(job: Job, nodes: int) -> Planned | str:
    """The recipe's own layout on so many nodes, or why it cannot run there."""
    from kielo.plan.resolve import imagined_text, resolve

    devices = nodes * job.site.devices_per_node
    try:
        resolved = resolve(job.recipe, "", devices, job.card.device, job.card.name, text=imagined_text(job.recipe))
    except KieloError as error:
        return str(error)
    index = resolved.identity.phases.index(max(resolved.identity.phases, key=lambda of: of.tokens_per_step * of.steps))
    size = resolved.placement.phases[index].micro_batch_sequences
    shard = {"replicate": resolved.placement.replicate, "shard": resolved.placement.shard}
    return plan_layouts(job, [(job.recipe.layout.model_copy(update=shard), nodes, size)])[0]


def _nothing_runs(job: Job, nodes: list[int], found: Any) -> KieloError:
    """What is nearest to running, and on how many nodes it would."""
    from kielo.plan.search import search

    where = f"on {' or '.join(map(str, nodes))} nodes of {job.site.name}"
    if not found.nearest:
        reasons = sorted(
            ((len(layouts), why) for some in found.refused.values() for why, layouts in some.items()), reverse=True
        )
        return KieloError(
            f"no layout of {job.recipe.name} runs {where}: " + "; ".join(f"{why} ({many} layouts)" for many, why in reasons[:3])
            + _batch_advice(job, nodes)
        )
    number, nearest = min(found.nearest.items(), key=lambda item: item[1].peak_bytes)
    more = 2 * max(nodes)
    while more <= job.site.nodes and not search(job, [more]).ranked[more]:
        more *= 2
    advice = f"{more} nodes" if more <= job.site.nodes else "a smaller model, or a machine with more memory a device"
    return KieloError(
        f"no layout of {job.recipe.name} fits {where}: the least is {nearest.peak_bytes / 1e9:.1f} GB a device "
        f"({nearest.name} on {number}), and {job.usable_bytes / 1e9:.1f} GB are usable; what would work: {advice}"
    )


def _batch_advice(job: Job, nodes: list[int]) -> str:
    """A pipeline of p ranks wants p micro-batches, so a step needs a sequence for each group of tensor ranks, at the least."""
    heads, node = math.gcd(job.model.num_attention_heads, job.model.num_key_value_heads or 1), job.site.devices_per_node
    groups = node // math.gcd(node, heads)  # of a node
    sequences = job.phase.tokens_per_step // job.phase.sequence_length
    fewer = f", or at most {sequences // groups} nodes" if sequences >= groups else ""
    return (
        f"; what would work: {job.phase.key('tokens_per_step')} = {min(nodes) * groups * job.phase.sequence_length} or a multiple "
        f"(it is {job.phase.tokens_per_step}){fewer}"
    )


def _refused(name: str, job: Job, nodes: int, found: Any) -> KieloError:
    """Why no layout of that name is in the ranking."""
    fits = matches(name)
    if nodes in found.nearest:
        nearest = found.nearest[nodes]
        return KieloError(
            f"{name} on {nodes} nodes does not fit: {nearest.name} needs {nearest.peak_bytes / 1e9:.1f} GB a device, the least "
            f"of those that it names, and {job.usable_bytes / 1e9:.1f} GB are usable"
        )
    reasons = [why for why, layouts in found.refused.get(nodes, {}).items() if layouts]
    reasons += [
        why for why, layouts in found.impossible.items() if any(fits(one.layout, one.micro_batch) for one in layouts)
    ]
    devices = nodes * job.site.devices_per_node
    return KieloError(f"{name}: {'; '.join(reasons) or f'none of the layouts of {devices} devices that are looked at is called that'}")


def _plot_scaling(folder: str, job: Job, nodes: list[int], found: Any) -> str:
    from kielo.plan.search import search
    from kielo.report.plan_figures import scaling_svg

    if len(nodes) < 2:
        raise KieloError("--plot draws scaling over several numbers of nodes: give --nodes 4..256, or --why LAYOUT")
    strong = [found.ranked[number][0] for number in nodes if found.ranked[number]]
    first = strong[0].nodes
    weak = []
    for planned in strong:
        train = job.recipe.train.model_copy(update={"tokens_per_step": job.recipe.train.tokens_per_step * planned.nodes // first})
        grown = Job.of(job.recipe.model_copy(update={"train": train}), job.model)
        weak += search(grown, [planned.nodes]).ranked[planned.nodes][:1]
    path = _new_file(folder, f"scaling_{job.recipe.name}_{job.site.name}.svg")
    scaling_svg(strong, weak, path)
    return str(path)


def _new_file(folder: str, name: str) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder) / name
