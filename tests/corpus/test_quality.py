"""Filters of quality beside datatrove's, repaired encodings beside the text before the damage, and masks."""

import json
import random

import pytest
from datatrove.data import Document
from datatrove.pipeline.filters import fineweb_quality_filter, gopher_quality_filter, gopher_repetition_filter

from kielo.artifact.stage_counts import Funnel
from kielo.artifact.stage_json import read_json
from kielo.corpus.corpus_stage import run_corpus
from kielo.corpus.damage import not_judged
from kielo.corpus.mojibake import RepairEncoding
from kielo.corpus.personal_data import MaskPersonalData
from kielo.corpus.quality import QualityFilter
from kielo.corpus.step import cut_tokens, effective_settings, split_document
from kielo.recipe.cards import language, languages
from kielo.recipe.errors import KieloError
from kielo.recipe.quality_limits import known_limits, limits_of
from kielo.recipe.sections import Corpus
from tests.corpus.counted import counted
from tests.corpus.texts import ESTONIAN, recipe

KINDS = ("email", "ip", "iban", "national_number", "phone")


def of_lines(text: str):
    return split_document(text, "d/0", "d", (0, 0), {})


def damaged_texts(number: int) -> list[str]:
    """Estonian sentences in other orders, repeated, cut, as lists, with numbers or without ends."""
    drawn, words = random.Random(number), " ".join(ESTONIAN).split()
    texts = []
    for _ in range(60):
        drawn.shuffle(words)
        text = words[: drawn.randrange(5, 110)]
        place, length = drawn.randrange(len(text)), drawn.randrange(1, 13)
        text += text[place : place + length] * drawn.choice([0, 0, 1, 3, 9])
        width, joint = drawn.choice([3, 9, 30]), drawn.choice([".\n", "\n", ".\n- ", "...\n", "\n• "])
        lines = [" ".join(text[start : start + width]) for start in range(0, len(text), width)]
        lines += lines[: drawn.choice([0, 0, 1, 2])]
        if drawn.random() < 0.2:
            lines = [line.replace("a", "1 2 ") for line in lines]
        texts.append(joint.join(lines) + drawn.choice([".", "#" * 30, "…"]))
    return texts


def test_verdicts_are_those_of_datatrove_for_equal_words(monkeypatch):
    limits = limits_of(["et"])
    for module in (gopher_repetition_filter, fineweb_quality_filter, gopher_quality_filter):
        monkeypatch.setattr(module, "split_into_words", lambda text, language: cut_tokens(text))
    filters = [
        gopher_repetition_filter.GopherRepetitionFilter(
            dup_para_frac=0, dup_line_char_frac=0, dup_para_char_frac=0,
            dup_line_frac=limits.max_repeated_lines,
            top_n_grams=list(zip((2, 3, 4), limits.max_top_ngram, strict=True)),
            dup_n_grams=list(zip(range(5, 11), limits.max_repeated_ngrams, strict=True)),
        ),
        fineweb_quality_filter.FineWebQualityFilter(
            short_line_thr=999, char_duplicates_ratio=0.1, line_punct_thr=limits.min_ended_lines,
            new_line_ratio=limits.max_line_ends_per_word,
        ),
        gopher_quality_filter.GopherQualityFilter(
            max_avg_word_length=limits.max_mean_word_length, min_avg_word_length=limits.min_mean_word_length,
            stop_words=list(limits.stop_words), max_non_alpha_words_ratio=limits.min_words_with_letters,
        ),
    ]  # fmt: skip
    step, reasons = QualityFilter(limits), set()
    for number in range(5):
        for text in damaged_texts(number):
            verdicts = (one.filter(Document(text=text, id="a")) for one in filters)
            theirs = next((verdict[1] for verdict in verdicts if verdict is not True), None)
            ours = step.verdict(text, cut_tokens(text))
            assert (ours is None) == (theirs is None), (text, ours, theirs)
            reasons.add((ours, theirs))
    # Each reason of ours stands for one or two of theirs, and all but a few are met.
    assert len(reasons) > 9 and (None, None) in reasons
    assert ("repeated sequences of 5 words", "duplicated_5_n_grams") in reasons
    assert ("lists of bullets", "gopher_too_many_bullets") in reasons


def test_words_of_the_filters():
    assert cut_tokens("Tallinna-Tartu maantee, 3,5 km... don't 1990-ndad!") == [
        "Tallinna", "-", "Tartu", "maantee", ",", "3,5", "km", "...", "don't", "1990", "-", "ndad", "!",
    ]  # fmt: skip


def test_a_line_of_many_numbers_is_masked_whole():
    step = MaskPersonalData(KINDS, ("fi",))
    document = of_lines("040 1234567, " * 300 + "\n" + "a@" + "a." * 100_000 + "1")
    list(step.run([document]))
    assert document.lines[0] == "[PHONE], " * 300 and counted(step)["masked/phone"] == 300


@pytest.mark.parametrize(
    ("languages", "said"),
    [
        (["et", "fi"], "et and fi have different limits"),
        (["hbs"], "FineWeb2 has no limits for hbs"),
        (["ja"], "ja is written without spaces"),
    ],
)
def test_languages_without_limits_are_refused(languages, said):
    with pytest.raises(KieloError, match=said):
        limits_of(languages)


def test_words_of_a_segmenter_are_judged_by_limits_for_them():
    """Thirty sentences of Japanese letters are thirty words without a segmenter."""
    limits, drawn = limits_of(["ja"], is_cut=True), random.Random(1)
    text = "".join("".join(drawn.choices("あいうえおかきくけこさしすせそ", k=30)) + "。" for _ in range(30))

    def in_pairs(words: list[str]) -> list[str]:
        return [word[start : start + 2] for word in words for start in range(0, len(word), 2)]

    verdicts = [QualityFilter(limits, cut).judge(of_lines(text)) for cut in (None, in_pairs)]
    assert limits.name == "jpn_Jpan"
    assert verdicts == ["under 50 words", "few of the language's commonest words"]


def test_limits_of_many_languages():
    """fao_Latn.yml by hand, a language of which FineWeb2 has two scripts, and one with two of its own."""
    faroese, bengali = limits_of(["fo"]), limits_of(["bn"])
    found = (faroese.max_repeated_lines, faroese.max_mean_word_length, faroese.max_line_ends_per_word)
    assert (faroese.name, bengali.name, found) == ("fao_Latn", "ben_Beng", (0.371, 12, 2.0))
    assert known_limits("crh") is None and sum(known_limits(code) is not None for code in languages()) > 550
    assert not_judged(["keyword_lists"], [language(code) for code in ("crh", "ja", "fo")]) == (
        "keyword lists in ja and keyword lists without commas in crh"
    )


def test_encodings_are_repaired_and_right_text_stays():
    damage = {
        "Täna õhtul sõidame Võrru": "latin-1",
        "œuvre – naïve": "cp1252",
        "Šokk žürii": "cp1257",
        "Привет, мир": "cp1251",
        "Mõõdukas öö": "macroman",
    }
    right = [*damage, "Łódź wół", "plain", "50 Ã 20"]
    step = RepairEncoding()
    document = of_lines("\n".join([line.encode().decode(name) for line, name in damage.items()] + right))
    assert list(step.run([document])) == [document] and document.lines == [*damage, *right]
    assert counted(step)["repaired_lines/"] == len(damage)


# Language, word of a contact and a plain number.
CONTACTS = [
    *((code, "Kontakt:", number) for code, number in
      (("et", "53456789"), ("pl", "512345678"), ("cs", "601123456"))),
    ("et", "Klienditugi", "53456789"), ("et", "Infotelefon", "53456789"),
    ("pl", "kom.", "512345678"), ("pl", "Numer", "512345678"), ("el", "κιν.", "6912345678"),
    ("pt", "Tlm", "912345678"), ("pt", "contacto", "912345678"), ("pt", "Contato:", "912345678"),
    ("en", "Number:", "2079460958"), ("ru", "Контакты:", "9161234567"),
]  # fmt: skip
# Published examples of numbers, and twins whose check digit is wrong.
PERSONAL = [
    ("et", "_mari@ut.ee_ mari@ut.ee- jaan@ut.ee_x 8.8.8.8:443, 8.8.4.4: vaikib",
     "[EMAIL]_ [EMAIL]- jaan@ut.ee_x [IP]:443, [IP]: vaikib", {"email": 2, "ip": 2}),
    ("fi", "Viesti info@firma.fi-osoitteeseen, info@firma.ee-le. a@b.co-op.fi, mutta ei info@firma.fi_osoite",
     "Viesti [EMAIL]-osoitteeseen, [EMAIL]-le. [EMAIL], mutta ei info@firma.fi_osoite", {"email": 3}),
    ("fi", "64 bytes from 2a00:1450:400f:80c::200e: icmp_seq=1, 2a00:1450::200e:, 2a00:1450::200e",
     "64 bytes from [IP]: icmp_seq=1, [IP]:, [IP]", {"ip": 3}),
    ("fi", "IP:85.253.1.2 osoite:85.253.1.2, portti ::ffff:85.253.1.2 64:ff9b::85.253.1.2 :85.253.1.2",
     "IP:[IP] osoite:[IP], portti [IP] [IP] :[IP]", {"ip": 5}),
    # No addresses: private ones, times, nine parts, and a part of one above 255.
    ("fi", "::ffff:192.168.1.1 IP:10.0.0.1 klo 12:30:45: 10:20:30 1:2:3:4:5:6:7:8:9 ::ffff:85.253.1.256 "
     "2a00:1450::200e::1 IP:85.253.1.2.3 fe80::1:", None, {}),
    ("et", "Kirjuta mari.maasikas+too@cs.ut.ee täna", "Kirjuta [EMAIL] täna", {"email": 1}),
    ("et", "Helista +372 5123 4567 või 5123 4567.", "Helista [PHONE] või [PHONE].", {"phone": 2}),
    ("et", "Isikukood 37605030299, mitte 37605030298", "Isikukood [NATIONAL_NUMBER], mitte 37605030298",
     {"national_number": 1}),
    ("fi", "Tunnus 131052-308T eikä 131052-308U", "Tunnus [NATIONAL_NUMBER] eikä 131052-308U",
     {"national_number": 1}),
    ("et", "Konto EE38 2200 2210 2014 5685, EE39 2200 2210 2014 5685",
     "Konto [IBAN], EE39 2200 2210 2014 5685", {"iban": 1}),
    ("et", "Masin 193.40.5.73, 192.168.1.1, 2001:7d0:8c::1, kell 12:30:45",
     "Masin [IP], 192.168.1.1, [IP], kell 12:30:45", {"ip": 2}),
    ("et", "Maksis 5 123 456 eurot, 31-12-1999, ISO 9001-2015", None, {}),
    ("da", "20 345 678 kroner den 31-12-1999", None, {}),
    # Plain digits need a code or a word of telephones, within 40 characters.
    ("pl", "Od -2147483648 do 512345678, telewizor 512345679, (512345680)", None, {}),
    ("pl", "Zadzwoń 512345678 lub 512-345-678, 48512345678",
     "Zadzwoń [PHONE] lub [PHONE], [PHONE]", {"phone": 3}),
    ("pl", f"Tel{37 * '.'}512345678", f"Tel{37 * '.'}[PHONE]", {"phone": 1}),
    ("pl", f"Tel{38 * '.'}512345678", None, {}),
    # The numbers of a list, of which the word is beside the first alone.
    ("et", "Telefonid: 53456789, 53456790; 53456791 / 53456792 ja 53456793 | 53456794 hommikul 53456795",
     "Telefonid: [PHONE], [PHONE]; [PHONE] / [PHONE] ja [PHONE] | [PHONE] hommikul 53456795", {"phone": 6}),
    ("et", f"Summad 53456788, 53456789 ja +372 53456790, 53456791 ehk 53456792, 0,53456793{40 * '.'}",
     f"Summad 53456788, 53456789 ja [PHONE], [PHONE] ehk [PHONE], 0,53456793{40 * '.'}", {"phone": 3}),
    *((code, f"{word} {number}", f"{word} [PHONE]", {"phone": 1}) for code, word, number in CONTACTS),
    ("pl", "512345678 dzwonić po 18", "[PHONE] dzwonić po 18", {"phone": 1}),
    ("pl", "Komu 512345678, numa 512345679, enr 512345680", None, {}),
    ("ru", "Пишите 89161234567, телевизор 9161234567", "Пишите [PHONE], телевизор 9161234567", {"phone": 1}),
    ("el", "21 0123 4567, τηλ.2101234567", "[PHONE], τηλ.[PHONE]", {"phone": 2}),
    ("zh", "手机13812345678", "手机[PHONE]", {"phone": 1}),
    ("el", "=CSCH(1) επιστρέφει 0,8509181282", None, {}),
    ("et", "2019 38001085718 ja 37605030299 1", "2019 [NATIONAL_NUMBER] ja [NATIONAL_NUMBER] 1",
     {"national_number": 2}),
    ("cs", "RČ 710319/2745", "RČ [NATIONAL_NUMBER]", {"national_number": 1}),
    ("et", "EE38 2200 2210 2014 5685 BIC HABAEE2X", "[IBAN] BIC HABAEE2X", {"iban": 1}),
    ("zh", "请联系abc@qq.com咨询详情。身份证号11010519491231002X的持有人",
     "请联系[EMAIL]咨询详情。身份证号[NATIONAL_NUMBER]的持有人", {"email": 1, "national_number": 1}),
    ("fr", "3141592653" * 500, None, {}),
    ("et", "Aastal 2024 oli 1 365 000 inimest, vt lk 10-12 ja @kasutaja", None, {}),
]  # fmt: skip


@pytest.mark.parametrize(("code", "text", "masked", "counts"), PERSONAL)
def test_personal_data_are_masked_and_counted(code, text, masked, counts):
    step = MaskPersonalData(KINDS, (code,))
    document = of_lines(text)
    list(step.run([document]))
    assert document.join() == (masked or text)
    found = {key.removeprefix("masked/"): n for key, n in counted(step).items() if key.startswith("masked")}
    assert found == counts
    untouched = of_lines(text)
    list(MaskPersonalData((), (code,)).run([untouched]))
    assert untouched.join() == text


def test_the_keys_in_a_corpus(tmp_path, capsys):
    """Reasons, repaired lines and masked data are counted by source; keys at defaults leave no trace."""
    source = tmp_path / "in.jsonl"
    good = " ".join(ESTONIAN) + " Kirjuta a.b@ut.ee ja kõik."
    wrong = " ".join(reversed(ESTONIAN)).encode().decode("latin-1")
    looped = " ".join(ESTONIAN[:2]) + " " + ("Metsa servas kasvasid kõrged kuused. " * 20)
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in (good, wrong, looped)))
    keys = {"quality": "fineweb2", "repair_encoding": True, "mask_personal_data": KINDS}
    run_corpus(recipe(source, **keys), tmp_path / "corpus", tmp_path / "raw")
    funnel = read_json(tmp_path / "corpus", Funnel)
    (described,) = funnel.sources
    assert (described.documents_kept, described.repaired_lines, described.masked) == (2, 1, {"email": 1})
    assert [row.documents for row in funnel.steps if row.name == "quality"] == [1]
    said = capsys.readouterr().err
    assert "1 lines in another encoding were repaired" in said and "1 email" in said
    plain = effective_settings(Corpus(sources=str(source)), language("et"))
    assert not {"quality", "repair_encoding", "mask_personal_data", "quality_limits", "phone_rule"} & set(
        plain
    )
    judged = effective_settings(
        Corpus(sources=[{"name": "a", "path": "a"}], quality="fineweb2"), language("et")
    )
    words = judged["quality_limits"]["a"]["stop_words"]
    assert words == sorted(limits_of(["et"]).stop_words)  # the same in each process
    masked = [Corpus(sources=str(source), mask_personal_data=kinds) for kinds in (KINDS, KINDS[:4])]
    rules = [effective_settings(corpus, language("et")) for corpus in masked]
    assert [one.get("phone_rule") for one in rules] == [2, None]  # corpora of the rule before are not current
    assert {one.get(f"{kind}_rule") for one in rules for kind in ("email", "ip")} == {3}
