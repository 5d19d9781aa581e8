"""Bytes of activations that a rank keeps within a step; arithmetic, no torch.

They are counted tensor by tensor from the code of `models/blocks`. `memory.memory_bytes` sums them.
"""

from collections.abc import Sequence

from kielo.models.families import module
from kielo.models.family_tables import LayerParts
from kielo.recipe.cards import Accelerator
from kielo.recipe.sections import CompleteModel, DatasetIdentity, Layout, Precision
from kielo.resolve.software import compile_advice
from kielo.resolve.stages import SCHEDULES, layers_of_stages, round_of_micro_batches, stages_of_rank


def learns_positions(model_type: str) -> bool:
    return "position_table" in module(model_type, "tables").TENSOR_PARALLEL_PLAN


def with_positions(dataset: DatasetIdentity, model: CompleteModel) -> DatasetIdentity:
    """Return the section with restart_positions filled in: true, or None if positions do not restart.

    Identities from before this key existed have None: their positions continue.
    """
    applies = dataset.mask_documents and learns_positions(model.model_type)
    restarts = True if applies and dataset.restart_positions is not False else None
    return dataset.model_copy(update={"restart_positions": restarts})


LEAST_CHUNK_TOKENS = 2048  # rows of a product that keep a device busy
# Share of a device's memory for a chunk's logits in bf16. Uncompiled, with their fp32 softmax and the chunk
# before, they take four times as much.
_LOGITS_SHARE = 1 / 128
_LOGIT_BYTES = 2


def loss_chunk_tokens(
    asked: int | None, model: CompleteModel, layout: Layout, card: Accelerator | None
) -> int:
    """Return the recipe's choice, else the largest power of two whose logits fit their share of memory.

    Each chunk reads and writes the head's fp32 gradient once, so large chunks are faster on a GPU. On a CPU,
    and on a device of unknown memory, it is `LEAST_CHUNK_TOKENS`.
    """
    if asked is not None:
        return asked
    if card is None or card.device == "cpu" or card.memory_bytes is None:
        return LEAST_CHUNK_TOKENS
    fitting = _LOGITS_SHARE * card.memory_bytes * layout.tensor / (_LOGIT_BYTES * model.vocab_rows)
    return max(LEAST_CHUNK_TOKENS, 1 << int(fitting).bit_length() >> 1)


_FP32 = 4
# Bytes of an element that autograd keeps; fp8: outside the matrix products.
_BYTES_PER_ELEMENT = {"fp32": 4, "bf16": 2, "fp8": 2}
# Number of passes that a pass counts as while its weights wait for their gradients: it keeps its activations
# and the gradients of its matrices' results.
_WAITING_PASS = 1.4
_NORMS_AROUND = 4  # norms of a layer that are before and after both attention and MLP


def memory_columns(
    model: CompleteModel,
    layout: Layout,
    sequence_length: int,
    precision: Precision = "bf16",
    loss_chunk_tokens: int = LEAST_CHUNK_TOKENS,
    on_processor: bool = False,
    micro_batches: int = 0,
) -> dict[str, float]:
    """Return the columns of `MemoryColumns` that only Kielo's own training has, for a `layout` without
    complaints.

    on_processor: count as a rehearsal does, in which softmax copies the logits. micro_batches: of a step, 0
    for whole rounds over the pipeline's ranks.
    """
    bytes_per_element = _BYTES_PER_ELEMENT[precision]
    chunks, _ = _chunks(layout)
    layers = layers_of_stages(model, sequence_length, layout)
    ends = [
        stages_of_rank(layout.pipeline_schedule, layout.pipeline, rank, chunks)
        for rank in (0, layout.pipeline - 1)
    ]
    is_pipeline = layout.pipeline > 1
    a_round = round_of_micro_batches(micro_batches, layout.pipeline)
    passes = [
        _passes(layout, rank, [layers[stage] for stage in stages if is_pipeline], a_round)
        for rank, stages in zip((0, layout.pipeline - 1), ends, strict=True)
    ]
    first, last = (sum(layers[stage] for stage in stages) if is_pipeline else layers[0] for stages in ends)
    in_fp8 = precision == "fp8"
    # Unset, layers are compiled as `resolve` decides for a GPU. A rehearsal does not compile.
    compiles = compile_advice(layout) is None if layout.compile is None else layout.compile
    is_compiled = compiles and not on_processor
    kept, again = layer_bytes(model, layout, bytes_per_element, in_fp8, is_compiled)
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
        "first_passes": passes[0],
        "last_passes": passes[1],
        "kept_bytes": kept,
        "again_bytes": again,
        # The logits and their fp32 softmax. On a CPU, logits of the whole vocabulary become fp32 first.
        "logit_bytes": bytes_per_element + _FP32 + _FP32 * copies_logits,
        "loss_tokens": loss_chunk_tokens,
    }


def layer_parts(model: CompleteModel) -> LayerParts:
    return module(model.model_type, "tables").layer_parts(model)


def layer_bytes(
    model: CompleteModel,
    layout: Layout,
    bytes_per_element: int,
    in_fp8: bool = False,
    is_compiled: bool = False,
) -> tuple[float, float]:
    """Return bytes of a token and layer on a device: (kept from forward to backward, added while it is
    recomputed).

    in_fp8: its matrices are multiplied in FP8. is_compiled: the layer keeps what torch.compile chooses, as
    tests/parallel/test_layer_bytes.py measures it. A compiled FP8 layer counts as uncompiled, which is more.
    """
    is_compiled = is_compiled and not in_fp8
    parts = _kept_parts(model, layout, bytes_per_element, is_compiled)
    share = 1 / layout.tensor if layout.sequence_parallel else 1.0
    # The other tensor ranks' part of the inputs of matrices, gathered again for the backward.
    others = 0.0 if in_fp8 else (1 - share) * parts["inputs of matrices"]
    whole = sum(parts.values()) - others
    if layout.recompute == "operators":
        queries, groups = _heads(model, layout)
        # The rank's part of the sums over tensor ranks; in FP8 the partial sums, whole on each rank.
        sums = _kept_sums(model, is_compiled) * model.hidden_size * (1.0 if in_fp8 else share)
        gates = layer_parts(model).mlp_matrices - 1
        products = 2 * queries + 2 * groups + gates * model.intermediate_size / layout.tensor
        kept = bytes_per_element * (model.hidden_size * share + sums + products)
        kept += parts["log-sums"]
        if is_compiled and _has_biases(model, layout):
            kept -= bytes_per_element * queries + parts["log-sums"]
    elif layout.recompute == "full":
        kept = bytes_per_element * model.hidden_size * share
    else:
        made_again = _made_again(model, layout, parts, others, in_fp8)
        if is_compiled:
            made_again = _made_again_compiled(model, layout, parts, made_again, bytes_per_element)
        kept = whole - sum(made_again.values())
        # Attention is recomputed with the gathered inputs in memory; of the others one at a time.
        again = max(made_again.values(), default=0.0) + others * ("attention" in layout.recomputed)
        recomputed = 1 / layout.recompute_every_layers
        return recomputed * kept + (1 - recomputed) * whole, again
    recomputed = 1 / layout.recompute_every_layers
    return recomputed * kept + (1 - recomputed) * whole, whole + others - kept


def dropout_bytes(model: CompleteModel, layout: Layout) -> float:
    """Return bytes of a token and layer that dropout keeps for the backward: two masks, a byte an element.

    A layer that is recomputed as a whole makes them again.
    """
    is_whole = layout.recompute in ("full", "operators")
    kept = 1 - 1 / layout.recompute_every_layers if is_whole else 1.0
    return 2 * kept * model.hidden_size / (layout.tensor if layout.sequence_parallel else 1)


def attention_dropout_bytes(model: CompleteModel, layout: Layout, precision: Precision) -> float:
    """Return bytes of a token and layer that attention dropout keeps on a GPU.

    They are the outputs of two passes of attention (`models/blocks/flex.py`; the third is the product of the
    output and a share) and three numbers of each head: the logs of two sums and the share. `operators` saves
    both passes, of which its layer counts one, and makes product and share again.
    """
    queries, _ = _heads(model, layout)
    heads = model.num_attention_heads / layout.tensor
    width = _BYTES_PER_ELEMENT[precision]
    whole = 2 * width * queries + 3 * _FP32 * heads
    recomputed = {"full": 0.0, "operators": width * queries + _FP32 * heads}.get(layout.recompute, whole)
    return whole + (recomputed - whole) / layout.recompute_every_layers


def alibi_bytes(
    model: CompleteModel, layout: Layout, precision: Precision, sequence_length: int, is_compiled: bool
) -> float:
    """Return bytes of a token and layer that attention with a tensor of biases adds while it runs on a GPU.

    They are the biases of its pairs with keys. Uncompiled, fp32 biases and biases before the mask come first.
    """
    if not _has_biases(model, layout):
        return 0.0
    pairs = sequence_length * model.num_attention_heads / layout.tensor
    width = _BYTES_PER_ELEMENT[precision]
    return pairs * (width if is_compiled else _FP32 + 2 * width)


def _has_biases(model: CompleteModel, layout: Layout) -> bool:
    """Return True if the backward computes attention again, with a tensor of ALiBi's biases."""
    return layout.alibi_kernel == "bias" and layer_parts(model).has_alibi


def _made_again(
    model: CompleteModel, layout: Layout, parts: dict[str, float], others: float, in_fp8: bool
) -> dict[str, float]:
    """Return bytes that are not kept because the backward recomputes them, by the names in `recompute`.

    parts, others: bytes of a layer by part, and of the inputs that other tensor ranks keep.
    """
    family = layer_parts(model)
    found = {}
    # Attention's inputs are kept, and its output, which the next matrix takes.
    if "attention" in layout.recomputed or _has_biases(model, layout):
        found["attention"] = parts["only attention's"]
    # In FP8 each tensor rank keeps a gathered copy of a norm's output.
    is_copied = in_fp8 and layout.tensor > 1 and layout.sequence_parallel
    if "norms" in layout.recomputed and family.norms_inputs and not is_copied:
        found["norms"] = parts["inputs of matrices"] - others
    if "activations" in layout.recomputed and model.hidden_act != "relu":
        widths = 3 + family.has_mlp_norm if family.mlp_matrices == 3 else 2
        found["activations"] = parts["mlp"] / widths
    return found


def _made_again_compiled(
    model: CompleteModel,
    layout: Layout,
    parts: dict[str, float],
    uncompiled: dict[str, float],
    bytes_per_element: int,
) -> dict[str, float]:
    """Return the bytes of `_made_again` for a compiled layer."""
    found = dict(uncompiled)
    if "attention" in found:  # its output too, which the next matrix then gets from the recomputation
        queries, _ = _heads(model, layout)
        found["attention"] += bytes_per_element * queries + parts["log-sums"]
    if layer_parts(model).is_parallel:
        # The compiler joins the two norms of one input, and keeps their common part.
        found.pop("norms", None)
    if layer_parts(model).has_mlp_norm:  # the compiler keeps the norm's output instead of its input anyway
        found.pop("activations", None)
    return found


def _kept_sums(model: CompleteModel, is_compiled: bool) -> int:
    """Return how many outputs of a layer's row-split matrices `recompute = "operators"` keeps, of two.

    Compiled code drops an output that no norm reads, because no gradient needs it. The output of attention is
    needed to recompute the MLP's input, unless the MLP reads the layer's input.
    """
    family = layer_parts(model)
    if not is_compiled or family.norms == _NORMS_AROUND or not family.norms_inputs:
        return 2
    return 0 if family.is_parallel else 1


def _kept_parts(
    model: CompleteModel, layout: Layout, bytes_per_element: int, is_compiled: bool
) -> dict[str, float]:
    """Return bytes that autograd keeps of a layer, a token on a device, by part.

    Inputs of matrices count whole, as they are gathered. Sequence parallelism splits everything else.
    """
    hidden, tensor, context = model.hidden_size, layout.tensor, layout.context
    family = layer_parts(model)
    share = 1 / tensor if layout.sequence_parallel else 1.0
    queries, groups = _heads(model, layout)
    is_gathered = context > 1 and layout.context_attention == "all_gather"
    keys = groups * context if is_gathered else groups
    # Two blocks of queries attend to gathered keys, each with its own output, and the outputs are joined.
    joined = queries if is_gathered else 0.0
    is_relu = model.hidden_act == "relu"
    # Gate, up and their product; of a plain MLP the matrix's result and the function's: ReLU needs only that.
    widths = (3 if family.mlp_matrices == 3 else 1 if is_relu else 2) + (
        family.has_mlp_norm and not is_compiled
    )
    # Compiled code keeps which results of ReLU are 0.
    zeros = model.intermediate_size / tensor * (is_relu and is_compiled)
    # Norms of one input keep it once. Compiled code makes the residual stream between the norms around
    # attention and the MLP again, from what they read.
    norms = 1 if family.is_parallel else family.norms - (is_compiled and family.norms > 2)
    # Two tables of the scores' terms of relative positions.
    tables = 2 * family.relative_rows * model.num_attention_heads / tensor
    return {
        # Their inputs; the numbers of each row are below 0.1 % from hidden 4,096 on.
        "norms": bytes_per_element * (norms * hidden * share + family.has_head_norms * (queries + groups)),
        "inputs of matrices": 2 * bytes_per_element * hidden,
        "attention": bytes_per_element * (2 * queries + 2 * groups),
        "log-sums": _FP32 * model.num_attention_heads / tensor,
        "only attention's": bytes_per_element * (2 * (keys - groups) + joined + tables),
        "mlp": bytes_per_element * widths * model.intermediate_size / tensor + zeros,
    }


def _heads(model: CompleteModel, layout: Layout) -> tuple[float, float]:
    """Return the width of (all queries, all keys) on a tensor rank."""
    return (
        model.num_attention_heads * model.head_dim / layout.tensor,
        model.num_key_value_heads * model.head_dim / layout.tensor,
    )


def _layer_elements(model: CompleteModel, layout: Layout) -> float:
    """Return the elements of a layer's matrices on a tensor rank. Norms and biases are below 0.1 %."""
    queries, groups = _heads(model, layout)
    return model.hidden_size * (
        2 * (queries + groups) + layer_parts(model).mlp_matrices * model.intermediate_size / layout.tensor
    )


def _position_elements(model: CompleteModel) -> float:
    """Return the elements of learned positions, which every tensor rank of the first stage has whole."""
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


def _passes(layout: Layout, rank: int, layers: Sequence[int], a_round: int) -> float:
    """Return the passes through one of its stages that a pipeline rank keeps at once.

    layers: of its stages. a_round: micro-batches that a stage takes before the rank's next stage does.

    In torch's schedules: the forward passes before the first backward, one more, and, if the backward is
    split, passes whose weights wait. With interleaved_1f1b, passes through a stage of mean length.
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
    passes = (chunks - 1) * a_round + passes_ahead * (ranks - 1 - rank) + 1
    if name == "interleaved_1f1b" and any(layers):
        kept = sum(layers[number // a_round % chunks] for number in range(passes))
        return kept * chunks / sum(layers)
    return passes + waiting
