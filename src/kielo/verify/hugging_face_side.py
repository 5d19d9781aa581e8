"""The other side of the parity check: transformers' own model under accelerate, as a careful user would write it.

Nothing of Kielo's maths, loss, weight-decay rule or clipping is used here. Data in: the resolved run, in fp32, and
weights; data out: as from `kielo_side`.
"""

from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_pt_utils import get_parameter_names

from kielo.models import families
from kielo.recipe.errors import KieloError
from kielo.train.feed import StepBatch
from kielo.train.schedule import learning_rate
from kielo.verify.settings import base_of, dtype_names, frequencies_at_position_1, optimiser_settings
from kielo.verify.trace import Trace, trace_forward

if TYPE_CHECKING:
    from kielo.plan.resolved import Identity

# What transformers' Trainer leaves without weight decay.
_NOT_DECAYED = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
OPTIMISER_KEYS = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_gradient_norm")


class HuggingFaceSide:
    def __init__(
        self, identity: "Identity", device: str, weights: dict[str, Tensor] | None, overrides: dict[str, Any]
    ):
        """`weights`: our name → values to copy; None lets transformers load identity.model.weights itself."""
        identity = identity.model_copy(update={key: overrides[key] for key in OPTIMISER_KEYS if key in overrides})
        self._names = families.module(identity.model.model_type, "names").to_hugging_face(identity.model)
        self._max_gradient_norm = identity.max_gradient_norm
        self._z_loss = identity.z_loss
        self._accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no")
        model = _model(identity, weights, {key: overrides[key] for key in overrides if key not in OPTIMISER_KEYS})
        rate = learning_rate(identity)
        optimiser = torch.optim.AdamW(
            _groups(model, identity.weight_decay),
            lr=identity.learning_rate,
            betas=(identity.adam_beta1, identity.adam_beta2),
            eps=identity.adam_epsilon,
            fused=True,  # transformers' Trainer's own default
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda steps_done: rate(steps_done + 1) / identity.learning_rate
        )
        self.model, self._optimiser, self._scheduler = self._accelerator.prepare(model, optimiser, scheduler)

    def _named(self) -> dict[str, torch.nn.Parameter]:
        theirs = dict(self._accelerator.unwrap_model(self.model).named_parameters())
        return {ours: theirs[name] for ours, name in self._names.items()}

    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self._named().items()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self._named().items()}

    def trace(self, batch: StepBatch, modules: dict[str, str]) -> Trace:
        """`modules`: our name → theirs. See `KieloSide.trace`."""
        piece = batch.micro_batches[0]
        self.model.eval()
        named = {ours: self.model.get_submodule(theirs) for ours, theirs in modules.items()}
        with torch.no_grad():
            return trace_forward(named, lambda: self._logits_and_loss(piece, piece.labels_bs.numel())[0])

    def backward(self, batch: StepBatch) -> float:
        self.model.train()
        counted = int(batch.counted_tokens)
        total = 0.0
        for piece in batch.micro_batches:
            logits, loss = self._logits_and_loss(piece, counted)
            if self._z_loss:
                log_z = logits.float().logsumexp(-1)[piece.labels_bs != -100]
                loss = loss + self._z_loss * log_z.square().sum() / counted
            self._accelerator.backward(loss)
            total += loss.item()
        return total

    def _logits_and_loss(self, piece: Any, counted_tokens: int) -> tuple[Tensor, Tensor]:
        """transformers' own loss: `num_items_in_batch` makes it a sum over the step's counted tokens."""
        mask = None
        if piece.documents_bs is not None:
            same = piece.documents_bs[:, None, :, None] == piece.documents_bs[:, None, None, :]
            length = same.shape[-1]
            mask = same & torch.ones(length, length, dtype=torch.bool, device=same.device).tril()
        out = self.model(
            input_ids=piece.inputs_bs, attention_mask=mask, labels=piece.labels_bs, shift_labels=piece.labels_bs,
            num_items_in_batch=torch.tensor(counted_tokens, device=piece.inputs_bs.device), use_cache=False,
        )
        return out.logits, out.loss

    def update(self, step: int) -> dict[str, float]:
        rate = self._optimiser.param_groups[0]["lr"]
        norm = self._accelerator.clip_grad_norm_(self.model.parameters(), self._max_gradient_norm).item()
        clipped = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item()
        self._optimiser.step()
        self._scheduler.step()
        self._optimiser.zero_grad()
        return {"learning_rate": rate, "gradient_norm": norm, "clipped_gradient_norm": clipped}

    def settings(self) -> dict[str, Any]:
        """Read off the live model and optimiser, after at least one step."""
        model, named = self._accelerator.unwrap_model(self.model), self._named()
        positions = torch.arange(2, device=model.device)[None]
        cos, sin = model.model.rotary_emb(torch.zeros(1, device=model.device), positions)
        half = cos.shape[-1] // 2
        frequencies = frequencies_at_position_1(cos[0, :, :half], sin[0, :, :half])
        epsilons = {module.variance_epsilon for module in model.modules() if hasattr(module, "variance_epsilon")}
        optimiser = getattr(self._optimiser, "optimizer", self._optimiser)
        return optimiser_settings(optimiser, named) | {
            "clipping, largest gradient norm": self._max_gradient_norm,
            "RoPE base": base_of(frequencies),
            "RoPE inverse frequencies": frequencies,
            "RMSNorm epsilon": sorted(epsilons),
            "head tied to embedding": model.lm_head.weight is model.model.embed_tokens.weight,
            "precision of weights": dtype_names(named.values()),
        }


def _model(identity: "Identity", weights: dict[str, Tensor] | None, overrides: dict[str, Any]) -> LlamaForCausalLM:
    names = families.module(identity.model.model_type, "names")
    folder = None
    if weights is None:
        from kielo.checkpoint.huggingface import resolve_weights

        folder = resolve_weights(identity.model.weights)
        config = LlamaConfig.from_pretrained(folder)
    else:
        config = LlamaConfig(**names.hf_config(identity.model))
    for key, value in overrides.items():
        _override(config, key, value)
    if folder is not None:
        return LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    model = LlamaForCausalLM(config).float()
    theirs = dict(model.named_parameters())
    with torch.no_grad():
        for ours, name in names.to_hugging_face(identity.model).items():
            theirs[name].copy_(weights[ours])
    return model


def _override(config: LlamaConfig, key: str, value: Any) -> None:
    """Sets one key of a live config; `rope_theta` moved into a dict in transformers 5."""
    if key == "rope_theta" and getattr(config, "rope_parameters", None):
        config.rope_parameters = {**config.rope_parameters, "rope_theta": value}
    elif hasattr(config, key):
        setattr(config, key, value)
    else:
        known = ", ".join(OPTIMISER_KEYS)
        raise KieloError(f"hugging_face_overrides: {key!r} is no key of a Llama config.json, nor one of {known}")


def _groups(model: LlamaForCausalLM, weight_decay: float) -> list[dict[str, Any]]:
    """Decayed and not decayed, by transformers' own rule on names."""
    decayed = set(get_parameter_names(model, [torch.nn.LayerNorm], _NOT_DECAYED))
    named = list(model.named_parameters())
    return [
        {"params": [parameter for name, parameter in named if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]
