"""The row map of a vocabulary transplant: tokens are matched by their text, control tokens by role."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from kielo.artifact.documents import write_documents
from kielo.artifact.manifest import write_stage
from kielo.artifact.row_map import RowMap
from kielo.artifact.stage_json import read_stage_json
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import TextTokenizer, decode, load_tokenizer
from kielo.tokenizer.row_map import example_ids, make_row_map, row_in_words, row_map_in_words
from kielo.tokenizer.train import save, train_on, train_tokenizer

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
    assert row_in_words(made, 7, old) == "<0xC3> + <0xB5>"
    # and back: of a byte and a letter of the same text, each takes that of its own spelling
    back = make_row_map(new, old, "mean").rows
    assert back == [[17], [14], [15], [3], [4], [2], [0], [1], [5], [6], [0, 1], [1]]
    both = make_row_map(old, old, "mean").rows
    assert both == [[number] for number in range(12)]
    assert make_row_map(old, new, "random").random == 18


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
    assert made.rows[0] == [0] and made.control_tokens == {"<|endoftext|>": "<|endoftext|>"}
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
    """From the tokenizer beside the weights; a folder without one is refused, with what would work."""
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
    with pytest.raises(KieloError, match="no tokenizer.json in .*weights, .* what would work"):
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
    with pytest.raises(KieloError, match=r"neither byte-level .* nor of SentencePiece's form"):
        make_row_map(other, other, "mean")
    assert make_row_map(other, other, "random").rows == [[], [], []]
