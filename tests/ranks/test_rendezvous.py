"""Launchers' variables, and Slurm's lists of nodes and tasks, read by hand."""

from typing import Any

import pytest

from kielo.ranks.rendezvous import Rendezvous, find_rendezvous, hosts, hosts_of_ranks, nodes_of_ranks
from kielo.recipe.errors import KieloError

STEP = {
    "SLURM_JOB_ID": "1234567", "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "2",
    "SLURM_STEP_NODELIST": "nid[08-10,12],gpu7",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "nid7", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Rendezvous(0, 1, 0)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "7"}, Rendezvous(0, 1, 0)),
        ({"SLURM_STEP_NODELIST": "nid8"}, Rendezvous(0, 1, 0)),
        # 12,000 and the rest of 1,234,567 by 20,000; a step is 101 further
        (STEP, Rendezvous(5, 7, 2, "nid08", 12_000 + 14_567, False, "1234567.0")),
        (STEP | {"SLURM_STEP_ID": "3"}, Rendezvous(5, 7, 2, "nid08", 26_870, False, "1234567.3")),
        (STEP | {"SLURM_STEP_NUM_TASKS": "6"}, Rendezvous(5, 6, 2, "nid08", 26_567, False, "1234567.0")),
        (TORCHRUN, Rendezvous(3, 4, 1, "nid7", 29_500, False, "0")),
        (STEP | TORCHRUN, Rendezvous(3, 4, 1, "nid7", 29_500, False, "0")),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"},
         Rendezvous(3, 4, 1, "nid7", 29_500, True, "2")),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, Rendezvous(3, 4, 1, "nid7", 29_500)),
    ],
)  # fmt: skip
def test_a_place_follows_from_the_launchers_variables(environment: dict[str, str], expected: Any) -> None:
    assert find_rendezvous(environment) == expected


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        (TORCHRUN | {"RANK": "4"}, "RANK=4 and WORLD_SIZE=4: the rank must be less"),
        (STEP | {"SLURM_PROCID": "7"}, "SLURM_PROCID=7 and SLURM_NTASKS=7: the rank must be less"),
        ({"WORLD_SIZE": "4"}, "RANK is not set, although others of its launcher are"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, although others of its launcher are"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set, although others of its launcher are"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK must be a whole number, not '-1'"),
        (TORCHRUN | {"RANK": "²"}, "RANK must be a whole number, not '²'"),
        (TORCHRUN | {"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE must be a whole number, not '9+'"),
        (STEP | {"SLURM_STEP_ID": "batch"}, "SLURM_STEP_ID must be a whole number, not 'batch'"),
        (STEP | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST='' names no host"),
        (STEP | {"SLURM_STEP_NODELIST": "nid[5-3]"}, r"'nid\[5-3\]' is no list of hosts"),
        (STEP | {"SLURM_STEP_NODELIST": "nid[1-99999999999]"}, "is no list of hosts"),
        (STEP | {"SLURM_STEP_NODELIST": "nid[1-999999999]"}, "is no list of hosts"),
        (STEP | {"SLURM_STEP_NODELIST": "nid[a]"}, "is no list of hosts"),
        (STEP | {"SLURM_STEP_NODELIST": "nid[1"}, "is no list of hosts"),
    ],
)
def test_variables_that_make_no_rank_are_refused(environment: dict[str, str], reason: str) -> None:
    with pytest.raises(KieloError, match=reason):
        find_rendezvous(environment)
    assert find_rendezvous(TORCHRUN | {"RANK": " 3"}).rank == 3


def test_lists_of_nodes_are_written_out() -> None:
    """Brackets may come twice; zeros in front stay; a comma in brackets divides numbers."""
    assert hosts("nid[08-10,12],gpu7") == ["nid08", "nid09", "nid10", "nid12", "gpu7"]
    two = ["a1b08", "a1b09", "a1b12", "a2b08", "a2b09", "a2b12", "c"]
    assert hosts("a[1-2]b[08-09,12], c") == two and hosts("x[099-101]") == ["x099", "x100", "x101"]


def test_ranks_have_the_hosts_of_their_tasks() -> None:
    """Three on the first node, two on each of the next two, one on the rest: ranks 0 to 8."""
    step = {"SLURM_STEP_NODELIST": "nid[08-10,12],gpu7", "SLURM_STEP_TASKS_PER_NODE": "3,2(x2),1(x2)"}
    of_ranks = {rank: hosts_of_ranks([rank], step) for rank in range(10)}
    by_hand = 3 * ["nid08"] + 2 * ["nid09"] + 2 * ["nid10"] + ["nid12", "gpu7"]
    assert of_ranks == {rank: [host] for rank, host in enumerate(by_hand)} | {9: []}
    assert hosts_of_ranks([8, 1, 0, 4], step) == ["gpu7", "nid08", "nid09"]
    assert nodes_of_ranks([2, 3], step) == ["nid08", "nid09"]
    for missing in step:
        assert hosts_of_ranks([0], {key: value for key, value in step.items() if key != missing}) == []
    for kind, found in (("block", ["nid08"]), ("block:cyclic", ["nid08"]), ("cyclic", []), ("plane=4", [])):
        assert hosts_of_ranks([0], step | {"SLURM_DISTRIBUTION": kind}) == found
    assert hosts_of_ranks([0], step | {"LOCAL_WORLD_SIZE": "1"}) == []


def test_torchrun_numbers_its_nodes() -> None:
    """Three ranks a node; of one node, and without their number, there is nothing to say."""
    torchrun = {"LOCAL_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2"}
    assert nodes_of_ranks([2, 5, 3], torchrun) == ["node 0 of torchrun", "node 1 of torchrun"]
    for changed in ({"GROUP_WORLD_SIZE": "1"}, {"GROUP_WORLD_SIZE": ""}, {"LOCAL_WORLD_SIZE": "x"}):
        assert nodes_of_ranks([2], torchrun | changed) == []
