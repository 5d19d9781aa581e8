"""Every bar that needs a GPU, in parts of at most nine minutes: `make bench-gpu PART=1|2|3|4`.

Each part is a list of commands with time limits. What a command found stays where it wrote it, and that it
ran is noted in gpu_parts.json of the same folder, so that a part that was cut off goes on where it stopped
(--all begins anew). A command that fails does not stop the others; the exit status tells.

Packages that are missing are named, with the command that fetches their wheels elsewhere. --wheels FOLDER
installs all wheels of a folder into its subfolder `installed` and puts that first on the path.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).parents[2]
RESULTS = _ROOT / "benchmarks" / "results"
_PART_SECONDS = 540
# Version of torch → of the torchao that goes with it.
_TORCHAO = {"2.10": "0.16.0", "2.11": "0.17.0", "2.13": "0.18.0"}
_ASK_FOR_TORCH = ("accelerate", "torchao")  # pip would fetch torch with them
_LEAST_SECONDS = 20  # less is not worth beginning


@dataclass(frozen=True)
class Command:
    """A command to run on a GPU: `arguments` after the name of the interpreter.

    `seconds`: after so many it is ended; {seconds} in an argument is replaced by them. is_repeated: it also
    runs if it ran before, because it does only what is missing.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: int
    is_repeated: bool = False


def _step(shape: str, contenders: str, seconds: int, pairs: int, moments: str = "fp32") -> Command:
    """Returns the command of a step benchmark with at most `pairs` rounds, as many as time allows.

    A step of many micro-batches is warm after one step, and long enough to be timed alone. moments: AdamW's.
    """
    name = f"step {shape}" + ", moments in bf16" * (moments == "bf16")
    arguments = (
        "benchmarks/training/step.py", "--shape", shape, "--precision", "bf16", "--device", "cuda",
        "--contenders", contenders, "--moments", moments,
        "--pairs", str(pairs), "--warm-up", "1", "--steps-per-turn", "1", "--parts", "--seconds-limit",
        "{seconds}",
        "--to", "{to}", "--skip-done",
    )  # fmt: skip
    return Command(name, arguments, seconds)


_GPU_PEERS = "torchtitan,torchtitan-fp8,megatron,megatron-fp8"
PARTS: dict[int, list[Command]] = {
    1: [
        Command("tests", ("-m", "pytest", "-m", "gpu", "-q", "tests"), 120),
        _step("llama_8b", "kielo,kielo-fp8,trainer", 405, 6),
    ],
    2: [
        _step("llama_1b", f"kielo,kielo-fp8,trainer,litgpt,olmo-core,{_GPU_PEERS}", 280, 4),
        _step("llmjp_172b", f"kielo,kielo-fp8,trainer,{_GPU_PEERS}", 240, 4),
    ],
    3: [
        Command(
            "fp8 convergence",
            (
                "benchmarks/training/fp8_convergence.py",
                "--shape",
                "llama_1b",
                "--tokens",
                "{tokens}",
                "--seconds-limit",
                "{seconds}",
            ),
            300,
        ),
        Command(
            "memory",
            ("benchmarks/training/step_memory.py", "--seconds-limit", "90", "{results}"),
            235,
            is_repeated=True,
        ),
    ],
    # More layers of the model fit the device, so that the step is more like the whole model's.
    4: [_step("llama_8b", "kielo,kielo-fp8", 360, 6, "bf16")],
}


def main() -> None:
    options = _options()
    _provide_packages(options.wheels)
    folder = Path(options.to)
    folder.mkdir(parents=True, exist_ok=True)
    notes = folder / "gpu_parts.json"
    ran = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() and not options.all else {}
    ends = time.monotonic() + options.seconds_limit
    for command in PARTS[options.part]:
        key = f"{options.part} {command.name}"
        if ran.get(key, {}).get("status") == 0 and not command.is_repeated:
            print(f"{key}: ran on {ran[key]['date']}", flush=True)
            continue
        left = min(command.seconds, ends - time.monotonic())
        if left < _LEAST_SECONDS:
            print(f"{key}: no time left; the same command again goes on from here", flush=True)
            ran.setdefault(key, {"status": None})
            continue
        begun = time.monotonic()
        status = _run(command, left, folder, options)
        ran[key] = {
            "status": status,
            "seconds": round(time.monotonic() - begun, 1),
            "date": date.today().isoformat(),
        }
        notes.write_text(json.dumps(ran, indent=1) + "\n", encoding="utf-8")
        print(f"{key}: status {status} after {ran[key]['seconds']} s", flush=True)
    done = [
        ran.get(f"{options.part} {command.name}", {}).get("status") == 0 for command in PARTS[options.part]
    ]
    sys.exit(0 if all(done) else 1)


def missing_packages() -> list[str]:
    """Returns what Kielo requires and this Python lacks, as pip takes it; torch itself is left out."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = ".".join(_installed("torch").split(".")[:2])
    required = [*project["dependencies"], *project["optional-dependencies"]["train"], "pytest"]
    required.append(f"torchao=={_TORCHAO[torch]}" if torch in _TORCHAO else "torchao")
    names = {one: re.match(r"[\w.-]+", one).group() for one in required}
    return [one for one, name in names.items() if name not in ("torch", "kielo") and not _installed(name)]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _provide_packages(wheels: Path | None) -> None:
    """Puts the packages of the folder `wheels` on the path; without one, names those that are missing."""
    if wheels is None:
        missing = missing_packages()
        alone = [one for one in missing if one.startswith(_ASK_FOR_TORCH)]
        others = [one for one in missing if one not in alone]
        for options, names in (("", others), (" --no-deps", alone)):
            if names:
                quoted = " ".join(f"'{name}'" for name in names)
                print(f"missing; fetch by: pip download -d wheels{options} {quoted}")
        if missing:
            print("(with internet and the same Python), then here: --wheels wheels", flush=True)
        return
    target = wheels.resolve() / "installed"
    files = sorted(map(str, wheels.glob("*.whl")))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--upgrade"]
    subprocess.run([*pip, "--target", str(target), *files], check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(target), os.environ.get("PYTHONPATH")]))


def _run(command: Command, seconds: float, folder: Path, options: argparse.Namespace) -> int:
    """Runs the command and returns its exit status, 124 if it was ended. Its children are ended with it."""
    results = sorted(map(str, folder.glob("step_*_cuda.json"))) or sorted(
        map(str, RESULTS.glob("step_*_cuda.json"))
    )
    # Seconds: less those that it needs to write its results.
    values = {"{seconds}": str(int(seconds - 15)), "{to}": str(folder), "{tokens}": options.tokens}
    arguments = [
        part
        for word in command.arguments
        for part in (results if word == "{results}" else [values.get(word, word)])
    ]
    arguments = [word for word in arguments if not (options.all and word == "--skip-done")]
    paths = [str(_ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    print("$ python " + " ".join(arguments), flush=True)
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=_ROOT, env=environment, start_new_session=True
    ) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            return 124


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=PARTS, required=True)
    parser.add_argument("--all", action="store_true", help="also what ran before")
    parser.add_argument("--seconds-limit", type=float, default=_PART_SECONDS)
    parser.add_argument(
        "--tokens", default="runs/demo_estonian", help="run folder with real text, for the convergence of FP8"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels, where packages are missing")
    parser.add_argument("--to", default=str(RESULTS), help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
