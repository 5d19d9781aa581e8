"""Parsers of verbs: each declares its flags when it is used, so that `kielo --help` imports no room."""

import argparse
import difflib
import importlib
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from kielo.recipe.errors import KieloError

_SETS = "--set KEY=VALUE"
# Entries of a verb's table that need no text.
_USUAL = {
    "RECIPE": "path of a recipe, name of a shipped recipe (see `kielo recipes`), or run folder",
    _SETS: "change one value, as --set train.tokens=1000000; may be repeated",
    "--json": None,
}
_ENTRY = re.compile(r"(?P<flag>--[\w-]+)?\s?(?P<value>.*?)(?P<marks>\.\.\.|!)?(?: as (?P<dest>\w+))?")
_HELP_COLUMNS = 80

Handler = Callable[[Namespace], int | None]
_TABLES: dict[tuple[str, str], str] = {}  # (module, name) of a handler → the table of its verb


def takes(table: str) -> Callable[[Handler], Handler]:
    """Give a handler the examples, arguments and flags of its verb (see `VerbParser.takes`)."""

    def with_table(handler: Handler) -> Handler:
        _TABLES[handler.__module__, handler.__name__] = table
        return handler

    return with_table


class _Parser(argparse.ArgumentParser):
    """A parser with refusals of one line. commands: examples of its use. subverbs: name → parser."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.commands: Sequence[str] = ()
        self.words: Sequence[str] = ()  # that are parsed
        self.subverbs: dict[str, VerbParser] = {}
        self.has_required_subverb = False

    def add_subparsers(self, **options: Any) -> Any:
        group = super().add_subparsers(**{"parser_class": VerbParser, **options})
        self.subverbs, self.has_required_subverb = group.choices, True
        return group

    def error(self, message: str) -> NoReturn:
        refuse_usage(self, message)


class VerbParser(_Parser):
    """The parser of one verb. `handler` is "module:function" below kielo.cli.

    The handler has a table of its flags (`takes`). Or a function with its name and "_flags" declares them.
    """

    def __init__(self, *, handler: str, **options: Any) -> None:
        super().__init__(**options)
        self.set_defaults(handler=handler)
        self._handler = handler
        self._first_words: dict[str, VerbParser] = {}

    def declare_flags(self) -> None:
        """Declare the flags and the subverbs. Import the file of the handler."""
        module, function = self._handler.split(":")
        there = importlib.import_module("kielo.cli." + module)
        if table := _TABLES.get((there.__name__, function)):
            self.takes(table)
        else:
            getattr(there, function + "_flags")(self)

    def takes(self, table: str) -> None:
        """Declare what a table says: examples after "$ ", then flags and arguments.

        An entry has names, two spaces or more, and help. "--json" is a switch. "--nodes N:int=1" has a value
        with its type and default; a count is an int from 1 on. "--profile [N:int=10]" without a value means
        10. "--dtype {fp32,bf16}" has choices, "--to DIR!" is required, "--parallel FILE ENGLISH" has two
        values, "--case NAME... as cases" may be repeated, as `options.cases`. "RUN" is an argument, "[FILE]"
        may be left out, "RUN..." are one or more.
        """
        commands: list[str] = []
        entries: list[tuple[str, str]] = []
        for line in filter(None, map(str.strip, table.splitlines())):
            names, gap, text = line.partition("  ")
            if line.startswith("$ "):
                commands.append(line.removeprefix("$ "))
            elif gap or names.strip("[]") in _USUAL:
                entries.append((names, text.strip()))
            else:
                entries[-1] = (entries[-1][0], f"{entries[-1][1]} {line}")
        if commands:
            self.commands, title = commands, "example: "
            indent = " " * len(title)
            self.epilog = title + f"\n{indent}".join(_folded(command, f"{indent}  ") for command in commands)
        for names, text in entries:
            if names != _SETS:
                self._takes_entry(names, text or _USUAL[names.strip("[]")])
            if names == _SETS or names.strip("[]") == "RECIPE":
                how: dict[str, Any] = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
                self.add_argument("--set", dest="sets", help=_USUAL[_SETS], **how)

    def _takes_entry(self, names: str, text: str | None) -> None:
        found = _ENTRY.fullmatch(names)
        assert found is not None
        flag, value, marks, dest = found.group("flag", "value", "marks", "dest")
        how: dict[str, Any] = {"help": text} | ({"dest": dest} if dest and flag else {})
        if not value:
            self.add_argument(flag, action="store_true", **how)
            return
        is_optional, (value, has_default, default) = value[0] == "[", value.strip("[]").partition("=")
        metavar, _, type_name = value.partition(":")
        if value[0] == "{":
            how["choices"] = tuple(value.strip("{}").split(","))
        elif " " in metavar:
            how |= {"metavar": tuple(metavar.split()), "nargs": 2}
        else:
            types = {"int": int, "float": float, "path": Path, "count": _count_of(flag)}
            how |= {"metavar": metavar, "type": types.get(type_name, str)}
        if marks == "!":
            how["required"] = True
        elif marks:
            how |= {"action": "append"} if flag else {"nargs": "+"}
        if is_optional:
            how["nargs"] = "?"
        if has_default:
            how["const" if is_optional and flag else "default"] = how["type"](default)
        self.add_argument(flag or dest or metavar.lower(), **how)

    def has_subverbs(self, dest: str, subverbs: Mapping[str, tuple[str, str]]) -> None:
        """Require a subverb, each with a parser of its own: name → (handler, summary)."""
        group = self.add_subparsers(dest=dest, metavar=dest.upper(), required=True)
        for name, (handler, summary) in subverbs.items():
            add_verb(group, name, handler, summary)

    def may_begin_with(self, subverbs: Mapping[str, tuple[str, str]]) -> None:
        """Let the first argument be a subverb with a parser of its own: name → (handler, summary).

        A file with the name of a subverb is given as a path: `kielo plan ./compare`.
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
        self.words = words = list(args or ())
        if words and words[0] in self._first_words:
            return self._first_words[words[0]].parse_known_args(words[1:], namespace)
        options, unknown = super().parse_known_args(words, namespace)
        if unknown:
            said = f"unrecognized arguments: {' '.join(unknown)}"
            self.error(f"{said}; {self._in_place_of(unknown[0], words)}")
        return options, unknown

    def _in_place_of(self, word: str, args: Sequence[str]) -> str:
        flags = [name for name in self._option_string_actions if name.startswith("--")]
        names = [flag.removeprefix("--") for flag in flags]  # two dashes make any two flags similar
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
    """The parser of `kielo` itself. story: part → verb → (handler, summary), in the order of --help."""

    def __init__(self, first_commands: str, story: Mapping[str, Mapping[str, tuple[str, str]]]) -> None:
        super().__init__(prog="kielo", description="From a language's raw text to its own language model.")
        self.add_argument("--version", action="store_true", help="print the version and exit")
        verbs = self.add_subparsers(dest="verb", metavar="VERB")
        for part in story.values():
            for name, (handler, summary) in part.items():
                add_verb(verbs, name, handler, summary)
        self._first_commands, self._story = first_commands, story

    def format_help(self) -> str:
        """Return the help, with the verbs under the parts of the story."""
        width = max(map(len, self.subverbs))
        parts = [
            "\n".join([part, *(f"    {name:{width}}  {summary}" for name, (_, summary) in verbs.items())])
            for part, verbs in self._story.items()
        ]
        rest = "kielo VERB --help   flags and examples\nkielo --version     the version"
        usage = self.format_usage().rstrip()
        return "\n\n".join([usage, str(self.description), self._first_commands, *parts, rest]) + "\n"


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
        elif negative := re.search(rf"(?:^|\n){flag}\n(-\.?\d.*)", "\n".join(parser.words)):
            message = f"{flag} {negative[1]}: give no negative value"
        fitting = [command for command in parser.commands if f"{flag} " in command]
    if not message.endswith("?"):
        message += f"; for example: {fitting[0]}" if fitting else f"; see {parser.prog} --help"
    if "KIELO_REFUSAL_FILE" in os.environ:  # so the job that started this process does not repeat it
        attempt_files = importlib.import_module("kielo.artifact.attempt_files")
        attempt_files.note_refusal(attempt_files.Refusal(message=message, is_usage=True))
    parser.exit(2, f"{parser.prog}: {message}\n")


def add_verb(group: Any, name: str, handler: str, summary: str) -> None:
    """Add a verb or a subverb to the result of `add_subparsers`."""
    group.add_parser(name, handler=handler, help=summary, description=_sentence(summary))


def _sentence(summary: str) -> str:
    return summary[0].upper() + summary[1:] + ("" if summary.endswith("?") else ".")


def _folded(command: str, indent: str) -> str:
    """Return the command in lines of `_HELP_COLUMNS`, broken before flags and &&, as for a shell."""
    first, *others = re.split(r" (?=--|&& )", command)
    lines = [first]
    for part in others:
        fits = len(indent) + len(lines[-1]) + len(part) + len(" \\") < _HELP_COLUMNS
        lines[-1:] = [f"{lines[-1]} {part}"] if fits else [lines[-1], part]
    return f" \\\n{indent}".join(lines)


def _count_of(flag: str) -> Callable[[str], int]:
    def count(text: str) -> int:
        if (number := int(text)) < 1:
            raise KieloError(f"{flag} {number}: give 1 or more")
        return number

    count.__name__ = "int"  # in argparse's messages
    return count


def rank_words(words: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Return a rank's command line: the verb with its names, and the flags of `options`."""
    sets = [argument for entry in options.sets for argument in ("--set", entry)]
    given = {"--ranks": options.ranks, "--precision": options.precision}
    flags = [word for name, value in given.items() if value is not None for word in (name, str(value))]
    return [*words, *sets, *flags, *(["--json"] if options.json else [])]
