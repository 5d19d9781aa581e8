"""Kielo's model of a checkpoint in fp32, whole, on one device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kielo.checkpoint.read_checkpoint import read_tensors
from kielo.models import families
from kielo.recipe.sections import CompleteModel


def load_model(
    checkpoint: Path,
    config: CompleteModel,
    device: torch.device,
    rounded: Mapping[str, torch.dtype] | None = None,
) -> Any:
    """Return the model with the weights of `checkpoint`, as it computes without training.

    rounded: our parameter → the dtype that its weights are rounded to first. Raise KieloError for a damaged
    checkpoint.
    """
    with torch.device("meta"):
        model = families.build_model(config)
    names = [name for name, _ in model.named_parameters()]  # a tied head is named once
    tensors = read_tensors(checkpoint, [f"model/{name}" for name in names])
    weights = {
        name: tensors.pop(f"model/{name}").to(device, (rounded or {}).get(name)).float() for name in names
    }
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie()
    model.reset_buffers(device)
    return model.eval()
