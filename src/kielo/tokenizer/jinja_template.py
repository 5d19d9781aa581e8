"""Compiles a chat template as Hugging Face's libraries do, in jinja2's sandbox.

The only file that imports jinja2, whose import costs more than reading a recipe: import it where it is used.
"""

import json
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kielo.recipe.errors import KieloError


class _GenerationBlock(Extension):
    """`{% generation %}`, with which a template marks answers for transformers: its content is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(template: str) -> Callable[..., str]:
    """Returns the function that renders the template; its keywords are what the template knows.

    It gets no date, which would change the text from day to day. Both raise KieloError with what is wrong.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        compiled = environment.from_string(template)
    except TemplateSyntaxError as problem:
        raise KieloError(f"line {problem.lineno} of the chat template: {problem.message}") from None

    def render(**values: Any) -> str:
        try:
            return compiled.render(**values)
        except Exception as problem:  # a template may fail in as many ways as a program
            name = "" if isinstance(problem, TemplateError) else f"{type(problem).__name__}: "
            raise KieloError(f"{name}{problem}") from None

    return render


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Writes JSON as transformers does: jinja2's own filter escapes <, >, & and ' for web pages."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
