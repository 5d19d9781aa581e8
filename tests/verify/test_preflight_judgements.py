"""What `kielo preflight` refuses of versions, clocks, cores, networks, devices and trainings, by hand."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kielo.verify.preflight import device, hosts, training
from kielo.verify.preflight.job import Sizes
from tests.verify.made_job import card, job, layout, told

CPU = torch.device("cpu")


def test_what_most_ranks_have_is_right() -> None:
    found = [{"torch": "2.1", "b": "x"}, {"torch": "2.2", "b": "x"}, {"torch": "2.1"}]
    assert told(hosts.judge_software(found, job())) == [
        (2, "b is not set, and x on 2 of 3 ranks", True), (1, "torch is 2.2, and 2.1 on 2 of 3 ranks", True),
    ]  # fmt: skip
    assert hosts.judge_software([found[0]] * 2, job()) == []
    found[0] |= {"device": "D", "NCCL": "2.2"}
    assert (
        hosts.summarise_software(found, job())
        == "torch 2.1, NCCL 2.2, device D, and 1 more versions and settings"
    )


def test_settings_that_change_what_a_rank_does_are_compared(monkeypatch) -> None:
    for name in [name for name in os.environ if name.startswith(hosts.PREFIXES)]:
        monkeypatch.delenv(name)
    for name in ("NCCL_PROTO", "NCCL_DEBUG_FILE", "RCCL_DEBUG", "OMP_X", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "1")
    found = hosts.measure_software(job(kind="cpu"))
    versions = {"python", "kielo", "kielo's code", "torch", "numpy", "safetensors", "pydantic"}
    assert found.keys() - {"driver"} == versions | {"NCCL_PROTO", "OMP_X"}
    assert found["torch"].partition("+")[0] == torch.__version__.partition("+")[0]


def test_clocks_are_compared_with_the_median() -> None:
    """In the round in which a rank is least off; a second is a warning, a minute a refusal."""
    reads = [[100.0, 201.0, 300.0], [100.0, 200.0, 300.0], [99.0, 198.9, 298.9], [160.0, 260.0, 360.0],
             [100.5, 200.0, 300.5]]  # fmt: skip
    assert hosts.offsets(reads) == pytest.approx([0, 0, -1, 60, 0])
    assert told(hosts.judge_clock(reads, job("abcde"))) == [
        (2, "its clock is 1.0 s slow, against the median of all ranks; less than 1 s is expected", False),
        (3, "its clock is 60.0 s fast, against the median of all ranks; less than 1 s is expected", True),
    ]
    nearly = [[0.0], [0.99], [-0.99], [0.0], [59.9]]
    assert told(hosts.judge_clock(nearly, job("abcde")))[0][::2] == (4, False)
    assert len(hosts.judge_clock(nearly, job("abcde"))) == 1
    assert hosts.summarise_clock(reads[:3], job()) == "at most 1.000 s from the median"
    alone = job("a", "cpu")
    assert len(hosts.measure_clock(alone)) == 3


def bound(*cores: set[int]) -> list[dict[str, Any]]:
    return [{"local_rank": rank % 2, "cores": sorted(given)} for rank, given in enumerate(cores)]


def test_cores_beside_the_card_s_binding() -> None:
    jobs = SimpleNamespace(cpu_bind="mask_cpu:0x0f,0xf0")
    on = job(cluster=SimpleNamespace(jobs=jobs, name="site"))
    assert hosts.judge_binding(bound({0, 1, 2, 3}, {4}, {1}, {5, 6}), on) == []
    assert told(hosts.judge_binding(bound({3, 4}, {4}, {1}, {5, 6}), on)) == [
        (0, "may use the cores 3-4; the card site gives local rank 0 0-3: start it with --cpu-bind="
            "mask_cpu:0x0f,0xf0", True),
    ]  # fmt: skip
    third = [{"local_rank": 2, "cores": [9]}]  # the card has no core for it
    assert hosts.judge_binding(third, job("a", cluster=on.cluster)) == []
    on_cpus = job(kind="cpu", cluster=on.cluster)
    assert hosts.judge_binding(bound({9}, {10}, {9}, {10}), on_cpus) == []
    without = job(cluster=SimpleNamespace(jobs=None, name="site"))
    assert hosts.judge_binding(bound({9}, {10}, {9}, {10}), without) == []
    shared = bound({9}, {10}, {7, 8}, {7, 8})
    assert hosts.judge_binding(shared, without) == []
    shared = bound({9}, {10}, {7}, {7})
    said = "the 2 ranks of its node share 1 cores (7)"
    assert told(hosts.judge_binding(shared, without)) == [(2, said, True)]
    assert told(hosts.judge_binding(shared, job(kind="cpu", cluster=without.cluster))) == [(2, said, False)]
    assert hosts.summarise_binding(bound({1}, {1, 2, 3}, {4, 5}), on) == "1 to 3 cores a rank"
    assert hosts.summarise_binding(bound({1, 2}, {3, 4}), on) == "2 cores a rank"


def test_the_network_of_the_card(tmp_path, monkeypatch) -> None:
    jobs = SimpleNamespace(network_log="Libfabric|cxi")
    log = tmp_path / "log"
    on = job(cluster=SimpleNamespace(jobs=jobs, name="site"), nccl_log=log)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "hsn0")
    assert hosts.measure_network(on) == {"networks": [], "is_expected": False, "gloo": "hsn0"}
    log.write_text("NCCL INFO Using network Socket\n", encoding="utf-8")
    slow = hosts.measure_network(on)
    assert slow == {"networks": ["Socket"], "is_expected": False, "gloo": "hsn0"}
    log.write_text("NCCL INFO Using network AWS Libfabric\n", encoding="utf-8")
    sound = hosts.measure_network(on)
    assert sound == {"networks": ["AWS Libfabric"], "is_expected": True, "gloo": "hsn0"}
    assert hosts.measure_network(job(nccl_log=None)) is None
    free = job(nccl_log=log, cluster=SimpleNamespace(jobs=None))
    assert hosts.measure_network(free)["is_expected"] is True
    silent = {"networks": [], "is_expected": False, "gloo": ""}
    rest = "the card site expects a log with 'Libfabric|cxi': is the plugin in the container, and NCCL_NET as"
    found = [sound, slow, silent, None]
    assert told(hosts.judge_network(found, on)) == [
        (1, f"NCCL uses Socket; {rest} the site says?", True),
        (2, f"NCCL uses a network that its log does not name; {rest} the site says?", True),
    ]
    assert hosts.judge_network(found, job("aaaa", cluster=on.cluster)) == []
    assert hosts.summarise_network([sound, slow, sound], on) == "AWS Libfabric, Socket; gloo over hsn0"
    assert hosts.summarise_network([silent], on) == "NCCL names none; gloo over an unknown interface"
    assert hosts.summarise_network([None], on) == "gloo, over sockets"


def test_nccl_is_asked_for_a_log(monkeypatch, tmp_path) -> None:
    """Where the environment names one, that is read."""
    monkeypatch.setattr(hosts.tempfile, "tempdir", str(tmp_path))
    for name in ("NCCL_DEBUG_FILE", "NCCL_DEBUG", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with hosts.nccl_log("cpu") as path:
        assert path is None and "NCCL_DEBUG_FILE" not in os.environ
    with hosts.nccl_log("cuda") as path:
        path.touch()
        assert path == tmp_path / f"kielo_nccl_{os.getpid()}.log"
        assert os.environ["NCCL_DEBUG_FILE"] == str(path) and os.environ["NCCL_DEBUG"] == "INFO"
        assert os.environ["NCCL_DEBUG_SUBSYS"] == "INIT,NET"
    assert not path.exists()
    monkeypatch.setenv("NCCL_DEBUG_FILE", f"{tmp_path}/%h.%p.txt")
    own = tmp_path / f"{os.uname().nodename}.{os.getpid()}.txt"
    own.touch()
    with hosts.nccl_log("cuda") as path:
        assert path == own
    assert own.exists()


def measured(**changes: Any) -> dict[str, Any]:
    return {
        "name": "G", "product_tflops": 100.0, "copy_gb_per_second": 2000.0,
        "product_roundings": 0.5, "later_product_roundings": 4.0, "used_share": 0.1,
    } | changes  # fmt: skip


def test_devices_beside_their_fellows_and_their_card() -> None:
    """GPUs from 93 % of the median on, processors from 20 %; of the card's peak at least 30 %."""
    right = [measured()] * 3
    assert device.judge([*right, measured(product_tflops=93.0, copy_gb_per_second=1860.0)], job()) == []
    assert told(device.judge([measured(product_tflops=92.9), *right], job())) == [
        (0, "matrix products: 92.9 TFLOP/s, 93% of the median of all ranks, 100; 93% is expected", True)
    ]
    assert told(device.judge([*right, measured(copy_gb_per_second=1859.0)], job())) == [
        (3, "copies in its memory: 1.86e+03 GB/s, 93% of the median of all ranks, 2e+03; 93% is expected",
         True),
    ]  # fmt: skip
    on_cpus = job(kind="cpu", device_card=card(peak_tflops={"bf16": 1000.0}))
    assert device.judge([*right, measured(product_tflops=20.0)], on_cpus) == []
    assert len(device.judge([*right, measured(product_tflops=19.9)], on_cpus)) == 1
    capped = told(device.judge(right, job("aab", device_card=card(peak_tflops={"bf16": 334.0}))))
    said = (
        "matrix products: 100 TFLOP/s in bf16, of the card's 334; at least 30% is expected: see its clock, "
        "power and heat"
    )
    assert capped == [(rank, said, True) for rank in range(3)]
    assert device.judge(right, job("aab", device_card=card(peak_tflops={"bf16": 333.0}))) == []
    assert device.judge(right, job("aab", device_card=card(peak_tflops={"fp8": 3333.0}))) == []


def test_devices_that_compute_wrongly_or_are_in_use() -> None:
    found = [
        measured(),
        measured(product_roundings=4.01),
        measured(later_product_roundings=1e9, used_share=0.21),
    ]
    said = (
        "differs from the fp64 product by {} roundings, at most 4 are expected: the device computes wrongly"
    )
    assert sorted(told(device.judge(found, job("aaa")))) == [
        (1, "a matrix product at first " + said.format("4.01"), True),
        (2, "21% of the device's memory is in use before training begins. "
            "Does another process use it?", True),
        (2, "a matrix product after seconds of work " + said.format("1e+09"), True),
    ]  # fmt: skip
    assert device.judge([measured(used_share=0.2)], job("a")) == []
    assert device.summarise([measured(), measured(product_tflops=90.0)], job()) == (
        "products 90 to 100 TFLOP/s, copies 2e+03 GB/s, errors of at most 4 roundings"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_that_differ_by_rounding_pass_and_wrong_products_do_not(dtype: torch.dtype) -> None:
    """Right: rounded once, and summed from blocks that are rounded, in another order. Wrong: one element of
    262,144 is off by 0.1 of the usual element.
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator).to(dtype) for _ in range(2))
    expected = left.double() @ right.double()
    once = expected.to(dtype)
    assert device.rounding_errors(once, expected) <= 0.5
    blocks = [
        (left.double()[:, k : k + 128] @ right.double()[k : k + 128]).to(dtype) for k in (384, 0, 256, 128)
    ]
    of_blocks = blocks[0] + blocks[1] + blocks[2] + blocks[3]
    assert not torch.equal(of_blocks, once)
    assert device.rounding_errors(of_blocks, expected) <= device.MOST_ROUNDINGS
    assert device.rounding_errors(left @ right, expected) <= device.MOST_ROUNDINGS
    usual = expected.square().mean().sqrt()
    row, column = (expected.abs() < usual).nonzero()[1000].tolist()
    for wrong in (once[row, column] + 0.1 * usual, torch.nan, torch.inf):
        broken = once.clone()
        broken[row, column] = wrong
        assert device.rounding_errors(broken, expected) > device.MOST_ROUNDINGS


def test_rates_are_work_by_seconds_of_the_fastest_round(monkeypatch) -> None:
    """With a clock of whole seconds: the first round warms up, and of the others the fastest counts."""
    ticks = iter([0, 1, 10, 12, 20, 24, 30, 33, 0, 1, 10, 14, 20, 28, 30, 35])
    monkeypatch.setattr(device.time, "process_time", lambda: next(ticks))
    sizes = Sizes(matrix=5, products=3, copy_bytes=1000, copies=7, rounds=4, message_bytes=(),
                  timed_collectives=0, file_bytes=0)  # fmt: skip
    done = []
    product = device.multiply
    monkeypatch.setattr(device, "multiply", lambda left, right: done.append(1) or product(left, right))
    world = SimpleNamespace(device=CPU)
    found = device.measure(SimpleNamespace(world=world, sizes=sizes))
    assert len(done) == 1 + 4 * 3 + 1
    assert found["product_tflops"] == pytest.approx(2 * 5**3 * 3 / 2 / 1e12)
    assert found["copy_gb_per_second"] == pytest.approx(2 * 1000 * 7 / 4 / 1e9)
    assert found["used_share"] == 0
    left, right = device.matrices(sizes, CPU)
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(left, torch.randn(5, 5, generator=generator))
    assert torch.equal(right, torch.randn(5, 5, generator=generator)) and left.dtype == torch.float32
    error = device.rounding_errors(left @ right, left.double() @ right.double())
    assert found["product_roundings"] == found["later_product_roundings"] == error


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({}, (8, 32, 4, 4, 96, 128)), ({"shard": 3, "replicate": 2}, (12, 32, 4, 4, 96, 128)),
        ({"tensor": 5}, (8, 40, 4, 5, 480, 640)), ({"tensor": 3, "context": 2}, (8, 36, 4, 6, 96, 384)),
        ({"pipeline": 5, "pipeline_schedule": "1f1b"}, (10, 32, 5, 4, 96, 128)),
        ({"pipeline": 3, "pipeline_schedule": "zbv", "shard": 2}, (12, 32, 6, 4, 96, 128)),
    ],
)  # fmt: skip
def test_sizes_that_a_layout_divides(axes: dict[str, Any], expected: tuple[int, ...]) -> None:
    """Sequences by data ranks and micro-batches; tokens by twice the ranks inside of a sequence; layers by
    stages; heads by ranks inside; rows of the MLP and the vocabulary by tensor ranks.
    """
    of = training.sizes_of(layout(**axes))
    found = of.sequences, of.length, of.layers, of.key_value_heads, of.intermediate_size, of.vocabulary_rows
    assert found == expected


def test_bars_of_training() -> None:
    """The worst rank is named, of each number that is off; as much as the bar is allowed."""

    def found(**off: float) -> dict[str, dict[str, Any]]:
        usual = {"loss": 1e-5, "norm": 1e-5, "gradient": 2e-5, "weight": 2e-5} | off
        return {what: {"value": value, "at": f"{what} 1"} for what, value in usual.items()}

    on = job(kind="cpu")
    assert training.judge([found(), found()], on) == []
    assert told(training.judge([found(), found(loss=1.1e-5), found(weight=3e-5, loss=1.05e-5)], on)) == [
        (None, "loss is 1.1e-05 off one process's (loss 1; largest on rank 1); 1e-05 is allowed", True),
        (None, "weight is 3.0e-05 off one process's (weight 1; largest on rank 2); 2e-05 is allowed", True),
    ]
    assert len(training.judge([found(norm=float("nan"))], on)) == 1
    on_gpus = job()
    assert training.judge([found(loss=1e-4, norm=1e-4, gradient=2e-4, weight=2e-4)], on_gpus) == []
    over = found(loss=1.01e-4, norm=1.01e-4, gradient=2.01e-4, weight=2.01e-4)
    assert len(training.judge([over], on_gpus)) == 4
    assert len(training.judge([found(loss=1.1e-5, norm=1.1e-5, gradient=2.1e-5, weight=2.1e-5)], on)) == 4
    assert training.summarise([found(), found(norm=3e-5)], on) == (
        "5 steps, largest differences from one process: loss 1.0e-05, norm 3.0e-05, gradient 2.0e-05, "
        "weight 2.0e-05"
    )
