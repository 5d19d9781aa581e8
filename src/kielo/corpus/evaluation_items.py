"""The texts of a recipe's evaluation, as corpus.decontaminate looks for them in training text.

They are [[evaluate.texts]], minimal pairs, questions of tasks in the folder of `kielo prefetch`, questions in
folders of own tasks, or the files that the recipe names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from kielo.artifact.json_object import texts_in
from kielo.artifact.manifest import hash_file, hash_json
from kielo.artifact.prefetched import Prefetched, prefetched_folder
from kielo.artifact.stage_json import read_json
from kielo.artifact.text_files import COMPRESSED, USUAL_ENCODINGS, read_lines
from kielo.corpus.raw_formats import (
    RawSource,
    first_names,
    formats,
    is_about,
    is_data,
    is_readable,
    raw_source,
    records,
)
from kielo.corpus.raw_texts import parse
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import EvaluationText, Recipe, Source

_KEY = "corpus.decontaminate"
_LINES, _FIELDS, _TABLE, _ARROW = ".txt", ".jsonl", ".tsv", ".arrow"
_TRAINING = "-train"  # in the name of a task's file, whose examples are for training
_MAX_LINE_BYTES = 64 << 20


@dataclass(frozen=True)
class EvaluationItems:
    """Texts of one evaluation. text: set for [[evaluate.texts]], whose files are read as corpora are."""

    name: str
    files: tuple[Path, ...]
    text: EvaluationText | None = None

    def fingerprint(self) -> str:
        """Return the hash of all that decides the texts: formats follow from names."""
        how = self.text and [self.text.text_field, self.text.kind]
        return hash_json([how, *([path.name, hash_file(path)] for path in self.files)])

    def texts(self) -> Iterator[str]:
        if self.text is None:
            for path in self.files:
                yield from _strings_of(path)
            return
        source = evaluation_source(self.text)
        for record in records(source, _MAX_LINE_BYTES):
            yield parse(record, source, _MAX_LINE_BYTES).text


def evaluation_items(recipe: Recipe) -> list[EvaluationItems]:
    """Return the texts to look for. Raises KieloError for a missing file, or tasks without data."""
    wanted = recipe.corpus.decontaminate
    if wanted is False:
        return []
    if isinstance(wanted, tuple):
        return [EvaluationItems(Path(name).name, _files_of(_KEY, name)) for name in wanted]
    of, found = recipe.evaluate, []
    for text in of.texts:
        source = evaluation_source(text)
        found.append(
            EvaluationItems(text.name, tuple(Path(source.root) / name for name in source.files), text)
        )
    if of.minimal_pairs:
        found.append(EvaluationItems("minimal pairs", _files_of("evaluate.minimal_pairs", of.minimal_pairs)))
    for folder in of.task_folders if of.tasks else ():
        for path in sorted(Path(folder).expanduser().absolute().glob(f"*{_FIELDS}")):
            found.append(EvaluationItems(path.stem, (path,)))
    found += _prefetched_tasks() if of.tasks else []
    if not found:
        prefetch = "kielo prefetch RECIPE --to DIR, then export KIELO_PREFETCHED=DIR"
        raise KieloError(
            f"{_KEY} = true: no text of the recipe's evaluation is on this machine. Fix: "
            + (prefetch if of.tasks else f"{_KEY} = [FILE, ...]")
        )
    return found


def lacks_tasks(recipe: Recipe) -> bool:
    """Return True if the recipe has tasks whose questions are not on this machine."""
    is_wanted = recipe.corpus.decontaminate is True and bool(recipe.evaluate.tasks)
    return is_wanted and prefetched_folder() is None


def _prefetched_tasks() -> list[EvaluationItems]:
    folder = prefetched_folder()
    if folder is None:
        return []
    found = []
    listed = read_json(folder, Prefetched)
    for one in listed.brought if listed else ():
        if one.kind != "task" or not one.folder:
            continue
        files = sorted((folder / one.folder).glob(f"*{_ARROW}"))
        if files := [path for path in files if _TRAINING not in path.name] or files:
            found.append(EvaluationItems(one.name, tuple(files)))
    return found


def _files_of(key: str, given: str) -> tuple[Path, ...]:
    place = Path(given).expanduser().absolute()
    found = _files_in(place) if place.is_dir() else [place]
    files = [path for path in found if path.is_file() and _format(path)]
    unread = [path.name for path in found if is_data(path) and not _format(path)]
    if unread and place.is_dir():
        raise KieloError(
            f"{key}: {given}: {len(unread)} files that look like data would not be read: "
            f"{first_names(unread)}. Fix: convert them to {_LINES}, {_FIELDS} or {_TABLE}, or move them away"
        )
    if not files:
        raise KieloError(
            f"{key}: {given}: no file of text for {_KEY}. Fix: a file or folder of {_LINES}, {_FIELDS} or "
            f"{_TABLE}"
        )
    return tuple(files)


def _files_in(folder: Path) -> list[Path]:
    """Return the files below a folder without READMEs, licences, checksums and hidden files."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [path for path in files if not path.name.startswith(".") and not is_about(path)]


def _format(path: Path) -> str:
    """Return the last suffix of a file, but for one of compression, if it is a known format, or ""."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return name.suffix if name.suffix in (_LINES, _FIELDS, _TABLE, _ARROW) else ""


def _strings_of(path: Path) -> Iterator[str]:
    form = _format(path)
    if form == _ARROW:
        yield from _strings_of_arrow(path)
        return
    for number, line in read_lines(path, _MAX_LINE_BYTES, None):
        if line is None:
            raise KieloError(f"{_KEY}: {path}, line {number}: over {_MAX_LINE_BYTES:,} bytes. Fix: cut it")
        if form == _FIELDS:
            if line.strip():
                yield from texts_in(_parsed(line, path, number))
            continue
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as problem:
            raise KieloError(
                f"{_KEY}: {path}, line {number}: invalid UTF-8 (byte 0x{line[problem.start]:02x}). Fix: "
                f"convert it with `iconv -f ENCODING -t UTF-8`. ENCODING is {USUAL_ENCODINGS}"
            ) from None
        yield from text.split("\t") if form == _TABLE else (text,)


def _parsed(line: bytes, path: Path, number: int) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise KieloError(
            f"{_KEY}: {path}, line {number}: not valid JSON ({error}). Fix: correct it"
        ) from None


def _strings_of_arrow(path: Path) -> Iterator[str]:
    import pyarrow as pa

    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
            for batch in stream:
                for row in batch.to_pylist():
                    yield from texts_in(row)
    except (OSError, pa.ArrowInvalid) as error:
        raise KieloError(f"{_KEY}: {path}: {error}. Fix: kielo prefetch again") from None


def evaluation_source(text: EvaluationText) -> RawSource:
    """Return the files of an [[evaluate.texts]] as a source. Raises KieloError if there are none."""
    place, where = Path(text.path).expanduser(), f"evaluate.texts, {text.name}: {text.path}"
    if not place.is_file() and not place.is_dir():
        raise KieloError(f"{where}: no such file or folder")
    root, found = (place.parent, [place]) if place.is_file() else (place, sorted(place.rglob("*")))
    paths = [path.relative_to(root) for path in found if path.is_file()]
    files = tuple(path.as_posix() for path in paths if is_readable(path, text.kind))
    if not files:
        raise KieloError(f"{where}: no file of a known format. Fix: {formats(text.kind)}")
    fields = {"path": text.path, "kind": text.kind, "text_field": text.text_field, "clean": False}
    return raw_source(Source(name=text.name, **fields), root, files, origin=text.path)
