"""All checks on the ranks of a job: a recipe resolved for them → `Preflight`, one verdict a node.

Ranks measure together, and rank 0 judges and writes. A check that raises on a rank refuses that rank and ends
the preflight, because the ranks are out of step after it.
"""

import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kielo.artifact.attempt_files import now
from kielo.artifact.durable import DurableFile, refuse_other_json
from kielo.artifact.stage_json import write_json
from kielo.artifact.verify_results import BAD_NODES_NAME, CheckReport, Complaint, NodeVerdict, Preflight
from kielo.checkpoint.agreement import Agreement
from kielo.parallel.mesh import build_mesh, communicators
from kielo.ranks.communicator import NoCommunicator, TimeLimits
from kielo.ranks.local_ranks import name_of_this_node
from kielo.ranks.world import end_world, make_host_group, start_world
from kielo.recipe.cards import cluster
from kielo.recipe.errors import KieloError, first_line, sentence
from kielo.recipe.sections import Recipe
from kielo.resolve.resolved import Resolved, filled
from kielo.verify.preflight import collectives, device, files, hosts, training
from kielo.verify.preflight.job import Check, Finding, Job

# In their order: what explains later findings comes first.
CHECKS = (
    Check("software", hosts.measure_software, hosts.judge_software, hosts.summarise_software),
    Check("clock", hosts.measure_clock, hosts.judge_clock, hosts.summarise_clock),
    Check("binding", hosts.measure_binding, hosts.judge_binding, hosts.summarise_binding),
    Check("device", device.measure, device.judge, device.summarise),
    Check("collectives", collectives.measure, collectives.judge, collectives.summarise),
    # NCCL has named its network by now
    Check("network", hosts.measure_network, hosts.judge_network, hosts.summarise_network),
    Check("files", files.measure, files.judge, files.summarise),
    Check("training", training.measure, training.judge, training.summarise),
)
# Seconds that a rank waits for other ranks in a check, and for their findings. Checks take seconds.
_LIMIT_SECONDS, _HOST_LIMIT_SECONDS = 120.0, 300.0


def preflight(recipe: Recipe, resolved: Resolved, run_folder: Path) -> bool:
    """Run the checks on all ranks, and return on each True if neither a node nor the job is refused.

    Rank 0 writes `preflight.json` and `bad_nodes.txt` into the run's folder, and first removes the files of
    an earlier preflight. Raise KieloError for ranks that do not arrive (their nodes are written as bad nodes
    if Slurm lists them) and for a file of these names that Kielo did not write.
    """
    # Each rank would warn that gathering a whole tensor takes two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    placement = resolved.placement
    with hosts.nccl_log(placement.device) as nccl_log:
        try:
            world = start_world(filled(placement.train.start_timeout_seconds), placement.device)
            mesh = build_mesh(world, placement.layout)
            host_group = make_host_group(world, "preflight", world.timeout_seconds)
            TimeLimits(communicators(mesh), _LIMIT_SECONDS, _LIMIT_SECONDS)
            if host_group is not None:
                TimeLimits([host_group], _HOST_LIMIT_SECONDS, _HOST_LIMIT_SECONDS)
            host = Agreement(host_group)
            host.on_first(lambda: _withdraw(run_folder))
            nodes = tuple(host.gather(name_of_this_node()))
            return run_checks(
                Job(recipe, resolved, cluster(recipe.cluster), world, mesh, host, nodes, run_folder, nccl_log)
            )
        except NoCommunicator as error:
            if error.hosts:
                _refuse_missing(error, run_folder, placement.world_size)
            raise
        finally:
            end_world()


def run_checks(job: Job, checks: Sequence[Check] = CHECKS) -> bool:
    """Run `checks` in order; rank 0 writes the verdict. Return on every rank True if all passed."""
    started = time.monotonic()
    reports: list[CheckReport] = []
    complaints: list[Complaint] = []
    is_in_step = True
    for check in checks:
        if not is_in_step:
            reports.append(CheckReport(name=check.name, summary="not run", seconds=0.0, found=[]))
            continue
        since = time.monotonic()
        found = _measured(check, job)
        is_in_step = job.host.distribute(found, partial(_settle, check, job, reports, complaints, since))

    def write() -> bool:
        found = verdict(job, reports, complaints, time.monotonic() - started)
        _write_files(job.run_folder, found)
        return found.passed

    return job.host.on_first(write)


def _measured(check: Check, job: Job) -> tuple[Any, str]:
    try:
        return check.measure(job), ""
    except Exception as error:  # of any kind: it is this rank's finding
        return None, sentence(error) or f"{type(error).__name__}: {first_line(error)}"


def _settle(
    check: Check,
    job: Job,
    reports: list[CheckReport],
    complaints: list[Complaint],
    since: float,
    found: Sequence[tuple[Any, str]],
) -> list[bool]:
    """Judge on rank 0 the measurements of all ranks and note them. Return for each rank if the ranks are in
    step.
    """
    values, errors = zip(*found, strict=True)
    findings = [
        Finding(rank, f"the check ended with an error: {error}") for rank, error in enumerate(errors) if error
    ]
    is_in_step = not findings
    if is_in_step:
        findings = check.judge(values, job)
    summary = check.summarise(values, job) if is_in_step else "ended with an error"
    complaints += [
        Complaint(
            check=check.name,
            rank=finding.rank,
            node=None if finding.rank is None else job.nodes[finding.rank],
            message=finding.message,
            is_refusal=finding.is_refusal,
        )
        for finding in findings
    ]
    seconds = time.monotonic() - since
    reports.append(
        CheckReport(name=check.name, summary=summary, seconds=round(seconds, 3), found=list(values))
    )
    return [is_in_step] * len(found)


def verdict(job: Job, reports: list[CheckReport], complaints: list[Complaint], seconds: float) -> Preflight:
    refused = {complaint.node for complaint in complaints if complaint.is_refusal}
    nodes = [
        NodeVerdict(name=name, ranks=ranks, passed=name not in refused)
        for name, ranks in job.ranks_of_nodes().items()
    ]
    return Preflight(
        passed=not refused,
        bad_nodes=[node.name for node in nodes if not node.passed],
        nodes=nodes,
        complaints=sorted(complaints, key=lambda complaint: not complaint.is_refusal),
        checks=reports,
        ranks=job.world.size,
        seconds=round(seconds, 3),
        finished_at=now(),
    )


def _refuse_missing(error: NoCommunicator, run_folder: Path, ranks: int) -> None:
    _withdraw(run_folder)
    complaints = [
        Complaint(check="start", rank=None, node=host, message=str(error), is_refusal=True)
        for host in error.hosts
    ]
    found = Preflight(
        passed=False,
        bad_nodes=list(error.hosts),
        nodes=[],
        complaints=complaints,
        checks=[],
        ranks=ranks,
        seconds=0.0,
        finished_at=now(),
    )
    _write_files(run_folder, found)


def _write_files(run_folder: Path, found: Preflight) -> None:
    with DurableFile(run_folder / BAD_NODES_NAME) as file:
        file.write("".join(f"{node}\n" for node in found.bad_nodes).encode())
    write_json(run_folder, found)


def _withdraw(run_folder: Path) -> None:
    """Remove the verdict of an earlier preflight. Raise KieloError for files that Kielo did not write."""
    report, bad_nodes = run_folder / Preflight.FILE_NAME, run_folder / BAD_NODES_NAME
    refuse_other_json(report, "bad_nodes")
    if bad_nodes.exists() and not report.exists():
        raise KieloError(
            f"{bad_nodes}: exists without the {report.name} that Kielo writes beside it. Nothing was "
            f"written. Fix: mv {bad_nodes} {bad_nodes}.mine"
        )
    bad_nodes.unlink(missing_ok=True)
    report.unlink(missing_ok=True)
