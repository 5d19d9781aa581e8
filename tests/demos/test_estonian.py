"""The demos as a newcomer runs them, minutes long: real text in, a model better than its baselines out."""

import json

import pytest

from kielo.artifact.checkpoint_inspection import newest_checkpoint
from kielo.evaluate.contender import load_checkpoint
from kielo.evaluate.minimal_pairs import score_pairs
from kielo.evaluate.pair_files import read_pairs
from kielo.models.blocks.decoder import init_weights
from kielo.resolve.resolved import read
from tests.cli.test_run import kielo


@pytest.mark.full
@pytest.mark.timeout(1900)  # beside two other processes on two cores
def test_the_demo_beats_its_baselines_and_equals_hugging_face(tmp_path):
    """`kielo run demo_estonian`: fewer bits per byte than unigram, xz and 6-gram, losses within 1e-5 of
    Hugging Face's. It finds the right suffix of words, first weights do not.
    """
    folder = tmp_path / "demo"
    settings = (f"folder={folder}", "evaluate.made_pairs=1000")
    sets = [word for one in settings for word in ("--set", one)]
    process = kielo("run", "demo_estonian", "--json", *sets, is_online=True)
    stdout, stderr = process.communicate(timeout=1800)
    assert process.returncode == 0, stderr
    summary = json.loads(stdout)
    bits = summary["bits_per_byte"]
    assert bits["model"] < min(bits["unigram"], bits["xz"], bits["ngram"])
    assert summary["parity"]["steps"] == 20 and summary["parity"]["max_relative_loss_difference"] <= 1e-5
    # half of the text is English
    assert 0 < summary["corpus"]["bytes_kept"] < summary["corpus"]["bytes_in"] / 2
    scores = json.loads((folder / "evaluate" / "scores.json").read_text(encoding="utf-8"))
    swap = scores["made_pairs"]["groups"]["suffix_swap"]
    assert swap["pairs"] > 500 and swap["likelihood"] >= 0.5 + 4 * swap["standard_error"]
    contender = load_checkpoint(
        newest_checkpoint(folder), read(folder / "resolved.toml"), folder / "tokenizer"
    )
    init_weights(contender.module, seed=5)
    pairs = read_pairs(folder / "evaluate" / "made_pairs.jsonl")
    first = score_pairs(contender, [pair for pair in pairs if pair.group == "suffix_swap"], "").all
    assert first.pairs == swap["pairs"] and first.likelihood < 0.5 + 4 * first.standard_error


@pytest.mark.full
@pytest.mark.timeout(1900)  # beside two other processes on two cores
def test_the_demo_of_an_encoder_beats_its_baselines(tmp_path):
    """`kielo run demo_estonian_bert`: of a hundred hidden tokens it predicts over 20 more than the bigram,
    over 30 more than the unigram, and over 1 more than bigrams of both neighbours.
    """
    process = kielo(
        "run",
        "demo_estonian_bert",
        "--json",
        "--set",
        f"folder={tmp_path / 'demo'}",
        is_online=True,
    )
    stdout, stderr = process.communicate(timeout=1800)
    assert process.returncode == 0, stderr
    accuracy = json.loads(stdout)["masked_tokens"]
    assert accuracy["model"] > accuracy["neighbours"] + 0.01
    assert accuracy["model"] > accuracy["bigram"] + 0.20 and accuracy["model"] > accuracy["unigram"] + 0.30
    scores = json.loads((tmp_path / "demo" / "evaluate" / "masked_scores.json").read_text(encoding="utf-8"))
    assert scores["hidden_tokens"] > 3000 and len(scores["filled_masks"]) == 6
