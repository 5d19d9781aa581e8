"""Templates and tokenizers of strangers are programs: none hangs, fills the memory or ends Kielo by a panic.

Each is refused, with its file and what is wrong with it, before a stage is made.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from kielo.recipe.errors import KieloError
from kielo.tokenizer import jinja_template, trial
from kielo.tokenizer.chat_template import ChatTemplate, has_chat_template
from kielo.tokenizer.jinja_template import compile_template
from kielo.tokenizer.load import load_tokenizer
from tests.faults.trial import RECIPE, belongings, refused, went_well

TIME, MEMORY, POWER = (
    "did not end within 0.5 s",
    "needs more than 1 GB of memory",
    "a power of more than",
)
LOOP = (
    "{{% for a in {0} %}}{{% for b in {0} %}}{{% for c in {0} %}}{{% endfor %}}{{% endfor %}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP.format("range(99999)"), TIME),
        (LOOP.format("messages * 9999"), TIME),
        ("{{ lipsum(n=10**9) }}", TIME),
        ("{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}", TIME),
        ("{% set s = namespace(v=3) %}{% for i in range(99) %}{% set s.v = s.v * s.v %}{% endfor %}", TIME),
        ("{{ 9**(9**9) }}", POWER),
        ("{% set n = messages|length + 9 %}{{ n**(n**n) }}", POWER),
        ("{{ '%999999999999d' % 1 }}", MEMORY),
        ("{{ '%*d' % (10**12, messages|length) }}", MEMORY),
        ("{{ '{:>99999999999}'.format(messages|length) }}", MEMORY),
        ("{{ 'a'.ljust(10**11) }}", MEMORY),
        ("{{ messages[0]['content']|center(10**11) }}", MEMORY),
        ("{{ ('a' * 99999)|replace('', 'x' * 99999) }}", MEMORY),
        (
            "{% set s = namespace(v='x') %}{% for i in range(60) %}{% set s.v = s.v ~ s.v %}{% endfor %}",
            MEMORY,
        ),
        ("{{ messages * 10**10 }}", MEMORY),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "cannot be compiled (RecursionError"),
        ("{% if 1 %}" * 500 + "{% endif %}" * 500, "cannot be compiled (RecursionError"),
    ],
)
def test_a_template_that_never_ends(monkeypatch, template: str, reason: str) -> None:
    monkeypatch.setattr(jinja_template, "SECONDS", 0.5 if reason == TIME else 60)
    with pytest.raises(KieloError) as refusal:
        compile_template(template)(messages=[{"role": "user", "content": "?"}])
    assert reason in str(refusal.value)


def test_limits_are_put_back(monkeypatch) -> None:
    """After a template that failed, the next one has all the time and memory that there are."""
    monkeypatch.setattr(jinja_template, "SECONDS", 0.1)
    hard, easy = compile_template("{{ 'a'.ljust(10**11) }}"), compile_template("{{ x * 3 }}")
    for _ in range(3):
        with pytest.raises(KieloError):
            hard()
        assert easy(x="ab") == "ababab"
    assert len(bytearray(2 << 30)) == 2 << 30


def word_level(**parts: Any) -> dict[str, Any]:
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "unk_token": "a", "vocab": {"a": 0}},
    } | parts  # fmt: skip


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


GROWS = {"type": "Sequence", "normalizers": [replaced({"String": "a"}, "a" * 64)] * 6}
HOSTILE = {
    "a normaliser that gives up": (
        word_level(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "cannot be used: Precompiled",
    ),
    "pieces of no length": (
        word_level(pre_tokenizer={"type": "FixedLength", "length": 0}),
        "cannot be used: chunk size must be non-zero",
    ),
    "a pattern that goes back for ever": (
        word_level(normalizer=replaced({"Regex": "(a+)+$x"}, "x")),
        "cannot be used: Onig",
    ),
    "a text that grows without end": (word_level(normalizer=GROWS), "ends the process that reads it"),
    "a text that takes for ever": (
        word_level(normalizer={"type": "Prepend", "prepend": "x" * 10**7}),
        "takes more than 1 s for",
    ),
    "another file": ({"a": 1}, "cannot be used"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_tokenizer_that_cannot_be_trusted(packed: Path, here, monkeypatch, kind: str) -> None:
    """Refused with its file; nothing of a stage is left."""
    monkeypatch.setattr(trial, "CPU_SECONDS", 1 if "for ever" in kind else 60)
    monkeypatch.setattr(trial, "MEMORY_BYTES", 10**9)
    content, reason = HOSTILE[kind]
    shutil.copytree(packed / "run" / "tokenizer", packed / "theirs")
    (packed / "theirs" / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    text = RECIPE.replace('folder = "run"', 'folder = "next"').replace("vocab_size = 320", 'path = "theirs"')
    (packed / "next.toml").write_text(text, encoding="utf-8")
    before = belongings(packed / "theirs")
    refused(here(packed, "run", "next.toml", "--to", "tokenizer"), reason, "tokenizer.path", "theirs")
    assert belongings(packed / "theirs") == before and not (packed / "next" / "tokenizer").exists()


def test_the_run_s_own_tokenizer_can_be_used(packed: Path, here) -> None:
    text = RECIPE.replace('folder = "run"', 'folder = "next"')
    text = text.replace("vocab_size = 320", 'path = "run/tokenizer"')
    (packed / "next.toml").write_text(text, encoding="utf-8")
    went_well(here(packed, "run", "next.toml", "--to", "tokenizer"))


@pytest.mark.parametrize(
    "templates",
    [
        [{"name": ["default"], "template": "x"}],
        [{"name": {"a": 1}, "template": "x"}, 5, None],
        [{"name": "default", "template": ["x"]}],
        {"default": "x"},
        7,
    ],
)
def test_a_template_under_an_odd_name_is_none(packed: Path, templates: Any) -> None:
    """Names that are lists, entries that are numbers: no template by the name that is looked for."""
    path = packed / "run" / "tokenizer" / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8")) | {"chat_template": templates}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert not has_chat_template(path.parent)
    with pytest.raises(KieloError, match="this tokenizer has no chat template"):
        ChatTemplate(load_tokenizer(path.parent))


def test_a_panic_is_told(tmp_path: Path) -> None:
    """Reading without a trial refuses it too."""
    content = word_level(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(KieloError, match=r"\.json: the tokenizers library gave up on it \(Precompiled"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_many_gigabytes(tmp_path: Path) -> None:
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(20 << 30)
    with pytest.raises(KieloError, match=r"21,474,836,480 bytes, and the limit is"):
        trial.try_tokenizer(tmp_path / "tokenizer.json", "tokenizer.path")
