"""`kielo train`: one rank of a run, or the parent of all ranks on this machine.

A rank is started by torchrun, by srun, or alone. With `--ranks N` this process starts the ranks and turns
their outcome into the exit code.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from kielo.artifact.attempt_files import REFUSAL_FILE, Outcome, Refusal, note_refusal
from kielo.cli.flags import examples, takes_recipe
from kielo.cli.main import REQUEUE
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table, print_text
from kielo.ranks.rendezvous import find_rendezvous
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError, sentence
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import PACKED, Recipe
from kielo.resolve.resolved import Resolved

# Errors of the system that do not go away by themselves.
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT)
FETCH_LIMIT_SECONDS = 4 * 3600  # 1.4 TB at 100 MB/s


def train_flags(parser: argparse.ArgumentParser) -> None:
    examples(
        parser, "kielo train RECIPE --ranks 2", "torchrun --nproc-per-node 8 --no-python kielo train RECIPE",
        "srun kielo train RECIPE",
    )  # fmt: skip
    takes_recipe(parser)
    parser.add_argument("--ranks", type=int, default=None, help="start so many processes on this machine")
    parser.add_argument(
        "--shutdown-seconds", type=int, default=600, help="time to save after a stop signal (with --ranks)"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=None,
        metavar="N",
        help="with --ranks: start ranks that were killed or hung again, so often in a row without a new "
        "checkpoint (default: 3)",
    )
    parser.add_argument(
        "--profile",
        type=int,
        nargs="?",
        const=10,
        metavar="STEPS",
        help="from the third step on, record so many (default: 10): where their time goes, and a trace",
    )
    parser.add_argument(
        "--profile-ranks", metavar="0,5,…", help="with --profile: record on these ranks only; 0 sums it up"
    )
    parser.add_argument(
        "--measure",
        type=int,
        metavar="STEPS",
        help="take so many steps for their speed, in a folder that has not trained, and save nothing",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="resolve, count memory, read the first batch; no step, no file"
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")


def train(options: argparse.Namespace) -> int:
    recipe = read_recipe(options.recipe, options.sets).recipe
    ranks = 1 if options.ranks is None or is_rank() else options.ranks
    if ranks < 1:
        raise KieloError(f"--ranks {ranks}: give 1 or more")
    if options.restarts is not None and (options.restarts < 0 or ranks == 1):
        raise KieloError(f"--restarts {options.restarts}: give 0 or more, and --ranks of 2 or more")
    if options.shutdown_seconds < 0:
        raise KieloError(f"--shutdown-seconds {options.shutdown_seconds}: give 0 or more")
    if options.profile is not None and options.profile < 1:
        raise KieloError(f"--profile {options.profile}: give 1 step or more")
    if options.measure is not None and options.measure < 1:
        raise KieloError(f"--measure {options.measure}: give 1 step or more")
    if find_rendezvous().rank == 0 and REFUSAL_FILE not in os.environ:  # else the parent said it
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
    elif outcome.message and not _is_reported_by_another():
        print_text(outcome.message)
    return outcome.exit_code


def warn_of_weights(recipe: Recipe) -> None:
    """Name the keys of [model] that model.weights replaces, and its files that are not read, on stderr."""
    from kielo.resolve.complete_model import overridden_in_words

    if said := overridden_in_words(recipe.model):
        print_text(f"warning: {said}", sys.stderr)


def _dry_run(recipe: Recipe, ranks: int, is_json: bool) -> int:
    """Print what the training would do on `ranks`, or on those of the launcher, and start none."""
    from kielo.plan.remedies import memory_warning
    from kielo.resolve.overview import overview_of_run
    from kielo.train.dry_run import dry_run

    place = find_rendezvous()
    if place.rank:
        return 0
    resolved, why = _resolved_here(recipe, max(ranks, place.size))
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
    print_text("nothing was trained or written; the same command without --dry-run starts it")
    return 0


def _packing_rows(resolved: Resolved) -> list[tuple[str, str]]:
    """Returns (name, value) of what packing does to the run's sources; [] for one stream."""
    from kielo.dataset.packed_sequences import packing_manifest, packing_rows

    used = {
        (name, phase.sequence_length)
        for phase in resolved.identity.phases
        if phase.packing in PACKED
        for name in phase.mixture
    }
    rows = packing_rows(packing_manifest(resolved.placement.tokens_folder)) if used else []
    return [("packing", row.sentence()) for row in rows if (row.source, row.sequence_length) in used]


def _profile_steps(options: argparse.Namespace, ranks: int) -> int:
    """Returns how many steps this rank records, or those of the chosen `ranks` that it starts."""
    if options.profile_ranks is None:
        return options.profile or 0
    chosen = options.profile_ranks.split(",")
    place = find_rendezvous()
    size = max(place.size, ranks)
    if options.profile is None or not all(one.isdecimal() and int(one) < size for one in chosen):
        raise KieloError(
            f"--profile-ranks {options.profile_ranks}: give --profile too, and ranks from 0 to {size - 1} "
            "such as 0,1"
        )
    return options.profile if ranks > 1 or place.rank in map(int, chosen) else 0


def _is_reported_by_another() -> bool:
    """Returns True if the first of several ranks, or the parent of this one, reports the outcome."""
    return os.environ.get("RANK", "0") != "0" or REFUSAL_FILE in os.environ


def is_rank() -> bool:
    """Returns True if a launcher started this process as one rank of several."""
    return "RANK" in os.environ


def train_on_ranks(
    recipe: Recipe,
    reference: str,
    sets: Sequence[str],
    ranks: int,
    flags: Sequence[str] = (),
    shutdown_seconds: int = 600,
    restarts: int | None = None,
) -> Outcome:
    """Train on `ranks` processes of this machine: `kielo train REFERENCE` with these settings and flags.

    restarts: how often ranks that failed are started again without a new checkpoint; None: the usual number.
    """
    done = None if "--measure" in flags else _done_before(recipe, ranks)
    if done is not None:
        return done
    from kielo.train.start_ranks import RESTARTS, start_ranks

    arguments = [argument for entry in sets for argument in ("--set", entry)] + list(flags)
    is_quiet = sys.stdout is sys.stderr  # under --json
    most = RESTARTS if restarts is None else restarts
    return start_ranks(recipe, reference, arguments, ranks, shutdown_seconds, is_quiet, most)


def is_done(recipe: Recipe, ranks: int) -> bool:
    """Returns True if the run is known without torch to be finished, so that no rank will be started."""
    return _finished(recipe, ranks) is not None


def _done_before(recipe: Recipe, ranks: int) -> Outcome | None:
    """Returns the outcome of a finished run, noted as that of this attempt; None where torch has to look."""
    from kielo.train.records import nothing_to_do

    resolved = _finished(recipe, ranks)
    return None if resolved is None else nothing_to_do(resolved)


def _finished(recipe: Recipe, ranks: int) -> Resolved | None:
    """Returns the run resolved for `ranks` if it was trained to its end before; reads no more than files.

    Its devices are those of its resolved.toml: which ones are here torch alone knows, and what was trained
    does not depend on it. None where there is no such file, and where anything is wrong: a caller begins as
    if the run was not finished then, which tells what.
    """
    from kielo.artifact.manifest import read_manifest
    from kielo.plan.cost import with_expectation
    from kielo.resolve.resolve import resolve
    from kielo.resolve.resolved import read
    from kielo.resolve.software import RESOLVED_NAME, installed
    from kielo.train.records import is_finished

    folder = run_folder(recipe)
    if not (folder / RESOLVED_NAME).is_file() or read_manifest(folder / "train") is None:
        return None
    try:
        before = read(folder / RESOLVED_NAME).placement
        resolved = resolve(
            recipe, folder, ranks, before.device, before.accelerator, software=installed(before.device)
        )
        return with_expectation(resolved, recipe) if is_finished(resolved) else None
    except KieloError:
        return None


def train_here(recipe: Recipe, profile_steps: int = 0, measured_steps: int | None = None) -> Outcome:
    """Be one rank: resolve the recipe for the world that the launcher's variables describe, and train.

    A refusal is written down for the parent that started this rank, if one did.
    profile_steps: how many steps of this attempt the profiler records (see `train/profile.py`); 0: none.
    measured_steps: how many to take without saving; None: all of the run, with its checkpoints.
    """
    from kielo.ranks.rendezvous import find_rendezvous

    place = find_rendezvous()
    # Several ranks find it out together: one of them may see another folder.
    done = _done_before(recipe, 1) if place.size == 1 and measured_steps is None else None
    if done is not None:
        return done
    import torch

    from kielo.artifact.weights_folder import resolve_weights, weights_here
    from kielo.plan.cost import with_expectation
    from kielo.plan.remedies import memory_warning
    from kielo.ranks.process_settings import settings_of_device, settle_allocator
    from kielo.ranks.world import meet, once_a_node
    from kielo.resolve.shares import uneven_steps
    from kielo.resolve.software import start_timeout_seconds
    from kielo.train.run import measure, train

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        card = accelerator(cluster(recipe.cluster).accelerator)
        said = settle_allocator(settings_of_device() or card.allocator_settings)
        if said and place.rank == 0:
            print_text(f"device memory: {said}")
    weights = recipe.model.weights
    try:
        if weights is not None:  # or every rank would ask the hub for them
            is_fetched = weights_here(weights) is None
            once_a_node(
                f"find {weights}",
                lambda: resolve_weights(weights),
                place,
                meet(place, start_timeout_seconds(recipe)),
                FETCH_LIMIT_SECONDS,
            )
            if is_fetched and place.rank == 0:
                warn_of_weights(recipe)
        resolved, why = _resolved_here(recipe, place.size)
        if place.rank == 0 and recipe.train.precision is None:
            print_text(f"precision: {resolved.identity.train.precision}, for {why}")
        if place.rank == 0:
            for line in uneven_steps(resolved):
                print_text(f"batches: {line}")
            if said := memory_warning(resolved, recipe):
                print(f"warning: {said}", file=sys.stderr)
        resolved = with_expectation(resolved, recipe)
        if measured_steps is not None:
            return measure(resolved, measured_steps, profile_steps)
        return train(resolved, profile_steps=profile_steps)
    except (KieloError, OSError) as error:
        if isinstance(error, KieloError) or error.errno in _LASTING:
            note_refusal(Refusal(message=sentence(error) or ""))
        raise


def _resolved_here(recipe: Recipe, ranks: int) -> tuple[Resolved, str]:
    """Resolves the recipe on this machine's devices; returns it and why it has its precision."""
    import torch

    from kielo.resolve.resolve import resolve
    from kielo.resolve.software import chosen_precision, installed

    device, folder = "cuda" if torch.cuda.is_available() else "cpu", run_folder(recipe)
    device_name = torch.cuda.get_device_name() if device == "cuda" else None
    software = installed(device)
    missing = software.missing_compiler
    is_first = os.environ.get("RANK", "0") == "0"
    if missing and is_first and device == "cuda" and recipe.layout.compile is None:
        print(f"warning: layers are not compiled; {missing}", file=sys.stderr)
    why = chosen_precision(recipe, device, software.has_amx, folder)[1]
    return resolve(recipe, folder, ranks, device, device_name, software=software), why
