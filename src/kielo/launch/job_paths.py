"""List what the jobs of a launch read and write: each node must have it, and a container must be given it.

A container sees only bound folders, so a tokenizer outside of the working folder would be missing. Links lead
out of a bound folder, so their targets are paths of their own.
"""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kielo.artifact.prefetched import HUB_FOLDER, prefetched_folder
from kielo.artifact.token_sources import list_token_files
from kielo.artifact.weights_folder import is_on_hub, tokenizer_here, weights_here
from kielo.launch.job_plan import JobPlan
from kielo.launch.site import source_of_kielo
from kielo.recipe.cards import is_own_card
from kielo.recipe.errors import KieloError
from kielo.recipe.places import without_form
from kielo.recipe.read import run_folder
from kielo.recipe.sections import IDENTIFIERS, Recipe, Source

READS, WRITES = "reads", "writes"
_OF_BINDS = (",", ":")  # signs in the value of --bind, which older versions cannot quote


@dataclass(frozen=True)
class JobPath:
    """A path that jobs use."""

    path: str  # absolute
    use: str  # "reads" or "writes", which includes reading
    reason: str  # what names the path


def job_paths(plan: JobPlan) -> list[JobPath]:
    """Return each path that the jobs read or write once. Only jobs that train have the node's own folder."""
    of_node = JobPath(plan.jobs_of_site.node_folder, WRITES, "caches, on each node")
    return [*_shared(plan), *([] if plan.shared_stage else [of_node])]


def _shared(plan: JobPlan) -> list[JobPath]:
    found: dict[str, JobPath] = {}
    for one in _all(plan):
        for path in dict.fromkeys((one.path, os.path.realpath(one.path))):
            known = found.get(path)
            if known is None or (known.use, one.use) == (READS, WRITES):
                reason = one.reason if path == one.path else f"{one.reason}, where a link leads"
                found[path] = JobPath(path, one.use, reason)
    return list(found.values())


def binds(plan: JobPlan) -> list[str]:
    """Return the value of --bind: parents first, and read-only paths marked.

    A path in a bound folder is left out. Raises KieloError for a path that --bind cannot name.
    """
    bound: dict[str, str] = {}
    for one in sorted(_shared(plan), key=lambda one: (len(Path(one.path).parts), one.use == READS)):
        above = (one.path, *map(str, Path(one.path).parents))
        uses = {bound[folder] for folder in above if folder in bound}
        if one.path == plan.image or WRITES in uses or (one.use == READS and uses):
            continue
        if any(sign in one.path for sign in _OF_BINDS):
            why = "a container cannot be given a path with a comma or a colon"
            raise KieloError(f"{one.path} ({one.reason}): {why}. Fix: move or rename it")
        bound[one.path] = one.use
    packed = plan.made.squash if plan.made is not None else ""
    bound.pop(packed, None)
    given = [path if use == WRITES else f"{path}:{path}:ro" for path, use in bound.items()]
    return [*given, f"{packed}:{plan.venv}:image-src=/"] if packed else given


def _all(plan: JobPlan) -> Iterator[JobPath]:
    run = run_folder(plan.recipe).absolute()
    yield JobPath(str(Path.cwd()), WRITES, "the working folder")
    for folder in (run, *plan.bound):
        yield JobPath(str(folder), WRITES, "the run")
    # A stage or the checkpoints may be on another disk. The text of a rung is in the run.
    own = [os.path.realpath(folder) for folder in (run, *plan.bound)]
    for link in (entry for level in ("*", "*/*") for entry in sorted(run.glob(level)) if entry.is_symlink()):
        if not any(Path(os.path.realpath(link)).is_relative_to(folder) for folder in own):
            yield JobPath(str(link), WRITES, "the run")
    yield from _of_recipe(plan)
    if (prefetched := prefetched_folder()) is not None:
        # The library `datasets` writes locks beside the data of tasks.
        yield JobPath(str(prefetched), WRITES if plan.asks_tasks else READS, "kielo prefetch")
    if plan.site_folder is not None:
        yield JobPath(str(plan.site_folder), WRITES, "kielo site")
    yield from _of_environment(plan)


def _of_recipe(plan: JobPlan) -> Iterator[JobPath]:
    recipe = plan.recipe
    tokenizer, weights = recipe.tokenizer.ready, recipe.model.weights
    named = []
    if tokenizer is not None:
        named.append((_place(tokenizer), recipe.tokenizer.ready_key))
    if weights is not None:
        named.append((_place(weights), "model.weights"))
    if recipe.model.transplant_vectors is not None:
        named.append((Path(recipe.model.transplant_vectors), "model.transplant_vectors"))
    if recipe.machine:
        named.append((Path(recipe.machine), "machine"))
    for source in recipe.corpus.sources:
        named += [(folder, f"corpus.sources, {source.name}") for folder in _token_folders(source)]
    if plan.shared_stage == "corpus":
        raw = recipe.corpus.of_raw_text.sources
        named += [(Path(source.path), f"corpus.sources, {source.name}") for source in raw if source.path]
    if plan.shared_stage == "pack":
        named += [(Path(text.path), f"evaluate.texts, {text.name}") for text in recipe.evaluate.texts]
    if plan.evaluates:
        named += [(Path(path), f"evaluate.{key}") for key, path in recipe.evaluate.own_files.items()]
    if plan.asks_tasks:
        named += [(Path(path), "evaluate.task_folders") for path in recipe.evaluate.task_folders]
    for key, name in (("cluster", recipe.cluster), ("language", recipe.language)):
        if is_own_card(name):
            named.append((Path(name), key))
    if recipe.corpus.language_identifier not in IDENTIFIERS:
        named.append((Path(recipe.corpus.language_identifier), "corpus.language_identifier"))
    for path, key in named:
        yield _read(path, key)
        for folder in _outside_links(path.expanduser()):
            yield _read(folder, f"{key}, where a link leads")


def _of_environment(plan: JobPlan) -> Iterator[JobPath]:
    """Yield the Python of the ranks and its packages, a squashed environment as its one file."""
    if plan.image:
        yield _read(Path(plan.image), "the container's image")
    if plan.made is not None and plan.made.squash:
        yield _read(Path(plan.made.squash), "the environment")
    elif plan.venv:
        yield _read(Path(plan.venv), "the environment")
        for folder in _installed_by_a_path(Path(plan.venv)):
            yield _read(folder, "the environment, a package installed in place")
    elif not plan.image:
        yield _read(Path(sys.prefix), "the Python of this kielo")
        if (source := source_of_kielo()).startswith("/"):
            yield _read(Path(source), "the source of this kielo")


def hub_cache(recipe: Recipe) -> Path | None:
    """Return the launcher's cache of the hub's client if the jobs read from it, else None."""
    for reference in (recipe.model.weights, recipe.tokenizer.ready):
        if is_on_hub(reference) and (cache := _place(reference or "").parent) != _brought_hub():
            return cache
    return None


def _place(reference: str) -> Path:
    """Return the folder of weights or a tokenizer; of a repository its folder in the hub's cache."""
    if not is_on_hub(reference):
        return Path(without_form(reference))
    for find in (weights_here, tokenizer_here):
        if (snapshot := find(reference)) is not None:
            return snapshot.absolute().parents[1]  # CACHE/models--OWNER--NAME/snapshots/COMMIT
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=reference.removeprefix("hf:").partition("@")[0], repo_type="model")
    return (_brought_hub() or Path(constants.HF_HUB_CACHE)) / folder


def _brought_hub() -> Path | None:
    folder = prefetched_folder()
    return folder / HUB_FOLDER if folder else None


def _read(path: Path, reason: str) -> JobPath:
    return JobPath(os.path.abspath(path.expanduser()), READS, reason)


def _token_folders(source: Source) -> list[Path]:
    """Return the folders of a source's ready tokens; without them, the folder that the source names."""
    if source.tokens is None:
        return []
    given = Path(source.tokens).expanduser()
    try:
        files, _ = list_token_files(source.name, source.tokens, source.leave_out)
    except KieloError:
        return [given if given.is_dir() else given.parent]
    folders = [given] if given.is_dir() else []
    folders += [file.parent for file in files]
    folders += [Path(os.path.realpath(file)).parent for file in files if file.is_symlink()]
    return list(dict.fromkeys(folders))


def _installed_by_a_path(venv: Path) -> Iterator[Path]:
    """Yield folders that `pip install --editable` names in a file .pth of the environment."""
    for file in sorted(venv.glob("lib/python*/site-packages/*.pth")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("/") and os.path.isdir(line):
                yield Path(line)


def _outside_links(folder: Path) -> Iterator[Path]:
    """Yield the folders outside of `folder` to which links in it lead, as in a folder of linked weights."""
    if not folder.is_dir():
        return
    real = Path(os.path.realpath(folder))
    targets = [Path(os.path.realpath(entry)) for entry in sorted(folder.iterdir()) if entry.is_symlink()]
    for target in targets:
        if target.exists() and not target.is_relative_to(real):
            yield target if target.is_dir() else target.parent
