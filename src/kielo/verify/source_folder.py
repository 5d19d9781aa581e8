"""The folder of `model.weights`: Kielo's import of it beside transformers' own reading, before any step.

Only here do the two sides share nothing but the folder: the later steps begin with weights and a model that
Kielo has read. Logits in fp32 on the processor are compared, and settings that few tokens do not show.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kielo.artifact.verify_results import Settings, SourceFolder
from kielo.checkpoint.hugging_face_import import load_model_weights
from kielo.models import families
from kielo.models.blocks.decoder import Decoder
from kielo.models.family_tables import layer_types
from kielo.models.parameter_shapes import parameters
from kielo.parallel.materialise import materialise
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import CompleteModel
from kielo.train.feed import MicroBatch
from kielo.verify import hugging_face_side, kielo_side
from kielo.verify.hugging_face_side import hugging_face_batch
from kielo.verify.trace import Trace, Values, differing, first_difference, relative_difference, trace_forward

# A model whose fp32 weights take more than this twice (4 billion parameters) is compared with two layers.
WHOLE_MODEL_BYTES = 32 * 2**30
# Largest relative difference of logits, and of a layer's values: rounding is under 1e-5 in fp32.
LOGITS_TOLERANCE = 1e-4
_SEQUENCES, _SEED = 2, 0


def compare_source(folder: Path, model: CompleteModel, sequence_length: int) -> SourceFolder:
    """Compare the folder's import as `model` with transformers' reading of it.

    model: the run's. With `model.transplant` the folder's own vocabulary is compared, because no file has the
    rows that Kielo makes for another vocabulary. Raise KieloError as the import does.
    """
    if is_transplanted := model.transplant is not None:
        own = families.read_hf_config(folder).vocab_size
        model = model.model_copy(update={"transplant": None, "vocab_size": own})
    if model.vocab_size is None:
        raise KieloError(f"{folder}: its config.json has no vocab_size")
    config = AutoConfig.from_pretrained(folder)
    windows = {"window of each layer": (_our_windows(model), _their_windows(config))}
    number = 2 * 4 * parameters(model)
    compared = model if number <= WHOLE_MODEL_BYTES else _two_layers(model, config)
    length = min(sequence_length, model.max_position_embeddings or sequence_length)
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(0, model.vocab_size, (_SEQUENCES, length), generator=generator)
    theirs, ours = _their_model(folder, config), _our_model(folder, compared, model)
    pieces = families.module(model.model_type, "tables").to_hugging_face(compared)
    modules = hugging_face_side.modules_by_our_names(theirs, pieces)
    arguments = hugging_face_batch(MicroBatch(tokens, tokens, None), theirs, False).arguments
    with torch.no_grad():
        their_trace = trace_forward(modules, lambda: theirs(**arguments, use_cache=False).logits)
        our_trace = kielo_side.trace_model(ours, modules, lambda: ours.logits(ours(tokens)))
    return _comparison(
        (our_trace, their_trace),
        ({name: one for name, (one, _) in windows.items()} | kielo_side.model_settings(ours)),
        ({name: one for name, (_, one) in windows.items()} | hugging_face_side.model_settings(theirs)),
        {
            "folder": str(folder),
            "layers": compared.num_hidden_layers,
            "layers_of_model": model.num_hidden_layers,
            "is_transplanted": is_transplanted,
            "sequence_length": length,
        },
    )


def _comparison(
    traces: tuple[Trace, Trace], ours: Values, theirs: Values, what: dict[str, Any]
) -> SourceFolder:
    our_trace, their_trace = traces
    our_logits = our_trace.logits[..., : their_trace.logits.shape[-1]]
    relative = relative_difference(our_logits, their_trace.logits)
    wrong = differing(ours, theirs)
    passed = relative <= LOGITS_TOLERANCE and not wrong
    first = None if passed else first_difference(our_trace, their_trace, LOGITS_TOLERANCE)
    return SourceFolder(
        passed=passed,
        logits_max_difference=(our_logits - their_trace.logits).abs().max().item(),
        logits_relative_difference=relative,
        settings=Settings(ours=ours, theirs=theirs, differing=wrong),
        layer=first.layer if first else None,
        where=first.where if first else None,
        **what,
    )


def _our_model(folder: Path, model: CompleteModel, stored: CompleteModel) -> Decoder:
    with torch.device("meta"):
        ours = families.build_model(model)
    materialise(ours, torch.device("cpu"), None)
    load_model_weights(dict(ours.named_parameters()), folder, model, stored=stored)
    return ours.eval()


def _their_model(folder: Path, config: PretrainedConfig) -> PreTrainedModel:
    load = AutoModelForCausalLM.from_pretrained
    return load(folder, config=config, dtype=torch.float32, attn_implementation="eager").eval()


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
