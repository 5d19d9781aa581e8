"""Hugging Face's Llama, in the Trainer as it is shipped and in a plain loop."""

import tempfile
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from contenders.contender import Contender, PlainLoop, Work, learning_rate, on_device, settle
from kielo.models.families import hf_config


def build(work: Work) -> Contender:
    model = _model(work)
    return PlainLoop(work, model, lambda tokens_bs: model(input_ids=tokens_bs, labels=tokens_bs).loss)


def build_trainer(work: Work) -> Contender:
    return TrainerLoop(work)


def build_compiled_trainer(work: Work) -> Contender:
    return TrainerLoop(work, is_compiled=True)


def _model(work: Work) -> nn.Module:
    config = LlamaConfig(**hf_config(work.model))
    config.use_cache = False  # a cache of keys and values would only cost it time
    model = on_device(work, lambda: LlamaForCausalLM(config))
    model.tie_weights()
    with work.device:  # its buffers are made of the configuration, and have no values yet
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for theirs, ours, shape in work.hugging_face_values():
            parameters[theirs].copy_(work.value(ours, shape))
    return model


class TrainerLoop(Contender):
    """The Trainer's own loop, timed by a callback from on_step_begin to on_step_end.

    So fetching batches is not counted.
    """

    def __init__(self, work: Work, is_compiled: bool = False) -> None:
        super().__init__(work)
        self.note = "torch_compile" if is_compiled else ""
        self._is_compiled = is_compiled
        self._model = _model(work)

    def turn(self, steps: range, first_timed: int) -> float:
        """One call of `train`, which begins with fresh moments."""
        device, marks = self.work.device, []

        def mark(number: int, at: int) -> bool:
            if number == at:
                settle(device)
                marks.append(time.perf_counter())
            return True

        self._train(
            steps, lambda number: mark(number, first_timed), lambda number: mark(number, steps.stop - 1)
        )
        return marks[1] - marks[0]

    def turns(self, turns: list[range], goes_on: Callable[[float], bool]) -> None:
        """Run turns in one call of `train`."""
        self._take(turns, lambda: None, goes_on)

    def lead(self, turns: list[range], others: Callable[[], None]) -> list[float]:
        """Runs all turns in one call of `train`, with the `others` before each; returns its own seconds."""
        seconds: list[float] = []
        self._take(turns, others, lambda one: seconds.append(one) or True)
        return seconds

    def _take(self, turns: list[range], before: Callable[[], None], goes_on: Callable[[float], bool]) -> None:
        device, started = self.work.device, [0.0]
        firsts, lasts = {turn.start for turn in turns}, {turn.stop - 1 for turn in turns}

        def begin(number: int) -> None:
            if number in firsts:
                before()
                settle(device)
                started[0] = time.perf_counter()

        def end(number: int) -> bool:
            if number not in lasts:
                return True
            settle(device)
            return goes_on(time.perf_counter() - started[0])

        self._train(range(turns[0].start, turns[-1].stop), begin, end)

    def _train(self, steps: range, begin: Callable[[int], object], goes_on: Callable[[int], bool]) -> None:
        """Call `train`, which stops early once `goes_on` returns False after a step."""
        rows = self.work.tokens[steps.start : steps.stop].flatten(0, 1)
        parts: list[Tensor] = []

        def end(number: int) -> bool:
            # With labels counted over the whole step, as the Trainer does, its micro-batches' losses add up
            # to the step's.
            self.losses.append(torch.stack(parts).sum())
            parts.clear()
            return goes_on(number)

        with tempfile.TemporaryDirectory() as folder:
            trainer = _InOrder(
                model=self._model,
                args=self._arguments(folder, len(steps)),
                train_dataset=[{"input_ids": row, "labels": row} for row in rows],
                callbacks=[_Hooks(steps.start, begin, end)],
            )
            trainer.remove_callback(PrinterCallback)  # its summary, on the screen
            trainer.seen_losses = parts
            trainer.train()

    def _arguments(self, folder: str, steps: int) -> TrainingArguments:
        work, identity = self.work, self.work.resolved.identity
        return TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=work.micro_batch_sequences,
            gradient_accumulation_steps=work.micro_batches,
            learning_rate=learning_rate(work),
            lr_scheduler_type="constant",
            weight_decay=identity.train.weight_decay,
            adam_beta1=identity.train.adam_beta1,
            adam_beta2=identity.train.adam_beta2,
            adam_epsilon=identity.train.adam_epsilon,
            max_grad_norm=identity.train.max_gradient_norm,
            bf16=work.precision == "bf16",
            use_cpu=work.device.type == "cpu",
            torch_compile=self._is_compiled,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_nan_inf_filter=False,  # on a GPU it would wait for every step's loss
        )


class _InOrder(Trainer):
    """The Trainer unchanged, but with examples in their order and with its losses kept."""

    seen_losses: list[Tensor]

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args: object, **keys: object) -> Tensor:
        loss = super().training_step(*args, **keys)
        self.seen_losses.append(loss)
        return loss


class _Hooks(TrainerCallback):
    def __init__(self, first: int, begin: Callable[[int], object], goes_on: Callable[[int], bool]) -> None:
        self._first, self._begin, self._goes_on = first, begin, goes_on

    def on_step_begin(self, args, state, control, **_):
        self._begin(self._first + state.global_step)

    def on_step_end(self, args, state, control, **_):
        if not self._goes_on(self._first + state.global_step - 1):
            control.should_training_stop = True
