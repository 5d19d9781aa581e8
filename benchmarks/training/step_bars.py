"""Bars of the step benchmark: a result → lines with what was required, what was measured, and a verdict."""

from dataclasses import dataclass
from typing import Any, Literal

Measure = Literal["tflops", "best_peer", "best_peer_lower", "trainer", "idle"]


@dataclass(frozen=True)
class Bar:
    """`measure` of `contender` in the shape must be at least `limit`; "idle" must be below it."""

    shape: str
    contender: str
    measure: Measure
    limit: float
    precision: tuple[str, ...] = ("bf16",)


_UNITS = {
    "tflops": "TFLOP/s",
    "best_peer": "× the best peer",
    "best_peer_lower": "× the best peer, 95 % lower bound",
    "trainer": "× the Hugging Face Trainer",
    "idle": "share of the step idle",
}
GPU_SHAPES = ("llama_8b", "llama_1b", "llmjp_172b")
BARS = (
    Bar("llama_8b", "kielo", "tflops", 570),
    Bar("llama_8b", "kielo-fp8", "tflops", 780),
    Bar("llmjp_172b", "kielo", "tflops", 600),
    Bar("llmjp_172b", "kielo-fp8", "tflops", 850),
    *(
        Bar(shape, own, measure, limit)
        for shape in GPU_SHAPES
        for own in ("kielo", "kielo-fp8")
        for measure, limit in (("best_peer", 1.10), ("trainer", 1.5), ("idle", 0.03))
    ),
    Bar("tiny", "kielo", "trainer", 1.10, ("fp32", "bf16")),
    Bar("tiny", "kielo", "best_peer_lower", 0.97, ("fp32", "bf16")),
)


def bars_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns every bar of the result's shape and precision with its line; `is_met` None: not measured."""
    bars = [bar for bar in BARS if bar.shape == result["shape"] and result["precision"] in bar.precision]
    return [
        with_line(
            f"{bar.shape} {bar.contender}",
            _UNITS[bar.measure],
            bar.limit,
            _measured(bar, result),
            bar.measure == "idle",
        )
        for bar in bars
    ]


def with_line(
    what: str, unit: str, limit: float, measured: float | None, is_below: bool = False
) -> dict[str, Any]:
    """Returns a bar with its line."""
    is_met = None if measured is None else (measured < limit if is_below else measured >= limit)
    asked = f"{'<' if is_below else '≥'} {limit:g} {unit}"
    seen = "not measured" if measured is None else f"{measured:.4g}"
    verdict = {None: "open", True: "met", False: "not met"}[is_met]
    line = f"bar: {what}, {asked}: measured {seen}, {verdict}"
    return {"what": what, "unit": unit, "limit": limit, "measured": measured, "is_met": is_met, "line": line}


def idle_share(row: dict[str, Any]) -> float:
    return row["parts"]["idle"] / row["parts"]["step"]


def _measured(bar: Bar, result: dict[str, Any]) -> float | None:
    row = result["contenders"].get(bar.contender)
    if row is None:
        return None
    if bar.measure == "tflops":
        return row["tflops"]
    if bar.measure == "idle":
        return idle_share(row) if row["parts"] else None
    ratios = result["ratios"].get(bar.contender, {})
    if not bar.contender.endswith("-fp8"):  # FP8 against FP8 and wider, bf16 against bf16
        ratios = {peer: ratio for peer, ratio in ratios.items() if not peer.endswith("-fp8")}
    if bar.measure == "trainer":
        return ratios["trainer"]["median"] if "trainer" in ratios else None
    # The best is the one that Kielo is least ahead of.
    key = "lower_95" if bar.measure == "best_peer_lower" else "median"
    return min((ratio[key] for ratio in ratios.values()), default=None)
