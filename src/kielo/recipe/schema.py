"""The JSON Schema of recipes, for editors that complete and check TOML. `Recipe` → a dict."""

from typing import Any

from kielo.recipe import variants
from kielo.recipe.cards import clusters, languages
from kielo.recipe.sections import Recipe
from kielo.recipe.several_languages import DESCRIPTION, KEY

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12). With `extends` no key is required: the base recipe can have it."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = DIALECT
    schema["title"] = "Kielo recipe"
    properties = schema["properties"]
    properties["extends"] = {
        "type": "string",
        "description": "Recipe (path or shipped name) to start from. One level.",
    }
    one = {"anyOf": [{"enum": languages()}, {"pattern": r"\.toml$"}]}
    properties["language"] |= one
    properties[KEY] = {
        "type": "array",
        "items": one,
        "minItems": 1,
        "description": DESCRIPTION,
    }
    properties[variants.KEY] = {
        "type": "object",
        "additionalProperties": {"type": "object"},
        "minProperties": 1,
        "description": variants.DESCRIPTION,
    }
    # In a recipe of several runs the names have {language} or {variant} in them.
    place = r"\{(language|variant)\}"
    properties["name"]["pattern"] = rf"^([A-Za-z0-9]|{place})([A-Za-z0-9_.-]|{place})*$"
    properties["cluster"]["anyOf"] = [{"enum": clusters()}, {"pattern": r"\.toml$"}]
    required = [key for key in schema.pop("required", []) if key != "language"]
    schema["if"] = {"not": {"required": ["extends"]}}
    schema["then"] = {
        "required": required,
        "anyOf": [{"required": ["language"]}, {"required": [KEY]}],
    }
    # The base can also have the required keys of a section, such as corpus.sources.
    schema["$defs"]["Corpus"].pop("required", None)
    return schema
