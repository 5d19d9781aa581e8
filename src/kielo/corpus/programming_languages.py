"""Programming languages by the extension of a file's name. A name or an extension → a language, or None."""

from pathlib import PurePosixPath

_EXTENSIONS = {
    "ada": "adb ads",
    "assembly": "asm s",
    "c": "c h",
    "c#": "cs",
    "c++": "cc cpp cxx hh hpp hxx",
    "clojure": "clj cljs",
    "cmake": "cmake",
    "css": "css scss",
    "cuda": "cu cuh",
    "dart": "dart",
    "elixir": "ex exs",
    "erlang": "erl hrl",
    "fortran": "f f03 f08 f77 f90 f95 for",
    "go": "go",
    "haskell": "hs",
    "html": "htm html",
    "java": "java",
    "javascript": "cjs js jsx mjs",
    "julia": "jl",
    "kotlin": "kt kts",
    "lisp": "el lisp scm",
    "lua": "lua",
    "makefile": "mk",
    "matlab": "m",
    "ocaml": "ml mli",
    "pascal": "pas",
    "perl": "pl pm",
    "php": "php",
    "python": "py pyi",
    "r": "r",
    "ruby": "rb",
    "rust": "rs",
    "scala": "scala",
    "shell": "bash sh zsh",
    "sql": "sql",
    "swift": "swift",
    "tcl": "tcl",
    "tex": "tex",
    "typescript": "ts tsx",
    "verilog": "sv v",
    "vhdl": "vhd vhdl",
    "zig": "zig",
}
_BY_EXTENSION = {
    extension: name for name, extensions in _EXTENSIONS.items() for extension in extensions.split()
}
LANGUAGES = tuple(_EXTENSIONS)


def programming_language(name_or_extension: str) -> str | None:
    """Returns the language of a file by its name or path, by a bare extension, or by the language's name."""
    name = name_or_extension.lower()
    extension = PurePosixPath(name).suffix.removeprefix(".") or name.removeprefix(".")
    return _BY_EXTENSION.get(extension) or (name if name in _EXTENSIONS else None)
