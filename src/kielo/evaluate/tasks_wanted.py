"""The tasks that a recipe asks for, without the harness: names, bundles of languages, folders of tasks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kielo.artifact.manifest import hash_file, hash_json
from kielo.recipe.cards import BUNDLE, task_bundle, task_bundles
from kielo.recipe.errors import KieloError

_IGNORED = {"__pycache__", ".ipynb_checkpoints"}  # of the harness too


@dataclass(frozen=True)
class WantedTask:
    """A task, group or tag of the harness, or an own task."""

    name: str
    language: str = ""
    measures: str = ""
    version: str = ""  # that its bundle pins
    harness: str = ""  # version of the harness that the bundle is made for


def wanted_tasks(names: Sequence[str]) -> list[WantedTask]:
    """Return the tasks of `names` in their order, each once, with what bundles say of them."""
    known = {one.name: one for code in task_bundles() for one in _bundled(code)}
    found: dict[str, WantedTask] = {}
    for name in names:
        if not name.startswith(BUNDLE):
            # Only in its bundle a task has to have the pinned version.
            of = known.get(name, WantedTask(name))
            found.setdefault(name, WantedTask(name, of.language, of.measures))
            continue
        found |= {one.name: one for one in _bundled(name.removeprefix(BUNDLE))}
    return list(found.values())


def _bundled(code: str) -> Iterator[WantedTask]:
    card = task_bundle(code)
    for name, of in card.tasks.items():
        yield WantedTask(name, card.language, of.measures, of.version, card.harness)


def task_folder(given: str) -> Path:
    """Return the folder of tasks. Raise KieloError if there is none."""
    folder = Path(given).expanduser().absolute()
    if not folder.is_dir():
        raise KieloError(f"evaluate.task_folders: no such folder, {folder}. Fix: a folder with task files")
    return folder


def hash_task_folder(given: str) -> str:
    """Return the hash of all files below a folder of tasks."""
    folder = task_folder(given)
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not _IGNORED & {*path.parts})
    return hash_json([[path.relative_to(folder).as_posix(), hash_file(path)] for path in files])
