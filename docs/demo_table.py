"""Writes the demos' figures into README.md and pages of docs, by `python docs/demo_table.py [RUN_FOLDER]`.

In: the summary of a run, and an encoder's scores; with a run folder, its files first become
benchmarks/results/demo_estonian.json, demo_estonian_bert.json for an encoder, or demo_new_language.json for
one that follows another run. Out: Markdown tables in README.md, docs/encoders.md and docs/tokenizer.md,
and the report's figure of bits per byte as docs/pictures/demo_bits_per_byte.svg.
"""

import json
import platform
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace

from kielo.artifact.manifest import read_manifest
from kielo.artifact.scores import BitsPerByte, MaskedScores, Summary
from kielo.artifact.stage_counts import RowMap
from kielo.artifact.stage_json import read_json
from kielo.recipe.read import read_recipe
from kielo.report.figures import bits_per_byte_bars
from kielo.report.units import HIDDEN_TOKENS

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "demo_estonian.json"
ENCODER_RESULT = RESULT.with_name("demo_estonian_bert.json")
NEW_LANGUAGE_RESULT = RESULT.with_name("demo_new_language.json")
PICTURE = ROOT / "docs" / "pictures" / "demo_bits_per_byte.svg"
BEGIN, END = "<!-- demo: written by docs/demo_table.py", "<!-- /demo -->"


def table(result: dict) -> str:
    """Returns the Markdown table of one summary."""
    summary = result["summary"]
    corpus = summary["corpus"]
    rows = [
        ("text read", f"{corpus['documents_in']:,} documents, {corpus['bytes_in'] / 1e6:.2f} MB"),
        (
            "kept as Estonian, deduplicated",
            f"{corpus['documents_kept']:,} documents, {corpus['bytes_kept'] / 1e6:.2f} MB",
        ),
        *_figures(summary),
        ("all stages", f"{_seconds(summary['stages']):.0f} s"),
    ]
    return _two_columns(rows) + f"\n\n({result['date']}, {result['machine']})\n"


def new_language_table(result: dict, from_scratch: dict) -> str:
    """Return the Markdown table of a run that followed another; from_scratch: the result of demo_estonian."""
    summary, first, rows_of = result["summary"], result["first"], result["rows"]
    speed, model, *others = _figures(summary)
    text = summary["corpus"]["bytes_kept"]
    same = f"**{from_scratch['summary']['bits_per_byte']['model']:.3f}**"
    rows = [
        (
            "the English model",
            f"{first['bytes_kept'] / 1e6:.2f} MB of text, {first['tokens'] / 1e6:.2f} M tokens, "
            f"{_seconds(first['stages']):.0f} s",
        ),
        (
            "Estonian after it",
            f"{text / 1e6:.2f} MB of text, {summary['tokens'] / 1e6:.2f} M tokens, "
            f"{_seconds(summary['stages']):.0f} s",
        ),
        (
            "rows of the Estonian vocabulary",
            f"{rows_of['copied']:,} of the English one, {rows_of['composed']:,} means of its rows, "
            f"{rows_of['random']:,} random",
        ),
        speed,
        model,
        ("… as many tokens from random weights (`demo_estonian`)", same),
        *others,
        ("both runs, all stages", f"{_seconds(first['stages']) + _seconds(summary['stages']):.0f} s"),
    ]
    return _two_columns(rows) + f"\n\n({result['date']}, {result['machine']})\n"


def _figures(summary: dict) -> list[tuple[str, str]]:
    """Returns rows of a decoder: speed, bits per byte with the baselines, and parity."""
    bits, parity = summary["bits_per_byte"], summary["parity"]
    return [
        ("training speed", f"{summary['tokens_per_second']:,.0f} tokens/s"),
        ("held-out bits per byte: **the model**", f"**{bits['model']:.3f}**"),
        ("… byte 6-gram, interpolated", f"{bits['ngram']:.3f}"),
        ("… `xz -9`", f"{bits['xz']:.3f}"),
        ("… token unigram", f"{bits['unigram']:.3f}"),
        (
            "largest relative loss difference to Hugging Face",
            f"{parity['max_relative_loss_difference']:.1e} over {parity['steps']} steps",
        ),
    ]


def _seconds(stages: dict) -> float:
    return sum(stage["seconds"] for stage in stages.values())


def _two_columns(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def encoder_table(result: dict) -> str:
    """Returns the Markdown tables of one encoder: its figures, and what it puts in the place of words."""
    summary = result["summary"]
    scores = MaskedScores.model_validate_json(json.dumps(result["scores"]))
    baselines = scores.accuracy.baselines()
    rows = [
        ("text", f"{summary['corpus']['bytes_kept'] / 1e6:.2f} MB of Estonian"),
        ("model", f"{summary['parameters'] / 1e6:.2f} M parameters, {summary['tokens'] / 1e6:.2f} M tokens"),
        ("hidden tokens predicted: **the model**", f"**{100 * scores.accuracy.model:.1f} %**"),
        *((f"… {HIDDEN_TOKENS[name]}", f"{100 * share:.1f} %") for name, share in baselines.items()),
        ("pseudo bits per byte", f"{scores.pseudo_bits_per_byte.token:.3f}"),
        ("training speed", f"{summary['tokens_per_second']:,.0f} tokens/s"),
        ("all stages", f"{_seconds(summary['stages']):.0f} s"),
    ]
    filled = [(one.sentence(), one.truth, one.likeliest()) for one in scores.filled_masks]
    lines = [_two_columns(rows), ""]
    lines += ["| held-out sentence with a hidden word | truth | likeliest tokens |", "|---|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in filled]
    return "\n".join(lines) + f"\n\n({result['date']}, {result['machine']})\n"


def picture(result: dict) -> str:
    """Returns the report's figure of bits per byte as an SVG file, in the page's light colours."""
    scores = SimpleNamespace(
        bits_per_byte=BitsPerByte(**result["summary"]["bits_per_byte"]),
        ngram_order=read_recipe("demo_estonian").recipe.evaluate.ngram_order,
    )
    style = files("kielo.report").joinpath("frame.html.jinja").read_text(encoding="utf-8")
    colours = dict(reversed(re.findall(r"(--\w+): (#\w{6})", style)))  # the first of a name is the light one
    drawn = bits_per_byte_bars(SimpleNamespace(scores=scores))
    svg = re.sub(r"var\((--\w+)\)", lambda found: colours[found[1]], drawn)
    ground = f'<rect width="100%" height="100%" fill="{colours["--paper"]}"/>'
    return '<?xml version="1.0" encoding="utf-8"?>\n' + re.sub(r"(<svg [^>]*>)", rf"\1{ground}", svg, count=1)


def main() -> None:
    if len(sys.argv) > 1:
        _keep(Path(sys.argv[1]))
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PICTURE.write_text(picture(result), encoding="utf-8")
    _write(ROOT / "README.md", table(result))
    _write(ROOT / "docs" / "encoders.md", encoder_table(json.loads(ENCODER_RESULT.read_text("utf-8"))))
    followed = json.loads(NEW_LANGUAGE_RESULT.read_text("utf-8"))
    _write(ROOT / "docs" / "tokenizer.md", new_language_table(followed, result))


def _keep(run_folder: Path) -> None:
    """Writes the figures of a run into the file of its demo."""
    summary = read_json(run_folder, Summary).content()
    summary.pop("export", None)  # a path of the machine that ran it
    result = {"date": datetime.now(UTC).date().isoformat(), "machine": _machine(), "summary": summary}
    scores = read_json(run_folder / "evaluate", MaskedScores)
    if scores is not None:
        result["scores"] = scores.content()
    path = RESULT if scores is None else ENCODER_RESULT
    if follows := read_recipe(str(run_folder)).recipe.follows:
        path = NEW_LANGUAGE_RESULT
        result |= {"first": _first(run_folder.with_name(follows)), "rows": _rows(run_folder / "tokenizer")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _first(run_folder: Path) -> dict:
    """Returns figures of a followed run, which has no summary: its stages end with the export."""
    made = {
        name: read_manifest(run_folder / name) for name in ("corpus", "tokenizer", "tokens", "train", "hf")
    }
    return {
        "stages": {name: {"seconds": stage.wall_seconds} for name, stage in made.items()},
        "bytes_kept": made["corpus"].counts["bytes_kept"],
        "tokens": made["train"].counts["tokens"],
    }


def _rows(tokenizer: Path) -> dict[str, int]:
    row_map = read_json(tokenizer, RowMap)
    return {"copied": row_map.copied, "composed": row_map.composed, "random": row_map.random}


def _write(page: Path, table: str) -> None:
    before, rest = page.read_text(encoding="utf-8").split(BEGIN, 1)
    comment, after = rest.split("-->\n", 1)
    _, after = after.split(END, 1)
    page.write_text(f"{before}{BEGIN}{comment}-->\n{table}{END}{after}", encoding="utf-8")


def _machine() -> str:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(names)} cores of {names[0]}, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
