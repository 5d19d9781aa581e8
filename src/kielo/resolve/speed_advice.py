"""Advice on layouts that run, and run slowly: arithmetic on the recipe, torch-free."""

from kielo.recipe.sections import Layout, Model
from kielo.resolve.software import compile_advice


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
