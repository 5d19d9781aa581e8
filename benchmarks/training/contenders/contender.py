"""Interface of a contender of the step benchmark: its input, and what it must do."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from kielo.models.llama.model import initial_value
from kielo.models.llama.tables import to_hugging_face
from kielo.ranks.world import World
from kielo.recipe.sections import Model
from kielo.resolve.resolved import Resolved

NOT_COUNTED = -100
# the range that kielo.train.profile looks for; a peer's head counts as the matrix that it is
OPTIMISER = "optimiser"
_SEED = 1


class LeftOut(Exception):
    """Raised by a contender that cannot take part, with the reason."""


@dataclass(frozen=True)
class Work:
    """Input of every contender: a model, its first weights, random tokens, and settings of the optimiser.

    resolved: of precision fp32 or bf16; resolved_fp8: the same in FP8. tokens: int64 [steps, sequences, s] on
    the CPU. peers_compile: whether peers that ship with torch.compile use it.
    """

    resolved: Resolved
    resolved_fp8: Resolved
    world: World
    tokens: Tensor
    peers_compile: bool

    @property
    def model(self) -> Model:
        return self.resolved.identity.model

    @property
    def precision(self) -> str:
        return self.resolved.identity.train.precision

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def sequence_length(self) -> int:
        return self.tokens.shape[-1]

    @property
    def micro_batch_sequences(self) -> int:
        return self.resolved.placement.phases[0].micro_batch_sequences

    @property
    def micro_batches(self) -> int:
        return self.resolved.placement.phases[0].micro_batches_per_step

    def micro_batch_tokens(self, step: int) -> Iterator[Tensor]:
        """Yields the step's micro-batches [b, s] on the device."""
        for tokens_bs in self.tokens[step].split(self.micro_batch_sequences):
            yield tokens_bs.to(self.device, non_blocking=True)

    def value(self, name: str, shape: Sequence[int]) -> Tensor:
        """Returns the first value of the parameter that Kielo calls `name`, in fp32.

        Large ones are computed on the GPU.
        """
        if self.device.type == "cpu":
            return initial_value(name, shape, self.model, _SEED)
        if name.endswith("norm.weight"):
            return torch.ones(tuple(shape), device=self.device)
        deviation = self.model.initializer_range
        if name.endswith((".attention.o.weight", ".mlp.down.weight")):
            deviation /= math.sqrt(2 * self.model.num_hidden_layers)
        seed = int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "little")
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(tuple(shape), generator=generator, device=self.device) * deviation

    def hugging_face_values(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Yields (name in Hugging Face's Llama, Kielo's name, shape) of each parameter."""
        model = self.model
        queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
        hidden, wide, vocabulary = model.hidden_size, model.intermediate_size, model.vocab_size
        shapes = {
            "embed": (vocabulary, hidden), "head": (vocabulary, hidden), "q": (queries, hidden),
            "k": (keys, hidden),
            "v": (keys, hidden), "o": (hidden, queries), "gate": (wide, hidden), "up": (wide, hidden),
            "down": (hidden, wide), "norm": (hidden,), "attention_norm": (hidden,), "mlp_norm": (hidden,),
        }  # fmt: skip
        for ours, piece in to_hugging_face(model).items():
            yield piece.name, ours, shapes[ours.split(".")[-2]]


class Contender:
    """An engine that has built its model. `losses`: of each step, scalars on the device, nats a token."""

    note = ""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.losses: list[Tensor] = []

    def step(self, number: int) -> Tensor:
        """Runs step `number`, which may still be under way afterwards, and returns its loss."""
        raise NotImplementedError  # of the Trainer alone, whose own loop takes the steps (`TrainerLoop`)

    def turn(self, steps: range, first_timed: int) -> float:
        """Run these steps; the seconds of those from `first_timed` on."""
        for number in range(steps.start, first_timed):
            self.losses.append(self.step(number))
        settle(self.work.device)
        started = time.perf_counter()
        for number in range(first_timed, steps.stop):
            self.losses.append(self.step(number))
        settle(self.work.device)
        return time.perf_counter() - started

    def turns(self, turns: list[range], goes_on: Callable[[float], bool]) -> None:
        """Run turns one after another, until `goes_on`, which gets the seconds of each, returns False."""
        for steps in turns:
            if not goes_on(self.turn(steps, steps.start)):
                return

    def close(self) -> None:
        """Releases all memory."""
        self.__dict__.clear()


class PlainLoop(Contender):
    """A peer's model in a plain loop: fp32 weights, autocast for bf16, torch's fused AdamW.

    loss_of: tokens [b, s] → the mean loss of predicting each next token. The same loop for all, so that what
    differs is the model and its compilation.
    """

    def __init__(
        self, work: Work, model: nn.Module, loss_of: Callable[[Tensor], Tensor], note: str = ""
    ) -> None:
        super().__init__(work)
        self.note = note
        self._model, self._loss_of = model.train(), loss_of
        self._optimiser = adamw(work, model)

    def step(self, number: int) -> Tensor:
        total = torch.zeros((), device=self.work.device)
        for tokens_bs in self.work.micro_batch_tokens(number):
            with computing(self.work):
                loss = self._loss_of(tokens_bs) / self.work.micro_batches
            loss.backward()
            total += loss.detach()
        with record_function(OPTIMISER):
            nn.utils.clip_grad_norm_(
                self._model.parameters(), self.work.resolved.identity.train.max_gradient_norm
            )
            self._optimiser.step()
            self._optimiser.zero_grad()
        return total


def adamw(work: Work, model: nn.Module) -> torch.optim.Optimizer:
    """Returns torch's fused AdamW with the settings of the work; norms do not decay."""
    identity = work.resolved.identity
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": identity.train.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=learning_rate(work),
        betas=(identity.train.adam_beta1, identity.train.adam_beta2),
        eps=identity.train.adam_epsilon,
        fused=True,
    )


def learning_rate(work: Work) -> float:
    return work.resolved.identity.learning_rates[0].peak


def computing(work: Work) -> AbstractContextManager:
    """Returns autocast to bf16 if that is the precision, else a context that does nothing."""
    if work.precision == "bf16":
        return torch.autocast(work.device.type, dtype=torch.bfloat16)
    return nullcontext()


def next_tokens(tokens_bs: Tensor) -> Tensor:
    """Returns the labels that Hugging Face's models make: inputs shifted by one, nothing after the last."""
    return nn.functional.pad(tokens_bs[:, 1:], (0, 1), value=NOT_COUNTED)


def on_device(work: Work, build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a model without memory, then allocates it on the device; its parameters are not filled yet."""
    with torch.device("meta"):
        model = build()
    return model.to_empty(device=work.device)


def settle(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
