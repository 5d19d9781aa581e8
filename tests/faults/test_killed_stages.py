"""Runs of other kinds, killed in any stage: an encoder, and a second language with an extended tokenizer.

The whole command is killed as a file of a stage appears, with all that it started, and started again: the
tokens, the tokenizer and the last weights are those of a run that was left alone.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.checkpoint.read_checkpoint import read_tensors
from tests.faults.trial import belongings, rest_marked_full, went_well

ENCODER = ("model.model_type=ltg_bert", "model.position_bucket_size=8", "train.objective=masked_tokens")
EXTENDED = (
    "tokenizer.extend=run/hf", "tokenizer.vocab_size=360", "model.weights=hf:run/hf", "model.transplant=mean",
)  # fmt: skip
NAMES = {"encoder": ENCODER, "extended": EXTENDED}
# The moment: when the first file of this pattern is there.
MOMENTS = (
    "corpus/manifest.json", "tokenizer*/tokenizer.json", "tokenizer/manifest.json", "tokens*/**/*.bin",
    "tokens/manifest.json", "train/metrics.jsonl", "train/checkpoints/*.partial", "train/checkpoints/step_*5",
    "train/checkpoints/newest", "hf*/model.safetensors",
)  # fmt: skip
# The second language's corpus and training are as any other's: only what it makes of its tokenizer differs.
OF_EXTENDED = ("tokenizer*/tokenizer.json", "tokenizer/manifest.json", "tokens/manifest.json", MOMENTS[-1])
CASES = [("encoder", moment) for moment in MOMENTS] + [("extended", moment) for moment in OF_EXTENDED]
KEPT = [("extended", "tokenizer*/tokenizer.json")]  # tests/faults/test_kills.py kills trainings


def words(kind: str, folder: str) -> list[str]:
    sets = [*NAMES[kind], f"folder={folder}", f"name={kind}"]
    return ["run", "tiny.toml", "--to", "export", *(word for one in sets for word in ("--set", one))]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Path]:
    """Kind → a workplace with a whole run `left_alone`, made when it is first asked for."""
    return {}


def whole(undisturbed: dict[str, Path], finished: Path, here, kind: str) -> Path:
    if kind not in undisturbed:
        copy = finished.parent.parent / f"undisturbed {kind}"
        undisturbed[kind] = Path(shutil.copytree(finished, copy, symlinks=True))
        went_well(here(copy, *words(kind, "left_alone")))
    return undisturbed[kind]


def kill_when(workplace: Path, run: Path, kind: str, moment: str) -> bool:
    """Starts the run and kills it as the file appears; returns False if it ended before."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kielo", *words(kind, run.name)], cwd=workplace, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while process.poll() is None and not any(run.glob(moment)):
            time.sleep(0.002)
        return process.poll() is None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("case", rest_marked_full(CASES, KEPT), ids=" ".join)
def test_killed_and_started_again(undisturbed, finished: Path, here, case: tuple[str, str]) -> None:
    kind, moment = case
    before = whole(undisturbed, finished, here, kind) / "left_alone"
    run = finished / "killed"
    assert kill_when(finished, run, kind, moment), "the run ended before it was killed"
    went_well(here(finished, *words(kind, "killed")))
    for stage, same in (("tokenizer", "tokenizer.json"), ("tokens", "text.bin"), ("hf", "model.safetensors")):
        assert belongings(run / stage)[same] == belongings(before / stage)[same], stage
    ours, theirs = (read_tensors(newest_checkpoint(folder)) for folder in (run, before))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(ours[name], theirs[name]), name
    left = [path for path in run.rglob("*") if ".partial" in path.name or path.name.endswith(".tmp")]
    assert not left, left
