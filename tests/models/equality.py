"""Kielo's model beside transformers' own with the same weights: what the equality tests compare."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from kielo.checkpoint.tensor_table import cut
from kielo.models import families
from kielo.models.blocks.decoder import Decoder
from kielo.verify.hugging_face_side import stored_parameters
from tests.models.tiny_configs import LENGTH, VOCABULARY


def pair(config: dict[str, Any], folder: Path) -> tuple[Decoder, PreTrainedModel]:
    """(ours, theirs) in fp32: theirs saved with its config to `folder`, ours made of what lies there.

    Every weight is random, norms too, so that a norm or bias in the wrong place shows.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given = {key: value for key, value in config.items() if key != "model_type"}
    is_encoder = families.FAMILIES[config["model_type"]].is_encoder
    theirs = (
        (AutoModelForMaskedLM if is_encoder else AutoModelForCausalLM)
        .from_config(
            AutoConfig.for_model(config["model_type"], **copy.deepcopy(given)), attn_implementation="eager"
        )
        .float()
    )
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(0, 0.1)
            if "norm" in name and name.endswith("weight") or "ln_" in name and name.endswith("weight"):
                parameter.add_(1)
    theirs.eval()  # dropout, where a config has it, is not what is compared
    theirs.save_pretrained(folder)
    model = families.read_hf_config(folder)
    ours = families.build_model(model)
    fill(ours, load_file(folder / "model.safetensors"))
    return ours, theirs


@torch.no_grad()
def fill(ours: Decoder, stored: dict[str, Tensor]) -> None:
    pieces = families.module(ours.config.model_type, "tables").to_hugging_face(ours.config)
    for name, parameter in ours.named_parameters():
        parameter.copy_(cut(stored[pieces[name].name], pieces[name], parameter.shape))


def their_gradients(ours: Decoder, theirs: PreTrainedModel) -> dict[str, Tensor]:
    """Our parameter name → transformers' gradient of it."""
    pieces = families.module(ours.config.model_type, "tables").to_hugging_face(ours.config)
    named = stored_parameters(theirs, pieces)
    return {
        name: cut(named[pieces[name].name].grad, pieces[name], parameter.shape)
        for name, parameter in ours.named_parameters()
    }


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """(inputs, labels), each [3, LENGTH]; some labels are not counted."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (3, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :5] = -100
    return tokens[:, :-1], labels


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


def our_logits(ours: Decoder, inputs: Tensor, documents: Tensor | None = None) -> Tensor:
    return ours.logits(ours(inputs, documents))


def train(model: nn.Module, logits, steps: int = 20) -> list[float]:
    """Losses of plain AdamW steps; eps 1e-6, for at 1e-8 the rounding of a gradient of zero is
    a full step.
    """
    adamw = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6, weight_decay=0.0)
    losses = []
    for step in range(steps):
        inputs, labels = batch(step)
        adamw.zero_grad()
        loss = mean_loss(logits(inputs), labels)
        loss.backward()
        losses.append(loss.item())
        adamw.step()
    return losses


def saved_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())
