"""Objectives that a model can be trained on, and what is said of the others."""

import pytest

from kielo.recipe.sections import TrainIdentity
from kielo.resolve.encoder_check import objective_complaints

MASKED = {"objective": "masked_tokens"}


@pytest.mark.parametrize(
    ("model_type", "train", "named"),
    [
        ("ltg_bert", {}, 'train.objective = "masked_tokens"'),
        ("llama", MASKED, "model.model_type = ltg_bert"),
        ("llama", {"causal_share": 0.5}, "or train.causal_share = 0"),
    ],
)
def test_an_objective_that_cannot_be_is_refused(model_type: str, train: dict, named: str) -> None:
    (complaint,) = objective_complaints(model_type, TrainIdentity(**train))
    assert named in complaint


def test_the_hybrid_needs_attention_that_may_be_causal() -> None:
    """LTG-BERT's may; ModernBERT is refused, with those that may."""
    train = TrainIdentity(**MASKED, causal_share=0.1)
    assert list(objective_complaints("ltg_bert", train)) == []
    (complaint,) = objective_complaints("modernbert", train)
    assert "model.model_type = ltg_bert, or train.causal_share = 0" in complaint
