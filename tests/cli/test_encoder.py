"""An encoder from raw text to its scores, export and report, on forty lines."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, pipeline

from kielo.verify.round_trip import verify_round_trip
from tests.cli.test_run import kielo, write_recipe

FAMILIES = pytest.mark.parametrize(
    ("model_type", "key"),
    [("ltg_bert", "model.position_bucket_size=8"), ("modernbert", "model.sliding_window=9")],
)


@pytest.mark.full
@FAMILIES
def test_a_run_of_an_encoder_goes_through_every_stage(tmp_path: Path, model_type: str, key: str) -> None:
    """The summary has hidden tokens in place of bits per byte, the export the published names, its tokenizer
    the roles; what an encoder has not is said and not shown. A ModernBERT's export fills masks.
    """
    recipe = write_recipe(tmp_path)
    sets = (
        f"model.model_type={model_type}", key, "train.objective=masked_tokens",
        "train.learning_rate=1e-2", "train.attention_dropout=0.1", 'evaluate.prompts=["ja [MASK]"]',
    )  # fmt: skip
    process = kielo("run", str(recipe), "--json", *(word for one in sets for word in ("--set", one)))
    stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stderr
    summary, folder = json.loads(stdout), tmp_path / "run"
    assert summary["bits_per_byte"]["model"] is None and not (folder / "verify").exists()
    scores = json.loads((folder / "evaluate" / "masked_scores.json").read_text())
    assert summary["masked_tokens"] == scores["accuracy"] and scores["hidden_tokens"] > 20
    assert scores["masking_rate"] == 0.15 and 0 < scores["loss"] < 10
    page, card = (folder / "report.html").read_text(), (folder / "hf" / "README.md").read_text()
    assert "Hidden tokens" in page and "bits per byte, held-out" not in page
    assert "fill-mask" in card and "modeling_ltgbert" not in card and "generate" not in card
    assert not (folder / "hf" / "generation_config.json").exists()
    assert verify_round_trip(str(folder / "hf"))["passed"]
    assert scores["pseudo_bits_per_byte"]["token"] > 0 and "Hidden words" in page
    process = kielo("evaluate", str(folder))
    table, stderr = process.communicate(timeout=200)
    assert process.returncode == 0 and "neighbours" in table and "pseudo bits per byte" in table, stderr
    process = kielo("generate", str(folder), "ja [MASK]", "--json")
    filled = json.loads(process.communicate(timeout=200)[0])
    assert filled["prompt"] == "ja [MASK]" and len(filled["fillings"]) == 5
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf")
    if model_type == "modernbert":
        assert "pipeline(" in card and len(pipeline("fill-mask", model=str(folder / "hf"))("[MASK] ja")) == 5
    assert tokenizer.mask_token_id == 4 and tokenizer("ja").input_ids[0] == tokenizer.cls_token_id == 2


@pytest.mark.full
@FAMILIES
def test_a_run_of_the_hybrid_objective_scores_both_uses(tmp_path: Path, model_type: str, key: str) -> None:
    """Hidden tokens, and bits per byte beside a decoder's baselines with samples; page and card have both."""
    recipe = write_recipe(tmp_path)
    sets = (
        f"model.model_type={model_type}", key, "train.objective=masked_tokens",
        "train.learning_rate=1e-2", "train.causal_share=0.5", "train.tokens=12800",
    )  # fmt: skip
    process = kielo("run", str(recipe), "--json", *(word for one in sets for word in ("--set", one)))
    stdout, stderr = process.communicate(timeout=400)
    assert process.returncode == 0, stderr
    summary, folder = json.loads(stdout), tmp_path / "run"
    scores = json.loads((folder / "evaluate" / "scores.json").read_text())
    masked = json.loads((folder / "evaluate" / "masked_scores.json").read_text())
    # 320 tokens alike are log(320) = 5.77 nats each.
    bits = summary["bits_per_byte"]
    assert 0 < bits["model"] == scores["bits_per_byte"]["model"] < 1.5 * bits["unigram"]
    assert masked["accuracy"] == summary["masked_tokens"] and masked["loss"] < 5.7
    assert len(scores["samples"]) == 3
    page, card = (folder / "report.html").read_text(), (folder / "hf" / "README.md").read_text()
    assert "Hidden tokens" in page and "bits per byte, held-out" in page and "Parity" not in page
    assert "masked and causal" in card and "position before it" in card and "pipeline(" not in card
    process = kielo("evaluate", str(recipe), *(word for one in sets for word in ("--set", one)))
    stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 0, stderr
    assert "hidden tokens predicted" in stdout and "bits per byte" in stdout
