"""Names of layouts, short enough to type ("tp8-pp4-dp16-mb1-zero1-1f1b-full"), and matching of their parts.

Terms: tp8, pp4, cp2, dp16 (replicas × shards), hsdp8 (ranks that hold one copy, if there are several copies),
mb1 (sequences of a micro-batch), zero1, the schedule, recomputation, and rarer terms if they apply.
"""

import re
from collections.abc import Callable
from typing import NamedTuple, get_args

from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Layout, Recompute
from kielo.resolve.stages import num_stages

_USUAL_OPERATORS = Layout.model_fields["recompute_saved_operators"].default
# The longest first: "norms+activations" before "norms".
_RECOMPUTATION = "|".join(
    re.escape(name) for name in sorted(get_args(Recompute), key=len, reverse=True) if name != "none"
)
_KNOWN = (
    "tp8, pp4, cp2, dp16, hsdp8, mb1, zero1, zero2, zero3, gpipe, 1f1b, interleaved2, zb2, zbv, dualpipev, "
    "full, full/2, attention, norms+activations, operators, norecompute, sp, nosp, chunked, allgather, "
    "ulysses, bias, offload, compile, nocompile, layers20+20+19, saved_mm+addmm"
)
# The 1 of 1f1b does not belong to a number before it: "pp41f1b" is pp4 and 1f1b.
_TERM = re.compile(
    r"(?:tp|pp|cp|hsdp|dp|mb)[ =]?(?:\d+|all)(?!f1b)"
    r"|zero ?[123]"
    # as recipes name them, with any number of stages a rank
    r"|interleaved[_ -]?1f1b|interleaved_zero_bubble"
    r"|(?:interleaved|zb)(?!v)(?:\d+(?!f1b))?"
    r"|gpipe|1f1b|zbv|dualpipev"
    rf"|norecompute|(?:{_RECOMPUTATION})(?:/\d+(?!f1b))?"
    r"|nosp|sp|chunked|allgather|ulysses|bias|offload|compile|nocompile"
    r"|layers\d+(?:\+\d+)*|saved_[a-z0-9_.+]*"
)
_SYNONYMS = {"interleaved1f1b": "interleaved", "interleavedzerobubble": "zb"}
_BETWEEN = re.compile(r"[-×x*,;\s]+")


class _Term(NamedTuple):
    text: str
    is_in_name: bool = True  # False: usual, so not in the name, but it can be asked for


def layout_name(layout: Layout, micro_batch: int) -> str:
    """Return the layout's name without usual settings. `micro_batch` is in sequences."""
    return "-".join(term.text for term in _terms(layout, micro_batch) if term.is_in_name)


def matches(wanted: str) -> Callable[[Layout, int], bool]:
    """Return a function that is True for a layout and micro-batch that have every term of `wanted`.

    Terms may follow each other directly ("tp8pp4") or be separated by hyphens, ×, x, spaces or commas, in
    either case. "interleaved" and "zb" without a number match any. Raises KieloError for an unknown term.
    """
    asked = _asked(wanted)

    def fits(layout: Layout, micro_batch: int) -> bool:
        there = {term.text for term in _terms(layout, micro_batch)}
        return asked <= there

    return fits


def _terms(layout: Layout, micro_batch: int) -> list[_Term]:
    data = layout.replicate * layout.shard
    is_one_device = layout.tensor == layout.pipeline == layout.context == data == 1
    terms = [_axis("tp", layout.tensor)]
    if layout.tensor > 1:
        terms += [_Term("sp", False) if layout.sequence_parallel else _Term("nosp")]
        terms += [_Term(layout.tensor_overlap)] if layout.tensor_overlap != "none" else []
    terms += [_axis("pp", layout.pipeline), _axis("cp", layout.context)]
    if layout.context > 1:
        terms += [_Term("ulysses") if layout.context_attention == "ulysses" else _Term("allgather", False)]
    terms += [_Term(f"dp{data}" if layout.shard else "dpall", data != 1 or is_one_device)]
    if layout.replicate > 1:
        terms += [_Term(f"hsdp{layout.shard or 'all'}")]
    terms += [_Term(f"mb{micro_batch}"), _Term(f"zero{layout.zero}")]
    if layout.pipeline > 1:
        terms += _schedule(layout)
    terms += _recomputation(layout)
    terms += [_Term("bias")] * (layout.alibi_kernel == "bias") + [_Term("offload")] * layout.cpu_offload
    return terms if layout.compile is None else [*terms, _Term("compile" if layout.compile else "nocompile")]


def _axis(name: str, ranks: int) -> _Term:
    return _Term(f"{name}{ranks}", ranks > 1)


def _schedule(layout: Layout) -> list[_Term]:
    schedule, each = layout.pipeline_schedule, num_stages(layout) // layout.pipeline
    kind = {"interleaved_1f1b": "interleaved", "interleaved_zero_bubble": "zb"}.get(schedule)
    terms = [_Term(f"{kind}{each}"), _Term(kind, False)] if kind else [_Term(schedule)]
    if layout.pipeline_layers is not None:
        terms += [_Term("layers" + "+".join(map(str, layout.pipeline_layers)))]
    return terms


def _recomputation(layout: Layout) -> list[_Term]:
    if layout.recompute == "none":
        return [_Term("norecompute", False)]
    every = layout.recompute_every_layers
    terms = [_Term(f"{layout.recompute}{f'/{every}' if every > 1 else ''}")]
    if layout.recompute == "operators" and layout.recompute_saved_operators != _USUAL_OPERATORS:
        terms += [_Term("saved_" + "+".join(layout.recompute_saved_operators).lower())]
    return terms


def _asked(wanted: str) -> set[str]:
    """Split `wanted` into terms. Raises KieloError for an unknown term."""
    text, terms, at = wanted.lower(), set(), 0
    while at < len(text):
        if between := _BETWEEN.match(text, at):
            at = between.end()
            continue
        found = _TERM.match(text, at)
        if found is None:
            raise KieloError(f"{text[at:]!r} in {wanted!r} is not a term of a layout's name. Fix: {_KNOWN}")
        term = re.sub(r"[ =_-]", "", found[0]) if not found[0].startswith("saved") else found[0]
        terms.add(_SYNONYMS.get(term, term))
        at = found.end()
    if not terms:
        raise KieloError(f"{wanted!r} has no term of a layout's name. Fix: {_KNOWN}")
    return terms
