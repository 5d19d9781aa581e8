"""The tiny model and random text that every layout must train alike, and their training on one process.

A recipe and switches → a `Subject`, the arrays of its steps, and the `Outcome` of training it plainly:
without mesh, FSDP, chunked loss or micro-batches. Shape letters: b = sequences, s = tokens of a sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kielo.artifact.weights_folder import resolve_weights
from kielo.dataset.batches import NOT_COUNTED, causal_documents
from kielo.models import families
from kielo.models.blocks.decoder import Decoder
from kielo.models.blocks.init import seeded_normal
from kielo.models.piece import Box
from kielo.recipe.sections import CompleteModel, Model, Recipe, TrainIdentity
from kielo.train.optimiser import is_decayed
from kielo.verify.trace import gradient_of

SEQUENCES, LENGTH, VOCABULARY = 8, 32, 90
HEAD_DIM = 8
WINDOW = 9  # shorter than a sequence, and than the half of one
_COUNTING_ROWS = 8  # as many rows after each other count other numbers of labels


@dataclass(frozen=True)
class Sizes:
    """Sizes of the test model, which every axis of a layout must divide. The defaults are for up to 8 ranks.

    With 128 `vocabulary_rows` one of four tensor ranks has some padding and one has only padding.
    """

    sequences: int = SEQUENCES
    length: int = LENGTH
    layers: int = 4
    key_value_heads: int = 4
    intermediate_size: int = 96
    vocabulary_rows: int = 128

    def of_model(self) -> dict[str, Any]:
        """Return the model's keys. The initial range makes attention uneven, so that a wrong position or
        mask shows.
        """
        heads = 2 * self.key_value_heads
        return {
            "hidden_size": heads * HEAD_DIM,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCABULARY,
            "vocab_multiple": self.vocabulary_rows,
            "max_position_embeddings": self.length,
            "initializer_range": 0.1,
            "weights": None,
        }


# "losses" and "norms" [steps], "gradient/NAME" after the first step's backward, "weight/NAME" after the last
# step.
Outcome = dict[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """The tiny model and its training. Numbers that the recipe does not give are chosen to show faults."""

    model: CompleteModel
    seed: int
    mask_documents: bool
    train: TrainIdentity
    learning_rate: float = 1e-3
    frozen: bool = False  # all layers but the first and the last
    has_causal: bool = False  # an encoder of the hybrid objective: some sequences are causal
    sizes: Sizes = Sizes()


def subject(recipe: Recipe, switches: Mapping[str, Any], sizes: Sizes = Sizes()) -> Subject:  # noqa: B008
    """Make the subject of the recipe's family and switches, with the model at tiny sizes.

    Switches are RoPE, windows, caps, tying, biases, document masks, causal sequences and z-loss. Raise
    KieloError if the family cannot have these together.
    """
    model = recipe.model
    if model.weights is not None:
        model = families.read_hf_config(resolve_weights(model.weights))
    model = _tiny(model, switches.get("tied", model.tie_word_embeddings), sizes)
    families.check(model)
    train = TrainIdentity(
        objective=recipe.train.objective,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_epsilon=1e-6,  # with 1e-8 a tensor whose true gradient is zero moves by mere summation order
        max_gradient_norm=0.5,  # less than the norms that occur, so that clipping is tested too
        z_loss=switches.get("z_loss", recipe.train.z_loss),
    )
    mask_documents = switches.get("documents", recipe.dataset.mask_documents)
    frozen, has_causal = switches.get("frozen", False), recipe.train.causal_share > 0
    return Subject(
        model, recipe.seed, mask_documents, train, frozen=frozen, has_causal=has_causal, sizes=sizes
    )


def family_of(recipe: Recipe) -> str:
    """Return the model_type of a recipe, from its weights if it names some."""
    weights = recipe.model.weights
    return (recipe.model if weights is None else families.read_hf_config(resolve_weights(weights))).model_type


def _tiny(model: Model, tied: bool | None, of: Sizes) -> CompleteModel:
    """Return `model` with small sizes. Features that are more than a size (wide heads, windows) stay."""
    sizes = of.of_model() | {"tie_word_embeddings": tied}
    parts = families.module(model.model_type, "tables").layer_parts(model)
    if not parts.has_groups:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if parts.mlp_ratio is not None:
        sizes["intermediate_size"] = parts.mlp_ratio * sizes["hidden_size"]
    if model.head_dim is not None and model.head_dim * model.num_attention_heads != model.hidden_size:
        sizes["head_dim"] = 16
    if model.sliding_window is not None:
        sizes["sliding_window"] = WINDOW
    if model.layer_types is not None:
        kinds = sorted(set(model.layer_types))
        sizes["layer_types"] = tuple(kinds[number % len(kinds)] for number in range(of.layers))
    if model.query_pre_attn_scalar is not None:
        sizes["query_pre_attn_scalar"] = 12.0  # another number than head_dim
    known = {"weights", "vocab_multiple", *families.keys_of_family(model.model_type)}
    fitting = {key: value for key, value in sizes.items() if key in known}
    return families.complete(model.model_copy(update=fitting), of.length)


def step_arrays(of: Subject, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Return sample numbers [b] of one step, and its inputs, labels and document numbers, each [b, s].

    Each row counts another number of labels, so that a mean of means shows. Every third row is causal if the
    subject has causal sequences.
    """
    sequences, length = of.sizes.sequences, of.sizes.length
    generator = np.random.default_rng([of.seed, step])
    tokens = generator.integers(0, VOCABULARY, (sequences, length + 1))
    documents = np.cumsum(generator.random((sequences, length)) < 0.12, axis=1).astype(np.int32)
    if not of.mask_documents:
        documents[:] = 0
    if of.has_causal:
        documents[::3] = causal_documents(documents[::3])
    labels = tokens[:, 1:].copy()
    for row in range(sequences):
        labels[row, generator.permutation(length)[: 3 * (row % _COUNTING_ROWS)]] = NOT_COUNTED
    # And half a sequence: then a context rank may count no label at all.
    labels[-1, : length // 2] = NOT_COUNTED
    samples = np.arange((step - 1) * sequences, step * sequences)
    is_used = of.mask_documents or of.has_causal
    return samples, tokens[:, :-1].copy(), labels, documents if is_used else None


def first_value(of: Subject, name: str, shape: Sequence[int], box: Box | None = None) -> Tensor:
    """Return the family's initial value (of the box), fp32 on the CPU, with noise added to vectors.

    Among equal values or zeros a shard in the wrong place would not show. A bias that ten steps have made
    from zero is too small to be measured against itself.
    """
    value = families.module(of.model.model_type, "model").initial_value(name, shape, of.model, of.seed, box)
    if len(shape) > 1:
        return value
    return value + seeded_normal(f"spread of {name}", shape, 0.1, of.seed, box=box)


def freeze(of: Subject, model: nn.Module) -> None:
    """Freeze all layers but the first and the last, in place, if the subject says so.

    A stage's layers have the whole model's numbers.
    """
    if not of.frozen:
        return
    ends = ("layers.0.", f"layers.{of.model.num_hidden_layers - 1}.")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith("layers.") or name.startswith(ends))


def train_plainly(of: Subject, steps: int) -> Outcome:
    """Train on one process: the whole batch at once, torch's own cross-entropy, clipping and AdamW."""
    model = families.build_model(of.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(first_value(of, name, parameter.shape))
    freeze(of, model)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    decayed = [parameter for parameter in named.values() if is_decayed(parameter)]
    others = [parameter for parameter in named.values() if not is_decayed(parameter)]
    train = of.train
    decay = train.weight_decay
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    betas, eps = (train.adam_beta1, train.adam_beta2), train.adam_epsilon
    adamw = torch.optim.AdamW(groups, lr=of.learning_rate, betas=betas, eps=eps, fused=True)
    losses, norms, outcome = [], [], {}
    for step in range(1, steps + 1):
        adamw.zero_grad()
        loss = _plain_loss(model, of, step)
        loss.backward()
        if step == 1:
            outcome = {f"gradient/{name}": gradient_of(p).clone() for name, p in named.items()}
        losses.append(loss.detach())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), train.max_gradient_norm))
        adamw.step()
    outcome |= {f"weight/{name}": p.detach().clone() for name, p in named.items()}
    return outcome | {"losses": torch.stack(losses), "norms": torch.stack(norms)}


def _plain_loss(model: Decoder, of: Subject, step: int) -> Tensor:
    _, *arrays, numbers = step_arrays(of, step)
    inputs, labels = map(torch.from_numpy, arrays)
    documents = None if numbers is None else torch.from_numpy(numbers)
    logits = model.logits(model(inputs, documents))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_COUNTED)
    if of.train.z_loss:
        loss = loss + of.train.z_loss * logits.logsumexp(-1)[labels != NOT_COUNTED].square().mean()
    return loss
