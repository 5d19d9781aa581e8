"""The shapes that a size is given: the published ones between which it lies, and the choice among shapes."""

import math
from typing import Any

import pytest

from kielo.models import proportions
from kielo.models.proportions import PROPORTIONS, Proportions, count, distance, shapes_around, usual_shape
from kielo.recipe.amounts import parse_amount
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Model

# Parameters, layers and hidden_size as they were published; those of 70B of a family that has no such model
# follow its largest one.
_GPT_3_AND_OPT = (
    "125M 12 768, 350M 24 1024, 1.3B 24 2048, 2.7B 32 2560, 6.7B 32 4096, 13B 40 5120, 30B 48 7168, "
    "66B 64 9216, 175B 96 12288"
)
_SMOLLM_AND_LLAMA = (
    "135M 30 576, 360M 32 960, 1.24B 16 2048, 3.2B 28 3072, 8B 32 4096, 14B 40 5120, 32.5B 60 6656, "
    "70B 80 8192, 405B 126 16384"
)
_QWEN = "490M 24 896, 1.5B 28 1536, 3.1B 36 2048, 7.6B 28 3584, 14B 48 5120, 32B 64 5120, 72B 80 8192"
_OLMO = "190M 12 768, 1.5B 16 2048, 7.3B 32 4096, 13.7B 40 5120, 32B 64 5120, 70B 80 8192"
_GEMMA = "270M 18 640, 1B 26 1152, 2.6B 26 2304, 9.2B 42 3584, 27B 46 4608, 70B 64 6144"
PUBLISHED = {
    "llama": _SMOLLM_AND_LLAMA,
    "mistral": _SMOLLM_AND_LLAMA,
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt2": _GPT_3_AND_OPT,
    "opt": _GPT_3_AND_OPT,
    "gpt_neox": "160M 12 768, 410M 24 1024, 1.4B 24 2048, 2.8B 32 2560, 6.9B 32 4096, 12B 36 5120, "
    "20B 44 6144, 70B 64 9216",
    "bloom": "560M 24 1024, 1.1B 24 1536, 1.7B 24 2048, 3B 30 2560, 7.1B 30 4096, 13.3B 40 5120, "
    "34B 54 7168, 176B 70 14336",
    "ltg_bert": "15M 12 192, 40M 12 384, 123M 12 768, 354M 24 1024, 1.3B 24 2048, 6.7B 32 4096, 70B 80 8192",
    "modernbert": "149M 22 768, 395M 28 1024, 1.3B 32 1920, 6.7B 40 4096, 70B 80 9216",
}
# hidden_size, intermediate_size, heads of queries, of keys, and their width, of one published model each.
MEMBERS = {
    "llama": (4096, 14336, 32, 8, 128),
    "mistral": (4096, 14336, 32, 8, 128),
    "qwen2": (3584, 18944, 28, 4, 128),
    "qwen3": (4096, 12288, 32, 8, 128),
    "olmo2": (4096, 11008, 32, 32, 128),
    "olmo3": (4096, 11008, 32, 32, 128),
    "gemma2": (2304, 9216, 8, 4, 256),
    "gemma3_text": (2560, 10240, 8, 4, 256),
    "gpt2": (768, 3072, 12, 12, 64),
    "opt": (768, 3072, 12, 12, 64),
    "gpt_neox": (6144, 24576, 64, 64, 96),
    "bloom": (4096, 16384, 32, 32, 128),
    "ltg_bert": (768, 2048, 12, 12, 64),
    "modernbert": (1024, 2624, 16, 16, 64),
}
ANCHORS = ((10**8, 10, 600), (10**9, 20, 1800), (16 * 10**9, 45, 7200))


@pytest.mark.parametrize("model_type", PROPORTIONS)
def test_a_family_follows_what_was_published(model_type: str) -> None:
    """Its sizes, and of one of its models the width of the MLP (modernbert's differ by a fourth), and the
    kinds of heads.
    """
    expected = [line.split() for line in PUBLISHED[model_type].split(",")]
    assert PROPORTIONS[model_type].anchors == tuple(
        (parse_amount(size), int(layers), int(hidden)) for size, layers, hidden in expected
    )
    hidden, inside, heads, groups, head_dim = MEMBERS[model_type]
    found = PROPORTIONS[model_type]
    assert found.mlp_ratio == pytest.approx(inside / hidden, rel=0.3)
    assert (found.is_grouped, found.wide_heads) == (groups < heads, head_dim == 256)


@pytest.mark.parametrize(
    ("wanted", "layers", "hidden"),
    [
        (12_500_000, 5, 300),  # an eighth: half as deep and half as wide
        (99_999_999, 10, 600),
        (100_000_000, 10, 600),
        (316_227_766, 10 * 2**0.5, 600 * 3**0.5),  # the middle, by the logarithm
        (1_000_000_000, 20, 1800),
        (4_000_000_000, 30, 3600),
        (8_000_000_000, 20 * 2.25**0.75, 1800 * 4**0.75),
        (16_000_000_000, 45, 7200),
        (128_000_000_000, 90, 14_400),
    ],
)
def test_between_two_sizes_depth_and_width_are_interpolated(wanted: int, layers: float, hidden: float):
    assert usual_shape(ANCHORS, wanted) == (pytest.approx(layers), pytest.approx(hidden))


def shapes(
    params: int, hidden: float, layers: float = 1.0, model: Model | None = None, **usual: Any
) -> list[Model]:
    """The shapes around a usual one; by default the MLP is four times as wide."""
    asked = (Model(vocab_size=90_000) if model is None else model).model_copy(update={"params": params})
    proportion = Proportions(ANCHORS, **{"mlp_ratio": 4.0} | usual)
    return [asked.model_copy(update=shape) for shape in shapes_around(asked, proportion, layers, hidden)]


def heads_of(found: list[Model]) -> dict[int, list[int]]:
    """Width of a head → the numbers of heads, each hidden_size of which is both of them."""
    of_width: dict[int, dict[int, None]] = {}
    for one in found:
        assert one.hidden_size == one.num_attention_heads * one.head_dim
        of_width.setdefault(one.head_dim, {})[one.num_attention_heads] = None
    return {width: list(numbers) for width, numbers in of_width.items()}


@pytest.mark.parametrize(
    ("params", "hidden", "heads"),
    [
        # from 0.6 × hidden to 1.5 × and a step more: 6 heads to 15 and 1
        (249_999_999, 640, {64: [*range(6, 17)]}),
        (1_000_000, 64, {64: [1, 2]}),
        # in steps of 4 heads, from a multiple of 4 on: 0.6 × 1323 are 12.4 heads, 1.5 × are 31
        (250_000_000, 1323, {64: [12, 16, 20, 24, 28, 32]}),
        (999_999_999, 1323, {64: [12, 16, 20, 24, 28, 32]}),
        (
            1_000_000_000,
            2048,
            {
                64: [16, 24, 32, 40, 48, 56],
                80: [8, 16, 24, 32, 40],
                96: [8, 16, 24, 32, 40],
                128: [8, 16, 24, 32],
            },
        ),
        (1_000_000_000, 640, {64: [8, 16], 80: [8, 16], 96: [8, 16], 128: [8]}),
    ],
)
def test_heads_are_around_the_usual_width(params: int, hidden: int, heads: dict[int, list[int]]) -> None:
    """Of 64 numbers below a billion parameters; from there on they split over 8 ranks."""
    found = shapes(params, hidden)
    assert heads_of(found) == heads
    for one in found:
        assert one.num_key_value_heads == one.num_attention_heads and one.params is None
        assert one.intermediate_size == 4 * one.hidden_size


def test_keys_are_shared_by_groups_of_heads() -> None:
    """Eight heads of keys for a multiple of 8 beyond 8; else the largest number that divides the heads."""
    found = {one.num_attention_heads: one.num_key_value_heads for one in shapes(10**8, 660, is_grouped=True)}
    assert found == {6: 3, 7: 1, 8: 4, 9: 3, 10: 5, 11: 1, 12: 6, 13: 1, 14: 7, 15: 5, 16: 8}
    found = {one.num_attention_heads: one.num_key_value_heads for one in shapes(10**6, 64, is_grouped=True)}
    assert found == {1: 1, 2: 1}
    assert {one.num_key_value_heads for one in shapes(10**9, 3000, is_grouped=True)} == {4, 8}


@pytest.mark.parametrize(
    ("params", "heads", "groups", "head_dim"),
    [
        (1_599_999_999, 4, 1, 256),
        (1_600_000_000, 8, 4, 256),
        (4_999_999_999, 8, 4, 256),
        (5_000_000_000, 16, 8, 256),
        (15_999_999_999, 16, 8, 256),
        (16_000_000_000, 32, 16, 128),
    ],
)
def test_wide_heads_do_not_follow_the_width(params: int, heads: int, groups: int, head_dim: int) -> None:
    """The number of heads follows from the size alone; hidden_size is any multiple of 128."""
    found = shapes(params, 1024, wide_heads=True, is_grouped=True)
    kinds = {(one.num_attention_heads, one.num_key_value_heads, one.head_dim) for one in found}
    assert kinds == {(heads, groups, head_dim)}
    # from 614, rounded down, to 1536 and less than 128 more
    assert sorted({one.hidden_size for one in found}) == [*range(512, 1537, 128)]
    assert {one.hidden_size for one in shapes(params, 100, wide_heads=True)} == {128, 256}


def test_depths_are_around_the_usual_one() -> None:
    """From 0.7 × to 1.4 ×, one at least."""
    assert sorted({one.num_hidden_layers for one in shapes(10**8, 64, layers=10.5)}) == [*range(7, 16)]
    assert sorted({one.num_hidden_layers for one in shapes(10**8, 64, layers=1.2)}) == [1, 2]


@pytest.mark.parametrize(
    ("hidden", "ratio", "widths"),
    [
        (1024, 3.5, [14 * 256, 13 * 256, 15 * 256]),
        # 960 is below 1024: multiples of 64, a twelfth of 52 to both sides and half of that
        (960, 3.5, [52 * 64, 50 * 64, 54 * 64, 48 * 64, 56 * 64]),
        (64, 0.5, [64]),
    ],
)
def test_mlps_are_around_the_usual_width(hidden: int, ratio: float, widths: list[int]) -> None:
    params = 10**8 if hidden < 1024 else 3 * 10**8
    found = [one.intermediate_size for one in shapes(params, hidden, mlp_ratio=ratio)
             if one.hidden_size == hidden and one.num_hidden_layers == 1]  # fmt: skip
    assert list(dict.fromkeys(found)) == widths
    wide = [one.intermediate_size for one in shapes(10**8, 128, wide_heads=True) if one.hidden_size == 128]
    assert set(wide) == {8 * 64, 7 * 64, 9 * 64}


def test_a_small_models_head_is_tied() -> None:
    """Where it would be more than 15 % of 102.4 million parameters: 30,000 rows of more than 512. What the
    recipe says, and a family that is always tied, stay.
    """
    tied = {
        one.hidden_size: one.tie_word_embeddings
        for one in shapes(102_400_000, 640, model=Model(vocab_size=30_000))
    }
    assert tied == {width: True if width > 512 else None for width in range(384, 1025, 64)}
    for model, said in (
        (Model(vocab_size=30_000, tie_word_embeddings=False), False),
        (Model(vocab_size=300, tie_word_embeddings=True), True),
        (Model(vocab_size=30_000, model_type="gpt2"), None),
    ):
        assert {one.tie_word_embeddings for one in shapes(102_400_000, 640, model=model)} == {said}


USUAL = Proportions(ANCHORS, 4.0)


@pytest.mark.parametrize(
    ("heads", "head_dim", "layers", "inside", "usual_layers", "usual_hidden", "expected"),
    [
        (20, 128, 24, 10_240, 24, 2560, 0.0),
        (20, 128, 24, 10_240, 12, 2560, math.log(2)),
        (20, 128, 24, 10_240, 48, 2560, math.log(2)),
        (20, 128, 24, 10_240, 24, 7680, math.log(3)),
        (20, 128, 24, 10_240, 24, 512, math.log(5)),
        (20, 128, 24, 20_480, 24, 2560, math.log(2)),
        (20, 128, 24, 2560, 24, 2560, math.log(4)),
        (20, 128, 25, 10_240, 25, 2560, 0.03),  # an odd number of layers
        (32, 80, 24, 10_240, 24, 2560, 0.15),
        (20, 96, 24, 7680, 24, 1920, 0.15),
        (40, 64, 24, 10_240, 24, 2560, 0.2),  # narrow heads of a wide model
        (39, 64, 24, 9984, 24, 2496, 0.0),
        (32, 80, 25, 20_480, 50, 7680, math.log(2) * 2 + math.log(3) + 0.15 + 0.03),
    ],
)
def test_a_shape_is_as_far_as_its_parts_together(
    heads: int, head_dim: int, layers: int, inside: int, usual_layers: int, usual_hidden: int, expected: float
) -> None:
    """Depth, width and MLP by their logarithms; what does not split well costs something."""
    shape = Model(
        vocab_size=32_000, num_hidden_layers=layers, hidden_size=heads * head_dim, intermediate_size=inside,
        num_attention_heads=heads, head_dim=head_dim,
    )  # fmt: skip
    found = distance(shape, count(shape), usual_layers, usual_hidden, USUAL)
    assert found == pytest.approx(expected, abs=1e-9)
    for share, expected_error in (
        (1.005, math.log(1.005)),
        (0.995, -math.log(0.995)),
        (1.02, 51 * math.log(1.02) - 0.5),  # beyond 1 % an error weighs 50 times as much, and as before
        (0.9, -51 * math.log(0.9) - 0.5),
    ):
        other = distance(shape, count(shape) * share, usual_layers, usual_hidden, USUAL)
        assert other - found == pytest.approx(expected_error, abs=1e-9)


def test_a_wide_head_of_2500_is_narrow() -> None:
    """The border of what counts as wide, which is no multiple of 64."""
    shape = Model(vocab_size=32_000, num_hidden_layers=24, hidden_size=2500, intermediate_size=10_000,
                  head_dim=64)  # fmt: skip
    assert distance(shape, count(shape), 24, 2500, USUAL) == pytest.approx(0.2)


def test_positions_are_2048_where_none_are_asked_for() -> None:
    """A GPT-2's table of positions is a part of its size."""
    asked = Model(model_type="gpt2", vocab_size=99)
    for positions, more in ((2048, 0), (2049, 1), (1, -2047)):
        given = asked.model_copy(update={"max_position_embeddings": positions})
        assert count(given) == count(asked) + more * asked.hidden_size


@pytest.mark.parametrize("share", [0.94, 0.951, 1.049, 1.06])
def test_no_size_farther_than_a_twentieth_is_taken(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all shapes are as large, the most usual one is taken, or refused."""
    monkeypatch.setattr(proportions, "count", lambda shape: round(share * 10**8))
    asked = Model(params="100M", vocab_size=7000, model_type="gpt2")
    if abs(share - 1) < 0.05:
        found = proportions.with_shape(asked)
        # below 125M: (100 / 125)^(1/3) of 12 layers and of 768 are 11.1 and 713
        assert (found.num_hidden_layers, found.hidden_size, found.intermediate_size) == (11, 704, 2816)
        return
    with pytest.raises(KieloError) as caught:
        proportions.with_shape(asked)
    size = f"{100 * share:.0f}M"
    assert str(caught.value) == (
        f"model.params = 100M: no gpt2 of this size has a vocabulary of 7,000 tokens; the nearest has {size}."
        f" Fix: model.params = {size}, or a smaller tokenizer.vocab_size"
    )
