"""The tasks of EleutherAI's harness and of a recipe's folders: a name → tasks that are ready to be asked.

The harness is imported when a task is loaded. A task that cannot be loaded is `NotScored`, with the reason.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kielo.artifact.manifest import hash_json
from kielo.evaluate.tasks_data import (
    data_of,
    harness_surroundings,
    harness_version,
    origin_of_data,
    quiet_bars,
    refuse_without_harness,
    why_not_loaded,
)
from kielo.evaluate.tasks_own import OwnTask, harness_task, own_tasks_of
from kielo.evaluate.tasks_wanted import WantedTask, hash_task_folder, task_folder, wanted_tasks
from kielo.recipe.cards import PROBES
from kielo.recipe.sections import Evaluate

_TASK_LINE = re.compile(rb"""^["']?task["']?:[ ]*["']?([^"'\s\[{]+)["']?[ ]*(?:#.*)?$""", re.MULTILINE)
_GROUP_LINE = re.compile(rb"^group:", re.MULTILINE)


class NotScored(Exception):
    """A task has no score, for the reason in the message."""


@dataclass
class Loaded:
    """Tasks of the harness by name, and the groups that they are in. folders: task → hash of its folder."""

    tasks: dict[str, Any]
    groups: dict[str, Any]
    own: OwnTask | None = None


class Harness:
    """The harness's tasks, and the tasks of the recipe's folders. is_online: their data may be downloaded."""

    def __init__(self, settings: Evaluate, is_online: bool = False) -> None:
        """Raise KieloError if the harness is not installed, or for a missing folder or a wrong own task."""
        refuse_without_harness()
        self._is_online = is_online
        self._folders = {task_folder(given): hash_task_folder(given) for given in settings.task_folders}
        # A person's own task comes before a shipped task of the same name.
        self._own = own_tasks_of([PROBES]) | own_tasks_of(self._folders)
        self.wanted = wanted_tasks(settings.tasks)
        self.version = harness_version()

    def load(self, wanted: WantedTask) -> Loaded:
        """Load a task, or the tasks of a group or tag. Raise NotScored if that is not possible."""
        from lm_eval.api.task import ConfigurableTask

        name = wanted.name
        if not self._is_known(name):
            raise NotScored(self._unknown(name))
        try:
            with quiet_bars():
                if name in self._own:
                    own, config = harness_task(self._own[name])
                    return Loaded({name: ConfigurableTask(config=config)}, {}, own)
                found = self._manager(name).load([str(self._files.get(name, name))])
        # Of task files that others wrote, and of the library that loads their data.
        except Exception as error:
            raise NotScored(why_not_loaded(error, self._is_online)) from error
        loaded = Loaded(found["tasks"], found.get("groups", {}))
        whole = loaded.groups.get(name) or loaded.tasks.get(name)
        version = getattr(whole, "version", getattr(whole, "VERSION", ""))
        if wanted.version and str(version) != wanted.version:
            raise NotScored(
                f"its bundle is made for version {wanted.version} (lm-eval {wanted.harness}), and lm-eval "
                f"{self.version} has {version}. Fix: pip install 'kielo[evaluate]'"
            )
        return loaded

    @property
    def hash_of_folders(self) -> str:
        """The hash of all files in the recipe's folders of tasks, when this was made."""
        return hash_json([*self._folders.values()])

    def hash_of(self, name: str) -> str:
        """Return the hash of the folder that has the task's file; "" for a task of the harness."""
        if (path := self._own.get(name) or self._files.get(name)) is None:
            return self.hash_of_folders  # a group has it, which any folder can have changed
        if PROBES in path.parents:
            return hash_task_folder(str(PROBES))
        return next((found for folder, found in self._folders.items() if folder in path.parents), "")

    @cached_property
    def _files(self) -> dict[str, Path]:
        """Task → its YAML file. The recipe's folders come before the harness, as in its own index."""
        import lm_eval

        found: dict[str, Path] = {}
        for folder in (*reversed(self._folders), Path(lm_eval.__file__).parent / "tasks"):
            for path in sorted(folder.glob("**/*.yaml")):
                named = _TASK_LINE.search(text := path.read_bytes())
                if named and not _GROUP_LINE.search(text):
                    found.setdefault(named[1].decode(), path)
        return found

    @cached_property
    def _whole(self) -> Any:
        """The harness's index of all tasks, groups and tags. Its first use takes ten seconds or more."""
        from lm_eval.tasks import TaskManager

        return TaskManager(include_path=[*self._folders])

    def _manager(self, name: str) -> Any:
        from lm_eval.tasks import TaskManager

        return TaskManager(include_defaults=False) if name in self._files else self._whole

    def _is_known(self, name: str) -> bool:
        return name in self._own or name in self._files or name in self._whole.task_index

    def _unknown(self, name: str) -> str:
        known = [*self._own, *self._whole.all_tasks]
        near = difflib.get_close_matches(name, known, n=3) or [one for one in known if name in one][:3]
        broken = "".join(f". {path} cannot be read ({reason})" for path, reason in self._broken())
        fix = f"Fix: {' or '.join(near)}" if near else "Fix: a name that `lm_eval ls tasks` prints"
        return f"neither lm-eval {self.version} nor evaluate.task_folders have such a task{broken}. {fix}"

    def _broken(self) -> Iterator[tuple[Path, str]]:
        """Yield the files of tasks in the recipe's folders that the harness passes over, with the reason."""
        from lm_eval.tasks._yaml_loader import load_yaml

        for folder in self._folders:
            for path in sorted(folder.glob("**/*.yaml")):
                try:
                    load_yaml(path, resolve_func=False)
                except Exception as error:
                    yield path, " ".join(str(error).split())[:120]


def fetch_data(settings: Evaluate, cache: Path) -> Iterator[tuple[str, tuple[list[Path], str] | str]]:
    """Download the data of the settings' tasks into `cache`, a cache of the library `datasets`.

    Yield each task with the folders of its data and their origin, or with the reason why it has none.
    """
    with harness_surroundings(cache, is_online=True):
        harness = Harness(settings, is_online=True)
        for wanted in harness.wanted:
            try:
                loaded = harness.load(wanted)
            except NotScored as problem:
                yield wanted.name, str(problem)
                continue
            places = list(dict.fromkeys(place for task in loaded.tasks.values() for place in data_of(task)))
            yield wanted.name, (places, origin_of_data(places))
