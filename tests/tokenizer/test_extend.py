"""Extended vocabularies: old ids stay, new tokens only join old ones, and text that is kept is as before."""

import json
import shutil
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kielo.artifact.manifest import write_stage
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Recipe
from kielo.tokenizer.learn_vocabulary import extend, learn_merges
from kielo.tokenizer.load import TextTokenizer, decode, encode, load_tokenizer, vocabulary_size
from kielo.tokenizer.make_row_map import make_row_map
from kielo.tokenizer.stage_inputs import is_heldout
from kielo.tokenizer.train import save, train_on, train_tokenizer
from tests.tokenizer.test_row_map import sentencepiece
from tests.written_documents import write_documents

OLD = [
    f"The house of {n} rivers and the rivers of the house, said the reader, while others were walking slowly "
    "through some quiet streets, thinking about bread, money, winter and letters from distant friends."
    for n in range(60)
]
NEW = [
    f"Maja ja jõgi {n}{n}: öö läheb, jõed ja majad,\n mitte majata reader. Kirjutatud sõnad räägivad "
    "inimestest, kes elasid kaugel põhjas, kus talvel sajab palju lund ja suvel paistab päike hommikuni."
    for n in range(60)
]
WORDS = sorted({word for text in OLD for word in text.split()})


def learnt(folder: Path, texts: list[str], size: int) -> TextTokenizer:
    recipe = Recipe(name="t", language="en", corpus={"sources": ["a"]}, tokenizer={"vocab_size": size})
    save(train_on(texts, recipe), folder)
    return load_tokenizer(folder)


def extended(old: TextTokenizer, folder: Path, size: int, **asked) -> TextTokenizer:
    made = extend(old, NEW, size, **asked)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    for path in old.folder.glob("*_config.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return learnt(tmp_path_factory.mktemp("old"), OLD, 300)


@pytest.fixture(scope="module")
def new(old, tmp_path_factory):
    return extended(old, tmp_path_factory.mktemp("at") / "new", 340)


@pytest.fixture(scope="module")
def careful(old, tmp_path_factory):
    return extended(old, tmp_path_factory.mktemp("at") / "careful", 340, unchanged=OLD)


@cache
def parts(old: TextTokenizer, new: TextTokenizer) -> dict[int, list[int]]:
    """Returns new id → the old ids that it joins, by its merge alone."""
    ids = new.whole.get_vocab()
    found = {number: [number] for number in old.whole.get_vocab().values()}
    for left, right in json.loads(new.whole.to_str())["model"]["merges"]:
        if (made := ids[left + right]) not in found:
            found[made] = found[ids[left]] + found[ids[right]]
    return found


def test_old_tokens_keep_their_ids(old, new, careful):
    """Also the control tokens; the size is the one asked for, and new text takes fewer tokens."""
    for one in (new, careful):
        assert old.whole.get_vocab().items() <= one.whole.get_vocab().items()
        assert vocabulary_size(one) == 340 and sorted(one.whole.get_vocab().values()) == list(range(340))
    before, after, carefully = (sum(map(len, encode(one, NEW))) for one in (old, new, careful))
    assert after < 0.6 * before and carefully < 0.7 * before


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(st.characters(exclude_categories=["Cs"]))
    | st.lists(st.sampled_from([*WORDS, *NEW[0].split()])).map(" ".join)
)
def test_new_ids_only_join_old_ones(old, new, careful, text):
    """Any text, of either language or none: written as old tokens, the new ids are exactly the old ids."""
    for one in (new, careful):
        (row,), (before,) = encode(one, [text]), encode(old, [text])
        written = parts(old, one)
        assert [piece for number in row for piece in written[number]] == before
        assert decode(one, [row]) == [text]


@settings(max_examples=100, deadline=None)
@given(text=st.lists(st.sampled_from(WORDS)).map(" ".join))
def test_unchanged_text_is_encoded_as_before(old, new, careful, text):
    """Any sentence of the old text's words has its old ids, while new text is joined further."""
    assert encode(careful, [text]) == encode(old, [text])
    assert encode(new, ["maja reader"]) != encode(old, ["maja reader"])


def test_merges_are_those_of_counting_again(old):
    """Against the plainest byte-pair encoding: all pairs are counted anew before each merge."""
    words = Counter(
        tuple(old.whole.encode(word, add_special_tokens=False).ids) for t in NEW for word in t.split()
    )
    rows, expected = {word: (list(word), count) for word, count in words.items()}, []
    for made in range(1000, 1030):
        counts = Counter()
        for row, count in rows.values():
            for pair in pairwise(row):
                counts[pair] += count
        refused = {pair for pair in counts if sum(pair) % 7 == 0}
        best = min((pair for pair in counts if pair not in refused), key=lambda one: (-counts[one], one))
        expected.append(best)
        for row, _ in rows.values():
            at = 0
            while at < len(row) - 1:
                if (row[at], row[at + 1]) == best:
                    row[at : at + 2] = [made]
                at += 1
    assert learn_merges(words, 1000, 30, lambda pair: sum(pair) % 7 != 0) == expected
    assert len(learn_merges({(1, 2): 2, (3, 4): 1}, 10, 5, lambda pair: True, min_frequency=2)) == 1
    assert learn_merges({(1, 1, 1, 1, 1): 1}, 10, 5, lambda pair: True, 1) == [(1, 1), (10, 1), (10, 11)]


def test_new_tokens_are_one_word_without_digits(old, new):
    """They join no digits and no punctuation to letters, and are spelled as no other token is."""
    names = {number: decode(new, [[number]])[0] for number in range(vocabulary_size(old), 340)}
    assert not any(character.isdigit() for name in names.values() for character in name)
    assert len(set(names.values()) | {decode(old, [[number]])[0] for number in range(300)}) >= 340 - 128
    assert {" ja", " jõ"} <= set(names.values())
    assert all(not name.strip(",\n") for name in names.values() if "," in name)


def test_rows_of_old_tokens_are_copied(old, new, tmp_path):
    """Each old row to its own id, also of two tokens of one text; a new one is a mean of several."""
    made = make_row_map(old, new, "mean")
    assert made.rows[:300] == [[number] for number in range(300)] and made.composed == 40
    content = json.loads(old.whole.to_str())
    content["added_tokens"].append(
        content["added_tokens"][0] | {"id": 300, "content": " the", "special": False}
    )
    content["model"]["vocab"][" the"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    twice = load_tokenizer(tmp_path)
    assert make_row_map(twice, twice, "mean").rows == [[number] for number in range(301)]


def test_words_that_are_tokens(old, tmp_path):
    """With ignore_merges a word that is a token becomes it; unchanged text still is, and texts come back."""
    content = json.loads(old.whole.to_str())
    content["model"]["ignore_merges"] = True
    # Kept after the model's vocabulary, as in Llama 3: the ids after it belong to added tokens.
    number = content["model"]["vocab"].pop("<|endoftext|>")
    content["model"]["vocab"] = {name: one - 1 for name, one in content["model"]["vocab"].items()}
    content["added_tokens"][0]["id"] = len(content["model"]["vocab"])
    (tmp_path / "like_llama").mkdir()
    (tmp_path / "like_llama" / "tokenizer.json").write_text(json.dumps(content))
    like_llama = load_tokenizer(tmp_path / "like_llama")
    assert number == 0 and like_llama.whole.token_to_id("<|endoftext|>") == 299
    careful = extended(like_llama, tmp_path / "new", 340, unchanged=OLD)
    assert careful.whole.token_to_id("<|endoftext|>") == 299 and vocabulary_size(careful) == 340
    assert encode(careful, OLD) == encode(like_llama, OLD)
    assert decode(careful, encode(careful, NEW)) == NEW
    assert sum(map(len, encode(careful, NEW))) < 0.7 * sum(map(len, encode(like_llama, NEW)))


def test_sentencepiece_form(tmp_path):
    """Words begin with ▁ where a text is one word to the model; bytes and unknown characters stay alone."""
    tokens = ["<unk>", "</s>", "<0xC3>", "<0xB5>", "▁", "m", "a", "j", "d", "▁m", ",", "<0x0A>"]
    old = sentencepiece(tmp_path / "old", tokens, [("▁", "m")], unk_token="<unk>", eos_token="</s>")
    made = extend(old, ["maja maja majõd, maja, maja\n"] * 5, 40)
    assert made.get_vocab_size() < 40  # there is no more to join
    new = [name for name, number in made.get_vocab().items() if number >= len(tokens)]
    assert "▁maja" in new and all("<" not in name and "▁" not in name[1:] and "," not in name for name in new)
    assert made.encode("maja maja", add_special_tokens=False).tokens == ["▁maja", "▁maja"]


def corpus_of(folder: Path) -> Path:
    with write_stage(folder / "corpus", "corpus", 1, {}, {}) as stage:
        documents = [
            {"id": f"{source}{n}", "text": text, "source": source, "metadata": {}}
            for source, texts in (("english", OLD), ("estonian", NEW))
            for n, text in enumerate(texts)
        ]
        write_documents(stage.folder / "documents" / "00000.jsonl.zst", documents)
        stage.counts["bytes_kept"] = 1000
    return folder / "corpus"


def recipe(**tokenizer) -> Recipe:
    return Recipe(
        name="t", language="et", corpus={"sources": [
            {"name": "english", "path": "e.txt"}, {"name": "estonian", "path": "n.txt"},
        ]},
        dataset={"heldout_share": 0.2}, tokenizer=tokenizer,
    )  # fmt: skip


def test_the_stage_extends(old, tmp_path):
    """A recipe's stage: a source stays as it was; transformers reads the folder with the same ids."""
    ready = shutil.copytree(old.folder, tmp_path / "ready")
    config = json.loads((ready / "tokenizer_config.json").read_text()) | {"tokenizer_class": "LlamaTokenizer"}
    (ready / "tokenizer_config.json").write_text(json.dumps(config))
    (ready / "tokenizer.model").write_text("the old vocabulary, which llama.cpp would read")
    asked = recipe(extend=str(ready), vocab_size=340, unchanged_sources=["english"])
    made = train_tokenizer(asked, corpus_of(tmp_path), tmp_path / "tokenizer")
    assert made.section["unchanged_sources"] == ["english"] and made.counts["largest_id"] == 339
    assert train_tokenizer(asked, tmp_path / "corpus", tmp_path / "tokenizer") == made
    assert not (tmp_path / "tokenizer" / "tokenizer.model").exists()
    new = load_tokenizer(tmp_path / "tokenizer")
    training = [text for text in OLD if not is_heldout(text, 0.2)]
    assert encode(new, training) == encode(old, training)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert [theirs(text)["input_ids"] for text in NEW[:5]] == encode(new, NEW[:5])
    assert theirs.eos_token_id == 0
    written = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())
    assert written == config | {"tokenizer_class": "PreTrainedTokenizerFast"}
    assert (tmp_path / "tokenizer" / "tokenizer.json").read_text() == new.whole.to_str(pretty=True)
    (tmp_path / "train" / "checkpoints" / "step_0000000001").mkdir(parents=True)
    other = recipe(extend=str(ready), vocab_size=341, unchanged_sources=["english"])
    with pytest.raises(KieloError, match="would be made again .* has step_0000000001, which was trained"):
        train_tokenizer(other, tmp_path / "corpus", tmp_path / "tokenizer")


def test_mistakes_are_named(old, tmp_path):
    """A size without room, a model that is no BPE, and keys that do not go together."""
    with pytest.raises(KieloError, match=r"vocab_size = 300 counts old tokens too, .* has 300. .* 8492, for"):
        extend(old, NEW, 300)
    with pytest.raises(KieloError, match="no training text"):
        extend(old, [], 340)
    content = json.loads(old.whole.to_str())
    content["model"]["end_of_word_suffix"] = "</w>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(KieloError, match="with end_of_word_suffix, and only byte-pair encoding"):
        extend(load_tokenizer(tmp_path), NEW, 340)
    for keys, said in {
        f'extend = "{tmp_path}"\npath = "{tmp_path}"': "one of them",
        'unchanged_sources = ["a"]': "which is not given",
        f'extend = "{tmp_path}"\nunchanged_sources = ["b"]': "no source has the name 'b'",
        f'extend = "{tmp_path}"\nunchanged_sources = ["a"]': "no text for new tokens",
        f'extend = "{tmp_path / "gone"}"': "tokenizer.extend = .* no tokenizer.json",
    }.items():
        path = tmp_path / "r.toml"
        path.write_text(f'name = "t"\nlanguage = "et"\n[corpus]\nsources = ["a.txt"]\n[tokenizer]\n{keys}\n')
        with pytest.raises(KieloError, match=said):
            read_recipe(str(path))
