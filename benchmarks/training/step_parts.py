"""The time of a step by part, of any function that takes one, by the profile of a run."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from kielo.train.profile import FOLDER, Profile


def step_parts(run_one_step: Callable[[], object], steps: int, device: torch.device) -> dict[str, float]:
    """Seconds per step of each part, of `steps` steps after one that warms the profiler up."""
    told: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        profile = Profile(folder, 0, steps, device, told.append)
        profile.step(0)
        for step in range(1, steps + 2):
            run_one_step()
            profile.step(step)
        file = Path(folder) / FOLDER / "profile.json"
        if not file.exists():
            raise ValueError(told[-1])
        return json.loads(file.read_text(encoding="utf-8"))["seconds_per_step"]
