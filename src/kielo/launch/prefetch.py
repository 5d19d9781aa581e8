"""`kielo prefetch`: what a recipe downloads → a folder that is carried to a machine without a network.

Text, weights and tokenizers of the Hugging Face hub, and wheels. Each part is whole or not there, goes on
where it was cut short, and is checked: text by its manifest, files of the hub by the hash that the hub knows
them by, wheels by pip. `artifact/prefetched.py` says how a run finds them.
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
from kielo.corpus.fetch import downloaded, fetch_text, is_fetched
from kielo.launch.site import source_of_kielo
from kielo.recipe.cards import cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.software import NEWEST

_BLOCK_BYTES = 1 << 20
_WRITTEN_BY = "# written by kielo prefetch\n"
_STDERR = 2  # the descriptor: sys.stderr may be something else
Say = Callable[[str], None]


def prefetch(recipe: Recipe, folder: Path, python: str | None, say: Say) -> list[Brought]:
    """Bring what the recipe downloads into `folder`; return what that is, and lists it there.

    python: version that wheels are brought for, as "3.12"; None: no wheels. Raises KieloError for what could
    not be brought; what was brought before it stays, and the same call goes on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    brought = [*_texts(recipe, folder, say), *_of_hub(recipe, folder, say)]
    if python is not None:
        brought.append(_wheels(recipe, folder, python, say))
    before = read_json(folder, Prefetched)
    kept = [
        one for one in (before.brought if before else []) if (one.kind, one.folder) not in _names(brought)
    ]
    _tell_unfinished(folder / HUB_FOLDER, say)
    write_json(folder, Prefetched(
        brought=[*kept, *brought], made_at=datetime.now(UTC).isoformat(timespec="seconds")
    ))  # fmt: skip
    return brought


def _tell_unfinished(hub: Path, say: Say) -> None:
    """Tell of unfinished files that the hub's client leaves when it is killed, and never reads again.

    They stay: another call may be writing one.
    """
    halves = [path for path in hub.glob("*/blobs/*.incomplete") if path.is_file()]
    if halves:
        size = sum(path.stat().st_blocks for path in halves) * 512
        say(
            f"{len(halves)} unfinished files of a call that was cut short take {size / 1e9:,.1f} GB in "
            f"{hub}; nothing reads them: rm {shlex.quote(str(hub))}/*/blobs/*.incomplete"
        )


def missing(recipe: Recipe) -> list[str]:
    """Return what the recipe downloads and this machine does not have yet; nothing is asked of a network.

    Text only until it has become tokens.
    """
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


def own_files(recipe: Recipe) -> list[str]:
    """Return paths that the recipe names: files of a person, which are not brought."""
    paths = [path for source in recipe.corpus.sources if (path := source.path or source.tokens)]
    paths += [text.path for text in recipe.evaluate.texts]
    paths += recipe.evaluate.encoder_files.values()
    paths += filter(None, [recipe.model.transplant_vectors])
    for reference in (recipe.tokenizer.ready, recipe.model.weights):
        if reference is not None and not is_on_hub(reference):
            paths.append(reference.removeprefix("hf:"))
    return list(dict.fromkeys(paths))


def _names(brought: list[Brought]) -> set[tuple[str, str]]:
    return {(one.kind, one.folder) for one in brought}


def _texts(recipe: Recipe, folder: Path, say: Say) -> Iterator[Brought]:
    for source in downloaded(recipe.corpus.sources):
        root, manifest = fetch_text(source, folder, say)
        yield Brought(
            kind="text", name=source.name, origin=counts_of(root, manifest, RawCounts).origin,
            folder=str(root.relative_to(folder)),
            bytes=sum(file.bytes for file in manifest.files.values()),
        )  # fmt: skip


def _of_hub(recipe: Recipe, folder: Path, say: Say) -> Iterator[Brought]:
    """Bring weights and tokenizer; one repository may be both."""
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
        for path in damaged:  # the client takes a file that is there for whole
            if not path.resolve().is_relative_to(folder.resolve() / HUB_FOLDER):
                raise KieloError(
                    f"{path}: is damaged, and a link to {path.resolve()}, which Kielo did not write. "
                    "Fix: remove the link, and the same command goes on"
                )
            say(f"{kind}: {path.name} is damaged, and fetched again")
            path.resolve().unlink(missing_ok=True)
            path.unlink(missing_ok=True)
        if damaged:
            snapshot = fetch(reference, folder / HUB_FOLDER)
            if still := [path.name for path in damaged if not _is_as_hub_knows_it(path)]:
                raise KieloError(
                    f"{reference}: {still[0]} is twice not what the hub says it is; try again later"
                )
        yield Brought(
            kind=kind, name=reference.removeprefix("hf:").partition("@")[0],
            origin=f"Hugging Face hub, commit {snapshot.name}", folder=str(snapshot.relative_to(folder)),
            bytes=sum(path.stat().st_size for path in snapshot.iterdir() if path.is_file()),
        )  # fmt: skip


def _is_as_hub_knows_it(path: Path) -> bool:
    """Return True if a file of a snapshot has the hash by which the hub knows it: the name of its blob.

    SHA-256 of large files, git's SHA-1 of others. A blob of another name is taken as it is, and so is a
    folder, which the fetch does not make.
    """
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
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == blob.name


def _wheels(recipe: Recipe, folder: Path, python: str, say: Say) -> Brought:
    """Bring Kielo and all that it needs as wheels for the nodes of the recipe's cluster, by pip."""
    site, place = cluster(recipe.cluster), folder / WHEELS_FOLDER
    architecture = site.jobs.architecture if site.jobs else "x86_64"
    place.mkdir(exist_ok=True)
    pinned = place / "constraints.txt"
    if pinned.exists() and not pinned.read_text(encoding="utf-8").startswith(_WRITTEN_BY):
        raise KieloError(f"{pinned}: is not of `kielo prefetch`, and stays. Fix: another --to DIR")
    source = source_of_kielo()
    if not source:
        raise KieloError(
            "--wheels: it is not known where this Kielo was installed from; install it from its folder"
        )
    say(f"wheels: Kielo and what it needs, for Python {python} on {architecture}")
    _pip("wheel", "--no-deps", "--wheel-dir", str(place), source)
    platforms = [f"--platform=manylinux_{glibc}_{architecture}" for glibc in ("2_28", "2_27", "2_17")]
    with tempfile.TemporaryDirectory() as scratch:
        constraints = Path(scratch) / "constraints.txt"
        constraints.write_text(f"torch=={site.torch or NEWEST}.*\n", encoding="utf-8")
        _pip(
            "download", "--dest", str(place), "--find-links", str(place), "--only-binary=:all:",
            f"--python-version={python}", *platforms, f"--platform=manylinux2014_{architecture}",
            "--constraint", str(constraints), "kielo[train]",
        )  # fmt: skip
    files = sorted(place.glob("*.whl"))
    pins = [f"{file.name.split('-')[0]}=={file.name.split('-')[1]}\n" for file in files]
    write_text_atomically(pinned, _WRITTEN_BY + "".join(pins))
    return Brought(
        kind="wheels", name=f"Python {python}, {architecture}", origin=f"pip, {len(files)} wheels",
        folder=WHEELS_FOLDER, bytes=sum(file.stat().st_size for file in files),
    )  # fmt: skip


def _pip(*arguments: str) -> None:
    """Run pip, whose bars and words go to stderr."""
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=_STDERR, check=False)
    if done.returncode:
        raise KieloError(
            f"--wheels: pip {arguments[0]} failed, for the reason above; the same command goes on"
        )
