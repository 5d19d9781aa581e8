"""The row map of a vocabulary transplant: tokens are matched by their text, control tokens by role."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram, WordLevel

from kielo.artifact.manifest import write_stage
from kielo.artifact.stage_counts import RowMap
from kielo.artifact.stage_json import read_stage_json
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import TextTokenizer, decode, load_tokenizer
from kielo.tokenizer.make_row_map import example_ids, make_row_map, row_in_words, row_map_in_words
from kielo.tokenizer.spelling import TokenNames, readable
from kielo.tokenizer.train import save, train_on, train_tokenizer
from tests.written_documents import write_documents

OLD = [f"The house of {n} rivers and the rivers of the house, said the reader." for n in range(60)]
NEW = [f"Maja ja jõgi {n}: öö läheb, jõed ja majad, mitte maja\u0303." for n in range(60)]


def written(folder: Path, tokenizer: Tokenizer, **roles: str) -> TextTokenizer:
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return load_tokenizer(folder)


def byte_level(folder: Path, tokens: list[str], merges: list[tuple[str, str]], **roles: str) -> TextTokenizer:
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in dict.fromkeys(roles.values())])
    return written(folder, tokenizer, **roles)


def sentencepiece(
    folder: Path, tokens: list[str], merges: list[tuple[str, str]], **roles: str
) -> TextTokenizer:
    tokenizer = Tokenizer(
        BPE(
            {token: number for number, token in enumerate(tokens)},
            merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in dict.fromkeys(roles.values())])
    return written(folder, tokenizer, **roles)


def unigram(folder: Path, pieces: dict[str, float], is_byte_level: bool, **roles: str) -> TextTokenizer:
    """Writes a Unigram tokenizer. SentencePiece's form has byte fallback, and id 0 for what is unknown, as
    XLM-R and T5 have.
    """
    if is_byte_level:
        tokenizer = Tokenizer(Unigram(list(pieces.items())))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(Unigram(list(pieces.items()), unk_id=0, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in dict.fromkeys(roles.values())])
    return written(folder, tokenizer, **roles)


def test_two_unigram_vocabularies_of_both_conventions(tmp_path):
    """By hand: the likeliest pieces without cuts at spaces, bytes where no piece has the letter, and no row
    for what a vocabulary cannot spell, with and without a token for the unknown.
    """
    old = unigram(
        tmp_path / "old",
        {
            "<unk>": 0.0, "</s>": 0.0, "▁": -4, "▁maja": -3, "maja": -5, "ma": -4, "ja": -4, "m": -8, "a": -8,
            "j": -8, "õ": -6, "<0xC3>": -20, "<0xB6>": -20, "d": -7, "▁ja": -3.5, "<0x6D>": -20,
        },
        is_byte_level=False, unk_token="<unk>", eos_token="</s>",
    )  # fmt: skip
    rows = {
        "Ġmaja": [3], "maja": [4], "Ġ": [2], "Ãµ": [10], "Ã¶": [11, 12], "Ã": [11], "¶": [12],
        "Ġmajad": [3, 13],  # ▁maja d
        "majamaja": [4, 4],  # -10, and ma ja ma ja is -16
        "Ġmajaja": [3, 6], "Ġja": [14],
        "Ġjama": [5, 14],  # ▁ja ma
        "q": [], "m": [7], "mq": [], "Ġm": [2, 7],
        "aĠmaja": [3, 8],
        "<0xC3>": [],  # these six characters, of which the old vocabulary has none
        "a": [8], "j": [9],
    }  # fmt: skip
    scores = dict.fromkeys(rows, -9.0) | {"Ġmaja": -3, "maja": -5, "m": -8, "a": -8, "j": -8}
    new = unigram(tmp_path / "new", scores, is_byte_level=True, eos_token="<|end|>")
    made = make_row_map(old, new, "mean")
    assert dict(zip(rows, made.rows)) == rows and made.rows[len(rows) :] == [[1]]
    assert made.control_tokens == {"<|end|>": "</s>"}
    ids = new.whole.get_vocab()
    back = {
        "<unk>": [], "</s>": ["<|end|>"], "▁": ["Ġ"], "▁maja": ["Ġmaja"], "maja": ["maja"], "ma": ["m", "a"],
        "ja": ["a", "j"], "m": ["m"], "a": ["a"], "j": ["j"], "õ": ["Ãµ"], "<0xC3>": ["Ã"], "<0xB6>": ["¶"],
        "d": [], "▁ja": ["Ġja"], "<0x6D>": ["m"],
    }  # fmt: skip
    assert make_row_map(new, old, "mean").rows == [[ids[name] for name in of] for of in back.values()]
    for tokenizer in (old, new):
        same = make_row_map(tokenizer, tokenizer, "mean").rows
        assert same == [[number] for number in range(tokenizer.whole.get_vocab_size())]


def test_rows_of_a_learned_unigram_vocabulary_are_its_likeliest_pieces(tmp_path):
    """Each token of another vocabulary, against all ways to cut it: the same bytes, and the best sum of
    scores (to the rounding of fp64).
    """
    tokenizers = []
    for name, texts, kind in (("old", OLD, "unigram"), ("new", NEW, "bpe")):
        asked = {"vocab_size": 340, "model": kind}
        recipe = Recipe(name="t", language="et", corpus={"sources": ["a"]}, tokenizer=asked)
        save(train_on(texts, recipe), tmp_path / name)
        tokenizers.append(load_tokenizer(tmp_path / name))
    old, new = tokenizers
    vocabulary = json.loads(old.whole.to_str())["model"]["vocab"]
    scores = {piece: score for piece, score in vocabulary if piece != "<|endoftext|>"}
    made, several = make_row_map(old, new, "mean"), 0
    for number in range(1, new.whole.get_vocab_size()):
        token, pieces = new.whole.id_to_token(number), [vocabulary[one][0] for one in made.rows[number]]
        assert sorted("".join(pieces)) == sorted(token)
        if token in scores:
            assert pieces == [token]
            continue
        best = [0.0] + [float("-inf")] * len(token)
        for end in range(1, len(token) + 1):
            ways = ((start, token[start:end]) for start in range(end))
            best[end] = max(best[start] + scores[piece] for start, piece in ways if piece in scores)
        assert sum(scores[piece] for piece in pieces) == pytest.approx(best[-1], abs=1e-9), token
        several += 1
    assert several > 20 and made.random == 0


def test_spaces_bytes_and_roles_of_two_conventions(tmp_path):
    """By hand: Ġ is ▁, a byte is <0xNN>, end of text is </s>, and what cannot be spelled is random."""
    old = sentencepiece(
        tmp_path / "old",
        ["<unk>", "<s>", "</s>", "<0xC3>", "<0xB5>", "▁", "m", "a", "▁m", "▁ma", "ma", "<0x61>"],
        [("▁", "m"), ("▁m", "a"), ("m", "a")],
        unk_token="<unk>", bos_token="<s>", eos_token="</s>",
    )  # fmt: skip
    new = byte_level(
        tmp_path / "new",
        ["m", "a", "Ġ", "Ã", "µ", "Ġm", "Ġma", "Ãµ", "Ġmam", "aÃ", "q", "mam", "mama", "µa"],
        [("Ġ", "m"), ("Ġm", "a")],
        bos_token="<|begin|>", eos_token="<|end|>", additional="<|other|>", unk_token="<unk>",
    )  # fmt: skip
    made = make_row_map(old, new, "mean")
    assert made.rows == [
        [6], [7], [5], [3], [4], [8], [9], [3, 4], [6, 9], [3, 7], [], [6, 10], [10, 10], [4, 7],
        [1], [2], [], [0],
    ]  # fmt: skip
    assert made.control_tokens == {"<|begin|>": "<s>", "<|end|>": "</s>", "<unk>": "<unk>"}
    assert (made.copied, made.composed, made.random) == (10, 6, 2)
    assert "18 rows of the new vocabulary: 10 (55.6%)" in row_map_in_words(made)
    assert example_ids(made, 2) == [7, 11] and example_ids(made, 9) == [7, 8, 9, 11, 12, 13]
    assert row_in_words(made, 7, TokenNames(old)) == r"\xC3 + \xB5"
    # and back: of a byte and a letter of the same text, each takes that of its own spelling
    back = make_row_map(new, old, "mean").rows
    assert back == [[17], [14], [15], [3], [4], [2], [0], [1], [5], [6], [0, 1], [1]]
    both = make_row_map(old, old, "mean").rows
    assert both == [[number] for number in range(12)]
    assert make_row_map(old, new, "random").random == 18


def test_names_of_tokens_are_their_texts(tmp_path):
    """Both spellings give the same names; bytes of no whole character, line ends and what is invisible are
    escaped.
    """
    old = sentencepiece(tmp_path / "old", ["<s>", "▁jõgi", "<0x0A>", "<0xC3>"], [], bos_token="<s>")
    new = byte_level(tmp_path / "new", ["ĠjÃµgi", "Ċ", "Ã", "µa", "ĠĠ"], [], eos_token="<|end|>")
    assert [TokenNames(old)(number) for number in range(5)] == ["<s>", "▁jõgi", r"\n", r"\xC3", ""]
    names = ["▁jõgi", r"\n", r"\xC3", r"\xB5a", "▁▁", "<|end|>"]
    assert [TokenNames(new)(number) for number in range(6)] == names
    assert readable("a\u200bb\u00a0".encode()) == r"a\u200bb\xa0"


def test_every_token_of_a_trained_vocabulary(tmp_path):
    """Rows are those that decoding (copied) and encoding without cuts (composed) say, for each token."""
    tokenizers = []
    for name, texts, size in (("old", OLD, 340), ("new", NEW, 360)):
        recipe = Recipe(name="t", language="et", corpus={"sources": ["a"]}, tokenizer={"vocab_size": size})
        save(train_on(texts, recipe), tmp_path / name)
        tokenizers.append(load_tokenizer(tmp_path / name))
    old, new = tokenizers
    made = make_row_map(old, new, "mean")
    assert made == make_row_map(old, new, "mean")
    uncut = Tokenizer.from_str(old.whole.to_str())
    uncut.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_text = {decode(old, [[number]])[0]: number for number in range(old.whole.get_vocab_size())}
    control = dict.fromkeys(["<|endoftext|>", "<|padding|>"])
    assert made.rows[:2] == [[0], [1]] and made.control_tokens == {name: name for name in control}
    checked = 0
    for number in range(1, new.whole.get_vocab_size()):
        text = decode(new, [[number]])[0]
        if "\ufffd" not in text:  # else no text by itself
            expected = [by_text[text]] if text in by_text else sorted(uncut.encode(text).ids)
            assert made.rows[number] == expected, text
            checked += 1
    assert checked > 150 and made.composed > 20 and made.random == 0
    assert make_row_map(old, old, "mean").rows == [[n] for n in range(old.whole.get_vocab_size())]


def test_the_stage_makes_the_map(tmp_path):
    """From the tokenizer beside the weights; a folder without one is refused, with the fix."""
    with write_stage(tmp_path / "corpus", "corpus", 1, {}, {}) as stage:
        documents = (
            {"id": str(n), "text": text, "source": "a", "metadata": {}} for n, text in enumerate(NEW)
        )
        write_documents(stage.folder / "documents" / "00000.jsonl.zst", documents)
        stage.counts["bytes_kept"] = 1000
    model = {"weights": f"hf:{tmp_path / 'weights'}", "transplant": "mean"}
    recipe = Recipe(
        name="t", language="et", corpus={"sources": ["a"]}, tokenizer={"vocab_size": 300}, model=model
    )
    (tmp_path / "weights").mkdir()
    with pytest.raises(KieloError, match="weights has no tokenizer.json, .* Fix: "):
        train_tokenizer(recipe, tmp_path / "corpus", tmp_path / "tokenizer")
    save(train_on(OLD, recipe), tmp_path / "weights")
    made = train_tokenizer(recipe, tmp_path / "corpus", tmp_path / "tokenizer")
    old, new = (load_tokenizer(tmp_path / name) for name in ("weights", "tokenizer"))
    assert read_stage_json(tmp_path / "tokenizer", RowMap) == make_row_map(old, new, "mean")
    assert train_tokenizer(recipe, tmp_path / "corpus", tmp_path / "tokenizer") == made


def test_a_vocabulary_whose_texts_are_not_known_is_refused(tmp_path):
    """WordPiece and the like do not say where spaces are; random rows need no texts."""
    other = Tokenizer(WordLevel({"a": 0, "[UNK]": 1, "[SEP]": 2}, unk_token="[UNK]"))
    other = written(tmp_path / "other", other, eos_token="[SEP]")
    with pytest.raises(KieloError, match=r"neither byte-level .* nor in SentencePiece's form"):
        make_row_map(other, other, "mean")
    assert make_row_map(other, other, "random").rows == [[], [], []]
