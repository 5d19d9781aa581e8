"""Launchers are read alike, and a rank that does not come is named."""

import os
import resource
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from kielo.parallel.mesh import AXES, build_mesh
from kielo.ranks import objects
from kielo.ranks import world as room
from kielo.ranks.communicator import warm_messages, who_is_missing
from kielo.ranks.local_ranks import free_port
from kielo.ranks.process_settings import allow_open_files
from kielo.ranks.rendezvous import Rendezvous, find_rendezvous, hosts, nodes_of_ranks
from kielo.ranks.world import make_host_group, start_world
from kielo.recipe.errors import KieloError
from tests.fault_times import FaultTimes
from tests.started_ranks import run_ranks

SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "nid[001002-001005,001009],gpu7",
}


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("nid[001002-001005,001009],gpu7", "nid001002"),
        ("gpu7,gpu9", "gpu7"),
        ("localhost", "localhost"),
        ("rack[3-4]n[07,09-12].site", "rack3n07.site"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist, host):
    """All ranks of a Slurm step derive the same meeting host, zeros and suffixes kept."""
    assert hosts(nodelist)[0] == host


def test_missing_ranks_have_nodes(monkeypatch):
    """By Slurm's list, for ranks that never began; torchrun numbers nodes; a cyclic step says nothing."""
    step = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x3),2(x3)"}
    assert hosts(SLURM["SLURM_STEP_NODELIST"])[3:] == ["nid001005", "nid001009", "gpu7"]
    assert hosts("rack[3-4]n[07,09-10].site")[2:4] == ["rack3n10.site", "rack4n07.site"]
    assert nodes_of_ranks([0, 3, 8, 13, 16], step) == ["nid001002", "nid001004", "nid001005", "gpu7"]
    assert nodes_of_ranks([0], step | {"SLURM_DISTRIBUTION": "cyclic"}) == nodes_of_ranks([0], SLURM) == []
    torchrun = {"RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}
    assert nodes_of_ranks([4, 5], torchrun) == ["node 1 of torchrun"]
    assert nodes_of_ranks([0], torchrun | {"GROUP_WORLD_SIZE": "1"}) == []
    for name, value in step.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    for rank in set(range(16)) - {8, 9}:
        store.set(f"arrived/world/{rank}", b"1")
    said = who_is_missing("world", range(16), store)
    assert said.startswith(
        "ranks 8, 9 did not arrive, 14 of 16 did (they are on nid001004). Fix: look at the log"
    )


def test_launchers():
    """torchrun comes before Slurm, a batch script outside srun is one process, and a gap is named."""
    place = find_rendezvous(SLURM)
    assert (place.rank, place.size, place.local_rank, place.host) == (9, 16, 1, "nid001002")
    assert (
        12_000 <= place.port < 32_000
        and place.port != find_rendezvous(SLURM | {"SLURM_JOB_ID": "1234568"}).port
    )
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert find_rendezvous(SLURM | torchrun) == Rendezvous(1, 2, 1, "a", 5)
    batch_script = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_NODELIST"}
    assert find_rendezvous(batch_script) == Rendezvous(0, 1, 0)
    for port in ("0", "65536", "4294967296"):
        with pytest.raises(KieloError, match=f"MASTER_PORT={port} is no port. Fix: 1 to 65535"):
            find_rendezvous(torchrun | {"MASTER_PORT": port})
    assert find_rendezvous(torchrun | {"MASTER_PORT": "65535"}).port == 65535
    with pytest.raises(KieloError, match="MASTER_PORT is not set"):
        find_rendezvous({key: value for key, value in torchrun.items() if key != "MASTER_PORT"})
    with pytest.raises(KieloError, match="SLURM_LOCALID must be a whole number, not 'x'"):
        find_rendezvous(SLURM | {"SLURM_LOCALID": "x"})


def layout(**sizes):
    return SimpleNamespace(**(dict.fromkeys(AXES, 1) | sizes))


def count_by_slurm(port_job: int):
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ.update(SLURM, SLURM_PROCID=str(rank), SLURM_NTASKS="2", SLURM_LOCALID=str(rank))
    os.environ.update(SLURM_JOB_ID=str(port_job), SLURM_STEP_NODELIST="localhost")
    return start_world(30, "cpu").size, dist.get_world_size(), dist.get_backend()


def test_slurm_variables_start_a_world():
    """srun's variables alone are enough to meet."""
    assert run_ranks(count_by_slurm, 2, free_port()) == [(2, 2, "gloo")] * 2


def world_without(absent: int, times: FaultTimes):
    room.LINGER_SECONDS = 1.5
    times.note("planted")
    if int(os.environ["RANK"]) == absent:
        return "absent"
    with pytest.raises(KieloError) as caught:
        start_world(1, "cpu")
    return str(caught.value)


def test_a_rank_that_never_arrives_is_named_by_the_others(fault_times):
    """The start ends within its limit on every rank that came, with the missing rank's number."""
    messages = run_ranks(world_without, 3, 2, fault_times)
    fault_times.note("found")
    for rank in (0, 1):
        assert (
            "communicator 'world'" in messages[rank] and "rank 2 did not arrive, 2 of 3 did" in messages[rank]
        )


def world_without_rank_zero():
    if os.environ["RANK"] == "0":
        return "absent"
    with pytest.raises(KieloError) as caught:
        start_world(1, "cpu")
    return str(caught.value)


def test_a_missing_rank_zero_is_named_by_its_address():
    """The message says where rank 0 was looked for; without it there is no store to ask."""
    assert "no meeting at 127.0.0.1:" in run_ranks(world_without_rank_zero, 2)[1]


def axis_without(absent: int):
    world = start_world(30, "cpu")
    if world.rank == absent:
        return "absent"
    with pytest.raises(KieloError) as caught:
        build_mesh(replace(world, timeout_seconds=1), layout(replicate=2, shard=2))
    return str(caught.value)


def test_an_axis_that_is_never_made_is_named():
    """Each communicator has its own limit: the axis and the missing rank are in the message."""
    messages = run_ranks(axis_without, 4, 3)
    assert "communicator 'replicate'" in messages[1] and "rank 3 did not arrive, 1 of 2 did" in messages[1]


def warm_pipeline():
    sent, send = [], dist.send

    def recorded(tensor, group, group_dst):
        sent.append(group_dst)
        send(tensor, group=group, group_dst=group_dst)

    dist.send = recorded
    world = start_world(30, "cpu")
    mesh = build_mesh(world, layout(pipeline=4))
    if world.rank == 3:
        return sent, "absent"
    startup, group = replace(world.startup, timeout_seconds=1), mesh["pipeline"].get_group()
    try:
        warm_messages(startup, "again", range(4), group)
    except KieloError as error:
        return sent, str(error)


def test_messages_of_a_pipeline_are_warmed_in_both_directions():
    """Neighbours, and the first and the last rank; a rank that is missing is named by each pair it is in."""
    sent, messages = zip(*run_ranks(warm_pipeline, 4))
    assert [sorted(targets[:2]) for targets in sent] == [[1, 3], [0, 2], [1, 3], [0, 2]]
    for rank, pair in ((0, "again 0-3"), (2, "again 2-3")):
        assert f"communicator '{pair}'" in messages[rank] and "rank 3 did not arrive" in messages[rank]


def sockets():
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread may close it meanwhile
            found += os.readlink(f"/proc/self/fd/{number}").startswith("socket")
    return found


def connect_host_group():
    world = start_world(30, "cpu")
    before = sockets()
    group = make_host_group(world, "checkpoint", 30)
    made, gathered = sockets() - before, objects.all_gather(world.rank, group)
    dist.barrier(group=group)
    return made, gathered


def test_a_host_group_connects_only_ranks_that_send_to_each_other():
    """A listening socket and the ring's two neighbours; all with all would be one and seven."""
    ranks = run_ranks(connect_host_group, 8)
    assert all(gathered == list(range(8)) for _, gathered in ranks)
    assert all(made <= 3 for made, _ in ranks[1:])  # the first one serves the store, too


def test_too_few_open_files_are_refused_with_the_number_that_is_needed(monkeypatch):
    """Rank 0 of 6,144 serves the store and gathers; the soft limit is raised to the hard one."""
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    allow_open_files(Rendezvous(5, 6144, 5))
    with pytest.raises(KieloError, match=r"needs up to 25088 open files and sockets.*hard limit is 4096"):
        allow_open_files(Rendezvous(0, 6144, 0))
    assert limits == [(4096, 4096)] * 2


class CountingStore(dist.HashStore):
    """Counts the questions for marks."""

    checks = 0

    def check(self, keys):
        self.checks += 1
        return super().check(keys)


def test_marks_are_asked_for_by_one_rank_and_by_halves():
    """Three of 6,144 are found with few questions, once; later askers read the answer."""
    store = CountingStore()
    for rank in set(range(6144)) - {7, 8, 5000}:
        store.set(f"arrived/world/{rank}", b"1")
    answers = {who_is_missing("world", range(6144), store) for _ in range(3)}
    assert len(answers) == 1 and answers.pop().startswith("ranks 7, 8, 5000 did not arrive, 6141 of 6144 did")
    assert store.checks < 60


def wrong_layouts():
    world = start_world(30, "cpu")
    messages = []
    for sizes in ({"shard": 3}, {"shard": 1, "expert": 2}):
        with pytest.raises(KieloError) as caught:
            build_mesh(world, layout(**sizes))
        messages.append(str(caught.value))
    return messages


def test_layouts_that_do_not_fit_are_refused():
    """A product unlike the world's size, and an axis that is not in use yet, name the key."""
    fits, unsupported = run_ranks(wrong_layouts, 2)[0]
    assert "needs 3 ranks, but 2 are running" in fits
    assert "layout.expert = 2" in unsupported


def fail_on_one():
    if os.environ["RANK"] == "1":
        raise ValueError("on purpose")
    time.sleep(60)


def test_run_ranks_reports_the_rank_that_failed():
    """Errors carry their rank, and the others do not hold the test up."""
    with pytest.raises(RuntimeError, match=r"\[rank 1\] ValueError: on purpose"):
        run_ranks(fail_on_one, 2)
