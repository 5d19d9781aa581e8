"""The report page: what `gather` found -> one self-contained report.html.

Nothing is fetched when it is opened (a content security policy forbids it), no script runs, every text from
outside is escaped. Each section is a function here, and its figures are entries of `figures.FIGURES`; a stage
that has not run gets a sentence instead.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from kielo.artifact.funnel import FunnelRow
from kielo.artifact.metrics import PrecisionVerdict
from kielo.artifact.scores import MaskedScores
from kielo.artifact.tokenizer_files import RowMap
from kielo.artifact.verify_results import Parity
from kielo.report.figures import FIGURES
from kielo.report.style import page_head
from kielo.report.units import HIDDEN_TOKENS, format_bytes, format_seconds
from kielo.resolve.overview import amount

TOKENIZER_NAMES = {
    "vocabulary_size": "Vocabulary",
    "tokens_per_word": "Tokens per word",
    "bytes_per_token": "Bytes per token",
    "characters_per_token": "Characters per token",
    "exact_round_trip_share": "Texts that come back exactly",
    "vocabulary_used_share": "Vocabulary in use",
    "single_byte_token_share": "Tokens of a single byte",
    "renyi_efficiency": "Rényi efficiency",
    "shannon_efficiency": "Shannon efficiency",
}


def render(gathered: dict[str, Any]) -> str:
    """Returns the whole page as HTML."""
    recipe = gathered["recipe"]
    is_encoder = recipe.train.objective == "masked_tokens"
    sections = [("masked-tokens", "Hidden tokens", _masked_tokens(gathered))] if is_encoder else []
    if not is_encoder or gathered["scores"]:  # of an encoder's causal use
        sections += [
            ("bits-per-byte", "Held-out bits per byte", _bits_per_byte(gathered)),
            ("samples", "What it writes", _samples(gathered)),
        ]
    if not is_encoder:
        sections.append(("parity", "Parity certificate", _parity(gathered)))
    sections += [
        ("training", "Training", _training(gathered)),
        ("chronicle", "Chronicle", _chronicle(gathered)),
        ("corpus", "Cleaning the text", _corpus(gathered)),
        ("tokenizer", "Tokenizer", _tokenizer(gathered)),
        ("export", "Exported model", _export(gathered)),
        ("stages", "Stages and versions", _stages(gathered)),
    ]
    if gathered["row_map"] is not None:
        title = "A new vocabulary for old weights"
        sections.insert(-2, ("transplant", title, _transplant(gathered)))
    body = "\n".join(
        f'<section id="{name}"><h2>{escape(title)}</h2>\n{content}\n</section>'
        for name, title, content in sections
    )
    return f"""{page_head(f"{recipe.name} · Kielo report")}
<body>
<header id="verdict">
<p class="eyebrow">Kielo report · language {escape(recipe.language)}</p>
<h1>{escape(recipe.name)}</h1>
{f"<p>{escape(recipe.description)}</p>" if recipe.description else ""}
{_verdict(gathered)}
{_headline_figures(gathered)}
</header>
<main>
{body}
</main>
</body>
</html>
"""


def _verdict(gathered: dict[str, Any]) -> str:
    """Says in one line if the model beats the baselines and computes the same as Hugging Face's."""
    claims = []
    scores, parity = gathered["scores"], gathered["parity"]
    if masked := gathered["masked_scores"]:
        beaten = [masked.accuracy.model > share for share in masked.accuracy.baselines().values()]
        text = f"beats {'all' if all(beaten) else sum(beaten)} of {len(beaten)} baselines"
        claims.append((all(beaten), f"The model {text} in predicting hidden tokens."))
    if scores and (baselines := scores.bits_per_byte.baselines()):
        beaten = [scores.bits_per_byte.model < bits for bits in baselines.values()]
        text = "beats all three baselines" if all(beaten) else f"beats {sum(beaten)} of three baselines"
        claims.append((all(beaten), f"The model {text} in held-out bits per byte."))
    if parity:
        text = "computes the same" if parity.passed else "does not compute the same"
        claims.append((parity.passed, f"Kielo {text} as Hugging Face transformers."))
    if not claims:
        return '<p class="verdict">This run has not been evaluated or verified yet.</p>'
    marks = {True: ("good", "✓"), False: ("bad", "✗")}
    spans = [
        f'<span class="{marks[good][0]}"><span aria-hidden="true">{marks[good][1]}</span> '
        f"{escape(text)}</span>"
        for good, text in claims
    ]
    return f'<p class="verdict">{" ".join(spans)}</p>'


def _headline_figures(gathered: dict[str, Any]) -> str:
    facts = []
    if scores := gathered["scores"]:
        facts.append((f"{scores.bits_per_byte.model:.3f}", "bits per byte, held-out"))
    if masked := gathered["masked_scores"]:
        facts.append((f"{100 * masked.accuracy.model:.1f} %", "hidden tokens predicted"))
    if overview := gathered["overview"]:
        facts.append((amount(overview.parameters), "parameters"))
    if parity := gathered["parity"]:
        facts.append((f"{parity.max_relative_loss_difference:.1e}", "largest loss difference to HF"))
    if gathered["training"] and gathered["training"]["tokens_per_second"]:
        facts.append((f"{gathered['training']['tokens_per_second']:,.0f}", "tokens per second"))
    if gathered["corpus"]:
        facts.append((format_bytes(gathered["corpus"]["bytes_kept"]), "clean text"))
    items = "".join(f"<div><dd>{escape(value)}</dd><dt>{escape(name)}</dt></div>" for value, name in facts)
    return f'<dl class="facts">{items}</dl>' if facts else ""


def _masked_tokens(gathered: dict[str, Any]) -> str:
    scores = gathered["masked_scores"]
    if not scores:
        return _not_run("evaluate")
    shares = {"This model": scores.accuracy.model}
    shares |= {HIDDEN_TOKENS[name].capitalize(): share for name, share in scores.accuracy.baselines().items()}
    table = html_table(
        ("", "Hidden tokens predicted"), [(name, f"{100 * one:.1f} %") for name, one in shares.items()]
    )
    sentence = (
        f"{scores.hidden_tokens:,} tokens of {scores.sequences:,} held-out sequences of "
        f"{scores.sequence_length} were hidden, {100 * scores.masking_rate:g} % of them by {scores.masking}; "
        f"the model's loss is {scores.loss:.3f} nats per hidden token. An encoder predicts some tokens from "
        "all others, so that bits per byte are not defined for this use."
    )
    return (
        f"{table}<p class='note'>{escape(sentence)}</p>{_pseudo_bits(scores)}{_filled_masks(gathered)}"
        f"{_minimal_pairs(scores)}{_part_of_speech(scores)}"
    )


def _pseudo_bits(scores: MaskedScores) -> str:
    bits = scores.pseudo_bits_per_byte
    if not bits:
        return ""
    rows = [
        ("Each token hidden alone", f"{bits.token:.3f}"),
        ("With the later tokens of its word", f"{bits.within_word:.3f}"),
    ]
    note = (
        f"{bits.tokens:,} tokens of {bits.texts:,} held-out documents, hidden one after another (Salazar et "
        f"al. 2020; Kauf and Ivanova 2023). Pseudo-perplexity of a token: {bits.perplexity:.1f}. The model "
        "sees both sides of a token, so these are less than the bits per byte of a model that writes."
    )
    return html_table(("", "Pseudo bits per byte"), rows) + f"<p class='note'>{escape(note)}</p>"


def _filled_masks(gathered: dict[str, Any]) -> str:
    masks = gathered["masked_scores"].filled_masks
    if not masks:
        return ""
    language = escape(gathered["recipe"].language, quote=True)
    rows = [(one.sentence(), one.truth or "–", one.likeliest()) for one in masks]
    table = html_table(("Sentence with a hidden word", "Truth", "Likeliest tokens"), rows, text_columns=3)
    return f'<h3>Hidden words</h3><div lang="{language}">{table}</div>'


def _minimal_pairs(scores: MaskedScores) -> str:
    pairs = scores.minimal_pairs
    if not pairs:
        return ""
    rows = [
        (name, f"{one.pairs:,}", f"{100 * one.token:.1f} %", f"{100 * one.within_word:.1f} %")
        for name, one in {**pairs.groups, "all": pairs.all}.items()
    ]
    header = (
        f"Minimal pairs of {pairs.file}",
        "Pairs",
        "Good one likelier",
        "With later tokens of its words",
    )
    return html_table(header, rows)


def _part_of_speech(scores: MaskedScores) -> str:
    tags = scores.part_of_speech
    if not tags:
        return ""
    rows = [
        ("Logistic regression of frozen states", f"{100 * tags.accuracy:.1f} %"),
        ("The most frequent tag of each word", f"{100 * tags.baseline:.1f} %"),
    ]
    note = (
        f"{tags.words:,} words, after {tags.training_words:,} with {tags.tags} tags; layer {tags.layer}, of "
        f"a word of several tokens {'their mean' if tags.pieces == 'mean' else 'the first one'}."
    )
    return html_table(("", "Parts of speech"), rows) + f"<p class='note'>{escape(note)}</p>"


def _bits_per_byte(gathered: dict[str, Any]) -> str:
    scores = gathered["scores"]
    if not scores or not scores.bits_per_byte.baselines():
        return _not_run("evaluate")
    header = ("Held-out set", "Languages", "Bits per byte", "Text", "Documents")
    rows = [
        (
            one.name,
            ", ".join(one.languages),
            f"{one.bits_per_byte:.3f}",
            format_bytes(one.bytes),
            f"{one.documents:,}",
        )
        for one in scores.sets
    ]
    return _figures("bits-per-byte", gathered) + (html_table(header, rows, text_columns=2) if rows else "")


def _samples(gathered: dict[str, Any]) -> str:
    scores = gathered["scores"]
    if not scores:
        return _not_run("evaluate")
    language = escape(gathered["recipe"].language, quote=True)
    quotes = "\n".join(
        f'<blockquote lang="{language}" dir="auto">'
        f"<b>{escape(sample.prompt)}</b>{escape(sample.text)}</blockquote>"
        for sample in scores.samples
    )
    settings = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in scores.sampling.items())
    note = f"Bold: the prompt, the opening of a held-out document. Sampling: {escape(settings)}."
    return f"{quotes}\n<p class='note'>{note}</p>"


def _parity(gathered: dict[str, Any]) -> str:
    parity: Parity | None = gathered["parity"]
    if not parity:
        return _not_run("verify")
    verdict = "passed" if parity.passed else "failed"
    sentence = (
        f"Same weights and samples, {parity.steps} optimiser steps in Kielo and in Hugging Face "
        f"transformers: largest relative loss difference {parity.max_relative_loss_difference:.1e}, "
        f"{parity.limit_in_words()}."
    )
    parts = [
        f'<p><strong class="{"good" if parity.passed else "bad"}">{verdict.capitalize()}.</strong> '
        f"{escape(sentence)}</p>"
    ]
    if parity.source:
        style = "" if parity.source.passed else ' class="bad"'
        parts.append(f"<p{style}>{escape(parity.source.in_words())}</p>")
    if parity.first_difference:
        found = _text(parity.first_difference.content())
        parts.append(f'<p class="bad">First difference: {escape(found)}</p>')
    parts.append(_figures("parity", gathered))
    differences = [
        ("Largest difference of logits", f"{parity.logits_max_difference:.1e}"),
        ("Largest relative difference of gradients", f"{parity.gradient_max_relative_difference:.1e}"),
    ]
    parts.append(html_table(("Before the first step", ""), differences))
    ours, theirs = parity.settings.ours, parity.settings.theirs
    names = list(dict.fromkeys([*ours, *theirs]))
    rows = [(_label(name), _text(ours.get(name)), _text(theirs.get(name))) for name in names]
    differing = [number for number, name in enumerate(names) if name in parity.settings.differing]
    table = html_table(("Effective setting", "Kielo", "transformers"), rows, text_columns=3, marked=differing)
    parts.append(f"<details open><summary>Settings side by side</summary>{table}</details>")
    return "\n".join(parts)


def _training(gathered: dict[str, Any]) -> str:
    training = gathered["training"]
    if not training or not training["steps"]:
        return _not_run("train")
    last = training["steps"][-1]
    speed = training["tokens_per_second"]
    sentence = f"{last.step:,} optimiser steps"
    if last.tokens:
        sentence += f" over {last.tokens:,} tokens"
    if speed:
        sentence += f", at {speed:,.0f} tokens per second (median)"
    if last.mfu:
        sentence += f", {100 * last.mfu:.1f} % of the accelerator's peak"
    if last.skipped:
        sentence += f"; steps skipped because they were not finite: {last.skipped}"
    if last.without_labels:
        sentence += f"; steps in which no label counted: {last.without_labels}"
    for reason, words in (("skip_steps", "as the recipe asks"), ("spike", "after spikes of the loss")):
        rows = [row for row in training["passed_over"] if row.passed_over_for == reason]
        if rows:
            ranges = ", ".join(f"{row.passed_over_from:,}–{row.step:,}" for row in rows)
            sentence += f"; steps passed over, {words}: {ranges}"
    for row in training["precisions"]:
        match row:
            case PrecisionVerdict(outcome="taken back"):
                sentence += f"; the precision before after step {row.step:,} again"
                sentence += ": the loss or the gradient norm had risen"
            case PrecisionVerdict():  # kept: the change itself is reported
                pass
            case _:
                sentence += f"; {row.precision} after step {row.step:,}"
    overview = gathered["overview"]
    table = html_table(("model", ""), overview.rows(), text_columns=2) if overview else ""
    return f"<p>{escape(sentence)}.</p>\n{table}{_figures('training', gathered)}{_heldout_sets(training)}"


def _chronicle(gathered: dict[str, Any]) -> str:
    """Returns the tables of the run's chronicle: attempts, changes, spikes, alerts, time."""
    parts = [
        f"<h3>{escape(table.title)}</h3>\n{html_table(table.header, table.rows, len(table.header))}"
        for table in gathered["chronicle"]
    ]
    return "\n".join(parts) or '<p class="note">No attempt was noted.</p>'


def _heldout_sets(training: dict[str, Any]) -> str:
    """Returns a table of the last score of each held-out set, by source and language; "" where none is."""
    last = training["heldout"][-1] if training["heldout"] else None
    if last is None or not last.heldout_sets:
        return ""
    rows = [
        (name, ", ".join(score.languages), _three(score.loss), _three(score.bits_per_byte))
        for name, score in last.heldout_sets.items()
    ]
    header = (f"Held-out set after step {last.step:,}", "Languages", "Loss", "Bits per byte")
    return html_table(header, rows, text_columns=2)


def _three(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _corpus(gathered: dict[str, Any]) -> str:
    corpus, funnel = gathered["corpus"], gathered["funnel"]
    if not corpus or not funnel:
        return _not_run("corpus")
    kept = (
        f"{format_bytes(corpus['bytes_kept'])} of {format_bytes(corpus['bytes_in'])} and "
        f"{corpus['documents_kept']:,} of {corpus['documents_in']:,} documents are left."
    )
    parts = [f"<p>{escape(kept)}</p>", _figures("corpus", gathered), _funnel_table(funnel.steps)]
    if examples := [(source.name, bad) for source in funnel.sources for bad in source.bad_examples]:
        table = html_table(("Source", "What was wrong"), examples, text_columns=2)
        parts.append(f"<details><summary>The first records that could not be read</summary>{table}</details>")
    for kind, shares in funnel.threshold_table.items():
        rows = [(threshold, f"{100 * share:.1f} %") for threshold, share in shares.items()]
        table = html_table(("Language threshold", f"Share of {kind} kept, in bytes"), rows)
        parts.append(
            f"<details><summary>{escape(_label(kind))} kept at other thresholds</summary>{table}</details>"
        )
    return "\n".join(parts)


def _funnel_table(steps: Sequence[FunnelRow]) -> str:
    """Returns a table with a row for each reason; a step's name and what it left are in its first row."""
    rows = []
    for before, step in zip([None, *steps], steps):
        is_first = before is None or before.name != step.name
        rows.append(
            (
                step.name if is_first else "",
                step.reason,
                f"{step.documents:,}",
                format_bytes(step.bytes),
                f"{step.documents_left:,}" if is_first else "",
                format_bytes(step.bytes_left) if is_first else "",
            )
        )
    header = ("Step", "Why dropped", "Documents dropped", "Text dropped", "Documents left", "Text left")
    return html_table(header, rows, text_columns=2)


def _tokenizer(gathered: dict[str, Any]) -> str:
    measured = gathered["tokenizer"]
    if not measured:
        return _not_run("tokenizer")
    rows = [(name, _measure(key, getattr(measured, key))) for key, name in TOKENIZER_NAMES.items()]
    parts = [html_table((f"Measured on {measured.measured_on}", ""), rows)]
    sources = (gathered["tokens"] or {}).get("sources")
    if sources:
        packed = {**sources, "held-out": gathered["tokens"]["heldout"]}
        has_mask = any("tokens_with_loss" in count for count in packed.values())
        rows = [
            (
                name,
                f"{count['tokens']:,}",
                *([f"{count.get('tokens_with_loss', count['tokens']):,}"] if has_mask else []),
                "unknown" if count["documents"] is None else f"{count['documents']:,}",
                ("about " if "folder" in count else "") + format_bytes(count["bytes"]),
            )
            for name, count in packed.items()
        ]
        with_loss = ("With loss",) if has_mask else ()
        parts.append(html_table(("Packed source", "Tokens", *with_loss, "Documents", "Text"), rows))
    if packing := gathered["packing"]:
        rows = [
            (
                of.source,
                f"{of.sequence_length:,}",
                f"{of.sequences:,}",
                f"{of.cut:.2%}",
                f"{of.cut_in_one_stream:.2%}",
                f"{of.filling:.3%}",
            )
            for of in packing
        ]
        header = ("Best-fit packed", "Sequence", "Sequences", "Documents cut", "In one stream", "Filling")
        parts.append(html_table(header, rows))
    return "\n".join(parts)


def _transplant(gathered: dict[str, Any]) -> str:
    """Returns how many rows are copied, composed and random, and the neighbours of some composed ones."""
    made: RowMap = gathered["row_map"]
    num_rows = max(1, len(made.rows))
    of_similar = f" ({len(made.weights):,} weighted by similarity)" if made.weights else ""
    kinds = {
        "Those of a token of the same text, byte or role": made.copied,
        f"Made of {made.tokens_per_composed_row:.1f} old rows, on average{of_similar}": made.composed,
        "Random": made.random,
    }
    rows = [(kind, f"{number:,}", f"{number / num_rows:.1%}") for kind, number in kinds.items()]
    parts = [html_table(("Rows of the new vocabulary", "Tokens", "Share"), rows)]
    if made.control_tokens:
        header = ("Control token", "Begins as")
        parts.append(html_table(header, sorted(made.control_tokens.items()), text_columns=2))
    return "\n".join(parts)


def _export(gathered: dict[str, Any]) -> str:
    if not gathered["export"]:
        return _not_run("export")
    path = gathered["export"]
    code = (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({path!r})\n"
        f"tokenizer = AutoTokenizer.from_pretrained({path!r})"
    )
    where = f"In <code>{escape(path)}</code>, with its model card (<code>README.md</code>)."
    return f"<p>{where}</p>\n<pre>{escape(code)}</pre>"


def _stages(gathered: dict[str, Any]) -> str:
    rows = [
        (row["name"], row["state"], "" if row["seconds"] is None else format_seconds(row["seconds"]))
        for row in gathered["stage_rows"]
    ]
    versions = {"kielo": gathered["kielo_version"]} | gathered["versions"]
    return (
        html_table(("Stage", "This run", "Time"), rows, text_columns=2)
        + "\n"
        + html_table(("Package", "Version"), versions.items())
    )


def _figures(section: str, gathered: dict[str, Any]) -> str:
    """Draws the figures of a section, in the order of `FIGURES`."""
    drawn = ((entry, entry.draw(gathered)) for entry in FIGURES if entry.section == section)
    return "\n".join(
        f"<figure>{svg}<figcaption>{escape(entry.caption_of(gathered))}</figcaption></figure>"
        for entry, svg in drawn
        if svg is not None
    )


def html_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1, marked: Iterable[int] = ()
) -> str:
    """Returns a table whose first `text_columns` are text and the others numbers; `marked` rows differ."""
    marked = set(marked)
    kinds = ["text" if column < text_columns else "number" for column in range(len(header))]
    head = "".join(
        f'<th class="{kind}" scope="col">{escape(name)}</th>'
        for kind, name in zip(kinds, header, strict=True)
    )
    body = "".join(
        f"<tr{' class=differs' if number in marked else ''}>"
        + "".join(
            f'<td class="{kind}">{escape(str(cell))}</td>' for kind, cell in zip(kinds, row, strict=True)
        )
        + "</tr>"
        for number, row in enumerate(rows)
    )
    shape = "pairs" if len(header) == 2 else "wide"
    table = f'<table class="{shape}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'


def _not_run(stage: str) -> str:
    return f'<p class="note">The {stage} stage has not run yet.</p>'


def _label(key: str) -> str:
    text = key.replace("_", " ")
    return text[:1].upper() + text[1:]


def _measure(key: str, value: float) -> str:
    if key.endswith("_share"):
        return f"{100 * value:.1f} %" if value < 1 else "100 %"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _text(value: Any) -> str:
    """Returns a setting as text: long lists by their ends, equal values of many tensors counted."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        shown = [_text(entry) for entry in value] or ["none"]
        return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "…", *shown[-2:]])
    if (
        isinstance(value, dict)
        and len(value) > 4
        and all(isinstance(entry, int | float) for entry in value.values())
    ):
        return "; ".join(
            f"{_text(entry)} for {count} tensors" for entry, count in Counter(value.values()).items()
        )
    if isinstance(value, dict):
        return "; ".join(
            f"{_label(key)}: {_text(entry)}" for key, entry in value.items() if entry not in (None, [], "")
        )
    return "–" if value is None else str(value)
