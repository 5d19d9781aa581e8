"""The alerts of a training, without those of the machine that the tests run on."""

import json
from pathlib import Path
from typing import Any

# Its memory is nearly used up, by whatever else runs there: kielo.train.watch.resources.
OF_MACHINE = ("host memory of ", "/dev/shm of ")


def alerts(train_folder: Path) -> list[dict[str, Any]]:
    """Returns the alerts, the oldest first; [] where the training has told none."""
    path = train_folder / "alerts.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines]
    return [alert for alert in found if not alert["message"].startswith(OF_MACHINE)]
