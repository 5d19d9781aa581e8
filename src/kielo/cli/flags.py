"""Parsers of verbs: each reads its flags when it is asked for, so that `kielo --help` imports no room."""

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

_RECIPE_HELP = "path of a recipe, or the name of a shipped one (see `kielo recipes`)"


class VerbParser(argparse.ArgumentParser):
    """The parser of one verb. `handler` is "module:function" below kielo.cli.

    Its flags are declared beside the handler, by a function of its name and "_flags", which takes this parser.
    """

    def __init__(self, *, handler: str, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.set_defaults(handler=handler)
        self._handler = handler

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        module, function = self._handler.split(":")
        getattr(importlib.import_module("kielo.cli." + module), function + "_flags")(self)
        return super().parse_known_args(args, namespace)


def add_verb(group: Any, name: str, handler: str, summary: str) -> None:
    """A verb, or a word below one. `group` is what `add_subparsers(parser_class=VerbParser)` gave."""
    group.add_parser(name, handler=handler, help=summary, description=summary[0].upper() + summary[1:] + ".")


def examples(parser: argparse.ArgumentParser, *commands: str) -> None:
    """Shown at the end of `--help`."""
    parser.epilog = "example: " + "\n         ".join(commands)


def takes_recipe(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help=_RECIPE_HELP, nargs=nargs)
    parser.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="KEY=VALUE",
        help="change one value, e.g. --set train.tokens=1000000 (may be given often)",
    )
