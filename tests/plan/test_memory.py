"""Bytes of a device by formula, against published logs and hand counts."""

import numpy as np
import pytest
from published_memory import formula_memory_bytes, kept_activation_bytes, layer_activation_bytes

from kielo.plan.workload import ATTENTION_KERNELS
from kielo.recipe.cards import accelerator
from kielo.resolve.memory import usable_bytes
from tests.plan.workloads import workload

GIB = 2**30
GPT_22B = {
    "layers": 48,
    "hidden": 6144,
    "heads": 64,
    "kv_heads": 64,
    "head_dim": 96,
    "ffn": 24576,
    "vocabulary": 51200,
}
UNFUSED = ATTENTION_KERNELS.index("fused_softmax")


@pytest.mark.parametrize(("data", "gib"), [(2, 32.05), (4, 24.04), (8, 20.03), (16, 18.03), (32, 17.03)])
def test_static_bytes_are_those_that_lumi_logged(data, gib):
    """175B at TP8 PP8: DeepSpeed's memory after its optimiser was made,
    within 1 % at every data-parallel degree.
    """
    shape = {"layers": 70, "hidden": 14336, "heads": 112, "kv_heads": 112, "ffn": 57344, "vocabulary": 51200}
    held = formula_memory_bytes(
        workload(shape | {"tensor": 8, "pipeline": 8, "data": data, "shard": data})
    ).static[0]
    assert held / GIB == pytest.approx(gib, rel=0.01)


def test_static_bytes_are_those_that_nemo_logged():
    """Llama 3 8B with gradients of two bytes over 8 ranks of ZeRO-1: 44.27e9 bytes."""
    shape = {
        "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "mlp_matrices": 3,
        "vocabulary": 128256,
        "gradient_bytes": 2, "data": 4, "context": 2, "shard": 8,
    }  # fmt: skip
    assert formula_memory_bytes(workload(shape)).static[0] == pytest.approx(44.27e9, rel=0.01)


def test_a_layers_activations_are_korthikantis():
    """s b h (34 + 5 a s / h) for a GPT with dropout; over t tensor ranks s b h (10 + 24/t + 5 a s / h t);
    with sequence parallelism all of it over t; selective recomputation leaves out the scores.
    """
    s, h, a, t, b = 2048, 6144, 64, 8, 4
    base = GPT_22B | {"dropout": 1, "kernel": UNFUSED, "micro_batch": b}
    alone, split, sequence = (
        layer_activation_bytes(workload(base | change))[0]
        for change in ({}, {"tensor": t}, {"tensor": t, "sequence_parallel": 1})
    )
    assert alone == pytest.approx(s * b * h * (34 + 5 * a * s / h))
    assert split == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / h / t))
    assert sequence == pytest.approx(s * b * h * (34 + 5 * a * s / h) / t)
    selective = kept_activation_bytes(
        workload(base | {"tensor": t, "sequence_parallel": 1, "attention_again": 1})
    )[0]
    assert selective == pytest.approx(s * b * h * 34 / t)


def test_activations_of_the_papers_figure():
    """Korthikanti et al. 2022, figure 1, 22B on 8 devices:
    59.25 GiB without recomputation, 9.56 with both methods.
    """
    base = GPT_22B | {"dropout": 1, "kernel": UNFUSED, "micro_batch": 4, "micro_batches": 1, "tensor": 8}
    plain, both = workload(base), workload(base | {"sequence_parallel": 1, "attention_again": 1})
    assert formula_memory_bytes(plain).activations[0] / GIB == pytest.approx(59.25, rel=0.01)
    assert formula_memory_bytes(both).activations[0] / GIB == pytest.approx(9.5625, rel=0.01)


def test_a_pipelines_first_rank_keeps_what_is_in_flight():
    """1F1B keeps p passes on its first rank; interleaving over v chunks (v + 1) p - 1 chunk passes; no more
    than there are.
    """
    shape = {"layers": 16, "pipeline": 4, "micro_batches": 32, "vocabulary": 128}
    kept = kept_activation_bytes(workload(shape))[0]
    plain, interleaved, few = (
        formula_memory_bytes(workload(shape | change)).activations[0] / kept
        for change in ({}, {"chunks": 2}, {"micro_batches": 2})
    )
    assert (plain, interleaved, few) == (4 * 4, (3 * 4 - 1) * 4 / 2, 2 * 4)


def test_zero_degrees_split_one_more_kind_each():
    """Rajbhandari et al. 2020: optimiser, then gradients, then weights; and only 3 gathers."""
    rows = formula_memory_bytes(workload(*({"zero": zero, "data": 8, "shard": 8} for zero in (0, 1, 2, 3))))
    p = rows.weights[0] / 2
    assert np.allclose(rows.static / p, [2 + 4 + 12, 2 + 4 + 1.5, 2 + 0.5 + 1.5, 0.25 + 0.5 + 1.5])
    assert list(rows.gathered > 0) == [False, False, False, True]


def test_kinds_of_memory_figures_are_ordered():
    """Torch allocated less than it reserved, and that is below what nvidia-smi shows;
    a driver gives 39.6 GiB of "40 GB", and its context takes some of those.
    """
    held = formula_memory_bytes(workload())
    assert held.static[0] < held.peak("allocated")[0] < held.peak("reserved")[0] < held.peak("device")[0]
    assert usable_bytes(accelerator("a100_40")) / GIB == pytest.approx(39.6 - 2.5e9 / GIB)
    assert usable_bytes(accelerator("h100_80")) == pytest.approx(82.4e9, abs=1e8)
    assert usable_bytes(accelerator("mi250x_gcd")) == pytest.approx(66.2e9, abs=1e8)
