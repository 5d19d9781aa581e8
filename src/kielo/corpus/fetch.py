"""Fetches of every source's files to this disk, once, with their hashes: recipe sources → `RawSource`s.

A path stays in place. Files of an address (https://, s3://, hf://), a Debian package or a Hugging Face
dataset are stored in raw/NAME, with a manifest of their origin, and of why the first choice failed.
"""

import errno
import fnmatch
import glob
import json
import os
import re
import shutil
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import (
    Manifest,
    finished_manifest,
    hash_file,
    hash_json,
    hash_manifest,
    is_current,
    write_json_atomically,
    write_stage,
)
from kielo.artifact.prefetched import not_brought, text_folder
from kielo.artifact.remote_files import RemoteFiles
from kielo.artifact.stage_counts import RawCounts
from kielo.artifact.stage_json import counts_of
from kielo.corpus import web_archives
from kielo.corpus.download import (
    FetchProblem,
    fetch_address,
    fetch_debian_package,
    fetch_huggingface_dataset,
)
from kielo.corpus.input_files import file_stamps
from kielo.corpus.raw_formats import (
    ARCHIVES,
    RawSource,
    file_format,
    first_names,
    formats,
    is_about,
    is_left_out,
    is_readable,
    raw_source,
    refuse_unread,
)
from kielo.recipe.errors import KieloError
from kielo.recipe.read import REPLACED_FOLDERS
from kielo.recipe.sections import Recipe, Source

VERSION = 1
_Place = tuple[str, tuple[str, ...]]  # the real path of a folder, and the parts of a pattern for what it has
_Visit = tuple[Path, tuple[str, ...], tuple[_Place, ...]]  # a folder, these parts, and the places on its way
HASHES_NAME = ".kielo-hashes.json"  # hidden: a folder `raw` may be a person's


def fetch_sources(
    recipe: Recipe, raw_folder: Path, say: Callable[[str], None], prefetched: Path | None = None
) -> tuple[RawSource, ...]:
    """Fetch every source, or read it in the folder of `kielo prefetch`. `say` gets a line of progress."""
    for source in recipe.corpus.sources:
        if source.address_of_files and not prefetched and not is_fetched(source, raw_folder, None):
            RemoteFiles(source.address_of_files)  # refuses a missing package before hours of fetching
    return tuple(_fetch(source, Path(raw_folder), say, prefetched) for source in recipe.corpus.sources)


def downloaded(sources: Sequence[Source]) -> list[Source]:
    return [source for source in sources if source.is_downloaded]


def is_fetched(source: Source, raw_folder: Path, prefetched: Path | None) -> bool:
    return _place(source, raw_folder, prefetched)[1]


def fetch_text(source: Source, folder: Path, say: Callable[[str], None]) -> tuple[Path, Manifest]:
    """Download a source into the folder of `kielo prefetch`. Return its folder and its manifest."""
    root, is_there = _place(source, folder, folder)
    if is_there:
        say(f"{source.name}: fetched before")
    else:
        root = text_folder(folder, source.name, _wanted(source))
        _download(source, root, say)
    return root, finished_manifest(root)


def has_archives(source: Source, folder: Path) -> bool:
    """Return True if a source in the folder of `kielo prefetch`, or on this disk, has web archives.

    Of files that are only on another machine the path says it.
    """
    root, is_there = _place(source, folder, folder)
    files: Iterable[str] = [source.path or ""]
    if is_there:
        files = finished_manifest(root).files
    elif source.local_path:
        with suppress(KieloError, OSError):
            files = [*files, *local_files(source)[1]]
    return any(re.search(rf"\.({'|'.join(ARCHIVES)})\b", file, re.IGNORECASE) for file in files)


def _wanted(source: Source) -> JsonTable:
    """Return the keys that decide which files are downloaded."""
    keys = {"debian_package", "huggingface_dataset", "huggingface_subset", "max_documents"}
    if source.address_of_files:
        keys = {"path", "kind", "leave_out", "max_documents"}
    return source.model_dump(include=keys)


def _place(source: Source, raw_folder: Path, prefetched: Path | None) -> tuple[Path, bool]:
    """Return the folder of a downloaded source, and whether it is there and complete."""
    wanted = _wanted(source)
    places = [text_folder(prefetched, source.name, wanted)] if prefetched else []
    for root in (*places, raw_folder / source.name):
        if is_current(root, "raw", VERSION, {}, wanted):
            return root, True
    return raw_folder / source.name, False


def _fetch(
    source: Source, raw_folder: Path, say: Callable[[str], None], prefetched: Path | None
) -> RawSource:
    name = source.name
    if source.local_path:
        root, files, unread = local_files(source)
        _refuse_own_files(name, Path(source.local_path).expanduser(), root, files, raw_folder.parent)
        stamps = file_stamps(root, files)  # before they are hashed
        origin, fingerprint = source.local_path, _hash_files(root, files, raw_folder)
    else:
        root, is_there = _place(source, raw_folder, prefetched)
        if is_there:
            say(f"{name}: fetched before")
        elif prefetched is not None:
            raise not_brought(f"corpus.sources, {name}")
        else:
            _download(source, root, say)
        manifest = finished_manifest(root)
        files = sorted(file for file in manifest.files if is_readable(Path(file), source.kind))
        files = [file for file in files if not is_left_out(file, source)]
        unread = sorted(set(manifest.files) - set(files))
        stamps = file_stamps(root, files)
        origin, fingerprint = counts_of(root, manifest, RawCounts).origin, hash_manifest(root)
    if any(file_format(Path(file), source.kind) in ARCHIVES for file in files):
        web_archives.refuse_missing(name)
    more = {"stamps": stamps, "unread": tuple(unread)}
    found = raw_source(source, root, files, origin, fingerprint=fingerprint, **more)
    # Kielo once read columns 1 and 2 of .tsv files for any names: those corpora are not current.
    by_name = hash_json([fingerprint, "columns by name"])
    return replace(found, fingerprint=by_name) if found.column_names else found


def _download(source: Source, folder: Path, say: Callable[[str], None]) -> None:
    name, problems = source.name, list[str]()  # the manifest has the problems of the first way
    aside = folder.with_name(f".{folder.name}.downloads")  # an interrupted download resumes from it
    ways: list[tuple[str, Callable[[Source, Path], str]]] = []
    versions: dict[str, str] = {}
    if source.address_of_files:
        ways.append(
            (source.address_of_files, partial(fetch_address, aside=aside, versions=versions, say=say))
        )
    if source.debian_package:
        ways.append((f"Debian package {source.debian_package}", fetch_debian_package))
    if source.huggingface_dataset:
        fetched = partial(fetch_huggingface_dataset, aside=aside)
        ways.append((f"Hugging Face dataset {source.huggingface_dataset}", fetched))
    for title, way in ways:
        say(f"{name}: fetching {title}")
        try:
            with write_stage(folder, "raw", VERSION, {}, _wanted(source)) as stage:
                origin = way(source, stage.folder)
                if not any(is_readable(path, source.kind) for path in stage.folder.rglob("*")):
                    raise FetchProblem(f"no files of a known format in it ({formats(source.kind)})")
                counts = RawCounts(origin=origin, problems=problems, versions=versions)
                stage.counts.update(counts.content())
            shutil.rmtree(aside, ignore_errors=True)
            return
        except FetchProblem as problem:
            problems.append(f"{title}: {problem}")
            say(f"{name}: {problems[-1]}")
    fix = "" if source.address_of_files else ". Fix: use a text of your own: --set corpus.sources=my.txt"
    raise KieloError(f"corpus.sources, {name}: could not be fetched. {'; '.join(problems)}{fix}")


def local_files(source: Source) -> tuple[Path, list[str], list[str]]:
    """Return the folder of a local source, and the sorted names in it that are read, and that are not."""
    name, pattern, kind = source.name, source.path or "", source.kind
    where = f"corpus.sources, {name}"
    place = Path(pattern).expanduser()
    if place.is_file():
        if not is_readable(place, kind):
            raise KieloError(f"{where}: {place}: unknown format. Fix: {formats(kind)}")
        _check_file(name, place)
        return place.parent, [place.name], []
    root, parts, is_folder = place, tuple[str, ...](), place.is_dir()
    if not is_folder:
        root = Path(glob.escape(str(place)).partition("[")[0]).parent
        parts = place.relative_to(root).parts
    read, unread = set[str](), set[str]()
    given, left_out = set[tuple[str, str]](), dict[tuple[str, str], str]()
    for folder, path in _find(source, root, parts):
        # Links give a file several names. It is read by the first that is not left out.
        this, file = (folder, path.name), path.relative_to(root).as_posix()
        shown = os.fsencode(file).decode("utf-8", "backslashreplace")  # for messages and records
        if is_left_out(file, source):
            left_out.setdefault(this, shown)
        elif this not in given:
            given.add(this)
            if is_readable(path, kind) and not is_about(path):
                _check_file(name, path)
                read.add(file)
            else:
                unread.add(shown)
    if not (is_folder or given or left_out):
        below = "" if place.is_absolute() else f" in {Path.cwd()}"
        raise KieloError(f"{where}: {pattern}: no such file or folder, or no match{below}")
    unread |= {shown for this, shown in left_out.items() if this not in given}
    if not read:
        skipped = f" (not read: {first_names(sorted(unread))})" * bool(unread)
        raise KieloError(f"{where}: {pattern}: has no file of text{skipped}. Fix: {formats(kind)}")
    if kind != "code":  # beside code there may be anything
        refuse_unread(source, sorted(unread))
    return root, sorted(read), sorted(unread)


def _refuse_own_files(name: str, place: Path, root: Path, files: list[str], run_folder: Path) -> None:
    """Refuse files that a stage of this run replaces: they would be lost, or be text made from text."""
    if place.is_dir() and run_folder.resolve().is_relative_to(place.resolve()):
        raise KieloError(
            f"corpus.sources, {name}: {place} contains the run's own folder {run_folder}, whose files would "
            "become text. Fix: a folder or a pattern without it, or another `folder` of the run"
        )
    for file in files:
        path = (root / file).resolve()
        for stage in REPLACED_FOLDERS:
            if path.is_relative_to((run_folder / stage).resolve()):
                raise KieloError(
                    f"corpus.sources, {name}: {root / file} is in {run_folder / stage}, which Kielo "
                    "writes and replaces. Fix: a source outside of it, or another `folder` of the run"
                )


def _find(source: Source, root: Path, parts: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Yield the files that a glob of these parts matches below `root`, and all files of matching folders.

    No parts match `root`. Each file comes with the real path of its folder. Names without a link come first.
    A name ends at a folder that it has passed. A folder is read by another name only if `leave_out` can tell
    the names of its files apart. So links in a circle end. A folder that cannot be read is refused.
    """
    own, linked = deque[_Visit]([(root, parts, ())]), deque[_Visit]()
    seen = set[tuple[_Place, frozenset[str]]]()
    while own or linked:
        folder, parts, way = (own or linked).popleft()
        if parts == ("**",) and folder != Path():  # in which `**` matches no hidden names
            parts = ()
        first, rest = "".join(parts[:1]), parts[1:]
        here = os.path.realpath(folder), parts
        prefix = "" if folder == root else f"{folder.relative_to(root).as_posix()}/"
        visit = here, _begun(prefix, source.leave_out)
        if here in way or visit in seen:
            continue
        seen.add(visit)
        if (is_deep := first == "**") and rest:
            own.appendleft((folder, rest, way))
        try:
            for path in _named(folder, "*" if is_deep else first):
                if _is_folder(path):
                    below = path, parts if is_deep else rest, (*way, here)
                    (linked if path.is_symlink() else own).append(below)
                elif not rest:
                    yield here[0], path
        except OSError as problem:
            _refuse_unreadable(source.name, problem)


def _begun(folder: str, patterns: Iterable[str]) -> frozenset[str]:
    """Return the beginnings of the patterns that match. Files in folders with the same are left out alike."""
    beginnings = {pattern[:end] for pattern in patterns for end in range(len(pattern) + 1)}
    return frozenset(one for one in beginnings if fnmatch.fnmatch(folder, one))


def _named(folder: Path, pattern: str) -> list[Path]:
    """Return what a folder has of this name or pattern, and all that it has for ""."""
    try:
        if pattern and glob.escape(pattern) == pattern:
            (folder / pattern).lstat()  # the folder need not be listed
            return [folder / pattern]
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    if pattern:
        names = [name for name in fnmatch.filter(names, pattern) if name[0] != "." or pattern[0] == "."]
    return [folder / name for name in names]


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as problem:
        if problem.errno in (errno.ENOENT, errno.ELOOP):  # a link that leads nowhere
            return False
        raise


def _refuse_unreadable(name: str, problem: OSError) -> None:
    raise KieloError(
        f"corpus.sources, {name}: {problem.filename}: cannot be read ({problem.strerror}). Fix: make it "
        "readable, or a path without it"
    )


def _check_file(name: str, path: Path) -> None:
    if not path.is_file():
        what = "a link that leads nowhere" if path.is_symlink() else "neither a file nor a folder"
        raise KieloError(f"corpus.sources, {name}: {path}: {what}. Fix: repair or remove it")
    if not os.access(path, os.R_OK):
        raise KieloError(f"corpus.sources, {name}: {path}: no permission to read it. Fix: `chmod +r`")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path)
        raise KieloError(f"corpus.sources, {name}: {shown!r}: not UTF-8. Fix: rename the file") from None


def _hash_files(root: Path, files: list[str], raw_folder: Path) -> str:
    cache_path, known = raw_folder / HASHES_NAME, {}
    with suppress(OSError, ValueError):
        known = json.loads(cache_path.read_text(encoding="utf-8"))
    known = known if isinstance(known, dict) else {}
    hashes, fresh = {}, False
    for file in files:
        path = (root / file).resolve()
        status = path.stat()
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")  # JSON has no other bytes
        # A file in place of another has another inode, and a file written with its old time another ctime.
        key = f"{shown}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}|{status.st_ino}"
        if key not in known:
            known[key], fresh = hash_file(path), True
        hashes[file] = known[key]
    if fresh:
        with suppress(OSError):  # read again next time; the stage reports a faulty disk
            write_json_atomically(cache_path, known)
    return hash_json(hashes)
