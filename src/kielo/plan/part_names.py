"""Names of the parts of a step and of memory, and numbers with their units as text; no torch."""

import math
from collections.abc import Mapping, Sequence

from kielo.plan.planned_layout import PlannedLayout

SECONDS = {  # part of a step → its name
    "matrix": "matrix products", "attention": "attention", "elementwise": "norms and activations",
    "launch": "kernel launches", "head": "output head and loss", "bubble": "pipeline bubble",
    "tensor_traffic": "tensor traffic", "context_traffic": "context traffic",
    "pipeline_traffic": "pipeline traffic", "data_traffic": "data traffic", "optimiser": "optimiser",
    "fixed": "fixed costs", "slowest": "slowest device",
}  # fmt: skip
BYTES = {
    "weights": "weights", "gradients": "gradients", "optimiser": "optimiser state",
    "activations": "activations", "logits": "logits", "gathered": "gathered parameters",
    "workspace": "workspace",
}  # fmt: skip


def parts_of(several: Sequence[Mapping[str, float]], names: Mapping[str, str]) -> list[str]:
    """Returns the parts that at least one of `several` has, in the order of `names`."""
    known = dict.fromkeys([*names, *(part for each in several for part in each)])
    return [part for part in known if any(each.get(part, 0.0) > 0 for each in several)]


def decimals(planned: PlannedLayout) -> int:
    """Returns the decimals that show four figures of the step's seconds."""
    return max(0, 3 - math.floor(math.log10(planned.step_seconds)))


def seconds_text(planned: PlannedLayout, seconds: float) -> str:
    """Returns seconds as text, to the step's fourth figure, or to two figures if they are smaller."""
    own = 1 - math.floor(math.log10(abs(seconds))) if seconds else 0
    return f"{seconds:.{max(decimals(planned), own)}f} s".replace("-", "−")


def signed_text(seconds: float, places: int) -> str:
    return f"{'−' if seconds < 0 else '+'}{abs(seconds):.{places}f} s"


def gb_text(size: float) -> str:
    return f"{size / 1e9:.1f}"


def count_text(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural if number != 1 else ''}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def listed(texts: Sequence[str], conjunction: str) -> str:
    """Returns "a, b or c"."""
    return f" {conjunction} ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
