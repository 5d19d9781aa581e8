"""The precision of a run whose recipe names none: by the processor, or as the run began; no torch."""

from pathlib import Path

from kielo.artifact.checkpoint_folder import step_folders
from kielo.recipe.sections import Precision, Recipe, Train
from kielo.resolve.resolved import read

RESOLVED_NAME = "resolved.toml"


def usual_precision(device: str, has_amx: bool) -> tuple[Precision, str]:
    """Returns the precision in which a device is fastest, and why.

    With AVX-512 BF16 alone a step in bf16 took 1.4 to 2.1 times that in fp32 (docs/log.md); AMX multiplies
    bf16 faster than fp32.
    """
    if device == "cuda":
        return "bf16", "GPUs multiply bf16 several times as fast as fp32"
    if has_amx:
        return "bf16", "this processor has AMX, which multiplies bf16 faster than fp32"
    return "fp32", "this processor has no AMX, and without it products in bf16 are slower than in fp32"


def chosen_precision(recipe: Recipe, device: str, has_amx: bool, run_folder: Path) -> tuple[Precision, str]:
    """Returns the precision of the run and why: the recipe's, that in which it began, or the usual one."""
    if recipe.train.precision is not None:
        return recipe.train.precision, "train.precision"
    begun = _begun(run_folder)
    if begun is not None:
        return begun, "the run began in it"
    return usual_precision(device, has_amx)


def precisions(train: Train) -> list[Precision]:
    """Return the precisions that the run computes in, in the order of its steps."""
    return list(dict.fromkeys([train.precision, *(precision for _, precision in train.precision_changes)]))


def with_precision(recipe: Recipe, precision: Precision) -> Recipe:
    """Returns the recipe with `precision`, if it names none."""
    if recipe.train.precision is not None:
        return recipe
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"precision": precision})})


def _begun(run_folder: Path) -> Precision | None:
    """Returns the precision of a run that has checkpoints; None for one that has none."""
    path = run_folder / RESOLVED_NAME
    if not path.is_file() or not step_folders(run_folder / "train" / "checkpoints"):
        return None
    return read(path).identity.train.precision
