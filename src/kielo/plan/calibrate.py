"""Calibration: metrics.jsonl and resolved.toml of a person's runs → a card of the machine; no torch.

The median of steps of one size is one measurement. Fitted are only the constants of `efficiency.py` that a
run of Kielo can show, each drawn to its usual value for the device. A processor's card has no peaks: its peak
and bandwidths are fitted too. Its ranks share the cores, so runs on different numbers of ranks are refused.
"""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.durable import HASH_COMMENT, write_own_text
from kielo.plan.efficiency import AMD, CONSTANTS, Efficiency, card_text, fitted, members, read_card
from kielo.plan.measured_run import MeasuredRun, read_measured_run
from kielo.plan.step_seconds import step_seconds
from kielo.plan.workload import Workload, workload_row
from kielo.recipe.cards import Accelerator, Cluster, accelerators, clusters
from kielo.recipe.cards import accelerator as accelerator_card
from kielo.recipe.cards import cluster as cluster_card
from kielo.recipe.errors import KieloError
from kielo.resolve.memory_row import TrainOptions

Column = np.ndarray
_NOISE = 0.02  # expected error of a median step; the spreads below are weighed against it
_BEND = 0.08  # of an error's logarithm: larger errors count like their size, not like its square
_NARROWEST = 0.08  # half-width of the interval: the runs' residuals show nothing of other shapes
_NORMAL_TAIL = 1.28  # standard deviations, either way, that hold 80 % of a normal distribution


@dataclass(frozen=True)
class Machine:
    """A machine as its runs measured it."""

    accelerator: Accelerator  # the complete card of one rank; a processor's only peak is for `precision`
    efficiency: Efficiency
    spread: dict[str, float]
    precision: str
    ranks: int  # of the runs, which share a processor's cores
    runs: tuple[str, ...]  # files of the measurements


@dataclass(frozen=True)
class Prior:
    """A figure to fit: its start, and the standard deviation of the logarithm of its distance from it."""

    start: float
    spread: float


# A processor's: found by trial on two cores of an EPYC 7003 (2026-11, torch 2.13, fp32, gloo over loopback),
# with other models than benchmarks/planner/planner_measured.py's. Sending holds the core and hides nothing.
_CPU_TABLE = """
flash 0.25 0.5, elementwise 2.5 0.4, accumulate 1.0 0.4, layer_seconds 2.5e-3 0.35, step_seconds 2.5e-2 0.6,
tensor_exposed 1.0 0.3, pipeline_exposed 0.2 0.5, data_hidden 0.01 0.1, gather_hidden 0.01 0.1,
gather 1.2 0.3, latency_seconds 8e-3 0.5, tensor_launch 2.0 0.3, tile 8.0 0.5, wave_elements 4e3 0.5,
misaligned 1.0 0.05, small_heads 0.1 0.5, jitter 0.01 0.3"""
_CPU = {
    name: Prior(float(start), float(spread))
    for name, start, spread in (entry.split() for entry in _CPU_TABLE.split(","))
} | {
    "flops": Prior(8e10, 2.0),  # peak of a rank, a second: anything from half a core to a socket
    "bytes_a_flop": Prior(0.12, 0.4),  # memory bandwidth by that peak
    # bandwidth between ranks by memory bandwidth: each byte is copied several times
    "link_share": Prior(0.15, 0.5),
}
_TRAIN_OPTIONS = (
    "optimiser_state",
    "gradient_reduce_dtype",
    "optimiser",
    "hidden_dropout",
    "attention_dropout",
)
# A GPU's start is the shipped card; these may move, by the spreads of `CONSTANTS`.
_GPU = """
matrix_engine flash elementwise accumulate layer_seconds tensor_exposed data_hidden gather_hidden gather
pipeline_exposed step_seconds latency_seconds tensor_launch network node"""


def measure(paths: Sequence[Path | str], site: Cluster | None = None) -> Machine:
    """Measure the machine of the runs with these metrics.jsonl. Raises KieloError for short or mixed runs.

    `site` defaults to the first cluster card with these GPUs, or to one node for processors.
    """
    runs = [read_measured_run(Path(path)) for path in paths]
    if not runs:
        raise KieloError("no metrics.jsonl was given. Fix: runs/NAME/train/metrics.jsonl of your own run")
    first, precision = device_of(runs[0]), runs[0].precision
    if mixed := next((run for run in runs if device_of(run) != first), None):
        raise KieloError(
            f"{mixed.path} is of {device_of(mixed)}, {runs[0].path} of {first}. Fix: runs on one kind of "
            "device in one precision, and on a processor with one number of ranks"
        )
    ranks = max(run.resolved.placement.world_size for run in runs)
    card = accelerator_card("cpu") if runs[0].resolved.placement.device == "cpu" else _gpu_card(runs[0])
    priors = priors_of(card)
    start = with_figures(card, precision, {name: prior.start for name, prior in priors.items()})
    work = workload_of(runs, start, site)
    seconds = np.array([np.median(times) for run in runs for times in run.seconds.values()])
    values = _solve(priors, lambda values: _predict(work, card, values), np.log(seconds))
    errors = np.log(seconds) - np.log(_predict(work, card, values))
    # 80 % of a normal distribution with the residuals' width
    half = max(_NORMAL_TAIL * float(np.sqrt(np.mean(errors**2))), _NARROWEST)
    source = f"{card.source}; constants measured by kielo" if card.device == "cuda" else "measured by kielo"
    update = {"source": source, "date": date.today().isoformat()[:7]}
    card, files = with_figures(card, precision, values), tuple(str(run.path) for run in runs)
    card, interval = card.model_copy(update=update), {"lower": -half, "upper": half}
    return Machine(card, efficiency_with(card, values), interval, precision, ranks, files)


def write_machine(machine: Machine, path: Path | str) -> None:
    """Write the card as TOML, over a card that nobody has changed. Raises KieloError for another file."""
    runs = "\n".join(f"  {run}" for run in machine.runs)
    header = (
        "A machine as its own runs measured it, by `kielo plan calibrate`; `kielo plan RECIPE --machine` "
        f"reads it.\nMeasured in {machine.precision} on {machine.ranks} ranks, from\n{runs}\nConstants that "
        "these runs could not show have their usual values. [interval]: expected error of a prediction."
    )
    measured = {"precision": machine.precision, "ranks": machine.ranks, "runs": list(machine.runs)}
    card = machine.accelerator.model_dump(mode="json", exclude_none=True)
    peaks = card.pop("peak_tflops")
    text = card_text(machine.efficiency, machine.spread, header)
    text += _table("measured", measured, "the runs: on a processor the ranks shared its cores")
    of_rank = "of one rank; a processor's bandwidths count fp32 as two bytes, like the planner"
    text += _table("accelerator", card, of_rank)
    dense = "dense; a processor's from the rate of its large products"
    write_own_text(path, text + _table("accelerator.peak_tflops", peaks, dense), HASH_COMMENT)


def read_machine(path: Path | str) -> Machine:
    """Read a card that `write_machine` wrote. Raises KieloError for another file."""
    path = Path(path)
    hint = "Fix: `kielo plan calibrate RUN/train/metrics.jsonl --to my_machine.toml`"
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KieloError(f"{path}: cannot be read ({error.strerror}). {hint}") from None
    except ValueError as error:
        raise KieloError(f"{path}: not valid TOML ({error}). {hint}") from None
    try:
        card, measured = Accelerator.model_validate(content["accelerator"]), content["measured"]
        efficiency, spread = read_card(path)
        interval = {"lower": float(spread["lower"]), "upper": float(spread["upper"])}
        ranks, runs = int(measured["ranks"]), tuple(map(str, measured["runs"]))
        return Machine(card, efficiency, interval, measured["precision"], ranks, runs)
    except (KeyError, TypeError, ValueError) as error:  # pydantic's is a ValueError
        raise KieloError(f"{path}: not the card of a machine ({error!r}). {hint}") from None


def device_of(run: MeasuredRun) -> str:
    placement, precision = run.resolved.placement, run.precision
    if placement.device == "cpu":
        return f"{placement.world_size} ranks on a processor in {precision}"
    return f"{placement.accelerator} in {precision}"


def _gpu_card(run: MeasuredRun) -> Accelerator:
    name, precision = run.resolved.placement.accelerator, run.precision
    card = accelerator_card(name) if name in accelerators() else None
    if card is None or precision not in card.peak_tflops or card.memory_bandwidth_tb_per_second is None:
        raise KieloError(
            f"{run.path}: was trained in {precision} on {name!r}, for which no card has a peak and a memory "
            f"bandwidth. Fix: a card of it in kielo/cards/accelerators, beside {', '.join(accelerators())}"
        )
    return card


def workload_of(runs: Sequence[MeasuredRun], card: Accelerator, site: Cluster | None) -> Workload:
    """Return a row for each size of step of each run, with the peak in the runs' precision."""
    ranks = max(run.resolved.placement.world_size for run in runs)
    site = site or _site_of(card, ranks)
    precision = runs[0].precision
    if precision != "fp8":
        # Bytes count as in bf16, to which a processor's bandwidths are fitted.
        peaks = card.peak_tflops | {"bf16": card.peak_tflops[precision]}
        card, precision = card.model_copy(update={"peak_tflops": peaks}), "bf16"
    rows = []
    for run in runs:
        identity, placement = run.resolved.identity, run.resolved.placement
        train, deterministic = identity.train, placement.train.deterministic
        keys = {key: getattr(train, key) for key in _TRAIN_OPTIONS}
        options = TrainOptions(precision, train.fp8, deterministic=deterministic, **keys)
        of_run = identity.model, placement.layout, card, site
        rows += [workload_row(*of_run, size, options) for size in run.seconds]
    return Workload.of(rows)


def _site_of(card: Accelerator, ranks: int) -> Cluster:
    """Return the card of the largest cluster with such devices, or one node with all ranks."""
    found = [site for site in map(cluster_card, clusters()) if site.accelerator == card.name]
    if found and card.device == "cuda":
        return max(found, key=lambda site: site.nodes)
    network = card.link_gb_per_second * 8 * ranks  # as fast as the links
    update = {"devices_per_node": ranks, "network_gbit_per_second_per_node": network}
    return cluster_card("laptop").model_copy(update=update)


def priors_of(card: Accelerator) -> dict[str, Prior]:
    if card.device == "cpu":
        return _CPU
    start, names = fitted()[0].values, {name: name for name in _GPU.split()}
    if card.architecture in AMD:
        names |= {"matrix_engine": "rocm_engine"}
    return {
        name: Prior(float(start[name][_member(name, card)]), CONSTANTS[general].spread)
        for general, name in names.items()
    }


def _member(name: str, card: Accelerator) -> int:
    """Return the index of the constant's entry for this device, trained by Kielo."""
    own = {"architecture": card.architecture, "engine": "fsdp", "all": "all"}
    return members(name).index(own[CONSTANTS[name].by])


def efficiency_with(card: Accelerator, values: Mapping[str, float]) -> Efficiency:
    """Return the shipped constants with `values` for this device."""
    constants = {name: column.copy() for name, column in fitted()[0].values.items()}
    for name, value in values.items():
        if name in constants:
            constants[name][_member(name, card)] = value
    return Efficiency(constants)


def with_figures(card: Accelerator, precision: str, values: Mapping[str, float]) -> Accelerator:
    """Return a processor's card with the fitted figures, or a GPU's card unchanged."""
    if "flops" not in values:
        return card
    memory = values["flops"] * values["bytes_a_flop"]
    update = {
        "peak_tflops": {precision: values["flops"] / 1e12},
        "memory_bandwidth_tb_per_second": memory / 1e12,
        "link_gb_per_second": memory * values["link_share"] / 1e9,
    }
    return card.model_copy(update=update)


def _predict(work: Workload, card: Accelerator, values: Mapping[str, float]) -> Column:
    if "flops" in values:
        peak = values["flops"] * np.ones(len(work))
        memory = values["flops"] * values["bytes_a_flop"] * np.ones(len(work))
        link = memory * values["link_share"]
        work = replace(work, peak=peak, peak_recipe=peak, memory_bandwidth=memory)
        work = replace(work, node_bandwidth=link, network_bandwidth=link)
    return step_seconds(work, efficiency_with(card, values)).total


def _solve(
    priors: Mapping[str, Prior], predict: Callable[[Mapping[str, float]], Column], target: Column
) -> dict[str, float]:
    origin = np.log([prior.start for prior in priors.values()])
    spreads = np.array([prior.spread for prior in priors.values()])

    def named(parameters: Column) -> dict[str, float]:
        return dict(zip(priors, np.exp(parameters).tolist(), strict=True))

    def errors(parameters: Column) -> Column:
        return np.log(predict(named(parameters))) - target

    return named(fit_drawn_to_priors(errors, 1 / _NOISE, origin, spreads, origin))


def fit_drawn_to_priors(
    errors: Callable[[Column], Column],
    weights: Column | float,
    mean: Column,
    spread: Column,
    start: Column,
    depends: Column | None = None,
) -> Column:
    """Fit parameters [k] by scipy's trust regions (Branch et al. 1999), beginning at `start`.

    Minimise the squares of `errors` [n] × `weights` (pseudo-Huber beyond `_BEND`, Charbonnier et al. 1997, so
    that a wrong row does not pull the fit), and of the distance from `mean` by `spread`: standard deviations
    [k] or a covariance [k, k]. depends: [n, k], True for parameters that an error depends on. Parameters that
    share no error are moved at once. Raises KieloError without scipy.
    """
    try:
        from scipy.optimize import least_squares
    except ImportError:
        raise KieloError("a fit needs scipy. Fix: pip install 'kielo[calibrate]'") from None
    whiten = np.diag(1 / spread) if spread.ndim == 1 else np.linalg.inv(np.linalg.cholesky(spread))

    def residuals(parameters: Column) -> Column:
        found = errors(parameters)
        robust = np.sign(found) * _BEND * np.sqrt(2 * (np.sqrt(1 + (found / _BEND) ** 2) - 1))
        return np.concatenate([robust * weights, whiten @ (parameters - mean)])

    sparsity = None if depends is None else np.concatenate([depends, whiten != 0])
    return least_squares(residuals, start, x_scale="jac", jac_sparsity=sparsity).x


def _table(name: str, content: Mapping[str, Any], meaning: str) -> str:
    """Return a TOML table; JSON's strings, numbers and lists of them are valid TOML."""
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in content.items()]
    return "\n".join(["", f"# {meaning}", f"[{name}]", *lines]) + "\n"
