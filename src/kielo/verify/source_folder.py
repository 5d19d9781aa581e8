"""Checks of a folder of Hugging Face weights: the import beside transformers' reading, and position heads.

Only in `compare_source` do the two sides of parity share nothing but the folder: the later steps begin with
weights and a model that Kielo has read. Logits in fp32 on the processor are compared, and settings that few
tokens do not show.

`verify_position_heads` tests the two ways to cut relative positions into heads, for the files of an LTG-BERT.
Names and shapes of the tensors are the same in both, so a wrong choice loads without an error. The right way
has the lower loss of hidden tokens. Shape letters: n = sequences, s = tokens of a sequence.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict, get_args

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from kielo.artifact.verify_results import Settings, SourceFolder
from kielo.artifact.weights_folder import CONFIG_FILE, resolve_weights
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.dataset.batches import NOT_COUNTED, Batch
from kielo.dataset.masking import Masking, masking_vocabulary
from kielo.models import families
from kielo.models.blocks.decoder import Decoder
from kielo.models.family_tables import layer_types
from kielo.models.parameter_shapes import parameters
from kielo.parallel.materialise import materialise
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel
from kielo.tokenizer.load import TextTokenizer, encode, end_of_text_id, load_tokenizer, role_id
from kielo.train.feed import MicroBatch
from kielo.verify import hugging_face_side, kielo_side
from kielo.verify.hugging_face_side import hugging_face_batch
from kielo.verify.trace import differing, first_difference, relative_difference, trace_forward

# A model whose fp32 weights take more than this twice (4 billion parameters) is compared with two layers.
WHOLE_MODEL_BYTES = 32 * 2**30
# Largest relative difference of logits, and of a layer's values: rounding is under 1e-5 in fp32.
LOGITS_TOLERANCE = 1e-4
_SEQUENCES, _SEED = 2, 0

WAYS = get_args(CompleteModel.model_fields["position_heads"].annotation)
MOST_SEQUENCES, MOST_TOKENS = 64, 128  # a hundredth of a nat is then seen
_RATE, _HIDING_SEED = 0.15, 1
_MOST_CHARACTERS = 16 * MOST_SEQUENCES * MOST_TOKENS
_SEQUENCES_AT_ONCE = 8


def compare_source(folder: Path, model: CompleteModel, sequence_length: int) -> SourceFolder:
    """Compare the folder's import as `model` with transformers' reading of it.

    model: the run's. With `model.transplant` the folder's own vocabulary is compared, because no file has the
    rows that Kielo makes for another vocabulary. Raise KieloError as the import does.
    """
    if is_transplanted := model.transplant is not None:
        own = families.read_hf_config(folder).vocab_size
        model = model.model_copy(update={"transplant": None, "vocab_size": own})
    config = AutoConfig.from_pretrained(folder)
    windows = _our_windows(model), _their_windows(config)
    is_whole = 2 * 4 * parameters(model) <= WHOLE_MODEL_BYTES
    compared = model if is_whole else _two_layers(model, config)
    length = min(sequence_length, model.max_position_embeddings)
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(0, model.vocab_size, (_SEQUENCES, length), generator=generator)
    load = AutoModelForCausalLM.from_pretrained
    theirs = load(folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()
    ours = _our_model(folder, compared, model)
    pieces = families.module(model.model_type, "tables").to_hugging_face(compared)
    modules = hugging_face_side.modules_by_our_names(theirs, pieces)
    arguments = hugging_face_batch(MicroBatch(tokens, tokens, None), theirs, False).arguments
    with torch.no_grad():
        their_trace = trace_forward(modules, lambda: theirs(**arguments, use_cache=False).logits)
        our_trace = kielo_side.trace_model(ours, modules, lambda: ours.logits(ours(tokens)))
    our_settings = {"window of each layer": windows[0]} | kielo_side.model_settings(ours)
    their_settings = {"window of each layer": windows[1]} | hugging_face_side.model_settings(theirs)
    wrong = differing(our_settings, their_settings)
    our_logits = our_trace.logits[..., : their_trace.logits.shape[-1]]
    relative = relative_difference(our_logits, their_trace.logits)
    passed = relative <= LOGITS_TOLERANCE and not wrong
    first = None if passed else first_difference(our_trace, their_trace, LOGITS_TOLERANCE)
    return SourceFolder(
        passed=passed,
        folder=str(folder),
        layers=compared.num_hidden_layers,
        layers_of_model=model.num_hidden_layers,
        is_transplanted=is_transplanted,
        sequence_length=length,
        logits_max_difference=(our_logits - their_trace.logits).abs().max().item(),
        logits_relative_difference=relative,
        settings=Settings(ours=our_settings, theirs=their_settings, differing=wrong),
        layer=first.layer if first else None,
        where=first.where if first else None,
    )


def _our_model(folder: Path, model: CompleteModel, stored: CompleteModel) -> Decoder:
    with torch.device("meta"):
        ours = families.build_model(model)
    materialise(ours, torch.device("cpu"), None)
    load_model_weights(dict(ours.named_parameters()), folder, model, stored=stored)
    return ours.eval()


def _two_layers(model: CompleteModel, config: PretrainedConfig) -> CompleteModel:
    """Return `model`, and change `config`, to the first two layers, of two kinds if the model has two."""
    kinds = layer_types(model)
    both = (kinds[0], next((kind for kind in kinds if kind != kinds[0]), kinds[0]))[: len(kinds)]
    if getattr(config, "layer_types", None):
        config.layer_types = list(both)
    config.num_hidden_layers = len(both)
    changes = {"num_hidden_layers": len(both), "layer_types": both if model.layer_types else None}
    return model.model_copy(update=changes)


def _our_windows(model: CompleteModel) -> list[int | None]:
    with torch.device("meta"):
        built = families.build_model(model)
    return [built.kinds[layer.kind].window for layer in built.layers.values()]


def _their_windows(config: PretrainedConfig) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    kinds: Iterable[str] | None = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    return [None if kind == "full_attention" else window for kind in kinds]


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
    length = min(MOST_TOKENS, model.max_position_embeddings)
    sequences_ns = _sequences(load_tokenizer(source), text, length)
    samples_n = np.arange(len(sequences_ns))
    whole = Batch(sequences_ns, np.zeros_like(sequences_ns), None, samples_n)
    hidden = Masking(_HIDING_SEED, "subword", masking_vocabulary(source, "subword")).hide(whole, _RATE)
    losses = {way: _loss(source, model.model_copy(update={"position_heads": way}), hidden) for way in WAYS}
    return {
        "source": str(source),
        "taken": model.position_heads,
        "losses": losses,
        "hidden_tokens": int((hidden.labels != NOT_COUNTED).sum()),
        "passed": losses[model.position_heads] == min(losses.values()),
    }


def position_heads_verdict(result: PositionHeads) -> str:
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
    begins = np.tile(np.array(first, np.int64), (num_rows, 1))
    ends = np.full((num_rows, 1), end_of_text_id(tokenizer))
    return np.concatenate([begins, rows, ends], axis=1)


@torch.inference_mode()
def _loss(source: Path, config: CompleteModel, hidden: Batch) -> float:
    model = _our_model(source, config, config)
    inputs_ns, labels_ns = torch.from_numpy(hidden.inputs), torch.from_numpy(hidden.labels)
    nats = torch.zeros((), dtype=torch.float64)
    for inputs, labels in zip(
        inputs_ns.split(_SEQUENCES_AT_ONCE), labels_ns.split(_SEQUENCES_AT_ONCE), strict=True
    ):
        is_label = labels != NOT_COUNTED
        logits = model.logits(model(inputs)[is_label])
        nats += F.cross_entropy(logits, labels[is_label], reduction="sum")
    return float(nats / (labels_ns != NOT_COUNTED).sum())
