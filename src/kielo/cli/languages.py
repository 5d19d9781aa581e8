"""The verb languages: the cards, one card, the measurement of thresholds, and an identifier of one's own."""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kielo.artifact.manifest import write_text_atomically
from kielo.artifact.text_files import decode_text, read_lines
from kielo.cli.flags import takes
from kielo.cli.terminal import flat, print_json, print_table, print_text
from kielo.corpus.identifier_measurement import learn_from, measure
from kielo.recipe import cards
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import IDENTIFIERS, LEARNED_SUFFIX
from kielo.recipe.toml_text import toml_value

LABELLED = (".tsv", ".tsv.gz", ".tsv.zst")
_TITLES = ("code", "language", "script", "document threshold", "measured")


@takes("""
    $ kielo languages
    $ kielo languages sami
    $ kielo languages se --measure held_out.txt --identifier heliport
    $ kielo languages se --learn se.kielo_lid --sample se=sami.txt --sample nb=bokmaal.txt
    $ kielo languages se --copy
    [LANGUAGE]  a card to show: a code, the beginning of a name, or the file of a card
    --measure FILE  measure which thresholds keep these lines, which are in LANGUAGE. FILE.tsv: each line has
                    a code, a tab and its text
    --identifier NAME=py3langid  the identifier to measure: py3langid, lid176, heliport or a file
    --learn FILE  learn an identifier (FILE.kielo_lid) from samples and write it
    --sample SAMPLE... as samples  CODE=FILE: a language and lines in it, to learn from; one for each language
    --copy        write the card into the current folder, to change it
    --json
""")
def languages(options: argparse.Namespace) -> None:
    if options.language is None and (options.copy or options.measure):
        flag = "--copy" if options.copy else "--measure"
        raise KieloError(f"{flag} is about one language. Fix: kielo languages LANGUAGE {flag}")
    if options.learn:
        return _learn(options)
    if options.measure:
        return _measure(options)
    if options.language is None:
        return _list([cards.language(code) for code in cards.languages()], options.json)
    found = _asked(options.language)
    if options.copy:
        return _copy(found)
    if len(found) > 1:
        return _list(found, options.json)
    content = {
        key: value for key, value in found[0].model_dump(mode="json").items() if value not in ("", {}, [])
    }
    if options.json:
        return print_json([found[0].model_dump(mode="json")])
    print_table(["key", "value"], [(key, _shown(value)) for key, value in flat(content)])


def _asked(given: str) -> list[cards.Language]:
    """Return the card of a file or a code, else those whose name begins so."""
    if cards.is_own_card(given) or given in cards.languages():
        return [cards.language(given)]
    known = [cards.language(code) for code in cards.languages()]
    asked = given.casefold()
    exact = [card for card in known if card.name.casefold() == asked]
    found = exact or [
        card
        for card in known
        if any(word.startswith(asked) for word in (card.name.casefold(), *card.name.casefold().split()))
    ]
    if not found:
        raise KieloError(f"no language {given!r}{cards.without_language_card(given)}")
    return found


def _list(known: Sequence[cards.Language], as_json: bool) -> None:
    if as_json:
        return print_json([card.model_dump(mode="json") for card in known])
    print_table(_TITLES, [_row(card) for card in known])


def _row(card: cards.Language) -> tuple[str, ...]:
    named = [name for name in IDENTIFIERS if card.identifier_codes.get(name)]
    thresholds = [f"{name} ≥ {card.thresholds(name)[1]:g}" for name in named]
    measured = [name for name in named if card.measured_of(name)]
    is_all = "all" if measured == named else ", ".join(measured) or "none"
    return (
        card.code,
        card.name,
        card.script,
        ", ".join(thresholds) or "no identifier",
        is_all if named else "-",
    )


def _shown(value: Any) -> str:
    if isinstance(value, dict):  # of Measured
        taken = "".join(f", of {code} {share:.0%}" for code, share in value["taken"].items())
        return f"{value['own']:.1%} pass, of others {value['others']:.2%}{taken} ({value['text']})"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _copy(found: Sequence[cards.Language]) -> None:
    if len(found) > 1:
        raise KieloError(f"--copy: {', '.join(card.code for card in found)} are meant. Fix: one code")
    card, target = found[0], Path(f"{found[0].code}.toml")
    if os.path.lexists(target):
        raise KieloError(f"{target} exists already, and nothing was written. Fix: move it away")
    content = {
        key: value for key, value in card.model_dump(mode="json").items() if value not in ("", {}, [], None)
    }
    lines = [f"{key} = {toml_value(value)}" for key, value in content.items() if not isinstance(value, dict)]
    for key, table in content.items():
        if isinstance(table, dict):
            lines += [
                "",
                f"[{key}]",
                *(f"{toml_value(name)} = {toml_value(value)}" for name, value in table.items()),
            ]
    write_text_atomically(target, "\n".join(lines) + "\n")
    print_text(f'wrote {target}. To use it: language = "{target}" in a recipe')


def _lines_of(path: Path) -> Iterable[str]:
    if not path.is_file():
        raise KieloError(f"{path}: no such file. Fix: a file of text, one line each")
    for number, line in read_lines(path):
        yield decode_text(path, number, line)


def _measure(options: argparse.Namespace) -> None:
    """Print which share of the lines passes each threshold, and the tables for a card."""
    path, (card, *others) = Path(options.measure), _asked(options.language)
    if others:
        raise KieloError(f"--measure: {options.language} is {1 + len(others)} languages. Fix: one code")
    labelled = options.measure.endswith(LABELLED)
    lines = [_labelled(path, number, line) if labelled else (card.code, line)
             for number, line in enumerate(_lines_of(path), start=1)]  # fmt: skip
    found = measure(card, options.identifier, lines)
    text = f"{found.num_own:,} lines of {path.name}"
    if options.json:
        return print_json(
            {"code": card.code, "identifier": options.identifier, "threshold": found.threshold, "text": text,
             "too_short": found.too_short, "shares": {str(at): shares for at, shares in found.shares.items()}}
        )  # fmt: skip
    rows = [
        (f"{at:g}", f"{own:.1%}", "-" if other is None else f"{other:.2%}")
        for at, (own, other) in found.shares.items()
    ]
    print_table(["threshold", f"{card.name} kept", "others kept"], rows)
    if found.too_short:
        print_text(f"{found.too_short:,} lines of fewer than {found.min_characters} characters are left out")
    if found.taken_for:
        print_text(
            "taken for: " + ", ".join(f"{code} {share:.1%}" for code, share in found.taken_for.items())
        )
    own, other = found.shares[found.threshold]
    line = f"{toml_value(Path(options.identifier).name)} ="
    facts = f"text = {toml_value(text)}, own = {own:.3f}, others = {other or 0:.4f}"
    tables = [f"[{kind}_language_threshold]\n{line} {found.threshold:g}" for kind in ("line", "document")]
    print_text(f"For a card of your own (kielo languages {card.code} --copy):")
    print_text("\n".join([*tables, f"[measured]\n{line} {{ {facts} }}"]))


def _labelled(path: Path, number: int, line: str) -> tuple[str, str]:
    code, tab, text = line.partition("\t")
    if not tab:
        raise KieloError(f"{path}, line {number}: no tab. Fix: CODE, a tab, and the text")
    return code.strip(), text


def _learn(options: argparse.Namespace) -> None:
    """Learn from nine of ten lines, print what the tenth show, and write the identifier."""
    target = Path(options.learn)
    if target.suffix != LEARNED_SUFFIX:
        raise KieloError(
            f"--learn {target}: does not end with {LEARNED_SUFFIX}. Fix: {target.stem}{LEARNED_SUFFIX}"
        )
    if os.path.lexists(target):
        raise KieloError(f"{target} exists already, and nothing was written. Fix: move it away")
    samples: dict[str, list[str]] = {}
    for given in options.samples or ():
        code, sign, file = given.partition("=")
        if not sign or not code or code in samples:
            raise KieloError(f"--sample {given}: does not fit. Fix: --sample CODE=FILE, each code once")
        samples[code] = list(_lines_of(Path(file)))
    model, held_out = learn_from(samples)
    model.write(target)
    rows: Mapping[str, tuple[int, float, str]] = held_out
    if options.json:
        return print_json(
            {
                code: {"lines": lines, "right": right, "taken_for": taken}
                for code, (lines, right, taken) in rows.items()
            }
        )
    print_table(
        ["code", "held-out lines", "right", "most are taken for"],
        [(code, lines, f"{right:.1%}", taken or "-") for code, (lines, right, taken) in rows.items()],
    )
    print_text(f'wrote {target}. To use it: corpus.language_identifier = "{target}" in a recipe')
