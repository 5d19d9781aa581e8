"""Texts in pieces: the ids that a tokenizer gives for whole texts, for all pre-tokenisers that are known."""

import json
import re
import sys
import unicodedata

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from kielo.recipe.errors import KieloError
from kielo.tokenizer import piece_cache
from kielo.tokenizer.load import END_OF_TEXT, encode, load_tokenizer
from kielo.tokenizer.measure import WORD
from kielo.tokenizer.piece_cache import ENDS_LINES, LETTERS, SIGNS, PieceCache, cut
from tests.tokenizer.test_extend import NEW, OLD

ODD = " .-(ö0\t\n\r\x1c\x85\u00a0\u2028\u3000\u0303\u00a8\ufb01\u200dA'sé1٣,«中なカмя▁\x00🙂नि்ักſ"
ADDED = ["jõgi", " ", "\n\n", "  ", "ing"]  # words within words, and white space
CHARACTERS = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]


def by_pattern(pattern):
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), by_bytes])


def metaspace(scheme, split=True):
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


# name → model, pre-tokeniser, normaliser, added tokens
KINDS = {
    **{f"bpe, pattern {n}": ("BPE", by_pattern(one), None, []) for n, one in enumerate(ENDS_LINES)},
    **{
        f"bpe, pattern {n}, added tokens": ("BPE", by_pattern(one), None, ADDED)
        for n, one in enumerate(ENDS_LINES)
    },
    "bpe, gpt-2": ("BPE", pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC(), []),
    "bpe, a space before": ("BPE", pre_tokenizers.ByteLevel(add_prefix_space=True), None, ADDED),
    "bpe, added tokens with signs": ("BPE", by_pattern(next(iter(ENDS_LINES))), None, ["x.", ",b"]),
    "bpe, nfkc": ("BPE", by_pattern(next(iter(ENDS_LINES))), normalizers.NFKC(), []),
    "bpe, metaspace": ("BPE", metaspace("always"), normalizers.Sequence([normalizers.NFC()]), []),
    "unigram, always": ("Unigram", metaspace("always"), normalizers.NFKC(), []),
    "unigram, first": ("Unigram", metaspace("first"), None, ADDED),
    "unigram, never": ("Unigram", metaspace("never"), None, []),
}  # fmt: skip


def made(folder, model, pre_tokeniser, normaliser, added):
    """Trains a tokenizer with end-of-text and one for unknown characters, and loads it."""
    tokenizer = Tokenizer(models.BPE() if model == "BPE" else models.Unigram())
    tokenizer.pre_tokenizer = pre_tokeniser
    if normaliser is not None:
        tokenizer.normalizer = normaliser
    options = {"vocab_size": 500, "special_tokens": [END_OF_TEXT, "<unk>"], "show_progress": False}
    if model == "BPE":
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    else:
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    tokenizer.train_from_iterator([*OLD[:20], *NEW[:20]], trainer)
    tokenizer.add_tokens(added)
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return load_tokenizer(folder)


@pytest.fixture(scope="module", params=KINDS)
def pair(request, tmp_path_factory):
    """A tokenizer and its cache."""
    tokenizer = made(tmp_path_factory.mktemp("tokenizer"), *KINDS[request.param])
    return tokenizer, PieceCache(tokenizer)


TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(ODD))
    | st.lists(
        st.sampled_from(
            [
                *OLD[0].split(" ")[:6],
                *NEW[0].split(" "),
                "",
                "1 2",
                " \n",
                "x\n",
                "\ty",
                "'ll",
                "x.,b",
                "2026-11-23",
            ]
            + [f"a{END_OF_TEXT}b", "<unk>", "it's_=\u0338"]
        )
    ).map(" ".join)
)


@settings(max_examples=40, deadline=None)
@given(texts=TEXTS)
def test_ids_are_those_of_whole_texts(pair, texts):
    """Any texts, of odd spaces, marks and scripts; words are counted as in the whole text too."""
    tokenizer, cache = pair
    assert cache.cut_rule is not None
    found = cache.encode(texts)
    assert [one.ids.tolist() for one in found] == encode(tokenizer, texts)
    assert [one.num_words for one in found] == [len(WORD.findall(text)) for text in texts]
    assert all(one.ids.dtype == np.int32 for one in found)


def test_odd_characters_between_spaces(pair):
    """Characters before and after spaces and line ends, beside letters, digits and signs."""
    tokenizer, cache = pair
    characters = [*map(chr, range(0x180)), *ODD, *CHARACTERS[0x300:0x3100:37]]
    texts = [
        f"a {one} b {one}1 ,{one} {one}\n{one}{one} {one}\nx. {one}, \n{one} 2é.{one}'s0-{one}({one}"
        for one in characters
    ]
    assert [one.ids.tolist() for one in cache.encode(texts)] == encode(tokenizer, texts)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from(ODD)), at_signs=st.booleans(), at_lines=st.booleans())
def test_pieces_are_all_of_a_text(text, at_signs, at_lines):
    """Each cut is where the rule says, and there is one at each such place."""
    pieces, ends = cut(text, at_signs, at_lines), set()
    for end in range(1, len(text)):
        before, after, next_one = text[end - 1], text[end], text[end + 1 : end + 2]
        at_space = not before.isspace() and after == " " and next_one and not next_one.isspace()
        at_sign = at_signs and re.fullmatch(f"[{LETTERS}][{SIGNS}]", before + after)
        if at_space or at_sign or (at_lines and before == "\n" and not after.isspace()):
            ends.add(end)
    assert "".join(pieces) == text
    assert set(np.cumsum([len(piece) for piece in pieces])[:-1].tolist()) == ends


def test_what_the_rule_says_of_characters():
    """White space of patterns is white space of Python. No other character ends as white space by NFKC, and
    none is joined with a space or a line's end before it."""
    others = "".join(character for character in CHARACTERS[:0x12000] if not character.isspace())
    without_spaces = pre_tokenizers.Split(Regex(r"\s"), "removed").pre_tokenize_str(others)
    assert [piece for piece, _ in without_spaces] == [others]
    letters = "".join(re.findall(f"[{LETTERS}]", others))
    one_by_one = pre_tokenizers.Split(Regex(r"[\p{L}\p{N}]"), "removed").pre_tokenize_str(letters)
    assert len(letters) > 900 and not one_by_one
    signs = "".join(re.findall(f"[{SIGNS}]", others))
    assert len(signs) == 32
    assert pre_tokenizers.Split(Regex(r"[\s\p{L}\p{M}\p{N}]"), "removed").pre_tokenize_str(signs) == [
        (signs, (0, 32))
    ]
    changed = [one for one in CHARACTERS if unicodedata.decomposition(one) or unicodedata.combining(one)]
    for form in ("NFC", "NFKC"):
        for one in changed:
            alone = unicodedata.normalize(form, one)
            assert one.isspace() or not alone[-1].isspace()
            assert not re.fullmatch(f"[{LETTERS}]", one) or regex.fullmatch(r"[\p{L}\p{N}]", alone[-1])
            assert all(unicodedata.normalize(form, f"a{space}{one}") == f"a{space}{alone}" for space in " \n")


def test_others_are_encoded_whole(tmp_path):
    """Other patterns, normalisers and models, and added tokens that reach over a space: texts are not cut."""
    tokenizer = made(tmp_path / "whole", *KINDS["bpe, pattern 0"])
    content = json.loads(tokenizer.whole.to_str())
    word = content["added_tokens"][0] | {"id": 500, "special": False}
    split = content["pre_tokenizer"]["pretokenizers"]
    changes = [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": json.loads(metaspace("always", split=False).__getstate__())},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split[0] | {"invert": True}, split[1]]}},
        {"pre_tokenizer": json.loads(by_pattern(r"\S+|\s+").__getstate__())},
        {"added_tokens": [*content["added_tokens"], word | {"content": "the house"}]},
        {"added_tokens": [*content["added_tokens"], word | {"content": "house", "lstrip": True}]},
        {"added_tokens": [*content["added_tokens"], word | {"content": "house", "single_word": True}]},
    ]
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps(content | change))
        other = load_tokenizer(folder)
        cache = PieceCache(other)
        assert cache.cut_rule is None, change
        assert [one.ids.tolist() for one in cache.encode(OLD[:3])] == encode(other, OLD[:3])


def test_rules_by_hand():
    """Each pre-tokeniser that is known, and one change of it after another."""
    pattern = next(iter(ENDS_LINES))
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    spaces = {"type": "Metaspace", "prepend_scheme": "first", "split": True}
    gpt_2 = by_bytes | {"use_regex": True}
    for parts, rule in (
        ([split, by_bytes], (True, True, False)), ([gpt_2], (True, False, False)), ([], None),
        ([by_bytes], None),
        ([gpt_2 | {"add_prefix_space": True}], (False, False, True)), ([spaces], (False, False, True)),
        ([spaces | {"prepend_scheme": "never"}], (False, False, False)), ([spaces | {"split": False}], None),
        ([spaces, spaces], None), ([split, spaces], None), ([split, split, by_bytes], None), ([split], None),
        ([split, gpt_2], None), ([split, by_bytes | {"add_prefix_space": True}], None),
        ([spaces, by_bytes], None), ([split | {"behavior": "Removed"}, by_bytes], None),
        ([split | {"invert": True}, by_bytes], None),
        ([split | {"pattern": {"String": "x"}}, by_bytes], None),
        ([split | {"pattern": {"Regex": "x"}}, by_bytes], None),
        ([split | {"pattern": {"Regex": list(ENDS_LINES)[3]}}, by_bytes], (True, False, False)),
    ):  # fmt: skip
        assert piece_cache.rule_of(parts) == rule, parts
    token = {"content": "ab", "normalized": False} | dict.fromkeys(["lstrip", "rstrip", "single_word"], False)
    for change, is_normalised, is_within in (
        ({}, True, True), ({"content": "  "}, True, True), ({"content": "a b"}, False, False),
        ({"lstrip": True}, False, False), ({"rstrip": True}, False, False),
        ({"single_word": True}, False, False),
        ({"normalized": True}, True, False), ({"normalized": True}, False, True),
    ):  # fmt: skip
        assert piece_cache.is_within_pieces(token | change, is_normalised) is is_within, change


def test_what_is_kept_is_counted(tmp_path, monkeypatch):
    """Pieces of up to 64 characters, with their bytes; all are forgotten when they are over the limit, and
    first pieces are others where they may have other ids.
    """

    def size(tokenizer, *pieces: str) -> int:
        rows = [np.array(row, np.int32).tobytes() for row in encode(tokenizer, pieces)]
        return sum(sys.getsizeof(piece) + sys.getsizeof(row) + 200 for piece, row in zip(pieces, rows))

    tokenizer = made(tmp_path / "whole", *KINDS["bpe, pattern 0"])
    cache, short, long = PieceCache(tokenizer), "a" * 64, "b" * 65
    assert [one.num_words for one in cache.encode([f"{short} {short}", long, ""])] == [2, 1, 0]
    kept = size(tokenizer, short, "")  # with its space the second one is longer
    assert cache.num_bytes == kept
    monkeypatch.setattr(piece_cache, "MOST_BYTES", kept)
    cache.encode([short])
    assert cache.num_bytes == kept
    monkeypatch.setattr(piece_cache, "MOST_BYTES", kept - 1)
    cache.encode([short])
    assert cache.num_bytes == 0 and cache.encode(["ab"])[0].ids.dtype == np.int32
    monkeypatch.undo()
    for excess, kept in ((0, 128 << 20), (1, 0)):
        cache.encode(["ab"])
        cache.num_bytes = (128 << 20) + excess
        cache.encode(["ab"])  # which is known
        assert cache.num_bytes == kept
    tokenizer = made(tmp_path / "first", *KINDS["unigram, first"])
    first = PieceCache(tokenizer)
    for text, number in (("jõgi jõgi", 2), ("jõgi", 2), ("x jõgi", 3)):
        first.encode([text])
        pieces = ["jõgi", " jõgi", "x"][:number]
        assert first.cut_rule.first_differs and first.num_bytes == size(tokenizer, *pieces)


def test_added_tokens_with_a_sign_after_a_letter(tmp_path):
    """They lie over a cut, so texts are cut at spaces and lines alone. Other ones change nothing."""
    for number, (added, at_signs) in enumerate([(["x."], False), ([".x", "..", "x"], True)]):
        tokenizer = made(tmp_path / str(number), *KINDS["bpe, pattern 0"][:3], added)
        cache = PieceCache(tokenizer)
        assert cache.cut_rule == (at_signs, True, False)
        assert cache.encode(["x.x ..x."])[0].ids.tolist() == encode(tokenizer, ["x.x ..x."])[0]


def test_memory_is_bounded(tmp_path, monkeypatch):
    """Pieces are forgotten when there are too many, long ones at once; the ids stay the same."""
    tokenizer = made(tmp_path / "whole", *KINDS["bpe, pattern 0"])
    monkeypatch.setattr(piece_cache, "MOST_BYTES", 15_000)
    cache, kept = PieceCache(tokenizer), []
    for text in [*OLD[:5], "ab" * 5_000, *NEW[:5]]:
        (found,) = cache.encode([text])
        assert found.ids.tolist() == encode(tokenizer, [text])[0]
        kept.append(cache.num_bytes)
    assert 0 in kept and 0 < max(kept) <= 15_000
    assert kept[5] == kept[4]  # nothing of the long piece


def test_an_error_names_the_text(tmp_path):
    """A tokenizer that writes its end-of-text for unknown characters: the message has the text, not a piece
    of it."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, END_OF_TEXT: 1}, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = metaspace("never")
    tokenizer.add_special_tokens([END_OF_TEXT])
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_str())
    cache = PieceCache(load_tokenizer(tmp_path))
    assert cache.cut_rule is not None
    with pytest.raises(KieloError, match="begins 'many words'"):
        cache.encode(["many words"])
