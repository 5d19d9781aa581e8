"""Typed objects in JSON files. Content of another type is refused with the file's name and the key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kielo.recipe.errors import KieloError

JsonTable = dict[str, Any]  # an object of which only its reader knows the keys


class JsonObject(BaseModel):
    """An object in a JSON file: values of exactly the declared types, never changed.

    Unknown keys of a newer Kielo are kept. Fields with defaults are missing in some versions.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="allow", use_attribute_docstrings=True)

    def content(self) -> JsonTable:
        """Return the object as it is written: without defaults of keys that were not given."""
        return self.model_dump(exclude_unset=True)


Kind = TypeVar("Kind", bound=JsonObject)


def checked(path: Path, kind: type[Kind], content: JsonTable, advice: str = "", inside: str = "") -> Kind:
    """Return content as its type. KieloError with the wrong key. inside: the keys before it, with a dot."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise KieloError(f"{path}: not as Kielo writes it ({first_wrong(error, inside)}){advice}") from None


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts in a value of JSON, at any depth, but no names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from texts_in(inner)


def first_wrong(error: ValidationError, inside: str = "") -> str:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    return f"{inside}{key}: {first['msg']}" if key else first["msg"]
