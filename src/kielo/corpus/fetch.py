"""Fetches every source's files to this disk, once, and hashes them.

Recipe sources -> `RawSource`s. A path stays where it is; a Debian package or a Hugging Face dataset lands in
raw/NAME with a manifest of its own that records where it came from, and why not from the first choice.
"""

import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
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
from kielo.artifact.stage_counts import RawCounts
from kielo.artifact.stage_json import counts_of
from kielo.corpus.download import FetchProblem, fetch_debian_package, fetch_huggingface_dataset
from kielo.corpus.raw_formats import RawSource, formats, is_about, is_data, is_readable
from kielo.corpus.step import is_cleaned, text_fields
from kielo.recipe.errors import KieloError
from kielo.recipe.read import REPLACED_FOLDERS
from kielo.recipe.sections import Recipe, Source

VERSION = 1
HASHES_NAME = ".kielo-hashes.json"  # hidden: a folder `raw` may be a person's
OWN_TEXT = "--set corpus.sources=my.txt takes a text of your own"


def fetch_sources(
    recipe: Recipe, raw_folder: Path, say: Callable[[str], None], prefetched: Path | None = None
) -> tuple[RawSource, ...]:
    """Fetch every source. `say` gets a line of progress.

    prefetched: the folder of `kielo prefetch`, whose text is read in place; nothing is then downloaded.
    Raises KieloError for a source that is missing, holds no file of a known format, or cannot be fetched.
    """
    return tuple(_fetch(source, Path(raw_folder), say, prefetched) for source in recipe.corpus.sources)


def downloaded(sources: Sequence[Source]) -> list[Source]:
    """Return the sources whose text is not on this disk by itself."""
    return [source for source in sources if source.debian_package or source.huggingface_dataset]


def is_fetched(source: Source, raw_folder: Path, prefetched: Path | None) -> bool:
    """Return True if a downloaded source is in the run's folder, or was brought by `kielo prefetch`."""
    return _place(source, raw_folder, prefetched)[1]


def fetch_text(source: Source, folder: Path, say: Callable[[str], None]) -> tuple[Path, Manifest]:
    """Download a source into the folder of `kielo prefetch`; returns where it is, and its manifest."""
    root, is_there = _place(source, folder, folder)
    if is_there:
        say(f"{source.name}: brought before")
    else:
        _download(
            source.name, source, text_folder(folder, source.name, _wanted(source)), _wanted(source), say
        )
        root = text_folder(folder, source.name, _wanted(source))
    return root, finished_manifest(root)


def _wanted(source: Source) -> JsonTable:
    return source.model_dump(
        include={"debian_package", "huggingface_dataset", "huggingface_subset", "max_documents"}
    )


def _place(source: Source, raw_folder: Path, prefetched: Path | None) -> tuple[Path, bool]:
    """Return the folder of a downloaded source, and whether it is there whole."""
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
    if source.path:
        root, files, unread = local_files(source)
        _refuse_own_files(name, Path(source.path).expanduser(), root, files, raw_folder.parent)
        stamps = file_stamps(root, files)
        origin, fingerprint = source.path, _hash_files(root, files, raw_folder)
    else:
        root, is_there = _place(source, raw_folder, prefetched)
        if is_there:
            say(f"{name}: fetched before")
        elif prefetched is not None:
            raise not_brought(f"corpus.sources, {name}")
        else:
            _download(name, source, root, _wanted(source), say)
        manifest = finished_manifest(root)
        left_out = {file for file in manifest.files if _is_left_out(file, source)}
        files = sorted(file for file in manifest.files if is_readable(Path(file), source.kind))
        files = [file for file in files if file not in left_out]
        unread = sorted(set(manifest.files) - set(files))
        stamps = file_stamps(root, files)
        origin, fingerprint = counts_of(root, manifest, RawCounts).origin, hash_manifest(root)
    return RawSource(
        name=name,
        root=str(root),
        files=tuple(files),
        stamps=stamps,
        kind=source.kind,
        is_cleaned=is_cleaned(source),
        documents=source.documents,
        text_fields=text_fields(source),
        max_documents=source.max_documents,
        origin=origin,
        fingerprint=fingerprint,
        encoding=source.encoding,
        unread=tuple(unread),
    )


def file_stamps(root: Path | str, files: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Read (bytes, time of change in ns) of each file; equal before and after, it was not changed."""
    found = []
    for file in files:
        try:
            status = (Path(root) / file).stat()
        except OSError as problem:
            raise KieloError(f"{Path(root) / file}: cannot be read ({problem.strerror})") from None
        found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)


def _download(name: str, source: Source, folder: Path, wanted: JsonTable, say: Callable[[str], None]) -> None:
    """Download the Debian package, else the dataset; the manifest's counts name it and what failed."""
    problems: list[str] = []
    aside = folder.with_name(f".{folder.name}.downloads")  # what a download that is cut short goes on from
    ways: list[tuple[str, Callable[[Source, Path], str]]] = []
    if source.debian_package:
        ways.append((f"Debian package {source.debian_package}", fetch_debian_package))
    if source.huggingface_dataset:
        fetched = partial(fetch_huggingface_dataset, aside=aside)
        ways.append((f"Hugging Face dataset {source.huggingface_dataset}", fetched))
    for title, way in ways:
        say(f"{name}: fetching {title}")
        try:
            with write_stage(folder, "raw", VERSION, {}, wanted) as stage:
                origin = way(source, stage.folder)
                if not any(is_readable(path, source.kind) for path in stage.folder.rglob("*")):
                    raise FetchProblem(f"no files of a known format in it ({formats(source.kind)})")
                stage.counts.update(RawCounts(origin=origin, problems=problems).content())
            shutil.rmtree(aside, ignore_errors=True)
            return
        except FetchProblem as problem:
            problems.append(f"{title}: {problem}")
            say(f"{name}: {problems[-1]}")
    raise KieloError(f"corpus.sources, {name}: could not be fetched. {'; '.join(problems)}. {OWN_TEXT}")


def local_files(source: Source) -> tuple[Path, list[str], list[str]]:
    """Return the folder that names are relative to, and the names that are read and those that are not.

    Names are sorted. Raises KieloError for a path without a file that is read, and for one that holds data
    and is not read, unless the source leaves it out.
    """
    name, pattern, kind = source.name, source.path or "", source.kind
    place = Path(pattern).expanduser()
    if place.is_file():
        if not is_readable(place, kind):
            raise KieloError(f"corpus.sources, {name}: {place}: unknown format; read are {formats(kind)}")
        _is_file(name, place)
        return place.parent, [place.name], []
    if place.is_dir():
        root, entries = place, [place]
    else:
        entries = [Path(path) for path in glob.glob(str(place), recursive=True)]
        if not entries:
            raise KieloError(
                f"corpus.sources, {name}: {pattern}: no such file or folder, and no file fits it as a pattern"
            )
        root = Path(glob.escape(str(place)).partition("[")[0]).parent
    found = (path for entry in entries for path in (_files_below(name, entry) if entry.is_dir() else [entry]))
    read, unread = set(), set()
    for path in found:
        file = path.relative_to(root).as_posix()
        if is_readable(path, kind) and not is_about(path) and not _is_left_out(file, source):
            read |= {file} if _is_file(name, path) else set()
        elif not path.is_dir():
            unread.add(file)
    if not read:
        raise KieloError(
            f"corpus.sources, {name}: {pattern}: holds no file of a known format; read are {formats(kind)}"
        )
    if kind != "code":  # beside which there may be anything
        _refuse_unread(source, sorted(unread))
    return root, sorted(read), sorted(unread)


def _is_left_out(file: str, source: Source) -> bool:
    return any(fnmatch(file, pattern) for pattern in source.leave_out)


def _refuse_unread(source: Source, unread: Sequence[str]) -> None:
    """Raise KieloError for files of data that would be left out without a word."""
    data = [file for file in unread if is_data(Path(file)) and not _is_left_out(file, source)]
    if data:
        endings = sorted({"*" + "".join(Path(file).suffixes[-2:]) for file in data})
        raise KieloError(
            f"corpus.sources, {source.name}: {len(data)} files that look like data would not be read: "
            f"{', '.join(data[:5])}{', …' * (len(data) > 5)}. Read are {formats(source.kind)}. Fix: convert "
            f"them, or leave_out = {json.dumps(endings[:5])} in the source"
        )


def _refuse_own_files(name: str, place: Path, root: Path, files: list[str], run_folder: Path) -> None:
    """Raise KieloError for a file in a folder that a stage of this run replaces.

    It would be lost, or be text made from text.
    """
    if place.is_dir() and run_folder.resolve().is_relative_to(place.resolve()):
        raise KieloError(
            f"corpus.sources, {name}: {place} holds the run's own folder {run_folder}, whose files would "
            "become text; name a folder or a pattern without it, or give the run another `folder`"
        )
    for file in files:
        path = (root / file).resolve()
        for stage in REPLACED_FOLDERS:
            if path.is_relative_to((run_folder / stage).resolve()):
                raise KieloError(
                    f"corpus.sources, {name}: {root / file} is in {run_folder / stage}, which Kielo "
                    "writes and replaces; name a source outside of it, or give the run another `folder`"
                )


def _files_below(name: str, folder: Path) -> Iterator[Path]:
    """Yield all files below the folder, also behind links; each folder once: links may lead in a circle."""

    def refuse(problem: OSError) -> None:
        raise KieloError(f"corpus.sources, {name}: {problem.filename}: cannot be read ({problem.strerror})")

    seen: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders.sort()
        yield from (Path(parent) / file for file in names)


def _is_file(name: str, path: Path) -> bool:
    """Return True for a readable file, False for a folder.

    Raises KieloError for a file with a text's name that cannot be read: it is not left out silently.
    """
    if path.is_dir():
        return False
    if not path.is_file():
        what = "a link that leads nowhere" if path.is_symlink() else "neither a file nor a folder"
        raise KieloError(f"corpus.sources, {name}: {path}: {what}; repair or remove it")
    if not os.access(path, os.R_OK):
        raise KieloError(f"corpus.sources, {name}: {path}: no permission to read it; `chmod +r` gives it")
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise KieloError(
            f"corpus.sources, {name}: {os.fsencode(path)!r}: a file name that is not UTF-8; rename it"
        ) from None
    return True


def _hash_files(root: Path, files: list[str], raw_folder: Path) -> str:
    """Hash the files' names and contents.

    Contents are read again when size, times or inode differ: a file put in place of another has another
    inode, and one written with its old time set back has another time of status change.
    """
    cache_path = raw_folder / HASHES_NAME
    known = _read_cache(cache_path)
    hashes, fresh = {}, False
    for file in files:
        path = (root / file).resolve()
        status = path.stat()
        key = f"{path}|{status.st_size}|{status.st_mtime_ns}|{status.st_ctime_ns}|{status.st_ino}"
        if key not in known:
            known[key], fresh = hash_file(path), True
        hashes[file] = known[key]
    if fresh:
        with suppress(OSError):  # read again next time; the stage reports a faulty disk
            write_json_atomically(cache_path, known)
    return hash_json(hashes)


def _read_cache(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
