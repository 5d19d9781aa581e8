"""What a machine is taken for before its runs tell more, how far a run may move that, and its interval."""

import json
import math
import sys
from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from planned_beside_measured import compare

from kielo.plan.calibrate import (
    fit_drawn_to_priors,
    measure,
    priors_of,
    with_figures,
    write_machine,
)
from kielo.plan.efficiency import CONSTANTS, fitted, members
from kielo.recipe.cards import accelerator
from kielo.recipe.errors import KieloError
from tests.plan.test_calibrate import machine_of
from tests.plan.test_measured_run import ALL, log, resolved

# Two of three processors are between these figures, one standard deviation of the logarithm from the middle.
PROCESSORS = {
    "flash": (0.152, 0.412), "elementwise": (1.68, 3.73), "accumulate": (0.67, 1.49),
    "layer_seconds": (1.76e-3, 3.55e-3), "step_seconds": (0.0137, 0.0456), "tensor_exposed": (0.741, 1.35),
    "pipeline_exposed": (0.121, 0.33), "data_hidden": (9.05e-3, 0.0111), "gather_hidden": (9.05e-3, 0.0111),
    "gather": (0.889, 1.62), "latency_seconds": (4.85e-3, 0.0132), "tensor_launch": (1.48, 2.7),
    "tile": (4.85, 13.2), "wave_elements": (2430, 6590), "misaligned": (0.951, 1.05),
    "small_heads": (0.0607, 0.165), "jitter": (7.41e-3, 0.0135),
    # of a rank, from half a core to a socket
    "flops": (1.08e10, 5.91e11), "bytes_a_flop": (0.0804, 0.179), "link_share": (0.091, 0.247),
}  # fmt: skip


def test_a_processor_is_taken_for_two_cores_of_a_server():
    priors = priors_of(accelerator("cpu"))
    assert {
        name: (one.start / math.exp(one.spread), one.start * math.exp(one.spread))
        for name, one in priors.items()
    } == {name: pytest.approx(limits, rel=6e-3) for name, limits in PROCESSORS.items()}


def test_a_gpu_is_taken_for_the_shipped_card():
    """Of Hopper, of Kielo's engine, or of all; constants that a run of Kielo cannot show are not fitted."""
    priors, values = priors_of(accelerator("h100_80")), fitted()[0].values
    of = {"architecture": "hopper", "engine": "fsdp", "all": "all"}
    for name, prior in priors.items():
        member = members(name).index(of[CONSTANTS[name].by])
        assert (prior.start, prior.spread) == (values[name][member], CONSTANTS[name].spread), name
    assert len(priors) == 15 and not {"matrix", "memory", "mxfp8", "unfused_attention"} & set(priors)


def test_a_processors_figures_are_those_of_its_card():
    """100 GFLOP/s, 0.3 bytes each, of which a tenth goes between ranks; a GPU's card stays."""
    values = {"flops": 1e11, "bytes_a_flop": 0.3, "link_share": 0.1}
    card = with_figures(accelerator("cpu"), "fp32", values)
    assert card.peak_tflops == {"fp32": 0.1}
    assert card.memory_bandwidth_tb_per_second == pytest.approx(0.03)
    assert card.link_gb_per_second == pytest.approx(3.0)
    gpu = accelerator("h100_80")
    assert with_figures(gpu, "bf16", {"flash": 0.5}) == gpu


@pytest.mark.full
def test_the_interval_is_as_wide_as_the_errors(tmp_path):
    """1.28 standard deviations hold 80 % of a normal distribution; at least 8 %."""
    path = log(tmp_path, resolved(), ALL)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["tokens_per_second"] /= 40 if row["step"] > 10 else 1  # no machine has both
        row["tflops_per_second"] = None
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = measure([path])
    errors = [math.log(one.measured_seconds / one.planned_seconds) for one in compare(found, path)]
    half = 1.28 * math.sqrt(sum(error**2 for error in errors) / 2)
    assert half > 0.08 and found.spread == pytest.approx({"lower": -half, "upper": half})
    assert found.precision == "fp32" and found.ranks == 2 and found.runs == (str(path),)
    assert found.accelerator.source == "measured by kielo"
    assert found.accelerator.date == date.today().isoformat()[:7]
    (tmp_path / "card.toml").unlink(missing_ok=True)
    write_machine(replace(found, runs=("a", "b")), tmp_path / "card.toml")
    text = (tmp_path / "card.toml").read_text()
    header = [
        "# A machine as its own runs measured it, by `kielo plan calibrate`; `kielo plan RECIPE --machine` "
        "reads it.",
        "# Measured in fp32 on 2 ranks, from", "#   a", "#   b",
        "# Constants that these runs could not show have their usual values. [interval]: expected error "
        "of a prediction.",
    ]  # fmt: skip
    lines = text.splitlines()
    at = lines.index(header[0])
    assert lines[at : at + 5] == header
    end = lines[lines.index("[measured]") :]
    assert end[:4] == ["[measured]", 'precision = "fp32"', "ranks = 2", 'runs = ["a", "b"]']
    assert "# the runs: on a processor the ranks shared its cores" in text
    assert "# dense; a processor's from the rate of its large products" in text


def test_a_step_has_the_median_of_its_rows(tmp_path):
    """Of 3 to 10, and 13 to 22 tenths of a second."""
    found = compare(replace(machine_of({}), ranks=2), log(tmp_path, resolved(), ALL))
    assert [one.measured_seconds for one in found] == pytest.approx([0.65, 1.75])
    assert [(one.sequence_length, one.micro_batch, one.micro_batches) for one in found] == [
        (128, 1, 1), (256, 2, 3),
    ]  # fmt: skip
    assert all(one.planned_seconds == pytest.approx(sum(one.parts.values())) for one in found)


def test_a_fit_is_where_losses_and_priors_balance():
    """One figure x of x - 1, drawn to 0: without a bend the mean by inverse variances; beyond 0.08 errors
    count like their size, so the pull of one is 0.08 × 100 at most.
    """
    start = np.zeros(1)

    def found(weight: float, spread: float, far: float) -> float:
        fit = fit_drawn_to_priors(lambda x: x - far, weight, np.zeros(1), np.array([spread]), start)
        return float(fit[0])

    assert found(10.0, 0.1, 0.001) == pytest.approx(0.0005, rel=1e-3)
    assert found(20.0, 0.1, 0.001) == pytest.approx(0.0008, rel=1e-3)
    # pseudo-Huber: x / s² = w² e / √(1 + (e / 0.08)²), with e = far - x
    x = found(10.0, 0.1, 1.0)
    error = 1.0 - x
    assert x / 0.1**2 == pytest.approx(100 * error / math.sqrt(1 + (error / 0.08) ** 2), rel=1e-3)
    assert x == pytest.approx(0.08, rel=0.01)
    whole = fit_drawn_to_priors(
        lambda x: x - np.array([0.001, 0.003]), 10.0, np.array([0.0, 0.001]),
        np.array([[0.01, 0.0], [0.0, 0.04]]), np.zeros(2),
    )  # fmt: skip
    assert whole == pytest.approx([0.0005, 0.001 + 0.002 * 0.8], rel=1e-3)


def test_without_scipy_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(KieloError, match=r"needs scipy\. Fix: pip install 'kielo\[calibrate\]'"):
        fit_drawn_to_priors(lambda x: x, 1.0, np.zeros(1), np.ones(1), np.zeros(1))
