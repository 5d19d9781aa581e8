"""A person's own step: a Python file that the recipe names, with judge(text, metadata) or change(text).

The file runs with the rights of the person who runs Kielo. Each worker loads it. A step must be a function of
its arguments alone, because workers share nothing.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import xxhash

from kielo.corpus.filters import normalise_line
from kielo.corpus.step import CorpusStep, SplitDocument, lines_of
from kielo.recipe.errors import KieloError

KEY = "corpus.own_steps"
_FIX = "Fix: def judge(text, metadata) -> None or a reason, or def change(text) -> text"
_MOST_REASON_CHARACTERS = 80


def load_own_step(path: str) -> ModuleType:
    """Return the module. Raises KieloError with file and line if it cannot be loaded or has no function."""
    file = Path(path).expanduser().absolute()
    try:
        return _module(file, file.read_bytes())
    except OSError as error:
        raise KieloError(f"{KEY}: {file}: {error.strerror}. Fix: the path of a Python file") from None


@lru_cache(maxsize=16)
def _module(file: Path, source: bytes) -> ModuleType:
    digest = xxhash.xxh3_128_hexdigest(os.fsencode(file) + b"\0" + source)
    module = ModuleType(f"kielo_own_step_{digest}")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # where dataclasses and pickle look for what the file defines
    try:
        exec(compile(source, file, "exec"), vars(module))
    except SyntaxError as error:
        raise KieloError(f"{KEY}: {file}, line {error.lineno}: {error.msg}. Fix: correct the file") from None
    except (Exception, SystemExit) as error:
        if _is_of_signal(error):
            raise
        raise KieloError(f"{KEY}: {_place(file, error)}: {_said(error)}. Fix: correct the file") from None
    if not any(callable(getattr(module, name, None)) for name in ("judge", "change")):
        raise KieloError(f"{KEY}: {file}: has neither judge nor change. {_FIX}")
    return module


def _is_of_signal(error: BaseException) -> bool:
    """Return True for the SystemExit of the handler of SIGTERM, which may come in the middle of a step."""
    handler = getattr(signal.getsignal(signal.SIGTERM), "__code__", None)
    frames = traceback.walk_tb(error.__traceback__)
    return isinstance(error, SystemExit) and any(frame.f_code is handler for frame, _ in frames)


def _place(file: Path, error: BaseException) -> str:
    """Return the file and the last line of it that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == file]
    return f"{file}, line {lines[-1]}" if lines else str(file)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


@dataclass
class OwnStep(CorpusStep):
    name = "own step"
    path: str

    def __post_init__(self) -> None:
        self._file = Path(self.path).expanduser().absolute()
        module = load_own_step(self.path)
        self._judge, self._change = getattr(module, "judge", None), getattr(module, "change", None)
        self._label = self._file.name

    def work(self, document: SplitDocument) -> bool:
        text = document.join()
        if self._change is not None:
            text = self._changed(self._change, document, text)
        reason = "empty" if not document.lines else self._reason(document, text)
        if reason is not None:
            self.count("documents", f"{self._label}: {reason}")
            self.count("lines", f"{self._label}: {reason}", len(document.lines))
            self.count("bytes", f"{self._label}: {reason}", document.num_bytes)
            self.count("spaced_words", f"{self._label}: {reason}", document.num_spaced_words)
        return reason is None

    def _changed(self, change: Callable, document: SplitDocument, text: str) -> str:
        changed = self._call(change, document, text)
        if not isinstance(changed, str):
            self._refuse(document, f"change returned {type(changed).__name__}, not text. {_FIX}")
        if changed == text:
            return text
        size, words = document.num_bytes, document.num_spaced_words
        document.set_lines(list(filter(None, map(normalise_line, lines_of(changed)))))
        self.count("bytes", f"{self._label}: changed", size - document.num_bytes)
        self.count("spaced_words", f"{self._label}: changed", words - document.num_spaced_words)
        return document.join()

    def _reason(self, document: SplitDocument, text: str) -> str | None:
        if self._judge is None:
            return None
        # A copy, so that a step cannot change what is stored.
        reason = self._call(self._judge, document, text, dict(document.metadata))
        if reason is not None and not isinstance(reason, str):
            self._refuse(document, f"judge returned {type(reason).__name__}, not None or a reason. {_FIX}")
        return None if reason is None else reason[:_MOST_REASON_CHARACTERS] or "no reason"

    def _call(self, function: Callable, document: SplitDocument, *arguments: object) -> object:
        try:
            return function(*arguments)
        except (Exception, SystemExit) as error:
            if _is_of_signal(error):
                raise
            place = _place(self._file, error)
            raise KieloError(
                f"{KEY}: {place}: {_said(error)}, at document {document.id} of {document.source}. Fix: "
                "correct the file"
            ) from None

    def _refuse(self, document: SplitDocument, problem: str) -> NoReturn:
        raise KieloError(f"{KEY}: {self._file}: {problem} (at document {document.id} of {document.source})")
