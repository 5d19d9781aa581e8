"""Text stays text: with the formats of published tokenizers no document produces a control token, and
ordinary added tokens work.

The tokenizers are small (the vocabulary is bytes or characters, and few words), but made of the parts and
flags of the published ones: model, normaliser, pre-tokenizer, decoder, added tokens and configuration.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import read_manifest, write_stage
from kielo.artifact.token_shards import TokenShard
from kielo.dataset.pack import pack
from kielo.recipe.sections import Recipe
from kielo.tokenizer.chat_template import ChatTemplate
from kielo.tokenizer.load import decode, encode, end_of_text_id, load_tokenizer
from tests.faults.trial import belongings, kielo, refused, went_well, write_workplace
from tests.written_documents import write_documents

LETTERS = [chr(number) for number in range(33, 127)]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{number:02X}>" for number in range(256)]


@dataclass(frozen=True)
class Form:
    """A tokenizer, its configuration, its control tokens, added tokens that are ordinary,
    and how it spells a text back.
    """

    make: Callable[[], Tokenizer]
    control: tuple[str, ...]
    config: dict[str, Any]
    ordinary: tuple[str, ...] = ()
    map: dict[str, Any] = field(default_factory=dict)
    is_exact: bool = True
    knows_line_ends: bool = True

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        self.make().save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config), encoding="utf-8")
        if self.map:
            (folder / "special_tokens_map.json").write_text(json.dumps(self.map), encoding="utf-8")
        return folder


def byte_level(
    special=(), plain=(), inside=(), words=(), normalizer=None, **model
) -> Callable[[], Tokenizer]:
    """GPT-2's kind. `inside`: names that the model's own vocabulary holds;
    `words`: what merges make of characters.
    """

    def make() -> Tokenizer:
        merged, merges = _merged(words)
        names = list(dict.fromkeys([*inside, *ALPHABET, *merged]))
        tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, merges, **model))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not words)
        tokenizer.decoder = decoders.ByteLevel()
        return _with_added(tokenizer, special, plain, normalizer)

    return make


def sentence_piece(
    special=(), plain=(), words=(), inside=("<unk>", "<s>", "</s>"), normalizer=None
) -> Callable[[], Tokenizer]:
    """Llama 2's kind: BPE over characters with U+2581 for a space, and bytes for what is unknown."""

    def make() -> Tokenizer:
        merged, merges = _merged(words)
        names = list(dict.fromkeys([*inside, *BYTES, "▁", *LETTERS, *merged]))
        model = models.BPE(
            {name: n for n, name in enumerate(names)},
            merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
        tokenizer = Tokenizer(model)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        return _with_added(tokenizer, special, plain, normalizer or normalizers.Replace(" ", "▁"))

    return make


def unigram(special=(), plain=(), inside=()) -> Callable[[], Tokenizer]:
    """T5's kind. Its lattice finds every piece of the vocabulary in a text,
    control tokens (score 0) before all others.
    """

    def make() -> Tokenizer:
        pieces = [(name, 0.0) for name in inside] + [(name, -5.0) for name in ("▁", *LETTERS, *"äöüõ")]
        tokenizer = Tokenizer(models.Unigram(pieces, unk_id=list(inside).index("<unk>")))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
        return _with_added(tokenizer, special, plain, None)

    return make


def word_piece(special=(), whole_words=False) -> Callable[[], Tokenizer]:
    """BERT's kind; with `whole_words` text is cut at spaces alone,
    and a word "[MASK]" is looked up as it stands.
    """

    def make() -> Tokenizer:
        names = [*special, *LETTERS, *("##" + letter for letter in LETTERS)]
        model = models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]")
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = (
            pre_tokenizers.WhitespaceSplit() if whole_words else pre_tokenizers.BertPreTokenizer()
        )
        tokenizer.decoder = decoders.WordPiece(cleanup=False)
        return _with_added(
            tokenizer, special, (), None if whole_words else normalizers.BertNormalizer(lowercase=True)
        )

    return make


def _merged(words) -> tuple[list[str], list[tuple[str, str]]]:
    """Each word letter by letter: the tokens on the way and their merges."""
    tokens, merges = [], []
    for word in words:
        for end in range(2, len(word) + 1):
            tokens.append(word[:end])
            merges.append((word[: end - 1], word[end - 1]))
    return tokens, merges


def _with_added(tokenizer, special, plain, normalizer) -> Tokenizer:
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([_token(entry, normalized=False) for entry in special])
    tokenizer.add_tokens([_token(entry) for entry in plain])
    return tokenizer


def _token(entry, **flags) -> AddedToken:
    return entry if isinstance(entry, AddedToken) else AddedToken(entry, **flags)


END = "<|endoftext|>"
LLAMA2 = ("<unk>", "<s>", "</s>")
BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
XLMR = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
SPACES = tuple(" " * number for number in range(2, 6))

FORMS = {
    "gpt2": Form(byte_level([END], inside=[END]), (END,), {"eos_token": END, "bos_token": END}),
    "gpt2, not special": Form(byte_level((), [AddedToken(END, normalized=False)]), (END,), {}),
    "gpt2, normalized":
        Form(byte_level((), [AddedToken(END, normalized=True)]), (END,), {"eos_token": {"content": END}}),
    "kielo": Form(byte_level([END], inside=[END]), (END,), {"eos_token": END, "pad_token": END},
        map={"bos_token": END}),
    "llama2":
        Form(sentence_piece(LLAMA2), LLAMA2, {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>"}),
    "llama2, not special": Form(
        sentence_piece((), LLAMA2), LLAMA2, {"eos_token": "</s>", "bos_token": "<s>"},
        map={"unk_token": "<unk>"}
    ),
    "llama2, merges that build </s>": Form(
        sentence_piece((), (), ["<s>", "</s>"]), ("<s>", "</s>"), {"eos_token": "</s>", "bos_token": "<s>"}
    ),
    "llama3": Form(
        byte_level(
            ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_special_token_0|>"],
            words=["<|eot_id|>", "tere"], ignore_merges=True,
        ),
        ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_special_token_0|>"),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
    "mistral": Form(
        sentence_piece(LLAMA2, ["[INST]", "[/INST]"]), (*LLAMA2, "[INST]", "[/INST]"),
        {"eos_token": "</s>", "chat_template": "{{ bos_token + '[INST]' + message + '[/INST]' }}"},
    ),
    "qwen": Form(
        byte_level([END, "<|im_start|>"], ["<|im_end|>", "<tool_call>"], normalizer=normalizers.NFC()),
        (END, "<|im_start|>", "<|im_end|>", "<tool_call>"),
        {"eos_token": "<|im_end|>",
            "chat_template": [{"name": "default", "template": "<tool_call>{{ call }}"}]},
    ),
    "gemma": Form(
        sentence_piece(["<pad>", "<eos>", "<bos>", "<unk>"], ["<start_of_turn>", "<table>", "\n\n", "▁▁▁"],
                       inside=["<pad>", "<eos>", "<bos>", "<unk>"]),
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>"),
        {"eos_token": "<eos>", "bos_token": "<bos>", "additional_special_tokens": ["<start_of_turn>"]},
        ordinary=("<table>", "\n\n"),
    ),
    "olmo": Form(
        byte_level([END, "|||EMAIL_ADDRESS|||"], ["<|padding|>", *SPACES]),
        (END, "|||EMAIL_ADDRESS|||", "<|padding|>"),
        {"eos_token": END, "pad_token": "<|padding|>"}, ordinary=SPACES,
    ),
    "gpt_neox": Form(
        byte_level([END, "<|padding|>"], SPACES, inside=[END, "<|padding|>"], normalizer=normalizers.NFC()),
        (END, "<|padding|>"), {"eos_token": END, "bos_token": END, "unk_token": END}, ordinary=SPACES,
    ),
    "opt": Form(
        byte_level(["</s>", "<pad>"], inside=["<s>", "<pad>", "</s>", "<unk>"]), ("</s>", "<pad>"), {},
        map={"bos_token": "</s>", "eos_token": {"content": "</s>"}, "unk_token": "</s>",
            "pad_token": "<pad>"},
    ),
    "bloom": Form(
        byte_level(["<unk>", "<s>", "</s>", "<pad>"], inside=["<unk>", "<s>", "</s>", "<pad>"]),
        ("<unk>", "<s>", "</s>", "<pad>"), {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>"},
    ),
    "bert": Form(word_piece(BERT), BERT, {"eos_token": "[SEP]", "mask_token": "[MASK]"}, is_exact=False),
    "bert, cut at spaces": Form(
        word_piece(BERT, whole_words=True), BERT, {"eos_token": "[SEP]", "mask_token": "[MASK]"},
        is_exact=False
    ),
    "t5": Form(
        unigram(["<pad>", "</s>", "<unk>", "<extra_id_0>"],
            inside=["<pad>", "</s>", "<unk>", "<extra_id_0>"]),
        ("<pad>", "</s>", "<extra_id_0>"),
        {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>",
            "extra_special_tokens": ["<extra_id_0>"]},
        knows_line_ends=False,
    ),
    "xlm-r": Form(
        unigram(["<s>", "<pad>", "</s>", "<unk>", AddedToken("<mask>", lstrip=True, normalized=False)],
            inside=XLMR),
        XLMR,
        {"eos_token": "</s>", "unk_token": "<unk>", "mask_token": {"content": "<mask>", "lstrip": True}},
        knows_line_ends=False,
    ),
    "xlm-r, none added": Form(
        unigram(inside=XLMR), XLMR,
        {"eos_token": "</s>", "bos_token": "<s>", "pad_token": "<pad>", "mask_token": "<mask>"},
        knows_line_ends=False,
    ),
    "phi, that swallows spaces": Form(
        byte_level([END],
            [AddedToken("<|assistant|>", rstrip=True), AddedToken("<|user|>", single_word=True)]),
        (END, "<|assistant|>", "<|user|>"), {"eos_token": END},
    ),
    "deepseek": Form(
        byte_level((), ["<｜end▁of▁sentence｜>", "<｜User｜>"]), ("<｜end▁of▁sentence｜>", "<｜User｜>"),
        {"eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>"}},
    ),
    "lower case": Form(
        byte_level((), [AddedToken("<eos>", normalized=True)], normalizer=normalizers.Lowercase()),
        ("<eos>", "<EOS>"),
        {"eos_token": "<eos>", "added_tokens_decoder": {"9": {"content": "<eos>", "special": True}}},
        is_exact=False,
    ),
    "wide characters made narrow": Form(
        sentence_piece(LLAMA2, (), ["</s>"],
                       normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" ", "▁")])),
        (*LLAMA2, "＜/s＞", "＜ｓ＞"), {"eos_token": "</s>", "bos_token": "<s>"}, is_exact=False,
    ),
    "words of a domain": Form(
        byte_level([END], ["riigikogu", "<b>", *SPACES], normalizer=None), (END,), {"eos_token": END},
        ordinary=("riigikogu", "<b>", "  "),
    ),
}  # fmt: skip
FORM = pytest.mark.parametrize("form", FORMS)


def documents(control: tuple[str, ...]) -> list[str]:
    """Each control token within words, between spaces, on lines of its own, doubled,
    and all of them together.
    """
    alone = [
        text
        for name in control
        for text in (f"enne{name}siis", f"a {name} b", f"x\n{name}\ny", name + name, name)
    ]
    return [*alone, "".join(control), " ".join(control)]


@FORM
def test_no_text_becomes_a_control_token(form, tmp_path):
    """No place of a document becomes one; and the text comes back,
    where such a tokenizer gives texts back at all.
    """
    form = FORMS[form]
    tokenizer = load_tokenizer(form.write(tmp_path / "ready"))
    texts = documents(form.control)
    rows = encode(tokenizer, texts)
    unknown = {"<unk>", "[UNK]"}
    forbidden = {tokenizer.whole.token_to_id(name) for name in form.control if name not in unknown}
    for text, row in zip(texts, rows):
        assert forbidden.isdisjoint(row), (text, [tokenizer.whole.id_to_token(number) for number in row])
    if form.is_exact:
        known = [(text, row) for text, row in zip(texts, rows) if "\n" not in text or form.knows_line_ends]
        assert decode(tokenizer, [row for _, row in known]) == [text for text, _ in known]


@FORM
def test_ordinary_added_tokens_are_still_used(form, tmp_path):
    """The other ids of a text are those that the tokenizer gives it without us."""
    form = FORMS[form]
    tokenizer = load_tokenizer(form.write(tmp_path / "ready"))
    for name in form.ordinary:
        assert tokenizer.whole.token_to_id(name) in encode(tokenizer, [f"x{name}y"])[0], name
    plain = f"tere, ilm 2026 ja {' '.join(form.ordinary)} lopp < s > /s | end [ x ]"
    theirs = Tokenizer.from_file(str(tmp_path / "ready" / "tokenizer.json"))
    assert encode(tokenizer, [plain]) == [theirs.encode(plain, add_special_tokens=False).ids]


@FORM
def test_there_are_as_many_ends_of_text_as_documents(form, tmp_path):
    """`pack` writes one end of text for each of the documents, which spell every control token."""
    form = FORMS[form]
    texts = documents(form.control) + [f"tavaline tekst {number}" for number in range(40)]
    for name in ("corpus", "tokenizer"):
        with write_stage(tmp_path / name, name, 1, {}, {}) as stage:
            stage.counts["documents_kept"] = len(texts)
            if name == "corpus":
                records = [
                    {"id": str(n), "text": text, "source": "a", "metadata": {}}
                    for n, text in enumerate(texts)
                ]
                write_documents(stage.folder / "documents" / "00000.jsonl.zst", records)
            else:
                form.write(stage.folder / "inside")
                for path in (stage.folder / "inside").iterdir():
                    path.rename(stage.folder / path.name)
    recipe = Recipe(
        name="t", language="et", corpus={"sources": ["a.txt"]}, tokenizer={"path": "ready"},
        dataset={"heldout_share": 0.2},
    )  # fmt: skip
    counts = pack(recipe, tmp_path / "corpus", tmp_path / "tokenizer", tmp_path / "tokens").counts
    end = end_of_text_id(load_tokenizer(tmp_path / "tokenizer"))
    for name, expected in (("a", counts["sources"]["a"]), ("heldout", counts["heldout"])):
        shard = TokenShard(tmp_path / "tokens" / name)
        assert (shard.read(0, shard.num_tokens) == end).sum() == expected["documents"]


@FORM
def test_conversations_have_the_marks_of_the_template_alone(form, tmp_path):
    """Messages spell every control token: the template's marks are control tokens, theirs are text, and what
    an answer spells comes back from its tokens.
    """
    form = FORMS[form]
    ready = form.write(tmp_path / "ready")
    tokenizer = load_tokenizer(ready)
    added = {token.content for token in tokenizer.whole.get_added_tokens_decoder().values()}
    # A tokenizer whose control tokens are not added reads them as text; so does Hugging Face.
    marks = [name for name in form.control if name in added and name not in ("<unk>", "[UNK]")]
    begins, ends = (marks * 2)[:2] if marks else ("|", "|")
    line = f"{{{{ {begins!r} + m.content + {ends!r} }}}}"
    template = "{% for m in messages %}" + line + "{% endfor %}"
    (ready / "chat_template.jinja").write_text(template, encoding="utf-8")
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        for text in documents(form.control)
    ]
    laid_out = ChatTemplate(tokenizer).lay_out([(str(n), chat) for n, chat in enumerate(chats)])
    ids = {tokenizer.whole.token_to_id(name): name for name in form.control if name != "<unk>"}
    for chat, one in zip(chats, laid_out):
        found = [ids[number] for number in one.ids if number in ids]
        assert found == ([begins, ends] * 2 if marks else [])
        answer = chat[1]["content"]
        if form.is_exact and (form.knows_line_ends or "\n" not in answer) and marks:
            (back,) = decode(
                tokenizer, [[number for number, counts in zip(one.ids, one.is_answer) if counts]]
            )
            assert back.strip() == (answer + ends).strip()


ENDS = {"gpt2, not special": END, "xlm-r, none added": "</s>", "llama2, merges that build </s>": "</s>"}


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory) -> Path:
    """A workplace whose text spells the ends of text of `ENDS` in every line, up to its corpus."""
    workplace = write_workplace(tmp_path_factory.mktemp("cleaned") / "workplace")
    text = workplace / "text.txt"
    ends = "".join(f" {end} ja{end}{end} " for end in sorted(set(ENDS.values())))
    text.write_text(text.read_text(encoding="utf-8").replace(" ja ", ends), encoding="utf-8")
    went_well(kielo(workplace, "run", "tiny.toml", "--to", "corpus"))
    return workplace


@pytest.mark.parametrize("form", ENDS)
def test_a_run_with_a_ready_tokenizer_keeps_documents_apart(form, cleaned, tmp_path, here):
    """The verb makes as many ends of text as documents from a cleaned corpus."""
    workplace = Path(shutil.copytree(cleaned, tmp_path / "workplace"))
    FORMS[form].write(workplace / "ready")
    went_well(
        here(
            workplace,
            "run",
            "tiny.toml",
            "--set",
            "tokenizer.path=ready",
            "--set",
            "tokenizer.max_unknown_share=1",
            "--from",
            "tokenizer",
            "--to",
            "pack",
        )
    )
    run = workplace / "run"
    assert any(ENDS[form] in document["text"] for document in read_documents(run / "corpus" / "documents"))
    number = end_of_text_id(load_tokenizer(run / "tokenizer"))
    shard = TokenShard(run / "tokens" / "text")
    counts = read_manifest(run / "tokens").counts["sources"]["text"]
    assert (shard.read(0, shard.num_tokens) == number).sum() == counts["documents"]


CONFIG = "tokenizer_config.json"
ORDINARY, NO_TOKEN = "is an ordinary character of texts", "does not fit. Fix: the text of a token"
ODD = {
    "the end of text stands for unknown characters": (
        lambda: _no_alphabet(), {"eos_token": "</s>"}, "writes its control token", "'</s>'",
    ),
    "the end of text is a character": (byte_level(), {"eos_token": "a"}, ORDINARY, "'a'"),
    "the end of text is a byte": (sentence_piece(LLAMA2), {"eos_token": "<0x0A>"}, ORDINARY, "<0x0A>"),
    "no such end of text": (byte_level(), {"eos_token": "<eos>"}, "has no token '<eos>' to end", "<eos>"),
    "an end of text that is a number": (byte_level([END]), {"eos_token": 3}, NO_TOKEN, CONFIG),
    "an end of text without its content":
        (byte_level([END]), {"eos_token": {"special": True}}, NO_TOKEN, CONFIG),
    "an end of text that is a list": (byte_level([END]), {"eos_token": [END]}, NO_TOKEN, CONFIG),
    "a configuration that is a list": (byte_level([END]), [END], "not a JSON object, but a list", CONFIG),
}  # fmt: skip


def _no_alphabet() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "tere": 1}, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@pytest.mark.parametrize("case", ODD)
def test_a_tokenizer_that_cannot_tell_text_from_control_is_refused(case, packed, here):
    """The verb refuses it in one message with the token or the file; the tokens of before stay."""
    make, config, reason, named = ODD[case]
    Form(make, (), config).write(packed / "ready")
    before = belongings(packed / "run" / "tokens")
    refused(
        here(
            packed, "run", "tiny.toml", "--set", "tokenizer.path=ready", "--from", "tokenizer", "--to", "pack"
        ),
        reason,
        named,
    )
    assert belongings(packed / "run" / "tokens") == before


@pytest.mark.parametrize("role", ["pad_token", "mask_token"])
def test_a_role_given_to_a_character_leaves_it_text(role, tmp_path):
    """CLIP pads with "!"; texts still have exclamation marks."""
    form = Form(byte_level([END]), (END,), {"eos_token": END, role: "!"})
    tokenizer = load_tokenizer(form.write(tmp_path / "ready"))
    assert decode(tokenizer, encode(tokenizer, ["tere!"])) == ["tere!"]
