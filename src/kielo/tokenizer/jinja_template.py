"""A chat template, compiled as Hugging Face's libraries do, in jinja2's sandbox, with limits."""

import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes  # takes longer than reading a recipe
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kielo.recipe.errors import KieloError

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A template takes less than a millisecond for a conversation, and a second for 60,000 turns.
SECONDS, MEMORY_BYTES = 20.0, 10**9
MOST_BITS = 1 << 16  # of a power


class OutOfTime(BaseException):
    """No Exception, so that a template cannot catch it."""


@contextmanager
def limited(seconds: float, num_bytes: int) -> Iterator[None]:
    """Limit this process to `seconds` (in the main thread) and `num_bytes` more, or raise KieloError."""
    with _limited_seconds(seconds), _limited_bytes(num_bytes):
        yield


@contextmanager
def _limited_seconds(seconds: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except OutOfTime:
        raise KieloError(f"did not end within {seconds:g} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _limited_bytes(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            limit = int(file.read().split()[0]) * _PAGE_BYTES + num_bytes
    except OSError:  # not Linux
        yield
        return
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except MemoryError:
        raise KieloError(f"needs more than {num_bytes / 1e9:g} GB of memory") from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _Sandbox(ImmutableSandboxedEnvironment):
    """A sandbox that refuses large powers, which nothing can interrupt. `limited` ends everything else."""

    intercepted_binops = frozenset(["**"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MOST_BITS:
            raise TemplateError(f"a power of more than {MOST_BITS:,} bits")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(Extension):
    """`{% generation %}`, which marks answers for transformers: its content is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(template: str) -> Callable[..., str]:
    """Return the function that renders the template, without a date. Either raises KieloError."""
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    try:
        with limited(SECONDS, MEMORY_BYTES):
            compiled = environment.from_string(template)
    except TemplateSyntaxError as problem:
        raise KieloError(f"line {problem.lineno} of the chat template: {problem.message}") from None
    except Exception as problem:  # too deep for Python's parser, or its constants fail
        reason = f"cannot be compiled ({type(problem).__name__}: {str(problem)[:200]})"
        reason = str(problem) if isinstance(problem, KieloError) else reason
        raise KieloError(f"the chat template {reason}") from None

    def render(**values: Any) -> str:
        try:
            with limited(SECONDS, MEMORY_BYTES):
                return compiled.render(**values)
        except Exception as problem:  # a template may fail in as many ways as a program
            is_told = isinstance(problem, TemplateError | KieloError)
            raise KieloError(f"{'' if is_told else type(problem).__name__ + ': '}{problem}") from None

    return render


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does. jinja2's own filter escapes <, >, & and ' for web pages."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)
