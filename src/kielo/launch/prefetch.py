"""`kielo prefetch`: what a recipe downloads → a folder that is carried to a machine without a network.

Text of packages and addresses, weights and tokenizers of the Hugging Face hub, data of evaluation tasks, and
wheels. Each part is whole or missing, resumes, and is checked: text by its manifest, the hub's files by the
hub's own hash, wheels by pip. `artifact/prefetched.py` says how a run finds them.
"""

import hashlib
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from kielo.artifact.manifest import write_text_atomically
from kielo.artifact.prefetched import (
    DATASETS_FOLDER,
    HUB_FOLDER,
    WHEELS_FOLDER,
    Brought,
    Prefetched,
    prefetched_folder,
)
from kielo.artifact.stage_counts import RawCounts
from kielo.artifact.stage_json import counts_of, read_json, write_json
from kielo.artifact.weights_folder import (
    fetch_tokenizer,
    fetch_weights,
    is_on_hub,
    tokenizer_here,
    weights_here,
)
from kielo.corpus.fetch import downloaded, fetch_text, has_archives, is_fetched
from kielo.evaluate.tasks_harness import fetch_data
from kielo.evaluate.tasks_wanted import wanted_tasks
from kielo.launch.site import source_of_kielo
from kielo.recipe.cards import cluster, is_own_card
from kielo.recipe.errors import KieloError
from kielo.recipe.places import without_form
from kielo.recipe.read import run_folder
from kielo.recipe.sections import IDENTIFIERS, Recipe
from kielo.recipe.several_languages import languages_of
from kielo.resolve.software import NEWEST, precisions

_WRITTEN_BY = "# written by kielo prefetch\n"
# Pure Python that lm-eval needs and that has no wheels on the index.
_ONLY_SOURCES = ("rouge-score", "sqlitedict", "word2number")
_STDERR = 2  # the descriptor: sys.stderr may be something else
Say = Callable[[str], None]


def prefetch(recipe: Recipe, folder: Path, python: str | None, say: Say) -> list[Brought]:
    """Bring text, weights, tokenizers and wheels into `folder`. Return their list and write it there.

    `python` is the version of the wheels, such as "3.12"; None brings no wheels. Raise KieloError for a
    failed part. Earlier parts stay, and the same call resumes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    brought = [*_texts(recipe, folder, say), *_of_hub(recipe, folder, say), *_tasks(recipe, folder, say)]
    if python is not None:
        brought.append(_wheels(recipe, folder, python, say))
    before, new = read_json(folder, Prefetched), {(one.kind, one.folder) for one in brought}
    kept = [one for one in (before.brought if before else []) if (one.kind, one.folder) not in new]
    _tell_unfinished(folder / HUB_FOLDER, say)
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder, Prefetched(brought=[*kept, *brought], made_at=made_at))
    return brought


def _tell_unfinished(hub: Path, say: Say) -> None:
    """Report files that a killed hub client left. They stay, because another call may be writing them."""
    halves = [path for path in hub.glob("*/blobs/*.incomplete") if path.is_file()]
    if halves:
        size = sum(path.stat().st_blocks for path in halves) * 512
        say(
            f"{len(halves)} unfinished files of a call that was cut short take {size / 1e9:,.1f} GB in "
            f"{hub}, and nothing reads them. Fix: rm {shlex.quote(str(hub))}/*/blobs/*.incomplete"
        )


def missing(recipe: Recipe) -> list[str]:
    """Return the recipe's downloads that this machine lacks. Text counts only until it has become tokens."""
    run, prefetched = run_folder(recipe), prefetched_folder()
    found = []
    if not (run / "tokens" / "manifest.json").is_file():
        found += [
            f"the text of {source.name}"
            for source in downloaded(recipe.corpus.sources)
            if not is_fetched(source, run / "raw", prefetched)
        ]
    weights, tokenizer = recipe.model.weights, recipe.tokenizer.ready
    if weights is not None and is_on_hub(weights) and weights_here(weights) is None:
        found.append(f"the weights {weights}")
    if tokenizer is not None and is_on_hub(tokenizer) and tokenizer_here(tokenizer) is None:
        found.append(f"the tokenizer {tokenizer}")
    return found


def missing_tasks(recipe: Recipe) -> list[str]:
    """Return the tasks whose data `kielo prefetch` has not brought to this machine.

    Without its folder there are none, because the user's own cache can have their data.
    """
    folder = prefetched_folder()
    found = read_json(folder, Prefetched) if folder is not None else None
    if found is None:
        return []
    names = {one.name for one in found.brought if one.kind == "task"}
    wanted = (one.name for one in wanted_tasks(recipe.evaluate.tasks))
    return [f"the data of the task {name}" for name in wanted if name not in names]


def own_files(recipe: Recipe) -> list[str]:
    """Return paths that the recipe names: files of a person, which are not brought."""
    paths = [path for source in recipe.corpus.sources if (path := source.local_path or source.tokens)]
    paths += recipe.corpus.own_steps
    paths += recipe.corpus.decontaminate if isinstance(recipe.corpus.decontaminate, tuple) else ()
    paths += [text.path for text in recipe.evaluate.texts]
    paths += recipe.evaluate.own_files.values()
    paths += recipe.evaluate.task_folders
    paths += filter(None, [recipe.model.transplant_vectors])
    names = [
        recipe.language,
        *(name for source in recipe.corpus.sources for name in languages_of(recipe, source)),
    ]
    paths += filter(is_own_card, names)
    if recipe.corpus.language_identifier not in IDENTIFIERS:
        paths.append(recipe.corpus.language_identifier)
    for reference in (recipe.tokenizer.ready, recipe.model.weights):
        if reference is not None and not is_on_hub(reference):
            paths.append(without_form(reference))
    return list(dict.fromkeys(paths))


def _texts(recipe: Recipe, folder: Path, say: Say) -> Iterator[Brought]:
    for source in downloaded(recipe.corpus.sources):
        root, manifest = fetch_text(source, folder, say)
        origin = counts_of(root, manifest, RawCounts).origin
        size = sum(one.bytes for one in manifest.files.values())
        yield _brought("text", source.name, origin, root.relative_to(folder), size)


def _brought(kind: str, name: str, origin: str, folder: Path | str, size: int) -> Brought:
    return Brought(kind=kind, name=name, origin=origin, folder=str(folder), bytes=size)


def _of_hub(recipe: Recipe, folder: Path, say: Say) -> Iterator[Brought]:
    """Bring weights and tokenizer. One repository may be both."""
    asked = (
        ("weights", recipe.model.weights, fetch_weights),
        ("tokenizer", recipe.tokenizer.ready, fetch_tokenizer),
    )
    for kind, reference, fetch in asked:
        if reference is None or not is_on_hub(reference):
            continue
        say(f"{kind}: fetching {reference}")
        snapshot = fetch(reference, folder / HUB_FOLDER)
        damaged = [path for path in sorted(snapshot.iterdir()) if not _is_as_hub_knows_it(path)]
        for path in damaged:  # the client takes every existing file for a whole one
            if not path.resolve().is_relative_to(folder.resolve() / HUB_FOLDER):
                raise KieloError(
                    f"{path}: is damaged, and a link to {path.resolve()}, which Kielo did not write. "
                    "Fix: remove the link, and the same command resumes"
                )
            say(f"{kind}: {path.name} is damaged, and fetched again")
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        if damaged:
            snapshot = fetch(reference, folder / HUB_FOLDER)
            if still := [path.name for path in damaged if not _is_as_hub_knows_it(path)]:
                raise KieloError(
                    f"{reference}: {still[0]} twice differed from the hub's hash. Fix: try later"
                )
        name, commit = reference.removeprefix("hf:").partition("@")[0], snapshot.name
        size = sum(path.stat().st_size for path in snapshot.iterdir() if path.is_file())
        yield _brought(kind, name, f"Hugging Face hub, commit {commit}", snapshot.relative_to(folder), size)


def _tasks(recipe: Recipe, folder: Path, say: Say) -> Iterator[Brought]:
    """Bring the data of evaluation tasks. If that fails for a task, its reason is printed."""
    if not recipe.evaluate.tasks:
        return
    for name, found in fetch_data(recipe.evaluate, folder / DATASETS_FOLDER):
        if isinstance(found, str):
            say(f"task {name}: not brought: {found}")
            continue
        places, origin = found
        size = sum(path.stat().st_size for place in places for path in place.iterdir() if path.is_file())
        where = places[0].relative_to(folder) if places else ""
        yield _brought("task", name, origin, where, size)


def _is_as_hub_knows_it(path: Path) -> bool:
    """Return True if a snapshot's file has the hash in its blob's name: SHA-256, or git's SHA-1."""
    if path.is_dir():
        return True
    blob = path.resolve()
    if not blob.is_file():
        return False
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        digest = hashlib.sha256()
    elif re.fullmatch(r"[0-9a-f]{40}", blob.name):
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return True
    with open(blob, "rb") as file:
        hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest() == blob.name


def _wheels(recipe: Recipe, folder: Path, python: str, say: Say) -> Brought:
    """Bring Kielo and all that it needs as wheels for the nodes of the recipe's cluster, by pip."""
    site, place = cluster(recipe.cluster), folder / WHEELS_FOLDER
    architecture = site.jobs.architecture if site.jobs else "x86_64"
    place.mkdir(exist_ok=True)
    pinned = place / "constraints.txt"
    if pinned.exists() and not pinned.read_text(encoding="utf-8").startswith(_WRITTEN_BY):
        raise KieloError(f"{pinned}: was not written by `kielo prefetch`, and stays. Fix: another --to DIR")
    source = source_of_kielo()
    if not source:
        raise KieloError(
            "--wheels: the source of this Kielo is unknown. Fix: install Kielo from its source folder"
        )
    say(f"wheels: Kielo and what it needs, for Python {python} on {architecture}")
    _pip("wheel", "--no-deps", "--wheel-dir", str(place), source)
    glibcs = ("_2_28", "_2_27", "_2_17", "2014")
    platforms = [f"--platform=manylinux{glibc}_{architecture}" for glibc in glibcs]
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text(f"torch=={site.torch or NEWEST}.*\n", encoding="utf-8")
        target = ["--only-binary=:all:", f"--python-version={python}", *platforms]
        folders = ["--dest", str(place), "--find-links", str(place), "--constraint", str(constraints)]
        if recipe.evaluate.tasks:
            _pip("wheel", "--no-deps", "--wheel-dir", str(place), *_ONLY_SOURCES)
        needed = {
            "train": True,
            "fp8": "fp8" in precisions(recipe.train),
            "evaluate": recipe.evaluate.tasks,
            "tagging": recipe.evaluate.part_of_speech.train,
            "quality": recipe.corpus.repair_encoding or recipe.corpus.mask_personal_data,
            "warc": any(has_archives(source, folder) for source in recipe.corpus.sources),
            "near-copies": recipe.corpus.near_copies != "none",
            "ray": recipe.corpus.engine == "ray",
            "remote": recipe.checkpoint.copy_to,
            "segmentation": recipe.corpus.words == "icu",
        }
        extras = ",".join(extra for extra, is_needed in needed.items() if is_needed)
        packages = ["heliport"] if recipe.corpus.language_identifier == "heliport" else []
        _pip("download", *folders, *target, f"kielo[{extras}]", *packages)
    if recipe.corpus.quality == "hplt":  # on no index, so that pip finds no wheel of it
        say('wheels: not brought: docscorer of corpus.quality = "hplt". Fix: install it on the nodes')
    files = sorted(place.glob("*.whl"))
    pins = [f"{file.name.split('-')[0]}=={file.name.split('-')[1]}\n" for file in files]
    write_text_atomically(pinned, _WRITTEN_BY + "".join(pins))
    origin, size = f"pip, {len(files)} wheels", sum(file.stat().st_size for file in files)
    return _brought("wheels", f"Python {python}, {architecture}", origin, WHEELS_FOLDER, size)


def _pip(*arguments: str) -> None:
    """Run pip, with its output on stderr."""
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=_STDERR, check=False)
    if done.returncode:
        raise KieloError(
            f"--wheels: pip {arguments[0]} failed, for the reason above. Fix: the same command resumes"
        )
