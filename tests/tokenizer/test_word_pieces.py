"""Words of tokens are those of the text, in scripts with marks, for each kind of vocabulary."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
import regex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kielo.tokenizer.load import load_tokenizer
from kielo.tokenizer.spelling import word_pieces

TEXTS = {
    "Hindi": "हिन्दी भारत की राजभाषा है और विश्व में करोड़ों लोग इसे बोलते हैं। क्या आप मुझे समझते हैं? क्‍या यह ठीक है।",
    "Tamil": "தமிழ் மொழி உலகின் மிகப் பழமையான மொழிகளில் ஒன்று. அவர்கள் நேற்று வீட்டிற்கு வந்தார்கள்.",
    "Thai": "ภาษาไทยเป็นภาษาที่มีระดับเสียงของคำแน่นอน และน้ำผึ้งนี้หวานมาก",
    "Hebrew": "בְּרֵאשִׁית בָּרָא אֱלֹהִים אֵת הַשָּׁמַיִם וְאֵת הָאָרֶץ׃",
    "Vietnamese": unicodedata.normalize("NFD", "Tiếng Việt là ngôn ngữ của người Việt Nam, chính thức."),
    "Persian": "می‌خواهم کتاب‌های خود را بخوانم. نمی‌دانم چرا.",
    "Estonian": "Väike maja — kas pole? “Jah,” ütles ta: 12 kord't, tore-kena.",
}
WORD = regex.compile(r"[\p{L}\p{M}\p{N}\u200c\u200d]+")
METASPACE = pre_tokenizers.Metaspace(prepend_scheme="never")


def trained(text: str, kind: str) -> Tokenizer:
    if kind == "Unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = METASPACE, decoders.Metaspace(prepend_scheme="never")
        trainer = trainers.UnigramTrainer(vocab_size=70, special_tokens=["<unk>"], unk_token="<unk>")
    elif kind == "WordPiece":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]"])
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text] * 5, trainer)
    return tokenizer


def groups(folder: Path, tokenizer: Tokenizer, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the number of the word of each token, as Kielo has it, and each token's place in the text."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    encoding = tokenizer.encode(text)
    go_on = word_pieces(load_tokenizer(folder)).go_on(np.array([encoding.ids]))[0]
    return [0, *np.cumsum(~go_on).tolist()], encoding.offsets


@pytest.mark.parametrize("kind", ["Unigram", "WordPiece", "byte-level BPE"])
@pytest.mark.parametrize("language", TEXTS)
def test_tokens_of_a_word_are_those_that_regex_finds(tmp_path, language, kind):
    text = TEXTS[language]
    numbers, places = groups(tmp_path, trained(text, kind), text)
    words = [
        {number for number, (begin, end) in zip(numbers, places) if begin < word.end() and word.start() < end}
        for word in WORD.finditer(text)
    ]
    assert all(len(word) == 1 for word in words)
    assert len(set.union(*words)) == len(words) > 1


def test_bytes_of_characters_stay_in_their_words(tmp_path):
    """In SentencePiece's form too, in which <0xE0> is a token."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = METASPACE
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    numbers, _ = groups(tmp_path, tokenizer, "हि a, b")
    assert numbers == [0] * 6 + [1, 2, 3, 4, 5]
