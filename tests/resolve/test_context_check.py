"""A layout that cannot split the sequence or the heads is refused before start, with what would work."""

from types import SimpleNamespace

import pytest

from kielo.recipe.sections import Model
from kielo.resolve.context_check import check_context


@pytest.mark.parametrize(
    ("context", "tensor", "form", "length", "words"),
    [
        (1, 1, "ulysses", 15, []),
        (4, 1, "all_gather", 64, []),
        (2, 2, "ulysses", 64, []),
        (4, 1, "all_gather", 60, ["sequence_length 56 or 64, or layout.context 1 or 2"]),
        (4, 2, "ulysses", 64, ['layout.context 1 or 2, or context_attention = "all_gather"']),
        (8, 1, "ulysses", 8, ["sequence_length 16", "4 key-value heads", "layout.context 1 or 2 or 4,"]),
    ],
)
def test_what_cannot_split_is_refused_with_numbers_that_would(
    context: int, tensor: int, form: str, length: int, words: list[str]
) -> None:
    """Divisible sequence and heads pass; otherwise each complaint names the sizes that would work,
    and they do.
    """
    model = Model(num_attention_heads=8, num_key_value_heads=4)
    layout = SimpleNamespace(context=context, tensor=tensor, context_attention=form)
    complaints = "; ".join(check_context(model, length, layout))
    assert bool(complaints) == bool(words)
    for part in words:
        assert part in complaints
