"""CTranslate2 on exports of tiny models: where it gives Kielo's numbers, and where the check is needed."""

import json
from pathlib import Path

import pytest
import torch

from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.export_stage import ExportOptions
from kielo.checkpoint.hugging_face_export import export
from kielo.tokenizer.load import load_tokenizer
from kielo.tokenizer.spelling import pre_tokenizer
from kielo.verify.serving_programs import PROGRAMS, CannotServeError, Question
from tests.checkpoint.test_gguf_export import trained
from tests.models.equality import pair
from tests.models.tiny_configs import TINY

LIMIT = PROGRAMS["CTranslate2"].limit("", Path())
# Models that CTranslate2 4.8 loads and computes differently: docs/hand_over.md names them.
DIFFERENT = (
    "llama, llama3 rope, tied", "llama, linear rope, biases, wide heads", "qwen2", "gemma2",
    "gpt2, untied, exact gelu, narrow", "bloom, six heads, untied",
)  # fmt: skip
CANNOT = {
    "olmo2": "No conversion is registered for the model configuration Olmo2Config",
    "gpt_neox": "rotary_pct",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    folder = trained(tmp_path_factory.mktemp("tokenizer"), pre_tokenizer())
    roles = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | roles
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bloom", *DIFFERENT, *CANNOT])
def test_ctranslate2_is_compared_with_kielo(name: str, tokenizer: Path, tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    rows = load_tokenizer(tokenizer).whole.get_vocab_size()
    ours, _ = pair(TINY[name] | {"vocab_size": rows}, tmp_path / "theirs")
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    checkpointer.save(1, {f"model/{key}": value for key, value in ours.state_dict().items()}, {})
    export(checkpointer.settle(), tmp_path / "out", ours.config, tokenizer, ExportOptions("fp32"))
    ids = torch.randint(1, rows, (20,), generator=torch.Generator().manual_seed(1))
    question = Question(sequences=[ids.tolist()], new_tokens=6, end=0)
    if name in CANNOT:
        with pytest.raises(CannotServeError, match=CANNOT[name]):
            PROGRAMS["CTranslate2"].answer(tmp_path / "out", question)
        return
    found = PROGRAMS["CTranslate2"].answer(tmp_path / "out", question)
    with torch.no_grad():
        logs_sv = ours.logits(ours(ids[None]))[0].log_softmax(-1)
    right = logs_sv[:-1].gather(-1, ids[1:, None])[:, 0]
    difference = (torch.tensor(found["log_probabilities"][0]) - right).abs().max().item()
    assert (difference > LIMIT) == (name in DIFFERENT), difference
