"""The cases of `kielo verify layouts`, as data: axes alone, in pairs and in threes, with other settings.

A case is a layout section, a number of micro-batches, a precision, and the recipe's switches that it sets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import Layout, Precision
from kielo.resolve.software import schedule_complaint
from kielo.resolve.stages import SCHEDULES

Keys = dict[str, Any]  # of [layout]
INNER_AXES = ("replicate", "shard", "context", "tensor")
AXES = ("pipeline", *INNER_AXES)
SWITCHES = ("tied", "documents", "z_loss", "frozen")


@dataclass(frozen=True)
class Case:
    """One layout to check, and the settings of the check.

    layout: keys of the recipe's [layout]. Missing axes are 1. switches: keys of SWITCHES. Missing switches
    have the recipe's values. micro_batches: of a rank in one step.
    """

    layout: Mapping[str, Any]
    micro_batches: int = 1
    switches: Mapping[str, Any] = field(default_factory=dict)
    precision: Precision = "fp32"

    @property
    def section(self) -> Layout:
        return Layout(**(dict.fromkeys(AXES, 1) | dict(self.layout)))

    @property
    def ranks(self) -> int:
        section = self.section
        return section.pipeline * section.replicate * section.shard * section.context * section.tensor

    @property
    def name(self) -> str:
        """The case's distinctions in short: `shard2-tensor2-zero3-full-micro2-tied`."""
        section, switches = self.section, self.switches
        terms = [f"{axis}{getattr(section, axis)}" for axis in AXES if getattr(section, axis) > 1] or [
            "one_rank"
        ]
        if section.pipeline > 1:
            terms.insert(1, section.pipeline_schedule)
        if section.pipeline_layers is not None:
            terms.append("layers" + "_".join(map(str, section.pipeline_layers)))
        if section.zero != 1:
            terms.append(f"zero{section.zero}")
        if not section.sequence_parallel:
            terms.append("no_sequence")
        if section.tensor_overlap != "none":
            terms.append(section.tensor_overlap)
        if section.cpu_offload:
            terms.append("cpu_offload")
        if section.context > 1:
            terms.append(section.context_attention)
        if section.recompute != "none":
            terms.append(f"recompute_{section.recompute}")
        if section.recompute_every_layers != 1:
            terms.append(f"every{section.recompute_every_layers}")
        if section.compile:
            terms.append("compiled")
        if self.micro_batches != 1:
            terms.append(f"micro{self.micro_batches}")
        if "tied" in switches:
            terms.append("tied" if switches["tied"] else "untied")
        if "documents" in switches:
            terms.append("documents" if switches["documents"] else "no_documents")
        if "z_loss" in switches:
            terms.append("z_loss" if switches["z_loss"] else "no_z_loss")
        if switches.get("frozen"):
            terms.append("frozen")
        if self.precision != "fp32":
            terms.append(self.precision)
        return "-".join(terms)


def all_cases() -> list[Case]:
    """Return every case, fewest ranks first. Four axes of 2 would need 16 ranks, so they cross in threes on
    8.
    """
    cases = [*_one_axis(), *_recomputation(), *_pairs(), *_threes(), *_pipelines(), *_compiled()]
    cases += _overlapped()
    return sorted(cases, key=lambda case: case.ranks)


def chosen_cases(patterns: Sequence[str] | None) -> list[Case]:
    """Return the cases whose names fit the shell patterns (`tensor2*`), or all without patterns.

    Raise KieloError for a pattern that fits no case.
    """
    cases = all_cases()
    if not patterns:
        return cases
    for pattern in patterns:
        if not any(fnmatchcase(case.name, pattern) for case in cases):
            groups = sorted({case.name.partition("-")[0] for case in cases})
            raise KieloError(
                f"--case {pattern}: no such case. Fix: names and patterns that begin with "
                f"{', '.join(groups)}, such as {cases[0].name} or '{groups[0]}*'"
            )
    return [case for case in cases if any(fnmatchcase(case.name, pattern) for pattern in patterns)]


def cases_that_run(
    cases: Sequence[Case], version: str, model_type: str
) -> tuple[list[Case], dict[str, list[str]]]:
    """Return the cases that torch `version` and the family run, and reason → names of the others."""
    runs: list[Case] = []
    left_out: dict[str, list[str]] = {}
    for case in cases:
        why = _why_not(case, version, model_type)
        if why is None:
            runs.append(case)
        else:
            left_out.setdefault(why, []).append(case.name)
    return runs, left_out


def _why_not(case: Case, version: str, model_type: str) -> str | None:
    layout, family = case.section, FAMILIES[model_type]
    if layout.pipeline > 1 and (said := schedule_complaint(layout.pipeline_schedule, version)):
        return said
    if layout.context > 1 and family.has_relative_positions:
        return f"the relative positions of model.model_type = {model_type!r} need whole sequences on a rank"
    if family.is_encoder and case.switches.get("tied") is False:
        return f"the head of model.model_type = {model_type!r} is always tied"
    return None


def _one_axis() -> list[Case]:
    cases = [Case({}, micro_batches=4)]
    cases += [Case({"replicate": 2}, micro_batches) for micro_batches in (1, 4)]
    cases += [
        Case({"shard": 2, "zero": zero}, micro_batches) for zero in (1, 2, 3) for micro_batches in (1, 4)
    ]
    cases += [Case({"tensor": 2}, micro_batches) for micro_batches in (1, 4)]
    cases += [Case({"tensor": 2, "sequence_parallel": False}, micro_batches) for micro_batches in (1, 4)]
    cases += [Case({"tensor": 2}, switches={"z_loss": 1e-3}), Case({"shard": 2, "cpu_offload": True})]
    contexts = [{"context": 2, "context_attention": form} for form in ("all_gather", "ulysses")]
    # Attention runs different code with document masks and without.
    cases += [
        Case(context, switches={"documents": documents})
        for context in contexts
        for documents in (True, False)
    ]
    cases += [Case(context, 4, {"documents": True}) for context in contexts]
    tyings = ({"tied": True}, {"tied": False})
    cases += [
        Case(layout, switches=tying)
        for layout in ({"shard": 2, "zero": 3}, {"tensor": 2})
        for tying in tyings
    ]
    alone = ({"replicate": 2}, {"shard": 2}, {"shard": 2, "zero": 3}, {"tensor": 2})
    cases += [Case(layout, precision="bf16") for layout in alone]
    return cases + [Case(context, switches={"documents": True}, precision="bf16") for context in contexts]


def _recomputation() -> list[Case]:
    policies: list[Keys] = [
        {"recompute": policy} for policy in ("attention", "norms+activations", "operators", "full")
    ]
    policies.append({"recompute": "full", "recompute_every_layers": 2})
    layouts = ({"shard": 2, "zero": 1}, {"shard": 2, "zero": 3}, {"tensor": 2}, {"context": 2})
    return [Case(layout | policy) for layout in layouts for policy in policies]


def _compiled() -> list[Case]:
    layouts: list[Keys] = [
        {"shard": 2, "zero": 3, "recompute": "operators"},
        {"tensor": 2},
        {"tensor": 2, "recompute": "full"},
        {"tensor": 2, "recompute": "attention"},
        {"pipeline": 2, "pipeline_schedule": "1f1b"},
    ]
    layouts += [{"context": 2, "context_attention": form} for form in ("all_gather", "ulysses")]
    return [Case(layout | {"compile": True}, 4) for layout in layouts]


def _overlapped() -> list[Case]:
    chunked: Keys = {"tensor": 2, "tensor_overlap": "chunked"}
    cases = [Case(chunked, micro_batches) for micro_batches in (1, 4)] + [Case(chunked, precision="bf16")]
    cases += [
        Case(chunked | {"recompute": policy})
        for policy in ("attention", "norms+activations", "operators", "full")
    ]
    cases += [Case(chunked | {axis: 2}, 2) for axis in INNER_AXES if axis != "tensor"]
    cases += [
        Case(chunked | {"pipeline": 2, "pipeline_schedule": name}, 4)
        for name in ("1f1b", "interleaved_zero_bubble")
    ]
    return [*cases, Case(chunked | {"tensor": 4}), Case(chunked | {"compile": True}, 4)]


def _pairs() -> list[Case]:
    cases = []
    for first, second in combinations(INNER_AXES, 2):
        layout = {first: 2, second: 2}
        cases += [Case(layout), Case(layout, precision="bf16")]
        if "shard" in layout:
            cases += [Case(layout | {"zero": zero}, 2) for zero in (1, 2, 3)]
        if "context" in layout:
            cases += [Case(layout | {"context_attention": "ulysses"}, 2, {"documents": True})]
    cases += [
        Case({"shard": 2, "tensor": 2, "zero": 3, "recompute": "full"}, 2, {"tied": tied})
        for tied in (True, False)
    ]
    cases += [Case({"shard": 2, "tensor": 2, "sequence_parallel": False, "zero": 3}, 2)]
    return cases + [Case({"tensor": 4}), Case({"context": 4}), Case({"shard": 4, "zero": 3})]


def _threes() -> list[Case]:
    cases = [Case(dict.fromkeys(axes, 2)) for axes in combinations(INNER_AXES, 3)]
    splitting = {"shard": 2, "context": 2, "tensor": 2}
    cases += [Case(splitting, switches={"tied": tied}) for tied in (True, False)]
    cases.append(Case(splitting, precision="bf16"))
    most = splitting | {"zero": 3, "recompute": "full"}
    cases += [
        Case(most | {"context_attention": form}, 4, {"documents": True}) for form in ("all_gather", "ulysses")
    ]
    return cases


def _pipelines() -> list[Case]:
    """Return cases of every schedule alone, with each other axis, and with tensor and shard at once."""
    alone: list[Keys] = [{"pipeline": 2, "pipeline_schedule": name} for name in SCHEDULES]
    cases = [Case(layout, 4) for layout in alone]
    cases += [Case(alone[1] | {"pipeline": 4}, 4), Case(alone[1], 8), Case(alone[2], 2)]
    cases += [Case(layout, 4, {"tied": tied}) for layout in alone for tied in (True, False)]
    cases += [Case(layout, 4, {"documents": True, "z_loss": 1e-3}) for layout in alone]
    cases += [Case(layout | {axis: 2}, 4) for layout in alone for axis in INNER_AXES]
    # Stages in the middle then train nothing, but gradients still pass through them.
    cases += [Case(layout, 4, {"frozen": True}) for layout in alone]
    cases += [Case(alone[1] | {"pipeline": 4}, 4, {"frozen": True}), Case({"shard": 2}, 2, {"frozen": True})]
    # The last stage has only the norm and the head.
    cases += [
        Case(alone[1] | {"pipeline_layers": (4, 0)}, 4),
        Case(alone[4] | {"pipeline_layers": (2, 1, 1, 0)}, 4),
    ]
    whole_backward = [
        layout for layout in alone if not SCHEDULES[layout["pipeline_schedule"]].splits_backward
    ]
    cases += [Case(layout | {"recompute": "full"}, 4) for layout in whole_backward]
    cases += [
        Case(layout | {"recompute": "norms+activations"}, 4)
        for layout in alone
        if layout not in whole_backward
    ]
    cases += [Case(layout | {"shard": 2, "zero": zero}, 4) for layout in whole_backward for zero in (2, 3)]
    cases += [
        Case(alone[1] | {"replicate": 2, "shard": 2, "zero": 2}, 2),
        Case(alone[2] | {"shard": 2, "tensor": 2, "zero": 2}, 4, {"tied": True}),
        Case(alone[4] | {"shard": 2, "zero": 2}, 4),
    ]
    cases += [Case(layout | {"tensor": 2, "shard": 2}, 4) for layout in alone]
    cases += [
        Case(layout | {"tensor": 2, "shard": 2}, 4, {"tied": True, "documents": True})
        for layout in alone[1::2]
    ]
    return cases + [Case(layout, 4, precision="bf16") for layout in alone]
