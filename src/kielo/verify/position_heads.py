"""A test of the two ways to cut relative positions into heads, for the files of an LTG-BERT.

Names and shapes of the tensors are the same in both, so a wrong choice loads without an error. A Hugging Face
folder with weights and tokenizer, and text in a language of the model → the mean loss of hidden tokens for
each way. The right way has the lower loss. Shape letters: n = sequences, s = tokens of a sequence.
"""

from pathlib import Path
from typing import TypedDict, get_args

import numpy as np
import torch
from torch.nn import functional as F

from kielo.artifact.weights_folder import CONFIG_FILE, resolve_weights
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.dataset.batches import NOT_COUNTED, Batch
from kielo.dataset.masking import Masking, masking_vocabulary
from kielo.models import families
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel
from kielo.tokenizer.load import TextTokenizer, encode, end_of_text_id, load_tokenizer, role_id

WAYS = get_args(CompleteModel.model_fields["position_heads"].annotation)
MOST_SEQUENCES, MOST_TOKENS = 64, 128  # a hundredth of a nat is then seen
_RATE, _SEED = 0.15, 1
_MOST_CHARACTERS = 16 * MOST_SEQUENCES * MOST_TOKENS
_SEQUENCES_AT_ONCE = 8


class PositionHeads(TypedDict):
    """taken: the way that Kielo takes for the folder. losses: way → nats a hidden token."""

    source: str
    taken: str
    losses: dict[str, float]
    hidden_tokens: int
    passed: bool


def verify_position_heads(reference: str, text: Path) -> PositionHeads:
    """Compute the loss of hidden tokens of `text` with the weights of `reference` for each way.

    reference: a path, hf:FOLDER or hf:OWNER/NAME. Raise KieloError for a model without relative positions and
    for text of less than a sequence.
    """
    source = resolve_weights(reference)
    model = families.read_hf_config(source)
    if model.model_type != "ltg_bert":
        raise KieloError(
            f"{source / CONFIG_FILE}: model_type = {model.model_type!r} has no relative positions, which "
            "only an ltg_bert cuts into heads in two ways"
        )
    sequences_ns = _sequences(
        load_tokenizer(source), text, min(MOST_TOKENS, model.max_position_embeddings or MOST_TOKENS)
    )
    samples_n = np.arange(len(sequences_ns))
    whole = Batch(sequences_ns, np.zeros_like(sequences_ns), None, samples_n)
    hidden = Masking(_SEED, "subword", masking_vocabulary(source, "subword")).hide(whole, _RATE)
    losses = {way: _loss(source, model.model_copy(update={"position_heads": way}), hidden) for way in WAYS}
    return {
        "source": str(source),
        "taken": model.position_heads,
        "losses": losses,
        "hidden_tokens": int((hidden.labels != NOT_COUNTED).sum()),
        "passed": losses[model.position_heads] == min(losses.values()),
    }


def verdict(result: PositionHeads) -> str:
    taken, losses = result["taken"], result["losses"]
    if result["passed"]:
        return f"position_heads = {taken!r}, which Kielo takes for these files, has the lower loss."
    other = min(losses, key=losses.__getitem__)
    return (
        f"Kielo takes position_heads = {taken!r} for these files, and {other!r} has the lower loss. "
        f'Fix: "position_heads": "{other}" in {Path(result["source"]) / CONFIG_FILE}'
    )


def _sequences(tokenizer: TextTokenizer, text: Path, length: int) -> np.ndarray:
    """Return the text's first sequences, int64 [n, s], each with the control tokens around it."""
    try:
        with open(text, encoding="utf-8") as file:
            lines = [line for line in file.read(_MOST_CHARACTERS).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise KieloError(f"{text}: not a readable text file ({error})") from None
    ids = np.concatenate(
        [np.empty(0, np.int64), *(np.array(row, np.int64) for row in encode(tokenizer, lines))]
    )
    cls_id = role_id(tokenizer, "cls_token")
    first = [] if cls_id is None else [cls_id]
    inside = length - len(first) - 1
    num_rows = min(len(ids) // inside, MOST_SEQUENCES)
    if num_rows == 0:
        raise KieloError(
            f"{text}: {len(ids)} tokens of text, and one sequence of this model has {inside}. Fix: a "
            "longer text in a language of the model"
        )
    rows = ids[: num_rows * inside].reshape(num_rows, inside)
    begins, ends = (
        np.tile(np.array(first, np.int64), (num_rows, 1)),
        np.full((num_rows, 1), end_of_text_id(tokenizer)),
    )
    return np.concatenate([begins, rows, ends], axis=1)


@torch.inference_mode()
def _loss(source: Path, config: CompleteModel, hidden: Batch) -> float:
    model = families.build_model(config)
    load_model_weights(dict(model.named_parameters()), source, config)
    inputs_ns, labels_ns = torch.from_numpy(hidden.inputs), torch.from_numpy(hidden.labels)
    nats = torch.zeros((), dtype=torch.float64)
    for inputs, labels in zip(
        inputs_ns.split(_SEQUENCES_AT_ONCE), labels_ns.split(_SEQUENCES_AT_ONCE), strict=True
    ):
        is_label = labels != NOT_COUNTED
        logits = model.logits(model(inputs)[is_label])
        nats += F.cross_entropy(logits, labels[is_label], reduction="sum")
    return float(nats / (labels_ns != NOT_COUNTED).sum())
