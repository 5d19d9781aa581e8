"""What a site cannot give is refused in one line, before a folder is written or a job is queued."""

from pathlib import Path

import pytest

from kielo.cli.main import main
from kielo.launch.job_plan import Wishes, check_request
from kielo.recipe import cards
from kielo.recipe.read import read_recipe
from tests.house.test_login_node import loaded_after

LUMI = ["--cluster", "lumi_g", "--account", "project_462000000"]
# What is typed after `kielo launch RECIPE` → parts of the answer.
REFUSED: dict[str, tuple[list[str], list[str]]] = {
    "an unknown cluster": (["--cluster", "lumi"], ["did you mean lumi_g?"]),
    "a card that is not there": (
        ["--cluster", "mine.toml"],
        ["mine.toml: cannot be read", "kielo site --new mine"],
    ),
    "a cluster without jobs": (["--cluster", "laptop", "--nodes", "1"], ["[jobs]", "kielo site --new NAME"]),
    "no nodes": ([*LUMI, "--nodes", "0"], ["--nodes 0: standard-g of lumi_g gives 1 to 1024"]),
    "more nodes than the queue": ([*LUMI, "--nodes", "2000"], ["standard-g", "--nodes 1024"]),
    "a queue that takes them": (
        ["--cluster", "leonardo_booster", "--account", "a", "--nodes", "100"],
        ["gives 1 to 64", "--partition boost_qos_bprod"],
    ),
    "fewer nodes than the queue": (
        ["--cluster", "leonardo_booster", "--account", "a", "--nodes", "8", "--partition", "boost_qos_bprod"],
        ["boost_qos_bprod of leonardo_booster gives 65 to 256", "--nodes 65, or --partition boost_usr_prod"],
    ),
    "more jobs than the queue": (
        [
            "--cluster",
            "marenostrum5_acc",
            "--account",
            "a",
            "--nodes",
            "8",
            "--partition",
            "acc_debug",
            "--jobs",
            "2",
        ],
        ["acc_debug of marenostrum5_acc takes 1 of a person"],
    ),
    "more jobs that pack than the queue": (
        ["--cluster", "marenostrum5_acc", "--account", "a", "--partition", "acc_debug", "--pack", "2"],
        ["--pack: makes 3 jobs", "acc_debug of marenostrum5_acc takes 1 of a person"],
    ),
    "jobs that pack and join": (
        ["--cluster", "betzy", "--account", "nn0000k", "--hours", "5", "--pack", "16"],
        ["--pack: makes 17 jobs", "takes 16 of a person", "Fix: --pack 15, or"],
    ),
    "a ladder of more jobs than the queue": (
        ["--cluster", "marenostrum5_acc", "--account", "a", "--partition", "acc_debug", "--ladder", "4,8"],
        ["--ladder: makes 2 jobs", "acc_debug of marenostrum5_acc takes 1 of a person"],
    ),
    "an account of CPUs": (
        ["--cluster", "perlmutter_a100_80", "--nodes", "16", "--account", "m0000"],
        ["--account m0000: not the form", "m0000_g"],
    ),
    "an account of GPUs": (
        ["--cluster", "perlmutter_a100_80", "--account", "m0000_g", "--pack", "2"],
        ["--account m0000_g: not the form", "--account m0000"],
    ),
    "more hours than the queue": ([*LUMI, "--nodes", "64", "--hours", "72"], ["at most 48 hours", "--jobs"]),
    "too few hours": (
        [*LUMI, "--nodes", "64", "--hours", "0.1"],
        ["ends before its first save", "--hours 0.2"],
    ),
    "a grace as long as the job": (
        [*LUMI, "--nodes", "64", "--hours", "1", "--grace", "3600"],
        ["no time to train", "--grace"],
    ),
    "an unknown queue": ([*LUMI, "--nodes", "4", "--partition", "gpu"], ["standard-g, small-g, dev-g"]),
    "no account": (["--cluster", "lumi_g", "--nodes", "64"], ["no --account", "project_462000000"]),
    "an account of another form": (
        ["--cluster", "deucalion_a100_40", "--nodes", "2", "--account", "F2025x"],
        ["--account F2025x: not the form", "such as --account F202500000CPCAA0g"],
    ),
    "a layout that does not fit": (
        [*LUMI, "--nodes", "1", "--set", "layout.recompute=none"],
        ["does not fit", "66.2 GB are usable"],
    ),
    "a layout that the devices do not divide": (
        [*LUMI, "--nodes", "64", "--set", "layout.shard=7"],
        ["poro_34b on 64 nodes of lumi_g", "Fix: "],
    ),
    "a layout without such a name": ([*LUMI, "--nodes", "64", "--layout", "tp3"], ["tp3"]),
    "no jobs": ([*LUMI, "--nodes", "64", "--jobs", "0"], ["--jobs 0: give 1 or more"]),
    "spares below zero": (
        [*LUMI, "--nodes", "64", "--spares", "-1"],
        ["--spares -1: is negative. Fix: 0 or more"],
    ),
    "no scheduler": ([*LUMI, "--nodes", "64"], ["sbatch is not on this machine's PATH", "--dry-run"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_line(case, tmp_path, capsys, monkeypatch) -> None:
    """Exit code 1, the reason and the fix in one line, and no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    arguments, parts = REFUSED[case]
    assert main(["launch", "poro_34b", *arguments]) == 1
    answer = capsys.readouterr().err
    assert answer.count("\n") == 1 and all(part in answer for part in parts), answer
    assert list(tmp_path.iterdir()) == []


def a_scheduler(folder: Path, lines: str) -> None:
    (folder / "sbatch").write_text("#!/bin/bash\n" + lines)
    (folder / "sbatch").chmod(0o755)


def test_jobs_of_a_run_without_tokens_are_not_queued(tmp_path, capsys, monkeypatch) -> None:
    """They would only train; the answer says what comes first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    a_scheduler(tmp_path, "touch submitted\n")
    assert main(["launch", "poro_34b", *LUMI, "--nodes", "64"]) == 1
    answer = capsys.readouterr().err
    assert "runs/poro_34b/tokens: not made yet" in answer and "kielo run RECIPE --to pack" in answer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sbatch"]


@pytest.mark.parametrize("name", [name for name in cards.clusters() if cards.cluster(name).jobs])
def test_the_usual_queue_is_the_cards(name) -> None:
    """Limits of the usual queue are those that plans count with; those of the others are their own."""
    site = cards.cluster(name)
    usual, *others = site.jobs.partitions
    assert usual.max_hours is None and usual.max_nodes is None and site.max_wall_hours
    assert all(one.max_hours and one.max_nodes for one in others)
    assert all(one.max_nodes >= one.min_nodes for one in others)
    assert site.jobs.account_example or not site.jobs.account


SITES = [name for name in cards.clusters() if cards.cluster(name).jobs]
# Site → what its job asks for beside nodes and time, by hand from the documentation that its card names.
ASKED = {
    "perlmutter_a100_40": {"--qos=regular", "--constraint=gpu&hbm40g", "--gpus-per-node=4"},
    "perlmutter_a100_80": {"--qos=regular", "--constraint=gpu&hbm80g", "--gpus-per-node=4"},
    "frontier": {"--partition=batch", "--network=disable_rdzv_get", "--time=02:00:00"},
    "jean_zay_a100": {"--qos=qos_gpu_a100-t3", "--constraint=a100", "--gres=gpu:8"},
    "jean_zay_v100": {"--qos=qos_gpu-t3", "--constraint=v100-32g", "--gres=gpu:4"},
    "alps_clariden": {"--partition=normal", "--constraint=thp_never&nvidia_vboost_enabled"},
}
CHOSEN_BY_SLURM = ("perlmutter", "jean_zay")


@pytest.mark.parametrize("name", SITES)
def test_each_card_writes_a_job_and_makes_a_plan(name, tmp_path, monkeypatch, capsys) -> None:
    """As a person would ask for it; a site without partitions is asked for none."""
    monkeypatch.chdir(tmp_path)
    account = cards.cluster(name).jobs.account_example or "p"
    recipe = ["ltg_bert_base", "--set", "language=et", "--cluster", name, "--nodes", "2"]
    assert main(["launch", *recipe, "--account", account, "--hours", "2", "--dry-run"]) == 0
    (script,) = tmp_path.glob("runs/*/launch/0001/job.sh")
    asked = {line.split(" ", 1)[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH ")}
    assert asked >= ASKED.get(name, set())
    assert any(one.startswith("--partition") for one in asked) == (
        cards.cluster(name).scheduler == "slurm" and not name.startswith(CHOSEN_BY_SLURM)
    )
    capsys.readouterr()
    has_speed = cards.accelerator(cards.cluster(name).accelerator).peak_tflops
    assert main(["plan", *recipe]) == (0 if has_speed else 1)
    told = capsys.readouterr()
    assert told.out if has_speed else "no speed can be planned" in told.err


@pytest.mark.parametrize(("nodes", "hours"), [(91, 2), (92, 6), (183, 6), (184, 12), (9472, 12)])
def test_the_longest_job_of_frontier_depends_on_its_nodes(nodes, hours) -> None:
    """By the table of its user guide."""
    recipe = read_recipe("poro_34b", ["cluster=frontier"]).recipe
    *_, partition, found, longest = check_request(recipe, Wishes(nodes=nodes, account="abc123"))
    assert (partition.label, found, longest) == ("batch", nodes, hours)


def test_there_are_sixteen_sites() -> None:
    """And each scheduler has one."""
    sites = [site for name in cards.clusters() if (site := cards.cluster(name)).jobs]
    assert len(sites) >= 16
    assert {site.scheduler for site in sites} == {"slurm", "pbs", "grid_engine"}


def test_a_field_without_a_source_is_refused() -> None:
    """A card says where each of its fields is from."""
    with pytest.raises(ValueError, match="jobs.sources must name each field of the table. Fix: devices"):
        cards.Jobs(partitions=[{"name": "a"}], devices="--gres=gpu:4", sources={"partitions": "x"})


def test_launch_starts_without_torch(tmp_path) -> None:
    """`kielo launch` plans and writes on a login node, which has none."""
    arguments = ["launch", "poro_34b", *LUMI, "--nodes", "64", "--dry-run"]
    asked = f"import os; os.chdir({str(tmp_path)!r})\nfrom kielo.cli.main import main\nmain({arguments!r})"
    told = loaded_after(asked + "\nprint('watched:')", ("torch", "transformers"))
    assert told[-1] == "watched:" and (tmp_path / "runs").exists()
