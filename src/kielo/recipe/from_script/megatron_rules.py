"""Megatron-LM's and Megatron-DeepSpeed's arguments to keys of a recipe.

`megatron_arguments.toml` has the arguments with a key of the same value. The rules for the others are in
`megatron_model.py`, `megatron_schedule.py`, `megatron_layout.py` and `megatron_data.py`.
"""

from pathlib import Path

from kielo.recipe.from_script.bash_reader import read_script
from kielo.recipe.from_script.deepspeed_settings import fill, read_deepspeed
from kielo.recipe.from_script.megatron_data import put_data, put_run
from kielo.recipe.from_script.megatron_layout import put_layout, put_precision, put_recomputation
from kielo.recipe.from_script.megatron_model import put_model, put_vocabulary
from kielo.recipe.from_script.megatron_schedule import put_batch, put_optimiser, put_schedule
from kielo.recipe.from_script.script_arguments import (
    TranslatedScript,
    Translation,
    read_launcher,
    split_command,
    table,
    training_command,
)


def read_megatron(path: Path, variables: dict[str, str], model_type: str | None = None) -> TranslatedScript:
    """Translate the training command of a script. Raise KieloError for what contradicts itself.

    variables: values that win over the script's. model_type: a family in place of the arguments' own.
    """
    script, arguments = read_script(path, variables), table("megatron")
    command = training_command(script, arguments, path)
    launcher, words = split_command(command)
    to = Translation(path, script, arguments, "Megatron")
    machine = read_launcher(launcher, to)
    to.read(words)
    to.finish()
    settings = read_deepspeed(to, "--deepspeed_config")
    _require(to)
    to.finish()
    to.take_same()
    fill(to, settings)
    put_model(to, model_type)
    put_vocabulary(to)
    put_batch(to, machine)
    put_optimiser(to)
    put_layout(to, machine, settings)
    put_recomputation(to)
    put_precision(to, settings)
    to.finish()
    phases = put_schedule(to)
    put_data(to)
    put_run(to)
    to.finish()
    return TranslatedScript(
        to.keys, to.comments, to.rows(), machine, script.sbatch.get("partition", ""), phases
    )


def _require(to: Translation) -> None:
    """Refuse a script without a shape, and arguments that contradict each other."""
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--lr"):
        if not to.has(name):
            to.refuse(f"{name} is missing. Fix: give it in the script")
    both = [
        ("--bf16", "--fp16"),
        ("--train-iters", "--train-samples"),
        ("--train-iters", "--rampup-batch-size"),
        ("--train-iters", "--lr-decay-samples"),
        ("--train-iters", "--lr-warmup-samples"),
        ("--train-samples", "--lr-decay-iters"),
        ("--train-samples", "--lr-warmup-iters"),
        ("--lr-warmup-fraction", "--lr-warmup-iters"),
        ("--lr-warmup-fraction", "--lr-warmup-samples"),
        ("--rampup-batch-size", "--step-batch-size-schedule"),
        ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"),
    ]
    for first, second in both:
        if to.has(first) and to.has(second) and not {to.value(first), to.value(second)} & {0}:
            to.refuse("contradict each other. Fix: leave one of them out", first, second)
    if not (to.has("--train-iters") or to.has("--train-samples") or to.has("--train-tokens")):
        to.refuse("--train-iters and --train-samples are missing. Fix: give one of them in the script")
