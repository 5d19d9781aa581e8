"""`launch.json` in the folder of a launch: what was asked of a cluster, and what the planner expects."""

from typing import ClassVar

from kielo.artifact.stage_json import JsonFile, JsonObject


class Forecast(JsonObject):
    """The planner's forecast of a run."""

    layout: str
    """The layout's name."""
    tokens_per_second: float
    """Over all ranks, of the phase with most tokens."""
    step_seconds: float
    """Seconds of an optimiser step."""
    interval_seconds: list[float]
    """Interval in which the seconds of a step are expected, low and high."""
    peak_gigabytes: float
    """10^9 bytes at the peak of the fullest device."""
    usable_gigabytes: float
    """10^9 bytes that a device can give."""
    wall_hours: float
    """Hours of the whole run on the machine, with starts of jobs, saves and held-out text."""
    device_hours: float
    """Hours of all devices together, of the whole run."""
    billed: float | None
    """The site's bill for them, in its billing unit; null: its card does not say."""
    billing_unit: str
    """The site's billing unit; empty: its card does not say."""
    jobs: int
    """Jobs of the longest time that was asked for, one after another."""
    checkpoint_gigabytes: float
    """10^9 bytes of a checkpoint."""
    checkpoint_seconds: float
    """Seconds until a save is safe on disk."""
    save_stop_seconds: float
    """Seconds for which a save stops training."""


class Launch(JsonFile):
    """The request of one `kielo launch`, with its forecast and the versions that it was made by."""

    FILE_NAME: ClassVar[str] = "launch.json"

    cluster: str
    """The name of the cluster's card, or the path of an own one."""
    scheduler: str
    """slurm, pbs or grid_engine."""
    job_name: str
    """The jobs' name at the scheduler."""
    nodes: int
    """Nodes that train."""
    spares: int
    """Nodes of a job beyond those."""
    devices: int
    """Devices that train, each with one rank."""
    partition: str
    """The queue."""
    wall_seconds: int
    """Longest time of a job."""
    grace_seconds: int
    """Seconds before its end at which a job is asked to save and stop."""
    jobs: int
    """Jobs in the chain."""
    forecast: Forecast | None
    """The planner's forecast; null: no card says how fast the devices are."""
    no_forecast: str
    """Why there is no forecast; empty: there is one."""
    versions: dict[str, str]
    """Versions of Kielo, Python, the scheduler's command and the card; Kielo's commit where it has one."""
    created_at: str
    """Time in UTC."""
