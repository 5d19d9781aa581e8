"""Writes src/kielo/cards/quality/fineweb2.json from a checkout of github.com/huggingface/fineweb-2.

    git clone https://github.com/huggingface/fineweb-2
    python benchmarks/data/fineweb2_limits.py fineweb-2 --commit $(git -C fineweb-2 rev-parse HEAD)

Every language with a card and a configuration gets a row. If FineWeb2 has a language in several scripts, the
row has the limits of the card's script. A language of several scripts gets none, unless NAMES says which.
English is not in FineWeb2: its row has the stop words of Gopher (Rae et al. 2021, arXiv:2112.11446, appendix
A.1.1) and the defaults of `QualityLimits`.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from fontTools.unicodedata import script_name

from kielo.artifact.manifest import write_text_atomically
from kielo.recipe.cards import Language, language, languages

_ROOT = Path(__file__).resolve().parents[2]
CARD = _ROOT / "src/kielo/cards/quality/fineweb2.json"
# Code of a card → FineWeb2's name, if the card does not decide. Its name of Pashto is a group of languages.
NAMES = {"ps": "pbt_Arab", "uz": "uzn_Latn"}
ENGLISH = {"name": "eng_Latn", "stop_words": ["the", "be", "to", "of", "and", "that", "have", "with"]}
SOURCE = "configurations of github.com/huggingface/fineweb-2 (arXiv:2506.20920), Apache-2.0"


def name_of(card: Language) -> str | None:
    """Return FineWeb2's name of the language in the script of its card."""
    if len(card.fineweb2) < 2 or card.code in NAMES:
        return NAMES.get(card.code) or next(iter(card.fineweb2), None)
    names = [name for name in card.fineweb2 if script_name(name.partition("_")[2]) == card.script]
    return names[0] if len(names) == 1 else None


def limits(name: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of FineWeb2 by the names of `QualityLimits`."""
    return {
        "name": name,
        "max_repeated_lines": found["dup_line_frac"],
        "max_top_ngram": [share for _, share in found["top_n_grams"]],
        "max_repeated_ngrams": [share for _, share in found["dup_n_grams"]],
        "min_ended_lines": found["line_punct_thr"],
        "max_line_ends_per_word": found["new_line_ratio"],
        "min_mean_word_length": found["min_avg_word_length"],
        "max_mean_word_length": found["max_avg_word_length"],
        "min_words_with_letters": found["max_non_alpha_words_ratio"],
        "stop_words": found["stopwords"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--commit", required=True)
    options = parser.parse_args()
    rows = {"en": ENGLISH}
    for code in languages():
        if (name := name_of(language(code))) is not None:
            text = (options.checkout / "configs" / f"{name}.yml").read_text(encoding="utf-8")
            rows[code] = limits(name, yaml.safe_load(text))
    lines = ",\n".join(
        f'"{code}": {json.dumps(row, ensure_ascii=False)}' for code, row in sorted(rows.items())
    )
    head = f'"source": "{SOURCE}",\n"commit": "{options.commit}"'
    write_text_atomically(CARD, f'{{{head},\n"languages": {{\n{lines}\n}}}}\n')
    print(len(rows))


if __name__ == "__main__":
    main()
