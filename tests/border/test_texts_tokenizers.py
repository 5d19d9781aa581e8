"""Odd tokenizer folders: Kielo's ids are AutoTokenizer's on odd texts, or the folder is refused by name.

An export of each folder has a configuration by which AutoTokenizer gives Kielo's ids, whatever its own says.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from kielo.checkpoint.auto_tokenizer import agreed_files, compare_folder, odd_sample
from kielo.dataset.query import SampleDocument
from kielo.recipe.errors import KieloError
from kielo.tokenizer.load import encode, load_tokenizer, write_without_dropout

PIECES = (
    "Tere", " maailm", "  ", "\n", "\t", "ÕÄÖ", "šž", "12345", "3.14", "don't", " I'LL", "नमस्ते", "สวัสดี",
    "你好",
    "e\u0301", "ﬁ", "👩‍👧", "\u00a0", "_x__y", "def f(x):\n    return x",
    "https://a.b/c?d=e", "CAPS", "!", "aaaa",
    "Straße", "ΑΒΓ", "а б", "\u200b", "{}[]()", "--", "...", "\r\n",
)  # fmt: skip
QWEN = Regex(r"\p{N}|\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@cache
def odd_texts() -> tuple[str, ...]:
    """200 texts, each of a few pieces; the first begins with a space."""
    draw = random.Random(38)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 8))) for _ in range(198)]
    return (" algab tühikuga", "tavaline lause, mis lõpeb.", *texts)


def byte_level(split: Any = None, dropout: float | None = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    tokenizer.pre_tokenizer = level
    if split is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(split, "isolated"), level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>", "<s>", "</s>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(odd_texts(), trainer)
    tokenizer.model.dropout = dropout
    return tokenizer


def llama(frame: bool = True) -> Tokenizer:
    """As Llama 2's: SentencePiece's BPE with bytes for unknown characters, spaces by the normaliser."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", "<|im_end|>"]
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=special + of_bytes, limit_alphabet=60, show_progress=False
    )
    tokenizer.train_from_iterator(odd_texts(), trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][: len(special)]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if frame:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(odd_texts(), trainer)
    return tokenizer


def word_piece(is_lower: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=is_lower, strip_accents=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=names, show_progress=False)
    tokenizer.train_from_iterator([*odd_texts(), *(text.lower() for text in odd_texts())], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


BERT_ROLES = {
    "pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}  # fmt: skip


def with_content(tokenizer: Tokenizer, change: Callable[[dict[str, Any]], Any]) -> Tokenizer:
    content = json.loads(tokenizer.to_str())
    change(content)
    return Tokenizer.from_str(json.dumps(content))


@dataclass(frozen=True)
class Folder:
    """A kind of folder. config: None for none. refusal: words of it, none if the ids are AutoTokenizer's.

    warned: words of the warning. others: further files, JSON by name.
    """

    tokenizer: Callable[[], Tokenizer]
    config: dict[str, Any] | None
    refusal: tuple[str, ...] = ()
    warned: str = ""
    others: dict[str, Any] = field(default_factory=dict)
    model_type: str | None = None


def of_class(name: str, **keys: Any) -> dict[str, Any]:
    return {"tokenizer_class": name, **ROLES, **keys}


FIX = '"tokenizer_class": "PreTrainedTokenizerFast"'
FOLDERS = {
    "the file alone": Folder(byte_level, None, others={"special_tokens_map.json": ROLES}),
    "a GPT-2 as GPT-2": Folder(byte_level, of_class("GPT2Tokenizer")),
    "another split as GPT-2": Folder(lambda: byte_level(QWEN), of_class("GPT2Tokenizer"), (FIX,)),
    "another split as Qwen 2": Folder(lambda: byte_level(QWEN), of_class("Qwen2Tokenizer"), (FIX,)),
    "another split as GPT-NeoX": Folder(lambda: byte_level(QWEN), of_class("GPTNeoXTokenizerFast"), (FIX,)),
    "another split as it is": Folder(lambda: byte_level(QWEN), of_class("PreTrainedTokenizerFast")),
    "a space before each text": Folder(byte_level, of_class("GPT2Tokenizer", add_prefix_space=True), (FIX,)),
    "a Llama as Llama": Folder(llama, of_class("LlamaTokenizer"), (FIX, "algab tühikuga")),
    "a Llama, legacy": Folder(llama, of_class("LlamaTokenizerFast", legacy=True), (FIX,)),
    "a Llama without a space before": Folder(
        llama, of_class("LlamaTokenizer", add_prefix_space=False), (FIX,)
    ),
    "a Llama as it is": Folder(llama, of_class("PreTrainedTokenizerFast", legacy=False)),
    "a Llama as Gemma": Folder(llama, of_class("GemmaTokenizer"), (FIX,)),
    "a Llama as T5": Folder(llama, of_class("T5TokenizerFast"), ("AutoTokenizer does not read it", FIX)),
    "a Llama of a Qwen 2": Folder(llama, of_class("PreTrainedTokenizerFast"), model_type="qwen2"),
    "a class that nobody has": Folder(llama, of_class("NoSuchTokenizer")),
    "code of its own": Folder(llama, of_class("Own", auto_map={"AutoTokenizer": ["own.Own", None]}), (FIX,)),
    "no frame, and add_bos_token": Folder(
        lambda: llama(frame=False), of_class("PreTrainedTokenizerFast", add_bos_token=True)
    ),
    "a Unigram as T5": Folder(unigram, of_class("T5Tokenizer"), (FIX,)),
    "a Unigram as XLM-R": Folder(unigram, of_class("XLMRobertaTokenizer"), (FIX,)),
    "a Unigram as it is": Folder(unigram, of_class("PreTrainedTokenizerFast")),
    "capitals, as a lower-casing BERT": Folder(
        lambda: word_piece(False),
        {"tokenizer_class": "BertTokenizer", "do_lower_case": True, **BERT_ROLES},
        (FIX,),
    ),
    "lower case, as a BERT with capitals": Folder(
        lambda: word_piece(True),
        {"tokenizer_class": "BertTokenizer", "do_lower_case": False, **BERT_ROLES},
        (FIX,),
    ),
    "marks that are split": Folder(
        byte_level, of_class("PreTrainedTokenizerFast", split_special_tokens=True)
    ),
    "a word that the configuration adds": Folder(
        byte_level,
        of_class(
            "PreTrainedTokenizerFast",
            added_tokens_decoder={"420": {"content": "maailm", "special": False, "normalized": False}},
        ),
        (FIX, "without added_tokens_decoder"),
    ),
    "padding that the vocabulary lacks": Folder(
        byte_level, of_class("PreTrainedTokenizerFast", pad_token="[PAD]"), warned="adds 1 tokens"
    ),
    "padding that is a letter": Folder(
        byte_level, of_class("PreTrainedTokenizerFast", pad_token="a"), (FIX,)
    ),
    "added_tokens.json": Folder(
        byte_level,
        of_class("PreTrainedTokenizerFast"),
        (FIX, "without added_tokens.json"),
        others={"added_tokens.json": {"maailm": 420}},
    ),
    "two ends of text": Folder(
        byte_level,
        of_class("PreTrainedTokenizerFast"),
        ("documents end with 2", "<|im_end|>", FIX),
        others={"special_tokens_map.json": ROLES | {"eos_token": "<|im_end|>"}},
    ),
    "two ends, of which it reads ours": Folder(
        byte_level,
        of_class("PreTrainedTokenizerFast", added_tokens_decoder={}),
        others={"special_tokens_map.json": ROLES | {"eos_token": "<|im_end|>"}},
    ),
    "dropout of merges": Folder(
        lambda: byte_level(dropout=0.3), of_class("PreTrainedTokenizerFast"), ("from id",)
    ),
    "truncation and padding": Folder(
        lambda: with_content(
            llama(),
            lambda content: content.update(
                truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
                padding={
                    "strategy": {"Fixed": 64},
                    "direction": "Right",
                    "pad_to_multiple_of": None,
                    "pad_id": 0,
                    "pad_type_id": 0,
                    "pad_token": "<unk>",
                },
            ),
        ),
        of_class("PreTrainedTokenizerFast"),
    ),
    "a short model_max_length": Folder(byte_level, of_class("PreTrainedTokenizerFast", model_max_length=3)),
    "a lower-casing normaliser as GPT-2": Folder(
        lambda: with_content(byte_level(), lambda content: content.update(normalizer={"type": "Lowercase"})),
        of_class("GPT2Tokenizer"),
        (FIX,),
    ),
}


@cache
def trained(name: str) -> str:
    """Return the tokenizer.json of a kind of folder, which several tests write."""
    return FOLDERS[name].tokenizer().to_str()


def write(name: str, folder: Path) -> None:
    kind = FOLDERS[name]
    folder.mkdir()
    (folder / "tokenizer.json").write_text(trained(name), encoding="utf-8")
    for file, content in {"tokenizer_config.json": kind.config, **kind.others}.items():
        if content is not None:
            (folder / file).write_text(json.dumps(content))


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_are_those_of_auto_tokenizer_or_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    kind, folder = FOLDERS[name], tmp_path / "odd"
    write(name, folder)
    texts = list(odd_texts())
    sample = [SampleDocument("odd", text) for text in texts]
    try:
        said, warnings = compare_folder(folder, kind.model_type, sample)
    except KieloError as problem:
        assert kind.refusal, problem
        assert not [words for words in kind.refusal if words not in str(problem)], problem
    else:
        assert not kind.refusal, "it was not refused"
        assert said.startswith("200 texts") and [kind.warned] == [
            w for w in [kind.warned] if w in str(warnings)
        ]
        assert bool(warnings) == bool(kind.warned)
        theirs = AutoTokenizer.from_pretrained(folder)
        assert encode(load_tokenizer(folder), texts) == theirs(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("model_type", [None, "llama", pytest.param("qwen2", marks=pytest.mark.full)])
@pytest.mark.parametrize("name", FOLDERS)
def test_an_export_of_the_folder_gives_the_ids_of_kielo(
    name: str, model_type: str | None, tmp_path: Path
) -> None:
    folder, to, texts = tmp_path / "odd", tmp_path / "export", list(odd_texts())
    write(name, folder)
    write_without_dropout(folder)
    tokenizer = load_tokenizer(folder)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    to.mkdir()
    for file, content in agreed_files(files, model_type, tokenizer, odd_sample(tokenizer)).items():
        (to / file).write_bytes(content)
    if model_type:
        (to / "config.json").write_text(json.dumps({"model_type": model_type}))
    expected = encode(tokenizer, texts)
    lacks_no_code = "auto_map" not in (FOLDERS[name].config or {})  # whose file is not there
    for trusts in (None, False, True)[: 2 + lacks_no_code]:
        theirs = AutoTokenizer.from_pretrained(to, trust_remote_code=trusts)
        assert theirs(texts, add_special_tokens=False)["input_ids"] == expected
        assert len(theirs) == tokenizer.whole.get_vocab_size()
        assert theirs("a")["input_ids"] == tokenizer.whole.encode("a").ids
