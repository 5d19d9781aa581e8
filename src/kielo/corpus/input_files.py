"""The files that decide what a corpus is made of, and whether they are as the plan of its tasks has them.

They are the files of the sources, and beside them own steps, texts of the evaluation and the file of a
language identifier.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

from kielo.artifact.manifest import hash_file
from kielo.corpus.evaluation_items import evaluation_items
from kielo.corpus.raw_formats import RawSource, unreadable
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import IDENTIFIERS, Recipe


def file_stamps(root: Path | str, files: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Return (bytes, time of change in ns) of each file, which show if a file was changed."""
    found = []
    for file in files:
        try:
            status = (Path(root) / file).stat()
        except OSError as problem:
            raise unreadable(Path(root) / file, problem) from None
        found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)


def refuse_changed(source: RawSource, files: Sequence[str]) -> None:
    """Raise KieloError for a file of the source that is not as it was before it was hashed."""
    known = dict(zip(source.files, source.stamps, strict=True))
    for file, now in zip(files, file_stamps(source.root, files), strict=True):
        if now != known[file]:
            raise _changed(Path(source.root) / file)


def hashes_beside(recipe: Recipe) -> dict[str, str]:
    """Return path → hash of the files beside the sources, in the order in which the recipe has them."""
    return {str(path): known_hash(path) for path in _files_beside(recipe)}


def refuse_changed_beside(recipe: Recipe, planned: Mapping[str, str]) -> None:
    """Raise KieloError for a file beside the sources with another hash than planned, in any folder."""
    found = hashes_beside(recipe)
    for before, now in zip_longest(planned, found):
        if planned.get(before) != found.get(now):
            raise _changed(before if len(found) < len(planned) else now)


def known_hash(path: Path) -> str:
    """Return the hash of a file, which is read again only if it was changed. A missing file has ""."""
    try:
        status = path.stat()
        marks = status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
        return _hash(path, *marks)
    except OSError:
        return ""


@lru_cache(maxsize=1 << 16)
def _hash(path: Path, *marks: int) -> str:
    return hash_file(path)


def _files_beside(recipe: Recipe) -> Iterator[Path]:
    corpus = recipe.corpus
    yield from (Path(path).expanduser().absolute() for path in corpus.own_steps)
    yield from (path for one in evaluation_items(recipe) for path in one.files)
    if corpus.language_identifier not in IDENTIFIERS:
        yield Path(corpus.language_identifier).absolute()


def _changed(path: Path | str) -> KieloError:
    return KieloError(f"{path}: changed while the corpus was read. Fix: run again once nobody writes to it")
