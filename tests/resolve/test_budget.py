"""The token budget that follows from the text, at its borders."""

import pytest

from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.resolve.text import Text, check_budget, check_text_suffices, has_budget, with_budget

OWN = ["corpus.sources=fi.txt,en.txt", "train.tokens_per_step=1024", "dataset.sequence_length=256",
       "dataset.max_epochs=2"]  # fmt: skip


def recipe(*sets: str):
    return read_recipe("own_text", [*OWN, *sets]).recipe


def budget(tokens: dict[str, int], *sets: str) -> int:
    return with_budget(recipe(*sets), Text(tokens, 0, "hash", 0, 0)).train.tokens


def test_whole_steps_that_read_no_source_too_often():
    """By hand: sequences of 256, the last one padded; the source that ends first decides."""
    # 4 and 4 sequences, twice each, are 16: four steps of four
    assert budget({"fi": 1025, "en": 1025}) == 4 * 1024
    # 5 and 4 sequences by their tokens: 2 × 4 × (1026 + 1025) / 1025 are 16.008; 5 are more
    assert budget({"fi": 1026, "en": 1025}) == 4 * 1024
    # 8 and 2 sequences half each: 2 × 2 × 2
    assert budget({"fi": 2049, "en": 513}, "dataset.mixture={fi=1,en=1}") == 2 * 1024
    # 2 of 8 are en's: 2 × 2 × 8 / 2
    assert budget({"fi": 2049, "en": 513}, "dataset.mixture={fi=6,en=2}") == 4 * 1024
    assert (
        budget({"fi": 2049, "en": 513}, "dataset.mixture={fi=6,en=2}", "dataset.source_max_epochs={en=1}")
        == 2048
    )
    # an empty source takes no part
    assert budget({"fi": 1025, "en": 1}) == 2 * 1024
    assert budget({"fi": 1025, "en": 1}, "dataset.mixture={fi=1,en=1}") == 2 * 1024
    assert budget({"fi": 1025, "en": 0}, "dataset.mixture={fi=1,en=1}") == 2 * 1024
    assert with_budget(recipe("train.tokens=77824"), Text({}, 0, "", 0, 0)).train.tokens == 77_824


def test_text_too_short_for_a_step_is_refused_with_the_step_that_it_has():
    """Twice 2 sequences are a step of 4; of one sequence, twice, a step of 2 would work."""
    assert budget({"fi": 257 + 256, "en": 1}) == 1024
    with pytest.raises(KieloError) as caught:
        budget({"fi": 257, "en": 1})
    assert str(caught.value) == (
        "the text has 258 tokens; 2 epochs of them are less than one step of train.tokens_per_step = 1,024. "
        "Fix: more text, or train.tokens_per_step = 512 or less"
    )
    ramp = "train.batch_ramp={{first_tokens_per_step=512, step_tokens=512, tokens={}}}"
    assert budget({"fi": 1025, "en": 1}, ramp.format(2047)) == 2048
    with pytest.raises(KieloError, match="tokens = 2048 does not end before the 2,048 tokens of the"):
        budget({"fi": 1025, "en": 1}, ramp.format(2048))


def test_a_plan_needs_a_budget():
    """From train.tokens or phases; imagined text gives none."""
    assert not has_budget(recipe()) and has_budget(recipe("train.tokens=77824"))
    phased = recipe("phases=[{tokens=20480}]")
    assert has_budget(phased)
    check_budget(phased)
    for refuse in (check_budget, lambda one: with_budget(one, Text({"fi": 9}, 0, "", 0, 0))):
        with pytest.raises(KieloError, match="train.tokens is not set, so it follows from the text once"):
            refuse(recipe())


def test_bytes_that_cannot_be_so_many_tokens_are_refused():
    """Two bytes a token and two epochs: 1,000 bytes are 1,000 tokens at most; a source's epochs count."""
    enough = recipe("train.tokens=1024")
    check_text_suffices(enough, 1024, "a.txt")
    with pytest.raises(KieloError) as caught:
        check_text_suffices(enough, 1023, "a.txt")
    assert str(caught.value) == (
        "train.tokens = 1,024, but a.txt has 1,023 bytes, at most 511 tokens, and "
        "dataset.max_epochs "
        "= 2. Fix: leave train.tokens out, so that it follows from the text, or give more text"
    )
    check_text_suffices(recipe("train.tokens=1024", "dataset.source_max_epochs={fi=4}"), 512, "a.txt")
    with pytest.raises(KieloError, match="train.tokens = 20,480, but a.txt has 9 bytes"):
        check_text_suffices(recipe("phases=[{tokens=10240},{tokens=10240}]"), 9, "a.txt")
    check_text_suffices(recipe(), 1, "a.txt")
