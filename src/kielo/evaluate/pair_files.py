"""Files of minimal pairs: a good and a bad sentence that differ in one point; no torch.

BLiMP (Warstadt et al. 2020) is a folder or .zip of `.jsonl` files with a paradigm each. Hidden files and what
macOS adds to a .zip are no pairs.
"""

import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from kielo.artifact.scores import MinimalPairScores, PairAccuracy
from kielo.evaluate.texts import decoded_lines, text_lines
from kielo.recipe.errors import KieloError

# Names of the good and the bad sentence, in BLiMP and MultiBLiMP, and of a pair's phenomenon.
SENTENCES = (("sentence_good", "sentence_bad"), ("sen", "wrong_sen"))
GROUPS = ("phenomenon", "UID")
TERM = "linguistics_term"
_FORM = (
    "a .jsonl with an object a line, or a .tsv with a line of names, that have sentence_good and "
    "sentence_bad (or sen and wrong_sen), and may have a phenomenon"
)
_FORM_OF_MANY = "a folder or .zip of .jsonl files with sentence_good and sentence_bad, as BLiMP is"


class Pair(NamedTuple):
    good: str
    bad: str
    group: str  # their phenomenon, "" if the file does not name it
    term: str = ""  # BLiMP's name of the phenomenon of which `group` is a paradigm


def read_pairs(path: Path) -> list[Pair]:
    """Read the pairs of a file, folder or .zip. Raise KieloError for a malformed pair, with its line."""
    pairs = []
    for where, stem, row in _rows(path):
        names = next((names for names in SENTENCES if all(name in row for name in names)), None)
        if names is None or not all(isinstance(row[name], str) and row[name].strip() for name in names):
            raise KieloError(f"{where}: not a minimal pair. Fix: {_FORM}")
        group = next((row[name] for name in GROUPS if row.get(name)), stem)
        good, bad = (row[name].strip() for name in names)
        pairs.append(Pair(good, bad, str(group), str(row.get(TERM) or "")))
    if not pairs:
        raise KieloError(f"{path}: has no minimal pair. Fix: {_FORM_OF_MANY if path.is_dir() else _FORM}")
    return pairs


def files_of_folder(folder: Path) -> list[Path]:
    """Return the files with pairs of a folder, in the order of their names."""
    return sorted(path for path in folder.glob("*.jsonl") if path.is_file() and _is_visible(path))


def pair_scores(
    file: str, pairs: Sequence[Pair], accuracy: Callable[[np.ndarray], PairAccuracy]
) -> MinimalPairScores:
    """Return the scores of all pairs, groups and terms. accuracy: pairs that count → score."""
    groups = np.array([pair.group for pair in pairs])
    terms = np.array([pair.term for pair in pairs])
    scores = MinimalPairScores(
        file=file,
        all=accuracy(np.ones(len(pairs), bool)),
        groups={name: accuracy(groups == name) for name in dict.fromkeys(groups.tolist()) if name},
    )
    of_terms = {name: accuracy(terms == name) for name in dict.fromkeys(terms.tolist()) if name}
    return scores.model_copy(update={"terms": of_terms}) if of_terms else scores


def _rows(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each object with its place, for errors, and the paradigm that the name of its file is."""
    if path.is_dir():
        for file in files_of_folder(path):
            yield from _of_jsonl(text_lines(file), str(file), file.stem)
    elif path.suffix == ".zip":
        yield from _of_zip(path)
    elif path.suffix == ".tsv":
        yield from _of_tsv(path)
    else:
        yield from _of_jsonl(text_lines(path), str(path), "")


def _of_zip(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    try:
        with zipfile.ZipFile(path) as archive:
            for name in sorted(archive.namelist()):
                place = PurePosixPath(name)
                if place.suffix == ".jsonl" and _is_visible(place):
                    with archive.open(name) as file:
                        where = f"{path}, {name}"
                        yield from _of_jsonl(decoded_lines(file, where), where, place.stem)
    # an encrypted archive raises RuntimeError, an unknown compression NotImplementedError
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        if isinstance(error, KieloError):
            raise
        raise KieloError(f"{path}: not a readable .zip ({error}). Fix: {_FORM_OF_MANY}") from None


def _of_jsonl(
    lines: Iterator[tuple[int, str]], name: str, stem: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for number, line in lines:
        if line.strip():
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise KieloError(f"{name}, line {number}: not JSON ({error}). Fix: {_FORM}") from None
            yield f"{name}, line {number}", stem, row if isinstance(row, dict) else {}


def _of_tsv(path: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    names: list[str] = []
    for number, line in text_lines(path):
        if line.strip():
            cells = line.split("\t")
            if names:
                yield f"{path}, line {number}", "", dict(zip(names, cells, strict=False))
            names = names or cells


def _is_visible(path: PurePath) -> bool:
    return not path.name.startswith(".") and "__MACOSX" not in path.parts
