"""The demo of two languages, minutes long, and BLiMP on its English model, if BLiMP's file is there."""

import json
import zipfile
from collections.abc import Iterator
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
pytestmark = [pytest.mark.full, pytest.mark.timeout(1900)]  # beside two other processes on two cores
with_blimp = pytest.mark.skipif(not BLIMP.is_file(), reason=f"{BLIMP} is not there")


def summary_of(recipe: str, *settings: str) -> dict:
    sets = [word for one in settings for word in ("--set", one)]
    process = kielo("run", recipe, "--json", *sets, is_online=True)
    stdout, stderr = process.communicate(timeout=1800)
    assert process.returncode == 0, stderr
    return json.loads(stdout)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which people would call `kielo run`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("project"))
        yield folder


@pytest.fixture(scope="module")
def summary(project: Path) -> dict:
    """`kielo run demo_new_language` first makes the weights of demo_english; this is what it prints."""
    return summary_of("demo_new_language")


@pytest.fixture(scope="module")
def english(project: Path, summary: dict) -> Path:
    """The folder of `kielo run demo_english`, with the first pairs of each paradigm."""
    with zipfile.ZipFile(BLIMP) as archive, zipfile.ZipFile("some.zip", "w") as some:
        for name in archive.namelist():
            if name.endswith(".jsonl") and not name.startswith("__MACOSX"):
                lines = archive.read(name).splitlines(keepends=True)
                some.writestr(name, b"".join(lines[:OF_A_PARADIGM]))
    stages = summary_of("demo_english", "evaluate.minimal_pairs=some.zip")["stages"]
    assert stages["train"]["skipped"] and not stages["evaluate"]["skipped"]
    return project / "runs" / "demo_english"


def test_a_model_of_a_new_language_beats_its_baselines(summary: dict) -> None:
    bits = summary["bits_per_byte"]
    assert bits["model"] < min(bits["unigram"], bits["xz"], bits["ngram"]) and summary["parity"]["passed"]


@with_blimp
def test_a_model_of_the_demos_english_beats_chance(english: Path) -> None:
    """By four standard errors. That alone shows little: fewer tokens alone are right in more than half."""
    found = json.loads((english / "evaluate" / "scores.json").read_text(encoding="utf-8"))["minimal_pairs"]
    paradigms = found["groups"]
    assert len(paradigms) == 67 and {one["pairs"] for one in paradigms.values()} == {OF_A_PARADIGM}
    assert len(found["terms"]) == 13 and found["all"]["pairs"] == 67 * OF_A_PARADIGM
    assert found["all"]["likelihood"] >= 0.5 + 4 * found["all"]["standard_error"]
    gap = found["terms"][TERM]
    assert gap["fewer_tokens"] == 0.5 and gap["likelihood"] >= 0.5 + 4 * gap["standard_error"]


@with_blimp
def test_models_without_training_beat_chance_by_short_sentences_alone(english: Path) -> None:
    """So all pairs show little. None beats it if both sentences have as many tokens."""
    pairs = _first_of_each(english.parents[1] / "some.zip", OF_UNTRAINED)
    resolved = read(english / "resolved.toml")
    contender = load_checkpoint(newest_checkpoint(english), resolved, english / "tokenizer")
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


@with_blimp
def test_a_plain_script_chooses_the_same_sentences(english: Path) -> None:
    """transformers on the export, a sentence at a time, as the harness begins it: the same choices."""
    folder, pairs = english / "hf", _first_of_each(english.parents[1] / "some.zip", COMPARED)
    resolved = read(english / "resolved.toml")
    ours = load_checkpoint(newest_checkpoint(english), resolved, english / "tokenizer")
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
