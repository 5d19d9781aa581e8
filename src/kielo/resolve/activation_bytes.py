"""Bytes of activations that a rank keeps within a step; arithmetic, no torch.

They are counted tensor by tensor from the code of `models/blocks`; `memory.memory_bytes` adds them up.
"""

from kielo.models.families import module
from kielo.models.family_tables import LayerParts
from kielo.recipe.cards import Accelerator
from kielo.recipe.sections import CompleteModel, DatasetIdentity, Layout, Precision
from kielo.resolve.stages import SCHEDULES, layers_of_stages, stages_of_rank

# Restart of learned positions in each document: the recipe's key → the identity's.


def learns_positions(model_type: str) -> bool:
    """Return True for families with an embedding of positions."""
    return "position_table" in module(model_type, "tables").TENSOR_PARALLEL_PLAN


def with_positions(dataset: DatasetIdentity, model: CompleteModel) -> DatasetIdentity:
    """Return the section with restart_positions filled in: true, or None where positions do not begin anew.

    Identities that were stored before this key existed have None: their positions continue.
    """
    applies = dataset.mask_documents and learns_positions(model.model_type)
    restarts = True if applies and dataset.restart_positions is not False else None
    return dataset.model_copy(update={"restart_positions": restarts})


# Chooses the tokens whose logits exist at one time, by a device's memory; arithmetic, no torch.


LEAST_CHUNK_TOKENS = 2048  # products of so many rows keep a device busy
# Share of a device's memory that a chunk's logits may take in bf16. Uncompiled, with their fp32 softmax and
# the chunk before, they take four times as much.
_LOGITS_SHARE = 1 / 128
_LOGIT_BYTES = 2


def loss_chunk_tokens(
    asked: int | None, model: CompleteModel, layout: Layout, card: Accelerator | None
) -> int:
    """Return the recipe's choice, else the largest power of two whose logits fit their share of memory.

    Each chunk reads and writes the head's fp32 gradient once, so few and large ones are faster on a GPU. On a
    CPU, and on a device of unknown memory, it is the least that is worth it.
    """
    if asked is not None:
        return asked
    if card is None or card.device == "cpu" or card.memory_bytes is None:
        return LEAST_CHUNK_TOKENS
    fitting = _LOGITS_SHARE * card.memory_bytes * layout.tensor / (_LOGIT_BYTES * model.vocab_rows)
    return max(LEAST_CHUNK_TOKENS, 1 << int(fitting).bit_length() >> 1)


_FP32 = 4
# of an element that autograd keeps; fp8: outside the matrix products
_BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp8": 2}
# Passes that one counts as while its weights wait for their gradients: it keeps its activations and the
# gradients of its matrices' results.
_WAITING_PASS = 1.4


def memory_columns(
    model: CompleteModel,
    layout: Layout,
    sequence_length: int,
    precision: Precision = "bf16",
    loss_chunk_tokens: int = LEAST_CHUNK_TOKENS,
    on_processor: bool = False,
) -> dict[str, float]:
    """Return the columns of `MemoryColumns` that only Kielo's own training has.

    `stage_complaints` has found nothing wrong with `layout`. on_processor: counts as a rehearsal does, where
    softmax copies the logits.
    """
    bytes_per_element = _BYTES_PER_ELEMENT[precision]
    chunks, _ = _chunks(layout)
    layers = layers_of_stages(model, sequence_length, layout)
    first, last = (
        sum(
            layers[stage]
            for stage in stages_of_rank(layout.pipeline_schedule, layout.pipeline, rank, chunks)
        )
        if layout.pipeline > 1 else layers[0]
        for rank in (0, layout.pipeline - 1)
    )  # fmt: skip
    in_fp8 = precision == "fp8"
    kept, again = layer_bytes(model, layout, bytes_per_element, in_fp8)
    embedding = model.vocab_rows * model.hidden_size / layout.tensor
    has_two = _has_both_ends(layout) and (layout.pipeline > 1 or not model.tie_word_embeddings)
    first_ends = embedding * (2 if has_two else 1)
    copies_logits = on_processor and bytes_per_element < _FP32 and layout.tensor == 1
    return {
        "compute_bytes": bytes_per_element,
        "gathered_bytes": bytes_per_element,
        "layer_elements": _layer_elements(model, layout),
        "first_layers": first,
        "last_layers": last,
        "first_parameters": first * _layer_elements(model, layout) + first_ends + _position_elements(model),
        "last_parameters": 0 if _has_both_ends(layout) else last * _layer_elements(model, layout) + embedding,
        "first_passes": _passes(layout, 0),
        "last_passes": _passes(layout, layout.pipeline - 1),
        "kept_bytes": kept,
        "again_bytes": again,
        # The logits and their fp32 softmax; on a processor, logits of the whole vocabulary become fp32 first.
        "logit_bytes": bytes_per_element + _FP32 + _FP32 * copies_logits,
        "loss_tokens": loss_chunk_tokens,
    }


def layer_parts(model: CompleteModel) -> LayerParts:
    """Return what the model's family counts of its layer."""
    return module(model.model_type, "tables").layer_parts(model)


def layer_bytes(
    model: CompleteModel,
    layout: Layout,
    bytes_per_element: int,
    in_fp8: bool = False,
) -> tuple[float, float]:
    """Return bytes of a token and layer on a device.

    They are (kept from forward to backward, added to that while the layer is recomputed). in_fp8: its
    matrices are multiplied in FP8.
    """
    parts = _kept_parts(model, layout, bytes_per_element)
    share = 1 / layout.tensor if layout.sequence_parallel else 1.0
    # The other tensor ranks' part of the inputs of matrices, gathered again for the backward.
    others = 0.0 if in_fp8 else (1 - share) * parts["inputs of matrices"]
    whole = sum(parts.values()) - others
    if layout.recompute == "operators":
        queries, groups = _heads(model, layout)
        # What the rank gets of the sums over tensor ranks; in FP8 the partial sums, whole on each.
        sums = 2 * model.hidden_size * (1.0 if in_fp8 else share)
        gates = layer_parts(model).mlp_matrices - 1
        products = 2 * queries + 2 * groups + gates * model.intermediate_size / layout.tensor
        kept = bytes_per_element * (model.hidden_size * share + sums + products)
        kept += parts["log-sums"]
    elif layout.recompute == "full":
        kept = bytes_per_element * model.hidden_size * share
    else:
        made_again = _made_again(model, layout, parts, others, in_fp8)
        kept = whole - sum(made_again.values())
        # Attention is made again with the gathered inputs in memory; of the others one at a time is there.
        again = max(made_again.values(), default=0.0) + others * ("attention" in made_again)
        recomputed = 1 / layout.recompute_every_layers
        return recomputed * kept + (1 - recomputed) * whole, again
    recomputed = 1 / layout.recompute_every_layers
    return recomputed * kept + (1 - recomputed) * whole, whole + others - kept


def dropout_bytes(model: CompleteModel, layout: Layout) -> float:
    """Return bytes of a token and layer that dropout keeps for the backward: two masks, a byte an element.

    A layer that is computed again as a whole makes them again too.
    """
    is_whole = layout.recompute in ("full", "operators")
    kept = 1 - 1 / layout.recompute_every_layers if is_whole else 1.0
    return 2 * kept * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)


def attention_dropout_bytes(model: CompleteModel, layout: Layout, precision: Precision) -> float:
    """Return bytes of a token and layer that dropout of attention's weights keeps, on a GPU.

    They are the outputs of two passes of attention, of which the output's product with a share is the third
    (`models/blocks/flex.py`), and three numbers of each head: the logs of two sums and the share.
    """
    is_whole = layout.recompute in ("full", "operators")
    kept = 1 - 1 / layout.recompute_every_layers if is_whole else 1.0
    queries, _ = _heads(model, layout)
    heads = model.num_attention_heads / layout.tensor
    return kept * (2 * _BYTES_PER_ELEMENT[precision] * queries + 3 * _FP32 * heads)


def _made_again(
    model: CompleteModel, layout: Layout, parts: dict[str, float], others: float, in_fp8: bool
) -> dict[str, float]:
    """Return bytes that are not kept because the backward makes them again, by what `recompute` names.

    parts, others: bytes of a layer by part, and those of the inputs that other tensor ranks keep.
    """
    family = layer_parts(model)
    found = {}
    if "attention" in layout.recomputed:  # keeps its inputs, and its output, which the next matrix takes
        found["attention"] = parts["only attention's"]
    # In FP8 each tensor rank keeps a gathered copy of what a norm gives.
    is_copied = in_fp8 and layout.tensor > 1 and layout.sequence_parallel
    if "norms" in layout.recomputed and family.norms_inputs and not is_copied:
        found["norms"] = parts["inputs of matrices"] - others
    if "activations" in layout.recomputed and model.hidden_act != "relu":
        widths = 3 + family.has_mlp_norm if family.mlp_matrices == 3 else 2
        found["activations"] = parts["mlp"] / widths
    return found


def _kept_parts(model: CompleteModel, layout: Layout, bytes_per_element: int) -> dict[str, float]:
    """Return bytes that autograd keeps of a layer, a token on a device, by part.

    The inputs of matrices are counted whole, as they are gathered; sequence parallelism splits everything
    between along the sequence.
    """
    hidden, tensor, context = model.hidden_size, layout.tensor, layout.context
    family = layer_parts(model)
    share = 1 / tensor if layout.sequence_parallel else 1.0
    queries, groups = _heads(model, layout)
    is_gathered = context > 1 and layout.context_attention == "all_gather"
    keys = groups * context if is_gathered else groups
    # Two blocks of queries attend to gathered keys, each with an output of its own, which is joined.
    joined = queries if is_gathered else 0.0
    is_relu = model.hidden_act == "relu"
    # Gate, up and their product; of a plain MLP the matrix's result and the function's: ReLU needs only that.
    widths = (3 if family.mlp_matrices == 3 else 1 if is_relu else 2) + family.has_mlp_norm
    # Two tables of the scores' terms of relative positions.
    tables = 2 * family.relative_rows * model.num_attention_heads / tensor
    return {
        # Their inputs; the numbers of each row are below 0.1 % from hidden 4,096 on.
        "norms": bytes_per_element
        * (family.norms * hidden * share + family.has_head_norms * (queries + groups)),
        "inputs of matrices": 2 * bytes_per_element * hidden,
        "attention": bytes_per_element * (2 * queries + 2 * groups + tables),
        "log-sums": _FP32 * model.num_attention_heads / tensor,
        "only attention's": bytes_per_element * (2 * (keys - groups) + joined),
        "mlp": bytes_per_element * widths * model.intermediate_size / tensor,
    }


def _heads(model: CompleteModel, layout: Layout) -> tuple[float, float]:
    """Return the width of (all queries, all keys) on a tensor rank."""
    return (
        model.num_attention_heads * model.head_dim / layout.tensor,
        model.num_key_value_heads * model.head_dim / layout.tensor,
    )


def _layer_elements(model: CompleteModel, layout: Layout) -> float:
    """Counts the elements of one layer's matrices on a tensor rank.

    Norms and biases are left out: below 0.1 % from hidden 1,024 on.
    """
    queries, groups = _heads(model, layout)
    return model.hidden_size * (
        2 * (queries + groups) + layer_parts(model).mlp_matrices * model.intermediate_size / layout.tensor
    )


def _position_elements(model: CompleteModel) -> float:
    """Counts the elements of learned positions, which every tensor rank of the first stage holds whole."""
    if not learns_positions(model.model_type):
        return 0.0
    first = getattr(module(model.model_type, "tables"), "FIRST_POSITION", 0)
    return (first + model.max_position_embeddings) * model.hidden_size


def _chunks(layout: Layout) -> tuple[int, bool]:
    """Return (stages of a rank, True if they form a V)."""
    usual, is_v, _ = SCHEDULES[layout.pipeline_schedule]
    return (layout.pipeline_stages_per_rank or usual) if layout.pipeline > 1 else 1, is_v


def _has_both_ends(layout: Layout) -> bool:
    """Return True if the first pipeline rank has the last stage too."""
    return layout.pipeline == 1 or _chunks(layout)[1]


def _passes(layout: Layout, rank: int) -> float:
    """Return the passes through one of its stages that a pipeline rank keeps at once.

    By the orders of torch's schedules they are the forward passes before the first backward, one more, and,
    where the backward is split, those whose weights wait.
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
    passes_ahead = 2 if name == "interleaved_1f1b" else 1
    return (chunks - 1) * ranks + passes_ahead * (ranks - 1 - rank) + 1 + waiting
