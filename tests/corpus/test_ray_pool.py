"""The tasks of a corpus on two nodes of Ray on this machine: the bytes of processes, after any loss."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kielo.artifact.manifest import hash_manifest
from kielo.corpus import corpus_parts, ray_pool
from kielo.corpus.corpus_shares import run_corpus_share
from kielo.corpus.corpus_stage import run_corpus
from kielo.corpus.corpus_tasks import tasks_folder
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Corpus, Recipe
from tests.corpus.texts import estonian_document

MEMORY = 80 << 20  # of a node's store of objects, the least
# In place of Ray: no task is finished at the first 30 looks, and then each has its batch as its result.
FAKE_RAY = """
import os
from types import SimpleNamespace

assert os.environ["RAY_task_oom_retries"] == "3"  # which Ray reads as it is imported
free, looks = {}, iter(range(30))
init = lambda **keys: None
remote = lambda **keys: lambda work: SimpleNamespace(remote=lambda *what: what[-1])
cluster_resources = lambda: {"CPU": 2.0}
available_resources = lambda: free
wait = lambda tasks, **keys: ([], tasks) if next(looks, None) is not None else (tasks[:1], tasks[1:])
get = lambda task: task
"""


def recipe_of(folder: Path, **keys) -> Recipe:
    """About 20 parts of 10 documents, each of which takes a moment."""
    (folder / "slow.py").write_text("import time\n\n\ndef judge(text, metadata):\n    time.sleep(0.05)\n")
    texts = [estonian_document(number % 150).replace("\n", " ") for number in range(200)]
    (folder / "a.txt").write_text("\n".join(texts) + "\n")
    keys = {"sources": str(folder / "a.txt"), "workers": 1, "own_steps": (str(folder / "slow.py"),)} | keys
    return Recipe(name="t", language="et", corpus=Corpus(**keys))


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The recipe, and the manifest's hash of its corpus by processes."""
    monkeypatch.setattr(corpus_parts, "part_bytes", lambda total: 2500)
    run_corpus(recipe_of(tmp_path), tmp_path / "by processes", tmp_path / "raw", False)
    return recipe_of(tmp_path, engine="ray"), hash_manifest(tmp_path / "by processes")


@pytest.fixture
def cluster(monkeypatch, request):
    """Two nodes of one CPU. Parameters: variables of their environment."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "3")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # or else other work of this machine starves them
    of_node = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=of_node)
    cluster.add_node(**of_node)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


class Disturbance(threading.Thread):
    """Calls `harm` once some tasks of the corpus are finished."""

    def __init__(self, folder: Path, tasks: int, harm):
        super().__init__(daemon=True)
        self._folder, self._tasks, self._harm = tasks_folder(folder), tasks, harm
        self.is_done = False
        self.start()

    def run(self) -> None:
        while len(list(self._folder.glob("*/clean/[0-9]*"))) < self._tasks:
            time.sleep(0.05)
        self._harm()
        self.is_done = True


def kill_a_task() -> None:
    """Kill a process of Ray that is at a task."""
    while True:
        for place in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                if place.read_bytes().startswith(b"ray::_work_on"):
                    os.kill(int(place.parent.name), signal.SIGKILL)
                    return
        time.sleep(0.02)


def made_on_ray(recipe: Recipe, folder: Path) -> str:
    run_corpus(recipe, folder, folder.parent / "raw", False)
    return hash_manifest(folder)


@pytest.mark.full
def test_the_same_bytes_as_by_processes(tmp_path, made, cluster):
    """Even if the process of a task is killed, and then a node is lost."""
    recipe, expected = made
    node = next(iter(cluster.worker_nodes))
    events = [(2, kill_a_task), (8, lambda: cluster.remove_node(node, allow_graceful=False))]
    disturbances = [Disturbance(tmp_path / "on ray", *event) for event in events]
    assert made_on_ray(recipe, tmp_path / "on ray") == expected
    assert all(disturbance.is_done for disturbance in disturbances)


@pytest.mark.full
def test_without_its_head_the_tasks_stay(tmp_path, made, cluster):
    recipe, expected = made
    head = cluster.head_node

    def harm() -> None:
        head.kill_all_processes(check_alive=False, allow_graceful=False)

    disturbance = Disturbance(tmp_path / "on ray", 3, harm)
    with pytest.raises(
        KieloError, match=r"connection to Ray was lost.*Finished tasks are kept. Fix: start Ray"
    ):
        made_on_ray(recipe, tmp_path / "on ray")
    disturbance.join()
    (work,) = tasks_folder(tmp_path / "on ray").iterdir()
    finished = {path: path.stat().st_mtime_ns for path in (work / "clean").glob("[0-9]*")}
    assert len(finished) >= 3
    by_processes = recipe_of(tmp_path)
    with pytest.MonkeyPatch.context() as kept:
        kept.setattr("kielo.corpus.corpus_stage.remove_tasks", lambda *_, **__: None)
        assert made_on_ray(by_processes, tmp_path / "on ray") == expected
    assert finished.items() <= {path: path.stat().st_mtime_ns for path in (work / "clean").iterdir()}.items()


@pytest.mark.full
def test_without_a_cluster(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray_pool, "CONNECT_SECONDS", 8)
    with pytest.raises(KieloError, match=r"no cluster of Ray at RAY_ADDRESS = 127.0.0.1:1 .*Fix: RAY_"):
        made_on_ray(recipe_of(tmp_path, engine="ray"), tmp_path / "on ray")


def test_refusals(tmp_path, monkeypatch):
    """Without the package, in a share, and of a process with other packages or another disk."""
    monkeypatch.setitem(sys.modules, "ray", None)
    recipe = recipe_of(tmp_path, engine="ray")
    with pytest.raises(KieloError, match=r"engine = .ray. needs a package. Fix: pip install 'kielo\[ray\]'"):
        run_corpus(recipe, tmp_path / "c", tmp_path / "raw", False)
    with pytest.raises(
        KieloError, match="has no shares: it has all tasks. Fix: --set corpus.engine=processes"
    ):
        run_corpus_share(recipe, tmp_path / "c", tmp_path / "raw", (1, 2), False)
    assert not (tmp_path / "c").exists()


def work_of_a_node():
    """Return the variables that a batch names, or the batch's exception, or wait for memory to run out."""

    def work(batch):
        if isinstance(batch, Exception):
            raise batch
        return time.sleep(batch) if isinstance(batch, int) else [os.environ.get(name) for name in batch]

    return work


@pytest.mark.full
@pytest.mark.parametrize("cluster", [{"KIELO_OF_THE_NODE": "1"}], indirect=True)
def test_a_process_of_ray_is_as_of_this_machine(tmp_path, cluster, monkeypatch):
    """Kielo's variables, threads, the error for memory, and the refusal of a node that lacks the disk."""
    monkeypatch.delenv("KIELO_OF_THE_NODE")
    monkeypatch.setenv("KIELO_PREFETCHED", str(tmp_path))
    (tmp_path / "plan.json").write_text("{}")
    names = ["KIELO_PREFETCHED", "KIELO_OF_THE_NODE", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM"]
    with ray_pool.RayPool(work_of_a_node, (), tmp_path / "plan.json") as pool:
        assert list(pool.results([names])) == [[str(tmp_path), None, "1", "false"]]
        with pytest.raises(KieloError, match=r"ran out of memory. Finished.*corpus.max_document_bytes"):
            list(pool.results([MemoryError()]))
    lacking = tmp_path / "of another disk"
    with (
        ray_pool.RayPool(work_of_a_node, (), lacking / "plan.json") as pool,
        pytest.raises(
            KieloError, match=f"does not see {lacking}. Fix: the run on a disk that all nodes share"
        ),
    ):
        list(pool.results([names]))


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "cluster",
    [{"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "100"}],
    indirect=True,
)
def test_memory_that_runs_out_again_and_again(tmp_path, cluster):
    """Ray's own monitor kills the process of a task."""
    (tmp_path / "plan.json").write_text("{}")
    with (
        ray_pool.RayPool(work_of_a_node, (), tmp_path / "plan.json") as pool,
        pytest.raises(KieloError, match=r"a task lost its process 4 times, mostly because memory ran out"),
    ):
        list(pool.results([60]))


@pytest.mark.full
@pytest.mark.parametrize(("free", "times"), [({}, 1), ({"CPU": 0.5}, 1), ({"CPU": 1.0}, 0)])
def test_a_busy_cluster_is_said_once(tmp_path, monkeypatch, capfd, free, times):
    (tmp_path / "ray.py").write_text(FAKE_RAY.replace("free, looks = {}", f"free, looks = {free}"))
    monkeypatch.syspath_prepend(tmp_path)
    with ray_pool.RayPool(work_of_a_node, (), tmp_path / "plan.json") as pool:
        assert list(pool.results([1, 2])) == [1, 2]
    said = "corpus: Ray's 2 CPUs are at work for these tasks or for others: waiting"
    assert capfd.readouterr().err.splitlines().count(said) == times
