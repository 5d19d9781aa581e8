"""Kielo's side of the parity check on several ranks: the training's own step in the layout of the run."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from kielo.checkpoint.agreement import Agreement
from kielo.checkpoint.read_checkpoint import fill
from kielo.models import families
from kielo.parallel.gradient_clipping import gradient_norm, sum_over_parts
from kielo.parallel.materialise import local, local_slices
from kielo.parallel.pipeline_parallel import Stages
from kielo.ranks.world import World
from kielo.recipe.sections import Precision
from kielo.resolve.resolved import Resolved, filled
from kielo.train.build import build_step
from kielo.train.feed import StepBatch
from kielo.train.laid_out_model import LaidOutModel, built
from kielo.train.loop import optimiser_step
from kielo.train.schedule import learning_rate
from kielo.train.watch.checks import Guard
from kielo.verify.kielo_side import model_settings
from kielo.verify.side_record import as_lists, merged
from kielo.verify.sketch import sketch_of
from kielo.verify.trace import Values, dtype_names, gradient_of, optimiser_settings


class KieloRanks:
    """The model, laid out with a checkpoint's weights, and its optimiser step."""

    def __init__(self, resolved: Resolved, world: World, checkpoint: Path, precision: Precision) -> None:
        identity, placement = resolved.identity, resolved.placement
        self._ranks, self._identity = Agreement(), identity
        self._model, self.mesh = built(resolved, world, precision)
        self._named = dict(self._model.named_parameters())
        fill(checkpoint, {f"model/{name}": one for name, one in self._named.items()}, self._ranks)
        names = families.module(identity.model.model_type, "tables").to_hugging_face(identity.model)
        self._rows = {ours: piece.rows for ours, piece in names.items()}
        train, chunk_tokens = identity.train, filled(placement.train.loss_chunk_tokens)
        guard = Guard(world.device, train)
        step = build_step(self._model, self.mesh, train, placement.layout, chunk_tokens, precision, guard)
        self._laid = LaidOutModel(self._model, step.forward_backward, self.mesh)
        self._clipped_norm = math.nan

        def clip_and_measure() -> Tensor:
            norm = step.clip()
            self._clipped_norm = gradient_norm(self._model, self.mesh).item()
            return norm

        self._step = replace(step, clip=clip_and_measure)
        self._rate = learning_rate(identity)

    def sketches(self, of_gradients: bool) -> dict[str, list[float]]:
        """Return our name → the sketch of the whole weight or gradient, without padding rows."""
        names = sorted(self._named)
        tensors = [gradient_of(self._named[name]) if of_gradients else self._named[name] for name in names]
        parts = []
        for name, tensor in zip(names, tensors, strict=True):
            part, box, shape = local(tensor).detach(), local_slices(tensor), tuple(tensor.shape)
            if (rows := self._rows[name]) is not None:
                kept = slice(min(box[0].start, rows), min(box[0].stop, rows))
                part, box, shape = part[: kept.stop - kept.start], (kept, *box[1:]), (rows, *shape[1:])
            parts.append(sketch_of(part, box, shape))
        found = as_lists(names, sum_over_parts(parts, tensors))
        return {name: list(one) for of_rank in self._ranks.gather(found) for name, one in of_rank.items()}

    def logits(self, tokens_bs: Tensor, documents_bs: Tensor | None) -> Tensor:
        return self._laid.logits(tokens_bs, documents_bs)

    def step(self, batch: StepBatch, on_gradients: Callable[[], None]) -> dict[str, float]:
        """Take one optimiser step by the training loop's own function."""
        parts = replace(self._step, on_gradients=(lambda _: on_gradients(),))
        loss, norm = optimiser_step(parts, batch, self._rate(self._identity.tokens_after(batch.step)))
        return {
            "losses": loss.item(),
            "gradient_norms": norm.item(),
            "clipped_norms": self._clipped_norm,
            "learning_rates": parts.optimiser.algorithm.param_groups[0]["lr"],
        }

    def settings(self) -> Values:
        of_rank = optimiser_settings(self._step.optimiser.algorithm, self._named)
        parts = self._model.decoders if isinstance(self._model, Stages) else (self._model,)
        of_rank |= merged([model_settings(part) for part in parts])
        of_rank["clipping, largest gradient norm"] = self._identity.train.max_gradient_norm
        of_rank["precision of weights"] = dtype_names(self._named.values())
        return merged(self._ranks.gather(of_rank))
