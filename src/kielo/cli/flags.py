"""Parsers of verbs: each declares its flags when it is used, so that `kielo --help` imports no room."""

import argparse
import difflib
import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

_RECIPE_HELP = "path of a recipe, the name of a shipped one (see `kielo recipes`), or a run folder"


_HELP_COLUMNS = 80


class _Parser(argparse.ArgumentParser):
    """A parser whose refusal is one line. commands: examples of its use. subverbs: name → parser."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.commands: Sequence[str] = ()
        self.subverbs: dict[str, VerbParser] = {}

    def add_subparsers(self, **options: Any) -> Any:
        group = super().add_subparsers(**{"parser_class": VerbParser, **options})
        self.subverbs = group.choices
        return group

    def error(self, message: str) -> NoReturn:
        """Exit 2 with one line: what is wrong, and the fix."""
        refuse_usage(self, message)


class VerbParser(_Parser):
    """The parser of one verb. `handler` is "module:function" below kielo.cli.

    Its flags are declared beside the handler, by a function of its name and "_flags", which takes this
    parser.
    """

    def __init__(self, *, handler: str, **options: Any) -> None:
        super().__init__(**options)
        self.set_defaults(handler=handler)
        self._handler = handler
        self._first_words: dict[str, VerbParser] = {}

    def declare_flags(self) -> None:
        """Declare the flags, and the subverbs. Imports the file of the handler."""
        module, function = self._handler.split(":")
        getattr(importlib.import_module("kielo.cli." + module), function + "_flags")(self)

    def may_begin_with(self, subverbs: Mapping[str, tuple[str, str]]) -> None:
        """Let the first argument be a subverb, which has a parser of its own: name → (handler, summary).

        An argument that is spelled like one is given as a path: `kielo plan ./compare`.
        """
        width = max(map(len, subverbs))
        listed = "\n".join(f"{name:{width}}  {summary}" for name, (_, summary) in subverbs.items())
        self.add_argument_group(f"subverbs (see {self.prog} SUBVERB --help)", listed)
        for name, (handler, summary) in subverbs.items():
            self._first_words[name] = VerbParser(
                handler=handler, prog=f"{self.prog} {name}", description=_sentence(summary)
            )
        self.subverbs = self._first_words

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        self.declare_flags()
        words = list(args or ())
        if words and words[0] in self._first_words:
            return self._first_words[words[0]].parse_known_args(words[1:], namespace)
        options, unknown = super().parse_known_args(words, namespace)
        if unknown:
            said = f"unrecognized arguments: {' '.join(unknown)}"
            self.error(f"{said}; {self._in_place_of(unknown[0], words)}")
        return options, unknown

    def _in_place_of(self, word: str, args: Sequence[str]) -> str:
        """Return the fix in place of an argument that the verb does not take."""
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        names = [flag.removeprefix("--") for flag in flags]  # two dashes would make any two flags alike
        if near := difflib.get_close_matches(word.partition("=")[0].lstrip("-"), names, n=1, cutoff=0.7):
            return f"did you mean --{near[0]}?"
        if word.startswith("-"):
            return f"its flags are {' '.join(flags)}"
        if "=" in word and "--set" in flags:
            return f"did you mean --set {word}?"
        if near := difflib.get_close_matches(args[0], self._first_words, n=1):
            return f"did you mean {self.prog} {near[0]}?"
        if self._first_words:
            return f"a subverb comes first: {', '.join(self._first_words)}"
        return f"for example: {self.commands[0]}"


class MainParser(_Parser):
    """The parser of `kielo` itself."""


def refuse_usage(parser: _Parser, message: str) -> NoReturn:
    """Print one line and exit 2: argparse's complaint, the nearest choice, and an example or --help."""
    found = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
    if found:
        near = difflib.get_close_matches(found[1], re.findall(r"[\w-]+", found[2]), n=1)
        message += f"; did you mean {near[0]}?" if near else ""
    fitting = parser.commands if "required" in message else ()
    if found := re.match(
        r"argument (\S+): (?:invalid (int|float) value: (.*)|expected one argument)", message
    ):
        flag, kind, given = found.groups()
        if kind:
            message = f"{flag} {given}: give a {'whole number' if kind == 'int' else 'number'}"
        fitting = [command for command in parser.commands if f"{flag} " in command]
    if not message.endswith("?"):
        message += f"; for example: {fitting[0]}" if fitting else f"; see {parser.prog} --help"
    if "KIELO_REFUSAL_FILE" in os.environ:  # the job that started this one does not try it again
        attempt_files = importlib.import_module("kielo.artifact.attempt_files")
        attempt_files.note_refusal(attempt_files.Refusal(message=message, is_usage=True))
    parser.exit(2, f"{parser.prog}: {message}\n")


def add_verb(group: Any, name: str, handler: str, summary: str) -> None:
    """Add a verb or a subverb. `group` is the result of `add_subparsers`."""
    group.add_parser(name, handler=handler, help=summary, description=_sentence(summary))


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + ("" if summary.endswith("?") else ".")


def examples(parser: argparse.ArgumentParser, *commands: str) -> None:
    """Show these commands at the end of `--help`; one that is too long for a line goes on after a \\."""
    title = "example: "
    if isinstance(parser, _Parser):
        parser.commands = commands
    indent = " " * len(title)
    parser.epilog = title + f"\n{indent}".join(_folded(command, f"{indent}  ") for command in commands)


def _folded(command: str, indent: str) -> str:
    """Return the command in lines of `_HELP_COLUMNS`, broken before flags and &&, as a shell takes it."""
    first, *others = re.split(r" (?=--|&& )", command)
    lines = [first]
    for part in others:
        fits = len(indent) + len(lines[-1]) + len(part) + len(" \\") < _HELP_COLUMNS
        lines[-1:] = [f"{lines[-1]} {part}"] if fits else [lines[-1], part]
    return f" \\\n{indent}".join(lines)


def takes_recipe(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=_RECIPE_HELP, nargs=nargs)
    takes_sets(parser)


def takes_sets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        dest="sets",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one value, e.g. --set train.tokens=1000000 (may be given often)",
    )
