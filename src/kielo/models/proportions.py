"""A model of a given size, in its family's usual proportions: `[model]` with `params` → with a shape.

The anchors are published shapes (tests/models/test_published_sizes.py, and the config.json of SmolLM2, Qwen3,
Qwen2.5, Pythia and Mistral). Between two, depth and width are interpolated over the size's logarithm.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from kielo.models.families import complete, family_defaults
from kielo.models.parameter_shapes import parameters
from kielo.recipe.amounts import short_amount
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model

# Sizes within this share of `params` are equally good: the shape decides among them.
_NEAR_ENOUGH = 0.01
_FARTHEST = 0.05
# A head that is a larger share of the model is tied to the embedding.
_MOST_IN_HEAD = 0.15
_ROUNDING = 1e-9
_DIMENSIONS = ("head_dim", "hidden_size", "num_hidden_layers", "intermediate_size")
Shape = dict[str, int | None]  # keys of [model] → values


@dataclass(frozen=True)
class Proportions:
    """A family's usual shapes. anchors: (parameters, layers, hidden_size) of published models, ascending.

    mlp_ratio: intermediate_size / hidden_size. is_grouped: 8 heads of keys and values from a billion
    parameters on. wide_heads: heads of 256 numbers, apart from hidden_size, as Gemma's.
    """

    anchors: tuple[tuple[float, int, int], ...]
    mlp_ratio: float
    is_grouped: bool = False
    wide_heads: bool = False


_TABLE = """
    gpt        1.25e8 12 768   3.5e8 24 1024   1.3e9 24 2048   2.7e9 32 2560   6.7e9 32 4096   1.3e10 40 5120
               3e10 48 7168   6.6e10 64 9216   1.75e11 96 12288;
    llama      1.35e8 30 576   3.6e8 32 960   1.24e9 16 2048   3.2e9 28 3072   8e9 32 4096   1.4e10 40 5120
               3.25e10 60 6656   7e10 80 8192   4.05e11 126 16384;
    qwen       4.9e8 24 896   1.5e9 28 1536   3.1e9 36 2048   7.6e9 28 3584   1.4e10 48 5120   3.2e10 64 5120
               7.2e10 80 8192;
    olmo       1.9e8 12 768   1.5e9 16 2048   7.3e9 32 4096   1.37e10 40 5120   3.2e10 64 5120   7e10 80 8192;
    gemma      2.7e8 18 640   1e9 26 1152   2.6e9 26 2304   9.2e9 42 3584   2.7e10 46 4608   7e10 64 6144;
    neox       1.6e8 12 768   4.1e8 24 1024   1.4e9 24 2048   2.8e9 32 2560   6.9e9 32 4096   1.2e10 36 5120
               2e10 44 6144   7e10 64 9216;
    bloom      5.6e8 24 1024   1.1e9 24 1536   1.7e9 24 2048   3e9 30 2560   7.1e9 30 4096   1.33e10 40 5120
               3.4e10 54 7168   1.76e11 70 14336;
    ltg_bert   1.5e7 12 192   4e7 12 384   1.23e8 12 768   3.54e8 24 1024   1.3e9 24 2048   6.7e9 32 4096
               7e10 80 8192;
    modernbert 1.49e8 22 768   3.95e8 28 1024   1.3e9 32 1920   6.7e9 40 4096   7e10 80 9216
"""
# Name, and (parameters, layers, hidden_size) of each model.
_ANCHORS = {
    name: tuple(zip(map(float, numbers[::3]), map(int, numbers[1::3]), map(int, numbers[2::3]), strict=True))
    for name, *numbers in map(str.split, _TABLE.split(";"))
}

PROPORTIONS: dict[str, Proportions] = {
    "llama": Proportions(_ANCHORS["llama"], 3.5, is_grouped=True),
    "mistral": Proportions(_ANCHORS["llama"], 3.5, is_grouped=True),
    "qwen2": Proportions(_ANCHORS["qwen"], 5.0, is_grouped=True),
    "qwen3": Proportions(_ANCHORS["qwen"], 3.5, is_grouped=True),
    "olmo2": Proportions(_ANCHORS["olmo"], 2.7),
    "olmo3": Proportions(_ANCHORS["olmo"], 2.7),
    "gemma2": Proportions(_ANCHORS["gemma"], 4.0, is_grouped=True, wide_heads=True),
    "gemma3_text": Proportions(_ANCHORS["gemma"], 4.0, is_grouped=True, wide_heads=True),
    "gpt2": Proportions(_ANCHORS["gpt"], 4.0),
    "opt": Proportions(_ANCHORS["gpt"], 4.0),
    "gpt_neox": Proportions(_ANCHORS["neox"], 4.0),
    "bloom": Proportions(_ANCHORS["bloom"], 4.0),
    # NorBERT 3's four sizes. Nothing larger is published: a GPT's shapes follow.
    "ltg_bert": Proportions(_ANCHORS["ltg_bert"], 8 / 3),
    # The base and large model, whose MLPs are 1.5 and 2.6 times as wide. Larger models are made up alike.
    "modernbert": Proportions(_ANCHORS["modernbert"], 2.0),
}


def with_shape(model: Model) -> Model:
    """Return `model` with the most usual shape within 1 % of `model.params`; KieloError beyond 5 %."""
    wanted = model.params
    assert wanted is not None and model.vocab_size is not None
    best = _nearest_shape(model.model_dump_json(exclude_unset=True))
    error = count(best) / wanted - 1
    if abs(error) > _FARTHEST:
        raise KieloError(
            f"model.params = {short_amount(wanted)}: no {model.model_type} of this size has a vocabulary of "
            f"{model.vocab_size:,} tokens; the nearest has {short_amount(count(best))}. Fix: "
            f"model.params = {short_amount(count(best))}, or a smaller tokenizer.vocab_size"
        )
    return best


@cache
def _nearest_shape(given: str) -> Model:
    """Return the model (JSON) with the most usual shape. It counts only shapes that can be the nearest."""
    model = Model.model_validate_json(given)
    wanted, usual = model.params or 0, PROPORTIONS[model.model_type]
    layers, hidden = usual_shape(usual.anchors, wanted)
    shapes = list(shapes_around(model, usual, layers, hidden))
    least = [unlikeness(shape, layers, hidden, usual) for shape in shapes]
    best, nearest = math.inf, model
    for index in sorted(range(len(shapes)), key=least.__getitem__):
        if least[index] > best + _ROUNDING:
            break
        shape = model.model_copy(update=shapes[index])
        found = distance(shape, wanted, layers, hidden, usual)
        if found < best:
            best, nearest = found, shape
    return nearest


def count(model: Model) -> int:
    """Return the number of parameters of a model with a shape, with 2048 positions (a GPT's) if unset."""
    return parameters(complete(model, model.max_position_embeddings or 2048))


def usual_shape(anchors: tuple[tuple[float, int, int], ...], wanted: int) -> tuple[float, float]:
    """Return (layers, hidden_size), interpolated. Beyond the anchors depth and width grow alike."""
    sizes = [size for size, _, _ in anchors]
    index = min(max(bisect_left(sizes, wanted), 1), len(anchors) - 1)
    (low, few, narrow), (high, many, wide) = anchors[index - 1], anchors[index]
    if not low <= wanted <= high:
        size, layers, hidden = anchors[0] if wanted < low else anchors[-1]
        growth = (wanted / size) ** (1 / 3)  # parameters grow with layers × hidden²
        return layers * growth, hidden * growth
    share = math.log(wanted / low) / math.log(high / low)
    return few * (many / few) ** share, narrow * (wide / narrow) ** share


def shapes_around(model: Model, usual: Proportions, layers: float, hidden: float) -> Iterator[Shape]:
    """Yield shapes around the usual one. From a billion parameters on they split over 8 tensor ranks."""
    for kind in _heads(usual, model.params or 0, hidden):
        for depth in range(max(1, int(layers * 0.7)), math.ceil(layers * 1.4) + 1):
            for width in _mlp_widths(usual, kind["hidden_size"]):
                shape: Shape = {
                    **kind,
                    "num_hidden_layers": depth,
                    "intermediate_size": width,
                    "params": None,
                }
                yield shape | _tying(model, kind["hidden_size"])


def _heads(usual: Proportions, wanted: int, hidden: float) -> Iterator[dict[str, int]]:
    """Yield hidden_size with its heads, of 64 numbers below a billion parameters and mostly 128 above."""
    if usual.wide_heads:
        heads = 4 if wanted < 1.6e9 else 8 if wanted < 5e9 else 16 if wanted < 1.6e10 else 32
        head_dim = 256 if heads < 32 else 128
        for size in range(max(128, int(hidden * 0.6) // 128 * 128), int(hidden * 1.5) + 128, 128):
            groups = max(1, heads // 4 if heads == 4 else heads // 2)
            yield _heads_of(size, heads, groups, head_dim)
        return
    step = 8 if wanted >= 1e9 else 4 if wanted >= 2.5e8 else 1
    for head_dim in (64,) if wanted < 1e9 else (64, 80, 96, 128):
        few = max(step, int(hidden * 0.6 / head_dim) // step * step)
        for heads in range(few, int(hidden * 1.5 / head_dim) + step + 1, step):
            groups = _groups(heads) if usual.is_grouped else heads
            yield _heads_of(heads * head_dim, heads, groups, head_dim)


def _heads_of(hidden: int, heads: int, groups: int, head_dim: int) -> dict[str, int]:
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return dict(zip(names, (hidden, heads, groups, head_dim), strict=True))


def _groups(heads: int) -> int:
    """Return the heads of keys and values: 8 if they divide the heads, else about a third of them."""
    if heads % 8 == 0 and heads > 8:
        return 8
    return max(number for number in range(1, max(2, heads // 2 + 1)) if heads % number == 0)


def _mlp_widths(usual: Proportions, hidden: int) -> list[int]:
    """Return widths around the usual ratio in multiples of 256, or the ratio alone if it is 4."""
    if usual.mlp_ratio == 4.0 and not usual.wide_heads:
        return [4 * hidden]
    multiple = 256 if hidden >= 1024 else 64
    nearest = round(usual.mlp_ratio * hidden / multiple)
    spread = max(1, nearest // 12)
    return [
        multiple * (nearest + more)
        for more in (0, -spread // 2, spread // 2, -spread, spread)
        if nearest + more > 0
    ]


def _tying(model: Model, hidden: int) -> dict[str, bool]:
    """Tie the head of a small model to its embedding, if the recipe and the family leave that open."""
    if model.tie_word_embeddings is not None or family_defaults(model.model_type)["tie_word_embeddings"]:
        return {}
    is_large = (model.vocab_size or 0) * hidden > _MOST_IN_HEAD * (model.params or 0)
    return {"tie_word_embeddings": True} if is_large else {}


def distance(shape: Model, wanted: int, layers: float, hidden: float, usual: Proportions) -> float:
    error = abs(math.log(count(shape) / wanted))
    alike = unlikeness({name: getattr(shape, name) for name in _DIMENSIONS}, layers, hidden, usual)
    return 50 * max(0.0, error - _NEAR_ENOUGH) + error + alike


def unlikeness(shape: Shape, layers: float, hidden: float, usual: Proportions) -> float:
    """Return how far a shape is from the usual shape, whatever its size."""
    head_dim, size, depth, width = (shape[name] or 0 for name in _DIMENSIONS)
    # An odd number of layers does not split into pipeline stages.
    is_narrow_head = size >= 2500 and head_dim == 64
    oddity = 0.15 * (head_dim in (80, 96)) + 0.2 * is_narrow_head + 0.03 * (depth % 2)
    return (
        abs(math.log(depth / layers))
        + abs(math.log(size / hidden))
        + abs(math.log(width / (usual.mlp_ratio * size)))
        + oddity
    )
