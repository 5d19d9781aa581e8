"""Protection of the text that a run trains on: data stages ask before they replace a finished folder.

RUN/corpus, RUN/tokenizer and RUN/tokens are one text. RUN/train/checkpoints was trained on it.
"""

from pathlib import Path

from kielo.artifact.checkpoint_folder import step_folders
from kielo.artifact.manifest import DAMAGED_FILE, Hashes, Table, differences, read_manifest
from kielo.recipe.errors import KieloError

NAMED_DIFFERENCES = 4


def has_trained(run_folder: Path | str) -> bool:
    train = Path(run_folder) / "train"
    return bool(_checkpoints(train / "checkpoints")) or read_manifest(train) is not None


def refuse_to_replace(folder: Path | str, kind: str, version: int, inputs: Hashes, section: Table) -> None:
    """Raise KieloError if the run has checkpoints and its data stage, given as in `is_current`, changed."""
    changed = differences(folder, kind, version, inputs, section)
    if not changed:
        return
    named = ", ".join(changed[:NAMED_DIFFERENCES]) + (", …" if len(changed) > NAMED_DIFFERENCES else "")
    is_damage = all(change.startswith(DAMAGED_FILE) for change in changed)
    advice = f"move {folder} away, and it is made again from the same text; " if is_damage else ""
    refuse_while_trained_on(folder, f"changed since it was made: {named}", advice)


def refuse_while_trained_on(folder: Path | str, why: str, advice: str = "") -> None:
    """Raise KieloError if the run has checkpoints. why: the stage would run again. advice: the first fix."""
    folder = Path(folder)
    checkpoints = folder.parent / "train" / "checkpoints"
    kept = _checkpoints(checkpoints)
    if not kept:
        return
    raise KieloError(
        f"{folder}: would be made again ({why}), but {checkpoints} has {kept[0].name}, which was trained on "
        f"it. Nothing was changed. Fix: {advice}--from train continues on the text as it is; --set name=NEW "
        "makes a new run of the changed text; or restore the old text and values; or move "
        f"{checkpoints.parent} away to start again at step 0"
    )


def _checkpoints(folder: Path) -> list[Path]:
    return [*step_folders(folder), *folder.glob("step_*.damaged*")]
