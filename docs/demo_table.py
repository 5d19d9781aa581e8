"""Writes the demos' figures into README.md and docs/encoders.md, by `python docs/demo_table.py [RUN_FOLDER]`.

In: the summary of a run, and an encoder's scores; with a run folder, its files first become
benchmarks/results/demo_estonian.json, or demo_estonian_bert.json for an encoder. Out: Markdown tables on
each page, and the report's figure of bits per byte as docs/pictures/demo_bits_per_byte.svg.
"""

import json
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

from kielo.artifact.masked_scores import MaskedScores
from kielo.artifact.scores import BitsPerByte
from kielo.artifact.stage_json import read_json
from kielo.artifact.summary import Summary
from kielo.recipe.read import read_recipe
from kielo.report.baselines import HIDDEN_TOKENS
from kielo.report.figures import bits_per_byte_bars
from kielo.report.style import CSS

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "demo_estonian.json"
ENCODER_RESULT = RESULT.with_name("demo_estonian_bert.json")
PICTURE = ROOT / "docs" / "pictures" / "demo_bits_per_byte.svg"
BEGIN, END = "<!-- demo: written by docs/demo_table.py", "<!-- /demo -->"


def table(result: dict) -> str:
    """Returns the Markdown table of one summary."""
    summary = result["summary"]
    corpus, bits, parity = summary["corpus"], summary["bits_per_byte"], summary["parity"]
    seconds = sum(stage["seconds"] for stage in summary["stages"].values())
    rows = [
        ("text read", f"{corpus['documents_in']:,} documents, {corpus['bytes_in'] / 1e6:.2f} MB"),
        (
            "kept as Estonian, deduplicated",
            f"{corpus['documents_kept']:,} documents, {corpus['bytes_kept'] / 1e6:.2f} MB",
        ),
        ("training speed", f"{summary['tokens_per_second']:,.0f} tokens/s"),
        ("held-out bits per byte: **the model**", f"**{bits['model']:.3f}**"),
        ("… byte 6-gram, interpolated", f"{bits['ngram']:.3f}"),
        ("… `xz -9`", f"{bits['xz']:.3f}"),
        ("… token unigram", f"{bits['unigram']:.3f}"),
        (
            "largest relative loss difference to Hugging Face",
            f"{parity['max_relative_loss_difference']:.1e} over {parity['steps']} steps",
        ),
        ("all stages", f"{seconds:.0f} s"),
    ]
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines) + f"\n\n({result['date']}, {result['machine']})\n"


def encoder_table(result: dict) -> str:
    """Returns the Markdown tables of one encoder: its figures, and what it puts in the place of words."""
    summary = result["summary"]
    scores = MaskedScores.model_validate_json(json.dumps(result["scores"]))
    baselines = scores.accuracy.baselines()
    seconds = sum(stage["seconds"] for stage in summary["stages"].values())
    rows = [
        ("text", f"{summary['corpus']['bytes_kept'] / 1e6:.2f} MB of Estonian"),
        ("model", f"{summary['parameters'] / 1e6:.2f} M parameters, {summary['tokens'] / 1e6:.2f} M tokens"),
        ("hidden tokens predicted: **the model**", f"**{100 * scores.accuracy.model:.1f} %**"),
        *((f"… {HIDDEN_TOKENS[name]}", f"{100 * share:.1f} %") for name, share in baselines.items()),
        ("pseudo bits per byte", f"{scores.pseudo_bits_per_byte.token:.3f}"),
        ("training speed", f"{summary['tokens_per_second']:,.0f} tokens/s"),
        ("all stages", f"{seconds:.0f} s"),
    ]
    filled = [(one.sentence(), one.truth, one.likeliest()) for one in scores.filled_masks]
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows), ""]
    lines += ["| held-out sentence with a hidden word | truth | likeliest tokens |", "|---|---|---|"]
    lines += [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in filled]
    return "\n".join(lines) + f"\n\n({result['date']}, {result['machine']})\n"


def picture(result: dict) -> str:
    """Returns the report's figure of bits per byte as an SVG file, in the page's light colours."""
    scores = SimpleNamespace(
        bits_per_byte=BitsPerByte(**result["summary"]["bits_per_byte"]),
        ngram_order=read_recipe("demo_estonian").recipe.evaluate.ngram_order,
    )
    colours = dict(reversed(re.findall(r"(--\w+): (#\w{6})", CSS)))  # the first of each name is the light one
    svg = re.sub(r"var\((--\w+)\)", lambda found: colours[found[1]], bits_per_byte_bars({"scores": scores}))
    ground = f'<rect width="100%" height="100%" fill="{colours["--paper"]}"/>'
    return '<?xml version="1.0" encoding="utf-8"?>\n' + re.sub(r"(<svg [^>]*>)", rf"\1{ground}", svg, count=1)


def main() -> None:
    if len(sys.argv) > 1:
        _keep(Path(sys.argv[1]))
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    PICTURE.write_text(picture(result), encoding="utf-8")
    _write(ROOT / "README.md", table(result))
    _write(ROOT / "docs" / "encoders.md", encoder_table(json.loads(ENCODER_RESULT.read_text("utf-8"))))


def _keep(run_folder: Path) -> None:
    """Writes the figures of a run into the file of its demo."""
    summary = read_json(run_folder, Summary).content()
    summary.pop("export", None)  # a path of the machine that ran it
    result = {"date": datetime.now(UTC).date().isoformat(), "machine": _machine(), "summary": summary}
    scores = read_json(run_folder / "evaluate", MaskedScores)
    if scores is not None:
        result["scores"] = scores.content()
    path = RESULT if scores is None else ENCODER_RESULT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


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
