"""The worked example of docs/planning.md: every table and picture in it is what these commands say.

    python benchmarks/planner/planner_example.py  # writes tables into two pages, pictures beside the first

results/planner_example.md has the whole tables, docs/planning.md the columns that a reader decides by.

Estonian 70B on LUMI, 128 to 256 nodes: ranked, compared, explained, drawn; and the layouts of all
shipped recipes. Seconds on one core.
"""

import io
import json
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from textwrap import fill
from typing import Any

from kielo.cli.main import main as kielo
from kielo.plan.choose_layout import own
from kielo.plan.run_to_plan import RunToPlan
from kielo.plan.search import search
from kielo.recipe.read import read_first_language, shipped_recipes

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
from page_tables import put_tables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "planning.md"
DOCUMENT = Path(__file__).resolve().parents[1] / "results" / "planner_example.md"
PICTURES = PAGE.parent / "pictures"
RECIPE = "estonian_llama31_70b"


def main() -> None:
    ranked = asked(RECIPE, "--nodes", "128,192,256", "--top", "4")
    compared = asked("compare", RECIPE, "tp8pp4", "tp8pp8", "--nodes", "16,128,256")["compared"]
    few = asked(RECIPE, "--nodes", "4,8,16", "--top", "3")
    why = asked("explain", RECIPE, "tp8pp4", "--nodes", "128", "--plot", str(PICTURES))
    best = asked(RECIPE, "--nodes", "4..256", "--top", "1", "--plot", str(PICTURES))
    (PICTURES / f"timeline_{why['planned']['name'].replace('/', '_')}.svg").rename(
        PICTURES / "timeline_tp8pp4.svg"
    )
    put_tables(
        PAGE,
        {
            "best": short_ranking(best["layouts"]),
            "compared": short_ranking(compared),
            "nothing": complaint(RECIPE, "--nodes", "2"),
        },
    )
    put_tables(DOCUMENT, {
        "ranked": ranking(ranked["layouts"]), "few": ranking(few["layouts"]),
        "compared": side_by_side(compared),
        "why": reasons(why["why"]),
        "refused": refused(ranked["not_listed"]),
        "measured": measured(),
        "parts": parts(ranked["layouts"]), "shipped": shipped(),
    })  # fmt: skip


def asked(*arguments: str) -> dict[str, Any]:
    """Returns what `kielo plan ARGUMENTS --json` prints."""
    said = io.StringIO()
    with redirect_stdout(said):
        if kielo(["plan", *arguments, "--json"]):
            raise SystemExit(f"kielo plan {' '.join(arguments)} failed")
    return json.loads(said.getvalue())


def reasons(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows of `kielo plan explain`, seconds to the fourth figure."""
    cells = (
        (
            row["part"],
            "" if row["seconds"] is None else f"{row['seconds']:#.4g}",
            "" if row["share"] is None else f"{row['share']:.1%}",
            row["reason"],
        )
        for row in rows
    )
    return table(("part", "seconds", "share", "reason"), cells)


def complaint(*arguments: str) -> str:
    """Returns the message that a person sees when nothing fits."""
    said = io.StringIO()
    with redirect_stderr(said):
        kielo(["plan", *arguments])
    return (
        f"```sh exits 1\n{' '.join(['kielo plan', *arguments])}\n```\n\n"
        f"```text\n{fill(said.getvalue().strip(), 120)}\n```"
    )


def shipped() -> str:
    """Returns the own layout of each shipped recipe of a cluster, on the nodes that it names."""
    rows = []
    for name in shipped_recipes():
        recipe = read_first_language(name).recipe
        if not recipe.nodes:
            continue
        run = RunToPlan.of_recipe(recipe)
        own_layouts = [own(run, nodes) for nodes in recipe.nodes]
        best = [search(run, [nodes]).ranked[nodes][0] for nodes in recipe.nodes]
        behind = [
            1 - mine.tokens_per_second / fastest.tokens_per_second for mine, fastest in zip(own_layouts, best)
        ]
        rows.append((
            f"`{name}`", ", ".join(map(str, recipe.nodes)),
            f"`{re.sub(r'dp[0-9]+-', '', own_layouts[0].name)}`",
            ", ".join(f"{mine.tokens_per_second:,.0f}" for mine in own_layouts),
            f"{max(mine.need.bytes for mine in own_layouts) / 1e9:.1f}",
            f"{own_layouts[0].need.usable / 1e9:.1f}",
            " to ".join(dict.fromkeys(f"{share:.1%}" for share in (min(behind), max(behind)))),
            f"{max(mine.shares.empty_share for mine in own_layouts):.1%}",
        ))  # fmt: skip
    titles = (
        "recipe",
        "nodes",
        "layout",
        "tokens/s",
        "GB, most",
        "of usable",
        "behind the best",
        "empty, most",
    )
    return table(titles, rows)


def measured() -> str:
    """Returns the last result of planner_measured.py, without the run that made the card."""
    result = json.loads(
        (Path(__file__).parents[1] / "results" / "planner_measured_cpu.json").read_text(encoding="utf-8")
    )
    rows = (
        (run["name"], ", ".join(f"{key} {value}" for key, value in run["layout"].items()),
            step["sequence_length"],
         f"{step['micro_batches']} × {step['micro_batch']}", f"{step['measured_seconds']:.3f}",
         f"{step['planned_seconds']:.3f}",
         f"{step['error']:+.1%}")
        for run in result["runs"][1:]
        for step in run["step_kinds"]
    )  # fmt: skip
    return table(
        ("training", "layout", "sequence", "micro-batches × sequences", "measured, s", "planned, s", "error"),
        rows,
    )


def ranking(layouts: Sequence[dict[str, Any]]) -> str:
    titles = (
        "nodes",
        "layout",
        "tokens/s",
        "s a step",
        "80 % interval",
        "TFLOP/s a GCD",
        "MFU",
        "GB a GCD",
        "GCD-hours",
        "days",
        "jobs",
    )
    rows = (
        (
            layout["nodes"], f"`{layout['name']}`", f"{layout['tokens_per_second']:,.0f}",
            f"{layout['step_seconds']:.1f}",
            "–".join(f"{bound:.1f}" for bound in layout["interval_seconds"]),
            f"{layout['tflops_per_device']:.1f}",
            f"{layout['mfu']:.1%}", f"{layout['peak_bytes'] / 1e9:.1f}",
            f"{layout['cost']['device_hours']:,.0f}",
            f"{layout['cost']['days']:.2f}", layout["cost"]["jobs"],
        )
        for layout in layouts
    )  # fmt: skip
    return table(titles, rows)


def short_ranking(layouts: Sequence[dict[str, Any]]) -> str:
    """Returns one row a layout, of the figures that go into an application."""
    rows = (
        (
            layout["nodes"], f"`{layout['name']}`", f"{layout['tokens_per_second']:,.0f}",
            "–".join(f"{bound:.1f}" for bound in layout["interval_seconds"]),
            f"{layout['peak_bytes'] / 1e9:.1f}", f"{layout['cost']['device_hours']:,.0f}",
        )
        for layout in layouts
    )  # fmt: skip
    return table(("nodes", "layout", "tokens/s", "s a step", "GB a GCD", "GCD-hours"), rows)


def parts(layouts: Sequence[dict[str, Any]]) -> str:
    names = [
        part for part in layouts[0]["seconds"] if any(layout["seconds"][part] >= 0.005 for layout in layouts)
    ]
    rows = (
        (layout["nodes"], f"`{layout['name']}`", *(f"{layout['seconds'][part]:.2f}" for part in names),
         f"{layout['hidden_data_seconds']:.2f}")
        for layout in layouts
    )  # fmt: skip
    return table(
        ("nodes", "layout", *(part.replace("_", " ") for part in names), "(data traffic hidden)"), rows
    )


def side_by_side(compared: Sequence[dict[str, Any]]) -> str:
    titles = ("nodes", "layout", "tokens/s", "s a step", "bubble", "tensor traffic", "GB a GCD", "fits")
    rows = (
        (
            one["nodes"], f"`{one['name']}`", f"{one['tokens_per_second']:,.0f}",
            f"{one['step_seconds']:.1f}",
            *(f"{one['seconds'][part] / one['step_seconds']:.1%}" for part in ("bubble", "tensor_traffic")),
            f"{one['peak_bytes'] / 1e9:.1f}", "yes" if one["fits"] else "no",
        )
        for one in compared
    )  # fmt: skip
    return table(titles, rows)


def refused(reasons: dict[str, list[dict[str, Any]]]) -> str:
    rows = (
        (nodes, reason["layouts"], f"`{reason['names'][0]}`", reason["why"].split(". Fix")[0])
        for nodes, some in reasons.items()
        for reason in sorted(some, key=lambda each: -each["layouts"])
    )
    return table(("nodes", "layouts", "for example", "why not"), rows)


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [
        "| " + " | ".join(titles) + " |",
        "|" + "|".join("--:" if index else "---" for index in range(len(titles))) + "|",
    ]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


if __name__ == "__main__":
    main()
