"""Odd but real conversations: ids and masks are those of transformers, or the record is refused by name."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kielo.artifact.documents import read_documents
from kielo.corpus.corpus_stage import run_corpus
from kielo.dataset.document_packer import DocumentEncoder
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe
from kielo.tokenizer.load import load_tokenizer

# As those of Qwen and others are: `generation` marks what an assistant writes, for transformers alone.
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>\n' }}{{ call.function | tojson }}{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ASK, ANSWER = {"role": "user", "content": "Mis ilm on?"}, {"role": "assistant", "content": "Viis kraadi."}
CALL = {
    "type": "function",
    "function": {"name": "ilm", "arguments": {"linn": "Tartu <|im_end|>", "osa": "<õu> & 'aed'"}},
}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": '{"kraadid": 5}'}
TOOLS = [{"type": "function", "function": {"name": "ilm", "parameters": {"type": "object"}}}]
MORE = [{"role": "user", "content": "Ja homme?"}, {"role": "assistant", "content": "Kuus."}]


@dataclass(frozen=True)
class Kind:
    """A record, and the messages and tools that it stands for; None where it is refused with `refusal`.

    without: numbers of answers that carry no loss.
    """

    record: dict[str, Any]
    messages: list[dict[str, Any]] | None
    tools: list[Any] | None = None
    without: tuple[int, ...] = ()
    refusal: str = ""
    write: Callable[[Path, dict[str, Any]], Path] | None = None
    keys: dict[str, Any] = field(default_factory=dict)


def as_table(folder: Path, record: dict[str, Any]) -> Path:
    """With null for the keys that a message lacks, as tables have it."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), folder / "a.parquet")
    return folder / "a.parquet"


def of(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages)} | more


WITH_TOOLS = [ASK, CALLS, RESULT, ANSWER]
KINDS: dict[str, Kind] = {
    "a tool call with its result": Kind(of(*WITH_TOOLS, tools=TOOLS), WITH_TOOLS, TOOLS),
    "tools as JSON in a text": Kind(of(*WITH_TOOLS, tools=json.dumps(TOOLS)), WITH_TOOLS, TOOLS),
    "a call with null for its content": Kind(of(ASK, CALLS | {"content": None}, RESULT, ANSWER), WITH_TOOLS),
    "a call with words before it": Kind(
        of(ASK, CALLS | {"content": "Vaatan."}, RESULT, ANSWER),
        [ASK, CALLS | {"content": "Vaatan."}, RESULT, ANSWER],
    ),
    "two calls at once": Kind(
        of(ASK, CALLS | {"tool_calls": [CALL, CALL]}, RESULT, ANSWER),
        [ASK, CALLS | {"tool_calls": [CALL, CALL]}, RESULT, ANSWER],
    ),
    "reasoning": Kind(
        of(ASK, ANSWER | {"reasoning_content": "Talv, niisiis külm."}),
        [ASK, ANSWER | {"reasoning_content": "Talv, niisiis külm."}],
    ),
    "reasoning and a call in a table": Kind(
        of(ASK, CALLS | {"reasoning_content": "Küsin."}, RESULT, ANSWER),
        [ASK, CALLS | {"reasoning_content": "Küsin."}, RESULT, ANSWER],
        write=as_table,
    ),
    "an answer of weight 0": Kind(
        of(ASK, ANSWER | {"weight": 0}, *MORE), [ASK, ANSWER, *MORE], without=(0,)
    ),
    "a call of weight 0": Kind(of(ASK, CALLS | {"weight": 0}, RESULT, ANSWER), WITH_TOOLS, without=(0,)),
    "train is false": Kind(of(ASK, ANSWER | {"train": False}, *MORE), [ASK, ANSWER, *MORE], without=(0,)),
    "weight 1 is a usual one": Kind(of(ASK, ANSWER | {"weight": 1}), [ASK, ANSWER]),
    "half a weight": Kind(of(ASK, ANSWER | {"weight": 0.5}), None, refusal="its weight is 0.5. Fix: 0 or 1"),
    "content in parts": Kind(
        of(ASK | {"content": [{"type": "text", "text": one} for one in ("Mis ", "ilm on?")]}, ANSWER),
        [ASK, ANSWER],
    ),
    "a picture among the parts": Kind(
        of({"role": "user", "content": [{"type": "image", "image": "a.png"}]}, ANSWER), None,
        refusal="has parts of image, and not only text",
    ),
    "Alpaca": Kind(
        {"instruction": "Mis ilm", "input": "on?", "output": "Viis kraadi."},
        [{"role": "user", "content": "Mis ilm\non?"}, ANSWER],
    ),
    "Alpaca without input, with a system text and a past": Kind(
        {"instruction": "Ja homme?", "input": "", "output": "Kuus.", "system": "Ole lühike.",
         "history": [["Mis ilm on?", "Viis kraadi."]]},
        [{"role": "system", "content": "Ole lühike."}, ASK, ANSWER, *MORE],
    ),
    "Alpaca in a table": Kind(
        {"instruction": "Mis ilm on?", "input": None, "output": "Viis kraadi."}, [ASK, ANSWER], write=as_table
    ),
    "prompt and completion": Kind({"prompt": "Mis ilm on?", "completion": "Viis kraadi."}, [ASK, ANSWER]),
    "prompt and completion of messages": Kind({"prompt": [ASK], "completion": [ANSWER]}, [ASK, ANSWER]),
    "ShareGPT's calls": Kind(
        {"conversations": [
            {"from": "human", "value": "Mis ilm on?"},
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"from": "observation", "value": RESULT["content"]}, {"from": "gpt", "value": "Viis kraadi."}],
         "tools": json.dumps(TOOLS)},
        WITH_TOOLS, TOOLS,
    ),
    "a developer's message": Kind(
        of({"role": "developer", "content": "Ole lühike."}, ASK, ANSWER),
        [{"role": "system", "content": "Ole lühike."}, ASK, ANSWER],
    ),
    "an unknown role": Kind(of(ASK, {"role": "narrator", "content": "x"}), None, refusal="unknown role"),
    "tools that are no list": Kind(of(ASK, ANSWER, tools={"a": 1}), None, refusal="its 'tools' are no list"),
    "no question and no list": Kind({"text": "Tere"}, None, refusal="'messages' is missing"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(characters)}, merges=[]))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    # As Qwen has them: added, and not special.
    whole.add_tokens([AddedToken(name, special=False) for name in ("<tool_call>", "</tool_call>")])
    whole.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def theirs(folder: Path, kind: Kind) -> tuple[list[int], list[int]]:
    """Returns the ids and the mask of transformers; what a message spells of a mark is text there only by
    spelling it otherwise, so it is taken out of both.
    """
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=TEMPLATE, eos_token="<|endoftext|>"
    )
    found = tokenizer.apply_chat_template(
        kind.messages, tools=kind.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return found["input_ids"], found["assistant_masks"]


@pytest.mark.parametrize("name", KINDS)
def test_conversations_are_those_of_transformers(name: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    """Each kind through the corpus stage; ids and loss of its answers."""
    kind = KINDS[name]
    plain = json.loads(json.dumps(kind.record).replace(" <|im_end|>", ""))
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(plain) + "\n", encoding="utf-8")
    if kind.write is not None:
        path = kind.write(tmp_path, plain)
    source = {"name": "chats", "path": str(path), "kind": "instructions", "loss": "answers"}
    recipe = Recipe(name="t", language="et", corpus=Corpus(sources=[source], workers=1))
    if kind.messages is None:
        with pytest.raises(KieloError, match=kind.refusal):
            run_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", progress=False)
        return
    run_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", progress=False)
    documents = list(read_documents(tmp_path / "corpus" / "documents"))
    tokenizer = load_tokenizer(tokenizer_folder)
    end = tokenizer.whole.token_to_id("<|endoftext|>")
    (one,) = DocumentEncoder(recipe, tokenizer, end).encode(documents)
    ids, mask = theirs(tokenizer_folder, Kind(**vars(kind) | {
        "messages": json.loads(json.dumps(kind.messages).replace(" <|im_end|>", "")),
    }))  # fmt: skip
    assert one.ids.tolist() == ids
    answers = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    for number in kind.without:
        mask[answers[2 * number] : answers[2 * number + 1]] = [0] * (
            answers[2 * number + 1] - answers[2 * number]
        )
    assert one.loss_mask[:-1].astype(int).tolist() == mask


def test_marks_that_a_call_spells_are_text(tokenizer_folder: Path, tmp_path: Path) -> None:
    """An argument that spells the end of a turn does not end it."""
    (tmp_path / "a.jsonl").write_text(json.dumps(of(*WITH_TOOLS)) + "\n", encoding="utf-8")
    source = {"name": "chats", "path": str(tmp_path / "a.jsonl"), "kind": "instructions", "loss": "answers"}
    recipe = Recipe(name="t", language="et", corpus=Corpus(sources=[source], workers=1))
    run_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", progress=False)
    tokenizer = load_tokenizer(tokenizer_folder)
    (one,) = DocumentEncoder(recipe, tokenizer, 256).encode(
        list(read_documents(tmp_path / "corpus" / "documents"))
    )
    marks = [tokenizer.whole.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>")]
    assert [int((one.ids == mark).sum()) for mark in marks] == [4, 4]


def test_a_weight_where_all_tokens_carry_loss_is_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(of(ASK, ANSWER | {"weight": 0}, *MORE)) + "\n")
    source = {"name": "chats", "path": str(tmp_path / "a.jsonl"), "kind": "instructions"}
    recipe = Recipe(name="t", language="et", corpus=Corpus(sources=[source], workers=1))
    run_corpus(recipe, tmp_path / "corpus", tmp_path / "raw", progress=False)
    documents = list(read_documents(tmp_path / "corpus" / "documents"))
    with pytest.raises(KieloError, match='message 2: has the weight 0.*loss = "answers" in the source'):
        DocumentEncoder(recipe, load_tokenizer(tokenizer_folder), 256).encode(documents)
