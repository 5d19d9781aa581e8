"""The rules that refuse a recipe for its model, machine or text: `Case` → complaints. Torch-free.

`recipe/check.py` has the rules that need only the recipe. A rule yields a complaint for each fault, with
numbers that work. `resolve` asks all rules. A plan and `kielo run` ask the rules whose facts are known before
the first stage. Arithmetic that other rooms need is beside its formula (`stages.py`, `software.py`,
`fp8_matrices.py`).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from pathlib import Path
from typing import TypeVar

from kielo.models.families import keys_of_family, model_complaints, module
from kielo.models.parameter_shapes import parameter_shapes
from kielo.models.rope_scaling import unread_keys
from kielo.recipe.amounts import multiples_around
from kielo.recipe.cards import Accelerator
from kielo.recipe.complaints import Complaint
from kielo.recipe.complaints import refuse as refuse_recipe
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.optimisers import OPTIMISERS
from kielo.recipe.phases import FullPhase, full_phases, skip_complaints
from kielo.recipe.sections import CompleteModel, Layout, Recipe
from kielo.resolve.activation_bytes import learns_positions
from kielo.resolve.fp8_matrices import MULTIPLE, is_kept, layer_matrices
from kielo.resolve.planned_phases import epochs, trains
from kielo.resolve.resolved import PlannedPhase
from kielo.resolve.shares import MOST_FILLED
from kielo.resolve.software import NEWEST, Software, precisions, schedule_complaint
from kielo.resolve.stages import SCHEDULES, micro_batch_complaint, num_stages, split_by_cost
from kielo.resolve.text import Text, allowed_epochs, num_sequences, sources_with_text


@dataclass(frozen=True)
class Machine:
    """The machine that trains. None: not known, so that its rules have no complaint."""

    world_size: int | None = None
    device: str | None = None
    card: Accelerator | None = None
    software: Software = Software(NEWEST)


@dataclass(frozen=True)
class Steps:
    """Steps in numbers. micro_batches: (sequences, number in a step) on a rank, for each of `phases`."""

    phases: tuple[PlannedPhase, ...]
    micro_batches: tuple[tuple[int, int], ...] = ()
    data_ranks: int = 1


@dataclass(frozen=True)
class Case:
    """A recipe with its complete `model`. vocabulary_size: 0 before it is known."""

    recipe: Recipe
    model: CompleteModel
    machine: Machine
    phases: tuple[FullPhase, ...]
    vocabulary_size: int = 0

    @staticmethod
    def of(
        recipe: Recipe, model: CompleteModel, machine: Machine = Machine(), vocabulary_size: int = 0
    ) -> "Case":
        return Case(recipe, model, machine, full_phases(recipe), vocabulary_size)

    @property
    def layout(self) -> Layout:
        """Return the recipe's layout. Its shard can be 0, for all remaining ranks."""
        return self.recipe.layout

    def with_layout(self, layout: Layout) -> "Case":
        return replace(self, recipe=self.recipe.model_copy(update={"layout": layout}))


@dataclass(frozen=True)
class StepCase:
    """A recipe with its text and steps, which are empty before they are planned."""

    recipe: Recipe
    phases: tuple[FullPhase, ...]
    text: Text
    tokens_folder: Path
    steps: Steps = Steps(())


Complaints = Iterator[str]
Rule = Callable[[Case], Complaints]
StepRule = Callable[[StepCase], Complaints]
Judged = TypeVar("Judged", Case, StepCase)


def complaints(case: Judged, rules: Iterable[Callable[[Judged], Complaints]]) -> list[str]:
    """Return the complaints of `rules`, each once, because several phases can have the same."""
    return list(dict.fromkeys(said for rule in rules for said in rule(case)))


def refuse(recipe: Recipe, found: Sequence[str]) -> None:
    refuse_recipe(recipe.name, [Complaint((), message) for message in found])


# The model


def _is_of_its_family(case: Case) -> Complaints:
    yield from model_complaints(case.model, _given(case))


def _given(case: Case) -> set[str]:
    """Return the keys of [model] that the recipe gives; none if weights have their own."""
    model = case.recipe.model
    given = {key for key in model.model_fields_set if getattr(model, key) is not None}
    return set() if model.weights else given


def _has_windows(case: Case) -> Complaints:
    model = case.model
    kinds = model.layer_types or ("sliding_attention",)
    if model.sliding_window is not None and "sliding_attention" in kinds:
        return
    own = _given(case) & keys_of_family(model.model_type)
    for key in sorted(own & {"sliding_window", "rope_local_base_freq"}):
        yield (
            f"model.{key} = {getattr(model, key)!r} has no effect because no layer has a window. Fix: "
            "model.sliding_window with model.layer_types that have sliding_attention, or leave the key out"
        )


def _rope_scaling(case: Case) -> Complaints:
    scaling = case.recipe.model.rope_scaling
    if "rope_scaling" not in _given(case) or not scaling:
        return
    for key in unread_keys(scaling):
        rope_type = scaling.get("rope_type") or scaling.get("type")
        yield (
            f"model.rope_scaling.{key} has no effect "
            + (f"with rope_type = {rope_type!r}" if rope_type else "without rope_type")
            + ". Fix: leave the key out"
            + ("" if rope_type else ", or rope_type = linear, llama3 or yarn")
        )
    if "rope_theta" in _given(case) and "rope_theta" in scaling:
        yield (
            f"model.rope_theta = {case.recipe.model.rope_theta:g} has no effect because "
            "model.rope_scaling.rope_theta replaces it. Fix: leave one of the keys out"
        )


def _holds_the_vocabulary(case: Case) -> Complaints:
    size, needed = case.model.vocab_size, case.vocabulary_size
    if size < needed:
        larger = (
            "the tokenizer of model.weights, whose config.json has this size, or model.transplant, which "
            "makes rows for another tokenizer"
        )
        yield (
            f"model.vocab_size = {size} is less than the tokenizer's {needed} tokens. Fix: "
            f"{larger if case.recipe.model.weights else f'{needed} or more'}"
        )


def _has_positions(case: Case) -> Complaints:
    longest = max(case.phases, key=lambda phase: phase.sequence_length)
    length, positions = longest.sequence_length, case.model.max_position_embeddings
    if positions < length:
        yield (
            f"{longest.key('sequence_length')} = {length} is more than model.max_position_embeddings = "
            f"{positions}. Fix: a sequence_length of at most {positions}"
        )


def _objective(case: Case) -> Complaints:
    model_type, train = case.model.model_type, case.recipe.train
    family, objective = FAMILIES[model_type], train.objective
    if family.is_encoder and objective == "next_token":
        yield (
            f"model.model_type = {model_type!r} is an encoder, which sees the token that it would predict. "
            'Fix: train.objective = "masked_tokens"'
        )
    if not family.is_encoder and objective == "masked_tokens":
        encoders = ", ".join(name for name, other in FAMILIES.items() if other.is_encoder)
        yield (
            f'train.objective = "masked_tokens" needs an encoder, but model.model_type = {model_type!r} sees '
            f"only earlier tokens. Fix: model.model_type = {encoders}"
        )
    if train.causal_share and objective == "next_token":
        yield (
            f"train.causal_share = {train.causal_share:g} needs a model that also predicts hidden tokens. "
            'Fix: train.objective = "masked_tokens", or train.causal_share = 0'
        )


def _attention_dropout(case: Case) -> Complaints:
    model_type, share = case.model.model_type, case.recipe.train.attention_dropout
    if share and not FAMILIES[model_type].is_encoder:
        yield (
            f"train.attention_dropout = {share}: only encoders have attention dropout, and model.model_type "
            f"= {model_type!r} is a decoder. Fix: train.attention_dropout = 0 and "
            f"train.hidden_dropout = {share}"
        )


def _restarted_positions(case: Case) -> Complaints:
    dataset, model_type = case.recipe.dataset, case.model.model_type
    if dataset.restart_positions is None:
        return
    asked = f"dataset.restart_positions = {str(dataset.restart_positions).lower()}"
    if not dataset.mask_documents:
        yield f"{asked} needs dataset.mask_documents = true. Fix: set it, or leave this key out"
    if not learns_positions(model_type):
        yield (
            f"{asked} has no effect: {model_type} models have no learned positions, only distances between "
            "tokens. Fix: leave it out"
        )


# With bf16's 8 significant bits, rounding to nearest undoes a change of up to this share of a value.
_LOST_SHARE = 2.0**-8


def _moments_in_bf16(case: Case) -> Complaints:
    """Refuse moments in bf16 if rounding undoes a step's decay by 1 - β.

    Otherwise exp_avg_sq would keep the largest gradient forever, and steps would stay small.
    """
    train = case.recipe.train
    if train.optimiser_state != "bf16":
        return
    for key in ("adam_beta1", "adam_beta2"):
        beta = getattr(train, key)
        if 1 - beta <= _LOST_SHARE:
            yield (
                f'train.{key} = {beta:g} with train.optimiser_state = "bf16": a step would change a moment '
                f"by {1 - beta:.2g} of itself, which rounding to bf16 undoes (up to {_LOST_SHARE:.2g}). "
                f'Fix: train.{key} of at most 0.99, or train.optimiser_state = "fp32"'
            )


def _combined_with_optimiser(case: Case) -> Complaints:
    name = case.recipe.train.optimiser
    for key, allowed in OPTIMISERS[name].only_with.items():
        value = reduce(getattr, key.split("."), case.recipe)
        if value not in allowed:
            yield (
                f'{key} = {json.dumps(value)} cannot be combined with train.optimiser = "{name}". '
                f"Fix: {key} = {' or '.join(map(json.dumps, allowed))}"
            )


def _trained_modules(case: Case) -> Complaints:
    """Patterns that match no parameter, and modules that a pipeline must train."""
    model, layout = case.model, case.layout
    names = list(parameter_shapes(model)) if any(phase.trainable for phase in case.phases) else []
    for phase in case.phases:
        key = phase.key("trainable")
        for pattern in phase.trainable:
            if not any(trains(model, [pattern], name) for name in names):
                first = list(dict.fromkeys(name.split(".")[0] for name in names))
                tied = ["head"] if model.tie_word_embeddings else []
                yield (
                    f'{key}: "{pattern}" names no parameter of the model. Fix: '
                    f"{', '.join(first + tied)}, or a module such as layers.0 or layers.*.mlp"
                )
        if layout.pipeline > 1 and not trains(model, phase.trainable, "embed.weight"):
            yield (
                f"{key} = {list(phase.trainable)} leaves the embedding frozen, but with layout.pipeline = "
                f"{layout.pipeline} every stage sends a gradient to the stage before. Fix: "
                f"{key.rpartition('.')[2]} with embed, or layout.pipeline = 1"
            )


# The layout


def _axes_make_up_the_ranks(case: Case) -> Complaints:
    layout, ranks = case.layout, case.machine.world_size
    if ranks is None:
        return
    others = layout.pipeline * layout.replicate * layout.context * layout.tensor
    if ranks % others == 0 and layout.shard in (0, ranks // others):
        return
    sizes = {axis: getattr(layout, axis) for axis in ("pipeline", "replicate", "shard", "context", "tensor")}
    asked = " × ".join(f"layout.{axis} = {size}" for axis, size in sizes.items() if size > 1) or "the layout"
    inner = layout.pipeline * layout.context * layout.tensor
    divisors = [str(number) for number in range(1, ranks + 1) if ranks % (number * inner) == 0]
    ways = [f"{others * (layout.shard or 1)} ranks, or a multiple with layout.shard = 0"]
    if divisors:
        ways.append(f"layout.shard = 0 with layout.replicate one of {', '.join(divisors)}")
    yield f"{asked} does not make up {ranks} ranks. Fix: {'; or '.join(ways)}"


def _relative_positions(case: Case) -> Complaints:
    """Relative positions are computed for whole sequences. Published models have at most 512 tokens."""
    model_type, context = case.model.model_type, case.layout.context
    if context > 1 and FAMILIES[model_type].has_relative_positions:
        yield (
            f"layout.context = {context}: model.model_type = {model_type!r} has relative positions, which "
            "need whole sequences on a rank. Fix: layout.context = 1"
        )


def _tensor_axis(case: Case) -> Complaints:
    model, ranks = case.model, case.layout.tensor
    split = {}  # name → (size, a size that ranks divide)
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(model, key)
        split[f"model.{key} = {size}"] = (size, f"model.{key} = {-(-size // ranks) * ranks}")
    rows = (
        f"the vocabulary's {model.vocab_rows} rows (model.vocab_size = {model.vocab_size} padded to a "
        f"multiple of model.vocab_multiple = {model.vocab_multiple})"
    )
    # The fix adds padding, which changes no result.
    split[rows] = (model.vocab_rows, f"model.vocab_multiple = {math.lcm(model.vocab_multiple, ranks)}")
    shared = math.gcd(*(size for size, _ in split.values()))
    common = [str(number) for number in range(1, min(ranks, shared) + 1) if shared % number == 0]
    for what, (size, larger) in split.items():
        if size % ranks:
            yield (
                f"layout.tensor = {ranks} does not divide {what}. Fix: "
                f"layout.tensor of {', '.join(common)}, or {larger}"
            )


def _torch_runs_the_schedule(case: Case) -> Complaints:
    if case.layout.pipeline > 1:
        said = schedule_complaint(case.layout.pipeline_schedule, case.machine.software.torch)
        yield from [said] if said else []


def _sequence_over_tensor_ranks(case: Case) -> Complaints:
    layout = case.layout
    parts = layout.tensor * layout.context
    for phase in case.phases:
        length = phase.sequence_length
        if layout.tensor > 1 and layout.sequence_parallel and length % parts:
            yield (
                f"{phase.key('sequence_length')} = {length} is not divisible by layout.tensor × "
                f"layout.context = {parts}, the ranks that split it. Fix: "
                f"{_listed(multiples_around(length, parts))}"
            )
    if layout.tensor_overlap != "none" and layout.tensor > 1 and not layout.sequence_parallel:
        yield (
            f"layout.tensor_overlap = {layout.tensor_overlap!r} splits the sequence, but with "
            "layout.sequence_parallel = false each tensor rank has it whole. Fix: "
            'layout.sequence_parallel = true, or layout.tensor_overlap = "none"'
        )


def _context_axis(case: Case) -> Complaints:
    model, layout = case.model, case.layout
    ranks = layout.context
    if ranks == 1:
        return
    for phase in case.phases:
        length = phase.sequence_length
        if length % (2 * ranks):
            sizes = [
                size for size in range(1, min(ranks, length + 1)) if size == 1 or length % (2 * size) == 0
            ]
            yield (
                f"{phase.key('sequence_length')} = {length} does not split into 2 × layout.context = "
                f"{2 * ranks} equal blocks. Fix: sequence_length "
                f"{_listed(multiples_around(length, 2 * ranks))}, or layout.context {_listed(sizes)}"
            )
    if layout.context_attention == "ulysses":
        # `_tensor_axis` complains if layout.tensor does not divide the heads. Here only division by 0 is
        # avoided.
        heads = max(1, model.num_attention_heads // layout.tensor)
        kv_heads = max(1, model.num_key_value_heads // layout.tensor)
        common = math.gcd(heads, kv_heads)
        if common % ranks:
            sizes = [size for size in range(1, common + 1) if common % size == 0]
            yield (
                f'layout.context = {ranks} with layout.context_attention = "ulysses" splits the {heads} '
                f"heads and {kv_heads} key-value heads of each tensor rank, which must both be multiples of "
                f'it. Fix: layout.context {_listed(sizes)}, or context_attention = "all_gather"'
            )


def _pipeline_axis(case: Case) -> Complaints:
    """Yield complaints about pipelines that run with no number of micro-batches."""
    layout, total = case.layout, case.model.num_hidden_layers
    if layout.pipeline == 1:
        if layout.pipeline_layers is not None or layout.pipeline_stages_per_rank is not None:
            keys = "layout.pipeline_layers and layout.pipeline_stages_per_rank"
            yield f"{keys} need layout.pipeline of 2 or more. Fix: leave them out"
        return
    schedule, stages = layout.pipeline_schedule, num_stages(layout)
    usual, is_v, splits_backward = SCHEDULES[schedule]
    given = layout.pipeline_stages_per_rank or usual
    if (usual == 1 or is_v) and given != usual:
        yield (
            f"layout.pipeline_schedule = {schedule!r} has {usual} stage{'s' * (usual > 1)} on each rank, but "
            f"layout.pipeline_stages_per_rank = {given}. Fix: {usual}, or interleaved_1f1b"
        )
    if usual > 1 and given < 2:
        yield f"layout.pipeline_schedule = {schedule!r} needs layout.pipeline_stages_per_rank of 2 or more"
    if splits_backward and layout.zero == 3:
        yield (
            f"layout.pipeline_schedule = {schedule!r} with layout.zero = 3 gives wrong gradients without an "
            "error in torch 2.13. Fix: layout.zero = 1 or 2, or a schedule of 1f1b, interleaved_1f1b or gpipe"
        )
    if splits_backward and layout.recomputed - {"norms", "activations"}:
        yield (
            f"layout.pipeline_schedule = {schedule!r} splits the backward pass, which recomputation "
            f"(layout.recompute = {layout.recompute!r}) does not allow. Fix: "
            'layout.recompute = "none" or "norms+activations", or interleaved_1f1b'
        )
    layers = layout.pipeline_layers
    if total < stages - 1:
        yield (
            f"model.num_hidden_layers = {total} are too few for {stages} stages (layout.pipeline = "
            f"{layout.pipeline} × {given} stages a rank); only the last stage can have no layer. "
            f"Fix: at most {total + 1} stages"
        )
    elif layers is not None and (
        len(layers) != stages or sum(layers) != total or min(layers[:-1]) < 1 or layers[-1] < 0
    ):
        yield (
            f"layout.pipeline_layers = {list(layers)}: {stages} stages need {stages} numbers with the sum "
            f"model.num_hidden_layers = {total}, and only the last can be 0. Fix: "
            f"{list(split_by_cost(total, stages, 1.0, 0.0))}, or leave the key out"
        )


# The device


def _attention_is_compiled(case: Case) -> Complaints:
    """Without a compiler a GPU's FlexAttention keeps all scores, sequence_length² of each head.

    Masks of documents or windows, ALiBi, relative positions, capped scores and attention dropout need it.
    """
    missing = case.machine.software.missing_compiler
    if missing is None or case.machine.device != "cuda" or case.layout.alibi_kernel == "bias":
        return
    model, recipe = case.model, case.recipe
    parts, dropout = module(model.model_type, "tables").layer_parts(model), recipe.train.attention_dropout
    for phase in case.phases:
        windows = model.sliding_window is not None and model.sliding_window < phase.sequence_length
        reasons = {
            "dataset.mask_documents = true": recipe.dataset.mask_documents,
            f"train.attention_dropout = {dropout}": dropout,
            f"model.sliding_window = {model.sliding_window}": windows
            and "sliding_attention" in (model.layer_types or ["sliding_attention"]),
            f"model.attn_logit_softcapping = {model.attn_logit_softcapping}": model.attn_logit_softcapping,
            f"model.model_type = {model.model_type!r} (ALiBi)": parts.has_alibi,
            f"model.model_type = {model.model_type!r} (relative positions)": parts.relative_rows > 0,
        }
        if asked := " and ".join(reason for reason, applies in reasons.items() if applies):
            yield f"{asked} on a GPU: attention is compiled, even with layout.compile = false; {missing}"


def _fp8_matrices(case: Case) -> Complaints:
    """Settings that do not fit the model, and sizes that FP8 kernels, but not emulation, cannot multiply."""
    model, layout, fp8 = case.model, case.layout, case.recipe.train.fp8
    if "fp8" not in precisions(case.recipe.train):
        return
    if FAMILIES[model.model_type].has_relative_positions:
        yield (
            f'train.precision = "fp8": model.model_type = {model.model_type!r} multiplies its matrices with '
            'an odd number of relative positions, which FP8 kernels cannot do. Fix: train.precision = "bf16"'
        )
        return
    matrices = layer_matrices(model)
    for pattern in fp8.kept_in_bf16:
        if not any(is_kept(name, [pattern]) for name in matrices):
            layers = len({name.split(".")[1] for name in matrices})
            kinds = dict.fromkeys(name.split(".", 2)[2] for name in matrices)
            yield (
                f'train.fp8.kept_in_bf16: "{pattern}" names no matrix of the layers. Fix: '
                f'"layers.0" to "layers.{layers - 1}", "*" for any number, alone or with '
                f"{_listed(f'.{kind}' for kind in kinds)}"
            )
    in_fp8 = [name for name in matrices if not is_kept(name, fp8.kept_in_bf16)]
    if not in_fp8:
        yield (
            f"train.fp8.kept_in_bf16 = {list(fp8.kept_in_bf16)} leaves no matrix in FP8. Fix: "
            'fewer patterns, or train.precision = "bf16"'
        )
    if fp8.emulate:
        return
    yield from _fp8_sizes(model, layout.tensor, {name.rpartition(".")[2] for name in in_fp8})
    if fp8.head and model.vocab_rows // layout.tensor % MULTIPLE:
        yield (
            f"train.fp8.head: {model.vocab_rows} rows of the vocabulary over layout.tensor = "
            f"{layout.tensor} are no multiple of {MULTIPLE} a rank, which FP8 kernels need. "
            f"Fix: model.vocab_multiple = {MULTIPLE * layout.tensor}, or train.fp8.head = false"
        )


# Name of a matrix → the heads whose width it has. All others have the width of the MLP.
_HEAD_WIDTHS = {"q": "num_attention_heads", "o": "num_attention_heads"}
_HEAD_WIDTHS |= {"k": "num_key_value_heads", "v": "num_key_value_heads"}
_KEEP_IN_BF16 = ", or keep such matrices in bf16 by train.fp8.kept_in_bf16"


def _fp8_sizes(model: CompleteModel, tensor: int, kinds: set[str]) -> Complaints:
    """Yield complaints about sizes. kinds: the last parts of the names of the matrices in FP8."""
    if model.hidden_size % MULTIPLE:
        yield (
            f"model.hidden_size = {model.hidden_size}: FP8 kernels multiply sizes in multiples of "
            f"{MULTIPLE}. Fix: model.hidden_size of "
            f"{_listed(multiples_around(model.hidden_size, MULTIPLE))}{_KEEP_IN_BF16}"
        )
    for key in dict.fromkeys(_HEAD_WIDTHS[kind] for kind in sorted(kinds & _HEAD_WIDTHS.keys())):
        heads = getattr(model, key)
        what = f"model.{key} × model.head_dim = {heads} × {model.head_dim}"
        larger = f"model.head_dim of {_listed(multiples_around(model.head_dim, MULTIPLE))}"
        yield from _fp8_width(what, heads * model.head_dim, tensor, larger)
    if kinds - _HEAD_WIDTHS.keys():
        size = model.intermediate_size
        larger = f"model.intermediate_size of {_listed(multiples_around(size, MULTIPLE * tensor))}"
        yield from _fp8_width(f"model.intermediate_size = {size}", size, tensor, larger)


def _fp8_width(what: str, width: int, tensor: int, larger: str) -> Complaints:
    if width % tensor or width // tensor % MULTIPLE == 0:
        return
    ranks = [number for number in range(1, tensor) if width % number == 0 and width // number % MULTIPLE == 0]
    fewer = f"layout.tensor of {_listed(ranks)}, or " if ranks else ""
    yield (
        f"{what} over layout.tensor = {tensor} is {width // tensor} a rank: FP8 kernels multiply sizes in "
        f"multiples of {MULTIPLE}. Fix: {fewer}{larger}{_KEEP_IN_BF16}"
    )


def _device_has_fp8(case: Case) -> Complaints:
    train, machine = case.recipe.train, case.machine
    if machine.device != "cuda" or machine.card is None or train.fp8.emulate:
        return
    if "fp8" in precisions(train):
        yield from device_has_fp8(machine.card)


def device_has_fp8(card: Accelerator) -> Complaints:
    if not card.peak_tflops.get("fp8"):
        yield (
            f'train.precision = "fp8" on {card.name}: its card has no fp8 peak, so FP8 would not be faster. '
            'Fix: train.precision = "bf16", or devices with FP8 (NVIDIA from H100 on, AMD from MI300X on)'
        )


# The text


def mixture_has_text(case: StepCase) -> Complaints:
    for phase in case.phases:
        filled = sources_with_text(case.text.tokens, phase.sequence_length)
        if not filled:
            yield f"{case.tokens_folder}: no source has text to train on"
        for name in phase.mixture:
            if name not in filled:
                where = f"{phase.key('mixture')}.{name}: {case.tokens_folder} has no such text"
                yield f"{where}. Fix: {', '.join(filled)}"
    yield from _blocks_as_they_are(case)


def _blocks_as_they_are(case: StepCase) -> Complaints:
    """Yield the reasons why blocks that were cut and shuffled before cannot be used in their order."""
    if case.recipe.dataset.packing != "as_is":
        return
    asked = 'dataset.packing = "as_is"'
    ready = {source.name for source in case.recipe.corpus.token_sources}
    for phase in case.phases:
        length = phase.sequence_length
        for name in phase.mixture or case.text.tokens:
            if name not in ready:
                yield f'{asked} needs ready tokens, but {name} is text. Fix: packing = "one_stream"'
            elif case.text.tokens.get(name, length) < length:
                yield f"{asked}: {name} has no block of {length} tokens. Fix: a smaller sequence_length"
    if case.recipe.train.objective != "next_token":
        yield f'{asked} needs train.objective = "next_token". Fix: packing = "one_stream"'


def repeats_of_sources(case: StepCase) -> Complaints:
    """Sources that are read more often than allowed (Muennighoff et al. 2023, arXiv:2305.16264)."""
    recipe, asked = case.recipe, case.phases
    tokens = sum(phase.tokens for phase in asked)
    for name, (read, grace) in epochs(case.steps.phases, case.text.epoch_tokens).items():
        allowed = allowed_epochs(recipe, name)
        if read <= Fraction(allowed) + grace:
            continue
        limit = "dataset.max_epochs"
        if name in recipe.dataset.source_max_epochs:
            limit = f"dataset.source_max_epochs.{name}"
        what, fewer = f"the phases' tokens = {tokens}", f"fewer tokens in a phase with {name} in its mixture"
        weight = f"a smaller weight of {name} in the mixture"
        if len(asked) == 1:
            key, size = asked[0].key("tokens"), asked[0].tokens_per_step
            what = f"{key} = {tokens}"
            fewer = f"{key} of at most {int(tokens * allowed / read) // size * size}"
            weight = _smaller_weight(case.steps.phases[0].mixture, name, allowed / float(read)) or weight
        yield (
            f"{what} would read the source {name} {float(read):.2f} times, more than {limit} = {allowed:g}. "
            f"Fix: {fewer}, {limit.partition('.')[2]} of {math.ceil(read)}, {weight}, or more text"
        )


def _smaller_weight(mixture: Mapping[str, float], name: str, factor: float) -> str:
    """Return a weight that makes the share of `name` `factor` times as large, "" if it is the only source."""
    others = sum(weight for source, weight in mixture.items() if source != name)
    if not others:
        return ""
    share = factor * mixture[name] / (others + mixture[name])
    weight = others * share / (1 - share)
    digits = 3 - math.floor(math.log10(weight))  # four digits, rounded down
    return f"mixture.{name} of at most {math.floor(weight * 10**digits) / 10**digits:.6g}"


def _heldout_text(case: StepCase) -> Complaints:
    if num_sequences(case.text.heldout_tokens, case.steps.phases[0].sequence_length) == 0:
        yield (
            f"{case.tokens_folder}: no held-out text. Fix: a larger dataset.heldout_share "
            f"than {case.recipe.dataset.heldout_share}, or more text"
        )


# The steps


def _precision_changes(case: StepCase) -> Complaints:
    last_step = case.steps.phases[-1].last_step
    steps = [step for step, _ in case.recipe.train.precision_changes]
    for step in sorted(set(steps)):
        if step > last_step:
            yield f"train.precision_changes: step {step} is beyond the run's last step, {last_step}"
        if steps.count(step) > 1:
            times = steps.count(step)
            yield f"train.precision_changes: step {step} occurs {times} times. Fix: each step once"


def _tokens_in_fp8(case: StepCase) -> Complaints:
    """FP8 units multiply 16 tokens at a time in a weight's gradient, a product over a micro-batch."""
    context = case.recipe.layout.context
    if "fp8" not in precisions(case.recipe.train):
        return
    for phase, (sequences, _) in zip(case.steps.phases, case.steps.micro_batches, strict=True):
        tokens = sequences * phase.sequence_length // context
        if tokens % 16:
            key = case.phases[phase.number - 1].key("sequence_length")
            yield (
                f"{key} = {phase.sequence_length} makes micro-batches of {tokens} tokens on a rank, but FP8 "
                f"multiplies 16 at a time. Fix: a sequence_length in multiples of {16 * context}"
            )


def _reduction_in_bf16(case: StepCase) -> Complaints:
    """FSDP2 sums the gradients of micro-batches in the reduction's buffer, before the sum over replicas."""
    layout, has_several = case.recipe.layout, any(number > 1 for _, number in case.steps.micro_batches)
    is_late = layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward
    is_scattered_often = layout.zero > 1 and not is_late and has_several
    if case.recipe.train.gradient_reduce_dtype == "bf16" and layout.replicate > 1 and is_scattered_often:
        yield (
            f'train.gradient_reduce_dtype = "bf16" with layout.replicate = {layout.replicate} and '
            f"layout.zero = {layout.zero} would sum the gradients of micro-batches in bf16. "
            'Fix: layout.zero = 1, layout.replicate = 1, or train.gradient_reduce_dtype = "fp32"'
        )


def _ranks_share_the_steps(case: StepCase) -> Complaints:
    """Each rank takes one or more whole sequences. The small steps of a batch ramp can have fewer."""
    data_ranks = case.steps.data_ranks
    for phase in _full_steps(case.steps.phases):
        of, length, sequences = case.phases[phase.number - 1], phase.sequence_length, phase.sequences_per_step
        if not of.tokens_per_step % length and sequences >= data_ranks:
            continue
        key, tokens = of.key("tokens_per_step"), of.tokens_per_step
        sizes = [size for size in multiples_around(tokens, length) if size >= length * data_ranks]
        sizes_that_fit = " or ".join(str(size) for size in sizes or [length * data_ranks])
        fewer = f", or at most {sequences} data-parallel ranks" if sequences < data_ranks else ""
        yield (
            f"{key} = {tokens} is {tokens / length:g} sequences of {of.key('sequence_length')} = {length}, "
            f"but each of {data_ranks} data-parallel ranks takes one or more whole sequences. "
            f"Fix: {key.rpartition('.')[2]} {sizes_that_fit}{fewer}"
        )


def _pipeline_is_filled(case: StepCase) -> Complaints:
    """Yield complaints about full steps that a schedule cannot run, even with a few empty micro-batches."""
    layout, steps = case.recipe.layout, case.steps
    if layout.pipeline == 1:
        return
    for phase in _full_steps(steps.phases):
        size, number = steps.micro_batches[steps.phases.index(phase)]
        needed = math.ceil(math.ceil(phase.sequences_per_step / steps.data_ranks) / size)
        if number - needed > MOST_FILLED * number:
            stages = num_stages(layout)
            said = micro_batch_complaint(layout.pipeline_schedule, needed, layout.pipeline, stages)
            yield from [said] if said else []


def _full_steps(phases: Sequence[PlannedPhase]) -> Iterator[PlannedPhase]:
    """Yield the phases without the small steps of a batch ramp."""
    for phase, following in zip(phases, [*phases[1:], None], strict=True):
        if following is None or following.number != phase.number:
            yield phase


def _skipped_steps(case: StepCase) -> Complaints:
    yield from skip_complaints(case.recipe.train.skip_steps, case.steps.phases[-1].last_step)


def _listed(choices: Iterable[object]) -> str:
    return " or ".join(map(str, choices))


MODEL_RULES: tuple[Rule, ...] = (
    _is_of_its_family,
    _has_windows,
    _rope_scaling,
    _holds_the_vocabulary,
    _has_positions,
    _objective,
    _restarted_positions,
    _attention_dropout,
    _moments_in_bf16,
    _combined_with_optimiser,
    _trained_modules,
)
LAYOUT_RULES: tuple[Rule, ...] = (
    _relative_positions,
    _tensor_axis,
    _torch_runs_the_schedule,
    _sequence_over_tensor_ranks,
    _context_axis,
    _pipeline_axis,
)
MACHINE_RULES: tuple[Rule, ...] = (
    _axes_make_up_the_ranks,
    _attention_is_compiled,
    _fp8_matrices,
    _device_has_fp8,
)
# Rules of which a layout is no part.
TEXT_RULES: tuple[StepRule, ...] = (
    mixture_has_text,
    repeats_of_sources,
    _precision_changes,
    _skipped_steps,
    _heldout_text,
)
STEP_RULES: tuple[StepRule, ...] = (
    *TEXT_RULES,
    _tokens_in_fp8,
    _reduction_in_bf16,
    _ranks_share_the_steps,
    _pipeline_is_filled,
)
