"""Which layouts a model can have, and which a machine likes: arithmetic on the recipe, before anything starts.

A complaint is about a layout that cannot run and names the numbers that can. Advice never blocks and changes nothing.
"""

from collections.abc import Iterator

from kielo.plan.context_check import check_context
from kielo.recipe.sections import Layout, Model


def layout_complaints(model: Model, sequence_length: int, layout: Layout) -> list[str]:
    """What of `model` (complete) and `sequence_length` does not divide by the ranks of an axis."""
    complaints = list(_tensor_complaints(model, layout.tensor))
    parts = layout.tensor * layout.context
    if layout.tensor > 1 and layout.sequence_parallel and sequence_length % parts:
        below = sequence_length // parts * parts
        lengths = " or ".join(str(length) for length in (below, below + parts) if length)
        complaints.append(
            f"dataset.sequence_length = {sequence_length} is split over layout.tensor × layout.context = {parts} ranks "
            f"and does not divide; what would work: {lengths}"
        )
    return complaints + check_context(model, sequence_length, layout)


def _tensor_complaints(model: Model, ranks: int) -> Iterator[str]:
    keys = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    for key in keys:
        size = getattr(model, key)
        if size % ranks:
            common = [str(number) for number in range(1, ranks + 1) if all(getattr(model, k) % number == 0 for k in keys)]
            larger = -(-size // ranks) * ranks
            yield (
                f"layout.tensor = {ranks} does not divide model.{key} = {size}; what would work: "
                f"layout.tensor of {', '.join(common)}, or model.{key} = {larger}"
            )


def shape_advice(model: Model, layout: Layout, accelerator: str) -> list[str]:
    """What the machine would like better. On MI250X matrices want a hidden size in multiples of 1,024 and at least
    1,280 columns a tensor rank (LUMI's blog post "Scaling the pre-training of large language models of >100B parameters
    to thousands of AMD MI250X GPUs", section on tensor parallelism).
    """
    advice = []
    if layout.tensor > 1 and model.hidden_size % (64 * layout.tensor):
        advice.append(
            f"model.hidden_size = {model.hidden_size} over layout.tensor = {layout.tensor} is no multiple of 64 a rank: "
            "matrix units work on tiles of 64 or more"
        )
    if "mi250x" in accelerator:
        if model.hidden_size % 1024:
            advice.append(f"model.hidden_size = {model.hidden_size}: MI250X is fastest at multiples of 1,024")
        if layout.tensor > 1 and model.hidden_size / layout.tensor < 1280:
            advice.append(
                f"model.hidden_size / layout.tensor = {model.hidden_size / layout.tensor:g} is less than 1,280: on MI250X "
                f"the matrices are then too small; fewer tensor ranks and more shard ranks are usually faster"
            )
    return advice
