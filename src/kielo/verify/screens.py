"""The text that the verbs of `verify/` print: rows of tables, and sentences. Torch-free."""

from collections.abc import Sequence
from typing import TypedDict

from kielo.artifact.verify_results import Complaint, Preflight
from kielo.ranks.hang_watch import some


class Worst(TypedDict):
    value: float
    at: str


class WorstTensor(TypedDict):
    name: str | None
    relative_l2: float | None


class LayoutsCase(TypedDict):
    """A case of layouts.json. A value that is not finite, or was never reached, is None."""

    name: str
    layout: dict[str, object]
    ranks: int
    compile_backend: str | None
    tied: bool
    documents: bool
    causal_sequences: bool
    z_loss: float
    micro_batches: int
    precision: str
    max_relative_loss_difference: float | None
    max_relative_norm_difference: float | None
    worst_gradient: WorstTensor
    worst_weight: WorstTensor
    passed: bool | None  # None: in bf16, which has no bar
    error: str | None


class LayoutsCertificate(TypedDict):
    """The content of layouts.json. left_out: reason → names of cases."""

    passed: bool
    all_cases: bool
    bars: dict[str, float]
    steps: int
    mutation: str | None
    left_out: dict[str, list[str]]
    cases: list[LayoutsCase]
    versions: dict[str, str]


_MEASURES = ("loss", "gradient norm", "worst gradient", "worst weight")
_TITLES = ("case", "ranks", "tied", *_MEASURES, "bf16 loss", "")


def layouts_table(certificate: LayoutsCertificate) -> tuple[tuple[str, ...], list[list[str]]]:
    """Return titles and rows of layouts.json: relative differences from one process, bf16's in a column."""
    cases = certificate["cases"]
    in_fp32 = {case["name"]: case for case in cases if case["precision"] == "fp32"}
    in_bf16 = {case["name"].removesuffix("-bf16"): case for case in cases if case["precision"] == "bf16"}
    rows = []
    for name in dict.fromkeys((*in_fp32, *in_bf16)):  # the chosen cases may lack fp32
        fp32, bf16 = in_fp32.get(name), in_bf16.get(name)
        case = fp32 or in_bf16[name]
        cells = [name, str(case["ranks"]), "yes" if case["tied"] else "no"]
        cells += [_number(value) for *_, value in _measured(fp32)] if fp32 else [""] * len(_MEASURES)
        cells.append(_number(bf16["max_relative_loss_difference"]) if bf16 else "")
        cells.append(_in_a_word(case))
        rows.append(cells)
    return _TITLES, rows


def _in_a_word(case: LayoutsCase) -> str:
    if case["precision"] == "fp32":
        return "ok" if case["passed"] else "MISSED"
    return "MISSED" if case["error"] else "no bar"


def layouts_verdict(certificate: LayoutsCertificate) -> str:
    bars, cases = certificate["bars"], certificate["cases"]
    asked = (
        f"bars in fp32: loss {bars['loss']:.0e} and gradient norm {bars['norm']:.0e} at each of "
        f"{certificate['steps']} steps, "
        f"each tensor's gradient {bars['gradient']:.0e} and final weights {bars['weight']:.0e}"
    )
    lines = [f"MISSED by {entry['name']}: {miss}" for entry in cases for miss in misses(entry, bars)]
    if lines:
        return "\n".join([*lines, f"Layouts change the model ({asked})."])
    with_bars = sum(entry["passed"] is not None for entry in cases)
    whole = f"All {with_bars} cases" if certificate["all_cases"] else f"The {with_bars} chosen cases"
    said = f"{whole} in fp32 train the same model as one process ({asked})."
    return "\n".join(filter(None, [said, left_out_line(certificate["left_out"])]))


def left_out_line(left_out: dict[str, list[str]]) -> str:
    return "; ".join(f"{len(names)} cases left out: {reason}" for reason, names in left_out.items())


def misses(entry: LayoutsCase, bars: dict[str, float]) -> list[str]:
    """Return the bars that a case misses, and where. Empty if it passed or has no bar."""
    if entry["error"]:
        return [entry["error"]]
    if entry["passed"] is not False:
        return []
    return [
        f"{where} is off by {_number(value)} (bar {bars[what]:.0e})"
        for what, where, value in _measured(entry)
        if value is None or value > bars[what]
    ]


def _measured(entry: LayoutsCase) -> tuple[tuple[str, str, float | None], ...]:
    """Return (its bar, what was measured, value) of a case's differences."""
    gradient, weight = entry["worst_gradient"], entry["worst_weight"]
    return (
        ("loss", "the loss", entry["max_relative_loss_difference"]),
        ("norm", "the gradient norm", entry["max_relative_norm_difference"]),
        ("gradient", f"the gradient of {gradient['name']}", gradient["relative_l2"]),
        ("weight", f"the weight {weight['name']}", weight["relative_l2"]),
    )


def _number(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.1e}"


CANNOT = "cannot serve it"


class ServedBy(TypedDict):
    """A program of serving.json. largest_difference: of a log-probability, in nats; None: not a number."""

    program: str
    version: str | None
    verdict: str  # ok, FAILED, cannot serve it, not installed, no file
    reason: str | None
    limit: float | None
    largest_difference: float | None
    same_tokens: int | None  # tokens of greedy text that are Kielo's, of texts without a difference


class ServingCertificate(TypedDict):
    """The content of serving.json. texts: source and id of each held-out text."""

    passed: bool
    checkpoint: str
    export: str
    dtype: str
    gguf: str | None
    texts: list[str]
    tokens: int
    new_tokens: int
    programs: list[ServedBy]
    versions: dict[str, str]


def serving_table(certificate: ServingCertificate) -> tuple[tuple[str, ...], list[list[str]]]:
    rows = []
    for row in certificate["programs"]:
        measured = ["", "", ""]
        if row["limit"] is not None:
            measured = [_number(row["largest_difference"]), f"{row['limit']:.1e}", str(row["same_tokens"])]
        rows.append([row["program"], row["version"] or "", *measured, row["verdict"]])
    return ("program", "version", "log-probability", "limit", "greedy tokens", ""), rows


def serving_verdict(certificate: ServingCertificate) -> str:
    """Return a line for each program that does not serve the export, and the result."""
    rows = certificate["programs"]
    fixable = ("not installed", "no file")
    lines = [
        f"{row['program']}: {row['verdict']}{'.' if row['verdict'] in fixable else ':'} {row['reason']}"
        for row in rows
        if row["reason"]
    ]
    agreed = [row["program"] for row in rows if row["verdict"] == "ok"]
    compared = (
        f"{len(certificate['texts'])} held-out texts of {certificate['tokens']:,} tokens, and up to "
        f"{certificate['new_tokens']} likeliest tokens after each"
    )
    if not certificate["passed"]:
        different = [row["program"] for row in rows if row["verdict"] == "FAILED"]
        return "\n".join([*lines, f"{', '.join(different)}: NOT the model of {certificate['checkpoint']}."])
    return "\n".join([*lines, f"{', '.join(agreed)}: the model of {certificate['checkpoint']} ({compared})."])


class PhasePeak(TypedDict):
    bytes: int
    kinds: dict[str, int]


class CollectiveCount(TypedDict):
    axis: str
    operation: str
    count: int
    bytes: int


class RehearsedScoring(TypedDict):
    """A forward pass of evaluation on one rank: `rows` sequences, over all ranks."""

    precision: str
    rows: int
    held_bytes: int
    peak_bytes: int
    needed_bytes: int


class Rehearsal(TypedDict, total=False):
    """One rank of `kielo rehearse --json`. Without a site it has no figures of the host's memory."""

    name: str
    torch: str
    rank: int
    world_size: int
    axes: dict[str, int]
    coordinates: dict[str, int]
    stages: dict[str, list[int]]
    zero: int
    recompute: str
    sequence_length: int
    micro_batch_sequences: int
    micro_batches_per_step: int
    rehearsed_micro_batches: int
    state_bytes: dict[str, int]
    computed_state_bytes: dict[str, int]
    peaks: dict[str, PhasePeak]
    peak_phase: str
    peak_bytes: int
    needed_bytes: int
    accelerator: str
    usable_bytes: float | None
    fits: bool | None
    flops: dict[str, int]
    collectives: list[CollectiveCount]
    host_bytes_per_node: float
    usable_host_bytes_per_node: float
    seconds: float
    evaluation_bytes: dict[str, int]  # with --evaluation: work → bytes that it needs


_PHASES = ("forward", "backward", "update")
NOTES = (
    "About these figures: torch's fake process group and fake tensors, with the CPU's kernels. Attention "
    "stores as much as a GPU's flash attention (it repeats keys and values of grouped heads). A formula adds "
    "the allocator's fragments and the kernels' working memory. The card's usable memory leaves room for the "
    "buffers of the communication library. Layers are not compiled. A run that compiles them needs less, "
    "because fused operators store no intermediate results."
)


def headline(rehearsal: Rehearsal) -> str:
    place = ", ".join(f"{axis} {number}" for axis, number in rehearsal["coordinates"].items()) or "alone"
    layout = " × ".join(f"{axis} {size}" for axis, size in rehearsal["axes"].items()) or "one rank"
    stages = "; ".join(
        f"stage {stage}: " + (f"layers {layers[0]} to {layers[1]}" if layers else "no layers")
        for stage, layers in rehearsal["stages"].items()
    )
    wanted, run = rehearsal["micro_batches_per_step"], rehearsal["rehearsed_micro_batches"]
    shortened = "" if wanted == run else f", {run} of them run"
    number = "1 micro-batch" if wanted == 1 else f"{wanted} micro-batches"
    return (
        f"{rehearsal['name']}: rank {rehearsal['rank']} of {rehearsal['world_size']:,} ({place}) of "
        f"{layout}; {stages}\n{number} of {rehearsal['micro_batch_sequences']} × "
        f"{rehearsal['sequence_length']} tokens a step{shortened}; recompute {rehearsal['recompute']}, zero "
        f"{rehearsal['zero']}; torch {rehearsal['torch']}, {rehearsal['seconds']:.0f} s"
    )


def memory(rehearsal: Rehearsal) -> tuple[Sequence[str], list[tuple]]:
    peaks = rehearsal["peaks"]
    kinds = sorted(
        {kind for peak in peaks.values() for kind in peak["kinds"]}, key=lambda kind: -_largest(peaks, kind)
    )
    shown = [kind for kind in kinds if _largest(peaks, kind) >= 1e6] or kinds
    phases = [phase for phase in _PHASES if phase in peaks]
    rows = [(kind, *(_gigabytes(peaks[phase]["kinds"].get(kind, 0)) for phase in phases)) for kind in shown]
    total = ("peak", *(_gigabytes(peaks[phase]["bytes"]) for phase in phases))
    return ("GB at the peak of", *phases), [*rows, total]


def summary(rehearsal: Rehearsal) -> str:
    held, computed = (
        ", ".join(f"{what} {size:,}" for what, size in sizes.items())
        for sizes in (rehearsal["state_bytes"], rehearsal["computed_state_bytes"])
    )
    said = "the same" if held == computed else computed
    flops = ", ".join(f"{count:.4g} of {what}" for what, count in rehearsal["flops"].items())
    return (
        f"bytes between steps: {held}; computed from the tensor-parallel plan: {said}\n"
        f"FLOPs of a step: {sum(rehearsal['flops'].values()):.5g} ({flops})"
    )


def evaluation(rehearsal: Rehearsal) -> tuple[Sequence[str], list[tuple]]:
    trained = rehearsal["needed_bytes"]
    rows = [
        (what, _gigabytes(size), f"{100 * size / trained:.0f} %")
        for what, size in rehearsal["evaluation_bytes"].items()
    ]
    return ("evaluation and parity", "GB needed", "of the training's"), rows


def collectives(rehearsal: Rehearsal) -> tuple[Sequence[str], list[tuple]]:
    rows = [
        (row["axis"], row["operation"], f"{row['count']:,}", _gigabytes(row["bytes"]))
        for row in rehearsal["collectives"]
    ]
    return ("axis", "collective", "times a step", "GB of whole buffers"), rows


def rehearsal_verdict(rehearsals: Sequence[Rehearsal]) -> str:
    """Return a sentence about the rank that needs most, by the definition of `resolve/memory.py`."""
    worst = max(rehearsals, key=lambda rehearsal: rehearsal["needed_bytes"])
    needed, usable = worst["needed_bytes"], worst["usable_bytes"]
    said = (
        f"most memory: {_gigabytes(worst['peak_bytes'])} GB of tensors on rank {worst['rank']} "
        f"(stage {', '.join(worst['stages'])}), in the {worst['peak_phase']} phase; "
        f"{_gigabytes(needed)} GB with the allocator's share and workspaces"
    )
    if usable is None:
        return f"{said}; the card of {worst['accelerator']} does not give its memory"
    return f"{said}, of {_gigabytes(usable)} usable on {worst['accelerator']}: {_room(needed, usable)}"


def host_verdict(rehearsals: Sequence[Rehearsal]) -> str:
    """Return a sentence about a node's own memory, by the rank that needs most of it."""
    worst = max(rehearsals, key=lambda rehearsal: rehearsal["host_bytes_per_node"])
    size, usable = worst["host_bytes_per_node"], worst["usable_host_bytes_per_node"]
    return (
        f"host memory: {_gigabytes(size)} GB a node, if all its ranks are as rank {worst['rank']}, for the "
        f"copies that a save makes (on CPUs for all of the above too); a node has {_gigabytes(usable)} GB: "
        f"{_room(size, usable)}"
    )


def _room(needed: float, usable: float) -> str:
    fits, left = needed <= usable, _gigabytes(abs(usable - needed))
    return f"it fits, {left} GB are left" if fits else f"it does not fit, {left} GB too much"


def _largest(peaks: dict[str, PhasePeak], kind: str) -> int:
    return max(peak["kinds"].get(kind, 0) for peak in peaks.values())


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.3f}"


CHECK_TITLES = ("check", "found", "seconds", "")
_MOST_COMPLAINTS, _MOST_NODES = 20, 8


def check_rows(found: Preflight) -> list[list[str]]:
    rows = []
    for check in found.checks:
        of_check = [complaint for complaint in found.complaints if complaint.check == check.name]
        refusals = sum(complaint.is_refusal for complaint in of_check)
        said = "REFUSED" if refusals else "warning" if of_check else "ok" if check.found else ""
        rows.append([check.name, check.summary, f"{check.seconds:.1f}", said])
    return rows


def verdict_lines(found: Preflight) -> list[str]:
    """Return the complaints, at most twenty, and the names of the nodes that passed and that did not."""
    lines = [_line(complaint) for complaint in found.complaints[:_MOST_COMPLAINTS]]
    if len(found.complaints) > _MOST_COMPLAINTS:
        lines.append(f"and {len(found.complaints) - _MOST_COMPLAINTS} more in {found.FILE_NAME}")
    good = [node.name for node in found.nodes if node.passed]
    if good:
        lines.append(f"{_nodes(len(good))} passed: {some(good, _MOST_NODES)}")
    if found.bad_nodes:
        lines.append(f"{_nodes(len(found.bad_nodes))} REFUSED: {some(found.bad_nodes, _MOST_NODES)}")
    if len(found.bad_nodes) == len(found.nodes) > 1:
        lines.append("no node passed. Fix: look for a shared cause before you leave nodes out")
    of_job = [complaint for complaint in found.complaints if complaint.is_refusal and complaint.node is None]
    if of_job:
        lines.append("the job is REFUSED, and no node is to blame")
    if found.passed:
        lines.append(f"all checks passed: {found.ranks} ranks in {found.seconds:.1f} s")
    return lines


def _line(complaint: Complaint) -> str:
    where = "the job" if complaint.rank is None else f"{complaint.node}: rank {complaint.rank}"
    kind = complaint.check if complaint.is_refusal else f"{complaint.check} (warning)"
    return f"{where}: {kind}: {complaint.message}"


def _nodes(count: int) -> str:
    return f"{count} node" + "s" * (count > 1)
