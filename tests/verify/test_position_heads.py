"""`kielo verify position-heads`: the loss tells how an LTG-BERT's positions were cut into heads."""

import json
from pathlib import Path

import pytest

from kielo.cli.main import main
from kielo.verify.source_folder import WAYS, verify_position_heads
from tests.counting_encoder import text, trained


@pytest.mark.parametrize("way", [pytest.param(WAYS[0], marks=pytest.mark.full), *WAYS[1:]])
def test_the_way_that_was_trained_has_the_lower_loss(tmp_path: Path, way: str, capsys) -> None:
    """By a fifth of a nat. Where the file says another way, the command says so, with exit code 1 and what
    would work.
    """
    folder, lines = trained(tmp_path, way, 150), text(tmp_path, 900)
    (other,) = set(WAYS) - {way}
    result = verify_position_heads(str(folder), lines)
    assert result["passed"] and result["taken"] == way and result["hidden_tokens"] > 100
    assert result["losses"][way] < result["losses"][other] - 0.2
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"position_heads": other}))
    assert main(["verify", "position-heads", str(folder), str(lines)]) == 1
    out = capsys.readouterr().out
    assert f'"position_heads": "{way}" in' in out and "config.json" in out


def test_text_of_less_than_a_sequence_and_other_models_are_refused(tmp_path: Path, capsys) -> None:
    folder = trained(tmp_path, "concatenated", 0)
    assert main(["verify", "position-heads", str(folder), str(text(tmp_path, 7))]) == 1
    assert "7 tokens of text, and one sequence of this model has 15" in capsys.readouterr().err
    assert main(["verify", "position-heads", str(folder), str(tmp_path / "none.txt")]) == 1
    assert "none.txt" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert main(["verify", "position-heads", str(folder), str(text(tmp_path, 70))]) == 1
    assert "config.json" in capsys.readouterr().err


def test_the_first_64_sequences_of_a_text_count_each_of_128_tokens_at_most(tmp_path: Path, capsys) -> None:
    """A seventh of their tokens is hidden. Of a model with more positions a sequence has 127 and the end."""
    folder = trained(tmp_path, "concatenated", 0)
    whole, longer, shorter = (
        verify_position_heads(str(folder), text(tmp_path, 15 * number)) for number in (64, 66, 63)
    )
    assert whole == longer and 0.1 < whole["hidden_tokens"] / (64 * 15) < 0.2
    assert shorter["hidden_tokens"] < whole["hidden_tokens"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 200}))
    assert main(["verify", "position-heads", str(folder), str(text(tmp_path, 70))]) == 1
    assert "70 tokens of text, and one sequence of this model has 127" in capsys.readouterr().err
