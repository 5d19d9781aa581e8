"""Ids of Kielo's tokenizers, compared with a plain script that knows llama.cpp's pattern `qwen35`."""

import json

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from kielo.recipe.sections import Recipe
from kielo.tokenizer.load import encode, load_tokenizer
from kielo.tokenizer.piece_cache import ENDS_LINES, PieceCache
from kielo.tokenizer.train import save, train_on

# From llama.cpp's src/llama-vocab.cpp, LLAMA_VOCAB_PRE_TYPE_QWEN35.
QWEN35 = (
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\\r\\n\\p{L}\\p{N}]?[\\p{L}\\p{M}]+|\\p{N}"
    "| ?[^\\s\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
# In the tokenizer.json of runs before 2026-11-25.
OLDER = (
    r"[^\r\n\p{L}\p{M}\p{N}]?(?:[\p{Latin}][\p{Latin}\p{M}]*|[\p{Cyrillic}][\p{Cyrillic}\p{M}]*"
    r"|[\p{Greek}][\p{Greek}\p{M}]*|[\p{Hangul}][\p{Hangul}\p{M}]*|[\p{Han}々〆][\p{Han}々〆\p{M}]*"
    r"|[\p{Hiragana}][\p{Hiragana}\p{M}]*|[\p{Katakana}ー][\p{Katakana}ー\p{M}]*|[\p{L}\p{M}]+)|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+|[\r\n]+|[^\S\r\n]+(?=[\r\n]|$)|[^\S\r\n]+(?!\S)|\s+"
)
# Article 1 of the Universal Declaration of Human Rights, and what texts have beside words.
TEXTS = {
    "Estonian": "Kõik inimesed sünnivad vabadena ja võrdsetena oma väärikuselt.\n\n  Neile on antud "
    "mõistus; südametunnistus (1948) „ja“ nende suhtumist üksteisesse peab kandma vendluse vaim!\r\n",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में "
    "जन्मजात स्वतन्त्रता और समानता प्राप्त है।\n\tउन्हें बुद्धि और "
    "अन्तरात्मा की देन प्राप्त है — १९४८।",
    "Tamil": "மனிதப் பிறிவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்; அவர்கள் மதிப்பிலும், உரிமைகளிலும் சமமானவர்கள்.  \n",
    "Thai": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ ต่างมีเหตุผลและมโนธรรม ๒๔๙๑\n\n",
    "mixed": "It's 2026 WE'LL don'T'ſ  x=1;\n\n\n   y\t\t"
    "koerмир漢字 e\u0301\u0323 .,!\r\n \r\n  \u0301a \u0e31",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    recipe = Recipe(name="t", language="et", corpus={"sources": ["a.txt"]}, tokenizer={"vocab_size": 700})
    save(train_on([*TEXTS.values()] * 3, recipe), folder)
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    """Return text → ids: words by the pattern, bytes by GPT-2's alphabet, then merges by their rank."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    ranks = {tuple(pair): rank for rank, pair in enumerate(model["merges"])}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}

    def ids(text: str) -> list[int]:
        found = []
        for word in regex.findall(QWEN35, text):
            parts = [letters[byte] for byte in word.encode()]
            while pairs := [
                (ranks[pair], at) for at, pair in enumerate(zip(parts, parts[1:])) if pair in ranks
            ]:
                _, at = min(pairs)
                parts[at : at + 2] = [parts[at] + parts[at + 1]]
            found += [model["vocab"][part] for part in parts]
        return found

    return ids


@pytest.mark.parametrize("language", TEXTS)
def test_ids_are_those_of_a_plain_script(folder, plain, language):
    """In one piece and in many, as the pack stage encodes."""
    text, tokenizer = TEXTS[language], load_tokenizer(folder)
    cache = PieceCache(tokenizer)
    assert cache.cut_rule == (True, True, False)
    assert encode(tokenizer, [text]) == [plain(text)]
    assert cache.encode([text])[0].ids.tolist() == plain(text)


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from("".join(dict.fromkeys("".join(TEXTS.values()))) + "'sSlL 1.\n\r\t")))
def test_ids_of_any_text_are_those_of_a_plain_script(folder, plain, text):
    assert encode(load_tokenizer(folder), [text]) == [plain(text)]


@pytest.mark.parametrize("language", ["Hindi", "Tamil", "Thai"])
def test_no_word_begins_with_a_mark(folder, language):
    """Each mark stays with its letter: patterns without marks cut there."""
    words = load_tokenizer(folder).whole.pre_tokenizer.pre_tokenize_str(TEXTS[language])
    cut = [TEXTS[language][slice(*place)] for _, place in words]
    assert "".join(cut) == TEXTS[language]
    assert not any(regex.match(r"\p{M}", word) for word in cut)
    assert any(
        regex.match(r"\p{M}", word) for word in regex.findall(QWEN35.replace(r"\p{M}", ""), TEXTS[language])
    )


def test_older_tokenizers_are_still_encoded_in_pieces(folder, tmp_path):
    """Their pattern has the cut rule that it had, and gives its own words."""
    content = json.loads((folder / "tokenizer.json").read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = OLDER
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())
    older = load_tokenizer(tmp_path)
    cache = PieceCache(older)
    assert OLDER in ENDS_LINES and cache.cut_rule == (True, True, False)
    for text in TEXTS.values():
        assert cache.encode([text])[0].ids.tolist() == encode(older, [text])[0]
    words = [word for word, _ in older.whole.pre_tokenizer.pre_tokenize_str("koerмир.\n")]
    assert len(words) == 4
