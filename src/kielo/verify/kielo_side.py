"""Kielo's side of the parity check: the training loop's own step on one rank.

The resolved run in fp32 and the weights to start from → traces, losses, gradients, updates and the settings
of the live objects.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kielo.checkpoint.hugging_face_import import load_first_weights
from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.models import families
from kielo.models.blocks.decoder import Decoder
from kielo.models.piece import Box
from kielo.parallel.fsdp import forward_only
from kielo.parallel.gradient_clipping import gradient_norm
from kielo.parallel.materialise import local, materialise
from kielo.parallel.mesh import build_mesh
from kielo.ranks.world import World, end_world, start_world
from kielo.recipe.errors import KieloError
from kielo.resolve.resolved import Identity, Placement, filled
from kielo.train.build import build_step, laid_out
from kielo.train.feed import StepBatch
from kielo.train.loop import optimiser_step
from kielo.train.precision import settle_matrix_products
from kielo.train.schedule import learning_rate
from kielo.train.watch.checks import Guard
from kielo.verify.trace import (
    Trace,
    Values,
    dtype_names,
    gradient_of,
    optimiser_settings,
    rope_settings,
    trace_forward,
)


@contextmanager
def world_of_one(timeout_seconds: float, device: str) -> Iterator[World]:
    """Start the world of ranks that training starts, for this process alone, with exact fp32 products."""
    product_precision = torch.get_float32_matmul_precision()
    world = start_world(timeout_seconds, device)
    try:
        if world.size != 1:
            raise KieloError(
                f"parity is checked by one process, and {world.size} were started. Fix: leave torchrun out"
            )
        settle_matrix_products("fp32")
        yield world
    finally:
        end_world()
        torch.set_float32_matmul_precision(product_precision)


class KieloSide:
    """The model and its optimiser step, built as for training, with the results that parity compares."""

    def __init__(self, identity: Identity, placement: Placement, world: World, checkpoint: Path | None):
        self._max_gradient_norm = identity.train.max_gradient_norm
        self._mesh = build_mesh(world, placement.layout)
        family = families.module(identity.model.model_type, "model")
        names = families.module(identity.model.model_type, "tables").to_hugging_face(identity.model)
        self._rows = {ours: piece.rows for ours, piece in names.items()}
        self.model = laid_out(identity, placement, self._mesh, "fp32")
        stored = {}
        if checkpoint is not None:
            stored = read_tensors(checkpoint, [f"model/{name}" for name in names])

        def fill(name: str, shape: torch.Size, box: Box) -> Tensor:
            if checkpoint is not None:
                return stored.pop(f"model/{name}")[box].float()
            return family.initial_value(name, shape, identity.model, identity.seed, box)

        is_read = checkpoint is None and identity.model.weights is not None
        materialise(self.model, world.device, None if is_read else fill)
        if is_read:
            load_first_weights(dict(self.model.named_parameters()), identity, placement)
        train, chunk_tokens = identity.train, filled(placement.train.loss_chunk_tokens)
        guard = Guard(world.device, train)
        step = build_step(self.model, self._mesh, train, placement.layout, chunk_tokens, "fp32", guard)
        self._clipped_norm = math.nan

        def clip_and_measure() -> Tensor:
            norm = step.clip()
            self._clipped_norm = gradient_norm(self.model, self._mesh).item()
            return norm

        self._step = replace(step, clip=clip_and_measure)
        self._rate, self._tokens_after = learning_rate(identity), identity.tokens_after

    def parameters(self) -> dict[str, Tensor]:
        """Return our name → the whole weight, without rows that pad the vocabulary."""
        named = self.model.named_parameters()
        return {name: local(parameter).detach()[: self._rows[name]] for name, parameter in named}

    def gradients(self) -> dict[str, Tensor]:
        named = self.model.named_parameters()
        return {name: local(gradient_of(parameter))[: self._rows[name]] for name, parameter in named}

    def trace(self, batch: StepBatch, modules: Iterable[str]) -> Trace:
        micro_batch = batch.micro_batches[0]

        def forward() -> Tensor:
            if not isinstance(self.model, Decoder):
                raise TypeError(f"{type(self.model).__name__} has no logits")
            with forward_only(self.model):
                return self.model.logits(self.model(micro_batch.inputs_bs, micro_batch.documents_bs))

        return trace_model(self.model, modules, forward)

    def step(self, batch: StepBatch, on_gradients: Callable[[StepBatch], None]) -> dict[str, float]:
        """Take one optimiser step, by the training loop's own function, and return its measurements.

        `on_gradients` is called with the batch before the gradients are clipped. The learning rate is read
        off the optimiser.
        """
        parts = replace(self._step, on_gradients=(on_gradients,))
        loss, norm = optimiser_step(parts, batch, self._rate(self._tokens_after(batch.step)))
        return {
            "loss": loss.item(),
            "learning_rate": parts.optimiser.algorithm.param_groups[0]["lr"],
            "gradient_norm": norm.item(),
            "clipped_gradient_norm": self._clipped_norm,
        }

    def settings(self) -> Values:
        named = dict(self.model.named_parameters())
        settings = optimiser_settings(self._step.optimiser.algorithm, named) | model_settings(self.model)
        settings["clipping, largest gradient norm"] = self._max_gradient_norm
        settings["precision of weights"] = dtype_names(named.values())
        return settings


def trace_model(model: Any, modules: Iterable[str], forward: Callable[[], Tensor]) -> Trace:
    """Trace the input and output of the named modules of Kielo's `model`, as transformers' modules have them.

    The head's output is without the padding of the vocabulary.
    """
    trace = trace_forward({name: model.get_submodule(name) for name in modules}, forward)
    into, out = trace.passed["head"]
    trace.passed["head"] = (into, out[..., : model.config.vocab_size])
    if model.embed_scale is not None:  # transformers' embeddings multiply inside
        tokens, out = trace.passed["embed"]
        trace.passed["embed"] = (tokens, out * model.embed_scale)
    return trace


def model_settings(model: Any) -> Values:
    """Read settings off Kielo's live `model`, under the names of `hugging_face_side.model_settings`."""
    epsilons = {module.epsilon for module in model.modules() if hasattr(module, "epsilon")}
    return rope_settings(_rope_tables(model)) | {
        "norm epsilon": sorted(epsilons),
        "head tied to embedding": model.config.tie_word_embeddings
        if model.head is None or model.embed is None  # a pipeline stage
        else model.head.weight is model.embed.weight,
    }


def _rope_tables(model: Any) -> Iterable[tuple[Tensor, Tensor]]:
    """Return the tables in use, like `hugging_face_side`: one pair if all layers share a module."""
    ropes = (getattr(model, model.kinds[kind].rope) for kind in sorted(model.kinds))
    return [rope(2) for rope in dict.fromkeys(ropes) if rope is not None]
