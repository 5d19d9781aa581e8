"""A layout's name, short enough to type ("tp8-pp4-dp16-mb1-zero1-1f1b-full"), and what parts of such a name
match.

Words: tp8, pp4, cp2, dp16 (replicas × shards), hsdp8 (ranks that hold one copy, where there are several
copies), mb1 (sequences of a micro-batch), zero1, the schedule, and what is computed anew; and rarer things,
each only where it is so.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout
from kielo.resolve.stages import num_stages

_USUAL_OPERATORS = Layout.model_fields["recompute_saved_operators"].default
_KNOWN = (
    "tp8, pp4, cp2, dp16, hsdp8, mb1, zero1, zero2, zero3, gpipe, 1f1b, interleaved2, zb2, zbv, dualpipev, "
    "full, full/2, attention, operators, norecompute, sp, nosp, allgather, ulysses, offload, compile, "
    "nocompile, layers20+20+19, saved_mm+addmm"
)
# A number that stands right before 1f1b leaves it its 1: "pp41f1b" is pp4 and 1f1b.
_WORD = re.compile(
    r"(?:tp|pp|cp|hsdp|dp|mb)[ =]?(?:\d+|all)(?!f1b)"
    r"|zero ?[123]"
    # as recipes name them, with any number of stages a rank
    r"|interleaved[_ -]?1f1b|interleaved_zero_bubble"
    r"|(?:interleaved|zb)(?!v)(?:\d+(?!f1b))?"
    r"|gpipe|1f1b|zbv|dualpipev"
    r"|norecompute|(?:full|attention|operators)(?:/\d+(?!f1b))?"
    r"|nosp|sp|allgather|ulysses|offload|compile|nocompile"
    r"|layers\d+(?:\+\d+)*|saved_[a-z0-9_.+]*"
)
_SYNONYMS = {"interleaved1f1b": "interleaved", "interleavedzerobubble": "zb"}
_BETWEEN = re.compile(r"[-×x*,;\s]*")


class _Word(NamedTuple):
    text: str
    is_told: bool = True  # else it goes without saying, but may be asked for


def layout_name(layout: Layout, micro_batch: int) -> str:
    """`micro_batch`: sequences. What is as it usually is goes unsaid: axes of one rank, sequence
    parallelism.
    """
    return "-".join(word.text for word in _words(layout, micro_batch) if word.is_told)


def matches(wanted: str) -> Callable[[Layout, int], bool]:
    """Whether a layout with its micro-batch has every word of `wanted`; what `wanted` does not name may be
    anything.

    Words may stand close ("tp8pp4") or apart by hyphens, ×, x, spaces or commas, in either case.
    "interleaved" and "zb" without a number match any. Raises KieloError for a word that is none.
    """
    asked = _asked(wanted)

    def fits(layout: Layout, micro_batch: int) -> bool:
        there = {word.text for word in _words(layout, micro_batch)}
        return asked <= there

    return fits


def _words(layout: Layout, micro_batch: int) -> list[_Word]:
    """All that can be said of a layout, in the order of its name."""
    data = layout.replicate * layout.shard
    is_one_device = layout.tensor == layout.pipeline == layout.context == data == 1
    words = [_axis("tp", layout.tensor)]
    if layout.tensor > 1:
        words += [_Word("sp", False) if layout.sequence_parallel else _Word("nosp")]
    words += [_axis("pp", layout.pipeline), _axis("cp", layout.context)]
    if layout.context > 1:
        words += [_Word("ulysses") if layout.context_attention == "ulysses" else _Word("allgather", False)]
    words += [_Word(f"dp{data}" if layout.shard else "dpall", data != 1 or is_one_device)]
    if layout.replicate > 1:
        words += [_Word(f"hsdp{layout.shard or 'all'}")]
    words += [_Word(f"mb{micro_batch}"), _Word(f"zero{layout.zero}")]
    if layout.pipeline > 1:
        words += _schedule(layout)
    words += _recomputation(layout)
    words += [_Word("offload")] * layout.cpu_offload
    return words if layout.compile is None else [*words, _Word("compile" if layout.compile else "nocompile")]


def _axis(name: str, ranks: int) -> _Word:
    return _Word(f"{name}{ranks}", ranks > 1)


def _schedule(layout: Layout) -> list[_Word]:
    schedule, each = layout.pipeline_schedule, num_stages(layout) // layout.pipeline
    kind = {"interleaved_1f1b": "interleaved", "interleaved_zero_bubble": "zb"}.get(schedule)
    words = [_Word(f"{kind}{each}"), _Word(kind, False)] if kind else [_Word(schedule)]
    if layout.pipeline_layers is not None:
        words += [_Word("layers" + "+".join(map(str, layout.pipeline_layers)))]
    return words


def _recomputation(layout: Layout) -> list[_Word]:
    if layout.recompute == "none":
        return [_Word("norecompute", False)]
    every = layout.recompute_every_layers
    words = [_Word(layout.recompute + (f"/{every}" if every > 1 else ""))]
    if layout.recompute == "operators" and layout.recompute_saved_operators != _USUAL_OPERATORS:
        words += [_Word("saved_" + "+".join(layout.recompute_saved_operators).lower())]
    return words


def _asked(wanted: str) -> set[str]:
    text, words = wanted.lower(), set()
    at = _BETWEEN.match(text).end()
    while at < len(text):
        found = _WORD.match(text, at)
        if found is None:
            raise KieloError(
                f"{text[at:]!r} in {wanted!r} is no word of a layout's name; what would work: {_KNOWN}"
            )
        word = re.sub(r"[ =_-]", "", found[0]) if not found[0].startswith("saved") else found[0]
        words.add(_SYNONYMS.get(word, word))
        at = _BETWEEN.match(text, found.end()).end()
    if not words:
        raise KieloError(f"{wanted!r} names nothing of a layout; what would work: {_KNOWN}")
    return words
