"""Damage that is planted in clean text, and which share of it the corpus stage removes or mends.

    apt-get download libreoffice-help-{et,fi,cs,hu,tr,pl,el,ru}     # Debian packages, as the demos have
    for file in *.deb; do dpkg-deb -x $file FOLDER; done
    python benchmarks/data/planted_damage.py FOLDER

The help pages of eight languages in three scripts are cleaned without the keys that are measured. Half of the
documents stay as they are. Each other document gets one class of damage. Phone numbers are phonenumbers'
examples of the language's country, written in four ways. Then the corpus stage runs with all
keys. Damage counts as removed or mended if each line that is left was a line of the text before the damage.
Writes results/planted_damage.json. Bars: 0.98 of each class, and 0.99 of the clean text.
"""

import argparse
import json
import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any
from unicodedata import normalize

import phonenumbers
import regex
from phonenumbers import PhoneNumberFormat, PhoneNumberType

from kielo.artifact.documents import read_documents
from kielo.corpus.corpus_stage import run_corpus
from kielo.corpus.personal_data import COUNTRIES
from kielo.recipe.quality_limits import marked_letters_of
from kielo.recipe.sections import Corpus, Recipe, Source

RESULTS = Path(__file__).resolve().parents[1] / "results" / "planted_damage.json"
LANGUAGES = ("et", "fi", "cs", "hu", "tr", "pl", "el", "ru")
LEAST_CHARACTERS, MOST_PAGES = 600, 1000
KEYS: dict[str, Any] = {
    "damage": ("spaced_letters", "loops", "capitals", "keyword_lists", "lost_diacritics"),
    "repair_encoding": True,
    "mask_personal_data": ("email", "ip", "iban", "phone"),
}
STROKES = str.maketrans("đĐłŁøØıħĦðÐəƏ", "dDlLoOihHdDeE") | {
    ord(letter): bare for letter, bare in zip("ßæœþÞ", ("ss", "ae", "oe", "th", "Th"), strict=True)
}
PERSONAL = ("mari.maasikas@example.org", "DE89 3704 0044 0532 0130 00", "193.40.5.73")
CLEAN, MASKS_ASIDE = "clean text kept", "clean text kept, masks of numbers aside"
WORDS_OF_PHONES = {
    "et": "telefon", "fi": "puh.", "cs": "tel.", "hu": "telefon:", "tr": "Tel:", "pl": "tel.", "el": "τηλ.",
    "ru": "тел.",
}  # fmt: skip
BOILERPLATE = "Menu | Login | Cookie settings | © 2019 – 2024"


def without_marks(text: str) -> str:
    bare = "".join(one for one in normalize("NFD", text) if not regex.match(r"\p{Mn}", one))
    return normalize("NFC", bare).translate(STROKES)


def spaced(text: str, drawn: random.Random) -> str:
    return "\n".join(" ".join(line) for line in text.split("\n"))


def looped(text: str, drawn: random.Random) -> str:
    """Repeat some words of a line where they are."""
    lines = text.split("\n")
    number = max(range(len(lines)), key=lambda one: len(lines[one]))
    words = lines[number].split()
    place, length = drawn.randrange(max(1, len(words) - 6)), drawn.randrange(4, 12)
    piece = words[place : place + length]
    lines[number] = " ".join(words[:place] + piece * drawn.randrange(5, 30) + words[place + length :])
    return "\n".join(lines)


def keywords(text: str, drawn: random.Random) -> str:
    words = [word for word in regex.findall(r"[\p{L}\p{M}]+", text) if len(word) > 4]
    return text + "\n" + ", ".join(drawn.choices(words, k=drawn.randrange(20, 80)))


def mojibake(text: str, drawn: random.Random) -> str:
    """Read the UTF-8 as the encoding of a byte that a person's program had by default."""
    return text.encode().decode("latin-1")


def phones(code: str) -> dict[str, str]:
    """Return number → how it is written: with a country's code, grouped, or plain beside a word."""
    country = COUNTRIES[code].split()[0]
    found: dict[str, str] = {}
    for kind in (PhoneNumberType.MOBILE, PhoneNumberType.FIXED_LINE):
        number = phonenumbers.example_number_for_type(country, kind)
        for form in (PhoneNumberFormat.E164, PhoneNumberFormat.INTERNATIONAL, PhoneNumberFormat.NATIONAL):
            text = phonenumbers.format_number(number, form)
            found[text] = text
        plain = "".join(filter(str.isdecimal, text))
        found[plain] = f"{WORDS_OF_PHONES[code]} {plain}"
    return found


def personal(text: str, code: str) -> str:
    first = text.partition("\n")[0]
    written = {one: one for one in PERSONAL} | phones(code)
    return "\n".join([text, *(f"{first} {one}." for one in written.values())])


def boilerplate(text: str, drawn: random.Random) -> str:
    return BOILERPLATE + "\n" + text


DAMAGE: dict[str, Callable[[str, random.Random], str]] = {
    "spaced letters": spaced,
    "loops": looped,
    "capitals": lambda text, drawn: text.upper(),
    "keyword lists": keywords,
    "lost diacritics": lambda text, drawn: without_marks(text),
    "mojibake": mojibake,
    "boilerplate lines": boilerplate,
}
DAMAGE_BY_LANGUAGE: dict[str, Callable[[str, str], str]] = {"personal data": personal}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with usr/share/libreoffice/help/LANGUAGE")
    parser.add_argument("--languages", nargs="*", default=LANGUAGES)
    parser.add_argument("--pages", type=int, default=MOST_PAGES)
    options = parser.parse_args()
    rows = {code: measured(code, options.folder, options.pages) for code in options.languages}
    names = [*DAMAGE, *DAMAGE_BY_LANGUAGE, CLEAN, MASKS_ASIDE]
    shares = {name: {code: row[name] for code, row in rows.items() if name in row} for name in names}
    found = {
        "date": date.today().isoformat(),
        "keys": KEYS,
        "documents": {code: row["documents"] for code, row in rows.items()},
        "removed_or_mended": shares,
        "lowest": {name: min(row.values()) for name, row in shares.items() if row},
    }
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1, ensure_ascii=False))


def measured(code: str, folder: Path, num_pages: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        pages = folder / "usr/share/libreoffice/help" / code
        clean = [text for _, text in cleaned(code, pages, Path(place) / "clean", {}, num_pages)]
        texts = [text for text in clean if len(text) >= LEAST_CHARACTERS]
        drawn, planted, kinds = random.Random(code), {}, applicable(code)
        file = Path(place) / "damaged.jsonl"
        with file.open("w", encoding="utf-8") as out:
            for number, text in enumerate(texts):
                kind = CLEAN if number % 2 else kinds[number // 2 % len(kinds)]
                damaged = text if number % 2 else damage(kind, text, code, drawn)
                planted[f"{number}"] = (kind, text)
                out.write(json.dumps({"id": f"{number}", "text": damaged}, ensure_ascii=False) + "\n")
        # Lines recur within a help page's siblings, and are no damage here but for the planted line.
        left = dict(cleaned(code, file, Path(place) / "left", KEYS))
    counts: dict[str, Counter[bool]] = defaultdict(Counter)
    once = [number for number, text in left.items() if BOILERPLATE in text][:1]
    for number, (kind, text) in planted.items():
        now = left.get(number)
        counts[kind][is_right(kind, text, code, now) or number in once] += 1
        if kind == CLEAN:
            lines = text.split("\n")
            now_lines = (now or "").split("\n")
            aside = len(now_lines) == len(lines) and all(
                one == other or "[PHONE]" in other or "[IP]" in other
                for one, other in zip(lines, now_lines, strict=True)
            )
            counts[MASKS_ASIDE][aside] += 1
    shares = {kind: round(count[True] / count.total(), 4) for kind, count in counts.items()}
    return {"documents": len(texts)} | shares


def applicable(code: str) -> list[str]:
    """Return the classes that a language can have. Few letters of Russian have marks."""
    is_marked = marked_letters_of(code) is not None
    kinds = [*DAMAGE, *DAMAGE_BY_LANGUAGE]
    return [kind for kind in kinds if is_marked or kind != "lost diacritics"]


def damage(kind: str, text: str, code: str, drawn: random.Random) -> str:
    by_language = DAMAGE_BY_LANGUAGE.get(kind)
    return by_language(text, code) if by_language else DAMAGE[kind](text, drawn)


def is_right(kind: str, text: str, code: str, now: str | None) -> bool:
    if kind == CLEAN:
        return now == text
    if kind in ("personal data", "boilerplate lines"):
        planted = (*PERSONAL, *phones(code)) if kind == "personal data" else (BOILERPLATE,)
        return now is None or not any(one in now for one in planted)
    # Lines with other digits are the work of the masks, which the clean text measures.
    return now is None or set(now.split("\n")) <= set(text.split("\n"))


def cleaned(
    code: str, path: Path, folder: Path, keys: dict[str, Any], num_pages: int | None = None
) -> Iterator[tuple[str, str]]:
    source = Source(path=str(path), max_documents=num_pages)
    corpus = Corpus(sources=(source,), workers=1, deduplicate_lines=True, **keys)
    recipe = Recipe(name="damage", language=code, corpus=corpus)
    run_corpus(recipe, folder, folder.with_name("raw"), progress=False)
    for file in sorted((folder / "documents").iterdir()):
        yield from ((document["id"], document["text"]) for document in read_documents(file))


if __name__ == "__main__":
    main()
