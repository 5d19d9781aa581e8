"""Checks that a model can have a layout, and advises on its speed: arithmetic on the recipe, torch-free.

A complaint is about a layout that cannot run, and names the numbers that can. Advice stops nothing.
"""

import math
from collections.abc import Iterator

from kielo.recipe.sections import Layout, Model
from kielo.resolve.context_check import check_context
from kielo.resolve.encoder_check import encoder_complaints
from kielo.resolve.stages import stage_complaints
from kielo.resolve.torch_versions import NEWEST, compile_advice, torch_complaints


def layout_complaints(
    model: Model,
    sequence_length: int,
    layout: Layout,
    length_key: str = "dataset.sequence_length",
    torch_version: str = NEWEST,
) -> list[str]:
    """Returns which sizes of `model` (complete) do not divide by the ranks, and what torch does not run.

    length_key: the recipe's key of `sequence_length`.
    """
    complaints = list(encoder_complaints(model.model_type, layout))
    complaints += list(_tensor_complaints(model, layout.tensor)) + torch_complaints(layout, torch_version)
    parts = layout.tensor * layout.context
    if layout.tensor > 1 and layout.sequence_parallel and sequence_length % parts:
        below = sequence_length // parts * parts
        lengths = " or ".join(str(length) for length in (below, below + parts) if length)
        complaints.append(
            f"{length_key} = {sequence_length} is split over layout.tensor × layout.context = {parts} ranks "
            f"and does not divide; what would work: {lengths}"
        )
    if layout.tensor_overlap != "none" and layout.tensor > 1 and not layout.sequence_parallel:
        complaints.append(
            f"layout.tensor_overlap = {layout.tensor_overlap!r} cuts along the sequence, which "
            "layout.sequence_parallel = false leaves whole on each tensor rank; what would work: "
            'layout.sequence_parallel = true, or layout.tensor_overlap = "none"'
        )
    return (
        complaints
        + check_context(model, sequence_length, layout, length_key)
        + list(stage_complaints(model, layout))
    )


def _tensor_complaints(model: Model, ranks: int) -> Iterator[str]:
    split = {}  # what → (its size, what else would divide)
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(model, key)
        split[f"model.{key} = {size}"] = (size, f"model.{key} = {-(-size // ranks) * ranks}")
    rows = (
        f"the vocabulary's {model.vocab_rows} rows (model.vocab_size = {model.vocab_size} up to a multiple "
        f"of model.vocab_multiple = {model.vocab_multiple})"
    )
    # Padding changes no result, so it is what grows.
    split[rows] = (model.vocab_rows, f"model.vocab_multiple = {math.lcm(model.vocab_multiple, ranks)}")
    shared = math.gcd(*(size for size, _ in split.values()))
    common = [str(number) for number in range(1, min(ranks, shared) + 1) if shared % number == 0]
    for what, (size, larger) in split.items():
        if size % ranks:
            yield (
                f"layout.tensor = {ranks} does not divide {what}; what would work: "
                f"layout.tensor of {', '.join(common)}, or {larger}"
            )


def speed_advice(model: Model, layout: Layout, accelerator: str, has_fp8: bool = False) -> list[str]:
    """Returns advice on sizes that are slow on a machine, and on slow combinations of keys.

    has_fp8: steps of the run are computed in FP8.

    MI250X is fast at hidden sizes in multiples of 1,024 and at least 1,280 columns a tensor rank (LUMI's blog
    post "Scaling the pre-training of large language models of >100B parameters to thousands of AMD MI250X
    GPUs", section on tensor parallelism).
    """
    advice = []
    if layout.compile and (slow := compile_advice(layout)):
        advice.append(slow)
    if has_fp8 and layout.tensor > 1 and layout.tensor_overlap != "none":
        advice.append(
            f"layout.tensor_overlap = {layout.tensor_overlap!r} is for matrices in bf16 and fp32: those in "
            "FP8 are torchao's, which gathers and scatters at once"
        )
    if layout.tensor > 1 and model.hidden_size % (64 * layout.tensor):
        advice.append(
            f"model.hidden_size = {model.hidden_size} over layout.tensor = {layout.tensor} is no multiple "
            "of 64 a rank: matrix units work on tiles of 64 or more"
        )
    if "mi250x" in accelerator:
        if model.hidden_size % 1024:
            advice.append(f"model.hidden_size = {model.hidden_size}: MI250X is fastest at multiples of 1,024")
        if layout.tensor > 1 and model.hidden_size / layout.tensor < 1280:
            advice.append(
                f"model.hidden_size / layout.tensor = {model.hidden_size / layout.tensor:g} is less than "
                "1,280: on MI250X the matrices are then too small; fewer tensor ranks and more shard ranks "
                "are usually faster"
            )
    return advice
