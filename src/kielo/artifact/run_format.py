"""What a run folder says of its run: the recipe, and the format of its description, with migrations."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kielo.artifact.own_text import HASH_COMMENT, is_own_text, write_own_text
from kielo.recipe.errors import KieloError
from kielo.recipe.read import RUN_RECIPE_NAME
from kielo.recipe.sections import Recipe
from kielo.recipe.toml_text import toml_table

# The format in which a run is described: its version, and a migration from each version to the next.
#
# `resolved.toml` describes a run by its identity and its placement. The identity alone is also stored in
# each checkpoint's `index.json` and in the manifests of the stages `train` and `verify`. Each of these says
# the `format_version` that it was written in; version 0 did not say it. Readers migrate what they read, so
# that a run goes on when Kielo is upgraded in its middle.
#
# A key that is new and has a default needs no new version. To rename, move or remove a key, or to change
# its meaning: add an entry to `_MIGRATIONS`, and golden files (`python -m tests.train.make_golden`).
# Migrations work on plain tables, so that no later change of a section can break them, and accept tables
# that lack keys.


VERSION_KEY = "format_version"
Table = dict[str, Any]


class Migration(NamedTuple):
    """Functions from the tables of one version to those of the next."""

    identity: Callable[[Table], Table]
    placement: Callable[[Table], Table]


def _identity_from_0(identity: Table) -> Table:
    """Version 1 stores the keys of [train] and [dataset] in tables of these names."""
    identity, dataset = _split(identity, ("mask_documents",))
    identity, train = _split(identity, (
        "skip_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_gradient_norm",
        "z_loss", "precision", "precision_changes", "fp8", "optimiser_state", "max_skipped_steps_in_a_row",
        "heldout_sequences",
    ))  # fmt: skip
    return identity | {"dataset": dataset, "train": train}


def _placement_from_0(placement: Table) -> Table:
    """Version 1 stores the keys of [layout], [train] and [checkpoint] in tables of these names.

    A layout without stages lists no layers of stages, and one with stages says how many a rank has.
    """
    placement, layout = _split(placement, (
        "pipeline", "pipeline_schedule", "pipeline_layers", "replicate", "shard", "context", "tensor",
        "expert", "sequence_parallel", "zero", "cpu_offload", "context_attention", "compile", "recompute",
        "recompute_every_layers", "recompute_saved_operators",
    ))  # fmt: skip
    layout = {"compile": False, "recompute_saved_operators": []} | layout
    ranks, layers = layout.get("pipeline", 1), layout.pop("pipeline_layers", [])
    if ranks > 1:
        layout |= {"pipeline_layers": layers, "pipeline_stages_per_rank": len(layers) // ranks}
    placement, train = _split(placement, (
        "loss_chunk_tokens", "log_every_steps", "heldout_every_steps", "tensorboard", "start_timeout_seconds",
    ))  # fmt: skip
    placement, checkpoint = _split(placement, ("checkpoint_every_steps", "keep_newest", "keep_every_steps"))
    if "checkpoint_every_steps" in checkpoint:
        checkpoint["every_steps"] = checkpoint.pop("checkpoint_every_steps")
    return placement | {"layout": layout, "train": train, "checkpoint": checkpoint}


def _identity_from_1(identity: Table) -> Table:
    """Version 2 says by which rule the samples of a phase are shared out; before there was one, of blocks.

    A run of one source has the same order by both.
    """
    phases = identity.get("phases", [])
    is_mixed = any(len(phase.get("mixture", {})) > 1 for phase in phases)
    order = "blocks_of_256" if is_mixed else "every_sample"
    return identity | {"phases": [{"mixture_order": order} | phase for phase in phases]}


def _split(table: Table, names: tuple[str, ...]) -> tuple[Table, Table]:
    """Returns (the table without `names`, what it held under `names`)."""
    rest = {key: value for key, value in table.items() if key not in names}
    return rest, {key: table[key] for key in names if key in table}


def _unchanged(table: Table) -> Table:
    return table


_MIGRATIONS = (
    Migration(_identity_from_0, _placement_from_0),
    Migration(_identity_from_1, _unchanged),
)  # entry n: from version n to n + 1
FORMAT_VERSION = len(_MIGRATIONS)


def with_version(content: Mapping[str, Any]) -> Table:
    """Returns the content of a file with the version that this code writes."""
    return {VERSION_KEY: FORMAT_VERSION, **content}


def migrated_identity(stored: Mapping[str, Any], where: Path | str) -> Table:
    """Returns an identity that was stored with its version as this version stores it, with the version.

    Raises KieloError naming `where` and both versions for a later version than this code knows.
    """
    identity, version = _without_version(stored, where)
    for migration in _MIGRATIONS[version:]:
        identity = migration.identity(identity)
    return with_version(identity)


def migrated_run(stored: Mapping[str, Any], where: Path | str) -> Table:
    """Returns {"identity", "placement"} of this version. `stored`: the content of a `resolved.toml`.

    Raises KieloError as `migrated_identity` does, and for tables that no version wrote.
    """
    run, version = _without_version(stored, where)
    try:
        for migration in _MIGRATIONS[version:]:
            run = {
                "identity": migration.identity(run["identity"]),
                "placement": migration.placement(run["placement"]),
            }
    except (KeyError, TypeError, AttributeError) as error:
        raise KieloError(
            f"{where}: is not of format version {version} ({error!r}); delete it and resolve again"
        ) from None
    return run


def _without_version(stored: Mapping[str, Any], where: Path | str) -> tuple[Table, int]:
    if not isinstance(stored, Mapping):
        raise KieloError(f"{where}: describes no run, but holds {stored!r} in its place")
    content = dict(stored)
    version = content.pop(VERSION_KEY, 0)
    if not isinstance(version, int) or version < 0:
        raise KieloError(f"{where}: {VERSION_KEY} = {version!r} is no version of the format")
    if version > FORMAT_VERSION:
        raise KieloError(
            f"{where}: is of format version {version}, and this Kielo reads versions up to {FORMAT_VERSION}; "
            "go on with the Kielo that wrote it, or with a later one"
        )
    return content, version


# `recipe.toml` of a run folder: the recipe with the flags of the last `kielo run`.


_HEADER = (
    "# The recipe of this run with the flags of its last `kielo run`: verbs take this folder in its place.\n"
    "# A copy that you change is yours: Kielo reads it and does not write it again.\n"
)


def write_run_recipe(recipe: Recipe, run_folder: Path) -> bool:
    """Writes every value of `recipe` that is no default.

    Returns False where a person's own file stays.
    """
    path = run_folder / RUN_RECIPE_NAME
    if os.path.lexists(path) and not is_own_text(path):
        return False
    values = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"folder"})
    write_own_text(path, _HEADER + toml_table("", values), HASH_COMMENT)
    return True
