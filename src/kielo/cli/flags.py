"""Parsers of verbs: each declares its flags when it is used, so that `kielo --help` imports no room."""

import argparse
import difflib
import importlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

_RECIPE_HELP = "path of a recipe, name of a shipped recipe (see `kielo recipes`), or run folder"
_HELP_COLUMNS = 80


class _Parser(argparse.ArgumentParser):
    """A parser with refusals of one line. commands: examples of its use. subverbs: name → parser."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.commands: Sequence[str] = ()
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

    A function beside the handler, with its name and "_flags", takes this parser and declares the flags.
    """

    def __init__(self, *, handler: str, **options: Any) -> None:
        super().__init__(**options)
        self.set_defaults(handler=handler)
        self._handler = handler
        self._first_words: dict[str, VerbParser] = {}

    def declare_flags(self) -> None:
        """Declare the flags and the subverbs. Import the file of the handler."""
        module, function = self._handler.split(":")
        getattr(importlib.import_module("kielo.cli." + module), function + "_flags")(self)

    def takes(self, table: str) -> None:
        """Declare flags and arguments, an entry each: names, two spaces or more, and help.

        "--json" is a switch. "--nodes N:int=1" has a value with its type and default. "--profile [N:int=10]"
        without a value means 10. "RECIPE" is an argument, and "[FILE]" an optional argument.
        """
        entries: list[list[str]] = []
        for line in table.strip().splitlines():
            names, gap, text = line.strip().partition("  ")
            if gap:
                entries.append([names, text.strip()])
            else:
                entries[-1][1] += f" {names}"
        for names, text in entries:
            *flag, value = re.fullmatch(r"(--[\w-]+)?\s?(.*)", names).groups()  # type: ignore[union-attr]
            is_optional, (value, has_default, default) = value[:1] == "[", value.strip("[]").partition("=")
            metavar, _, type_name = value.partition(":")
            if not metavar:
                self.add_argument(*flag, action="store_true", help=text)
                continue
            convert = {"int": int, "float": float}.get(type_name, str)
            how: dict[str, Any] = {"metavar": metavar, "type": convert, "help": text}
            if is_optional:
                how["nargs"] = "?"
            if has_default:
                how["const" if is_optional else "default"] = convert(default)
            self.add_argument(flag[0] or metavar.lower(), **how)

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
        words = list(args or ())
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


def examples(parser: argparse.ArgumentParser, *commands: str) -> None:
    """Show these commands at the end of `--help`. A long command continues after a \\."""
    title = "example: "
    if isinstance(parser, _Parser):
        parser.commands = commands
    indent = " " * len(title)
    parser.epilog = title + f"\n{indent}".join(_folded(command, f"{indent}  ") for command in commands)


def _folded(command: str, indent: str) -> str:
    """Return the command in lines of `_HELP_COLUMNS`, broken before flags and &&, as for a shell."""
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
        help="change one value, as --set train.tokens=1000000; may be repeated",
    )
