"""Vocabularies that are learned as a unigram model, beside those of byte-pair encoding."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram

from kielo.artifact.manifest import write_stage
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from kielo.recipe.sections import Recipe
from kielo.tokenizer import learn_vocabulary
from kielo.tokenizer.learn_vocabulary import extend
from kielo.tokenizer.load import decode, encode, load_tokenizer, vocabulary_size
from kielo.tokenizer.make_row_map import make_row_map
from kielo.tokenizer.spelling import ALPHABET, BYTES, cut_words
from kielo.tokenizer.stage_inputs import is_heldout
from kielo.tokenizer.train import TrainingSample, save, train_on
from tests.written_documents import write_documents

LATIN = ["ma", "ja", "jõ", "gi", "koer", "lind", "öö", "vee", "suur", "tee"]
CYRILLIC = ["ма", "ль", "чик", "до", "мо", "река"]
RESERVED = ("<|tool|>", "[PAUSE]")
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *RESERVED, "<|padding|>")


def words(draw: random.Random, syllables: list[str]) -> str:
    return " ".join("".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(12))


def texts(number: int = 300) -> list[str]:
    """Sentences of made-up words in two scripts, with numbers and one rare character."""
    draw = random.Random(1)
    made = [
        f"{words(draw, LATIN)}, {words(draw, CYRILLIC)} {n}!\n{words(draw, LATIN)}." for n in range(number)
    ]
    return [*made, "veeŧee"]


def recipe(**tokenizer) -> Recipe:
    return Recipe(
        name="t", language="et", tokenizer={"vocab_size": 600, "reserved_tokens": RESERVED, **tokenizer},
        corpus={"sources": [{"name": "a", "path": "a.jsonl", "kind": "instructions"}]},
    )  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A tokenizer of each kind, with the marks of chats and two reserved tokens."""
    folder = tmp_path_factory.mktemp("learned")
    for model in ("unigram", "bpe"):
        asked = recipe(model=model)
        template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        save(train_on(texts(), asked), folder / model, template, None, RESERVED)
    return {model: folder / model for model in ("unigram", "bpe")}


@pytest.fixture(scope="module", params=["unigram", "bpe"])
def tokenizer(request, folders):
    return load_tokenizer(folders[request.param])


@settings(max_examples=150, deadline=None)
@given(text=ANY_TEXT)
def test_every_text_comes_back(tokenizer, text):
    """Also one of unseen scripts, decomposed letters, ▁, and of what the vocabularies spell themselves."""
    text += "▁<0x41>Ġ " + text
    assert decode(tokenizer, encode(tokenizer, [text])) == [text]


@pytest.fixture(scope="module")
def theirs(tokenizer):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tokenizer.folder)


@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT | st.text(st.sampled_from("majöõре 12.\n▁Ġ<|>")))
def test_hugging_face_gives_the_same_ids(tokenizer, theirs, text):
    """AutoTokenizer's ids of any text, and the text back; a control token in a text is one to it alone."""
    assume(not any(name in text for name in CONTROL))
    assert theirs(text)["input_ids"] == encode(tokenizer, [text])[0]
    assert theirs.decode(encode(tokenizer, [text])[0]) == text


def test_hugging_face_knows_the_reserved_tokens(tokenizer, theirs):
    """As special tokens, and the vocabulary has the same size."""
    assert len(theirs) == vocabulary_size(tokenizer) and set(RESERVED) <= set(theirs.all_special_tokens)


def test_control_tokens_in_a_text_are_text(tokenizer):
    """By name they are tokens with the first ids; in a text none of them is written."""
    assert [tokenizer.whole.token_to_id(name) for name in CONTROL] == [0, 1, 2, 3, 4, 5]
    text = "".join(f" {name}{name} koer{name}" for name in CONTROL)
    (row,) = encode(tokenizer, [text])
    assert min(row) > 5 and decode(tokenizer, [row]) == [text]


def test_pieces_stay_within_words(tokenizer):
    """No piece joins two scripts, two digits or two words; all bytes are tokens."""
    assert set(ALPHABET.values()) <= set(tokenizer.whole.get_vocab())
    for token in tokenizer.whole.get_vocab():
        if token not in CONTROL:
            piece = bytes(BYTES[one] for one in token).decode("utf-8", "ignore")
            assert len(cut_words(piece)) <= 1, piece


def test_a_unigram_piece_is_whole_characters(folders):
    """Of several bytes, each is text by itself; a character that is rarer than 1 in 2,000 is in no piece."""
    tokenizer = load_tokenizer(folders["unigram"])
    pieces = [token for token in tokenizer.whole.get_vocab() if token not in CONTROL and len(token) > 1]
    found = [bytes(BYTES[one] for one in token).decode() for token in pieces]
    assert len(found) > 100 and "jõgi" in found and not any("ŧ" in piece for piece in found)
    assert len(encode(tokenizer, ["ŧ"])[0]) == len("ŧ".encode())


def test_unigram_writes_the_likeliest_pieces(folders):
    """Of all ways to cut a word, by a search of our own over the scores in tokenizer.json."""
    tokenizer = load_tokenizer(folders["unigram"])
    model = json.loads((folders["unigram"] / "tokenizer.json").read_text())["model"]
    scores = {piece: score for piece, score in model["vocab"] if piece not in CONTROL}
    by_id = [score for _, score in model["vocab"]]
    for word in {word for text in texts(20) for word in cut_words(text)}:
        spelled = "".join(ALPHABET[byte] for byte in word.encode())
        best = [0.0] + [float("-inf")] * len(spelled)
        for end in range(1, len(spelled) + 1):
            ways = ((start, spelled[start:end]) for start in range(end))
            best[end] = max(best[start] + scores[piece] for start, piece in ways if piece in scores)
        (row,) = encode(tokenizer, [word])
        assert sum(by_id[number] for number in row) == pytest.approx(best[-1], abs=1e-6)


def test_the_vocabulary_has_the_size_that_was_asked_for(tokenizer):
    """Control tokens and bytes among them."""
    assert vocabulary_size(tokenizer) == tokenizer.whole.get_vocab_size() == 600


def test_bytes_and_pieces_of_a_unigram_vocabulary(monkeypatch):
    """A byte that no text has is 10 less likely than the rarest piece; pieces have 16 characters at most, as
    SentencePiece's, and nothing is shown of the learning.
    """
    asked, trainer = [], learn_vocabulary.trainers.UnigramTrainer
    named = SimpleNamespace(UnigramTrainer=lambda **keys: asked.append(keys) or trainer(**keys))
    monkeypatch.setattr(learn_vocabulary, "trainers", named)
    made = learn_vocabulary.unigram_tokenizer(
        ["maja jõgi maja", "koer majas"] * 9, 280, [AddedToken("<e>", special=True)]
    )
    scores = dict(json.loads(made.to_str())["model"]["vocab"])
    assert scores["<e>"] == scores[ALPHABET[0xF5]] == min(scores.values())
    learned = [score for score in scores.values() if score != scores["<e>"]]
    assert min(learned) - scores["<e>"] == pytest.approx(10)
    assert json.loads(made.to_str())["model"]["byte_fallback"] is False
    (keys,) = asked
    assert (keys["max_piece_length"], keys["show_progress"], keys["special_tokens"]) == (16, False, [])
    # 23 pieces beside the bytes, and half as many letters, which are bytes too: all but the õ.
    assert keys["vocab_size"] == 23 + len(" aegijkmors")
    learn_vocabulary.unigram_tokenizer(["abab", "abc"], 260, [AddedToken("<e>", special=True)])
    assert asked[1]["vocab_size"] == 3 + len("a")
    smallest = learn_vocabulary.unigram_tokenizer(
        ["abab"], 257, [AddedToken("<e>", special=True)]
    )  # nothing is learned
    assert {score for _, score in json.loads(smallest.to_str())["model"]["vocab"]} == {-10}


@pytest.mark.parametrize("size", [262, 263, 267])
def test_a_unigram_vocabulary_may_have_no_room_for_pieces(size):
    """256 bytes, end-of-text, padding, two marks of chats, two reserved tokens, and little more."""
    learned = train_on(texts(30), recipe(model="unigram", vocab_size=size))
    assert 262 <= learned.get_vocab_size() <= size
    assert learned.decode(learned.encode("ma ŧ ▁").ids) == "ma ŧ ▁"


def test_a_sentencepiece_vocabulary_is_mapped_to_ours_and_back(folders, tmp_path):
    """▁maja of an XLM-R-like unigram model is our " maja"; what it lacks is a mean of its pieces."""
    old = Tokenizer(
        Unigram([("<unk>", 0.0), ("</s>", 0.0), ("▁maja", -3.0), ("▁", -2.0), ("ma", -4.0), ("ja", -4.0)], 0)
    )
    old.pre_tokenizer, old.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    old.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "</s>")])
    (tmp_path / "tokenizer.json").write_text(old.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
    theirs, ours = load_tokenizer(tmp_path), load_tokenizer(folders["unigram"])
    made = make_row_map(theirs, ours, "mean")
    ids = ours.whole.get_vocab()
    assert made.rows[ids["Ġmaja"]] == [2] and made.rows[ids["ma"]] == [4] and made.rows[ids["maja"]] == [4, 5]
    assert made.rows[ids["koer"]] == [] and made.control_tokens["<|endoftext|>"] == "</s>"
    back = make_row_map(ours, theirs, "mean")
    assert back.rows[2:] == [[ids["Ġmaja"]], [ids["Ġ"]], [ids["ma"]], [ids["ja"]]]


def test_a_unigram_vocabulary_is_not_extended(folders):
    """Its pieces are no merges; the message names the fix."""
    with pytest.raises(KieloError, match="of the type Unigram, .* Fix: tokenizer.path"):
        extend(load_tokenizer(folders["unigram"]), texts(5), 700)


COMPLAINTS = {
    "extend": (['tokenizer.model="unigram"', 'tokenizer.extend="hf:a/b"'], "adds merges to a BPE vocabulary"),
    "merges": (
        ['tokenizer.model="unigram"', "tokenizer.min_frequency=3"],
        "tokenizer.min_frequency is for merges",
    ),
    "a ready one": (['tokenizer.reserved_tokens=["<a>"]', 'tokenizer.path="hf:a/b"'], "names a ready one"),
    "a word": (['tokenizer.reserved_tokens=["word"]'], "'word' does not fit"),
    "twice": (['tokenizer.reserved_tokens=["<a>", "<a>"]'], "each once"),
    "another model": (['tokenizer.model="wordpiece"'], "tokenizer.model"),
}


@pytest.mark.parametrize("what", COMPLAINTS)
def test_recipes_that_do_not_fit(what):
    """Refused as the recipe is read, naming the key."""
    sets, message = COMPLAINTS[what]
    with pytest.raises(KieloError, match=message):
        read_recipe("own_text", ['name="t"', 'language="et"', 'corpus.sources="a.txt"', *sets])


def test_shares_of_languages_in_the_sample(tmp_path):
    """9 to 1 by bytes; 3 to 1 at temperature 2, where the smaller language counts 2.5 times."""
    sizes, length = {"et": 1800, "fi": 200}, 50
    documents = [
        {"id": f"{code}{n}", "text": f"{code} {n}".ljust(length, "x"), "source": code, "metadata": {}}
        for code, number in sizes.items() for n in range(number)
    ]  # fmt: skip
    with write_stage(tmp_path / "corpus", "corpus", 1, {}, {}) as stage:
        write_documents(stage.folder / "documents" / "00000.jsonl.zst", documents)
        stage.counts["bytes_kept"] = length * sum(sizes.values())
        others = {"origin": "", "files": 1, "documents_in": 0, "bytes_in": 0, "documents_kept": 0}
        stage.counts["sources"] = [
            others | {"name": code, "bytes_kept": length * n} for code, n in sizes.items()
        ]
    sources = [{"name": code, "path": "a.txt", "language": [code]} for code in sizes]

    def shares(**asked) -> list[float]:
        given = Recipe(name="t", language="et", corpus={"sources": sources}, tokenizer=asked)
        sample = list(TrainingSample(given, tmp_path / "corpus", set(sizes)))
        assert sample == list(TrainingSample(given, tmp_path / "corpus", set(sizes)))
        assert not any(is_heldout(text, given.dataset.heldout_share) for text in sample)
        return [sum(text.startswith(code) for text in sample) for code in sizes]

    kept = [
        sum(not is_heldout(one["text"], 0.02) for one in documents if one["source"] == code) for code in sizes
    ]
    assert shares() == kept
    more, less = shares(temperature=2)
    assert more == pytest.approx(1500 * 0.98, rel=0.05) and less == pytest.approx(500 * 0.98, rel=0.05)
    more, less = shares(temperature=2, max_sample_bytes=20_000)
    assert more == pytest.approx(300 * 0.98, rel=0.15) and less == pytest.approx(100 * 0.98, rel=0.15)
