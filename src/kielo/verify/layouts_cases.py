"""The cases of `kielo verify layouts`, as data: axes alone, in pairs and in threes, with other settings.

A case is a layout section, a number of micro-batches, a precision, and the recipe's switches that it sets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import combinations, product
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
    """One layout to check, and the settings of the check."""

    layout: Mapping[str, Any]  # keys of the recipe's [layout]; missing axes are 1
    micro_batches: int = 1  # of a rank in one step
    switches: Mapping[str, Any] = field(default_factory=dict)  # of SWITCHES; else the recipe's values
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
        terms = {
            "one_rank": self.ranks == 1,
            f"pipeline{section.pipeline}": section.pipeline > 1,
            section.pipeline_schedule: section.pipeline > 1,
            **{f"{axis}{size}": size > 1 for axis in INNER_AXES for size in [getattr(section, axis)]},
            "layers" + "_".join(map(str, section.pipeline_layers or ())): section.pipeline_layers is not None,
            f"zero{section.zero}": section.zero != 1,
            "no_sequence": not section.sequence_parallel,
            section.tensor_overlap: section.tensor_overlap != "none",
            "cpu_offload": section.cpu_offload,
            section.context_attention: section.context > 1,
            f"recompute_{section.recompute}": section.recompute != "none",
            f"every{section.recompute_every_layers}": section.recompute_every_layers != 1,
            "compiled": section.compile,
            f"micro{self.micro_batches}": self.micro_batches != 1,
            "tied" if switches.get("tied") else "untied": "tied" in switches,
            "documents" if switches.get("documents") else "no_documents": "documents" in switches,
            "z_loss" if switches.get("z_loss") else "no_z_loss": "z_loss" in switches,
            "frozen": switches.get("frozen"),
            self.precision: self.precision != "fp32",
        }
        return "-".join(term for term, is_shown in terms.items() if is_shown)


def all_cases() -> list[Case]:
    # Four axes of 2 would need 16 ranks, so they cross in threes on 8.
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


def _cases(
    layouts: Sequence[Keys],
    micro_batches: Sequence[int] = (1,),
    switches: Sequence[Mapping[str, Any]] = ({},),
    precision: Precision = "fp32",
) -> list[Case]:
    """Return a case for every combination of layout, number of micro-batches and set of switches."""
    every = product(layouts, micro_batches, switches)
    return [Case(layout, number, switch, precision) for layout, number, switch in every]


def _crossed(layouts: Sequence[Keys], others: Sequence[Keys]) -> list[Keys]:
    return [layout | other for layout in layouts for other in others]


_TYINGS, _DOCUMENTS = ({"tied": True}, {"tied": False}), ({"documents": True},)
_CONTEXTS: list[Keys] = [{"context": 2, "context_attention": form} for form in ("all_gather", "ulysses")]
_POLICIES: list[Keys] = [
    {"recompute": policy} for policy in ("attention", "norms+activations", "operators", "full")
]


def _one_axis() -> list[Case]:
    shards: list[Keys] = [{"shard": 2, "zero": zero} for zero in (1, 2, 3)]
    tensors: list[Keys] = [{"tensor": 2}, {"tensor": 2, "sequence_parallel": False}]
    cases = [Case({}, micro_batches=4), *_cases([{"replicate": 2}, *shards, *tensors], (1, 4))]
    cases += [Case({"tensor": 2}, switches={"z_loss": 1e-3}), Case({"shard": 2, "cpu_offload": True})]
    # Attention runs different code with document masks and without.
    cases += _cases(_CONTEXTS, switches=({"documents": True}, {"documents": False}))
    cases += _cases(_CONTEXTS, (4,), _DOCUMENTS)
    cases += _cases([{"shard": 2, "zero": 3}, {"tensor": 2}], switches=_TYINGS)
    alone: list[Keys] = [{"replicate": 2}, {"shard": 2}, {"shard": 2, "zero": 3}, {"tensor": 2}]
    return [*cases, *_cases(alone, precision="bf16"), *_cases(_CONTEXTS, (1,), _DOCUMENTS, "bf16")]


def _recomputation() -> list[Case]:
    layouts: list[Keys] = [{"shard": 2, "zero": 1}, {"shard": 2, "zero": 3}, {"tensor": 2}, {"context": 2}]
    every_second: Keys = {"recompute": "full", "recompute_every_layers": 2}
    return _cases(_crossed(layouts, [*_POLICIES, every_second]))


def _compiled() -> list[Case]:
    layouts: list[Keys] = [
        {"shard": 2, "zero": 3, "recompute": "operators"},
        {"tensor": 2},
        {"tensor": 2, "recompute": "full"},
        {"tensor": 2, "recompute": "attention"},
        {"pipeline": 2, "pipeline_schedule": "1f1b"},
        *_CONTEXTS,
    ]
    return _cases(_crossed(layouts, [{"compile": True}]), (4,))


def _overlapped() -> list[Case]:
    chunked: Keys = {"tensor": 2, "tensor_overlap": "chunked"}
    cases = [*_cases([chunked], (1, 4)), Case(chunked, precision="bf16")]
    cases += _cases(_crossed([chunked], _POLICIES))
    cases += _cases([chunked | {axis: 2} for axis in INNER_AXES if axis != "tensor"], (2,))
    schedules = ("1f1b", "interleaved_zero_bubble")
    cases += _cases([chunked | {"pipeline": 2, "pipeline_schedule": name} for name in schedules], (4,))
    return [*cases, Case(chunked | {"tensor": 4}), Case(chunked | {"compile": True}, 4)]


def _pairs() -> list[Case]:
    cases = []
    for first, second in combinations(INNER_AXES, 2):
        layout: Keys = {first: 2, second: 2}
        cases += [Case(layout), Case(layout, precision="bf16")]
        if "shard" in layout:
            cases += _cases([layout | {"zero": zero} for zero in (1, 2, 3)], (2,))
        if "context" in layout:
            cases += [Case(layout | {"context_attention": "ulysses"}, 2, {"documents": True})]
    cases += _cases([{"shard": 2, "tensor": 2, "zero": 3, "recompute": "full"}], (2,), _TYINGS)
    cases += [Case({"shard": 2, "tensor": 2, "sequence_parallel": False, "zero": 3}, 2)]
    return cases + [Case({"tensor": 4}), Case({"context": 4}), Case({"shard": 4, "zero": 3})]


def _threes() -> list[Case]:
    splitting: Keys = {"shard": 2, "context": 2, "tensor": 2}
    cases = [Case(dict.fromkeys(axes, 2)) for axes in combinations(INNER_AXES, 3)]
    cases += [*_cases([splitting], switches=_TYINGS), Case(splitting, precision="bf16")]
    most = splitting | {"zero": 3, "recompute": "full"}
    return cases + _cases([most | context for context in _CONTEXTS], (4,), _DOCUMENTS)


def _pipelines() -> list[Case]:
    """Return cases of every schedule alone, with each other axis, and with tensor and shard at once."""
    alone: list[Keys] = [{"pipeline": 2, "pipeline_schedule": name} for name in SCHEDULES]
    cases = _cases(alone, (4,))
    cases += [Case(alone[1] | {"pipeline": 4}, 4), Case(alone[1], 8), Case(alone[2], 2)]
    cases += _cases(alone, (4,), _TYINGS)
    cases += _cases(alone, (4,), ({"documents": True, "z_loss": 1e-3},))
    cases += _cases(_crossed(alone, [{axis: 2} for axis in INNER_AXES]), (4,))
    # Stages in the middle then train nothing, but gradients still pass through them.
    cases += _cases(alone, (4,), ({"frozen": True},))
    cases += [Case(alone[1] | {"pipeline": 4}, 4, {"frozen": True}), Case({"shard": 2}, 2, {"frozen": True})]
    # The last stage has only the norm and the head.
    cases += [
        Case(alone[1] | {"pipeline_layers": (4, 0)}, 4),
        Case(alone[4] | {"pipeline_layers": (2, 1, 1, 0)}, 4),
    ]
    splits = {name: schedule.splits_backward for name, schedule in SCHEDULES.items()}
    whole = [layout for layout in alone if not splits[layout["pipeline_schedule"]]]
    split = [layout for layout in alone if splits[layout["pipeline_schedule"]]]
    cases += _cases(_crossed(whole, [{"recompute": "full"}]), (4,))
    cases += _cases(_crossed(split, [{"recompute": "norms+activations"}]), (4,))
    cases += _cases(_crossed(whole, [{"shard": 2, "zero": zero} for zero in (2, 3)]), (4,))
    cases += [
        Case(alone[1] | {"replicate": 2, "shard": 2, "zero": 2}, 2),
        Case(alone[2] | {"shard": 2, "tensor": 2, "zero": 2}, 4, {"tied": True}),
        Case(alone[4] | {"shard": 2, "zero": 2}, 4),
    ]
    both = _crossed(alone, [{"tensor": 2, "shard": 2}])
    cases += [*_cases(both, (4,)), *_cases(both[1::2], (4,), ({"tied": True, "documents": True},))]
    return cases + _cases(alone, (4,), precision="bf16")
