"""A made-up optimiser that is an entry and a class: planned, rehearsed, sized by preflight, trained, resumed.

Run as `python -m tests.train.third_optimiser FOLDER`; the entry must be there before recipes are read.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from kielo.recipe.optimisers import OPTIMISERS, STATE_BYTES, OptimiserFacts

OPTIMISERS["momentum"] = OptimiserFacts(
    "tests.train.third_optimiser:Momentum",
    about="gradients added up",
    moments=("velocity",),
    traffic_bytes=dict.fromkeys(STATE_BYTES, 92),
    only_with={"train.optimiser_state": ("fp32",)},
)


class Momentum(torch.optim.Optimizer):
    """The velocity is `adam_beta1` of what it was, plus the gradient."""

    found_inf: torch.Tensor | None = None

    def __init__(self, groups: Iterable[dict[str, Any]], train: Any):
        super().__init__(groups, {"lr": 0.0, "beta": train.adam_beta1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        taken = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] += taken
                state["velocity"].mul_(group["beta"]).add_(parameter.grad)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(state["velocity"], alpha=-group["lr"])


def facts_of(folder: Path) -> dict[str, Any]:
    from kielo.checkpoint.read_checkpoint import read_tensors
    from kielo.plan.run_to_plan import RunToPlan
    from kielo.plan.search import search
    from kielo.recipe.errors import KieloError
    from kielo.recipe.read import read_recipe
    from kielo.recipe.schema import json_schema
    from kielo.resolve.resolve import refuse_before_text
    from kielo.train.run import train
    from kielo.verify.preflight.files import room_needed
    from kielo.verify.rehearse import rehearse
    from tests.train import tiny_run

    planned = {}
    for name in ("adamw", "momentum"):
        run = RunToPlan.of_recipe(read_recipe("estonian_llama31_8b", [f'train.optimiser="{name}"']).recipe)
        (one, *_) = search(run, [4]).ranked[4]
        planned[name] = one.seconds["optimiser"], one.bytes["optimiser"]
    tiny_run.write_tokens(folder / "tokens")
    resolved = tiny_run.resolve(
        folder, optimiser="momentum", total_steps=6, train_folder=str(folder / "train")
    )
    rehearsed = rehearse(resolved, 0)
    assert train(resolved, max_steps=3).outcome == "requeue"
    assert train(resolved).outcome == "finished"
    whole = tiny_run.resolve(
        folder, optimiser="momentum", total_steps=6, train_folder=str(folder / "whole" / "train")
    )
    train(whole)
    tensors, expected = (
        read_tensors(folder / of / "checkpoints" / "step_00000006") for of in ("train", "whole/train")
    )
    recipe = read_recipe(
        "demo_estonian", ['train.optimiser="momentum"', 'train.optimiser_state="bf16"']
    ).recipe
    refused = ""
    try:
        refuse_before_text(recipe)
    except KieloError as error:
        refused = str(error)
    return {
        "planned": planned,
        "rehearsed": [rehearsed["state_bytes"], rehearsed["computed_state_bytes"]],
        "elements": sum(t.numel() for name, t in tensors.items() if name.startswith("model/")),
        "parameters": sum(name.startswith("model/") for name in tensors),
        "room": room_needed(resolved)[0],
        "state": sorted({name.rpartition("/")[2] for name in tensors if name.startswith("optimiser/")}),
        "is_equal": expected.keys() == tensors.keys()
        and all(torch.equal(expected[name], tensors[name]) for name in expected),
        "has_moved": any(t.any().item() for name, t in tensors.items() if name.startswith("optimiser/")),
        "refused": refused,
        "in_schema": "momentum: gradients added up" in json.dumps(json_schema()),
    }


if __name__ == "__main__":
    print(json.dumps(facts_of(Path(sys.argv[1]))))
