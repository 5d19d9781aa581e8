"""What a key means is said where it is declared, and the reference page says the same."""

import runpy
from collections.abc import Iterator

from pydantic import BaseModel, Field

from kielo.recipe import sections
from tests.house.checks import ROOT


def undescribed(models: list[type[BaseModel]]) -> Iterator[str]:
    for model in models:
        for name, info in model.model_fields.items():
            if not info.description:
                yield f"{model.__name__}.{name}"


def test_every_recipe_field_has_a_description():
    """`kielo schema` gives them to editors, docs/recipe.md to readers.

    Those of a complete model are those of [model].
    """
    found = [
        one
        for one in vars(sections).values()
        if isinstance(one, type)
        and issubclass(one, sections.Section)
        and one not in (sections.Section, sections.CompleteModel)
    ]
    assert sum(len(one.model_fields) for one in found) > 150
    assert list(undescribed(found)) == []


def test_a_field_without_one_is_named():
    """Broken on purpose."""

    class Planted(BaseModel):
        told: int = Field(1, description="is told")
        silent: int = 2

    assert list(undescribed([Planted])) == ["Planted.silent"]


def test_the_reference_page_is_current():
    """docs/recipe.md is what `python docs/reference.py` writes."""
    page = runpy.run_path(str(ROOT / "docs" / "reference.py"))["page"]()
    assert (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8") == page
