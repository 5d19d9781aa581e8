"""Each check of `kielo preflight` finds its planted fault and names the rank; a sound job passes."""

import errno
import os
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import kielo
from kielo.artifact.stage_json import read_json
from kielo.artifact.verify_results import BAD_NODES_NAME, Complaint, NodeVerdict, Preflight
from kielo.checkpoint.agreement import Agreement
from kielo.models.blocks import mlp
from kielo.parallel.mesh import build_mesh
from kielo.ranks import world as room
from kielo.ranks.world import make_host_group, start_world
from kielo.recipe.cards import accelerator, cluster
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Layout
from kielo.resolve.resolve import resolve
from kielo.resolve.text import imagined_text
from kielo.verify.preflight import collectives, device, hosts, training
from kielo.verify.preflight.check_nodes import CHECKS, preflight, run_checks
from kielo.verify.preflight.hosts import cores_of_binding, in_ranges, networks_of
from kielo.verify.preflight.job import SIZES, Check, Job
from kielo.verify.screens import check_rows, verdict_lines
from tests.started_ranks import run_ranks
from tests.verify.preflight_counts import count, seconds

RANKS, FAULTY = 4, 3  # two on each of two nodes; the faulty one is on the second
FIRST_OF_NODE = 2  # the one that writes files for the second node
SOUND = {check.name: check for check in CHECKS}
SMALL = replace(SIZES["cpu"], message_bytes=(2**10, 2**14))


def resolved_demo(ranks: int, *sets: str):
    recipe = read_recipe("demo_estonian", list(sets)).recipe
    return recipe, resolve(recipe, "no_such_folder", ranks, "cpu", text=imagined_text(recipe))


def sound_rank(folder):
    os.environ["SLURMD_NODENAME"] = f"node{os.environ['RANK']}"
    os.environ["NCCL_DEBUG_FILE"] = f"log_of_{os.environ['RANK']}"  # as preflight does on GPUs: no difference
    return preflight(*resolved_demo(2), folder)


def test_a_sound_job_passes(tmp_path):
    """Every check passes on two ranks, files are written whole, and an old verdict is replaced."""
    (tmp_path / BAD_NODES_NAME).write_text("node7\n")
    with pytest.raises(RuntimeError, match="without the preflight.json"):
        run_ranks(sound_rank, 2, tmp_path)
    (tmp_path / Preflight.FILE_NAME).write_text('{"bad_nodes": ["node7"]}')
    assert run_ranks(sound_rank, 2, tmp_path) == [True, True]
    found = read_json(tmp_path, Preflight)
    assert found.passed and found.ranks == 2 and [node.name for node in found.nodes] == ["node0", "node1"]
    assert [check.name for check in found.checks] == list(SOUND) and all(one.found for one in found.checks)
    assert not any(complaint.is_refusal for complaint in found.complaints)
    assert (tmp_path / BAD_NODES_NAME).read_text() == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == [BAD_NODES_NAME, Preflight.FILE_NAME]
    assert "all checks passed" in verdict_lines(found)[-1]


def rank_beside_an_absent_one(folder):
    """A rank of a Slurm step, as rank.sh starts it: two nodes of one task each; rank 1 never arrives."""
    if os.environ["RANK"] == "1":
        return ""
    room.LINGER_SECONDS = 1.5
    os.environ |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "nid[3-4]"}
    recipe, resolved = resolved_demo(2, "train.start_timeout_seconds=1")
    with pytest.raises(KieloError) as caught:
        preflight(recipe, resolved, folder)
    return str(caught.value)


def test_the_node_of_a_rank_that_never_arrives_is_a_bad_one(tmp_path):
    """job.sh leaves out the nodes of bad_nodes.txt; an earlier verdict is replaced."""
    (tmp_path / Preflight.FILE_NAME).write_text('{"bad_nodes": ["nid9"]}')
    said, _ = run_ranks(rank_beside_an_absent_one, 2, tmp_path)
    assert "rank 1 did not arrive, 1 of 2 did (they are on nid4)" in said
    assert (tmp_path / BAD_NODES_NAME).read_text() == "nid4\n"
    found = read_json(tmp_path, Preflight)
    assert not found.passed and found.bad_nodes == ["nid4"] and found.complaints[0].message == said


class Faults:
    """Runs one check with a fault on one rank alone, and returns what rank 0 wrote of it."""

    def __init__(self, folder):
        recipe, resolved = resolved_demo(RANKS, "layout.tensor=2", "layout.shard=2")
        world = start_world(60, "cpu")
        nodes = tuple(f"node{rank // 2}" for rank in range(RANKS))
        mesh = build_mesh(world, resolved.placement.layout)
        host = Agreement(make_host_group(world, "preflight", 60))
        self.job = Job(recipe, resolved, cluster("laptop"), world, mesh, host, nodes, folder)

    def found(self, check: str | Check, fault, rank: int = FAULTY) -> Preflight | None:
        with fault if self.job.world.rank == rank else nullcontext():
            run_checks(self.job, [SOUND[check] if isinstance(check, str) else check])
        return read_json(self.job.run_folder, Preflight) if self.job.world.rank == 0 else None


def one_wrong_element(name: str):
    """Patches a collective so that element 5 of what it returns is one too large."""
    sound = collectives.COLLECTIVES[name]

    def prepare(*arguments):
        exchange = sound.prepare(*arguments)

        def call(result):
            exchange.call(result)
            result[5] += 1

        return replace(exchange, call=call)

    return patch.dict(collectives.COLLECTIVES, {name: replace(sound, prepare=prepare)})


def slow(action):
    """Returns `action` as a device does it that is twelve times slower than its fellows; five are allowed."""

    def slowed(*arguments):
        for _ in range(11):
            action(*arguments)
        return action(*arguments)

    return slowed


def changing(action):
    """Returns a product that is wrong from its second time on."""
    times = []

    def changed(left, right):
        times.append(1)
        result = action(left, right)
        result[0, 0] += len(times) > 1
        return result

    return changed


def without_space(number: int) -> None:
    """Is `os.fsync` on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class CollectiveCalls(TorchDispatchMode):
    """Counts the calls of torch's collectives and messages while it is entered."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls operators of plain tensors
        self.number += operator.namespace in ("c10d", "_c10d_functional")
        return operator(*arguments, **(options or {}))


def counted(job: Job):
    """Returns this rank's calls and sent bytes of the collectives' check."""
    calls, sent, prepared = [], {}, {}
    for name, sound in collectives.COLLECTIVES.items():

        def prepare(group, dtype, elements, device, sound=sound):
            exchange = sound.prepare(group, dtype, elements, device)

            def call(result):
                calls.append(1)
                share = sound.sent_share(group.size) * elements * dtype.itemsize
                sent[group.size] = sent.get(group.size, 0) + share
                exchange.call(result)

            return replace(exchange, call=call)

        prepared[name] = replace(sound, prepare=prepare)
    with patch.dict(collectives.COLLECTIVES, prepared):
        collectives.measure(job)
    return len(calls), sent


def planted_faults(folder):
    """Returns fault → what rank 0 found of it, and under "counted" what was sent; run by all ranks."""
    SIZES["cpu"] = SMALL  # of this rank's process
    faults = Faults(folder)
    full = SimpleNamespace(f_bavail=10, f_frsize=4096, f_files=100, f_favail=3)
    now, multiply, of_training = time.time, device.multiply, CollectiveCalls()

    def measure_training(job: Job) -> dict:
        with of_training:
            return training.measure(job)

    counted_training = replace(SOUND["training"], measure=measure_training)
    wrong_silu = patch.dict(mlp.ACTIVATIONS, silu=lambda x: F.silu(x) * 1.01)
    found = {name: faults.found("collectives", one_wrong_element(name)) for name in collectives.COLLECTIVES}
    return found | {
        "counted": counted(faults.job),
        "version": faults.found("software", patch.object(kielo, "__version__", "9.9")),
        "setting": faults.found("software", patch.dict(os.environ, NCCL_PROTO="Simple")),
        "clock": faults.found("clock", patch.object(hosts.time, "time", lambda: now() + 300)),
        "little skew": faults.found("clock", patch.object(hosts.time, "time", lambda: now() - 5)),
        "slow": faults.found("device", patch.object(device, "multiply", slow(multiply))),
        "wrong product": faults.found(
            "device", patch.object(device, "multiply", lambda left, right: multiply(left, right) * 1.001)
        ),
        "wrong later": faults.found("device", patch.object(device, "multiply", changing(multiply))),
        "no room": faults.found("files", patch.object(os, "statvfs", lambda path: full), FIRST_OF_NODE),
        "full disk": faults.found("files", patch.object(os, "fsync", without_space), FIRST_OF_NODE),
        "training": faults.found(counted_training, wrong_silu),
        "of training": of_training.number,
        "raised": faults.found("binding", patch.object(os, "sched_getaffinity", lambda pid: 1 / 0)),
    }


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    return run_ranks(planted_faults, RANKS, tmp_path_factory.mktemp("run"))[0]


def refused(found: Preflight) -> list[tuple[int | None, str]]:
    assert found.passed is not any(complaint.is_refusal for complaint in found.complaints)
    return [(one.rank, one.message) for one in found.complaints if one.is_refusal]


@pytest.mark.parametrize("name", collectives.COLLECTIVES)
def test_a_wrong_element_is_named(faults, name):
    """The rank, the group, the element and both values; on three groups, in two dtypes and two sizes."""
    found = refused(faults[name])
    assert {rank for rank, _ in found} == {FAULTY} and faults[name].bad_nodes == ["node1"]
    said = re.fullmatch(
        rf"{name} of float32 over shard \(ranks 1, 3\): element 5 is (\d+) and must be (\d+); 1 of \d+ "
        "elements are wrong",
        found[0][1],
    )
    assert int(said[1]) == int(said[2]) + 1 and found[-1][1] == f"and {3 * 2 * 2 - 3} more"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("version", "kielo is 9.9, and 0.1.0 on 3 of 4 ranks"),
        ("setting", "NCCL_PROTO is Simple, and not set on 3 of 4 ranks"),
        ("clock", "its clock is 300.0 s fast, against the median of all ranks"),
        ("slow", "matrix products: "),
        ("wrong product", "a matrix product at first differs from the fp64 product by "),
        ("wrong later", "a matrix product after seconds of work differs from the fp64 product by "),
        ("raised", "the check ended with an error: ZeroDivisionError"),
    ],
)
def test_a_faulty_rank_is_named(faults, fault, said):
    """The rank and its node are named, with what was found and expected; the other node passes."""
    found = faults[fault]
    assert [rank for rank, message in refused(found) if said in message] == [FAULTY], refused(found)
    assert found.bad_nodes == ["node1"] and found.complaints[0].node == "node1"


def test_a_little_skew_is_a_warning(faults):
    found = faults["little skew"]
    assert found.passed and "its clock is 5.0 s slow" in found.complaints[0].message


def test_a_wrong_activation_refuses_the_job(faults):
    """A fault in arithmetic shows in sums over all ranks: no node is blamed."""
    found = faults["training"]
    assert not found.passed and not found.bad_nodes and {rank for rank, _ in refused(found)} == {None}


def test_too_little_room_is_refused(faults):
    """Bytes and inodes that are left are compared with those of the run's checkpoints, once a node."""
    found = refused(faults["no room"])
    assert [rank for rank, _ in found] == [FIRST_OF_NODE] * 2
    assert "GB, and 4.1e-05 GB are free" in found[0][1] and "files, and 3 inodes are free" in found[1][1]
    ((rank, said),) = refused(faults["full disk"])
    assert rank == FIRST_OF_NODE and "/.preflight.kielo/1: No space left on device; free some space" in said
    assert faults["full disk"].bad_nodes == ["node1"]


def test_what_a_preflight_sends_is_counted(faults):
    """The computed calls and bytes are those that were made; training makes at most what is computed."""
    layout = resolved_demo(RANKS, "layout.tensor=2", "layout.shard=2")[1].placement.layout
    computed = count(layout, SMALL)
    assert faults["counted"] == (computed.collectives, computed.sent_bytes)
    assert 0 < faults["of training"] <= computed.training_collectives


@pytest.mark.parametrize("name", ["estonian_llama31_70b", "llmjp_172b", "lumi_140b_scaling", "viking_7b"])
def test_a_preflight_of_64_nodes_takes_three_minutes_at_most(name):
    """By its counts, at the slowest rates that pass, without the start of the ranks."""
    recipe = read_recipe(name).recipe
    site = cluster(recipe.cluster)
    ranks = 64 * site.devices_per_node
    layout = resolve(recipe, "no_such_folder", ranks, "cuda", text=imagined_text(recipe)).placement.layout
    taken = seconds(count(layout, SIZES["cuda"]), ranks, site, accelerator(site.accelerator))
    assert sum(taken.values()) < 180, taken


@pytest.mark.parametrize("ranks", [2, 3, 8, 300, 1030])
@pytest.mark.parametrize("dtype", collectives.DTYPES)
def test_sums_of_known_values_are_exact(ranks, dtype):
    """In any order, with every partial sum rounded to the dtype, as a reduction over a network is."""
    cpu, elements = torch.device("cpu"), 50
    whole = collectives.sums(ranks, dtype, 7, elements, cpu)
    total = torch.zeros(elements, dtype=dtype)
    for rank in range(ranks):
        total += collectives.values(rank, ranks, dtype, 7, elements, cpu)
    assert torch.equal(total, whole) and whole.unique().numel() > 1


def test_values_of_a_wrong_place_differ():
    """A part that is moved by any power of two is not equal to the one that belongs there."""
    cpu = torch.device("cpu")
    whole = collectives.values(0, 4, torch.float32, 0, 2**15, cpu)
    for shift in (2**power for power in range(14)):
        assert not torch.equal(whole[shift : shift + 64], whole[:64])
        assert torch.equal(whole[shift:], collectives.values(0, 4, torch.float32, shift, 2**15 - shift, cpu))


def gpu_job(nodes: int, per_node: int = 4):
    names = tuple(f"node{rank // per_node}" for rank in range(nodes * per_node))
    return SimpleNamespace(
        nodes=names,
        cluster=cluster("alps_clariden"),
        world=SimpleNamespace(device=SimpleNamespace(type="cuda")),
        device_card=accelerator("gh200_96"),
    )


def groups_found(ranks: int, rates: dict[tuple[int, ...], float]) -> list[dict]:
    of_rank = {rank: (group, rate) for group, rate in rates.items() for rank in group}
    return [
        {
            "wrong": [],
            "groups": {"shard": list(of_rank[rank][0])},
            "gb_per_second": {"shard": {"all-reduce": of_rank[rank][1]}},
        }
        for rank in range(ranks)
    ]


def test_a_network_that_fell_back_to_sockets_is_refused():
    """Two nodes of Alps: 122.6 GB/s pass; 5.4, as without the plugin (CSCS), are refused."""
    everyone = tuple(range(8))
    assert collectives.judge(groups_found(8, {everyone: 122.6}), gpu_job(2)) == []
    slow_job = collectives.judge(groups_found(8, {everyone: 5.4}), gpu_job(2))
    assert [one.rank for one in slow_job] == [0, 4] and "is its plugin missing?" in slow_job[0].message


def test_a_slow_group_is_named_beside_those_of_its_axis():
    """Of four groups inside four nodes, one is four times slower: its node alone is refused."""
    rates = {tuple(range(4 * node, 4 * node + 4)): 40.0 if node == 2 else 160.0 for node in range(4)}
    found = collectives.judge(groups_found(16, rates), gpu_job(4))
    assert [one.rank for one in found] == [8] and "the median of the 4 groups of this axis is 160" in found[
        0
    ].message


def test_slow_capped_and_occupied_gpus_are_refused():
    """Beside their fellows, beside the card, and for memory in use."""
    sound = {
        "name": "GH200", "product_tflops": 800.0, "copy_gb_per_second": 3400.0,
        "product_roundings": 0.5, "later_product_roundings": 0.5, "used_share": 0.02,
    }  # fmt: skip
    faulty = {
        1: {"product_tflops": 730.0}, 2: {"copy_gb_per_second": 3000.0}, 3: {"used_share": 0.4},
        5: {"product_roundings": 5.0},
    }  # fmt: skip
    found = [sound | faulty.get(rank, {}) for rank in range(8)]
    assert sorted(one.rank for one in device.judge(found, gpu_job(2))) == [1, 2, 3, 5]
    capped = [sound | {"product_tflops": 200.0}] * 8
    assert [one.rank for one in device.judge(capped, gpu_job(2))] == list(range(8))


def test_logs_of_nccl_name_their_network():
    """Lines as NCCL and aws-ofi-nccl write them."""
    log = (
        "nid1:77:77 [0] NCCL INFO NET/OFI Selected Provider is cxi (found 4 nics)\n"
        "nid1:77:77 [0] NCCL INFO Using network AWS Libfabric\n"
        "nid1:77:78 [0] NCCL INFO Using network AWS Libfabric\n"
    )
    assert networks_of(log) == ["AWS Libfabric", "cxi"]
    assert networks_of("x [0] NCCL INFO Using network Socket\n") == ["Socket"]


def test_bindings_of_srun_are_read():
    """LUMI's masks are the cores of its table; a binding that Slurm chooses says nothing."""
    masks = "mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe"
    assert [in_ranges(cores) for cores in cores_of_binding(masks)] == ["49-55", "57-63", "17-23", "1-7"]
    assert cores_of_binding("map_cpu:49,57") == [{49}, {57}] and cores_of_binding("cores") == []
    assert in_ranges({3, 1, 2, 16}) == "1-3,16"


def test_layouts_of_any_size_have_a_subject():
    """The tiny model's sizes are multiples of the axes that split them."""
    layout = Layout(pipeline=16, shard=96, tensor=8, context=2, pipeline_schedule="interleaved_1f1b")
    sizes = training.sizes_of(layout)
    assert sizes.layers == 32 and sizes.key_value_heads == 16 and sizes.sequences == 96 * 32
    assert sizes.length % (2 * 8 * 2) == 0 and sizes.intermediate_size % 8 == 0


def test_64_nodes_fit_on_one_screen():
    """With every node refused the text has less than forty lines, and names the first of them."""
    nodes = [NodeVerdict(name=f"nid{number:06}", ranks=[number], passed=False) for number in range(64)]
    complaints = [
        Complaint(check="clock", rank=number, node=node.name, message="late", is_refusal=True)
        for number, node in enumerate(nodes)
    ]
    found = Preflight(
        passed=False, bad_nodes=[node.name for node in nodes], nodes=nodes, complaints=complaints, checks=[],
        ranks=64, seconds=1.0, finished_at="",
    )  # fmt: skip
    lines = verdict_lines(found)
    assert len(lines) < 30 and lines[0] == "nid000000: rank 0: clock: late" and not check_rows(found)
    assert any("and 56 more" in line for line in lines) and "no node passed" in lines[-1]
