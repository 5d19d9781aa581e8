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


@pytest.mark.parametrize("model_type", ["ltg_bert", "modernbert"])
def test_every_encoder_may_be_a_hybrid(model_type: str) -> None:
    assert list(objective_complaints(model_type, TrainIdentity(**MASKED, causal_share=0.1))) == []
