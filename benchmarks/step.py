"""One training step, Kielo's and the Hugging Face Trainer's, side by side in one process.

    python benchmarks/step.py --shape tiny --precision fp32 --pairs 20

Both start from the same weights and take the same batches, with the same optimiser settings, in turn: a few steps
of the Trainer, the same few of Kielo, and so on, so that whatever else the machine does falls on both. Both
are as shipped: the Trainer runs its own loop (time from on_step_begin to on_step_end, so its data loading is not
counted), Kielo the parts that `train/build.py` assembles. The losses printed beside the times show that it was
the same work. A ratio above 1 means that Kielo is faster. Writes results/step_<shape>_<precision>_<device>.json.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from kielo.models.llama.count import parameters
from kielo.models.llama.model import Llama, initial_value
from kielo.models.llama.names import hf_config, to_hugging_face
from kielo.parallel.apply import lay_out
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import AXES, build_mesh, sum_over_data
from kielo.parallel.norm import clip_gradients
from kielo.parallel.world import World, end_world, start_world
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model
from kielo.train.feed import MicroBatch, StepBatch
from kielo.train.forward_backward import PlainForwardBackward
from kielo.train.guard import Guard
from kielo.train.next_token import NextToken
from kielo.train.optimiser import build_optimiser
from kielo.train.precision import settle_matrix_products


@dataclass(frozen=True)
class Shape:
    model: Model
    sequence_length: int
    sequences: int  # in one step, one micro-batch


def _shape(sequence_length: int, sequences: int, **keys: object) -> Shape:
    return Shape(Model(max_position_embeddings=sequence_length, **keys), sequence_length, sequences)


def _demo() -> Shape:
    """The shipped recipe's model, and one of its steps as one micro-batch."""
    recipe = read_recipe("demo_estonian").recipe
    length = recipe.dataset.sequence_length
    model = recipe.model.model_copy(
        update={
            "vocab_size": recipe.tokenizer.vocab_size,
            "head_dim": recipe.model.hidden_size // recipe.model.num_attention_heads,
            "max_position_embeddings": length,
        }
    )
    return Shape(model, length, recipe.train.tokens_per_step // length)


SHAPES = {
    # 23 M parameters, the shape of the peers' table that the project started from.
    "tiny": _shape(
        512,
        4,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=10,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=64,
        vocab_size=8192,
    ),
    "demo": _demo(),
    # 1.2 B parameters (Llama 3.2 1B without tying), for a GPU.
    "1b": _shape(
        2048,
        8,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=32768,
    ),
}

SETTINGS = SimpleNamespace(
    learning_rate=1e-4,
    weight_decay=0.1,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_epsilon=1e-8,
    max_gradient_norm=1.0,
)
SEED = 1


def main() -> None:
    options = _options()
    shape = SHAPES[options.shape]
    world = start_world(60, options.device)
    settle_matrix_products(options.precision)
    if options.threads:
        torch.set_num_threads(options.threads)
    num_steps = (options.warm_up + options.pairs) * options.steps_per_turn
    tokens = torch.randint(
        0,
        shape.model.vocab_size,
        (num_steps, shape.sequences, shape.sequence_length),
        generator=torch.Generator().manual_seed(SEED),
    )
    kielo = KieloSteps(shape, tokens, world, options.precision)
    trainer = TrainerSteps(shape, tokens, world.device, options.precision)
    seconds = trainer.run(options.steps_per_turn, lambda steps: kielo.run(steps))
    end_world()
    result = _result(options, shape, world, kielo, trainer, seconds[options.warm_up :])
    path = Path(options.to) / f"step_{options.shape}_{options.precision}_{world.device.type}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1) if options.json else _table(result) + f"\nwritten to {path}")


class KieloSteps:
    """Kielo's step on the parts that `train/build.py` assembles, for one rank."""

    def __init__(self, shape: Shape, tokens: Tensor, world: World, precision: str) -> None:
        sizes = dict.fromkeys(AXES, 1)
        placement = SimpleNamespace(**sizes, zero=1, cpu_offload=False, recompute="none", start_timeout_seconds=60)
        mesh = build_mesh(world, placement)
        with torch.device("meta"):
            model = Llama(shape.model)
        lay_out(model, mesh, placement, precision)
        materialise(model, world.device, lambda name, size: initial_value(name, size, shape.model, SEED))
        self._tokens, self._device = tokens, world.device
        self._forward_backward = PlainForwardBackward(model, NextToken(0.0, 2048), partial(sum_over_data, mesh=mesh))
        self._clip = partial(clip_gradients, model, mesh, SETTINGS.max_gradient_norm)
        self._guard = Guard(world.device, 3)
        self._optimiser = build_optimiser(model, SETTINGS)
        self.losses: list[Tensor] = []

    def run(self, steps: range) -> float:
        """Seconds for these steps."""
        _settle(self._device)
        start = time.perf_counter()
        for step in steps:
            inputs = self._tokens[step].to(self._device, non_blocking=True)
            batch = StepBatch(
                step, (), [MicroBatch(inputs, _next_tokens(inputs), None)], self._counted(inputs)
            )
            loss = self._forward_backward(batch)
            skip = self._guard.check(loss, self._clip())
            self._optimiser.step(SETTINGS.learning_rate, skip)
            self._optimiser.zero_grad()
            self._guard.stop_if_diverged(step)
            self.losses.append(loss)
        _settle(self._device)
        return time.perf_counter() - start

    def _counted(self, inputs: Tensor) -> Tensor:
        return torch.tensor(inputs.shape[0] * (inputs.shape[1] - 1), device=self._device)


class TrainerSteps:
    """The Trainer's own loop, with a callback that starts and stops the clock and lets Kielo have its turn."""

    def __init__(self, shape: Shape, tokens: Tensor, device: torch.device, precision: str) -> None:
        config = LlamaConfig(**hf_config(shape.model))
        config.use_cache = False  # a cache of keys and values would only cost it time
        model = LlamaForCausalLM(config)
        names = to_hugging_face(shape.model)
        theirs = dict(model.named_parameters())
        with torch.no_grad():
            for ours, piece in names.items():
                theirs[piece.name].copy_(initial_value(ours, theirs[piece.name].shape, shape.model, SEED))
        self._shape, self._device, self._model = shape, device, model
        self._precision, self._num_steps = precision, len(tokens)
        self._examples = [{"input_ids": row, "labels": row} for row in tokens.flatten(0, 1)]
        self.losses: list[Tensor] = []

    def run(self, steps_per_turn: int, kielo_turn: Callable[[range], float]) -> list[tuple[float, float]]:
        """(Trainer's, Kielo's) seconds for each turn of `steps_per_turn` steps."""
        clock = _Clock(self._device, steps_per_turn, kielo_turn)
        with tempfile.TemporaryDirectory() as folder:
            trainer = _InOrder(
                model=self._model,
                args=self._arguments(folder),
                train_dataset=self._examples,
                callbacks=[clock],
            )
            trainer.seen_losses = self.losses
            trainer.train()
        return clock.turns

    def _arguments(self, folder: str) -> TrainingArguments:
        return TrainingArguments(
            output_dir=folder,
            max_steps=self._num_steps,
            per_device_train_batch_size=self._shape.sequences,
            learning_rate=SETTINGS.learning_rate,
            lr_scheduler_type="constant",
            weight_decay=SETTINGS.weight_decay,
            adam_beta1=SETTINGS.adam_beta1,
            adam_beta2=SETTINGS.adam_beta2,
            adam_epsilon=SETTINGS.adam_epsilon,
            max_grad_norm=SETTINGS.max_gradient_norm,
            bf16=self._precision == "bf16",
            use_cpu=self._device.type == "cpu",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_nan_inf_filter=False,  # on a GPU it would wait for every step's loss
        )


class _InOrder(Trainer):
    """The Trainer as it is, taking the examples in their order and keeping its losses."""

    seen_losses: list[Tensor]

    def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler:
        return torch.utils.data.SequentialSampler(self.train_dataset)

    def training_step(self, *args: object, **keys: object) -> Tensor:
        loss = super().training_step(*args, **keys)
        self.seen_losses.append(loss)
        return loss


class _Clock(TrainerCallback):
    def __init__(
        self, device: torch.device, steps_per_turn: int, kielo_turn: Callable[[range], float]
    ) -> None:
        self._device, self._steps_per_turn, self._kielo_turn = device, steps_per_turn, kielo_turn
        self._seconds = self._start = 0.0
        self.turns: list[tuple[float, float]] = []

    def on_step_begin(self, args, state, control, **_):
        if state.global_step % self._steps_per_turn == 0:
            _settle(self._device)
            self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        if state.global_step % self._steps_per_turn == 0:
            _settle(self._device)
            theirs = time.perf_counter() - self._start
            first = state.global_step - self._steps_per_turn
            self.turns.append((theirs, self._kielo_turn(range(first, state.global_step))))


def _next_tokens(inputs: Tensor) -> Tensor:
    """Labels as the Trainer's model makes them of its inputs: shifted by one, nothing after the last."""
    return torch.nn.functional.pad(inputs[:, 1:], (0, 1), value=-100)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _result(
    options: argparse.Namespace,
    shape: Shape,
    world: World,
    kielo: KieloSteps,
    trainer: TrainerSteps,
    seconds: list[tuple[float, float]],
) -> dict:
    tokens = shape.sequences * shape.sequence_length * options.steps_per_turn
    ratios = [theirs / ours for theirs, ours in seconds]
    differences = [abs(a.item() / b.item() - 1) for a, b in zip(kielo.losses, trainer.losses)]
    return {
        "date": date.today().isoformat(),
        "shape": options.shape,
        "precision": options.precision,
        "parameters": parameters(shape.model),
        "sequence_length": shape.sequence_length,
        "sequences_per_step": shape.sequences,
        "steps_per_turn": options.steps_per_turn,
        "machine": _machine(world.device),
        "versions": {name: version(name) for name in ("kielo", "torch", "transformers", "accelerate")},
        "kielo_tokens_per_second": round(tokens / statistics.median(ours for _, ours in seconds), 1),
        "trainer_tokens_per_second": round(tokens / statistics.median(theirs for theirs, _ in seconds), 1),
        "median_ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(cut, 4) for cut in statistics.quantiles(ratios, n=4)[::2]]
        if ratios[1:]
        else [],
        "max_relative_loss_difference": max(differences),
        "last_losses": {"kielo": kielo.losses[-1].item(), "trainer": trainer.losses[-1].item()},
        "seconds_trainer_and_kielo": [[round(theirs, 5), round(ours, 5)] for theirs, ours in seconds],
    }


def _machine(device: torch.device) -> dict:
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    machine = {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "torch_threads": torch.get_num_threads()}
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    return machine


def _table(result: dict) -> str:
    quartiles = "–".join(f"{quartile:.3f}" for quartile in result["ratio_quartiles"])
    return (
        f"{result['shape']} ({result['parameters'] / 1e6:.1f} M parameters), {result['precision']}, "
        f"{result['machine'].get('gpu', result['machine']['cpu'])}\n"
        f"  Kielo    {result['kielo_tokens_per_second']:>12,.0f} tokens/s\n"
        f"  Trainer  {result['trainer_tokens_per_second']:>12,.0f} tokens/s\n"
        f"  ratio    {result['median_ratio']:>12.3f} (quartiles {quartiles}, "
        f"{len(result['seconds_trainer_and_kielo'])} pairs); above 1, Kielo is faster\n"
        f"  losses differ by at most {result['max_relative_loss_difference']:.1e} (relative)"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: a GPU where there is one")
    parser.add_argument("--pairs", type=int, default=20, help="turns that count")
    parser.add_argument("--warm-up", type=int, default=3, help="turns before them that do not")
    parser.add_argument(
        "--steps-per-turn", type=int, default=1, help="10 suits a GPU, which works ahead of the host"
    )
    parser.add_argument("--threads", type=int, default=0, help="torch threads; default: torch's own choice")
    parser.add_argument("--to", default=str(Path(__file__).parent / "results"), help="folder of the result")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
