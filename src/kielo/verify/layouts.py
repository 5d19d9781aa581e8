"""The comparison of every layout's training of a tiny model with training on one process, number by number.

A recipe (only its family and switches count, and no stage of a run is needed) → `layouts.json`, the
certificate. For each case it has the differences of ten steps' losses and gradient norms, of each tensor's
gradient and of each tensor's final weights from one plain process. The ranks are gloo ranks on this machine's
CPU, one thread each.
"""

import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kielo.artifact.durable import refuse_other_json
from kielo.artifact.manifest import installed_versions, write_json_atomically
from kielo.ranks.local_ranks import Ranks
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.resolve.software import installed_torch
from kielo.verify.layouts_cases import Case, all_cases, cases_that_run, chosen_cases
from kielo.verify.layouts_rank import Asked, refusal_of
from kielo.verify.layouts_subject import family_of, subject
from kielo.verify.screens import LayoutsCase, LayoutsCertificate, Worst, left_out_line

CERTIFICATE_NAME = "layouts.json"
# fp32. Loss and norm at each step; gradients after the first step's backward and weights after the last step.
BARS = {"loss": 1e-5, "norm": 1e-5, "gradient": 2e-5, "weight": 2e-5}
_PRELOADED = ("kielo.verify.layouts_rank", "torch._dynamo")
_ONE_RANK = "from kielo.verify.layouts_rank import main; main()"
_STOP_SECONDS = 10


@dataclass(frozen=True)
class FoundCase:
    """The ranks' results of a case: loss, norm, gradient and weight → the worst difference; or an error."""

    compile_backend: str | None = None
    worst: dict[str, Worst] = field(default_factory=dict)
    error: str | None = None


def verify_layouts(
    recipe: Recipe,
    folder: Path,
    cases: Sequence[str] | None = None,
    mutation: str | None = None,
    steps: int = 10,
) -> LayoutsCertificate:
    """Run the cases, write the certificate to `folder`/layouts.json, and return it.

    cases: names or shell patterns, default all. mutation: dotted name of a function that every rank calls
    before its cases, to break something on purpose. bf16 is compared with bf16 on one rank and has no bar.
    Cases that the installed torch or the family does not run are left out. Raise KieloError for a pattern
    that no case fits, or only such cases. Progress goes to stderr.
    """
    if steps < 1:
        raise KieloError(f"{steps} steps show nothing. Fix: 1 or more")
    chosen, left_out = cases_that_run(chosen_cases(cases), installed_torch(), family_of(recipe))
    if not chosen:
        raise KieloError(f"no case is left to run: {left_out_line(left_out)}")
    if left_out:
        _say(left_out_line(left_out))
    refuse_other_json(Path(folder) / CERTIFICATE_NAME, "bars")
    with tempfile.TemporaryDirectory(prefix="kielo_layouts_") as scratch_name:
        scratch = Path(scratch_name)
        _say(f"{len(chosen)} cases; first the reference, on one process")
        ranks = Ranks(["-c", _ONE_RANK, scratch_name], 1, 0, {"OMP_NUM_THREADS": "1"}, _PRELOADED)
        found: dict[str, FoundCase] = {}
        try:
            asked = Asked(recipe, tuple(case.name for case in chosen), steps)
            if problem := _launch(ranks, 1, scratch, asked):
                raise KieloError(f"the reference could not be trained: {problem}")
            for number in sorted({case.ranks for case in chosen}):
                of_this_size = [case for case in chosen if case.ranks == number]
                found |= _run(ranks, recipe, of_this_size, steps, scratch, mutation)
        finally:
            ranks.kill()
    entries = [_entry(recipe, case, found[case.name]) for case in chosen]
    certificate: LayoutsCertificate = {
        "passed": all(entry["passed"] is not False for entry in entries),
        "all_cases": len(chosen) == len(all_cases()),
        "bars": BARS,
        "steps": steps,
        "mutation": mutation,
        "left_out": left_out,
        "cases": entries,
        "versions": installed_versions(),
    }
    write_json_atomically(Path(folder) / CERTIFICATE_NAME, certificate)
    return certificate


def _say(progress: str) -> None:
    print(f"layouts: {progress}", file=sys.stderr, flush=True)


def _run(
    ranks: Ranks, recipe: Recipe, cases: list[Case], steps: int, scratch: Path, mutation: str | None
) -> dict[str, FoundCase]:
    """Return differences by case name. If a case raises, its error is noted and the ranks are restarted
    after it.
    """
    found: dict[str, FoundCase] = {}
    results = scratch / f"results_{cases[0].ranks}.jsonl"
    left = cases
    while left:
        asked = Asked(recipe, tuple(case.name for case in left), steps, results.name, mutation)
        problem = _launch(ranks, left[0].ranks, scratch, asked)
        lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
        for row in map(json.loads, lines):
            found[row.pop("name")] = FoundCase(row.pop("compile_backend"), row)
        left = [case for case in left if case.name not in found]
        if left and problem:
            _say(f"{left[0].name}: {problem}")
            found[left.pop(0).name] = FoundCase(error=problem)
    return found


def _entry(recipe: Recipe, case: Case, found: FoundCase) -> LayoutsCase:
    """Return one case of the certificate. A value that is not finite, or was never reached, is None."""
    worst, error = found.worst, found.error
    is_within = worst.keys() == BARS.keys() and all(worst[what]["value"] <= BARS[what] for what in BARS)
    values = {what: _finite(worst[what]["value"]) if worst else None for what in BARS}
    gradient, weight = (worst[what]["at"] if worst else None for what in ("gradient", "weight"))
    of = subject(recipe, case.switches)
    return {
        "name": case.name,
        "layout": case.section.model_dump(mode="json", include=set(case.layout)),
        "ranks": case.ranks,
        "compile_backend": found.compile_backend if case.section.compile else None,
        "tied": of.model.tie_word_embeddings,
        "documents": of.mask_documents,
        "causal_sequences": of.has_causal,
        "z_loss": of.train.z_loss,
        "micro_batches": case.micro_batches,
        "precision": case.precision,
        "max_relative_loss_difference": values["loss"],
        "max_relative_norm_difference": values["norm"],
        "worst_gradient": {"name": gradient, "relative_l2": values["gradient"]},
        "worst_weight": {"name": weight, "relative_l2": values["weight"]},
        "passed": False if error else is_within if case.precision == "fp32" else None,
        "error": error,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and value < math.inf else None


def _launch(ranks: Ranks, number: int, scratch: Path, asked: Asked) -> str:
    """Run the work on `number` new ranks. Return the message of the first rank that failed, or ""."""
    asked.write(scratch)
    ranks.start(number=number)
    failure = ranks.wait(_STOP_SECONDS)
    if failure is None:
        return ""
    said = refusal_of(scratch, failure.rank)
    return f"rank {failure.rank}: {said}" if said else str(failure)
