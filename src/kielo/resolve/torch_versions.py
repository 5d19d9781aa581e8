"""Table of what each version of torch runs, as it was tried; torch-free.

The resolver, the planner, the pipeline schedules and docs/layouts.md read it. A version that was not tried
counts as the newest tried one before it.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from kielo.recipe.sections import Layout
from kielo.resolve.stages import SCHEDULES

TRIED = ("2.10", "2.11", "2.13")
NEWEST = TRIED[-1]


class Limit(NamedTuple):
    """A feature that some versions of torch do not run well, and its failure there."""

    what: str
    works_on: tuple[str, ...]  # of TRIED
    otherwise: str
    instead: str


_OTHER_SCHEDULES = "1f1b or interleaved_1f1b"
SCHEDULE_LIMITS = {
    "interleaved_zero_bubble": Limit(
        'layout.pipeline_schedule = "interleaved_zero_bubble"',
        ("2.13",),
        "crashes at the first step",
        _OTHER_SCHEDULES,
    ),
    **{
        name: Limit(f'layout.pipeline_schedule = "{name}"', ("2.13",), "fails at the start", _OTHER_SCHEDULES)
        for name in ("zbv", "dualpipev")
    },
}
COMPILED_SPLIT_BACKWARD = Limit(
    "layout.compile = true with a schedule that splits the backward",
    (),
    "computes each layer's backward twice; the numbers are right",
    "layout.compile = false, or a schedule of " + _OTHER_SCHEDULES,
)


def as_tried(version: str) -> str:
    """Returns the tried version by which `version`, such as "2.12.0+rocm7", is judged."""
    number = _number(version)
    return next((one for one in reversed(TRIED) if _number(one) <= number), TRIED[0])


def schedule_complaint(schedule: str, version: str) -> str | None:
    """Returns why torch `version` does not run a pipeline schedule, and what would work; None if it does."""
    limit = SCHEDULE_LIMITS.get(schedule)
    return None if limit is None else _complaint(limit, version)


def compile_advice(layout: Layout) -> str | None:
    """Returns why compiled layers are slow in `layout`; None if they are not."""
    if layout.pipeline > 1 and SCHEDULES[layout.pipeline_schedule].splits_backward:
        limit = COMPILED_SPLIT_BACKWARD
        return f"{limit.what} {limit.otherwise}; what is faster: {limit.instead}"
    return None


def table() -> Iterator[str]:
    """Yields the lines of the table in docs/layouts.md."""
    yield f"| | {' | '.join(TRIED)} | otherwise |"
    yield "|---" * (len(TRIED) + 2) + "|"
    for limit in (*SCHEDULE_LIMITS.values(), COMPILED_SPLIT_BACKWARD):
        marks = ("yes" if version in limit.works_on else "no" for version in TRIED)
        yield f"| `{limit.what}` | {' | '.join(marks)} | {limit.otherwise} |"


def _complaint(limit: Limit, version: str) -> str | None:
    if as_tried(version) in limit.works_on:
        return None
    return (
        f"{limit.what} {limit.otherwise} on torch {version}; it works on torch "
        f"{' and '.join(limit.works_on)}; what would work: {limit.instead}"
    )


def _number(version: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    return int(major), int(minor)
