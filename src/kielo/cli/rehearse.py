"""`kielo rehearse`: one rank of the real job on this machine; prints what it holds, computes and sends."""

import argparse
from typing import Any

from kielo.cli.terminal import print_json, print_table
from kielo.plan.ranks import rank_of_stage
from kielo.plan.resolve import imagined_text, resolve
from kielo.plan.resolved import Resolved
from kielo.plan.stages import stages_of_rank
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder


def rehearse(options: argparse.Namespace) -> int:
    resolved = planned(options)
    ranks = chosen_ranks(resolved, options.rank, options.stage, options.all_stages)
    from kielo.verify.rehearse import rehearse as rehearse_rank

    rehearsals = [rehearse_rank(resolved, rank) for rank in ranks]
    if options.json:
        print_json(rehearsals)
        return 0
    from kielo.verify.rehearse_table import NOTES, collectives, headline, memory, summary, verdict

    for rehearsal in rehearsals:
        print(headline(rehearsal))
        print_table(*memory(rehearsal))
        print(summary(rehearsal))
        print_table(*collectives(rehearsal))
    print(verdict(rehearsals))
    print(NOTES)
    return 0


def planned(options: argparse.Namespace) -> Resolved:
    """The recipe on so many nodes of a cluster (or so many ranks), with imagined text."""
    sets = [*options.sets, *([f'cluster="{options.cluster}"'] if options.cluster else [])]
    recipe = read_recipe(options.recipe, sets).recipe
    card = cluster(recipe.cluster)
    if options.nodes is not None and not 1 <= options.nodes <= card.nodes:
        raise KieloError(f"--nodes {options.nodes}: {card.name} has 1 to {card.nodes} nodes")
    ranks = (options.nodes or 1) * card.devices_per_node if options.ranks is None else options.ranks
    device = accelerator(card.accelerator).device
    return resolve(recipe, run_folder(recipe), ranks, device, text=imagined_text(recipe))


def chosen_ranks(resolved: Resolved, rank: int | None, stage: int | None, all_stages: bool) -> list[int]:
    """The ranks to rehearse; of a stage, the one with 0 on all axes but the pipeline's."""
    placement: Any = resolved.placement
    if all_stages:
        return [rank_of_stage(placement, number) for number in range(placement.pipeline)]
    if stage is None:
        return [0 if rank is None else rank]
    stages = len(placement.pipeline_layers) if placement.pipeline > 1 else 1
    if not 0 <= stage < stages:
        raise KieloError(f"--stage {stage}: the layout has stages 0 to {stages - 1}")
    if placement.pipeline == 1:
        return [0]
    each = stages // placement.pipeline
    owners = [
        number
        for number in range(placement.pipeline)
        if stage in stages_of_rank(placement.pipeline_schedule, placement.pipeline, number, each)
    ]
    return [rank_of_stage(placement, owners[0])]
