"""Sets of ready token files, the source `tokens = "PREFIX"` of a recipe: found, described, compared.

A description has neither the folder nor the times of the files, because the same files elsewhere are the same
text. The counts in the manifest of RUN/tokens have both.
"""

import glob
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import ClassVar

from kielo.artifact.manifest import hash_file, hash_json
from kielo.artifact.stage_json import JsonFile, JsonObject
from kielo.artifact.token_file import TokenFile
from kielo.artifact.token_file_formats import FORMATS, describe, index_path, is_mask
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe

SMALLEST_UINT32_VOCABULARY = (1 << 16) + 1  # below it flat ids are uint16, as OLMo and datatrove write them
# Other files of tokens, and known formats when compressed or packed.
_UNREAD_TOKENS = re.compile(
    r"\.(npz|pt|pth|arrow|parquet|mds|h5|hdf5|pkl|pickle|chunk|tokens|tar|zip|tgz)$"
    r"|\.(bin|idx|npy|ds|npz|mds|tar)\.(gz|zst|zstd|xz|bz2|lz4)$",
    re.IGNORECASE,
)
_SUFFIXES = tuple(kind.suffix for kind in FORMATS.values())
KNOWN = "PREFIX.bin with PREFIX.idx, NAME.npy, NAME.ds with NAME.ds.index, or a folder or pattern of them"


class TokenFileSet(JsonObject):
    files: tuple[TokenFile, ...]
    """Descriptions; names are relative to the folder that the manifest's counts name."""
    training_tokens: int
    """Tokens before the held-out documents, which are the last."""

    @property
    def tokens(self) -> int:
        return sum(file.tokens for file in self.files)


class TokenFiles(JsonFile):
    """The sources of a run that are read in place."""

    FILE_NAME: ClassVar[str] = "token_files.json"

    end_of_text_id: int
    sources: dict[str, TokenFileSet]


@dataclass(frozen=True)
class FoundFiles:
    """The files of a source on this machine."""

    folder: Path
    files: tuple[TokenFile, ...]
    times_ns: tuple[tuple[int, ...], ...]  # of the last writes of each file, its index and its mask
    unread: tuple[str, ...] = ()  # other files in the source's folders

    @property
    def identity(self) -> str:
        return hash_json([file.content() for file in self.files])


def find_token_sources(recipe: Recipe, vocab_size: int) -> dict[str, FoundFiles]:
    usual, found = "uint32" if vocab_size >= SMALLEST_UINT32_VOCABULARY else "uint16", {}
    for source in recipe.corpus.token_sources:
        width = 2 if (source.tokens_dtype or usual) == "uint16" else 4
        found[source.name] = find_token_files(source.name, source.tokens or "", width, source.leave_out)
    return found


def find_token_files(name: str, place: str, width: int, leave_out: Sequence[str] = ()) -> FoundFiles:
    """Describe the files of source `name` at `place`, in the order of their names.

    place: a form of KNOWN, with or without .bin, .idx. width: bytes of an id, if files do not store it.
    leave_out: patterns of names below `place` to ignore. KieloError for odd or no files, or other formats.
    """
    paths, unread = list_token_files(name, place, leave_out)
    folder = Path(os.path.commonpath([path.parent for path in paths]))
    try:
        names = ({"name": path.relative_to(folder).as_posix()} for path in paths)
        files = [
            describe(path, width).model_copy(update=name) for path, name in zip(paths, names, strict=True)
        ]
        times_ns = tuple(_times(folder, file) for file in files)
    except OSError as problem:
        what = f"{problem.filename}: cannot be read ({problem.strerror})"
        raise KieloError(f"corpus.sources, {name}: {what}") from None
    if not any(file.tokens for file in files):
        what = f"tokens = {place!r}: {len(files)} files, none of which has a token"
        raise KieloError(f"corpus.sources, {name}: {what}. Fix: other files, or leave the source out")
    return FoundFiles(folder, tuple(files), times_ns, tuple(unread))


def list_token_files(name: str, place: str, leave_out: Sequence[str] = ()) -> tuple[list[Path], list[str]]:
    """Return the data files of source `name`, and names of others there. KieloError as `find_token_files`."""
    paths, unread = _find(place, leave_out)
    if data := [path for path in unread if _UNREAD_TOKENS.search(path) and not _is_left_out(path, leave_out)]:
        raise KieloError(
            f"corpus.sources, {name}: {len(data)} files that look like tokens would not be read: "
            f"{', '.join(data[:5])}; read are {KNOWN}. Fix: convert or unpack them, or name them in leave_out"
        )
    if not paths:
        raise KieloError(f"corpus.sources, {name}: tokens = {place!r}: no token file there. Fix: {KNOWN}")
    return paths, unread


def check_unchanged(
    name: str, folder: Path, files: Sequence[TokenFile], times_ns: Sequence[Sequence[int]]
) -> None:
    """Raise KieloError for a file whose size or time differs from its description."""
    for file, noted in zip(files, times_ns, strict=True):
        path = folder / file.name
        try:
            size, times = path.stat().st_size, _times(folder, file)
        except OSError as problem:
            raise KieloError(
                f"{problem.filename}: cannot be read ({problem.strerror}); source {name} is read in place. "
                "Fix: the file in its place, or `kielo run RECIPE --to pack` with its new place in "
                "corpus.sources"
            ) from None
        if size == file.bytes and times == tuple(noted):
            continue
        is_as_large, now = size == file.bytes, f"{size:,} bytes, described were {file.bytes:,}"
        how = "its data, index or loss mask was rewritten" if is_as_large else now
        raise KieloError(
            f"{path}: changed since the pack stage described it ({how}); source {name} is read in place. "
            "Fix: `kielo run RECIPE --to pack`, which reads the whole file and accepts it if the content is "
            "the same, or the file as it was"
        )


def checksum(folder: Path, file: TokenFile) -> str:
    return hash_json([hash_file(path) for path in _parts(folder, file)])


def _times(folder: Path, file: TokenFile) -> tuple[int, ...]:
    return tuple(path.stat().st_mtime_ns for path in _parts(folder, file))


def _parts(folder: Path, file: TokenFile) -> list[Path]:
    path = folder / file.name
    index = index_path(path, file.format)
    beside = [path.with_name(file.loss_mask)] if file.loss_mask else []
    return [path, *([index] if index and file.index_bytes else []), *beside]


def _find(place: str, leave_out: Sequence[str]) -> tuple[list[Path], list[str]]:
    place = os.path.expanduser(place)
    found = sorted(glob.glob(place, recursive=True)) if glob.has_magic(place) else [place]
    paths: set[Path] = set()
    unread: set[str] = set()
    for entry in found:
        if os.path.isdir(entry):
            below = {Path(root, name) for root, _, names in os.walk(entry) for name in names}
            names = {path: path.relative_to(entry).as_posix() for path in below}
            data = [path for path in below if path.name.endswith(_SUFFIXES) and path.name[0] != "."]
            read = {
                path for path in data if not is_mask(path.name) and not _is_left_out(names[path], leave_out)
            }
            others = below - read
            paths |= read
            unread |= {names[path] for path in others if not _is_beside(path, read)}
        elif entry.endswith(".idx"):
            paths.add(Path(entry.removesuffix(".idx") + ".bin"))
        elif entry.endswith(_SUFFIXES) and not is_mask(os.path.basename(entry)):
            paths.add(Path(entry))
        elif os.path.isfile(entry + ".bin") or os.path.isfile(entry + ".idx"):
            paths.add(Path(entry + ".bin"))
    return sorted(Path(os.path.abspath(path)) for path in paths), sorted(unread)


def _is_left_out(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _is_beside(path: Path, read: set[Path]) -> bool:
    name = path.name
    owners = {name.removesuffix(end) for end in (".index", ".metadata", ".loss")}
    owners |= {name.removesuffix(end) + ".bin" for end in (".idx", ".loss_mask")}
    owners |= {name.removesuffix(".loss_mask") + ".npy"}
    return is_mask(name) or any(path.with_name(owner) in read for owner in owners - {name})
