"""Numbers and limits of a launch, by hand: at, below and above each, with what is asked for in its place."""

import math
from pathlib import Path

import pytest

from kielo.artifact.stage_json import write_json
from kielo.launch import job_plan
from kielo.launch.bash import start_of
from kielo.launch.job_plan import (
    JobPlan,
    Wishes,
    check_environment,
    check_job_count,
    check_ready,
    check_request,
    longest_hours,
    made_for,
    most_nodes,
    network_needed,
    plan_jobs,
)
from kielo.recipe.errors import KieloError
from tests.launch.hand_made import forecast, made, plan, recipe, site

TRAIN = {"start_timeout_seconds": 1000, "step_timeout_seconds": 200, "log_every_steps": 10}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def on(monkeypatch):
    """on(site, forecast): the recipe's cluster, and the planner's answer; None: no card has speeds."""

    def use(of, planned=None) -> None:
        monkeypatch.setattr(job_plan, "cluster", lambda name: of)
        answer = (planned, "") if planned else (None, "no speeds")
        monkeypatch.setattr(job_plan, "planned_run", lambda recipe, nodes, layout: (recipe, *answer))
        monkeypatch.setattr(job_plan, "forecast_of", lambda planned, hours: planned)

    return use


def jobs_of(hours: float = 10, train: dict | None = None, **wishes) -> JobPlan:
    return plan_jobs(recipe(train=TRAIN | (train or {})), Wishes(nodes=3, hours=hours, **wishes))


def test_a_job_without_a_forecast(on) -> None:
    """600 s to save in, a quarter of a job that is shorter than 40 minutes, and one job."""
    on(site())
    planned = jobs_of()
    assert (planned.wall_seconds, planned.grace_seconds, planned.chain_length) == (36_000, 600, 1)
    assert planned.silence_seconds == 600 + 1000 + 200 + 3 * 10 * 200
    assert (planned.forecast, planned.no_forecast, planned.nodes) == (None, "no speeds", 3)
    graces = {2398 / 3600: 599, 2400 / 3600: 600, 2404 / 3600: 600, 100 / 3600: 25}
    assert {hours: jobs_of(hours).grace_seconds for hours in graces} == graces


def test_a_job_with_a_forecast(on) -> None:
    """Twice a slow step and a save, and a minute, but five at least; a fifth more jobs, 20 at most."""
    on(site(), forecast(interval_seconds=[9.0, 50.25]))
    planned = jobs_of()
    assert planned.grace_seconds == math.ceil(2 * (50.25 + 8 + 100) + 60) == 377
    assert planned.silence_seconds == math.ceil(600 + 1200 + 3 * 10 * 50.25) == 3308
    assert planned.chain_length == 5 and planned.no_forecast == ""
    on(site(), forecast(interval_seconds=[0.1, 1.0], checkpoint_seconds=1.0))
    assert jobs_of().grace_seconds == 300
    on(site(max_wall_hours=100), forecast(interval_seconds=[1e4, 4e4]))
    assert jobs_of(100).grace_seconds == 65_535
    chains = {1: 2, 4: 5, 5: 6, 6: 8, 16: 20, 17: 20, 100: 20}
    for jobs, length in chains.items():
        on(site(), forecast(jobs=jobs))
        assert jobs_of().chain_length == length
    assert jobs_of(jobs=7).chain_length == 7


def test_a_grace_that_is_asked_for(on) -> None:
    """From 1 s to the most that sbatch takes, and the job must start and train before it."""
    for planned, start in ((forecast(), 600), (None, 0)):
        on(site(), planned)
        assert jobs_of(1, grace_seconds=1).grace_seconds == 1
        assert jobs_of(24, grace_seconds=65_535).grace_seconds == 65_535
        assert jobs_of((start + 101) / 3600, grace_seconds=100).grace_seconds == 100
        for hours, grace in (((start + 100) / 3600, 100), (24, 65_536), (1, 0), (1, -1)):
            with pytest.raises(
                KieloError, match=f"has no time to train: {start} s to start.* stop {grace} s"
            ):
                jobs_of(hours, grace_seconds=grace)
    on(site(), forecast())
    with pytest.raises(KieloError, match="a job of 1 hours .*Fix: --hours 1.3 or more"):
        jobs_of(1, grace_seconds=3600)


def request(of, on, **wishes):
    on(of)
    return check_request(recipe(nodes=(20, 8, 2)), Wishes(**wishes))


def refusal(of, on, **wishes) -> str:
    with pytest.raises(KieloError) as refused:
        request(of, on, **wishes)
    return str(refused.value)


QUEUES = {"partitions": [
    {"name": "usual", "qos": "normal"}, {"name": "long", "max_hours": 72, "max_nodes": 3},
    {"name": "wide", "max_hours": 2, "max_nodes": 9}, {"name": "all", "max_hours": 1, "max_nodes": 50},
]}  # fmt: skip


def test_nodes_of_a_job(on) -> None:
    """Without a wish the recipe's first number that the site has; a queue's limits count spares too."""
    of = site(jobs=QUEUES)
    assert request(of, on)[3] == 8 and request(of, on, nodes=1)[3] == 1
    assert request(of, on, nodes=6, spares=2)[3] == 6
    found = request(of, on, nodes=3, partition="long")
    assert found[0] is of and found[1] is of.jobs and found[2] is of.jobs.partitions[1] and found[4] == 72
    assert refusal(of, on, nodes=0) == ("--nodes 0: normal of here gives 1 to 8. Fix: --nodes 1")
    assert refusal(of, on, nodes=9) == (
        "--nodes 9: normal of here gives 1 to 8. Fix: --nodes 8, or --partition wide"
    )
    assert refusal(of, on, nodes=7, spares=2) == (
        "--nodes 7 with 2 spares: normal of here gives 1 to 8. Fix: --nodes 6, or --partition wide"
    )
    assert refusal(of, on, nodes=10) == (
        "--nodes 10: normal of here gives 1 to 8. Fix: --nodes 8, or --partition all"
    )
    assert refusal(of, on, nodes=4, partition="long") == (
        "--nodes 4: long of here gives 1 to 3. Fix: --nodes 3, or --partition normal"
    )
    assert refusal(of, on, nodes=1, spares=9).endswith("Fix: --nodes 1, or --partition all")
    assert refusal(of, on, nodes=11, partition="all").endswith("all of here gives 1 to 10. Fix: --nodes 10")
    assert refusal(of, on, nodes=1, spares=-1) == "--spares -1: is negative. Fix: 0 or more"
    on(of)
    with pytest.raises(KieloError, match="no number of nodes of here, which has 10. Fix: --nodes 16"):
        check_request(recipe(nodes=(11,)), Wishes())
    assert check_request(recipe(nodes=(8,)), Wishes())[3] == 8


def test_a_queue_with_fewest_nodes_and_one_with_limits_by_size(on) -> None:
    """The first of a name that gives the nodes, with spares; others of the card are the fix."""
    of = site(
        nodes=200, max_nodes_per_job=64,
        jobs={"partitions": [
            {"name": "usual"},
            {"name": "usual", "qos": "big", "min_nodes": 65, "max_nodes": 150, "max_hours": 9},
            {"constraint": "fat", "min_nodes": 4, "max_hours": 6}, {"constraint": "fat", "max_hours": 2},
        ]},
    )  # fmt: skip
    usual, big, fat, fat_and_small = of.jobs.partitions
    assert [one.label for one in of.jobs.partitions] == ["usual", "big", "fat", "fat"]
    assert refusal(of, on, nodes=8, partition="big") == (
        "--nodes 8: big of here gives 65 to 150. Fix: --nodes 65, or --partition usual"
    )
    assert refusal(of, on, nodes=60, spares=4, partition="big").endswith(
        "--nodes 60 with 4 spares: big of here gives 65 to 150. Fix: --nodes 61, or --partition usual"
    )
    assert refusal(of, on, nodes=65).endswith("Fix: --nodes 64, or --partition big")
    assert request(of, on, nodes=60, spares=5, partition="big")[2] is big
    assert request(of, on, nodes=4, partition="fat")[2:5:2] == (fat, 6)
    assert request(of, on, nodes=3, partition="fat")[2:5:2] == (fat_and_small, 2)
    assert request(of, on, nodes=3, spares=1, partition="fat")[2] is fat
    assert request(of, on, nodes=8, partition="usual")[2] is usual
    assert "not in the card of here. Fix: usual, big, fat" in refusal(of, on, partition="slow")


def test_a_queue_takes_so_many_jobs_of_a_person(on) -> None:
    """A chain by forecast is that long; one that is asked for is refused if it is longer."""
    of = site(jobs={"partitions": [{"name": "debug", "max_jobs": 2}]})
    on(of, forecast(jobs=9))
    assert jobs_of(1).chain_length == 2 and jobs_of(1, jobs=2).chain_length == 2
    with pytest.raises(KieloError) as refused:
        jobs_of(1, jobs=3)
    assert str(refused.value) == (
        "--jobs: makes 3 jobs, and debug of here takes 2 of a person, waiting and running together. "
        "Fix: 2 jobs, or another --partition"
    )
    on(site(), forecast(jobs=9))
    assert jobs_of(1).chain_length == 11 and jobs_of(1, jobs=30).chain_length == 30


def test_limits_of_the_usual_queue_are_the_cards_and_those_of_others_are_not() -> None:
    of, loose = site(jobs=QUEUES), site(max_nodes_per_job=None, max_wall_hours=None)
    assert [most_nodes(one, of.jobs, of) for one in of.jobs.partitions] == [8, 3, 9, 10]
    assert [longest_hours(one, of.jobs, of) for one in of.jobs.partitions] == [24, 72, 2, 1]
    usual, of_long = loose.jobs.partitions
    assert most_nodes(usual, loose.jobs, loose) == 10 and longest_hours(usual, loose.jobs, loose) is None
    open_end = site(jobs={"partitions": [{"name": "usual"}, {"name": "other"}]})
    other = open_end.jobs.partitions[1]
    assert most_nodes(other, open_end.jobs, open_end) == 10
    assert longest_hours(other, open_end.jobs, open_end) is None


def test_hours_of_a_job(on) -> None:
    """Up to the queue's longest; more goes on in the next job."""
    of = site(jobs=QUEUES)
    assert [request(of, on, hours=hours)[4] for hours in (None, 24, 0.001)] == [24, 24, 0.001]
    for hours in (24.5, 0, -1, math.inf, math.nan):
        assert refusal(of, on, hours=hours) == (
            f"--hours {hours:g}: normal of here gives at most 24 hours a job. The run continues in the "
            "chain's next job (--jobs)"
        )
    loose = site(max_wall_hours=None)
    assert request(loose, on, hours=1000)[4] == 1000
    assert refusal(loose, on) == "the card of here has no longest time of a job. Fix: --hours H"


def test_queues_and_projects(on) -> None:
    """A queue by its name or its quality of service; a project of the form of the card, or none."""
    of = site(jobs=QUEUES)
    named = [request(of, on, nodes=1, partition=name)[2].name for name in ("normal", "usual", "wide")]
    assert named == ["usual", "usual", "wide"]
    assert (
        refusal(of, on, partition="x")
        == "--partition x: not in the card of here. Fix: normal, long, wide, all"
    )
    of = site(jobs={"account": r"p\d+", "account_example": "p12"})
    assert request(of, on, account="p7")[3] == 8 and request(site(), on, account="any")[3] == 8
    told = ", but here bills a project. Fix: give your project, such as --account p12"
    assert refusal(of, on) == f"no --account{told}"
    for account in ("xp7", "p7x"):
        assert (
            refusal(of, on, account=account) == f"--account {account}: not the form of a project there{told}"
        )
    for nowhere in (site("none"), site().model_copy(update={"jobs": None})):
        assert "here has no table [jobs] in its card" in refusal(nowhere, on)


def test_what_the_environment_lacks(here) -> None:
    """Each refusal, and beside it the same that is there."""
    image, venv = here / "i.sif", here / "venv"
    of = site(jobs={"image": str(image), "container": ["c"]})
    by_hand = plan(site(), Wishes(image=str(image)))
    for asked in (plan(of), by_hand):
        with pytest.raises(
            KieloError, match="i.sif: no such container image here. Fix: --container IMAGE, or none"
        ):
            check_environment(asked)
    image.touch()
    with pytest.raises(KieloError, match="i.sif has torch and not Kielo. Fix: kielo site here"):
        check_environment(plan(of))
    check_environment(by_hand)
    check_environment(plan(of, Wishes(image="none")))
    check_environment(plan(site()))
    with pytest.raises(KieloError, match="--venv venv: has no bin/activate"):
        check_environment(plan(of, Wishes(venv="venv")))
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "activate").touch()
    check_environment(plan(of, Wishes(venv="venv")))
    squash = here / "v.sqsh"
    (here / "image.sif").touch()
    of_site = plan(of, made=made(here, str(squash)), site_folder=here)
    with pytest.raises(KieloError, match="v.sqsh: is gone. Fix: .*/site.sh makes it again"):
        check_environment(of_site)
    squash.touch()
    check_environment(of_site)
    check_environment(plan(of, made=made(here), site_folder=here))


def test_jobs_that_would_end_at_once_are_refused(here, monkeypatch) -> None:
    """In this order: downloads, tokens, what each rank would refuse, the environment."""
    asked, done = plan(site(), Wishes(venv="venv")), []
    monkeypatch.setattr(job_plan, "missing", lambda recipe: ["the text of a", "the weights b"])
    offline = plan(site(internet_on_compute_nodes=False), Wishes(venv="venv"))
    said = (
        "here's nodes reach no network, and not here yet: the text of a, the weights b. Fix: "
        "kielo prefetch RECIPE --to DIR on a machine with a network, and KIELO_PREFETCHED=DIR here"
    )
    assert network_needed(asked) == "" and network_needed(offline) == said
    with pytest.raises(KieloError, match="here's nodes reach no network"):
        check_ready(offline)
    with pytest.raises(KieloError, match="runs/mine/tokens: not made yet, and the jobs only train"):
        check_ready(asked)
    asked_for = []
    monkeypatch.setattr(job_plan, "read_manifest", lambda folder: asked_for.append(folder) or object())
    monkeypatch.setattr(job_plan, "resolve", lambda *what: done.append(what))
    with pytest.raises(KieloError, match="--venv venv: has no bin/activate"):
        check_ready(asked)
    run = Path("runs/mine")
    assert asked_for == [run / "tokens"] and done == [(asked.recipe, run, 12, "cuda", "h100_80")]
    monkeypatch.setattr(job_plan, "missing", lambda recipe: [])
    assert network_needed(offline) == ""
    check_ready(plan(site(internet_on_compute_nodes=False)))


def test_what_site_sh_made_is_found(here) -> None:
    """In sites/NAME, or where --site says; not beside an image or an environment of one's own."""
    of = site()
    assert made_for(Wishes(), of) == (None, None)
    for folder in ("sites/here", "other"):
        (here / folder).mkdir(parents=True)
        write_json(here / folder, made(folder))
    assert made_for(Wishes(), of) == (here / "sites/here", made("sites/here"))
    assert made_for(Wishes(site="other"), of) == (here / "other", made("other"))
    for own in ({"image": "i.sif"}, {"venv": "v"}):
        assert made_for(Wishes(**own), of) == (None, None)
        with pytest.raises(KieloError, match="--site brings its own image and environment"):
            made_for(Wishes(site="other", **own), of)
    with pytest.raises(KieloError, match="--site gone: has no site.json, .*kielo site here --to gone"):
        made_for(Wishes(site="gone"), of)


def test_so_many_jobs_that_nobody_means_them() -> None:
    """Each is a call of the scheduler, also where no card has a limit."""
    of = site()
    check_job_count("--jobs", 1000, of.jobs.partitions[0], of)
    with pytest.raises(KieloError, match="--jobs: makes 1000000000 jobs. Fix: at most 1000"):
        check_job_count("--jobs", 1_000_000_000, of.jobs.partitions[0], of)


def test_a_command_to_paste_is_one_command() -> None:
    """A folder's name may have what a shell would run."""
    assert start_of("s $(cmd)/site.sh") == "bash 's $(cmd)/site.sh'" and start_of("a/b.sh") == "bash a/b.sh"
