"""The other side of the parity check: transformers' model under accelerate, as a careful user would train it.

It uses nothing of Kielo's maths, loss, weight-decay rule or clipping, and no dropout. It takes the resolved
run in fp32 and weights, and gives the same data as `kielo_side`, by our names. Shape letters: b = sequences,
s = tokens of a sequence, n = documents.
"""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from kielo.checkpoint.tensor_table import cut, join
from kielo.models import families
from kielo.models.piece import Piece, by_stored_name
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Identity
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.schedule import learning_rate
from kielo.verify.trace import (
    Trace,
    Values,
    dtype_names,
    gradient_of,
    optimiser_settings,
    rope_settings,
    trace_forward,
)


@dataclass(frozen=True)
class HuggingFaceBatch:
    """The arguments of one forward of transformers' model, and its labels."""

    arguments: Mapping[str, Tensor | dict[str, Tensor]]
    labels: Tensor
    sequences: int
    # With one document a row, its columns without padding, [n, longest]. None: rows as given.
    is_token: Tensor | None = None

    def as_given(self, x: Tensor) -> Tensor:
        """Return the model's output `x` in the sequences of the micro-batch: [b, s, ...]."""
        if self.is_token is None:
            return x
        if x.shape[:2] != self.is_token.shape:  # OPT's MLP has all rows one after another
            x = x.unflatten(0, self.is_token.shape)
        return x[self.is_token].unflatten(0, (self.sequences, -1))


def hugging_face_batch(
    micro_batch: MicroBatch, model: PreTrainedModel, takes_documents_alone: bool
) -> HuggingFaceBatch:
    """Convert a micro-batch.

    takes_documents_alone: one document a row. With ALiBi, transformers masks tokens but not pairs of tokens.
    Learned positions start again in each document.
    """
    sequences, length = micro_batch.inputs_bs.shape
    # OPT would count positions from the mask.
    takes_positions = "position_ids" in inspect.signature(type(model).forward).parameters
    if micro_batch.documents_bs is not None and takes_documents_alone:
        return _documents_apart(micro_batch, micro_batch.documents_bs, takes_positions)
    arguments: dict[str, Tensor | dict[str, Tensor]] = {"input_ids": micro_batch.inputs_bs}
    if micro_batch.documents_bs is not None:
        arguments["attention_mask"] = _masks(micro_batch.documents_bs, model.config)
    if takes_positions:
        arguments["position_ids"] = torch.arange(length, device=micro_batch.inputs_bs.device)[None]
    return HuggingFaceBatch(arguments, micro_batch.labels_bs, sequences)


def _masks(documents_bs: Tensor, config: PretrainedConfig) -> Tensor | dict[str, Tensor]:
    """Return the mask [b, 1, s, s] that is added to scores, or one mask for each kind of layer if windows
    differ.

    A model uses such a mask unchanged, so windows must be in it.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or [
        "full_attention" if window is None else "sliding_attention"
    ]
    places_s = torch.arange(documents_bs.shape[1], device=documents_bs.device)
    distance_ss = places_s[:, None] - places_s
    seen = (documents_bs[:, None, :, None] == documents_bs[:, None, None, :]) & (distance_ss >= 0)
    masks: dict[str, Tensor] = {}
    for kind in set(kinds):
        within = seen if kind == "full_attention" or window is None else seen & (distance_ss < window)
        masks[kind] = torch.zeros(within.shape, device=within.device).masked_fill(~within, torch.finfo().min)
    return masks if len(masks) > 1 else masks.popitem()[1]


def _documents_apart(batch: MicroBatch, documents_bs: Tensor, takes_positions: bool) -> HuggingFaceBatch:
    """Put each document in its own row, padded at its end. Earlier tokens do not see the padding.

    A model computes the same if it knows only distances between tokens, or positions in the document.
    """
    begins = torch.ones_like(documents_bs, dtype=torch.bool)
    begins[:, 1:] = documents_bs[:, 1:] != documents_bs[:, :-1]
    first_n = begins.flatten().nonzero().squeeze(1)
    length_n = torch.diff(first_n, append=first_n.new_tensor([begins.numel()]))
    columns = torch.arange(int(length_n.max()), device=first_n.device)
    is_token = columns < length_n[:, None]
    places = (first_n[:, None] + columns).where(is_token, first_n[:, None])
    labels = batch.labels_bs.flatten()[places].masked_fill(~is_token, -100)
    arguments = {"input_ids": batch.inputs_bs.flatten()[places]}
    if takes_positions:
        arguments["position_ids"] = columns.expand(len(first_n), -1)
    return HuggingFaceBatch(arguments, labels, documents_bs.shape[0], is_token)


# Parameters that transformers' Trainer leaves without weight decay.
_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
_ADAM_KEYS = ("adam_beta1", "adam_beta2", "adam_epsilon")
OPTIMISER_KEYS = ("learning_rate", "weight_decay", *_ADAM_KEYS, "max_gradient_norm")


class HuggingFaceSide:
    """transformers' model, optimiser and learning-rate scheduler, with the results that parity compares."""

    def __init__(self, identity: Identity, device: str, weights: Mapping[str, Tensor], overrides: Values):
        """Build the model and the optimiser.

        weights: our name → values (no padding rows) to copy. overrides: keys to set wrong on purpose.
        """
        identity = overridden(identity, overrides)
        tables = families.module(identity.model.model_type, "tables")
        self._pieces = tables.to_hugging_face(identity.model)
        has_alibi = tables.layer_parts(identity.model).has_alibi
        self._takes_documents_alone = has_alibi or bool(identity.dataset.restart_positions)
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self._max_gradient_norm = identity.train.max_gradient_norm
        self._z_loss = identity.train.z_loss
        self._accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no")
        of_config = {key: overrides[key] for key in overrides if key not in OPTIMISER_KEYS}
        model = transformers_model(identity, of_config)
        _fill(model, self._pieces, weights)
        model.eval()
        rate = learning_rate(identity)
        optimiser = torch.optim.AdamW(
            parameter_groups(model, identity.train.weight_decay),
            lr=identity.learning_rates[0].peak,
            betas=(identity.train.adam_beta1, identity.train.adam_beta2),
            eps=identity.train.adam_epsilon,
            fused=True,  # transformers' Trainer's own default
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimiser,
            lambda steps_done: rate(identity.tokens_after(steps_done + 1)) / identity.learning_rates[0].peak,
        )
        self.model, self._optimiser, self._scheduler = self._accelerator.prepare(model, optimiser, scheduler)

    def _named(self) -> dict[str, nn.Parameter]:
        """Return our name → the live parameter that has it, whole or as a part."""
        live = stored_parameters(self._unwrapped(), self._pieces)
        return {ours: live[piece.name] for ours, piece in self._pieces.items()}

    def _unwrapped(self) -> PreTrainedModel:
        return self._accelerator.unwrap_model(self.model)

    def parameters(self) -> dict[str, Tensor]:
        return self._parts({name: parameter.detach() for name, parameter in self._named().items()})

    def gradients(self) -> dict[str, Tensor]:
        return self._parts({name: gradient_of(parameter) for name, parameter in self._named().items()})

    def _parts(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: cut(one, self._pieces[name], self._shapes[name]) for name, one in stored.items()}

    def modules(self) -> dict[str, nn.Module]:
        return modules_by_our_names(self._unwrapped(), self._pieces)

    def trace(self, batch: StepBatch) -> Trace:
        theirs = self._converted(batch.micro_batches[0])
        with torch.no_grad():
            trace = trace_forward(
                self.modules(), lambda: self.model(**theirs.arguments, use_cache=False).logits
            )
        passed = {name: (theirs.as_given(x), theirs.as_given(out)) for name, (x, out) in trace.passed.items()}
        return Trace(passed, theirs.as_given(trace.logits))

    def backward(self, batch: StepBatch) -> float:
        """Run the step's backward passes and return its loss, by transformers' own function.

        `num_items_in_batch` makes that function sum over counted tokens.
        """
        counted = int(batch.counted_tokens)
        total = 0.0
        for micro_batch in batch.micro_batches:
            theirs, model = self._converted(micro_batch), self._unwrapped()
            logits = self.model(**theirs.arguments, use_cache=False).logits
            loss = model.loss_function(
                logits=logits,
                labels=None,
                vocab_size=model.config.vocab_size,
                shift_labels=theirs.labels,
                num_items_in_batch=torch.tensor(counted, device=logits.device),
            )
            if self._z_loss:
                log_z = logits.float().logsumexp(-1)[theirs.labels != -100]
                loss = loss + self._z_loss * log_z.square().sum() / counted
            self._accelerator.backward(loss)
            total += loss.item()
        return total

    def _converted(self, micro_batch: MicroBatch) -> HuggingFaceBatch:
        return hugging_face_batch(micro_batch, self._unwrapped(), self._takes_documents_alone)

    def update(self) -> dict[str, float]:
        rate = self._optimiser.param_groups[0]["lr"]
        norm = self._accelerator.clip_grad_norm_(self.model.parameters(), self._max_gradient_norm).item()
        clipped = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item()
        self._optimiser.step()
        self._scheduler.step()
        self._optimiser.zero_grad()
        return {"learning_rate": rate, "gradient_norm": norm, "clipped_gradient_norm": clipped}

    def settings(self) -> Values:
        """Read settings off the live model and optimiser, after at least one step."""
        named = self._named()
        optimiser = getattr(self._optimiser, "optimizer", self._optimiser)
        settings = optimiser_settings(optimiser, named) | model_settings(self._unwrapped())
        settings["clipping, largest gradient norm"] = self._max_gradient_norm
        settings["precision of weights"] = dtype_names(named.values())
        return settings


def model_settings(model: PreTrainedModel) -> Values:
    """Read settings off transformers' model, under the names of `kielo_side.model_settings`."""
    # transformers' families give a norm's epsilon two names.
    epsilons = {getattr(one, "variance_epsilon", getattr(one, "eps", None)) for one in model.modules()}
    return rope_settings(_rope_tables(model)) | {
        "norm epsilon": sorted(epsilon for epsilon in epsilons if epsilon is not None),
        "head tied to embedding": model.get_output_embeddings().weight is model.get_input_embeddings().weight,
    }


def modules_by_our_names(model: PreTrainedModel, pieces: Mapping[str, Piece]) -> dict[str, nn.Module]:
    """Return our module name → their module, if exactly one module matches.

    A difference in a fused module shows in the modules after it.
    """
    stored = stored_parameters(model, pieces)
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        owners |= {id(parameter): module for parameter in module.parameters(recurse=False)}
    found = {ours.rpartition(".")[0]: owners[id(stored[piece.name])] for ours, piece in pieces.items()}
    found |= {"embed": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    uses = Counter(map(id, found.values()))
    return {ours: module for ours, module in found.items() if uses[id(module)] == 1}


def stored_parameters(model: PreTrainedModel, pieces: Mapping[str, Piece]) -> dict[str, nn.Parameter]:
    """Return stored tensor → live parameter, for the `pieces` of a family.

    Only the head's name differs: transformers 5 keeps GPT-NeoX's `embed_out` as `lm_head`. Raise KieloError
    for tensors that transformers' model lacks, because it would compute without them.
    """
    live = dict(model.named_parameters())
    if "head.weight" in pieces:
        live[pieces["head.weight"].name] = model.get_output_embeddings().weight
    missing = sorted({piece.name for piece in pieces.values()} - live.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise KieloError(
            f"this model has the tensor {missing[0]}{more}, which transformers' {type(model).__name__} with "
            "its config.json lacks, so the two cannot be equal. Fix: the key of [model] that decides it, "
            "such as model.attention_bias, model.mlp_bias or model.num_hidden_layers"
        )
    return {piece.name: live[piece.name] for piece in pieces.values()}


def overridden(identity: Identity, overrides: Values) -> Identity:
    """Return the identity with the optimiser's overrides. learning_rate is the first segment's peak."""
    changes = {key: overrides[key] for key in OPTIMISER_KEYS if key in overrides}
    first, *later = identity.learning_rates
    first = first.model_copy(update={"peak": changes.pop("learning_rate", first.peak)})
    train = identity.train.model_copy(update=changes)
    return identity.model_copy(update={"learning_rates": (first, *later), "train": train})


def transformers_model(identity: Identity, overrides: Values) -> PreTrainedModel:
    """Build transformers' model with plain attention ("eager"), the only form that covers every family."""
    config = AutoConfig.for_model(**families.hf_config(identity.model))
    for key, value in overrides.items():
        if key == "rope_theta" and getattr(config, "rope_parameters", None):
            config.rope_parameters = {**config.rope_parameters, "rope_theta": value}
        elif hasattr(config, key):
            setattr(config, key, value)
        else:
            raise KieloError(
                f"hugging_face_overrides: {key!r} is no key of a {config.model_type} config.json. Fix: a key "
                f"of it, or {', '.join(OPTIMISER_KEYS)}"
            )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()


@torch.no_grad()
def _fill(model: PreTrainedModel, pieces: Mapping[str, Piece], weights: Mapping[str, Tensor]) -> None:
    live = stored_parameters(model, pieces)
    for name, parts in by_stored_name(pieces).items():
        live[name].copy_(join(parts, {ours: weights[ours] for ours in parts}))


def parameter_groups(model: PreTrainedModel, weight_decay: float) -> list[Values]:
    decayed = set(get_parameter_names(model, [nn.LayerNorm], _NOT_DECAYED))
    named = list(model.named_parameters())
    return [
        {"params": [parameter for name, parameter in named if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]


def _rope_tables(model: PreTrainedModel) -> Iterable[tuple[Tensor, Tensor]]:
    """Yield (cosines, sines) [2, r/2] of the first two positions, of full and then of windowed layers.

    Yield one pair if both kinds are equal, none without RoPE.
    """
    rotary = getattr(model.base_model, "rotary_emb", None)
    if rotary is None:
        return
    x, positions = torch.zeros(1, device=model.device), torch.arange(2, device=model.device)[None]
    by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    for kind in sorted(set(getattr(model.config, "layer_types", None) or ())) if by_kind else (None,):
        tables = rotary(x, positions, kind) if by_kind else rotary(x, positions)
        yield tuple(table[0, :, : table.shape[-1] // 2] for table in tables)
