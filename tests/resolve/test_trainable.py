"""Which parameters a phase trains, counted by hand for a model of 8 columns; tests/train trains some."""

from dataclasses import replace
from typing import Any

import pytest

from kielo.models.families import complete
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import FullPhase, full_phases
from kielo.recipe.sections import Layout, Model
from kielo.resolve.planned_phases import (
    flops_per_token,
    frozen_share,
    trains,
)
from kielo.resolve.resolve import refuse_before_text
from kielo.resolve.rules import MODEL_RULES, complaints
from tests.resolve.rule_cases import case_of
from tests.resolve.test_resolve import recipe

SHAPE = {
    "hidden_size": 8, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "vocab_multiple": 1, "tie_word_embeddings": False,
}  # fmt: skip
# elements of a layer: queries, keys, values and output; gate, up and down; two norms
ATTENTION, MLP, NORMS = 64 + 32 + 32 + 64, 3 * 160, 16
TABLE, NORM = 800, 8


def model(**changes: Any) -> Model:
    return complete(Model(**SHAPE | changes), 64)


def phase(*trainable: str) -> FullPhase:
    return full_phases(recipe(train={"trainable": list(trainable)}))[0]


def test_the_frozen_share_is_of_the_layers_matrices() -> None:
    """By elements: all of two layers' attention; all; and none."""
    whole = 3 * (ATTENTION + MLP)
    assert frozen_share(model(), ("layers.0", "layers.*.mlp")) == 2 * ATTENTION / whole
    assert frozen_share(model(), ("head",)) == 1.0 and frozen_share(model(), ()) == 0.0
    assert frozen_share(model(), ("layers",)) == 0.0


@pytest.mark.parametrize(
    ("tied", "patterns", "frozen"),
    [
        (False, (), 0), (False, ("layers.0",), TABLE + 2 * (ATTENTION + MLP + NORMS) + NORM),
        (True, ("layers.0",), TABLE + 2 * (ATTENTION + MLP + NORMS) + NORM),
        (False, ("layers", "norm", "head"), 0),  # a table that is looked up multiplies nothing
        (True, ("layers", "norm"), TABLE), (True, ("layers", "norm", "embed"), 0),
    ],
)  # fmt: skip
def test_frozen_weights_have_no_products_for_their_gradients(tied, patterns, frozen) -> None:
    """Six FLOPs of each parameter that multiplies, and attention; two less where it is frozen."""
    multiplied = 3 * (ATTENTION + MLP + NORMS) + NORM + TABLE
    attention = 6 * 3 * 8 * 64  # causal: half of two products of each layer, forward and twice back
    found = flops_per_token(model(tie_word_embeddings=tied), 64, patterns)
    assert found == 6 * multiplied + attention - 2 * frozen


def test_either_name_of_a_tied_table_means_both() -> None:
    tied, untied = model(tie_word_embeddings=True), model()
    assert trains(tied, ("head",), "embed.weight") and trains(tied, ("embed",), "head.weight")
    assert not trains(untied, ("head",), "embed.weight") and trains(untied, (), "embed.weight")


@pytest.mark.parametrize(
    ("tied", "trainable", "pipeline", "told"),
    [
        (False, ("layers.0", "embed"), 2, []), (False, ("layers.0",), 1, []), (True, ("head",), 2, []),
        (False, ("layers.0",), 2, [
            "train.trainable = ['layers.0'] leaves the embedding frozen, but with layout.pipeline = 2 every "
            "stage sends a gradient to the stage before. Fix: trainable with embed, or "
            "layout.pipeline = 1",
        ]),
        (False, ("layers.3", "head"), 1, [
            'train.trainable: "layers.3" names no parameter of the model. Fix: embed, layers, '
            "norm, head, or a module such as layers.0 or layers.*.mlp",
        ]),
        (True, ("tail", "embed"), 1, [
            'train.trainable: "tail" names no parameter of the model. Fix: embed, layers, norm, '
            "head, or a module such as layers.0 or layers.*.mlp",
        ]),
    ],
)  # fmt: skip
def test_patterns_that_cannot_be_trained_come_with_those_that_can(tied, trainable, pipeline, told) -> None:
    case = case_of(model(tie_word_embeddings=tied), Layout(pipeline=pipeline))
    assert complaints(replace(case, phases=(phase(*trainable),)), MODEL_RULES) == told


def test_a_recipe_is_asked_before_there_is_a_text() -> None:
    """Unless its model is that of weights that are not here."""
    refuse_before_text(recipe(train={"trainable": ["layers.1"]}))
    refuse_before_text(recipe(train={"trainable": ["tail"]}, model={"weights": "hf:org/model_of_nobody"}))
    with pytest.raises(KieloError, match='"tail" names no parameter of the model'):
        refuse_before_text(recipe(train={"trainable": ["tail"]}))
