"""`kielo preflight`: the checks of a job's nodes before it trains, on one rank or as the parent of all.

torchrun, srun or a person starts a rank, as for `kielo train`. Exit code 1: a node or the job is refused.
"""

import argparse

from kielo.artifact.stage_json import read_json
from kielo.artifact.verify_results import BAD_NODES_NAME, Preflight
from kielo.cli.flags import takes
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table, print_text
from kielo.cli.train import is_rank
from kielo.ranks.local_ranks import Ranks
from kielo.ranks.rendezvous import find_rendezvous
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.software import installed
from kielo.resolve.text import imagined_text
from kielo.stages import late
from kielo.stages.attempt import device_name, this_device
from kielo.verify import screens

_SHUTDOWN_SECONDS = 10


@takes("""
    $ kielo preflight RECIPE --ranks 2
    $ torchrun --nproc-per-node 8 --no-python kielo preflight RECIPE
    $ srun kielo preflight RECIPE
    RECIPE
    --ranks RANKS:count  number of processes to start on this machine
    --json               print preflight.json
""")
def preflight(options: argparse.Namespace) -> int:
    recipe = read_recipe(options.recipe, options.sets).recipe
    ranks = 1 if options.ranks is None or is_rank() else options.ranks
    if ranks > 1:
        return _on_ranks(options, recipe, ranks)
    return _on_this_rank(options, recipe)


def _on_ranks(options: argparse.Namespace, recipe: Recipe, ranks: int) -> int:
    _resolved(recipe, ranks)  # refuses what cannot run before a rank is started
    arguments = ["-m", "kielo", "preflight", options.recipe]
    arguments += [argument for entry in options.sets for argument in ("--set", entry)]
    started = Ranks(arguments + ["--json"] * options.json, ranks, stop_code=0)
    try:
        started.start()
        failure = started.wait(_SHUTDOWN_SECONDS)
        started.close()
        return 1 if failure else 0
    except BaseException:
        started.kill()
        raise


def _on_this_rank(options: argparse.Namespace, recipe: Recipe) -> int:
    place, folder = find_rendezvous(), run_folder(recipe)
    with keep_stdout_for_json(options.json):
        has_passed = late.preflight(recipe, _resolved(recipe, place.size), folder)
    if place.rank == 0:
        found = read_json(folder, Preflight)
        if found is None:
            raise KieloError(f"{folder / Preflight.FILE_NAME}: the new verdict is gone")
        if options.json:
            print_json(found.content())
        else:
            print_table(screens.CHECK_TITLES, screens.check_rows(found))
            for line in screens.verdict_lines(found):
                print_text(line)
            print_text(f"verdict: {folder / Preflight.FILE_NAME}, {folder / BAD_NODES_NAME}")
    return 0 if has_passed else 1


def _resolved(recipe: Recipe, ranks: int) -> Resolved:
    """Resolve the recipe for `ranks` devices of this machine, with an imagined text before packing."""
    folder, device = run_folder(recipe), this_device()
    text = None if (folder / "tokens").exists() else imagined_text(recipe)
    return resolve(recipe, folder, ranks, device, device_name(device), text, installed(device))
