"""`kielo train`: one rank of a run, or the parent of all ranks on this machine.

torchrun, srun or a person starts a rank. With `--ranks N` this process starts the ranks, and their outcome is
its exit code.
"""

import argparse
import os
import sys

from kielo.artifact.attempt_files import REFUSAL_FILE
from kielo.cli.flags import takes
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table, print_text
from kielo.dataset.packed_sequences import packing_manifest, packing_rows
from kielo.plan.remedies import memory_warning
from kielo.ranks.rendezvous import find_rendezvous
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import PACKED, Recipe
from kielo.resolve.overview import overview_of_run
from kielo.resolve.resolved import Resolved
from kielo.stages.attempt import resolve_here, train_here, train_on_ranks, warn_of_weights
from kielo.train.dry_run import dry_run
from kielo.train.signals import REQUEUE


@takes("""
    $ kielo train RECIPE --ranks 2
    $ torchrun --nproc-per-node 8 --no-python kielo train RECIPE
    $ srun kielo train RECIPE
    RECIPE
    --ranks RANKS:count       number of processes to start on this machine
    --shutdown-seconds SHUTDOWN_SECONDS:int=600  time to save after a stop signal; default: 600. Only with
                              --ranks
    --restarts N:int          restart killed or hung ranks at most N times in a row without a new checkpoint;
                              default: 3. Only with --ranks
    --profile [STEPS:count=10]  record the parts of the time and a trace of STEPS steps from the third step
                              on; default: 10
    --profile-ranks 0,5,…     record on these ranks only; rank 0 writes the summary. Only with --profile
    --measure STEPS:count     measure the speed of STEPS steps in a folder that has not trained, and save
                              nothing
    --dry-run                 resolve, count memory and read the first batch, without a step or a file
    --json                    print the outcome as JSON
""")
def train(options: argparse.Namespace) -> int:
    recipe = read_recipe(options.recipe, options.sets).recipe
    ranks = 1 if options.ranks is None or is_rank() else options.ranks
    if options.restarts is not None and (options.restarts < 0 or ranks == 1):
        raise KieloError(f"--restarts {options.restarts}: give 0 or more, and --ranks of 2 or more")
    if options.shutdown_seconds < 0:
        raise KieloError(f"--shutdown-seconds {options.shutdown_seconds}: give 0 or more")
    if find_rendezvous().rank == 0 and REFUSAL_FILE not in os.environ:  # else the parent warns
        warn_of_weights(recipe)
    if options.dry_run:
        return _dry_run(recipe, ranks, options.json)
    profile_steps = _profile_steps(options, ranks)
    with keep_stdout_for_json(options.json):
        if ranks > 1:
            profile = ["--profile", str(profile_steps)] if profile_steps else []
            profile += ["--profile-ranks", options.profile_ranks] if options.profile_ranks else []
            profile += ["--measure", str(options.measure)] if options.measure else []
            outcome = train_on_ranks(
                recipe,
                options.recipe,
                options.sets,
                ranks,
                profile,
                options.shutdown_seconds,
                options.restarts,
            )
        else:
            outcome = train_here(recipe, profile_steps, options.measure)
    if options.json:
        print_json(outcome.content())
    elif outcome.exit_code not in (0, REQUEUE):
        print(f"kielo: training failed: {outcome.message}", file=sys.stderr)
    # Else the first of several ranks, or the parent of this rank, reports the outcome.
    elif outcome.message and os.environ.get("RANK", "0") == "0" and REFUSAL_FILE not in os.environ:
        print_text(outcome.message)
    return outcome.exit_code


def _dry_run(recipe: Recipe, ranks: int, is_json: bool) -> int:
    """Print what the training would do on `ranks`, or on the launcher's ranks, without training."""
    place = find_rendezvous()
    if place.rank:
        return 0
    resolved, why = resolve_here(recipe, max(ranks, place.size))
    found = dry_run(resolved)
    if is_json:
        print_json(found | {"why_precision": why})
        return 0
    batch, usable = found["first_batch"], found["usable_bytes"]
    of_device = "its memory is the machine's" if usable is None else f"{usable / 1e9:.1f} GB are usable"
    rows = [
        *overview_of_run(resolved.identity).rows(),
        *_packing_rows(resolved),
        ("device", f"{found['ranks']} × {found['accelerator']} ({found['device']})"),
        ("precision", f"{found['precision']}: {why}" + (", layers are compiled" if found["compile"] else "")),
        (
            "a rank's step",
            f"{found['micro_batches_per_step']} micro-batches of {found['micro_batch_sequences']} sequences",
        ),
        ("memory", f"{found['peak_bytes'] / 1e9:.2f} GB at the peak of a rank; {of_device}"),
        (
            "first batch",
            f"{batch['sequences']} sequences of {batch['sequence_length']:,}, {batch['counted_tokens']:,} "
            f"tokens that count, the largest id {batch['largest_token']:,} of {batch['vocabulary']:,}",
        ),
        ("begins", f"after step {found['goes_on_after_step']:,} of {found['steps']:,}"),
    ]
    print_table(("", ""), rows)
    if said := memory_warning(resolved, recipe):
        print(f"warning: {said}", file=sys.stderr)
    print_text("nothing was trained or written. To start: the same command without --dry-run")
    return 0


def _packing_rows(resolved: Resolved) -> list[tuple[str, str]]:
    """Return (name, value) on the packing of the run's sources, or [] for one stream."""
    used = {
        (name, phase.sequence_length)
        for phase in resolved.identity.phases
        if phase.packing in PACKED
        for name in phase.mixture
    }
    rows = packing_rows(packing_manifest(resolved.placement.tokens_folder)) if used else []
    return [("packing", row.sentence()) for row in rows if (row.source, row.sequence_length) in used]


def _profile_steps(options: argparse.Namespace, ranks: int) -> int:
    """Return the number of steps that this rank records, or that its chosen ranks record."""
    if options.profile_ranks is None:
        return options.profile or 0
    chosen = options.profile_ranks.split(",")
    place = find_rendezvous()
    size = max(place.size, ranks)
    if options.profile is None or not all(one.isdecimal() and int(one) < size for one in chosen):
        raise KieloError(
            f"--profile-ranks {options.profile_ranks}: give --profile, and ranks from 0 to {size - 1}, as 0,1"
        )
    return options.profile if ranks > 1 or place.rank in map(int, chosen) else 0


def is_rank() -> bool:
    """Return True if a launcher started this process as one rank of several."""
    return "RANK" in os.environ
