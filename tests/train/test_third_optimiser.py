"""An optimiser is an entry of the table and a class: plans, rehearsals, preflight and training follow."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
def test_a_third_optimiser_is_an_entry_and_a_class(tmp_path: Path) -> None:
    """One moment in fp32, 92 bytes a parameter through memory: half of AdamW's state, twice its traffic.

    6,160 elements in 21 parameters, each with a count of updates in fp32; preflight counts 5,000 parameters,
    as the run says, in three checkpoints.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.third_optimiser", str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (adamw_seconds, adamw_bytes), (seconds, bytes_) = found["planned"]["adamw"], found["planned"]["momentum"]
    assert seconds == pytest.approx(2 * adamw_seconds) and bytes_ == pytest.approx(adamw_bytes / 2)
    held = {"parameters": 4 * 6160, "gradients": 4 * 6160, "optimiser": 4 * 6160 + 4 * 21}
    assert found["rehearsed"] == [held, held] and (found["elements"], found["parameters"]) == (6160, 21)
    assert found["room"] == 3 * 5000 * (4 + 4)
    assert found["state"] == ["velocity"] and found["has_moved"] and found["is_equal"]
    assert (
        'train.optimiser_state = "bf16" cannot be combined with train.optimiser = "momentum"'
        in found["refused"]
    )
    assert found["in_schema"]
