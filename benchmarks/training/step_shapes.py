"""The shapes of the step benchmark: a name → a recipe, its resolved numbers and its model FLOPs.

A shape is a recipe like any other, so what is timed is what `kielo train` would assemble for it, and `kielo
rehearse` can say what it should hold.
"""

from dataclasses import dataclass, field
from typing import Any

from kielo.models.parameter_shapes import layer_parameters, parameters, token_flops
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Model, Recipe
from kielo.resolve.activation_bytes import layer_bytes
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import Resolved
from kielo.resolve.text import imagined_text

LEARNING_RATE = 1e-4
GPU_TOKENS_PER_STEP = 131_072
# Bytes of a parameter between steps: fp32 with its gradient, and two moments.
_STATE_BYTES = {"fp32": 16, "bf16": 12}
_COPY_BYTES = 2  # and of the bf16 copy that is multiplied
# Of a logit where no contender makes them in chunks: bf16, fp32, the log-softmax, and two gradients.
_LOGIT_BYTES = 16
# What an eager model under autocast keeps of a layer, by what Kielo keeps: its norms give fp32, and each
# matrix keeps a bf16 copy of that for itself. Counted by hand for transformers' Llama.
_HUNGRIEST = 1.5
_USABLE = 0.92  # of the free memory: workspaces of kernels, and pieces that the allocator cannot join


@dataclass(frozen=True)
class Shape:
    """A shape of a model and its step.

    `model`: keys of `[model]`, of the whole published model. `layers`: how many of its layers are trained,
    None for as many as one device holds beside AdamW in fp32.
    """

    model: dict[str, Any]
    sequence_length: int
    micro_batch_sequences: int
    tokens_per_step: int
    layers: int | None
    is_for_gpu: bool = True
    others: dict[str, Any] = field(default_factory=dict)  # further keys of [train]


# Llama 3 (Dubey et al. 2024, arXiv:2407.21783, table 3) and 3.2 1B. Its scaling of RoPE, which costs nothing
# in a step, is left out, for not every contender has it.
_LLAMA_3 = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "rope_theta": 500_000.0,
}
SHAPES = {
    "llama_8b": Shape(
        _LLAMA_3 | {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
            "head_dim": 128},
        sequence_length=8192, micro_batch_sequences=1, tokens_per_step=GPU_TOKENS_PER_STEP, layers=None,
    ),
    "llama_1b": Shape(
        _LLAMA_3 | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
                    "tie_word_embeddings": True},
        sequence_length=8192, micro_batch_sequences=1, tokens_per_step=GPU_TOKENS_PER_STEP, layers=16,
    ),
    "llmjp_172b": Shape(
        read_recipe("llmjp_172b").recipe.model.model_dump(exclude_unset=True) | {"head_dim": 128},
        sequence_length=4096, micro_batch_sequences=1, tokens_per_step=GPU_TOKENS_PER_STEP, layers=2,
    ),
    # 24 M parameters: the shape of the peers' table that the project started from.
    "tiny": Shape(
        {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 10, "num_attention_heads": 6,
         "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 8192},
        sequence_length=512, micro_batch_sequences=4, tokens_per_step=4 * 512, layers=10, is_for_gpu=False,
    ),
}  # fmt: skip


def _demo() -> Shape:
    """Returns the shipped recipe's model, and one of its steps as one micro-batch."""
    recipe = read_recipe("demo_estonian").recipe
    length, tokens = recipe.dataset.sequence_length, recipe.train.tokens_per_step
    model = recipe.model.model_dump(exclude_unset=True) | {
        "vocab_size": recipe.tokenizer.vocab_size,
        "head_dim": recipe.model.hidden_size // recipe.model.num_attention_heads,
    }
    return Shape(model, length, tokens // length, tokens, recipe.model.num_hidden_layers, is_for_gpu=False)


SHAPES["demo"] = _demo()


def recipe_of(
    name: str, layers: int, precision: str, is_emulated: bool = False, moments: str = "fp32"
) -> Recipe:
    """Returns the recipe of shape `name` with so many layers and AdamW's moments in `moments`.

    is_emulated: FP8 is rounded but multiplied in a wider precision, on devices without FP8.
    """
    shape = SHAPES[name]
    train = {
        "tokens": shape.tokens_per_step,
        "tokens_per_step": shape.tokens_per_step,
        "micro_batch_sequences": shape.micro_batch_sequences,
        "learning_rate": LEARNING_RATE,
        "precision": precision,
        "fp8": {"emulate": is_emulated},
        "optimiser_state": moments,
    }
    return Recipe(
        name=f"step_{name}",
        language="en",
        corpus={"sources": ["random tokens"]},
        dataset={"sequence_length": shape.sequence_length},
        model=shape.model | {"num_hidden_layers": layers, "max_position_embeddings": shape.sequence_length},
        train=train | shape.others,
    )


def resolved_of(
    name: str, layers: int, precision: str, device: str, device_name: str, moments: str = "fp32"
) -> Resolved:
    """Resolves one rank of the shape on `device` ("cpu" or "cuda"), whose driver names it `device_name`."""
    recipe = recipe_of(name, layers, precision, precision == "fp8" and device == "cpu", moments)
    return resolve(recipe, "", 1, device, accelerator=device_name, text=imagined_text(recipe))


def layers_that_fit(name: str, free_bytes: float, moments: str = "fp32") -> int:
    """Returns the shape's layers, or as many as train in `free_bytes` of a device with every contender.

    18 bytes a parameter (14 with `moments` in bf16), 16 bytes for each logit of a micro-batch, and 1.5 times
    what Kielo keeps of a layer's activations. KieloError where not one layer does.
    """
    shape = SHAPES[name]
    if shape.layers is not None:
        return shape.layers
    whole = whole_model(name)
    tokens = shape.micro_batch_sequences * shape.sequence_length
    layout = recipe_of(name, 1, "bf16").layout
    kept, _ = layer_bytes(whole, layout, 2)
    parameter_bytes = _STATE_BYTES[moments] + _COPY_BYTES
    each = parameter_bytes * layer_parameters(whole) + _HUNGRIEST * kept * tokens
    ends = parameter_bytes * parameters(with_layers(whole, 0)) + _LOGIT_BYTES * tokens * whole.vocab_size
    layers = int((_USABLE * free_bytes - ends) // each)
    if layers < 1:
        raise KieloError(f"{name}: not one layer fits {free_bytes / 1e9:.0f} GB. Fix: --shape tiny")
    return min(layers, whole.num_hidden_layers)


def state_bytes(model: Model, moments: str) -> int:
    """Returns bytes of one contender between two steps."""
    return _STATE_BYTES[moments] * parameters(model)


def whole_model(name: str) -> Model:
    """Returns the published model with all layers."""
    layers = SHAPES[name].model["num_hidden_layers"]
    return resolved_of(name, layers, "bf16", "cpu", "cpu").identity.model


def with_layers(model: Model, layers: int) -> Model:
    return model.model_copy(update={"num_hidden_layers": layers})


def flops_of(name: str, layers: int) -> dict[str, float]:
    """Returns model FLOPs of a token, by one formula for all contenders.

    It counts 6 for each parameter but the embedding's, and 6 × layers × width × sequence for causal
    attention; nothing for recomputation.
    """
    shape, whole = SHAPES[name], whole_model(name)
    model = with_layers(whole, layers)
    per_token = token_flops(model, shape.sequence_length)
    head = 6 * model.vocab_size * model.hidden_size
    return {
        "parameters": parameters(model),
        "flops_per_token": per_token,
        "head_share_of_flops": head / per_token,
        "whole_model_parameters": parameters(whole),
        "whole_model_flops_per_token": token_flops(whole, shape.sequence_length),
    }
