"""One rank of `kielo verify layouts`: it trains a subject laid out, by training's own parts, and compares.

Cases and the folder with the reference outcomes → a line of JSON for each case (rank 0) with the differences
of loss, norm, gradients and weights from the reference. Every rank compares its own tensors, and the largest
difference counts.
"""

import gc
import importlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kielo.checkpoint.read_checkpoint import some_names
from kielo.dataset.batches import Batch
from kielo.models import families
from kielo.parallel.compile import working_backend
from kielo.parallel.materialise import materialise
from kielo.parallel.mesh import Mesh, build_mesh, data_rank, data_ranks
from kielo.parallel.parallelise import parallelise
from kielo.ranks import objects
from kielo.ranks.world import World, end_world, start_world
from kielo.recipe.sections import Layout, Recipe
from kielo.resolve.software import BACKEND_VARIABLE, chosen_backend, start_timeout_seconds
from kielo.resolve.stages import layers_of_stages
from kielo.train.build import build_step, positions_of_rank
from kielo.train.feed import Feed, StepBatch
from kielo.train.loop import optimiser_step
from kielo.train.precision import settle_matrix_products
from kielo.train.watch.checks import Guard
from kielo.verify.layouts_cases import AXES, Case, all_cases
from kielo.verify.layouts_subject import (
    Outcome,
    Sizes,
    Subject,
    first_value,
    freeze,
    step_arrays,
    subject,
    train_plainly,
)
from kielo.verify.screens import Worst
from kielo.verify.trace import gradient_of

_ASKED = "asked.json"
LOSS_CHUNK_TOKENS = 48  # divides neither a sequence nor a step

# A true gradient of zero, as of a key's bias without RoPE, is only rounding. It is compared with these root
# mean squares. All other tensors have larger root mean squares in every family.
GRADIENT_FLOOR = 1e-4
WEIGHT_FLOOR = 1e-3


@dataclass(frozen=True)
class Asked:
    """The work of the ranks, as JSON in a folder."""

    recipe: Recipe
    cases: tuple[str, ...]  # their names
    steps: int
    results: str | None = None  # the file there to which rank 0 appends. None: the references are made
    mutation: str | None = None

    def write(self, folder: Path) -> None:
        (folder / _ASKED).write_text(objects.to_json(self), encoding="utf-8")


def refusal_of(folder: Path, rank: int) -> str:
    """Return the error by which this rank ended in the last run, or ""."""
    file = folder / f"error_{rank}"
    return file.read_text(encoding="utf-8") if file.exists() else ""


def main() -> None:
    folder, error_file = Path(sys.argv[1]), Path(sys.argv[1]) / f"error_{os.environ['RANK']}"
    asked = objects.from_json((folder / _ASKED).read_text(encoding="utf-8"))
    cases = [case for case in all_cases() if case.name in asked.cases]
    error_file.unlink(missing_ok=True)
    try:
        if asked.results is None:
            make_references(asked.recipe, cases, asked.steps, folder)
        else:
            results = folder / asked.results
            run_cases(asked.recipe, cases, asked.steps, folder, results, asked.mutation)
    except Exception as error:
        error_file.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        sys.exit(1)


def make_references(recipe: Recipe, cases: Sequence[Case], steps: int, folder: Path) -> None:
    """Train each subject of `cases` on one rank and write its outcome into `folder`.

    For fp32 the reference is plain training. For bf16 it is the laid-out code on one rank, because only the
    layout's rounding is of interest.
    """
    with _world(recipe) as world:
        for case in cases:
            path = _reference(folder, case)
            if path.exists():
                continue
            settle_matrix_products(case.precision)
            of = subject(recipe, case.switches)
            if case.precision == "fp32":
                outcome = train_plainly(of, steps)
            else:
                alone = Case({}, switches=case.switches, precision=case.precision)
                outcome = train_laid_out(of, alone, steps, world, build_mesh(world, _layout(of, alone)))
            save_file({name: tensor.contiguous() for name, tensor in outcome.items()}, path)


def run_cases(
    recipe: Recipe, cases: Sequence[Case], steps: int, folder: Path, results: Path, mutation: str | None
) -> None:
    """Run `cases`, which have one number of ranks, in order on each of their ranks.

    Rank 0 appends a line to `results` after each case. `mutation` is the dotted name of a function that is
    called first and may break anything, to check the check.
    """
    os.environ[BACKEND_VARIABLE] = working_backend()
    with _world(recipe) as world:
        if mutation is not None:
            module, _, function = mutation.rpartition(".")
            getattr(importlib.import_module(module), function)()
        meshes: dict[tuple[int, ...], Mesh] = {}
        for case in cases:
            started = time.monotonic()
            difference = compare(recipe, case, steps, world, meshes, load_file(_reference(folder, case)))
            if world.rank == 0:
                with open(results, "a", encoding="utf-8") as file:
                    row = {"name": case.name, "compile_backend": chosen_backend()} | difference
                    file.write(json.dumps(row) + "\n")
                figures = ", ".join(f"{what} {entry['value']:.1e}" for what, entry in difference.items())
                seconds = time.monotonic() - started
                print(f"layouts: {case.name}: {figures} ({seconds:.1f} s)", file=sys.stderr, flush=True)


def compare(
    recipe: Recipe,
    case: Case,
    steps: int,
    world: World,
    meshes: dict[tuple[int, ...], Mesh],
    truth: Outcome,
    sizes: Sizes = Sizes(),  # noqa: B008
) -> dict[str, Worst]:
    """Train a case and return its largest `differences` from `truth` over all ranks, the same on each.

    `meshes` has those made so far by sizes of axes, and further meshes are added. `sizes` are `truth`'s.
    """
    of = subject(recipe, case.switches, sizes)
    layout = _layout(of, case)
    degrees = tuple(getattr(layout, axis) for axis in AXES)
    if degrees not in meshes:
        meshes[degrees] = build_mesh(world, layout)
    settle_matrix_products(case.precision)
    outcome = train_laid_out(of, case, steps, world, meshes[degrees])
    if missing := set(truth) - set().union(*objects.all_gather(set(outcome))):
        raise ValueError(f"no rank has {sorted(missing)}")
    every = objects.all_gather(differences(outcome, truth))
    return {what: max((one[what] for one in every), key=lambda worst: worst["value"]) for what in every[0]}


def train_laid_out(of: Subject, case: Case, steps: int, world: World, mesh: Mesh) -> Outcome:
    """Train a subject laid out, by training's own parts, and return whole tensors on every rank."""
    layout = _layout(of, case)
    with torch.device("meta"):
        model = families.build_model(of.model)
    freeze(of, model)
    model = parallelise(model, mesh, layout, case.precision)
    materialise(model, world.device, partial(first_value, of), layout.cpu_offload)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients: Outcome = {}

    def keep_gradients(batch: StepBatch) -> None:
        if batch.step == 1:
            gradients.update(_gradients(named))

    guard = Guard(world.device, of.train)
    parts = build_step(model, mesh, of.train, layout, LOSS_CHUNK_TOKENS, case.precision, guard)
    parts = replace(parts, on_gradients=(keep_gradients,))
    feed = _feed(of, case, steps, world, mesh)
    try:
        taken = [optimiser_step(parts, feed.take(step), of.learning_rate) for step in range(1, steps + 1)]
    finally:
        feed.close()
    losses, norms = zip(*taken, strict=True)
    outcome = gradients | {f"weight/{name}": _whole(parameter) for name, parameter in named.items()}
    return outcome | {"losses": torch.stack(losses), "norms": torch.stack(norms)}


def differences(ours: Outcome, theirs: Outcome) -> dict[str, Worst]:
    """Return the largest difference of loss, norm, gradient and weight, and the step or the tensor that has
    it.

    Tensors are compared by the root mean square of their difference over the root mean square of `theirs`, or
    over the floor if that is larger. A pipeline rank has only the tensors of its stages.
    """
    if ours.keys() - theirs.keys():
        raise ValueError(f"other tensors than in the reference: {sorted(ours.keys() - theirs.keys())}")
    found = {}
    for what, key in (("loss", "losses"), ("norm", "norms")):
        truth = theirs[key].double()
        relative = (ours[key].double() - truth).abs() / truth.abs().clamp(min=1e-12)
        found[what] = _largest({f"step {n}": value for n, value in enumerate(relative.tolist(), start=1)})
    for what, floor in (("gradient", GRADIENT_FLOOR), ("weight", WEIGHT_FLOOR)):
        names = {name: name.partition("/")[2] for name in ours if name.startswith(what + "/")}
        found[what] = _largest(
            {short: _relative_l2(ours[name], theirs[name], floor) for name, short in names.items()}
        )
    return found


def _relative_l2(ours: Tensor, theirs: Tensor, floor: float) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = ours.double(), theirs.double()
    return ((ours - theirs).norm() / max(theirs.norm().item(), floor * math.sqrt(theirs.numel()))).item()


def _largest(values: dict[str, float]) -> Worst:
    if not values:
        return {"value": 0.0, "at": "none: its stages are frozen"}
    finite = {name: value if math.isfinite(value) else math.inf for name, value in values.items()}
    name = max(finite, key=finite.__getitem__)
    return {"value": finite[name], "at": name}


def _gradients(named: dict[str, nn.Parameter]) -> Outcome:
    without = [name for name, parameter in named.items() if parameter.grad is None]
    if without:
        raise ValueError(f"no gradient after the backward of a whole step: {some_names(without)}")
    return {f"gradient/{name}": _whole(gradient_of(parameter)) for name, parameter in named.items()}


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def _feed(of: Subject, case: Case, steps: int, world: World, mesh: Mesh) -> Feed:
    rank, ranks = data_rank(mesh), data_ranks(mesh)

    def read_step(step: int) -> Batch:
        samples, inputs, labels, documents = step_arrays(of, step)
        own = slice(rank, None, ranks)
        return Batch(inputs[own], labels[own], None if documents is None else documents[own], samples[own])

    sequences, positions = of.sizes.sequences // ranks, positions_of_rank(of.sizes.length, mesh)
    return Feed(read_step, sequences // case.micro_batches, steps, world.device, positions)


def _layout(of: Subject, case: Case) -> Layout:
    layers = layers_of_stages(of.model, of.sizes.length, case.section)
    return case.section.model_copy(update={"pipeline_layers": layers})


def _reference(folder: Path, case: Case) -> Path:
    """Return the file of a case's reference. Cases with equal switches and precision share it."""
    switches = "-".join(f"{key}_{value}" for key, value in sorted(case.switches.items()))
    return folder / f"{case.precision}-{switches}.safetensors"


@contextmanager
def _world(recipe: Recipe) -> Iterator[World]:
    torch.set_num_threads(1)  # many ranks share the cores of one machine
    gc.freeze()  # and the memory of what was imported, as long as no collection writes to it
    # Each rank would warn in every case that gathering a whole tensor takes two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    world = start_world(start_timeout_seconds(recipe), "cpu")
    try:
        yield world
    finally:
        end_world()
