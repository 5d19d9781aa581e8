"""The other side of the parity check on ranks: transformers under accelerate with FSDP, or in one process.

As in `hugging_face_side.py` it uses nothing of Kielo's maths. Each rank has other sequences, whatever layout
Kielo has. The weights are a checkpoint's, which rank 0 reads and accelerate sends to the others.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin, init_empty_weights
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from kielo.artifact.checkpoint_index import CheckpointIndex, read_index
from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.safetensors_storage import fill_from_chunks
from kielo.checkpoint.tensor_table import cut, join, whole_box
from kielo.models import families
from kielo.models.piece import by_stored_name
from kielo.ranks.world import World
from kielo.recipe.sections import Precision
from kielo.resolve.resolved import Identity
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.schedule import learning_rate
from kielo.verify.hugging_face_side import (
    OPTIMISER_KEYS,
    HuggingFaceBatch,
    hugging_face_batch,
    model_settings,
    overridden,
    parameter_groups,
    stored_parameters,
    transformers_model,
)
from kielo.verify.sketch import sketch_of
from kielo.verify.trace import Values, dtype_names, gradient_of, optimiser_settings

_EPSILONS = {"fp32": torch.finfo(torch.float32).eps, "bf16": torch.finfo(torch.bfloat16).eps}


class AccelerateRanks:
    """transformers' model, optimiser and learning rates, on all ranks of the world.

    overrides: keys to set wrong on purpose. nudge_seed: move each weight by one unit in the last place of the
    precision, up or down; None: not.
    """

    def __init__(
        self,
        identity: Identity,
        world: World,
        checkpoint: Path,
        precision: Precision,
        overrides: Values,
        nudge_seed: int | None = None,
    ) -> None:
        identity = overridden(identity, overrides)
        self._identity, self._world, self._ranks = identity, world, Agreement()
        tables = families.module(identity.model.model_type, "tables")
        self._pieces = tables.to_hugging_face(identity.model)
        has_alibi = tables.layer_parts(identity.model).has_alibi
        self._takes_documents_alone = has_alibi or bool(identity.dataset.restart_positions)
        self._shapes = _shapes(identity, self._pieces)
        of_config = {key: overrides[key] for key in overrides if key not in OPTIMISER_KEYS}
        with init_empty_weights(include_buffers=False):
            model = transformers_model(identity, of_config)
        _give_memory(model)
        if world.rank == 0:
            self._fill(model, checkpoint)
        model.eval()
        _recompute_layers(model)
        self._environment = dict(os.environ)
        self._accelerator = _accelerator(world, precision)
        self._rate = learning_rate(identity)
        groups = parameter_groups(model, identity.train.weight_decay)
        train = identity.train
        optimiser = torch.optim.AdamW(
            groups,
            lr=identity.learning_rates[0].peak,
            betas=(train.adam_beta1, train.adam_beta2),
            eps=train.adam_epsilon,
            fused=True,
        )
        self._model, self._optimiser = self._accelerator.prepare(model, optimiser)
        if nudge_seed is not None:
            _nudge(self._model, nudge_seed * world.size + world.rank, _EPSILONS[precision])

    def close(self) -> None:
        """Forget accelerate's own state, which a process has once."""
        self._accelerator.free_memory()
        for state in (AcceleratorState, PartialState, GradientState):
            state._shared_state.clear()
        os.environ.clear()
        os.environ.update(self._environment)
        torch.set_autocast_cache_enabled(True)

    def sketches(self, of_gradients: bool) -> dict[str, list[float]]:
        """Return our name → the sketch of the whole weight or gradient, which every rank gathers in turn."""
        live = stored_parameters(self._unwrapped(), self._pieces)
        found: dict[str, list[float]] = {}
        for stored, parts in by_stored_name(self._pieces).items():
            tensor = gradient_of(live[stored]) if of_gradients else live[stored].detach()
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for name in parts if self._world.rank == 0 else ():
                part = cut(whole, self._pieces[name], self._shapes[name])
                found[name] = sketch_of(part, whole_box(part.shape), part.shape).tolist()
        return found

    @torch.no_grad()
    def logits(self, tokens_bs: Tensor, documents_bs: Tensor | None) -> Tensor:
        """Return the logits [1, s, v], which each rank computes, because all take part in FSDP's gathers."""
        theirs = self._converted(MicroBatch(tokens_bs, tokens_bs, documents_bs))
        return theirs.as_given(self._model(**theirs.arguments, use_cache=False).logits)

    def step(self, batch: StepBatch, on_gradients: Callable[[], None]) -> dict[str, float]:
        """Take one optimiser step. The loss is transformers' own function.

        FSDP averages gradients over the ranks, so each rank's loss is multiplied by their number, as
        transformers' Trainer does.
        """
        counted = batch.counted_tokens.clone()
        if self._world.size > 1:
            dist.all_reduce(counted)
        total = torch.zeros((), device=self._world.device)
        for micro_batch in batch.micro_batches:
            loss = self._loss(micro_batch, counted)
            self._accelerator.backward(loss * self._world.size)
            total += loss.detach()
        if self._world.size > 1:
            dist.all_reduce(total)
        on_gradients()
        rate = self._rate(self._identity.tokens_after(batch.step))
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        parameters, most = list(self._model.parameters()), self._identity.train.max_gradient_norm
        norm = _plain(self._accelerator.clip_grad_norm_(parameters, most))
        clipped = _plain(torch.nn.utils.get_total_norm([gradient_of(one) for one in parameters]))
        read = self._optimiser.param_groups[0]["lr"]
        self._optimiser.step()
        self._optimiser.zero_grad()
        return {
            "losses": total.item(),
            "gradient_norms": norm,
            "clipped_norms": clipped,
            "learning_rates": read,
        }

    def settings(self) -> Values:
        live = stored_parameters(self._unwrapped(), self._pieces)
        named = {ours: live[piece.name] for ours, piece in self._pieces.items()}
        optimiser = getattr(self._optimiser, "optimizer", self._optimiser)
        settings = optimiser_settings(optimiser, named) | model_settings(self._unwrapped())
        settings["clipping, largest gradient norm"] = self._identity.train.max_gradient_norm
        settings["precision of weights"] = dtype_names(named.values())
        return settings

    def _loss(self, micro_batch: MicroBatch, counted: Tensor) -> Tensor:
        theirs, model = self._converted(micro_batch), self._unwrapped()
        logits = self._model(**theirs.arguments, use_cache=False).logits
        loss = model.loss_function(
            logits=logits,
            labels=None,
            vocab_size=model.config.vocab_size,
            shift_labels=theirs.labels,
            num_items_in_batch=counted,
        )
        if self._identity.train.z_loss:
            log_z = logits.float().logsumexp(-1)[theirs.labels != -100]
            loss = loss + self._identity.train.z_loss * log_z.square().sum() / counted
        return loss

    def _converted(self, micro_batch: MicroBatch) -> HuggingFaceBatch:
        return hugging_face_batch(micro_batch, self._unwrapped(), self._takes_documents_alone)

    def _unwrapped(self) -> PreTrainedModel:
        return self._accelerator.unwrap_model(self._model)

    @torch.no_grad()
    def _fill(self, model: PreTrainedModel, checkpoint: Path) -> None:
        """Copy the checkpoint's weights, one tensor of transformers at a time."""
        live, index = stored_parameters(model, self._pieces), read_index(checkpoint)
        for stored, parts in by_stored_name(self._pieces).items():
            values = {name: _read(checkpoint, index, name, self._pieces[name].rows) for name in parts}
            live[stored].copy_(join(parts, values))


def _read(checkpoint: Path, index: CheckpointIndex, name: str, rows: int | None) -> Tensor:
    stored = f"model/{name}"
    whole = torch.empty(index.entry(stored).shape)
    fill_from_chunks(checkpoint, index, {stored: whole})
    return whole[:rows]


def _shapes(identity: Identity, pieces: dict) -> dict[str, tuple[int, ...]]:
    """Return our name → the shape of the weight without padding rows."""
    with torch.device("meta"):
        named = dict(families.build_model(identity.model).named_parameters())
    return {name: tuple(named[name][: piece.rows].shape) for name, piece in pieces.items()}


def _give_memory(model: PreTrainedModel) -> None:
    """Give each parameter memory that no value touches yet, so that only rank 0 holds the whole model."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))
    model.tie_weights()


def _recompute_layers(model: PreTrainedModel) -> None:
    """Recompute layers in the backward pass, unless the config has dropout, which training layers apply.

    transformers' own function has another name in each version.
    """
    if any("drop" in key and value for key, value in model.config.to_dict().items()):
        return
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if hasattr(module, "gradient_checkpointing"):
            module.gradient_checkpointing = module.training = True
            module._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def _accelerator(world: World, precision: Precision) -> Accelerator:
    is_cpu, mixed = world.device.type == "cpu", "bf16" if precision == "bf16" else "no"
    if world.size == 1:
        torch.set_autocast_cache_enabled(False)  # of weights, all of which would be in memory twice
        return Accelerator(cpu=is_cpu, mixed_precision=mixed)
    # accelerate reads torchrun's variables, which srun does not set
    place = {"RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_RANK": world.local_rank}
    os.environ.update({name: str(number) for name, number in place.items()})
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=True,
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    )
    return Accelerator(cpu=is_cpu, mixed_precision=mixed, fsdp_plugin=plugin)


@torch.no_grad()
def _nudge(model: nn.Module, seed: int, epsilon: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        signs = torch.randint(0, 2, part.shape, generator=generator) * 2 - 1
        part.mul_(1 + epsilon * signs.to(part))


def _plain(value: Tensor) -> float:
    return (value.full_tensor() if isinstance(value, DTensor) else value).item()
