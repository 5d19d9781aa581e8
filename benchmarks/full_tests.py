"""Runs every test there is: `make test-full`. Writes results/test_full.json.

Two processes, for two cores: the cases marked `full`, and all others with the fault cases.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

from junit import outcome

_ROOT = Path(__file__).resolve().parents[1]
_RESULT = Path(__file__).parent / "results" / "test_full.json"
PARTS = {"full": "full", "others": "not full"}  # name of the part → pytest's marker expression


def main() -> None:
    begun, environment = time.monotonic(), os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as temporary:
        running = {
            name: subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "pytest",
                    "-m",
                    marker,
                    "--tb=short",
                    f"--junit-xml={temporary}/{name}.xml",
                ],
                cwd=_ROOT,
                env=environment,
            )
            for name, marker in PARTS.items()
        }
        parts = {}
        while len(parts) < len(running):
            time.sleep(1)
            for name, process in running.items():
                if name not in parts and process.poll() is not None:
                    counts = outcome(Path(temporary) / f"{name}.xml")
                    seconds = round(time.monotonic() - begun)
                    parts[name] = {"status": process.returncode, **counts, "seconds": seconds}
    found = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores",
        "torch": version("torch"),
        "seconds": round(time.monotonic() - begun),
        "parts": parts,
    }
    _RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found), flush=True)
    sys.exit(max(part["status"] for part in parts.values()))


if __name__ == "__main__":
    main()
