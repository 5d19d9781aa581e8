"""Every bar that needs a GPU, in parts of at most nine minutes: `make bench-gpu PART=1`, to 7.

It first looks at what the machine has, and runs nothing if a GPU or a package is missing. A part is a list
of commands, each with its own process and time limit. What a command found lies under --to as soon as it is
known, and how it ended in gpu_parts.json there: the same command again does only what is missing (--all does
everything). A command that fails does not stop the others, and the exit status is 0 only if each command of
the part measured something.

The machine may have no network: `make gpu-wheels` fetches the packages elsewhere (--fetch-wheels FOLDER), and
--wheels FOLDER unpacks them into its subfolder `unpacked`, without pip, and puts that first on the path.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_ROOT = next(above for above in Path(__file__).resolve().parents if (above / "pyproject.toml").exists())
RESULTS = _ROOT / "benchmarks" / "results"
_SCRATCH = _ROOT / "runs" / "gpu"  # checkpoints, which are too large for --to
_FETCHED = "fetched_wheels.txt"
PART_SECONDS = 540
LOOK_SECONDS = 25
_MARGIN_SECONDS = 25  # of a command, to start in and to write what it found
_LEAST_SECONDS = 40  # less is not worth beginning
_TIMED_OUT, _NOTHING_RAN = 124, 5
_MEANINGS = {3: "it has no figures; the result's left_out says why", 75: "stopped before its end"}

# What the benchmarks and the tests marked gpu import, and a machine with torch and transformers may lack:
# a distribution → its module. constraints.lock has their versions, except torchao's, which goes with torch.
PACKAGES = {
    "annotated-types": "annotated_types",
    "orjson": "orjson",
    "pydantic": "pydantic",
    "pydantic_core": "pydantic_core",
    "torchao": "torchao",
    "typing-inspection": "typing_inspection",
    "typing_extensions": "typing_extensions",
    "zstandard": "zstandard",
}
# And what such a machine has: torch, transformers and what they bring, and what tests need.
_PRESENT = (
    "torch", "transformers", "accelerate", "huggingface_hub", "jinja2", "numpy", "pyarrow", "pytest", "regex",
    "safetensors", "tokenizers", "tqdm", "xxhash",
)  # fmt: skip
_TORCHAO = {"2.10": "0.16.0", "2.11": "0.17.0", "2.13": "0.18.0"}
_WHEELS_FOR = ("3.12", "2.11")  # Python and torch of the machine
_PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
MOST_BYTES = 64 * 2**20
_LEAST_DEVICE_BYTES = {2: 120 * 10**9}  # two layers of 172B: 6.0e9 parameters of 18 bytes, and activations

# The files of the tests marked gpu. Collecting all tests takes a minute, and imports what is not there.
GPU_TESTS = {
    "tests/train/test_gpu.py": 95,
    "tests/train/test_no_waits.py": 70,
    "tests/train/test_feed.py": 35,
    "tests/train/test_loss.py": 35,
    "tests/models/test_attention_dropout.py": 55,
    "tests/models/test_flex.py": 130,
}


@dataclass(frozen=True)
class Command:
    """A command to run on a GPU: `arguments` after the name of the interpreter.

    `seconds`: after so many it is ended; {seconds} in an argument is replaced by what it may plan with.
    report: pytest's, in which at least one test must have run.
    """

    name: str
    arguments: tuple[str, ...]
    seconds: int
    report: Path | None = None


def _script(name: str) -> str:
    return str(next((_ROOT / "benchmarks").rglob(name)).relative_to(_ROOT))


def _step(shape: str, contender: str, seconds: int, moments: str = "fp32") -> Command:
    """Returns the command of one contender's steps, as many up to six turns as time allows.

    A step of many micro-batches is warm after one step, and long enough to be timed alone. moments: AdamW's.
    """
    name = f"step {shape} {contender}" + ", moments in bf16" * (moments == "bf16")
    options = (
        f"--shape {shape} --precision bf16 --device cuda --contenders {contender} --join --moments {moments} "
        "--pairs 6 --warm-up 1 --steps-per-turn 1 --parts --seconds-limit {seconds} --to {to} --skip-done"
    )
    return Command(name, (_script("step.py"), *options.split()), seconds)


def _convergence(run: str, seconds: int) -> Command:
    """Returns the command of one run of 150 steps; its checkpoint stays on the machine, its rows under --to.

    It is asked to stop 25 s before its end, and saves.
    """
    options = (
        f"--shape llama_1b --steps 150 --run {run} --tokens {{tokens}} --folder {{to}}/fp8_convergence "
        f"--scratch {{scratch}} --to {{to}} --seconds-limit {seconds - 10} --grace-seconds 15"
    )
    return Command(f"fp8 convergence, {run}", (_script("fp8_convergence.py"), *options.split()), seconds)


def _tests(file: str, seconds: int) -> Command:
    report = _SCRATCH / f"{Path(file).stem}.xml"
    arguments = ("-m", "pytest", "-m", "gpu", "-q", "-rs", "-p", "no:cacheprovider", f"--junit-xml={report}")
    return Command(file, (*arguments, file), seconds, report)


PARTS: dict[int, list[Command]] = {
    1: [_step("llama_8b", name, 170) for name in ("kielo", "trainer", "kielo-fp8")],
    2: [_step("llmjp_172b", name, 170) for name in ("kielo", "trainer", "kielo-fp8")],
    # The first of each precision compiles.
    3: [_convergence("bf16", 150), _convergence("fp8", 165), _convergence("bf16_to_fp8", 200)],
    # With moments in bf16 more layers fit the device, so that the step is more like the whole model's.
    4: [
        *(_tests(file, seconds) for file, seconds in GPU_TESTS.items()),
        _step("llama_8b", "kielo", 95, "bf16"),
    ],
    # Parts 5 to 7 need the engines of `make bench-peers`.
    5: [
        _step("llama_8b", "kielo-fp8", 100, "bf16"),
        *(
            _step("llama_1b", name, 80)
            for name in ("kielo", "kielo-fp8", "trainer", "torchtitan", "torchtitan-fp8")
        ),
    ],
    6: [
        *(_step("llama_1b", name, 75) for name in ("megatron", "megatron-fp8")),
        *(
            _step("llmjp_172b", name, 90)
            for name in ("torchtitan", "torchtitan-fp8", "megatron", "megatron-fp8")
        ),
    ],
    7: [_convergence("fp8_head", 165), *(_step("llama_1b", name, 120) for name in ("litgpt", "olmo-core"))],
}


def main() -> None:
    options = _options()
    if options.fetch_wheels:
        sys.exit(fetch_wheels(options.fetch_wheels))
    ends = time.monotonic() + options.seconds_limit
    folder = Path(options.to).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    _SCRATCH.mkdir(parents=True, exist_ok=True)
    if options.wheels is not None:
        unpacked = options.wheels.resolve() / "unpacked"
        unpack(options.wheels, unpacked)
        sys.path.insert(0, str(unpacked))
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(unpacked), os.environ.get("PYTHONPATH")])
        )
    machine = look()
    (folder / "gpu_machine.json").write_text(json.dumps(machine, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(machine, indent=1), flush=True)
    complaints = list(shortcomings(machine, options))
    if complaints:
        sys.exit("\n".join(complaints))
    sys.exit(0 if run_part(options.part, folder, ends, options) else 1)


def look() -> dict[str, Any]:
    """Return what is here: Python, the GPU as torch sees it, and versions of packages."""
    program = (
        "import json, torch; gpu = torch.cuda.is_available();"
        "p = torch.cuda.get_device_properties(0) if gpu else None;"
        "print(json.dumps({'cuda': torch.version.cuda or torch.version.hip, 'gpu': p and p.name,"
        "'gpu_memory_bytes': p and p.total_memory, 'free_bytes': gpu and torch.cuda.mem_get_info()[0]}))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=LOOK_SECONDS - 5
        )
        seen = json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr.strip()[-500:]}
    except subprocess.TimeoutExpired:
        seen = {"error": f"torch did not answer within {LOOK_SECONDS - 5} s"}
    others = ("torch", "triton", "transformers", "accelerate", "numpy", "pytest", "pytest-timeout")
    return {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "compilers": [name for name in ("gcc", "g++", "nvcc") if shutil.which(name)],
        **seen,
        "versions": {name: _installed(name) for name in (*others, *PACKAGES)},
        "missing": [name for name, module in PACKAGES.items() if find_spec(module) is None],
        "missing_others": [name for name in _PRESENT if find_spec(name) is None],
    }


def shortcomings(machine: dict[str, Any], options: argparse.Namespace) -> Iterator[str]:
    """Yield why the part cannot run here."""
    if not machine.get("gpu"):
        yield f"torch sees no GPU here: {machine.get('error') or 'torch.cuda.is_available() is False'}"
    if machine["missing"]:
        yield (
            f"missing: {', '.join(machine['missing'])}. Fix: make gpu-wheels where there is a network, and "
            "--wheels .wheels here"
        )
    if machine["missing_others"]:
        yield f"missing: {', '.join(machine['missing_others'])}. Fix: another Python, PYTHON=..."
    needed, free = _LEAST_DEVICE_BYTES.get(options.part, 0), machine.get("free_bytes") or 0
    if machine.get("gpu") and free < needed:
        yield (
            f"part {options.part} takes {needed / 1e9:.0f} GB of a GPU; {free / 1e9:.0f} GB are free. "
            "Fix: a larger GPU, such as an H200"
        )
    text = _ROOT / options.tokens
    lacking = [name for name in ("tokens", "tokenizer") if not (text / name / "manifest.json").exists()]
    if options.part == 3 and lacking:
        yield (
            f"--tokens {options.tokens}: {' and '.join(lacking)} missing. Fix: bring the folders of a run "
            "along (kielo run demo_estonian --to pack)"
        )


def run_part(part: int, folder: Path, ends: float, options: argparse.Namespace) -> bool:
    """Run what is missing of a part; return True if each command of it has measured something by now."""
    notes = folder / "gpu_parts.json"
    ran = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    outcomes = {}
    for command in PARTS[part]:
        key = f"{part} {command.name}"
        if ran.get(key, {}).get("status") == 0 and not options.all:
            outcomes[key] = f"ran on {ran[key]['date']}"
            continue
        left = min(command.seconds, ends - time.monotonic())
        if left < min(command.seconds, _LEAST_SECONDS):
            outcomes[key] = "NOT RUN: no time left; the same command again begins here"
            continue
        begun = time.monotonic()
        status, why = _run(command, left, folder, options)
        seconds = round(time.monotonic() - begun, 1)
        ran[key] = {"status": status, "why": why, "seconds": seconds, "date": date.today().isoformat()}
        notes.write_text(json.dumps(ran, indent=1) + "\n", encoding="utf-8")
        outcomes[key] = f"ran in {seconds} s" if status == 0 else f"NO RESULT after {seconds} s: {why}"
        print(f"{key}: {outcomes[key]}", flush=True)
    print("\n".join(["", *(f"{key}: {outcome}" for key, outcome in outcomes.items())]), flush=True)
    return all(ran.get(f"{part} {command.name}", {}).get("status") == 0 for command in PARTS[part])


def _run(command: Command, seconds: float, folder: Path, options: argparse.Namespace) -> tuple[int, str]:
    """Return the command's exit status and what it means. Its children end with it."""
    values = {"{seconds}": str(int(seconds - _MARGIN_SECONDS)), "{tokens}": options.tokens}
    values |= {"{scratch}": str(_SCRATCH), "{to}": str(folder)}
    arguments = [word for word in command.arguments if not (options.all and word == "--skip-done")]
    for name, value in values.items():
        arguments = [word.replace(name, value) for word in arguments]
    paths = [str(_ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if command.report is not None:
        command.report.unlink(missing_ok=True)
    print("$ python " + " ".join(arguments), flush=True)
    with subprocess.Popen(
        [sys.executable, *arguments], cwd=_ROOT, env=environment, start_new_session=True
    ) as process:
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return _TIMED_OUT, f"ended after {seconds:.0f} s; what it had written stays"
        finally:
            # Also children that outlive a command.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
    if status == 0 and command.report is not None:
        return tests_that_ran(command.report)
    return status, _MEANINGS.get(status, f"exit status {status}") if status else ""


def tests_that_ran(report: Path) -> tuple[int, str]:
    """Return (0, "") if a test of pytest's report ran, else a status with the reasons of those skipped."""
    cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    skipped = [case.find("skipped") for case in cases if case.find("skipped") is not None]
    if len(skipped) < len(cases):
        return 0, ""
    reasons = sorted({one.get("message", "") for one in skipped})
    return _NOTHING_RAN, f"all {len(skipped)} tests were skipped: {'; '.join(reasons)}"


def unpack(wheels: Path, target: Path) -> None:
    """Unpack each wheel of a folder into `target`, as pip would, without its scripts."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)


def fetch_wheels(folder: Path) -> int:
    """Fetch the wheels of `PACKAGES`, and check their size and that each can be imported.

    Replaces what an earlier call fetched, which `_FETCHED` in the folder lists, and nothing else.
    """
    python, torch = _WHEELS_FOR
    folder.mkdir(parents=True, exist_ok=True)
    fetched = folder / _FETCHED
    if not fetched.exists() and any(folder.iterdir()):
        print(f"{folder}: not empty, and without {_FETCHED}. Fix: name a new folder", file=sys.stderr)
        return 1
    listed = fetched.read_text(encoding="utf-8").splitlines() if fetched.exists() else []
    for old in folder.glob("*.whl"):
        if old.name in listed:
            old.unlink()
    shutil.rmtree(folder / "unpacked", ignore_errors=True)  # by --wheels
    fetched.write_text("", encoding="utf-8")
    asked = [f"{name}=={number}" for name, number in wheel_versions(torch).items()]
    options = ["--no-deps", "--only-binary", ":all:", "--python-version", python, "--implementation", "cp"]
    options += [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    pip = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), *options, *asked]
    before = set(folder.glob("*.whl"))
    is_done = subprocess.run(pip).returncode == 0
    new = sorted(wheel.name for wheel in set(folder.glob("*.whl")) - before)
    fetched.write_text("".join(f"{name}\n" for name in new), encoding="utf-8")
    if not is_done:
        return 1
    size = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    print(f"{len(asked)} wheels, {size / 2**20:.1f} MiB, for Python {python} and torch {torch} in {folder}")
    if size > MOST_BYTES:
        print(f"they are larger than {MOST_BYTES / 2**20:.0f} MiB")
        return 1
    with tempfile.TemporaryDirectory() as empty:
        unpack(folder, Path(empty))
        found = [_checked(module, Path(empty), _python(python)) for module in PACKAGES.values()]
    print("\n".join(line for _, line in found))
    return 0 if all(is_well for is_well, _ in found) else 1


def wheel_versions(torch: str) -> dict[str, str]:
    """Return each package's version: that of constraints.lock, and the torchao of this torch."""
    lock = (_ROOT / "constraints.lock").read_text(encoding="utf-8")
    locked = {
        name: re.search(rf"(?im)^{re.escape(name)}==(\S+)$", lock).group(1)
        for name in PACKAGES
        if name != "torchao"
    }
    return locked | {"torchao": _TORCHAO[torch]}


def _python(number: str) -> str | None:
    """Return an interpreter of this version, if the machine has one."""
    name = f"python{number}"
    homes = sorted((Path.home() / ".pyenv" / "versions").glob(f"{number}*/bin/{name}"))
    for found in filter(None, (shutil.which(name), *map(str, homes))):
        if subprocess.run([found, "-V"], capture_output=True).returncode == 0:
            return found
    return None


def _checked(module: str, folder: Path, python: str | None) -> tuple[bool, str]:
    """Return whether the module of the unpacked wheels is sound, and a line that says how that was found.

    Without site-packages, so that a module which is missing is not found elsewhere. What asks for torch is
    judged by its file names.
    """
    if not (folder / module).exists() and not list(folder.glob(f"{module}.*")):
        return False, f"{module}: not in the wheels"
    if python is not None:
        program = (
            "import importlib, sys; sys.path.insert(0, sys.argv[1]); importlib.import_module(sys.argv[2])"
        )
        done = subprocess.run(
            [python, "-I", "-S", "-c", program, str(folder), module], capture_output=True, text=True
        )
        error = (done.stderr.strip().splitlines() or [""])[-1]
        if done.returncode == 0:
            return True, f"{module}: imported by {python}"
        if "'torch'" not in error:
            return False, f"{module}: {error}"
    tags = _tags(module, folder)
    is_well = any(re.match(r"(py3|cp312)-|cp3\d+-abi3-", tag) for tag in tags)
    return is_well, f"{module}: not imported, only its tags were checked: {', '.join(tags)}"


def _tags(module: str, folder: Path) -> list[str]:
    (wheel,) = folder.glob(f"{module}-*.dist-info/WHEEL")
    return re.findall(r"(?m)^Tag: (\S+)$", wheel.read_text(encoding="utf-8"))


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=PARTS, default=1)
    parser.add_argument("--all", action="store_true", help="also what ran before")
    parser.add_argument("--seconds-limit", type=float, default=PART_SECONDS)
    parser.add_argument(
        "--tokens", default="runs/demo_estonian", help="run folder with real text, for the convergence of FP8"
    )
    parser.add_argument("--wheels", type=Path, help="folder of wheels, where packages are missing")
    parser.add_argument("--fetch-wheels", type=Path, metavar="FOLDER", help="fetch and check these wheels")
    parser.add_argument("--to", default=str(RESULTS), help="folder of the results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
