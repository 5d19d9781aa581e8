"""The folder of `kielo prefetch`: a recipe's downloads, brought to a machine without a network.

The environment variable KIELO_PREFETCHED names it there. With it nothing is downloaded, and what the folder
lacks is refused. text/ has sources, hub/ repositories in the form of the Hugging Face hub's client, datasets/
the data of evaluation tasks, wheels/ packages. prefetched.json, written last, lists them.
"""

import os
from pathlib import Path
from typing import ClassVar

from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import hash_json
from kielo.artifact.stage_json import JsonFile, JsonObject
from kielo.recipe.errors import KieloError

VARIABLE = "KIELO_PREFETCHED"
TEXT_FOLDER, HUB_FOLDER, WHEELS_FOLDER = "text", "hub", "wheels"
DATASETS_FOLDER = "datasets"  # of evaluation tasks, a cache of the library `datasets`


class Brought(JsonObject):
    kind: str
    """text, weights, tokenizer, task or wheels."""
    name: str
    """The source, the repository, the evaluation task, or the version of Python that wheels are for."""
    origin: str
    """Its origin, with the version or the commit."""
    folder: str
    """Folder, below the folder of `kielo prefetch`."""
    bytes: int


class Prefetched(JsonFile):
    """The list of all that `kielo prefetch` brought for a machine without a network."""

    FILE_NAME: ClassVar[str] = "prefetched.json"

    brought: list[Brought]
    """Everything in the folder, of all recipes that it was filled for."""
    made_at: str
    """Time in UTC of the last download."""


def prefetched_folder() -> Path | None:
    """Return the folder in KIELO_PREFETCHED, or None. KieloError if `kielo prefetch` did not finish it."""
    given = os.environ.get(VARIABLE)
    if not given:
        return None
    folder = Path(given).expanduser().absolute()
    if not (folder / Prefetched.FILE_NAME).is_file():
        raise KieloError(
            f"{VARIABLE}={given}: has no {Prefetched.FILE_NAME}, which `kielo prefetch RECIPE --to DIR` "
            "writes last. Fix: copy the whole folder, or unset the variable"
        )
    return folder


def text_folder(folder: Path, name: str, wanted: JsonTable) -> Path:
    """Return the folder of a source's text, by its name and everything that decides the download."""
    return folder / TEXT_FOLDER / f"{name}_{hash_json(wanted)[:8]}"


def not_brought(what: str) -> KieloError:
    return KieloError(
        f"{what}: is not in {VARIABLE}={os.environ.get(VARIABLE)}, and with it nothing is downloaded. "
        "Fix: kielo prefetch RECIPE --to DIR on a machine with a network"
    )
