"""Check that a GPU's attention can be compiled where it must be: arithmetic on the recipe, torch-free."""

from kielo.models.families import module
from kielo.recipe.sections import Model


def attention_complaint(
    model: Model,
    sequence_length: int,
    masks_documents: bool,
    attention_dropout: float,
    missing_compiler: str | None,
) -> str | None:
    """Returns why attention of `model` (complete) cannot run on a GPU without a compiler; None if it can.

    Masks of documents or windows, ALiBi, relative positions, capped scores and dropout of weights need
    FlexAttention, which torch compiles. Uncompiled it keeps all scores, sequence_length² of each head.
    """
    if missing_compiler is None:
        return None
    parts = module(model.model_type, "count").layer_parts(model)
    windows = model.sliding_window is not None and model.sliding_window < sequence_length
    reasons = {
        "dataset.mask_documents = true": masks_documents,
        f"train.attention_dropout = {attention_dropout}": attention_dropout,
        f"model.sliding_window = {model.sliding_window}": windows
        and "sliding_attention" in (model.layer_types or ["sliding_attention"]),
        f"model.attn_logit_softcapping = {model.attn_logit_softcapping}": model.attn_logit_softcapping,
        f"model.model_type = {model.model_type!r} (ALiBi)": parts.has_alibi,
        f"model.model_type = {model.model_type!r} (relative positions)": parts.relative_rows > 0,
    }
    asked = " and ".join(reason for reason, applies in reasons.items() if applies)
    if not asked:
        return None
    return f"{asked} on a GPU: attention is then compiled, whatever layout.compile says; {missing_compiler}"
