"""BLiMP on a model of the demo's English: minutes long, and only if its file is there."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.evaluate.contender import load_checkpoint
from kielo.evaluate.minimal_pairs import pair_likelihoods
from kielo.evaluate.pair_files import Pair, read_pairs
from kielo.models.blocks.decoder import init_weights
from kielo.resolve.resolved import read
from tests.cli.test_run import kielo
from tests.house.checks import ROOT

BLIMP = ROOT.parent / "shared" / "data" / "blimp.zip"
OF_A_PARADIGM, OF_UNTRAINED, COMPARED = 300, 100, 10
TERM = "filler_gap_dependency"  # both sentences have as many tokens
pytestmark = [pytest.mark.full, pytest.mark.skipif(not BLIMP.is_file(), reason=f"{BLIMP} is not there")]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`kielo run demo_english`, for two CPU minutes of training, with the first pairs of each paradigm."""
    folder = tmp_path_factory.mktemp("blimp")
    with zipfile.ZipFile(BLIMP) as archive, zipfile.ZipFile(folder / "some.zip", "w") as some:
        for name in archive.namelist():
            if name.endswith(".jsonl") and not name.startswith("__MACOSX"):
                lines = archive.read(name).splitlines(keepends=True)
                some.writestr(name, b"".join(lines[:OF_A_PARADIGM]))
    settings = (
        f"folder={folder / 'run'}",
        "train.tokens=400000",
        f"evaluate.minimal_pairs={folder}/some.zip",
    )
    sets = [word for one in settings for word in ("--set", one)]
    process = kielo("run", "demo_english", *sets, is_online=True)
    _, stderr = process.communicate(timeout=1500)
    assert process.returncode == 0, stderr
    return folder / "run"


@pytest.mark.timeout(1600)  # beside two other processes on two cores
def test_a_model_of_the_demos_english_beats_chance(run_folder: Path) -> None:
    """By four standard errors. That alone shows little: fewer tokens alone are right in more than half."""
    found = json.loads((run_folder / "evaluate" / "scores.json").read_text(encoding="utf-8"))["minimal_pairs"]
    paradigms = found["groups"]
    assert len(paradigms) == 67 and {one["pairs"] for one in paradigms.values()} == {OF_A_PARADIGM}
    assert len(found["terms"]) == 13 and found["all"]["pairs"] == 67 * OF_A_PARADIGM
    assert found["all"]["likelihood"] >= 0.5 + 4 * found["all"]["standard_error"]
    gap = found["terms"][TERM]
    assert gap["fewer_tokens"] == 0.5 and gap["likelihood"] >= 0.5 + 4 * gap["standard_error"]


@pytest.mark.timeout(1600)
def test_models_without_training_beat_chance_by_short_sentences_alone(run_folder: Path) -> None:
    """So all pairs show little. None beats it if both sentences have as many tokens."""
    pairs = _first_of_each(run_folder.parent / "some.zip", OF_UNTRAINED)
    resolved = read(run_folder / "resolved.toml")
    contender = load_checkpoint(newest_checkpoint(run_folder), resolved, run_folder / "tokenizer")
    is_of_term = np.array([pair.term == TERM for pair in pairs])
    for seed in (1, 2):
        with torch.no_grad():
            init_weights(contender.module, seed)
        nats, tokens = pair_likelihoods(contender, pairs)
        is_right = nats[:, 0] > nats[:, 1]
        assert is_right.mean() > 0.5 + 2 * (0.25 / len(pairs)) ** 0.5
        is_shorter = tokens[:, 0] < tokens[:, 1]
        assert is_right[is_shorter].mean() > 0.9 > 0.1 > is_right[tokens[:, 0] > tokens[:, 1]].mean()
        assert is_right[is_of_term].mean() < 0.5 + 4 * (0.25 / is_of_term.sum()) ** 0.5


@pytest.mark.timeout(600)
def test_a_plain_script_chooses_the_same_sentences(run_folder: Path) -> None:
    """transformers on the export, a sentence at a time, as the harness begins it: the same choices."""
    folder, pairs = run_folder / "hf", _first_of_each(run_folder.parent / "some.zip", COMPARED)
    resolved = read(run_folder / "resolved.toml")
    ours = load_checkpoint(newest_checkpoint(run_folder), resolved, run_folder / "tokenizer")
    found, _ = pair_likelihoods(ours, pairs)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    expected = []
    for sentence in (sentence for pair in pairs for sentence in (pair.good, pair.bad)):
        ids = torch.tensor([[start, *tokenizer.encode(f" {sentence}", add_special_tokens=False)]])
        with torch.inference_mode():
            nats = model(ids).logits[0, :-1].log_softmax(-1)
        expected.append(nats[torch.arange(ids.shape[1] - 1), ids[0, 1:]].double().sum().item())
    theirs = np.reshape(expected, (-1, 2))
    np.testing.assert_allclose(found, theirs, rtol=1e-4)
    assert len(pairs) == 67 * COMPARED
    np.testing.assert_array_equal(found[:, 0] > found[:, 1], theirs[:, 0] > theirs[:, 1])


def _first_of_each(path: Path, number: int) -> list[Pair]:
    """Return the first pairs of each paradigm."""
    seen, pairs = dict[str, int](), list[Pair]()
    for pair in read_pairs(path):
        seen[pair.group] = seen.get(pair.group, 0) + 1
        pairs += [pair] if seen[pair.group] <= number else []
    return pairs
