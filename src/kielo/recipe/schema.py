"""The JSON Schema of recipes, for editors that complete and check TOML. `Recipe` → a dict."""

from typing import Any

from kielo.recipe.cards import clusters, languages
from kielo.recipe.sections import Recipe

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Returns the schema (draft 2020-12). With `extends` nothing is required: the base recipe may have it."""
    schema = Recipe.model_json_schema()
    schema["$schema"] = DIALECT
    schema["title"] = "Kielo recipe"
    properties = schema["properties"]
    properties["extends"] = {
        "type": "string",
        "description": "a recipe (path or shipped name) to start from; one level",
    }
    properties["language"]["enum"] = languages()
    properties["cluster"]["anyOf"] = [{"enum": clusters()}, {"pattern": r"\.toml$"}]
    required = schema.pop("required", [])
    schema["if"] = {"not": {"required": ["extends"]}}
    schema["then"] = {"required": required}
    # A base may also hold the required keys of a section, such as corpus.sources.
    schema["$defs"]["Corpus"].pop("required", None)
    return schema
