"""A launch lists what its jobs read and write, and a container sees just that."""

import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from kielo.cli.main import main
from kielo.launch.job_paths import READS, WRITES, binds, job_paths
from kielo.launch.job_plan import Wishes
from kielo.launch.script import environment_script, job_script, share_script
from kielo.recipe.cards import cluster, clusters
from kielo.recipe.errors import KieloError
from tests.launch.container import make_container, why_no_container
from tests.launch.hand_made import made, plan, recipe, site

TOKENIZER = (
    '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "models--owner--model"


def on_hub(cache: Path) -> Path:
    """Makes weights and a tokenizer in a cache as the hub's client lays it out; returns their folder."""
    folder = cache / WEIGHTS
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir()
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / "blobs" / name).write_text("{}")
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all that a recipe may name, beside the working folder; links lead to a third one."""
    import huggingface_hub.constants

    folder, disk = tmp_path / "site" / "elsewhere", tmp_path / "site" / "disk"
    on_hub(folder / "hub")
    for name in ("tokens", "texts", "linked"):
        (folder / name).mkdir()
    (disk / "tokenizer").mkdir(parents=True)
    (disk / "tokenizer" / "tokenizer.json").write_text(TOKENIZER)
    (disk / "checkpoints").mkdir()
    (folder / "tokenizer").symlink_to(disk / "tokenizer")
    (disk / "blob").write_text("{}")
    (folder / "linked" / "vectors.vec").symlink_to(disk / "blob")
    for name in ("tokens/et.bin", "tokens/et.idx", "texts/a.txt", "machine.json"):
        (folder / name).write_text("1")
    (tmp_path / "site" / "work").mkdir()
    (tmp_path / "image.sif").touch()
    monkeypatch.chdir(tmp_path / "site" / "work")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.delenv("KIELO_PREFETCHED", raising=False)
    return folder


def named(elsewhere: Path, **more):
    """A recipe that names each of them. The run's checkpoints are on another disk."""
    run = Path("runs/mine")
    (run / "train").mkdir(parents=True, exist_ok=True)
    if not (run / "train" / "checkpoints").is_symlink():
        (run / "train" / "checkpoints").symlink_to(elsewhere.parent / "disk" / "checkpoints")
    return recipe(
        tokenizer={"path": str(elsewhere / "tokenizer")},
        model={
            "weights": "hf:owner/model", "transplant": "focus",
            "transplant_vectors": "../elsewhere/linked/vectors.vec",
        },
        corpus={"sources": [{"path": "a.txt"}, {"name": "et", "tokens": "../elsewhere/tokens/et"}]},
        evaluate={"texts": [{"name": "t", "path": "../elsewhere/texts/a.txt"}]},
        machine="../elsewhere/machine.json", **more,
    )  # fmt: skip


def test_every_path_is_listed_with_its_use(elsewhere: Path) -> None:
    """A link and where it leads are two paths; only jobs that pack read texts."""
    jobs, site_folder = plan(site(), recipe=named(elsewhere)), elsewhere.parent
    listed = {one.path.removeprefix(f"{site_folder}/"): one.use for one in job_paths(jobs)}
    assert listed.items() >= {
        "work": WRITES, "work/runs/mine": WRITES, "work/runs/mine/train/checkpoints": WRITES,
        "disk/checkpoints": WRITES, "elsewhere/tokenizer": READS, "disk/tokenizer": READS,
        f"elsewhere/hub/{WEIGHTS}": READS, "elsewhere/linked/vectors.vec": READS, "disk/blob": READS,
        "elsewhere/tokens": READS, "elsewhere/machine.json": READS, "/tmp": WRITES,
    }.items()  # fmt: skip
    assert "elsewhere/texts/a.txt" not in listed
    assert str(elsewhere / "texts/a.txt") in {one.path for one in job_paths(replace(jobs, work="pack"))}


@pytest.mark.skipif(bool(why_no_container()), reason=why_no_container())
def test_a_container_sees_them_and_no_more(elsewhere: Path, tmp_path: Path) -> None:
    """Each path, in a job that trains and in one that packs; what is only read cannot be written."""
    program = make_container(tmp_path / "bin" / "container", elsewhere.parent)
    of = site(jobs={"container": [str(program), "exec"], "image": str(tmp_path / "image.sif")})
    jobs = plan(of, recipe=named(elsewhere))
    (elsewhere / "secret").write_text("of another project")
    packing = replace(jobs, work="pack")
    for of, script in ((jobs, job_script(jobs, Path("/j"))), (packing, share_script(packing, Path("/j"), 2))):
        line = next(one for one in script.splitlines() if one.startswith("CONTAINER="))
        paths = [one for one in job_paths(of) if one.path not in ("/tmp", jobs.image)]
        looks = [
            f"test -e {one.path} && {'!' * (one.use == READS)} test -w {one.path} || echo {one.path}"
            for one in paths
        ]
        looks.append(f"test ! -e {elsewhere}/secret || echo secret; cat {elsewhere}/hub/*/snapshots/*/*")
        look = "; ".join(looks)
        run = f'NODE_FOLDER=/tmp; {line}; "${{CONTAINER[@]}}" bash -c {shlex.quote(look)}'
        told = subprocess.run(["bash", "-c", run], capture_output=True, text=True)
        assert (told.stdout, told.stderr, told.returncode) == ("{}" * 3, "", 0)
        assert len(paths) >= 11


def test_jobs_look_into_the_cache_of_who_launches(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an environment with a cache of its own too; not for what was brought."""
    of_site = {"site_folder": Path("/site"), "made": made("/site")}
    line = f"export HF_HUB_CACHE={elsewhere / 'hub'}"
    for more in ({}, of_site):
        written = environment_script(plan(site(), recipe=named(elsewhere), **more)).splitlines()
        assert line in written and not [one for one in written if "HF_HOME" in one]
    assert "HF_HUB_CACHE" not in environment_script(plan(site()))
    brought = elsewhere / "brought"
    on_hub(brought / "hub")
    (brought / "prefetched.json").touch()
    monkeypatch.setenv("KIELO_PREFETCHED", str(brought))
    jobs = plan(site(), recipe=named(elsewhere))
    assert "HF_HUB_CACHE" not in environment_script(jobs)
    assert str(brought) in {one.path for one in job_paths(jobs)}


def test_what_is_not_fetched_yet_is_listed_where_it_will_be(elsewhere: Path) -> None:
    jobs = plan(site(), recipe=recipe(model={"weights": "hf:other/large@main"}))
    assert str(elsewhere / "hub" / "models--other--large") in {one.path for one in job_paths(jobs)}


def test_ready_tokens_are_found_as_packing_finds_them(elsewhere: Path) -> None:
    """A pattern is no path; a folder is one, and so is where the links of its files lead."""
    for part in ("2024/et", "2025/et", "linked/et"):
        (elsewhere / "tokens" / part).mkdir(parents=True)
    (elsewhere.parent / "disk" / "far").mkdir()
    for place in ("2024/et/a", "2025/et/a"):
        for ending in (".bin", ".idx"):
            (elsewhere / "tokens" / f"{place}{ending}").write_text("1")
    for ending in (".bin", ".idx"):
        (elsewhere.parent / "disk" / "far" / f"b{ending}").write_text("1")
        (elsewhere / "tokens/linked/et" / f"b{ending}").symlink_to(
            elsewhere.parent / "disk/far" / f"b{ending}"
        )
    for tokens, folders in {
        "../elsewhere/tokens/*/et": {"2024/et", "2025/et", "linked/et", "far"},
        "../elsewhere/tokens/202?/et/*.bin": {"2024/et", "2025/et"},
        "../elsewhere/tokens/linked": {"linked", "linked/et", "far"},
        "../elsewhere/tokens/2024/et/a": {"2024/et"},
        "../elsewhere/gone/et": {"elsewhere/gone"},
    }.items():
        source = {"name": "et", "tokens": tokens}
        jobs = plan(site(), recipe=recipe(corpus={"sources": [source]}, tokenizer={"path": str(elsewhere)}))
        listed = {one.path for one in job_paths(jobs) if one.reason.startswith("corpus.sources, et")}
        assert {path for path in listed if not path.endswith(tuple(folders))} == set()
        assert all(any(path.endswith(folder) for path in listed) for folder in folders), listed


def test_a_path_that_cannot_be_bound_is_refused(elsewhere: Path) -> None:
    """--bind parts paths by a comma, and its own words by a colon. Without a container both are paths."""
    for name in ("a,b", "a:b"):
        folder = elsewhere / name
        folder.mkdir()
        jobs = plan(site(jobs={"container": ["c"], "image": "/i.sif"}), recipe=recipe(folder=str(folder)))
        with pytest.raises(KieloError, match="with a comma or a colon. Fix: move or rename"):
            binds(jobs)
        job_script(plan(site(), Wishes(image="none"), recipe=recipe(folder=str(folder))), Path("/j"))


def test_dry_runs_of_every_card_list_the_paths(elsewhere: Path, tmp_path: Path, capsys) -> None:
    """Jobs that train and jobs that pack list the run, what the recipe names, and a node's folder."""
    recipe_file = Path("mine.toml")
    recipe_file.write_text(
        'name = "mine"\nlanguage = "et"\ntrain.tokens = 1_000_000_000\n'
        + f'corpus.sources = ["a.txt"]\ntokenizer.path = "{elsewhere}/tokenizer"\n'
    )
    cards = [card for card in map(cluster, clusters()) if card.jobs is not None and card.scheduler != "none"]
    assert len(cards) >= 15
    for name, of_site in ((card.name, card.jobs) for card in cards):
        packs = of_site.cpu or of_site
        for account, more in (
            (of_site.account_example, ["--nodes", "1"]),
            (packs.account_example or of_site.account_example, ["--pack", "2"]),
        ):
            flags = ["--cluster", name, "--hours", "1", "--dry-run"]
            flags += ["--account", account] if account else []
            capsys.readouterr()
            assert main(["launch", str(recipe_file), *flags, *more, "--json"]) == 0, name
            listed = {one["path"]: one["use"] for one in json.loads(capsys.readouterr().out)["paths"]}
            assert listed.items() >= {
                str(Path.cwd()): WRITES, str(Path("runs/mine").absolute()): WRITES,
                str(elsewhere / "tokenizer"): READS, str(elsewhere.parent / "disk/tokenizer"): READS,
            }.items()  # fmt: skip
            assert (of_site.node_folder in listed) is ("--pack" not in more)
            assert {of_site.image} - {""} <= set(listed)
