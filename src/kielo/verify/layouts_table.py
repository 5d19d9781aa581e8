"""The layouts certificate as text: a row for each case, and which bar was missed where. Torch-free."""

from typing import Any

TITLES = ("case", "ranks", "tied", "loss", "gradient norm", "worst gradient", "worst weight", "bf16 loss", "")


def table(certificate: dict[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Returns (titles, rows) of layouts.json: relative differences from one process, bf16's in a column."""
    in_bf16 = {_name_in_fp32(entry): entry for entry in certificate["cases"] if entry["precision"] == "bf16"}
    rows = [
        _row(entry, in_bf16.pop(entry["name"], None))
        for entry in certificate["cases"]
        if entry["precision"] == "fp32"
    ]
    # The chosen cases may lack fp32.
    return TITLES, rows + [
        [name, *_what(entry), "", "", "", "", *_bf16(entry)] for name, entry in in_bf16.items()
    ]


def verdict(certificate: dict[str, Any]) -> str:
    """Returns the verdict: passed, with the bars; or every bar that was missed, with case and tensor."""
    bars = certificate["bars"]
    asked = (
        f"bars in fp32: loss {bars['loss']:.0e} and gradient norm {bars['norm']:.0e} at each of "
        f"{certificate['steps']} steps, "
        f"each tensor's gradient {bars['gradient']:.0e} and final weights {bars['weight']:.0e}"
    )
    lines = [
        f"MISSED by {entry['name']}: {miss}"
        for entry in certificate["cases"]
        for miss in misses(entry, certificate["bars"])
    ]
    if lines:
        return "\n".join([*lines, f"Layouts change the model ({asked})."])
    with_bars = sum(entry["passed"] is not None for entry in certificate["cases"])
    whole = f"All {with_bars} cases" if certificate["all_cases"] else f"The {with_bars} chosen cases"
    said = f"{whole} in fp32 train the same model as one process ({asked})."
    return "\n".join(filter(None, [said, left_out_line(certificate["left_out"])]))


def left_out_line(left_out: dict[str, list[str]]) -> str:
    """Returns how many cases the installed torch does not run, and why; "" for none."""
    return "; ".join(f"{len(names)} cases left out: {reason}" for reason, names in left_out.items())


def misses(entry: dict[str, Any], bars: dict[str, float]) -> list[str]:
    """Returns the bars that a case misses, and where; empty for one that passed or has no bar."""
    if entry["error"]:
        return [entry["error"]]
    if entry["passed"] is not False:
        return []
    gradient, weight = entry["worst_gradient"], entry["worst_weight"]
    measured = (
        ("loss", "the loss", entry["max_relative_loss_difference"]),
        ("norm", "the gradient norm", entry["max_relative_norm_difference"]),
        ("gradient", f"the gradient of {gradient['name']}", gradient["relative_l2"]),
        ("weight", f"the weight {weight['name']}", weight["relative_l2"]),
    )
    return [
        f"{where} is off by {_number(value)} (bar {bars[what]:.0e})"
        for what, where, value in measured
        if value is None or value > bars[what]
    ]


def _row(entry: dict[str, Any], bf16: dict[str, Any] | None) -> list[str]:
    values = (
        entry["max_relative_loss_difference"],
        entry["max_relative_norm_difference"],
        entry["worst_gradient"]["relative_l2"],
        entry["worst_weight"]["relative_l2"],
    )
    cells = [entry["name"], *_what(entry), *map(_number, values), *(_bf16(bf16) if bf16 else ["", ""])]
    cells[-1] = "ok" if entry["passed"] else "MISSED"
    return cells


def _what(entry: dict[str, Any]) -> list[str]:
    return [str(entry["ranks"]), "yes" if entry["tied"] else "no"]


def _bf16(entry: dict[str, Any]) -> list[str]:
    return [_number(entry["max_relative_loss_difference"]), "MISSED" if entry["error"] else "no bar"]


def _name_in_fp32(entry: dict[str, Any]) -> str:
    return entry["name"].removesuffix("-bf16")


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.1e}"
