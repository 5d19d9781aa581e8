"""Verbs on a terminal of 80 columns print no longer line, and cut nothing.

This holds for the help and the usual output of each verb. A line may be longer if it is a single word, such
as a path, which nothing can break. Refusals are one line each, for terminals and logs to break, and JSON is
for machines.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

from kielo.artifact.launch_files import Launch
from kielo.artifact.stage_json import write_json
from kielo.cli.main import command_line, main
from tests.counting_encoder import text, trained
from tests.docs.toy_text import SCRIPTS

COLUMNS = 80
STEP_10, STEP_20 = (f"run/train/checkpoints/step_{step:08d}" for step in (10, 20))
# Verb, with a note where it has several → how it is called beside a finished run in the folder `run`.
SCREENS = {
    "init": ["init", "--language", "Finnish", "--params", "3B", "--cluster", "lumi"],
    "init: from a run": ["init", "--from", "run", "--text", "text.txt"],
    "init: from a script": ["init", "--from-megatron", "pretrain.sh", "--language", "fi"],
    "docs": ["docs"],
    "run: again": ["run", "run"],
    "train: finished": ["train", "run"],
    "train: dry run": ["train", "run", "--dry-run"],
    "plan": ["plan", "poro_34b", "--nodes", "64"],
    "plan: several": ["plan", "estonian_llama31_70b", "--nodes", "4..64"],
    "plan: an idea": ["plan", "--params", "3B", "--cluster", "lumi_g", "--nodes", "4"],
    "plan: a budget": ["plan", "--budget", "20000h", "--corpus", "6.6B", "--cluster", "lumi_g"],
    "plan compare": ["plan", "compare", "estonian_llama31_70b", "tp8pp4", "tp8pp8", "--nodes", "16"],
    "plan explain": ["plan", "explain", "estonian_llama31_70b", "tp8pp4", "--nodes", "16"],
    "plan data": ["plan", "data", "run"],
    "plan resolve": ["plan", "resolve", "run", "--ranks", "2"],
    "plan calibrate": ["plan", "calibrate", "run/train/metrics.jsonl", "--to", "machine.toml"],
    "rehearse": ["rehearse", "run", "--ranks", "2"],
    "preflight": ["preflight", "run"],
    "site": ["site"],
    "site: of a cluster": ["site", "lumi_g"],
    "site: a new one": ["site", "--new", "my_site"],
    "prefetch": ["prefetch", "run", "--to", "brought"],
    "launch": ["launch", "estonian_llama31_70b", "--cluster=lumi_g", "--account=project_1", "--dry-run"],
    "status": ["status", "run"],
    "cancel": ["cancel", "run"],
    "verify parity": ["verify", "parity", "run"],
    "verify layouts": ["verify", "layouts", "run", "--case", "tensor2"],
    "verify round-trip": ["verify", "round-trip", "run/hf"],
    "verify export": ["verify", "export", "run"],
    "verify position-heads": ["verify", "position-heads", "hf", "text.txt"],
    "evaluate": ["evaluate", "run"],
    "report": ["report", "run"],
    "generate": ["generate", "run", "Kord", "--tokens", "4"],
    "export": ["export", "run", "--to", "my_model"],
    "export: gguf": ["export", "run", "--to", "my_gguf", "--format", "gguf"],
    "publish": ["publish", "run", "./shared", "--yes"],
    "tokenizer measure": ["tokenizer", "measure", "run/tokenizer", "run/hf", "--text", "text.txt"],
    "tokenizer measure: a model": [
        "tokenizer",
        "measure",
        "run/tokenizer",
        "run/hf",
        "--heldout",
        "run",
        "--model",
        "run",
        "--bytes",
        "1GB",
    ],
    "tokenizer map": ["tokenizer", "map", "run/tokenizer", "run/hf"],
    "checkpoint list": ["checkpoint", "list", "run"],
    "checkpoint show": ["checkpoint", "show", "run"],
    "checkpoint show: tensors": ["checkpoint", "show", "run", "--tensors"],
    "checkpoint verify": ["checkpoint", "verify", "run"],
    "checkpoint copy": ["checkpoint", "copy", "run", "--to", "memory://copies"],
    "checkpoint average": ["checkpoint", "average", STEP_10, STEP_20, "--to", "mean"],
    "data": ["data", "run", "--step", "3"],
    "show": ["show", "poro_34b"],
    "show: a run": ["show", "run"],
    "recipes": ["recipes"],
    "recipes: copy": ["recipes", "--copy", "demo_estonian"],
    "schema": ["schema"],
    "clusters": ["clusters"],
    "languages": ["languages"],
    "languages: a card": ["languages", "se"],
}
SLOW = {"verify layouts", "verify export"}
# A conversation, and the script of a shell, which tests of their own hold.
WITHOUT_SCREEN = {"chat", "completion"}


def verbs() -> Iterator[tuple[str, bool]]:
    """Yields each verb and subverb of the command line, and whether it is only a group of subverbs."""
    for name, parser in command_line().subverbs.items():
        parser.declare_flags()
        yield name, bool(parser.subverbs) and name != "plan"
        for subverb in parser.subverbs:
            yield f"{name} {subverb}", False


def lines(screen: str) -> list[str]:
    """The lines that a terminal showed, those of a progress bar one after another."""
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen))


def too_long(screen: str) -> list[str]:
    """The lines that do not fit, but for single words, and those that were cut."""
    return [
        line for line in lines(screen) if (cell_len(line) > COLUMNS and " " in line.strip()) or "…" in line
    ]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys):
    """printed(*arguments) → what the verb prints on a terminal, in this process."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stdout for a terminal
    monkeypatch.setenv("COLUMNS", str(COLUMNS))

    def call(*arguments: str) -> str:
        code = main(arguments)
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return call


def test_every_verb_has_a_screen() -> None:
    """A new verb fails here until it has a case."""
    shown = {name.partition(":")[0] for name in SCREENS}
    assert shown | WITHOUT_SCREEN == {verb for verb, is_group in verbs() if not is_group}


@pytest.mark.parametrize("verb", ["", *(verb for verb, _ in verbs())])
def test_help_has_80_columns(verb: str, printed) -> None:
    screen = printed(*verb.split(), "--help")
    assert "usage: kielo" in screen and not [line for line in too_long(screen) if "0,5,…" not in line]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in SLOW else name for name in SCREENS]
)
def test_a_screen_has_80_columns(name, printed, finished, tmp_path: Path, monkeypatch) -> None:
    recipe, _ = finished
    monkeypatch.chdir(tmp_path)
    shutil.copytree(recipe.parent / "run", "run", symlinks=True)
    shutil.copy(recipe.parent / "text.txt", ".")
    if name == "init: from a script":
        shutil.copy(SCRIPTS / "viking_7b.sh", "pretrain.sh")
    if name in ("status", "cancel"):
        write_launch_of(Path("run"))
    if name == "verify position-heads":
        trained(Path(), "concatenated", 40)
        text(Path(), 900)
    screen = printed(*SCREENS[name])
    assert screen.strip() and too_long(screen) == []


def write_launch_of(run: Path) -> None:
    """A launch whose one attempt was stopped, and none of whose jobs the scheduler still has."""
    asked = {"cluster": "lumi_g", "scheduler": "slurm", "job_name": "run", "partition": "standard-g"}
    numbers = {"nodes": 2, "spares": 0, "devices": 16, "wall_seconds": 9, "grace_seconds": 3, "jobs": 4}
    rest = {"forecast": None, "no_forecast": "none", "versions": {}, "created_at": ""}
    chain = run / "launch" / "0001" / "chain"
    chain.mkdir(parents=True)
    write_json(chain.parent, Launch(**asked, **numbers, **rest))
    told = "stopped after step 10 of 20 and saved as run/train/checkpoints/step_00000010; start it again"
    (chain / "attempts").write_text(f"start\t7\t0\t2\t1000\t\t\nend\t7\t0\t2\t4600\trequeue\t{told}\n")


def test_the_screen_of_a_first_run_has_80_columns(first_run) -> None:
    """Progress bars, the log of the training, the certificate of parity and the summary."""
    shown = " ".join(lines(first_run.screen))
    assert "20/20 loss" in shown and "Parity with Hugging Face holds" in shown
    assert too_long(first_run.screen) == []
    # torchao warns at import of kernels that this machine's wheels lack
    assert "Failed to load" not in shown and "_pytree" not in shown


def test_a_line_that_does_not_fit_is_found() -> None:
    """Broken on purpose."""
    long = "word " * 17
    assert too_long(f"short\n\x1b[2m{long}\x1b[0m\nfolded…\n/{'path/' * 20}\n") == [long, "folded…"]


def test_a_plan_says_where_nothing_fits_and_where_the_recipes_own_layout_is_best(capsys) -> None:
    """Several numbers of nodes, of which one is too few; and a recipe that has the best layout already."""
    anew = ["--set", "layout.recompute=full"]
    assert main(["plan", "estonian_llama31_70b", "--nodes", "2,4", *anew]) == 0
    printed = capsys.readouterr().out
    assert "No layout fits on 2 nodes." in printed and "slower than the fastest by" in printed
    assert main(["plan", "estonian_llama31_70b", "--nodes", "4", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["layouts"][0]
    keys = ("tensor", "pipeline", "pipeline_schedule", "pipeline_stages_per_rank", "zero", "recompute")
    own = [f"layout.{key}={best['layout'][key]}" for key in keys if best["layout"][key] is not None]
    own += [f"train.micro_batch_sequences={best['micro_batch_sequences']}"]
    sets = [word for one in own for word in ("--set", one)]
    assert main(["plan", "estonian_llama31_70b", "--nodes", "4", *sets]) == 0
    printed = capsys.readouterr().out
    assert "The recipe's own layout (*) is the fastest." in printed and "-norms+activations *" in printed


def test_a_plan_answers_in_a_short_table(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, the fastest layouts with days and what the site bills, and the recipe's own beside them."""
    assert main(["plan", "poro_34b", "--nodes", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "model\tbloom, 34.2 billion parameters" in lines
    titles = next(line for line in lines if line.startswith("nodes\ttokens/s")).split("\t")
    hours = [line.split("\t") for line in lines if line.startswith("64\t") and "hours\t" in line]
    rows = [line.split("\t") for line in lines if line.startswith("64\t") and "hours\t" not in line]
    assert [row[1] for row in hours] == ["device-hours", "GPU-hours"]
    assert titles == ["nodes", "tokens/s", "GB", "days", "device-hours", "GPU-hours", "layout"]
    assert 2 <= len(rows) <= 10 and [row for row in rows if row[-1].endswith("*")]
    for row in rows:  # LUMI bills a whole MI250X, which is two devices
        device_hours, billed = (float(cell.replace(",", "")) for cell in row[4:6])
        assert billed == pytest.approx(device_hours / 2, abs=1)
