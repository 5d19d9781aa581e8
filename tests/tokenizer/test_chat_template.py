"""Conversations by chat templates: the tokens are Hugging Face's, the answers are found, text stays text.

The tokenizers are small, with the parts, flags and templates of published ones.
"""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from kielo.recipe.errors import KieloError
from kielo.tokenizer.chat_template import (
    DEFAULT_TEMPLATE,
    TURN_BEGINS,
    TURN_ENDS,
    ChatTemplate,
    Disguise,
    Rendered,
)
from kielo.tokenizer.jinja_template import compile_template
from kielo.tokenizer.load import decode, load_tokenizer

END = "<|endoftext|>"
CHAT = [
    {"role": "user", "content": "Mis on <|im_end|> ja </s> [INST]?"},
    {"role": "assistant", "content": "Märgid."},
    {"role": "user", "content": " im_end "},
    {"role": "assistant", "content": "<|eot_id|> ka. <"},
]
SYSTEM = {"role": "system", "content": "Vasta lühidalt."}
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start|>' + m.role + '<|stop|>\n\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + m.content + ' [/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
# As Qwen 3's: an answer reads otherwise once another question follows, so no prefix of it is a prefix of all.
LATEST = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
GENERATION = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ '<|im_start|>' + m.content + '<|im_start|>' }}{% endif %}{% endfor %}"
)
WITHOUT_MARKS = re.search(
    r"```text\n(\{% if bos_token .*?\n)```", Path("docs/text.md").read_text(), re.DOTALL
)[1]
# Template, its control tokens, end of text, and what ends an answer ("" stands for the document's end).
TEMPLATES = {
    "kielo": (DEFAULT_TEMPLATE, (TURN_BEGINS, TURN_ENDS), END, TURN_ENDS),
    "llama 3": (LLAMA3, ("<|start|>", "<|stop|>", "<|eot_id|>"), END, "<|eot_id|>"),
    "mistral": (MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), "</s>", "</s>"),
    "qwen 3": (LATEST, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"), END, "<|im_end|>"),
    "of docs/text.md": (WITHOUT_MARKS, (), END, "\n\n"),
    "plain": (PLAIN, (), END, "\n\n"),
    "generation": (GENERATION, ("<|im_start|>", "<|im_end|>"), END, "<|im_end|>"),
}


def write_tokenizer(folder: Path, template: str | None, marks=(), end: str = END, **config) -> ChatTemplate:
    """A byte-level tokenizer with these control tokens."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: n for n, name in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*dict.fromkeys([end, *marks])])
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end} | config
    if template is not None:
        content["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return ChatTemplate(load_tokenizer(folder))


def test_shipped_templates_mark_answers_for_other_trainers():
    """Only with the block can transformers and TRL find them."""
    for name in ("kielo", "of docs/text.md"):
        assert "{% generation %}" in TEMPLATES[name][0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_are_hugging_faces_and_answers_are_found(name, tmp_path):
    """Without control tokens in the messages the ids are `apply_chat_template`'s. Only answers and what ends
    their turns are answers, with messages that spell control tokens too, whose text all comes back."""
    template, marks, end, turn_end = TEMPLATES[name]
    chat_template = write_tokenizer(tmp_path / "t", template, marks, end)
    tokenizer, theirs = load_tokenizer(tmp_path / "t"), AutoTokenizer.from_pretrained(tmp_path / "t")
    clean = [{**m, "content": m["content"].replace("<", "(").replace("[INST]", "")} for m in CHAT]
    for chat in (clean, CHAT, CHAT[:2]):
        (laid_out,) = chat_template.lay_out([("here", chat)])
        assert laid_out.text == theirs.apply_chat_template(chat, tokenize=False)
        assert decode(tokenizer, [laid_out.ids]) == [laid_out.text]
        if chat is clean:
            assert laid_out.ids == theirs.apply_chat_template(chat, tokenize=True, return_dict=False)
        found = [number for number, is_answer in zip(laid_out.ids, laid_out.is_answer) if is_answer]
        answers = [m["content"] for m in chat if m["role"] == "assistant"]
        assert decode(tokenizer, [found]) == ["".join(answer + turn_end for answer in answers)]
        assert laid_out.is_answer[-1] == (turn_end == "\n\n"), "a document's end ends the turn by itself"
    if "{% generation %}" in template:
        mask = theirs.apply_chat_template(
            clean, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        (laid_out,) = chat_template.lay_out([("here", clean)])
        assert laid_out.is_answer[:-1].astype(int).tolist() == mask["assistant_masks"]


def test_no_message_can_write_a_mark(tmp_path):
    """The marks are those of the template, one set a message, whatever messages spell, also in parts."""
    chat_template = write_tokenizer(tmp_path / "t", *TEMPLATES["kielo"][:2])
    tokenizer = load_tokenizer(tmp_path / "t")
    marks = [tokenizer.whole.token_to_id(name) for name in (TURN_BEGINS, TURN_ENDS)]
    spelled = [
        TURN_ENDS,
        f"x{TURN_BEGINS}{TURN_ENDS}",
        "<",
        "<|",
        "<|im_end|",
        "m_end",
        "|>",
        ">",
        "x\n<|im_",
    ]
    for content in spelled + [f" {one} " for one in spelled]:
        chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
        (laid_out,) = chat_template.lay_out([("here", chat)])
        assert [laid_out.ids.count(mark) for mark in marks] == [2, 2]
        expected = "".join(f"{TURN_BEGINS}{m['role']}\n{content}{TURN_ENDS}\n" for m in chat)
        assert laid_out.text == expected and decode(tokenizer, [laid_out.ids]) == [expected]
        found = [number for number, is_answer in zip(laid_out.ids, laid_out.is_answer) if is_answer]
        assert decode(tokenizer, [found]) == [content + TURN_ENDS]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "does not write each answer once"),
        ("{% for m in messages %}{{ m.content[:3] }}{% endfor %}", "does not write each answer once"),
        ("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", "does not write each answer once"),
        ("{{ messages[0].content }}", "does not write each answer once"),
        ("", "does not write each answer once"),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", "does not write each answer once"),
        ("{{ raise_exception('no system role') }}", "fails: no system role"),
        ("{{ messages[7].content.x }}", "fails: list object has no element 7"),
        ("{{ 1 / 0 }}", "fails: ZeroDivisionError"),
        ("{{ messages.append(1) }}", "fails: access to attribute 'append'"),
        ("{{ strftime_now('%Y') }}", "fails: 'strftime_now' is undefined"),
    ],
)  # fmt: skip
def test_a_template_that_fails_names_the_conversation(template, message, tmp_path):
    """The place of the data begins the message, and the tokenizer's folder is in it."""
    chat_template = write_tokenizer(tmp_path / "t", template)
    with pytest.raises(KieloError) as refusal:
        chat_template.lay_out([("a.jsonl, line 1", CHAT), ("a.jsonl, line 2", [SYSTEM, *CHAT])])
    assert str(refusal.value).startswith("a.jsonl, line 1: the chat template of ")
    assert str(tmp_path / "t") in str(refusal.value) and message in str(refusal.value)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ([{"name": "rag", "template": "x"}], "has no chat template"),
        ("a\nb{% if %}", "tokenizer_config.json, line 2 of the chat template: "),
    ],
)
def test_a_tokenizer_without_a_template_is_refused(template, message, tmp_path):
    """It names the fix, or where the template is wrong."""
    with pytest.raises(KieloError, match=message):
        write_tokenizer(tmp_path / "t", template)


def test_a_file_goes_before_the_configuration(tmp_path):
    """As in transformers; of several templates the default one is taken."""
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": PLAIN}]
    (laid_out,) = write_tokenizer(tmp_path / "t", several).lay_out([("here", CHAT[:2])])
    assert laid_out.text.startswith("user: ")
    (tmp_path / "t" / "chat_template.jinja").write_text("{{ messages[1].content }}", encoding="utf-8")
    (laid_out,) = ChatTemplate(load_tokenizer(tmp_path / "t")).lay_out([("here", CHAT[:2])])
    assert laid_out.text == "Märgid."


def test_templates_are_rendered_as_hugging_face_does():
    """Blocks leave no line ends or indents, loops may be left, JSON keeps its letters and its order."""
    template = "{% for x in y %}\n  {% if x == 3 %}{% break %}{% endif %}\n{{ x }}|"
    assert (
        compile_template(template + "{% generation %}!{% endgeneration %}{% endfor %}")(y=[1, 2, 3, 4])
        == "1|!2|!"
    )
    assert compile_template("{{ x | tojson }}")(x={"õ": 1, "a": "b"}) == '{"õ": 1, "a": "b"}'
    for wrong, words in (
        ("a\n{% if %}", "line 2 of the chat template: Expected"),
        ("{{ raise_exception('No tool') }}", "^No tool$"),
        ("{{ 1 / 0 }}", "^ZeroDivisionError: division by zero$"),
        ("{{ ''.__class__.__mro__ }}{{ x.append(1) }}", "unsafe"),
    ):  # fmt: skip
        with pytest.raises(KieloError, match=words):
            compile_template(wrong)(x=[])


def test_ends_of_answers_by_hand():
    """White space and a mark after an answer end its turn; at the end of a conversation end-of-text does."""
    mark = re.compile(r"\s*(?:<E>)")
    for pieces, answers in (
        (["ab", "cd", "<E>", "e", " <E>\n"], [(2, 7), (7, 12)]),
        (["ab", "cd", "\n x", "e", " \n"], [(2, 6), (7, 11)]),
        (["", "cd", ""], [(0, 3)]), (["ab"], []), (["ab", "", "x<E>"], [(2, 2)]),
        (["a", "b", "", "c", "d"], [(1, 2), (2, 3)]),
    ):  # fmt: skip
        assert list(Rendered("", pieces).answers(mark)) == answers
    with pytest.raises(ValueError, match="argument 2 is shorter"):  # nothing follows the answer
        list(Rendered("", ["a", "b"]).answers(mark))


def test_disguises_by_hand(monkeypatch):
    """Whole names anywhere, and parts of a name at either end, also of what is only a part of one."""
    numbers = iter(range(99))
    monkeypatch.setattr("kielo.tokenizer.chat_template.token_hex", lambda size: f"{next(numbers):032x}")
    disguise = Disguise(["<|end|>", "<|e"])

    def put_on(content: str) -> tuple[str, list[str]]:
        words = {}
        made = disguise.put_on(content, words)
        assert disguise.take_off(words, made) == content
        for number, word in enumerate(words):
            made = made.replace(word, f"[{number}]")
        return made, list(words.values())

    assert put_on("abc") == ("abc", []) and put_on(" \n") == (" \n", [])
    assert put_on("a<|end|>b<|ex") == ("a[0]b[1]x", ["<|end|>", "<|e"])
    assert put_on(" end ") == (" [0] ", ["end"]) and put_on("d|>x<|") == ("[0]x[1]", ["d|>", "<|"])
    assert put_on(">abc<") == ("[0]abc[1]", [">", "<"]) and put_on("a d") == ("a d", [])
