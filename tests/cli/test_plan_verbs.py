"""`kielo plan` and its subverbs around two layouts with known figures: which are asked for, and what is "
"said."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kielo.cli import plan as plan_verb
from kielo.cli import plan_data
from kielo.cli.main import main
from kielo.plan.explain import Row
from kielo.plan.search import Found
from kielo.recipe.cards import cluster
from kielo.recipe.errors import KieloError
from kielo.resolve import resolve as resolving
from kielo.resolve.mixture_table import MixtureTable, PhaseRow, SourceAmount, SourceRow
from kielo.resolve.text import imagined_text
from tests.cli.test_plan_tables import a_cost, a_layout, a_run, failures

RECIPE = ["own_text", "--cluster", "lumi_g"]


class Planner:
    """Stands in for the planner: it lists layouts of 2, 4, 6 and 8 ranks of the tensor axis, and notes "
    "questions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.searched: list[list[int]] = []
        self.costs: list[tuple[int, float | None, Any]] = []
        self.named: list[tuple[int, str]] = []
        self.own: Any = "no heads"
        self.is_empty = False
        monkeypatch.setattr("kielo.cli.plan.search", self.search)
        monkeypatch.setattr("kielo.cli.plan.cost", self.cost)
        monkeypatch.setattr(plan_verb, "own", lambda run, nodes: self.own)
        monkeypatch.setattr(plan_verb, "named", self.name)
        monkeypatch.setattr("kielo.cli.plan_tables.overlap_offer", lambda planned: None)
        monkeypatch.setattr("kielo.cli.plan_tables.verdict", lambda several: "the verdict.")

    def search(self, run: Any, nodes: list[int]) -> Found:
        self.searched.append(nodes)
        ranked = {
            number: [
                a_layout(run, number, 1.0 + size / 4, tensor=size, shard=4 * number // 2)
                for size in (() if self.is_empty else (2, 4, 6, 8))
            ]
            for number in nodes
        }
        return Found(ranked=ranked, looked_at=1234)

    def cost(self, planned: Any, wall_hours: float | None = None, rate: Any = None) -> Any:
        self.costs.append((planned.nodes, wall_hours, rate))
        return a_cost(failures=None if rate is None else failures(rate=rate))

    def name(self, run: Any, nodes: int, text: str, or_nearest: bool = False) -> Any:
        self.named.append((nodes, text))
        self.may_be_nearest = or_nearest
        return a_layout(run, nodes, tensor=int(text.removeprefix("tp")), shard=2)


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> Planner:
    return Planner(monkeypatch)


def refusal(capsys: pytest.CaptureFixture) -> str:
    """Returns the last line, after what an idea left open."""
    return capsys.readouterr().err.splitlines()[-1]


def rows(capsys: pytest.CaptureFixture, *words: str) -> list[str]:
    """Returns the lines of layouts, which begin with the number of nodes."""
    assert main(["plan", *RECIPE, *words]) == 0
    return [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.count("\t") > 3 and line[0].isdigit() and "hours" not in line.split("\t")[1]
    ]


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (["--nodes", "3"], {3: 3}),
        (["--nodes", "3,5"], {3: 1, 5: 1}),
        (["--nodes", "3", "--top", "1"], {3: 1}),
        (["--nodes", "3,5", "--top", "2"], {3: 2, 5: 2}),
        (["--nodes", "3", "--top", "9"], {3: 4}),
    ],
)  # fmt: skip
def test_so_many_layouts_are_listed(planner, capsys, words, listed) -> None:
    """Three on one number of nodes, one on each of several, or --top."""
    found = rows(capsys, *words)
    assert {nodes: sum(row.startswith(f"{nodes}\t") for row in found) for nodes in listed} == listed
    assert len(found) == sum(listed.values()) and planner.searched == [list(listed)]


@pytest.mark.parametrize(
    ("words", "listed"), [(["--nodes", "3"], 4), (["--nodes", "3,5"], 6), (["--nodes", "3", "--top", "2"], 2)]
)
def test_more_are_listed_wide_and_as_json(planner, capsys, words, listed) -> None:
    """Twelve, of which there are four here, or three on each of several."""
    for flag in ("--wide", "--all"):
        assert len(rows(capsys, *words, flag)) == listed
    assert main(["plan", *RECIPE, *words, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["layouts"]) == listed and said["plots"] == [] and "languages" not in said


def test_hours_rates_and_own_layouts_are_asked_for(planner, capsys) -> None:
    assert len(rows(capsys, "--nodes", "3", "--wall-hours", "12.5")) == 3
    assert planner.costs == [(3, 12.5, None)] * 3
    planner.costs.clear()
    planner.own = a_layout(a_run(), 3, 1.5, tensor=2, shard=6)
    assert main(["plan", *RECIPE, "--nodes", "3", "--wide"]) == 0
    assert "\n3\ttp2-dp6-mb2-zero1 *\t24,576\t" in capsys.readouterr().out
    assert len(planner.costs) == 5
    planner.costs.clear()
    (marked,) = [row for row in rows(capsys, "--nodes", "3") if row.endswith(" *")]
    assert marked.startswith("3\t24,576\t40.0\t3.0\t2,400\t") and len(planner.costs) == 4
    planner.costs.clear()
    assert not [row for row in rows(capsys, "--nodes", "3,5") if row.endswith(" *")]
    assert len(planner.costs) == 2
    assert main(["plan", *RECIPE, "--nodes", "3", "--failures", "0.5"]) == 0
    assert planner.costs[-1][2].per_1000_device_days == 0.5
    assert "\nFailures: 0.5 of a device in 1,000 days (--failures). effective" in capsys.readouterr().out


def test_refusals(planner, capsys) -> None:
    for words, said in {
        ("--nodes", "3", "--top", "0"): "--top 0: give 1 or more",
        ("--nodes", "3", "--wall-hours", "0"): "--wall-hours 0: give a number above 0",
        ("--nodes", "3", "--wall-hours", "inf"): "--wall-hours inf: give a number above 0",
        ("--nodes", "3", "--plot", "x"): "--plot draws scaling over several numbers of nodes. Fix: --nodes "
        "4..256",
        ("--nodes", "8..4"): "--nodes 8..4: begin with the smaller number. Fix: 4..8",
        ("--nodes", "a"): "--nodes a: not understood. Fix: 16, or 4,8,12, or 4..256",
        ("--nodes", "3", "--batch", "--top", "2"): "--top: --batch lists no layouts. Fix: leave it out",
        ("--nodes", "3", "--batch", "--wide"): "--wide: --batch lists no layouts",
        ("--nodes", "0"): "--nodes 0: lumi_g has 1 to 2978 nodes. Fix: 1",
        ("--nodes", "2979"): "--nodes 2979: lumi_g has 1 to 2978 nodes. Fix: 2978",
        ("--nodes", "0..4"): "--nodes 0..4: lumi_g has 1 to 2978 nodes. Fix: 1",
        ("--nodes", "1,2,3,4,5,6,7,8,9,10,11,12,13"): "give at most 12 numbers, from few to many nodes",
    }.items():
        assert main(["plan", *RECIPE, *words]) == 1
        assert said in capsys.readouterr().err, words
    planner.is_empty = True
    assert main(["plan", *RECIPE, "--nodes", "3"]) == 1
    assert "no layout of own_text runs on 3 nodes of lumi_g" in capsys.readouterr().err


NODES = {
    "16": [16], "12,4,8,4": [4, 8, 12], "4..64": [4, 8, 16, 32, 64], "3..20": [3, 6, 12, 20], "5..5": [5],
    "2978": [2978], "1": [1], "1..2": [1, 2], "1,2,3,4,5,6,7,8,9,10,11,12": list(range(1, 13)),
    "1..2048": [2**power for power in range(12)],
}  # fmt: skip


def test_numbers_of_nodes(planner, capsys) -> None:
    """Doubled to the last; each of a list once, from few to many; else those of the recipe that the site "
    "has."""
    for text, numbers in NODES.items():
        assert main(["plan", *RECIPE, "--nodes", text, "--json"]) == 0
        assert planner.searched[-1] == numbers, text
    assert main(["plan", *RECIPE, "--json", "--set", "nodes=[9,3,2979]"]) == 0
    assert planner.searched[-1] == [3, 9]
    capsys.readouterr()
    for words in ([], ["--set", "nodes=[2979]"]):
        assert main(["plan", *RECIPE, "--set", "nodes=[]", *words]) == 1
        assert refusal(capsys) == (
            "kielo: --nodes is missing; lumi_g has 1 to 2978 nodes. Fix: --nodes 16, or --nodes 4..256"
        )
    assert cluster("lumi_g").nodes == 2978


def test_what_to_type_next_has_the_same_flags(planner, capsys) -> None:
    """Words with blanks are quoted. `explain` takes no idea."""
    assert main(["plan", *RECIPE, "--nodes", "3", "--set", "description=a {b}"]) == 0
    assert (
        "`kielo plan explain own_text tp2-dp6-mb2-zero1 --cluster lumi_g --set 'description=a {b}' --nodes 3`"
    ) in capsys.readouterr().out
    assert main(["plan", "--params", "3B", "--cluster", "lumi_g", "--nodes", "3"]) == 0
    said = capsys.readouterr()
    assert said.out.endswith("\nMore: --wide\n")
    assert said.err.startswith("not set in the recipe, so as usual for this size: ")
    assert main(["plan"]) == 1
    assert capsys.readouterr().err == (
        "kielo: no recipe and no size. Fix: a recipe (see `kielo recipes`), or --params 3B --cluster lumi_g\n"
    )


def test_several_languages_are_planned_as_one(planner, capsys, tmp_path: Path) -> None:
    """The first stands for all; the costs of all are those of one, so often. Its own layout is among them."""
    path = tmp_path / "several.toml"
    path.write_text(
        'extends = "poro_34b"\nname = "x_{language}"\nlanguages = ["et", "fi", "sv"]\ncluster = "lumi_g"\n'
    )
    assert main(["plan", str(path), "--nodes", "3"]) == 0
    said = capsys.readouterr().out
    assert "\nAll 3 languages, a run each, by the plan of et:\nnodes\thours each\tdays in a row" in said
    assert "\n3\t72.0\t9.0\t7,200\t7,200\t" in said
    assert main(["plan", str(path), "--nodes", "3,5", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    of_all = said["languages"]
    assert said["recipe"] == "x_et"
    assert of_all["codes"] == ["et", "fi", "sv"] and [one["nodes"] for one in of_all["layouts"]] == [3, 5]


def test_comparing(planner, capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kielo.cli.plan.compared_rows", lambda several: (("a", "b"), [("1", "2")]))
    monkeypatch.setattr("kielo.cli.plan.verdict", lambda several: "+".join(one.name for one in several))
    assert main(["plan", "compare", *RECIPE, "tp2", "tp4", "--nodes", "3,5"]) == 0
    assert planner.named == [(3, "tp2"), (3, "tp4"), (5, "tp2"), (5, "tp4")] and planner.may_be_nearest
    both = "tp2-dp2-mb2-zero1+tp4-dp2-mb2-zero1"
    assert capsys.readouterr().out == f"a\tb\n1\t2\n3 nodes: {both}\n5 nodes: {both}\n"
    assert main(["plan", "compare", *RECIPE, "tp2", "--nodes", "3", "--json", "--wall-hours", "4"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in said["compared"]] == ["tp2-dp2-mb2-zero1"] and said["plots"] == []
    assert planner.costs == [(3, 4.0, None)]
    for nodes in ("3", "3,5"):
        assert main(["plan", "compare", *RECIPE, "tp2", "tp2", "--nodes", nodes]) == 1
        assert refusal(capsys) == (
            "kielo: tp2 and tp2 are one layout, tp2-dp2-mb2-zero1. Fix: two different layouts"
        )
    drawn = []
    monkeypatch.setattr(
        "kielo.report.plan_figures.parts_svg", lambda several, path: drawn.append((len(several), path))
    )
    place = tmp_path / "new" / "deep"
    assert main(["plan", "compare", *RECIPE, "tp2", "tp4", "--nodes", "3", "--plot", str(place)]) == 0
    assert drawn == [(2, place / "compared.svg")] and place.is_dir()
    assert capsys.readouterr().out.endswith(f"\nwrote {place}/compared.svg\n")


def test_explaining(planner, capsys, monkeypatch, tmp_path: Path) -> None:
    asked = []
    row = Row("bubble", 0.25, 0.5, "so it is")
    monkeypatch.setattr("kielo.cli.plan.explained", lambda planned, others: asked.append(others) or [row])
    assert main(["plan", "explain", *RECIPE, "tp3", "--nodes", "3"]) == 0
    assert capsys.readouterr().out == (
        "part\tseconds\tshare\treason\nbubble\t0.250\t50.0%\tso it is\n\nIn the recipe:\n[layout]\n"
        "tensor = 3\n\n[train]\nmicro_batch_sequences = 2\n"
    )
    assert [one.layout.tensor for one in asked[0]] == [2, 4, 6] and not planner.may_be_nearest
    assert main(["plan", "explain", *RECIPE, "tp3", "--nodes", "3,5"]) == 1
    assert "about one number of nodes. Fix: --nodes 16" in capsys.readouterr().err
    drawn = []
    monkeypatch.setattr("kielo.report.plan_figures.timeline_svg", lambda planned, path: drawn.append(path))
    words = ["--nodes", "3", "--json", "--plot", str(tmp_path), "--wall-hours", "5"]
    assert main(["plan", "explain", *RECIPE, "tp3", *words]) == 0
    said = json.loads(capsys.readouterr().out)
    assert drawn == [tmp_path / "timeline_tp3-dp2-mb2-zero1.svg"] and said["plots"] == [str(drawn[0])]
    assert (
        said["why"] == [{"part": "bubble", "seconds": 0.25, "share": 0.5, "reason": "so it is"}]
        and said["planned"]["name"] == "tp3-dp2-mb2-zero1"
    )
    assert planner.costs == [(3, 5.0, None)]


def test_calibrating(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan_verb, "metrics_of", lambda paths: (paths, "site"))
    monkeypatch.setattr(plan_verb, "measure", lambda paths, site: (paths, site))
    monkeypatch.setattr(plan_verb, "write_machine", lambda machine, to: to.write_text(str(machine)))
    to = tmp_path / "card.toml"
    assert main(["plan", "calibrate", "a", "b", "--to", str(to)]) == 0
    assert to.read_text() == str(([Path("a"), Path("b")], "site"))
    assert capsys.readouterr().out == f"wrote {to}; plan with it: kielo plan RECIPE --machine {to}\n"


@pytest.fixture
def resolver(planner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple]:
    """A folder without runs. Returns a list that gets the layout, ranks and devices that are asked for."""
    asked: list[tuple] = []

    def resolve(recipe: Any, folder: Path, world_size: int, device: str) -> Any:
        asked.append((recipe.layout.tensor, recipe.train.micro_batch_sequences, world_size, device))
        return real(recipe, "", world_size, device, text=imagined_text(recipe))

    real = resolving.resolve
    monkeypatch.setattr(plan_verb, "resolved_run", resolve)
    monkeypatch.setattr(plan_verb, "named", lambda run, nodes, name: (
        planner.named.append((nodes, name)) or a_layout(run, nodes, tensor=2, shard=4 * nodes)
    ))  # fmt: skip
    monkeypatch.chdir(tmp_path)
    return asked


SETS = ["--set", "train.tokens_per_step=8192", "--set", "train.precision=bf16"]
DEMO = ["plan", "resolve", "demo_estonian", *SETS]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], (1, 8, 1, "cpu")), (["--ranks", "2"], (1, 8, 2, "cpu")),
        (["--cluster", "lumi_g"], (1, 8, 1, "cuda")),
        (["--cluster", "lumi_g", "--nodes", "2"], (1, 8, 16, "cuda")),
        (["--cluster", "lumi_g", "--nodes", "2,4"], (1, 8, 16, "cuda")),
        (["--cluster", "lumi_g", "--nodes", "2,4", "--layout", "tp2"], (2, 2, 16, "cuda")),
        (["--nodes", "1"], (1, 8, 2, "cpu")),
    ],
)  # fmt: skip
def test_resolving_on_ranks(resolver, planner, capsys, words, asked) -> None:
    """One rank, --ranks, or all devices of the first number of --nodes; and a layout that is chosen there."""
    assert main([*DEMO, *words]) == 0
    assert resolver == [asked]
    said = capsys.readouterr().out
    assert planner.named == ([(2, "tp2")] if "--layout" in words else [])
    assert f"\nworld_size\t{asked[2]}\n" in said and '\ndevice\t"' + asked[3] in said
    path = Path("runs/demo_estonian/resolved.toml")
    ends = f"wrote {path}\n"
    if "--layout" in words:
        ends += (
            "to train on this layout, put it into the recipe:\n[layout]\ntensor = 2\n\n[train]\n"
            "micro_batch_sequences = 2\n"
        )
    assert said.endswith(ends) and f"world_size = {asked[2]}\n" in path.read_text()


def test_resolving_is_no_harm_to_a_run_that_trained(resolver, capsys) -> None:
    folder = Path("runs/demo_estonian")
    (folder / "train" / "checkpoints" / "step_00000005").mkdir(parents=True)
    assert main([*DEMO, "--ranks", "2"]) == 0
    path = folder / "resolved.toml"
    assert capsys.readouterr().out.endswith(f"{path} stays as it is: the run has trained\n")
    assert not path.exists()
    assert main([*DEMO, "--ranks", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["placement"]["world_size"] == 2
    assert main([*DEMO, "--ranks", "2", "--layout", "tp2"]) == 1
    assert refusal(capsys) == "kielo: --layout is chosen for --nodes. Fix: leave --ranks out"


LONG = "a_name_of_seventeen"[:17]
TABLE = MixtureTable(
    "corpus", True, 9000,
    (
        SourceRow("a", SourceAmount(1234, 5678, 812, 617), 2468, 2.0, 4.0, 2345),
        SourceRow(LONG, SourceAmount(34_249, 1_249_000, None, None), 5, 0.125, 4.0, 3_104_000_000),
        SourceRow(LONG[:16], SourceAmount(999, 1000, 1, 333), 5, 1.0, 4.0, 1_400_000_000_000),
    ),
    (PhaseRow(1, LONG, 0.125, 1.5, 1_250_000, 0.25), PhaseRow(2, "a", 0.875, 10.5, 35, 1.75)),
)  # fmt: skip
WORTH = (
    "worth: the number of different tokens that would teach as much as these repeated tokens "
    "(Muennighoff et al. 2023)."
)


def test_the_text_by_source_and_phase(capsys, monkeypatch) -> None:
    """Amounts with a unit; names up to 16 characters are whole."""
    monkeypatch.setattr(plan_data, "mixture_table", lambda recipe, folder: TABLE)
    assert main(["plan", "data", "own_text"]) == 0
    assert capsys.readouterr().out == (
        "Estimated from the corpus.\n\n"
        "source\tdocuments\tbytes\twords\ttokens\ttok/word\tepochs\tworth\n"
        "a\t812\t5.68 kB\t617\t1.23K\t2.00\t2.00\t2.35K\n"
        "a_name_of_seven~\t–\t1.25 MB\t–\t34.25K\t–\t0.12\t3.1B\n"
        "a_name_of_sevent\t1\t1.00 kB\t333\t999\t3.00\t1.00\t1.4T\n\n"
        "phase\tsource\tshare of a step\tsequences of a step\ttokens\tepochs\n"
        "1\ta_name_of_seven~\t12.50%\t1.50\t1.25M\t0.25\n"
        "2\ta\t87.50%\t10.50\t35\t1.75\n\n" + WORTH + "\n"
    )


def test_the_text_with_loss_packing_and_complaints(capsys, monkeypatch) -> None:
    from dataclasses import replace

    masked = replace(TABLE.sources[0], amount=replace(TABLE.sources[0].amount, tokens_with_loss=567))
    packing = SimpleNamespace(
        source="a", sequence_length=1024, sequences=2345, cut=0.0125, cut_in_one_stream=0.25, filling=0.98765
    )
    table = replace(
        TABLE, is_estimate=False, sources=(masked, TABLE.sources[2]), phases=(), packing=(packing,),
        complaints=("one", "two"),
    )  # fmt: skip
    monkeypatch.setattr(plan_data, "mixture_table", lambda recipe, folder: table)
    assert main(["plan", "data", "own_text"]) == 1
    said = capsys.readouterr()
    assert said.err == "kielo: training would refuse 2 of this:\n  - one\n  - two\n"
    assert said.out == (
        "Counted in the corpus.\n\n"
        "source\tdocuments\tbytes\twords\ttokens\twith loss\ttok/word\tepochs\tworth\n"
        "a\t812\t5.68 kB\t617\t1.23K\t567\t2.00\t2.00\t2.35K\n"
        "a_name_of_sevent\t1\t1.00 kB\t333\t999\t999\t3.00\t1.00\t1.4T\n\n"
        "phase\tsource\tshare of a step\tsequences of a step\ttokens\tepochs\n\n"
        "best-fit packed\tsequence\tsequences\tdocuments cut\tin one stream\tfilling\n"
        "a\t1,024\t2.35K\t1.25%\t25.00%\t98.765%\n\n" + WORTH + "\n"
    )
    for complaints, code in (((), 0), (("one",), 1)):
        monkeypatch.setattr(
            plan_data, "mixture_table", lambda *_, of=complaints: replace(TABLE, complaints=of)
        )
        assert main(["plan", "data", "own_text", "--json"]) == code
        assert json.loads(capsys.readouterr().out)["tokens"] == 9000


def test_a_refused_layout_is_a_message(planner, capsys, monkeypatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KieloError("no such layout")

    monkeypatch.setattr(plan_verb, "named", refuse)
    assert main(["plan", "explain", *RECIPE, "tp3", "--nodes", "3"]) == 1
    assert refusal(capsys) == "kielo: no such layout"
