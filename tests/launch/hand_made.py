"""A site, a recipe and a plan of jobs that are made by hand, so that each line of their scripts is known."""

from pathlib import Path
from typing import Any

from kielo.artifact.launch_files import Forecast, MadeSite
from kielo.launch.job_plan import JobPlan, Wishes
from kielo.recipe.cards import Cluster
from kielo.recipe.sections import Recipe


def recipe(**more: Any) -> Recipe:
    """A recipe that names files of a person, and downloads nothing."""
    corpus = {"sources": [{"name": "a", "path": "a.txt"}]}
    return Recipe.model_validate(
        {"name": "mine", "language": "et", "corpus": corpus, "cluster": "laptop"} | more
    )


def site(scheduler: str = "slurm", jobs: dict[str, Any] | None = None, **more: Any) -> Cluster:
    """Ten nodes of four devices and 30 cores: seven cores a device, and two are left.

    jobs: fields of [jobs]; each has "of FIELD" for a source.
    """
    jobs = {"partitions": [{"name": "usual"}, {"name": "long", "max_hours": 72, "max_nodes": 3}]} | (
        jobs or {}
    )
    card = {
        "name": "here", "description": "A site", "accelerator": "h100_80", "devices_per_node": 4, "nodes": 10,
        "memory_gib_per_node": 100, "cpu_cores_per_node": 30, "network": "a wire",
        "network_gbit_per_second_per_node": 100, "scheduler": scheduler, "internet_on_compute_nodes": True,
        "max_wall_hours": 24, "max_nodes_per_job": 8, "source": "a page", "date": "2026-11",
        "jobs": jobs | {"sources": {field: f"of {field}" for field in jobs}},
    }  # fmt: skip
    return Cluster.model_validate(card | more)


def plan(of: Cluster, wishes: Wishes | None = None, partition: int = 0, **more: Any) -> JobPlan:
    """Three nodes for two hours, with signals 300 s before the end."""
    values = {
        "recipe": recipe(), "site": of, "jobs_of_site": of.jobs, "partition": of.jobs.partitions[partition],
        "wishes": wishes or Wishes(), "nodes": 3, "wall_seconds": 7384, "grace_seconds": 300,
        "silence_seconds": 4000, "chain_length": 5, "forecast": None, "no_forecast": "by hand",
    }  # fmt: skip
    return JobPlan(**values | more)


def made(folder: Path | str, squash: str = "") -> MadeSite:
    """What site.sh made in `folder`."""
    return MadeSite(
        cluster="here", image=f"{folder}/image.sif", venv="/user-software" if squash else f"{folder}/venv",
        squash=squash, python="3.12", torch="2.10.0", made_at="2026-11-23",
    )  # fmt: skip


def forecast(**more: Any) -> Forecast:
    values = {
        "layout": "dp12", "tokens_per_second": 1e5, "step_seconds": 10.0, "interval_seconds": [9.0, 12.0],
        "peak_gigabytes": 60.0, "usable_gigabytes": 70.0, "wall_hours": 40.0, "device_hours": 480.0,
        "billed": None, "billing_unit": "", "jobs": 4, "checkpoint_gigabytes": 50.0,
        "checkpoint_seconds": 100.0, "save_stop_seconds": 8.0,
    }  # fmt: skip
    return Forecast(**values | more)
