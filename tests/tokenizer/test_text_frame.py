"""Documents begin and end as transformers' `tokenizer(text)` has them, in each form of a post-processor."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from kielo.artifact.documents import join_messages
from kielo.dataset.document_packer import DocumentBatch, load_packer
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import load_tokenizer
from kielo.tokenizer.text_frame import ids_before_texts_of, refuse_other_frame, write_frame

BOS, EOS, CLS, SEP, LANGUAGE = "<s>", "</s>", "[CLS]", "[SEP]", "<|et|>"
CONTROL = [EOS, BOS, CLS, SEP, LANGUAGE]
TEXTS = ["Õhtul tuli lumi.", "a", " kaks\n\nrida ", "<s> ei ole märk", "123"]
BYTE_LEVEL = processors.ByteLevel(trim_offsets=False)


def template(single: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1", special_tokens=[(name, n) for n, name in enumerate(CONTROL)]
    )


# A post-processor, and tokenizer_config.json.
FORMS = {
    "none": (None, {}),
    "byte level": (BYTE_LEVEL, {}),
    "gemma": (template(f"{BOS} $A"), {"add_bos_token": True}),
    "llama 3": (processors.Sequence([BYTE_LEVEL, template(f"{BOS} $A")]), {}),
    "bos and eos": (template(f"{BOS} $A {EOS}"), {}),
    "eos": (template(f"$A {EOS}"), {"add_eos_token": True}),
    "two": (template(f"{BOS} {LANGUAGE} $A"), {}),
    "config says otherwise": (template(f"{BOS} $A"), {"add_bos_token": False}),
    "config alone": (None, {"add_bos_token": True}),
    "roberta": (processors.RobertaProcessing((EOS, 0), (BOS, 1), trim_offsets=False), {}),
    "llama 2's class": (template(f"{BOS} $A"), {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}),
}


def write_tokenizer(folder: Path, form: str, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = [*CONTROL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROL)
    post_processor, of_form = FORMS[form]
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles | of_form | config))
    return folder


def recipe(objective: str = "next_token", **tokenizer) -> Recipe:
    sources = [{"name": "a", "path": "a.txt"}, {"name": "c", "path": "c.jsonl", "kind": "instructions"}]
    values = {"corpus": {"sources": sources}, "dataset": {"heldout_share": 0.0001}}
    return Recipe(
        name="tiny",
        language="et",
        train={"objective": objective},
        tokenizer={"path": ".", **tokenizer},
        **values,
    )


def packed(folder: Path, documents: list[dict], source: str = "a") -> list[list[int]]:
    batch = DocumentBatch(Path("x.jsonl"), 0, [json.dumps(one).encode() for one in documents])
    rows = load_packer(recipe(), folder)(batch).shards[source]
    tokens, found = iter(rows.tokens[0].tolist()), []
    for length in rows.lengths:
        found.append([next(tokens) for _ in range(length)])
    return found


def documents_of(texts: list[str]) -> list[dict]:
    return [
        {"id": f"a/{number}", "source": "a", "text": text, "metadata": {}}
        for number, text in enumerate(texts)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_documents_are_what_transformers_makes_of_a_text(form, tmp_path) -> None:
    """`tokenizer(text).input_ids`, then end-of-text, once. A control token that a text spells stays text."""
    folder = write_tokenizer(tmp_path, form)
    theirs = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    expected = [theirs(text).input_ids for text in TEXTS]
    assert packed(folder, documents_of(TEXTS)) == [ids + [0] * (ids[-1] != 0) for ids in expected]


@pytest.mark.parametrize("form", ["none", "llama 3", "bos and eos", "two"])
@pytest.mark.parametrize(
    ("bos", "eos"), [(True, "auto"), (False, "auto"), ("auto", True), (True, True), (False, False)]
)
def test_keys_change_the_tokenizer_and_the_training_alike(form, bos, eos, tmp_path) -> None:
    """What `tokenizer.bos` and `tokenizer.eos` ask for is in the tokenizer's files; text keeps its ids."""
    folder = write_tokenizer(tmp_path, form)
    before = AutoTokenizer.from_pretrained(folder)
    text = before("lumi", add_special_tokens=False).input_ids
    first, last = before("lumi").input_ids[: -len(text) or None], before("lumi").input_ids
    first, last = last[: last.index(text[0])], last[last.index(text[0]) + len(text) :]
    write_frame(folder, bos, eos)
    first = first if bos == "auto" else [1] * bos
    last = last if eos == "auto" else [0] * eos
    after = AutoTokenizer.from_pretrained(folder)
    assert after("lumi").input_ids == [*first, *text, *last]
    assert after("lumi", "a").input_ids == [
        *first,
        *text,
        *last,
        *first,
        *after("a", add_special_tokens=False).input_ids,
        *last,
    ]
    assert packed(folder, documents_of(["lumi"])) == [[*first, *text, 0]]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["add_bos_token"], config["add_eos_token"]) == (bool(first), bool(last))
    assert after("lumi", return_offsets_mapping=True).offset_mapping == [
        *[(0, 0)] * len(first), *((n, n + 1) for n in range(4)), *[(0, 0)] * len(last)
    ]  # fmt: skip


def test_conversations_begin_as_their_template_says(tmp_path) -> None:
    """`apply_chat_template`'s ids, with no second token before them."""
    chat = [{"role": "user", "content": "Kus?"}, {"role": "assistant", "content": "Siin."}]
    text, turns = join_messages(chat)
    document = {
        "id": "c/0",
        "source": "c",
        "text": text,
        "metadata": {"turns": turns, "file": "c", "number": 1},
    }
    for begin in ("{{ bos_token }}", ""):
        written = begin + "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        folder = write_tokenizer(tmp_path / (begin or "none"), "llama 3", chat_template=written)
        theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, return_dict=True)[
            "input_ids"
        ]
        assert packed(folder, [document], "c") == [[*theirs, 0]]


def test_end_of_text_is_not_written_twice(tmp_path) -> None:
    """OPT puts its end-of-text before a text: it ends the document before."""
    folder = write_tokenizer(tmp_path, "eos", bos_token=EOS)
    write_frame(folder, True, False)
    assert AutoTokenizer.from_pretrained(folder)("a").input_ids[0] == 0 and ids_before_texts_of(folder) == ()
    assert [row.count(0) for row in packed(folder, documents_of(TEXTS))] == [1] * len(TEXTS)


def test_what_cannot_be_packed_is_refused(tmp_path) -> None:
    """An end that is not end-of-text, an encoder without its frame, and a role that no token has."""
    two_ends = write_tokenizer(tmp_path / "two", "bos and eos", eos_token=SEP)
    with pytest.raises(
        KieloError, match=r"puts <s> before a text and </s> after it.* Fix: tokenizer.eos = false"
    ):
        refuse_other_frame(recipe(), load_tokenizer(two_ends))
    encoder = write_tokenizer(tmp_path / "encoder", "none", bos_token=CLS, cls_token=CLS, eos_token=SEP)
    fix = r"with \[CLS\] before and \[SEP\] after them. Fix: tokenizer.bos = true and tokenizer.eos = true"
    with pytest.raises(KieloError, match=fix):
        refuse_other_frame(recipe("masked_tokens"), load_tokenizer(encoder))
    write_frame(encoder, True, True)
    refuse_other_frame(recipe("masked_tokens"), load_tokenizer(encoder))
    ids = AutoTokenizer.from_pretrained(encoder)("a").input_ids
    assert (ids[0], ids[-1]) == (2, 3)
    bare = write_tokenizer(tmp_path / "bare", "none", bos_token=None)
    with pytest.raises(
        KieloError, match="tokenizer.bos = true: the tokenizer has no bos_token. Fix: name one"
    ):
        write_frame(bare, True, "auto")
