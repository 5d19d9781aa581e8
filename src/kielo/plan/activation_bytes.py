"""Bytes that a rank of Kielo adds within a step; arithmetic, no torch.

These are what `memory.memory_bytes` needs to know of how Kielo keeps activations, counted tensor by tensor
from the code of `models/blocks`.
"""

from kielo.models.decoder_count import LayerParts
from kielo.models.families import module
from kielo.recipe.sections import Layout, Model, Precision
from kielo.resolve.stages import SCHEDULES, layers_of_stages, stages_of_rank

_FP32 = 4
# fp8: of what lies between matrix products, and autograd keeps
_PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
# A pass whose weights wait for their gradients: its activations, and the gradients of its matrices' results.
_WAITING_PASS = 1.4


def own_columns(
    model: Model,
    layout: Layout,
    sequence_length: int,
    precision: Precision = "bf16",
    loss_chunk_tokens: int = 2048,
    on_processor: bool = False,
) -> dict[str, float]:
    """Columns of a `Workload` that only Kielo's own training has. `layout` is one that `stage_complaints` has
    passed.

    on_processor: as a rehearsal counts, whose attention copies its output and whose softmax copies the
    logits.
    """
    number = _PRECISION_BYTES[precision]
    chunks, _ = _chunks(layout)
    layers = layers_of_stages(model, sequence_length, layout)
    first, last = (
        sum(layers[stage] for stage in stages_of_rank(layout.pipeline_schedule, layout.pipeline, rank, chunks))
        if layout.pipeline > 1 else layers[0]
        for rank in (0, layout.pipeline - 1)
    )  # fmt: skip
    kept, again = layer_bytes(model, layout, sequence_length, number, on_processor)
    table = model.vocab_rows * model.hidden_size / layout.tensor
    first_tables = table * (
        2 if _has_both_ends(layout) and (layout.pipeline > 1 or not model.tie_word_embeddings) else 1
    )
    return {
        "compute_bytes": number,
        "gathered_bytes": number,
        "first_layers": first,
        "last_layers": last,
        "first_parameters": first * _layer_elements(model, layout) + first_tables + _position_elements(model),
        "last_parameters": 0 if _has_both_ends(layout) else last * _layer_elements(model, layout) + table,
        "first_passes": _passes(layout, 0),
        "last_passes": _passes(layout, layout.pipeline - 1),
        "kept_bytes": kept,
        "again_bytes": again,
        # The logits and their fp32 softmax; whole vocabularies on a processor go to fp32 before that.
        "logit_bytes": number + _FP32 + _FP32 * (on_processor and number < _FP32 and layout.tensor == 1),
        "loss_tokens": loss_chunk_tokens,
    }


def layer_parts(model: Model) -> LayerParts:
    return module(model.model_type, "count").layer_parts(model)


def layer_bytes(
    model: Model, layout: Layout, sequence_length: int, number: int, on_processor: bool = False
) -> tuple[float, float]:
    """(kept from forward to backward, what stands beside that while the layer is made anew), both of a token
    and layer on a device; `number` bytes each number that is computed with.
    """
    parts = _kept_parts(model, layout, sequence_length, number, on_processor)
    whole = sum(parts.values())
    share = 1 / layout.tensor if layout.sequence_parallel else 1.0
    if layout.recompute == "attention":  # its inputs stay; and its output, which the next matrix takes
        kept = whole - parts["only attention's"]
    elif layout.recompute == "operators":
        queries, groups = _heads(model, layout)
        sums = 2 * model.hidden_size  # of the tensor ranks' parts: whole on each
        gates = layer_parts(model).mlp_matrices - 1
        products = 2 * queries + 2 * groups + gates * model.intermediate_size / layout.tensor
        kept = number * (model.hidden_size * share + sums + products) + parts["log-sums and angles"]
    elif layout.recompute == "full":
        kept = number * model.hidden_size * share
    else:
        return whole, 0.0
    recomputed = 1 / layout.recompute_every_layers
    return recomputed * kept + (1 - recomputed) * whole, whole - kept


def _kept_parts(
    model: Model, layout: Layout, sequence_length: int, number: int, on_processor: bool
) -> dict[str, float]:
    """What autograd keeps of a layer, of a token on a device. Tensor ranks keep the inputs of their matrices
    whole, as they were gathered; everything between is split along the sequence.
    """
    hidden, tensor, context = model.hidden_size, layout.tensor, layout.context
    family = layer_parts(model)
    share = 1 / tensor if layout.sequence_parallel else 1.0
    queries, groups = _heads(model, layout)
    # torch's LayerNorm keeps its input; RMSNorm its input as fp32, and its result before the weight.
    norm = {"layer": number, "rms": _FP32 + number, "rms_fp32": _FP32 + _FP32}[family.norm]
    is_gathered = context > 1 and layout.context_attention == "all_gather"
    keys = groups * context if is_gathered else groups
    # Only causal attention needs no mask: that of gathered keys is one number for each pair within reach.
    mask = number * (2 * context + 1) * sequence_length / context / 4 if is_gathered else 0.0
    copied = number * queries if on_processor and family.is_rotary else 0.0
    # rounded, for the backward pass
    angles = 2 * model.head_dim if family.is_rotary and number < _FP32 else 0
    is_relu = model.hidden_act == "relu"
    widths = 4 if family.mlp_matrices == 3 else 1 if is_relu else 2
    return {
        "norms": norm * (family.norms * hidden * share + family.has_head_norms * (queries + groups)),
        "inputs of matrices": 2 * number * hidden,
        "attention": number * (2 * queries + 2 * groups),
        "log-sums and angles": _FP32 * model.num_attention_heads / tensor + angles,
        "only attention's": number * 2 * (keys - groups) + mask + copied,
        "mlp": number * widths * model.intermediate_size / tensor,
    }


def _heads(model: Model, layout: Layout) -> tuple[float, float]:
    """(width of all queries, of all keys) on a tensor rank."""
    return (
        model.num_attention_heads * model.head_dim / layout.tensor,
        model.num_key_value_heads * model.head_dim / layout.tensor,
    )


def _layer_elements(model: Model, layout: Layout) -> float:
    """Matrices of one layer on a tensor rank, without norms and biases (below 0.1 % from hidden 1,024 on)."""
    queries, groups = _heads(model, layout)
    return model.hidden_size * (
        2 * (queries + groups) + layer_parts(model).mlp_matrices * model.intermediate_size / layout.tensor
    )


def _position_elements(model: Model) -> float:
    """A table of positions lies whole on every tensor rank of the first stage."""
    if "position_table" not in module(model.model_type, "tensor_parallel_plan").TENSOR_PARALLEL_PLAN:
        return 0.0
    first = getattr(module(model.model_type, "count"), "FIRST_POSITION", 0)
    return (first + model.max_position_embeddings) * model.hidden_size


def _chunks(layout: Layout) -> tuple[int, bool]:
    """(stages of a rank, do they lie in a V)."""
    usual, is_v, _ = SCHEDULES[layout.pipeline_schedule]
    return (layout.pipeline_stages_per_rank or usual) if layout.pipeline > 1 else 1, is_v


def _has_both_ends(layout: Layout) -> bool:
    """Does the first pipeline rank have the last stage too?"""
    return layout.pipeline == 1 or _chunks(layout)[1]


def _passes(layout: Layout, rank: int) -> float:
    """Passes through one of its stages that a pipeline rank keeps at once, by the orders of torch's
    schedules: forward passes before the first backward, one more, and, where the backward is split, those
    whose weights wait.
    """
    ranks, name = layout.pipeline, layout.pipeline_schedule
    chunks, is_v = _chunks(layout)
    if ranks == 1:
        return 1
    if name == "gpipe":
        return float("inf")
    if is_v:
        return 2 * ranks + (name == "dualpipev")
    waiting = _WAITING_PASS * rank if SCHEDULES[name].splits_backward else 0
    hurry = 2 if name == "interleaved_1f1b" else 1
    return (chunks - 1) * ranks + hurry * (ranks - 1 - rank) + 1 + waiting
