"""`kielo rehearse`: one rank of the real job on this machine; prints its memory, FLOPs and collectives."""

import argparse

from kielo.cli.flags import VerbParser
from kielo.cli.ideas import TAKES_IDEA, check_nodes, read_idea
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.plan.choose_layout import own
from kielo.plan.remedies import in_words
from kielo.plan.run_to_plan import RunToPlan
from kielo.recipe.cards import Cluster, accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.overview import overview_of_run
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.shares import rank_of_stage
from kielo.resolve.stages import rank_of_each_stage
from kielo.resolve.text import imagined_text
from kielo.stages import late
from kielo.verify import screens


def rehearse_flags(parser: VerbParser) -> None:
    parser.takes(f"""
        $ kielo rehearse estonian_llama31_70b --cluster lumi_g --nodes 4 --all-stages
        {TAKES_IDEA}
        --cluster CLUSTER  cluster card (see `kielo clusters`); default: the recipe's
        --nodes NODES:int  default: the fewest of the recipe's nodes, or 1
        --ranks RANKS:int  ranks of the job, in place of --nodes
    """)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, help="number of the rank; default: 0")
    which.add_argument("--stage", type=int, help="the first rank with this pipeline stage")
    which.add_argument(
        "--all-stages", action="store_true", help="the first rank of each pipeline rank, one after another"
    )
    parser.takes("""
        --evaluation  also rehearse `kielo evaluate` and `kielo verify parity` on these ranks
        --json        print all figures, in bytes, as JSON
    """)


def rehearse(options: argparse.Namespace) -> int:
    recipe, resolved, site = planned(options)
    ranks = chosen_ranks(resolved, options.rank, options.stage, options.all_stages)
    rehearsals = [late.rehearse(resolved, rank, site) for rank in ranks]
    if options.evaluation:
        for rehearsal in rehearsals:
            rehearsal["evaluation_bytes"] = late.rehearse_evaluation(resolved, rehearsal["rank"])
    if options.json:
        print_json(rehearsals)
        return 0
    print_table(("", ""), overview_of_run(resolved.identity).rows())
    for rehearsal in rehearsals:
        print_text(screens.headline(rehearsal))
        print_table(*screens.memory(rehearsal))
        print_text(screens.summary(rehearsal))
        print_table(*screens.collectives(rehearsal))
        if options.evaluation:
            print_table(*screens.evaluation(rehearsal))
    print_text(screens.rehearsal_verdict(rehearsals))
    if any(rehearsal["fits"] is False for rehearsal in rehearsals):
        print_text(_ways_out(recipe, resolved, site))
    print_text(screens.host_verdict(rehearsals))
    print_text(screens.NOTES)
    return 0


def _ways_out(recipe: Recipe, resolved: Resolved, site: Cluster) -> str:
    nodes = max(1, resolved.placement.world_size // site.devices_per_node)
    layout = own(RunToPlan.of_recipe(recipe), nodes)
    return layout if isinstance(layout, str) else in_words(layout)


def planned(options: argparse.Namespace) -> tuple[Recipe, Resolved, Cluster]:
    """Resolve the recipe on --nodes of a cluster (or --ranks), with imagined text. Return all three."""
    recipe = read_idea(options, cluster=options.cluster)
    card = cluster(recipe.cluster)
    if options.nodes is not None:
        check_nodes(options.nodes, [options.nodes], card)
    nodes = options.nodes or min((number for number in recipe.nodes if number <= card.nodes), default=1)
    ranks = nodes * card.devices_per_node if options.ranks is None else options.ranks
    device = accelerator(card.accelerator).device
    resolved = resolve(recipe, run_folder(recipe), ranks, device, text=imagined_text(recipe))
    return recipe, resolved, card


def chosen_ranks(resolved: Resolved, rank: int | None, stage: int | None, all_stages: bool) -> list[int]:
    """Return the ranks to rehearse, the first rank of each stage."""
    layout = resolved.placement.layout
    if all_stages:
        return [rank_of_stage(layout, number) for number in range(layout.pipeline)]
    if stage is None:
        return [0 if rank is None else rank]
    stages = len(layout.pipeline_layers or [0])
    if not 0 <= stage < stages:
        raise KieloError(f"--stage {stage}: the layout has stages 0 to {stages - 1}")
    if layout.pipeline == 1:
        return [0]
    owners = rank_of_each_stage(layout.pipeline_schedule, layout.pipeline, stages // layout.pipeline)
    return [rank_of_stage(layout, owners[stage])]
