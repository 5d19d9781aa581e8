"""Shapes of a given size: near the size, complete, divisible, and near what the family publishes."""

import pytest

from kielo.models import families
from kielo.models.proportions import PROPORTIONS, count, with_shape
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Model

SIZES = {"100M": 32_000, "350M": 32_000, "1B": 65_536, "3B": 131_072, "8B": 131_072, "34B": 128_000,
         "70B": 131_072}  # fmt: skip
FEW = ["100M", "1B", "8B"]  # heads of 64 numbers, the first that splits over 8 ranks, and of many kinds


def test_every_family_has_proportions() -> None:
    assert PROPORTIONS.keys() == FAMILIES.keys()


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    "sizes", [FEW, pytest.param([size for size in SIZES if size not in FEW], marks=pytest.mark.full)], ids=str
)
def test_the_count_is_near_the_asked_size(model_type: str, sizes: list[str]) -> None:
    """Within 2 % from 100M to 70B; the family's checks pass; matrices split over 8 tensor ranks from 1B."""
    for size in sizes:
        vocab_size = SIZES[size]
        asked = Model(model_type=model_type, params=size, vocab_size=vocab_size)
        model = families.complete(with_shape(asked), 2048)
        families.check(model)
        assert model.params is None and count(model) == pytest.approx(asked.params, rel=0.02), size
        if asked.params >= 10**9 and not model_type.startswith("gemma"):
            parts = (model.num_attention_heads, model.num_key_value_heads, model.intermediate_size)
            assert [part % 8 for part in parts] == [0, 0, 0], size
        assert 20 < model.hidden_size / model.num_hidden_layers < 200, size


@pytest.mark.parametrize(
    ("model_type", "size", "vocab_size", "layers", "hidden"),
    [("llama", 8_030_261_248, 128_256, 32, 4096), ("llama", 70_553_706_496, 128_256, 80, 8192),
     ("bloom", 34_200_000_000, 128_000, 54, 7168), ("gpt2", 124_439_808, 50_257, 12, 768),
     ("opt", 66_000_000_000, 50_272, 64, 9216)],
)  # fmt: skip
def test_a_published_size_has_about_the_published_shape(model_type, size, vocab_size, layers, hidden) -> None:
    """Depth and width within a sixth of the published model of that size."""
    model = with_shape(Model(model_type=model_type, params=size, vocab_size=vocab_size))
    assert model.num_hidden_layers == pytest.approx(layers, rel=1 / 6)
    assert model.hidden_size == pytest.approx(hidden, rel=1 / 6)


def test_a_size_that_the_vocabulary_alone_exceeds_is_refused() -> None:
    with pytest.raises(KieloError, match="smaller tokenizer.vocab_size"):
        with_shape(Model(params="2M", vocab_size=256_000))
