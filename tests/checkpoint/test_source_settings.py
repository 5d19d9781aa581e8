"""An export keeps the settings and side files of its source; transformers reads both folders alike."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from kielo.artifact.run_format import with_version
from kielo.checkpoint.checkpointer import Checkpointer
from kielo.checkpoint.hugging_face_export import export
from kielo.checkpoint.source_settings import read_settings
from kielo.models.families import read_hf_config
from kielo.models.llama.model import Llama
from kielo.tokenizer.chat_template import end_of_answers
from kielo.tokenizer.load import load_tokenizer
from kielo.verify.round_trip import verify_round_trip

# Ids 0 to 4. With weights of zero all logits are equal, so a greedy model writes id 0.
CONTROL = ["<|eot|>", "<|end|>", "<|pad|>", "<|bos|>", "<|user|>"]
CHAT = (
    "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|bos|>' }}{{ m.content }}"
    "{{ '<|eot|>\n' }}{% endfor %}"
)
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROLES = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05}


def write_tokenizer(folder: Path, control: list[str] = CONTROL, template: str | None = CHAT) -> Path:
    """A byte-level tokenizer whose first ids are control tokens, with a file in another program's format."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(control)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **ROLES}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.model").write_bytes(b"as SentencePiece has it")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(template + "{{ tools }}")
    return folder


def write_source(folder: Path, generation: dict[str, Any] | None, **config: Any) -> Path:
    """Weights of zero, a tokenizer and settings, as transformers saves them."""
    write_tokenizer(folder)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(CONTROL) + 256, **SIZES, **config))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if generation is not None:
        GenerationConfig(**generation).save_pretrained(folder)
    return folder


def in_and_out(source: Path, to: Path) -> Path:
    assert verify_round_trip(f"hf:{source}", keep=to)["passed"]
    return to


def generation_of(folder: Path) -> GenerationConfig:
    return AutoModelForCausalLM.from_pretrained(folder).generation_config


@pytest.mark.parametrize(
    ("generation", "config"),
    [
        ({"eos_token_id": [1, 0], "pad_token_id": 2, "bos_token_id": 3, **SAMPLING}, {}),
        ({"eos_token_id": [0, 3, 1], "suppress_tokens": [4], "bad_words_ids": [[7, 8], [9]]}, {}),
        ({"eos_token_id": [1, 0], "max_new_tokens": 33, "num_beams": 2, "length_penalty": 0.8}, {}),
        (None, {"eos_token_id": [1, 0], "bos_token_id": 3, "pad_token_id": 2}),
        ({"eos_token_id": [0, 1]}, {"eos_token_id": [0, 1], "bos_token_id": 4, "pad_token_id": 1}),
    ],
    ids=["sampling", "forbidden words", "beams", "config.json alone", "odd roles"],
)
def test_settings_are_those_of_the_source(generation, config, tmp_path) -> None:
    """transformers reads equal settings of generation, ids of the model and chat templates from both."""
    source = write_source(tmp_path / "source", generation, **config)
    folder = in_and_out(source, tmp_path / "out")
    assert generation_of(folder) == generation_of(source)
    ours, theirs = (json.loads((one / "config.json").read_text()) for one in (folder, source))
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert theirs[key] in (None, ours[key])
    tokenizer, original = (AutoTokenizer.from_pretrained(one) for one in (folder, source))
    assert tokenizer.chat_template == original.chat_template and set(original.chat_template) == {
        "default", "tool_use",
    }  # fmt: skip
    for name in ("tokenizer.model", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("generation", [None, {"eos_token_id": 1, "do_sample": False}, SAMPLING])
def test_a_model_stops_at_the_end_of_its_answer(generation, tmp_path) -> None:
    """The template ends answers by <|eot|>, which no setting of the source names."""
    source = write_source(tmp_path / "source", generation, eos_token_id=1, bos_token_id=3, pad_token_id=2)
    folder = in_and_out(source, tmp_path / "out")
    model, asked = AutoModelForCausalLM.from_pretrained(folder), torch.tensor([[4, 70, 0, 3]])
    assert model.generation_config.eos_token_id == [1, 0]
    written = model.generate(asked, max_new_tokens=8, do_sample=False, attention_mask=torch.ones_like(asked))
    assert written.tolist() == [[4, 70, 0, 3, 0]]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHAT, "<|eot|>"),
        # Strips answers, and has a mark between turns that ends none.
        ("{% for m in messages %}{{ '<|user|>' + m.content | trim + '\n<|end|>' }}{% endfor %}", "<|end|>"),
        # The last answer ends otherwise than those before it, as gpt-oss writes them.
        (
            "{% for m in messages %}{{ m.content + ('<|end|>' if loop.last else '<|eot|>') }}{% endfor %}",
            "<|end|>",
        ),
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n\n' }}{% endfor %}", None),
        (None, None),
    ],
    ids=["mark", "stripped", "last", "text", "none"],
)
def test_the_end_of_answers(template, end, tmp_path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=template))
    assert end_of_answers(tokenizer) == (None if end is None else CONTROL.index(end))


def test_ids_become_those_of_another_tokenizer(tmp_path) -> None:
    """By the names that transformers has; what the other vocabulary lacks is told and left out."""
    generation = {
        "eos_token_id": [1, 0, 4], "pad_token_id": 2, "suppress_tokens": [3, 4],
        "bad_words_ids": [[4, 9], [9]], "sequence_bias": [[[1, 9], -2], [[4], 5]], "do_sample": True,
        "temperature": 0.5,
    }  # fmt: skip
    source = write_source(tmp_path / "source", generation)
    control = ["<|more|>", "<|bos|>", "<|end|>", "<|eot|>", "<|pad|>", "<|extra|>", "<|other|>"]
    other = write_tokenizer(tmp_path / "other", control)
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (source, other))

    def renumbered(number: int) -> int:
        return new.convert_tokens_to_ids(old.convert_ids_to_tokens(number))

    end, eot, pad, nine = map(renumbered, (1, 0, 2, 9))
    settings = read_settings(source, other)
    assert settings["generation"] == json.loads((source / "generation_config.json").read_text()) | {
        "eos_token_id": [end, eot], "pad_token_id": pad, "suppress_tokens": [renumbered(3)],
        "bad_words_ids": [[nine]], "sequence_bias": [[[end, nine], -2]],
    }  # fmt: skip
    assert settings["left_out"] == [
        f"{key} 4 (<|user|>) is no token of the run's tokenizer"
        for key in ("bad_words_ids", "eos_token_id", "sequence_bias", "suppress_tokens")
    ]


@pytest.mark.parametrize("is_there", [True, False])
def test_checkpoints_of_earlier_versions(is_there, tmp_path, caplog) -> None:
    """They keep no settings: these are read where the weights are, and a warning says where they are not."""
    generation = {"eos_token_id": [1, 0], "pad_token_id": 2, **SAMPLING}
    source = write_source(tmp_path / "source", generation)
    weights = source if is_there else tmp_path / "gone"
    model = read_hf_config(source).model_copy(update={"weights": f"hf:{weights}"})
    checkpointer = Checkpointer(tmp_path / "checkpoints")
    tensors = {f"model/{name}": torch.zeros_like(value) for name, value in Llama(model).state_dict().items()}
    identity = with_version({"name": "old", "model": model.model_dump(mode="json")})
    checkpointer.save(3, tensors, {"identity": identity})
    with caplog.at_level(logging.WARNING):
        folder = export(checkpointer.settle(), tmp_path / "out", model, source)
    checkpointer.close()
    if is_there:
        assert generation_of(folder) == generation_of(source) and not caplog.records
    else:
        assert generation_of(folder).eos_token_id == [1, 0]
        said = f"hf:{weights} no longer exists"
        assert said in caplog.text and "Fix: bring the folder back" in caplog.text
