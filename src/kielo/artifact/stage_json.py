"""A JSON file of a finished stage, read back and held against the stage's manifest."""

import json
from pathlib import Path
from typing import Any

import xxhash

from kielo.artifact.manifest import read_manifest
from kielo.recipe.errors import KieloError


def read_stage_json(folder: Path | str, name: str) -> dict[str, Any] | None:
    """The JSON object in the file `name` of a stage's folder; None where there is no such file.

    Raises KieloError, naming the file, when it holds no JSON object or is not what the stage wrote.
    """
    path = Path(folder) / name
    again = f"move {path.parent} away and run the stage again"
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise KieloError(f"{path}: not valid JSON ({error}); {again}") from None
    if not isinstance(content, dict):
        raise KieloError(f"{path}: not a JSON object, but a {type(content).__name__}; {again}")
    manifest = read_manifest(folder)
    listed = manifest.files.get(name) if manifest else None
    if listed is not None and listed["xxh3_128"] != xxhash.xxh3_128_hexdigest(data):
        raise KieloError(f"{path}: was changed since the stage wrote it; {again}")
    return content
