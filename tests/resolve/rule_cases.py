"""Cases for the rules: a recipe around a model, a layout and one phase."""

from typing import Any

from kielo.recipe.sections import Layout, Model, Recipe, Train
from kielo.resolve.rules import LAYOUT_RULES, MACHINE_RULES, MODEL_RULES, Case, Machine, complaints
from kielo.resolve.software import NEWEST, Software


def case_of(
    model: Model, layout: Layout | None = None, machine: Machine | None = None, **sections: Any
) -> Case:
    """The case of a recipe with these sections, and with the model and the layout as they are given."""
    made = Recipe(name="t", language="et", corpus={"sources": ["a"]}, **sections)
    made = made.model_copy(update={"model": model, "layout": layout or Layout()})
    return Case.of(made, model, machine or Machine())


def model_complaints(model: Model, **sections: Any) -> list[str]:
    return complaints(case_of(model, **sections), MODEL_RULES)


def layout_complaints(model: Model, length: int, layout: Layout, torch_version: str = NEWEST) -> list[str]:
    """The complaints on a layout of a model with sequences of `length` tokens."""
    machine = Machine(software=Software(torch_version))
    return complaints(case_of(model, layout, machine, dataset={"sequence_length": length}), LAYOUT_RULES)


def fp8_complaints(model: Model, layout: Layout, fp8: Any) -> list[str]:
    case = case_of(model, layout, train=Train(precision="fp8", fp8=fp8))
    return complaints(case, MACHINE_RULES)


def attention_complaints(
    model: Model,
    length: int,
    masks_documents: bool,
    dropout: float,
    missing: str | None,
    device: str = "cuda",
) -> list[str]:
    """The complaints on attention on a device whose compiler is missing for the reason `missing`."""
    machine = Machine(device=device, software=Software(NEWEST, missing))
    dataset = {"sequence_length": length, "mask_documents": masks_documents}
    case = case_of(model, None, machine, dataset=dataset, train={"attention_dropout": dropout})
    return complaints(case, MACHINE_RULES)
