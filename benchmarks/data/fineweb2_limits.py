"""Writes src/kielo/cards/quality/fineweb2.toml from a checkout of github.com/huggingface/fineweb-2.

    python benchmarks/data/fineweb2_limits.py FOLDER_OF_THE_CHECKOUT

English is not in FineWeb2: its row has the stop words of Gopher (Rae et al. 2021, arXiv:2112.11446, appendix
A.1.1) and the defaults of `QualityLimits`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

_ROOT = Path(__file__).resolve().parents[2]
CARD = _ROOT / "src/kielo/cards/quality/fineweb2.toml"
# Code of a card → FineWeb2's name. Serbo-Croatian has three there, and none for all.
NAMES = {
    "af": "afr_Latn", "ar": "arb_Arab", "az": "azj_Latn", "be": "bel_Cyrl", "bg": "bul_Cyrl", "bn":
    "ben_Beng", "ca": "cat_Latn", "cs": "ces_Latn", "cy": "cym_Latn", "da": "dan_Latn", "de":
    "deu_Latn", "el": "ell_Grek", "eo": "epo_Latn", "es": "spa_Latn", "et": "ekk_Latn", "eu":
    "eus_Latn", "fa": "fas_Arab", "fi": "fin_Latn", "fr": "fra_Latn", "ga": "gle_Latn", "gl":
    "glg_Latn", "gu": "guj_Gujr", "he": "heb_Hebr", "hi": "hin_Deva", "hu": "hun_Latn", "hy":
    "hye_Armn", "id": "ind_Latn", "is": "isl_Latn", "it": "ita_Latn", "ja": "jpn_Jpan", "ka":
    "kat_Geor", "kk": "kaz_Cyrl", "kn": "kan_Knda", "ko": "kor_Hang", "ky": "kir_Cyrl", "la":
    "lat_Latn", "lt": "lit_Latn", "lv": "lvs_Latn", "mk": "mkd_Cyrl", "ml": "mal_Mlym", "mn":
    "khk_Cyrl", "mr": "mar_Deva", "ms": "zsm_Latn", "mt": "mlt_Latn", "my": "mya_Mymr", "nb":
    "nob_Latn", "ne": "npi_Deva", "nl": "nld_Latn", "nn": "nno_Latn", "pa": "pan_Guru", "pl":
    "pol_Latn", "ps": "pbt_Arab", "pt": "por_Latn", "ro": "ron_Latn", "ru": "rus_Cyrl", "si":
    "sin_Sinh", "sk": "slk_Latn", "sl": "slv_Latn", "so": "som_Latn", "sq": "als_Latn", "sv":
    "swe_Latn", "sw": "swh_Latn", "ta": "tam_Taml", "te": "tel_Telu", "th": "tha_Thai", "tl":
    "fil_Latn", "tr": "tur_Latn", "tt": "tat_Cyrl", "uk": "ukr_Cyrl", "ur": "urd_Arab", "uz":
    "uzn_Latn", "vi": "vie_Latn", "zh": "cmn_Hani",
}  # fmt: skip
ENGLISH = {"name": "eng_Latn", "stop_words": ["the", "be", "to", "of", "and", "that", "have", "with"]}
_HEAD = """\
# Limits of the quality filters by language, from the configurations of github.com/huggingface/fineweb-2
# (Penedo et al. 2025, arXiv:2506.20920; Apache-2.0). Written by benchmarks/data/fineweb2_limits.py.
"""


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
    configurations = Path(sys.argv[1]) / "configs"
    rows = {"en": ENGLISH}
    for code, name in NAMES.items():
        text = (configurations / f"{name}.yml").read_text(encoding="utf-8")
        rows[code] = limits(name, yaml.safe_load(text))
    parts = [_HEAD]
    for code, row in sorted(rows.items()):
        lines = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in row.items())
        parts.append("\n".join([f"[{code}]", *lines]) + "\n")
    CARD.parent.mkdir(exist_ok=True)
    CARD.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
