"""The report page: what `gather` found -> one self-contained report.html.

`page.html.jinja` lays it out within `frame.html.jinja`, and the rows of its tables are made here. The page
fetches nothing (a content security policy forbids it), has no script, and escapes every text. A section's
figures are entries of `figures.FIGURES`. A stage that has not run gets a sentence instead.
"""

from collections import Counter
from typing import Any

from kielo.artifact.scores import MaskedScores
from kielo.artifact.tokenizer_files import RowMap, TokenizerMeasure
from kielo.recipe.amounts import format_seconds
from kielo.report.figures import FIGURES
from kielo.report.gather import Gathered
from kielo.report.units import HIDDEN_TOKENS, format_bytes
from kielo.resolve.overview import amount


def render(gathered: Gathered) -> str:
    def figures(section: str) -> list[tuple[str, str]]:
        """Return (SVG, caption) for each figure of a section, in the order of `FIGURES`."""
        found = (entry.drawn(gathered) for entry in FIGURES if entry.section == section)
        return [drawn for drawn in found if drawn is not None]

    return fill_template("page.html.jinja", **vars(gathered), figures=figures, rows=_rows(gathered))


def fill_template(name: str, **values: Any) -> str:
    """Return the page that a template of this folder makes of the values, whose texts it escapes.

    Raise LookupError if a value is missing.
    """
    import jinja2  # takes 0.1 s

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kielo", "report"), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.globals["zip"] = zip
    environment.filters |= {
        "amount": amount, "bytes": format_bytes, "format": format, "label": _label, "percent": _percent,
        "repr": repr, "setting": setting,
    }  # fmt: skip
    try:
        return environment.get_template(name).render(values)
    except jinja2.UndefinedError as problem:
        raise LookupError(str(problem)) from problem


def _rows(gathered: Gathered) -> dict[str, Any]:
    """Return the rows of each table by its name, of the stages that have run."""
    rows: dict[str, Any] = {
        "stages": [
            (row["name"], row["state"], "" if row["seconds"] is None else format_seconds(row["seconds"]))
            for row in gathered.stage_rows
        ],
        "versions": ({"kielo": gathered.kielo_version} | gathered.versions).items(),
    }
    if masked := gathered.masked_scores:
        rows |= _masked_rows(masked)
    if scores := gathered.scores:
        rows["heldout_sets"] = [
            (
                one.name, ", ".join(one.languages), f"{one.bits_per_byte:.3f}", format_bytes(one.bytes),
                f"{one.documents:,}",
            )
            for one in scores.sets
        ]  # fmt: skip
    if parity := gathered.parity:
        ours, theirs = parity.settings.ours, parity.settings.theirs
        names = list(dict.fromkeys([*ours, *theirs]))
        rows["settings"] = [
            (_label(name), setting(ours.get(name)), setting(theirs.get(name))) for name in names
        ]
        differing = parity.settings.differing
        rows["differing_settings"] = [number for number, name in enumerate(names) if name in differing]
    if training := gathered.training:
        rows["last_heldout_sets"] = [
            (name, ", ".join(one.languages), _three(one.loss), _three(one.bits_per_byte))
            for last in training.heldout[-1:]
            for name, one in (last.heldout_sets or {}).items()
        ]
    if funnel := gathered.funnel:
        rows |= {
            "funnel": [
                (
                    step.name if is_first else "", step.reason,
                    f"{step.documents:,}", format_bytes(step.bytes),
                    f"{step.documents_left:,}" if is_first else "",
                    format_bytes(step.bytes_left) if is_first else "",
                )
                for before, step in zip([None, *funnel.steps], funnel.steps)
                for is_first in [before is None or before.name != step.name]
            ],
            "bad_examples": [
                (source.name, bad) for source in funnel.sources for bad in source.bad_examples
            ],
            "thresholds": {
                kind: [(threshold, _percent(share)) for threshold, share in shares.items()]
                for kind, shares in funnel.threshold_table.items()
            },
        }  # fmt: skip
    if measured := gathered.tokenizer:
        rows |= _tokenizer_rows(measured, gathered.tokens or {}, gathered.packing)
    if made := gathered.row_map:
        rows["transplant"] = _transplant_rows(made)
    return rows


def _masked_rows(scores: MaskedScores) -> dict[str, Any]:
    baselines = scores.accuracy.baselines()
    pairs = scores.minimal_pairs
    return {
        "hidden_tokens": [
            ("This model", _percent(scores.accuracy.model)),
            *((HIDDEN_TOKENS[name].capitalize(), _percent(share)) for name, share in baselines.items()),
        ],
        "filled_masks": [
            (one.sentence(), one.truth or "–", one.likeliest()) for one in scores.filled_masks
        ],
        "minimal_pairs": [
            (name, f"{one.pairs:,}", _percent(one.token), _percent(one.within_word))
            for name, one in ({**pairs.groups, "all": pairs.all} if pairs else {}).items()
        ],
    }  # fmt: skip


def _tokenizer_rows(measured: TokenizerMeasure, tokens: dict[str, Any], packing: list[Any]) -> dict[str, Any]:
    sources = tokens.get("sources")
    packed = {**sources, "held-out": tokens["heldout"]} if sources else {}
    has_mask = any("tokens_with_loss" in count for count in packed.values())
    return {
        "tokenizer": [
            ("Vocabulary", f"{measured.vocabulary_size:,}"),
            ("Tokens per word", _three(measured.tokens_per_word)),
            ("Bytes per token", _three(measured.bytes_per_token)),
            ("Characters per token", _three(measured.characters_per_token)),
            ("Texts that come back exactly", _share(measured.exact_round_trip_share)),
            ("Vocabulary in use", _share(measured.vocabulary_used_share)),
            ("Tokens of a single byte", _share(measured.single_byte_token_share)),
            ("Rényi efficiency", _three(measured.renyi_efficiency)),
            ("Shannon efficiency", _three(measured.shannon_efficiency)),
        ],
        "packed": [
            (
                name, f"{count['tokens']:,}",
                *([f"{count.get('tokens_with_loss', count['tokens']):,}"] if has_mask else []),
                "unknown" if count["documents"] is None else f"{count['documents']:,}",
                ("about " if "folder" in count else "") + format_bytes(count["bytes"]),
            )
            for name, count in packed.items()
        ],
        "packing": [
            (
                of.source, f"{of.sequence_length:,}", f"{of.sequences:,}", f"{of.cut:.2%}",
                f"{of.cut_in_one_stream:.2%}", f"{of.filling:.3%}",
            )
            for of in packing
        ],
    }  # fmt: skip


def _transplant_rows(made: RowMap) -> list[tuple[str, str, str]]:
    """Return the numbers of rows that are copied, composed and random."""
    of_similar = f" ({len(made.weights):,} weighted by similarity)" if made.weights else ""
    kinds = {
        "Copied from a token of the same text, byte or role": made.copied,
        f"Made of {made.tokens_per_composed_row:.1f} old rows, on average{of_similar}": made.composed,
        "Random": made.random,
    }
    num_rows = max(1, len(made.rows))
    return [(kind, f"{number:,}", f"{number / num_rows:.1%}") for kind, number in kinds.items()]


def _label(key: str) -> str:
    return key[:1].upper() + key[1:].replace("_", " ")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _share(share: float) -> str:
    """Return a percentage, without decimals for 100 %."""
    return _percent(share) if share < 1 else "100 %"


def _three(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def setting(value: Any) -> str:
    """Return a setting as text: the ends of long lists, and counts of equal values of many tensors."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        shown = [setting(entry) for entry in value] or ["none"]
        return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "…", *shown[-2:]])
    if (
        isinstance(value, dict)
        and len(value) > 4
        and all(isinstance(entry, int | float) for entry in value.values())
    ):
        return "; ".join(
            f"{setting(entry)} for {count} tensors" for entry, count in Counter(value.values()).items()
        )
    if isinstance(value, dict):
        return "; ".join(
            f"{_label(key)}: {setting(entry)}" for key, entry in value.items() if entry not in (None, [], "")
        )
    return "–" if value is None else str(value)
