"""Programming languages by the extension of a file, and the filters of their code.

The filters drop whole files and change none, so code stays byte for byte. The measures are The Stack's and
Codex's (Kocetkov et al. 2022, arXiv:2211.15533; Chen et al. 2021, arXiv:2107.03374, section 3.1): length of
lines, share of letters and digits, and marks of generated files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from kielo.corpus.step import DocumentFilter, SplitDocument
from kielo.recipe.sections import CodeFilters

# Programming languages, each with the extensions of its files.
_TABLE = """
    ada adb ads | assembly asm s | c c h | c# cs | c++ cc cpp cxx hh hpp hxx | clojure clj cljs | cmake cmake
    css css scss | cuda cu cuh | dart dart | elixir ex exs | erlang erl hrl
    fortran f f03 f08 f77 f90 f95 for | go go | haskell hs | html htm html | java java
    javascript cjs js jsx mjs | julia jl | kotlin kt kts
    lisp el lisp scm | lua lua | makefile mk | matlab m | ocaml ml mli | pascal pas | perl pl pm | php php
    python py pyi | r r | ruby rb | rust rs | scala scala | shell bash sh zsh | sql sql | swift swift
    tcl tcl | tex tex | typescript ts tsx | verilog sv v | vhdl vhd vhdl | zig zig
"""
_ROWS = [row.split() for row in _TABLE.strip().replace("\n", "|").split("|")]
_BY_EXTENSION = {extension: name for name, *extensions in _ROWS for extension in extensions}
LANGUAGES = tuple(name for name, *_ in _ROWS)
HEADER_LINES = 10  # which have the marks of generated files
LANGUAGE = "programming_language"  # in a document's metadata


def programming_language(name_or_extension: str) -> str | None:
    """Return the language of a file by its name or path, by an extension, or by the language's name."""
    name = name_or_extension.lower()
    extension = PurePosixPath(name).suffix.removeprefix(".") or name.removeprefix(".")
    return _BY_EXTENSION.get(extension) or (name if name in LANGUAGES else None)


def _lines(document: SplitDocument) -> list[str]:
    r"""Return the lines of a file. In files of old Macs "\r" alone ends a line."""
    return [part for line in document.lines for part in (line.split("\r") if "\r" in line[:-1] else (line,))]


def code_filters(code: CodeFilters) -> list[DocumentFilter]:
    return [
        *([ProgrammingLanguage(code.languages)] if code.languages else []),
        LineLengths(code.max_line_characters, code.max_mean_line_characters),
        GeneratedMarks(code.generated_marks),
        AlphanumericShare(code.min_alphanumeric_share),
    ]


@dataclass
class ProgrammingLanguage(DocumentFilter):
    """A filter of files in other programming languages, or in unknown ones."""

    name = "programming language"
    languages: Sequence[str]

    def judge(self, document: SplitDocument) -> str | None:
        found = document.metadata.get(LANGUAGE, "not known")
        return None if found in self.languages else f"is {found}"


@dataclass
class LineLengths(DocumentFilter):
    """A filter of files with a very long line, or with long lines on average: data, and minified code."""

    name = "code line length"
    max_characters: int
    max_mean_characters: float

    def judge(self, document: SplitDocument) -> str | None:
        lengths = [len(line) for line in _lines(document)]
        if max(lengths) > self.max_characters:
            return f"a line of over {self.max_characters} characters"
        if sum(lengths) > self.max_mean_characters * len(lengths):
            return f"lines of over {self.max_mean_characters:g} characters on average"
        return None


@dataclass
class GeneratedMarks(DocumentFilter):
    """A filter of files whose first lines say that a program wrote them."""

    name = "generated code"
    marks: Sequence[str]

    def judge(self, document: SplitDocument) -> str | None:
        header = "\n".join(_lines(document)[:HEADER_LINES]).lower()
        return next((f"says {mark!r}" for mark in map(str.lower, self.marks) if mark in header), None)


@dataclass
class AlphanumericShare(DocumentFilter):
    """A filter of files of which few characters are letters or digits. Line ends do not count."""

    name = "alphanumeric share"
    min_share: float

    def judge(self, document: SplitDocument) -> str | None:
        total = sum(map(len, document.lines))
        found = sum(sum(map(str.isalnum, line)) for line in document.lines)
        return f"under {self.min_share:g}" if found < self.min_share * total else None
