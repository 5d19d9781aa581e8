"""Memory of Kielo's step on a GPU, beside what `kielo rehearse` predicts for the same step.

    python benchmarks/training/step_memory.py benchmarks/results/step_*_cuda.json

Each rehearsal runs in a process of its own and needs no GPU. Adds what it finds to the results.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from step_bars import with_line
from step_shapes import resolved_of

TOLERANCE = 0.10
_OWN = {"kielo": None, "kielo-fp8": "fp8"}  # contender → its precision, where that is not the result's


def main() -> None:
    options = _options()
    if options.rehearse:
        print(json.dumps(_rehearsed(*options.rehearse)))
        return
    if not options.results:
        sys.exit("no results to compare with; benchmarks/training/step.py writes them on a GPU")
    for path in map(Path, options.results):
        result = json.loads(path.read_text(encoding="utf-8"))
        for name, row in result["contenders"].items():
            if name in _OWN and row["peak_memory_bytes"] is not None:
                _compare(result, name, row, options.seconds_limit)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _compare(result: dict[str, Any], name: str, row: dict[str, Any], seconds_limit: float) -> None:
    """Prints how far the contender's peak is from the rehearsed one, and stores it in its row."""
    precision, moments = _OWN[name] or result["precision"], result.get("moments", "fp32")
    what, seen = (
        f"{result['shape']} {name}, moments in {moments}, peak memory "
        f"{row['peak_memory_bytes'] / 1e9:.2f} GB",
        row["peak_memory_bytes"],
    )
    try:
        if "rehearsed" not in row:
            arguments = [result["shape"], str(result["layers"]), precision, result["machine"]["gpu"], moments]
            row["rehearsed"] = _in_a_process_of_its_own(arguments, seconds_limit)
    except (subprocess.SubprocessError, ValueError) as error:
        what, apart = f"{what}, no rehearsal ({_last_line(error)})", None
    else:
        rehearsed = row["rehearsed"]["peak_bytes"]
        what, apart = f"{what}, rehearsed {rehearsed / 1e9:.2f} GB", abs(seen / rehearsed - 1)
    row["memory_bar"] = with_line(what, "apart", TOLERANCE, apart, is_below=True)
    print(row["memory_bar"]["line"], flush=True)


def _in_a_process_of_its_own(arguments: list[str], seconds_limit: float) -> dict[str, Any]:
    """Rehearses in another process, because a process can make only one process group."""
    ran = subprocess.run(
        [sys.executable, __file__, "--rehearse", *arguments],
        capture_output=True,
        text=True,
        timeout=seconds_limit,
        check=True,
    )
    return json.loads(ran.stdout.splitlines()[-1])


def _rehearsed(shape: str, layers: str, precision: str, device_name: str, moments: str) -> dict[str, Any]:
    from kielo.verify.rehearse import rehearse

    rehearsal = rehearse(resolved_of(shape, int(layers), precision, "cuda", device_name, moments), 0)
    return {
        "peak_bytes": rehearsal["peak_bytes"],
        "kinds": rehearsal["peaks"][rehearsal["peak_phase"]]["kinds"],
    }


def _last_line(error: Exception) -> str:
    lines = getattr(error, "stderr", None) or str(error) or type(error).__name__
    lines = lines.decode() if isinstance(lines, bytes) else lines
    return lines.strip().splitlines()[-1]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", nargs="*", metavar="RESULT.json")
    parser.add_argument("--seconds-limit", type=float, default=120, help="of each rehearsal")
    parser.add_argument(
        "--rehearse",
        nargs=5,
        metavar=("SHAPE", "LAYERS", "PRECISION", "GPU", "MOMENTS"),
        help=argparse.SUPPRESS,
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
