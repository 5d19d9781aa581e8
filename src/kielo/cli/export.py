"""`kielo export`: a checkpoint → a folder that `transformers` loads."""

import argparse
from pathlib import Path

from kielo.recipe.errors import KieloError


def export(options: argparse.Namespace) -> None:
    checkpoint, to = Path(options.checkpoint), Path(options.to)
    if to.exists():
        raise KieloError(f"--to {to}: exists already; name a new folder, nothing was written")
    tokenizer_folder = checkpoint.resolve().parents[2] / "tokenizer"
    if not (tokenizer_folder / "tokenizer.json").is_file():
        raise KieloError(f"{checkpoint}: no tokenizer at {tokenizer_folder}; CHECKPOINT is a folder inside "
                         "RUN/train/checkpoints of a run folder")
    export_checkpoint(checkpoint, to, tokenizer_folder)
    print(f"wrote {to}; load it with transformers.AutoModelForCausalLM.from_pretrained({str(to)!r})")


def export_checkpoint(checkpoint: Path, to: Path, tokenizer_folder: Path) -> None:
    """The model's settings come from the checkpoint itself. Does nothing when `to` holds just that already."""
    from kielo.checkpoint.huggingface import export, is_exported
    from kielo.checkpoint.store import read_plain
    from kielo.recipe.sections import Model

    model = Model.model_validate(read_plain(checkpoint)["identity"]["model"])
    if not is_exported(checkpoint, to, model, tokenizer_folder):
        export(checkpoint, to, model, tokenizer_folder)
