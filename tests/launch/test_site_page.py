"""site.md and site.sh of sites made by hand, whole; a ladder's layouts; what the planner refuses."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from kielo.artifact.launch_files import Ladder
from kielo.artifact.stage_json import read_json, write_json
from kielo.launch import forecast as forecasting
from kielo.launch import ladder
from kielo.launch.forecast import planned_run
from kielo.launch.ladder import read_ladder, waiting_job
from kielo.launch.site import (
    known_of,
    made_site,
    plan_site,
    site_page,
    site_script,
    source_of_kielo,
    write_new_card,
)
from kielo.recipe.cards import Reference
from kielo.recipe.errors import KieloError
from kielo.resolve.software import NEWEST
from tests.launch.hand_made import made, recipe, site
from tests.launch.test_ladder import a_ladder
from tests.launch.test_written_lines import FULL

PLAIN_PAGE = """\
# Once on A site

By the card of here: a page, 2026-11.

Run `bash site.sh` on a login node, which needs no torch. If its processors are not x86_64, run it \
on a node, in a short job.

1. **Where.** Put this folder where environments lie: the card does not say; not your home. The script \
makes everything beside itself, with its caches.
2. **Modules.** The card does not say which modules are loaded first, for Python 3.11 or newer (`module \
avail python`).
3. **Image.** None: the card names no image with torch, so the environment is made without a container. \
`kielo site here --container docker://NAME` builds an image, if the card says how containers run.
4. **Environment.** A virtual environment with Kielo. A torch of the image or the modules is kept, \
and pinned so that pip cannot replace it. Without one, torch @NEWEST@ is installed.
5. **Check.** Kielo and torch are imported as ranks will import them. Then `site.json` is written, by \
which `kielo launch` finds image and environment.

Then, in the folder that has `runs/`:

```sh
kielo launch RECIPE --cluster here --site FOLDER_OF_THIS_PAGE
```

`--site` is not needed if this folder is `sites/here`.

## What the card says

| | here | source |
|---|---|---|
| network | a wire | a page |

## What the card does not say

Ask the site, and do not trust a guess:

* where environments and runs should lie, and how much fits there
* which modules are loaded first, for Python 3.11 or newer (`module avail python`)
* whether and how containers run (singularity, apptainer, enroot)
* a container image with torch; without one, torch comes from the package index as wheels
* the newest CUDA that the driver runs (`nvidia-smi` on a node, top right)
"""
FULL_PAGE = """\
# Once on A site

By the card of here: a page, 2026-11. Ask.

Run `bash site.sh` on a login node, which needs no torch. If its processors are not aarch64, run it \
on a node, in a short job.

1. **Where.** Put this folder where environments lie: a disk. The script makes everything beside itself, \
with its caches.
2. **Modules.** `module load a`, `module load b` come first, as in each job.
3. **Image.** `/images/a,b.sif` is used as it is. A link to the newest image is followed once, now.
4. **Environment.** A virtual environment with Kielo. A torch of the image or the modules is kept, \
and pinned so that pip cannot replace it. Without one, torch 2.9 is installed. It is packed into \
one file, which the container mounts at `/user-software`: tens of thousands of small files are slow on a \
parallel file system, and count. The driver runs CUDA 12.2 at most. Wheels for a later CUDA are refused.
5. **Check.** Kielo and torch are imported as ranks will import them. Then `site.json` is written, by \
which `kielo launch` finds image and environment.

Then, in the folder that has `runs/`:

```sh
kielo launch RECIPE --cluster here --account PROJECT --site FOLDER_OF_THIS_PAGE
```

`--site` is not needed if this folder is `sites/here`.

## No network on compute nodes

Text, weights and tokenizers: `kielo prefetch RECIPE --to DIR` on a machine with a network, and \
KIELO_PREFETCHED=DIR here. If the login nodes have none either: `kielo prefetch RECIPE --to DIR --wheels` \
there, and `WHEELS=DIR/wheels bash site.sh` here.

## What the card says

| | here | source |
|---|---|---|
| network | a wire | a page |
| processors | `aarch64` | of architecture |
| place of environments and runs | `a disk` | of storage |
| before anything else | `module load a module load b` | of setup |
| how ranks start in a container | `singularity exec` | of container |
| container image | `/images/a,b.sif` | of image |
| environment in one file, packed by mksquashfs with | `-a` | of squash |
| newest CUDA of its driver | `12.2` | of driver_cuda |
| spreads the files of checkpoints | `lfs setstripe -c 4` | of stripe |
| a node's own folder, for compilers' caches | `${TMPDIR:-/tmp}` | of node_folder |
| the log's words if the fast network is used | `a\\|b` | of network_log |
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def full():
    return site(
        jobs=FULL | {"driver_cuda": "12.2"}, notes="Ask.", torch="2.9", internet_on_compute_nodes=False
    )


def test_the_page_of_a_plain_site_and_of_one_that_says_all() -> None:
    """Each sentence that a card's field brings is absent on the other."""
    assert site_page(plan_site("here", site(), None, None)) == PLAIN_PAGE.replace("@NEWEST@", NEWEST)
    assert site_page(plan_site("here", full(), None, None)) == FULL_PAGE
    built = site_page(plan_site("here", full(), "docker://a/b:1", None))
    assert "3. **Image.** `image_a_b_1.sif` is built from `docker://a/b:1`.\n" in built
    none = site_page(plan_site("here", full(), "none", None))
    assert "docker://NAME` builds an image.\n" in none and "one file, which the container" not in none
    example = site(jobs={"account": "p", "account_example": "p1"})
    assert "--cluster mine.toml --account p1 --site" in site_page(plan_site("mine.toml", example, None, None))
    amd = site(accelerator="mi250x_gcd")
    assert "newest CUDA" not in site_page(plan_site("here", amd, None, None))


def test_the_settings_of_site_sh(here) -> None:
    """What the card says, and what a person may set."""
    (here / "w").mkdir()
    script = site_script(plan_site("here", full(), None, "w"))
    head = script[: script.index("# ---- What is made")].splitlines()
    assert head == [
        "#!/bin/bash -l", "# Makes once what jobs of Kielo need on A site; site.md explains it.",
        "# Card: a page, 2026-11.", "# storage: of storage", "# architecture: of architecture",
        "# container: of container", "# image: of image", "# squash: of squash",
        "# driver_cuda: of driver_cuda", "SITE=here", "CARD=here", "STORAGE='a disk'",
        "IMAGE='/images/a,b.sif'", "ARCHITECTURE=aarch64", "BUILD_FROM=", "MOUNT=/user-software",
        "DRIVER_CUDA=12.2", "CONTAINER=(singularity exec)", "SQUASH=(-a)",
        "# These may be set differently: NAME=VALUE bash site.sh",
        f"KIELO=${{KIELO:-{shlex.quote(str(source_of_kielo()))}}} # its folder, or where pip finds it",
        "TORCH=${TORCH:-2.9} # if the site brings none",
        f"WHEELS=${{WHEELS:-{here}/w}} # a folder that `pip download` filled", "",
        "# The shell's settings for other Pythons: packages in ~/.local, and options of pip.",
        "unset PYTHONPATH PYTHONHOME PYTHONUSERBASE PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV",
        "export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PIP_USER=0", "# setup: of setup",
        "module load a", "module load b",
    ]  # fmt: skip
    plain = site_script(plan_site("here", site(), None, None))
    assert "WHEELS=${WHEELS:-} # a" in plain and f"TORCH=${{TORCH:-{NEWEST}}} #" in plain


def test_containers_that_a_site_cannot_have() -> None:
    """Each refusal, and beside it the same on a site that has what it needs."""
    with_one = site(jobs={"container": ["c"]})
    for image in ("/i.sif", "docker://a", "oras://a", "library://a"):
        assert plan_site("here", with_one, image, None).build_from == ("" if image[0] == "/" else image)
        with pytest.raises(KieloError, match="the card of here does not say how ranks start in a container"):
            plan_site("here", site(), image, None)
    for image in ("i.sif", "http://a", "docker://a b"):
        with pytest.raises(
            KieloError, match=f"--container {image}: no path. Fix: a path from /, or docker://NAME"
        ):
            plan_site("here", with_one, image, None)
    for nowhere in (site("none"), site().model_copy(update={"jobs": None})):
        with pytest.raises(KieloError, match="here has no table .jobs. in its card, so no job and no site"):
            plan_site("here", nowhere, None, None)
    assert (
        plan_site("here", full(), "none", None).image == "" == plan_site("here", site(), "none", None).image
    )


def test_what_is_known_of_sites() -> None:
    missing = "storage, setup, container, image, driver_cuda"
    assert known_of(site()) == ("", "a folder", missing)
    assert known_of(full()) == ("singularity with the site's image", "in one file", "")
    assert known_of(site(jobs={"container": ["c", "d"]}))[0] == "c"
    assert known_of(site().model_copy(update={"jobs": None})) == ("", "", "no [jobs]: no site")


def test_a_site_of_another_cluster_is_refused(here) -> None:
    assert made_site(here, site()) is None
    write_json(here, made("a"))
    assert made_site(here, site()) == made("a")
    with pytest.raises(
        KieloError, match="was made for here, and the run is for there. Fix: kielo site there"
    ):
        made_site(here, site(name="there"))


def ranked(*layouts: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(name=name, axes=name[0]) for name in layouts]


@pytest.mark.parametrize(
    ("layouts", "best"),
    [
        (("a1", "a2", "b1", "b2", "c1", "d1"), ["a1", "b1", "c1"]),
        (("a1", "a2", "a3", "a4"), ["a1", "a2", "a3"]),
        (("a1", "a2", "b1", "b2"), ["a1", "b1", "a2"]), (("a1",), ["a1"]),
    ],
)  # fmt: skip
def test_layouts_of_different_axes_come_first_in_a_ladder(layouts, best, monkeypatch) -> None:
    """Three of them; others of the same axes fill up."""

    def different(found: list) -> list:
        return [one for number, one in enumerate(found) if one.axes not in {o.axes for o in found[:number]}]

    asked = []
    monkeypatch.setattr(ladder, "different_axes", different)
    monkeypatch.setattr(
        ladder, "search", lambda *what: asked.append(what) or SimpleNamespace(ranked={3: ranked(*layouts)})
    )
    assert [one.name for one in ladder.best_layouts("run", 3)] == best and asked == [("run", [3])]
    monkeypatch.setattr(ladder, "nothing_runs", lambda *what: KieloError("nothing runs"))
    monkeypatch.setattr(ladder, "search", lambda *what: SimpleNamespace(ranked={}))
    with pytest.raises(KieloError, match="nothing runs"):
        ladder.best_layouts("run", 3)


def test_a_ladder_is_read_with_what_its_rungs_have_measured(here, monkeypatch) -> None:
    """Jobs of each number of nodes are asked for, oldest first; "" where none is in the queue."""
    with pytest.raises(KieloError, match="has no ladder.json. Fix: kielo launch RECIPE --ladder 1,2"):
        read_ladder(here)
    write_json(here, a_ladder())
    monkeypatch.setattr(ladder, "measured_speed", lambda place: None)
    monkeypatch.setattr(ladder, "state", lambda place: place.relative_to(here).as_posix())
    rungs = read_ladder(here).rungs
    assert [rung.state for rung in rungs] == [rung.folder for rung in a_ladder().rungs]
    assert {rung.measured for rung in rungs} == {None} and read_json(here, Ladder) == a_ladder()
    asked = []
    monkeypatch.setattr(ladder, "states", lambda *what: asked.append(what) or {"4": "R", "5": "Q"})
    for job, ids in (("job_0002", "5\n"), ("job_0001", "3\n4\n")):
        (here / "1_nodes" / job / "chain").mkdir(parents=True)
        (here / "1_nodes" / job / "chain" / "jobs").write_text(ids)
    assert waiting_job(here / "1_nodes", "slurm") == "4" and asked == [("slurm", ["3", "4", "5"])]
    monkeypatch.setattr(ladder, "states", lambda *what: None)
    assert waiting_job(here / "1_nodes", "slurm") == ""


def test_references_are_of_models_of_about_this_size() -> None:
    """A quarter more or less, as its parameters by theirs."""
    references = [
        Reference(
            parameters=size, nodes=2, tflops_per_device=9, tolerance=0.1, software="S", source=str(size)
        )
        for size in (0.7e9, 0.8e9, 1e9, 1.25e9, 1.3e9)
    ]
    found = ladder.references(site(references=references), 10**9)
    assert [one.source for one in found] == ["800000000.0", "1000000000.0", "1250000000.0"]
    assert found[2].model_dump() == {
        "nodes": 2, "tflops_per_device": 9, "tolerance": 0.1, "software": "S, 1.25 billion parameters",
        "source": "1250000000.0",
    }  # fmt: skip


def test_what_the_planner_refuses_is_told_with_what_would_work(monkeypatch) -> None:
    """The fastest layout that fits, if there is one; without speeds there is no plan, with the reason."""
    need = SimpleNamespace(bytes=80e9, usable=70e9, where="a device")
    fits = SimpleNamespace(fits=True, name="dp1")
    too_large = SimpleNamespace(fits=False, name="tp9", need=need)
    run, found = SimpleNamespace(site=site()), SimpleNamespace(ranked={3: [SimpleNamespace(name="best")]})
    monkeypatch.setattr(forecasting.RunToPlan, "of_recipe", lambda recipe: run)
    monkeypatch.setattr(forecasting, "search", lambda of, nodes: found)
    monkeypatch.setattr(forecasting, "own", lambda of, nodes: fits)
    monkeypatch.setattr(forecasting, "with_layout", lambda recipe, planned: (recipe, planned.name))
    planned, chosen, why = planned_run(recipe(), 3, None)
    assert planned.nodes == (3,) and (chosen, why) == (fits, "")
    for answer, said in (
        (
            too_large,
            "tp9 of mine does not fit 3 nodes of here: it needs 80.0 GB a device, and 70.0 GB are usable",
        ),
        ("no such layout", "mine on 3 nodes of here: no such layout"),
    ):
        monkeypatch.setattr(forecasting, "named", lambda of, nodes, layout, answer=answer: answer)
        with pytest.raises(KieloError) as refused:
            planned_run(recipe(), 3, "tp9")
        assert str(refused.value) == f"{said}. Fix: --layout best"
    advised = "no. Fix: this"
    monkeypatch.setattr(forecasting, "named", lambda of, nodes, layout: advised)
    with pytest.raises(KieloError, match="^mine on 3 nodes of here: no. Fix: this, or --layout best$"):
        planned_run(recipe(), 3, "tp9")
    found.ranked[3].clear()
    with pytest.raises(KieloError, match="^mine on 3 nodes of here: no. Fix: this$"):
        planned_run(recipe(), 3, "tp9")
    monkeypatch.setattr(forecasting, "named", lambda of, nodes, layout: fits)
    assert planned_run(recipe(), 3, "dp1")[0][1] == "dp1"

    def unknown(recipe):
        raise KieloError("no speeds. Fix: a card")

    monkeypatch.setattr(forecasting.RunToPlan, "of_recipe", unknown)
    refused = []
    monkeypatch.setattr(
        forecasting, "resolve", lambda recipe, folder, ranks, *card, text: refused.append(ranks)
    )
    planned, chosen, why = planned_run(recipe(cluster="lumi_g"), 3, None)
    assert (chosen, why, refused, planned.nodes) == (None, "no speeds", [24], (3,))
    with pytest.raises(KieloError, match="^no speeds. Fix: a card$"):
        planned_run(recipe(), 3, "dp1")


def test_a_new_card_replaces_nothing_and_has_a_name_that_a_file_can_have(here) -> None:
    """A file of that name stays, and so does a shipped card's name."""
    assert write_new_card("my_site-1.x") == Path("my_site-1.x.toml")
    text = (here / "my_site-1.x.toml").read_text()
    assert 'name = "my_site-1.x"' in text and "@NAME@" not in text
    (here / "mine.toml").write_text("mine")
    (here / "linked.toml").symlink_to("gone")
    for name, said in (
        ("mine", "mine.toml: exists already. Fix: move it away, or another name"),
        ("linked", "linked.toml: exists already. Fix: move it away, or another name"),
        ("lumi_g", "--new lumi_g: has a card already; kielo site lumi_g shows it. Fix: another name"),
        *((wrong, f"--new {wrong}: not a name. Fix: letters, digits and _ . - such as my_site")
          for wrong in ("", "-a", "a-", "a/b", "a b", "a.toml")),
    ):  # fmt: skip
        with pytest.raises(KieloError) as refused:
            write_new_card(name)
        assert str(refused.value) == said
    assert (here / "mine.toml").read_text() == "mine" and len(list(here.iterdir())) == 3
