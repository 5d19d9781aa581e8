"""dataset.restart_positions: filled in for models with learned positions, and refused without effect."""

from pathlib import Path

import pytest

from kielo.models.families import complete
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Dataset, Model
from kielo.resolve.activation_bytes import learns_positions, with_positions
from kielo.resolve.resolve import consent
from tests.resolve.rule_cases import model_complaints
from tests.train.tiny_run import resolve, write_tokens


@pytest.mark.parametrize(
    "model_type", ["gpt2", "opt", "llama", "bloom", "gpt_neox", "modernbert", "ltg_bert"]
)
@pytest.mark.parametrize(
    ("masked", "asked", "filled"),
    [(True, None, True), (True, True, True), (True, False, None), (False, None, None)],
)
def test_positions_begin_anew_where_they_are_learned_and_documents_are_apart(
    model_type: str, masked: bool, asked: bool | None, filled: bool | None
) -> None:
    """An identity that says nothing is one of before: its positions go on."""
    dataset = Dataset(mask_documents=masked, restart_positions=asked)
    is_learned = model_type in ("gpt2", "opt")
    found = with_positions(dataset, Model(model_type=model_type)).restart_positions
    assert found is (filled if is_learned else None) and learns_positions(model_type) == is_learned


@pytest.mark.parametrize(
    ("masked", "asked", "model_type", "named"),
    [
        (True, None, "llama", []),
        (True, False, "gpt2", []),
        (False, True, "opt", ["dataset.restart_positions = true needs dataset.mask_documents = true"]),
        (True, False, "bloom", ["dataset.restart_positions = false has no effect: bloom models"]),
        (False, False, "llama", ["needs dataset.mask_documents", "has no effect: llama models"]),
    ],
)
def test_the_key_is_refused_without_effect(
    masked: bool, asked: bool | None, model_type: str, named: list[str]
) -> None:
    dataset = {"mask_documents": masked, "restart_positions": asked, "sequence_length": 64}
    model = complete(Model(model_type=model_type, vocab_size=64), 64)
    found = [said for said in model_complaints(model, dataset=dataset) if "restart_positions" in said]
    assert len(found) == len(named) and all(part in one for part, one in zip(named, found))


def test_a_run_of_before_is_not_continued_with_other_positions(tmp_path: Path) -> None:
    """The message names the key, and the value with which the run goes on."""
    write_tokens(tmp_path / "tokens")
    before = resolve(tmp_path)
    now = before.identity.model_copy(
        update={"dataset": before.identity.dataset.model_copy(update={"restart_positions": True})}
    )
    with pytest.raises(KieloError) as caught:
        consent(before.identity, before.model_copy(update={"identity": now}))
    assert "dataset.restart_positions: was None, is now True" in str(caught.value)
    assert "resumes with --set dataset.restart_positions=false" in str(caught.value)
