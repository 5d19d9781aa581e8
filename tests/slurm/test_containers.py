"""Jobs in a container that sees only what is bound, with what the recipe names lying elsewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

from kielo.cli.main import main
from tests.docs.toy_text import write_texts
from tests.launch.container import make_container, why_no_container
from tests.launch.test_job_paths import COMMIT
from tests.slurm.jobs import TWO_NODES, queue
from tests.slurm.launched_run import CARD, NAME, RECIPE, LaunchedRun
from tests.slurm.one_machine import why_not

pytestmark = pytest.mark.skipif(bool(why_not() or why_no_container()), reason=why_not() or why_no_container())
JOBS = """\
scheduler = "slurm"

[jobs]
partitions = [{{ name = "work" }}]
container = ["{program}", "exec"]
image = "{image}"
node_folder = "$OWN_DISK"

[jobs.sources]
partitions = "tests"
container = "tests"
image = "tests"
node_folder = "tests"
"""
MAKE_WEIGHTS = """
import sys
from transformers import LlamaConfig, LlamaForCausalLM
LlamaForCausalLM(LlamaConfig(
    vocab_size=704, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
)).save_pretrained(sys.argv[1])
"""


def kielo(place: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "kielo", *words], cwd=place, check=True, capture_output=True)


def cached(hub: Path, name: str, source: Path) -> None:
    """Moves the files of a folder into a hub's cache, as a repository owner/name."""
    folder = hub / f"models--owner--{name}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    source.rename(folder / "blobs")
    for file in (folder / "blobs").iterdir():
        (folder / "snapshots" / COMMIT / file.name).symlink_to(f"../../blobs/{file.name}")


@pytest.mark.full
def test_jobs_find_what_lies_elsewhere(machine, tmp_path, monkeypatch, capsys) -> None:
    """Text is packed, then two nodes train from weights of the hub's cache."""
    site, elsewhere = tmp_path / "site", tmp_path / "site" / "elsewhere"
    place = site / "place"
    for folder in (place, elsewhere):
        folder.mkdir(parents=True)
    (tmp_path / "image.sif").touch()
    program = make_container(tmp_path / "bin" / "container", site)
    (place / "site.toml").write_text(CARD + JOBS.format(program=program, image=tmp_path / "image.sif"))
    write_texts(elsewhere)
    own = [entry for entry in RECIPE if not entry.startswith(("corpus", "tokenizer", "train.tokens="))]
    own += [
        f"corpus.sources={elsewhere}/my_text.txt", "cluster=site.toml", f"train.tokens={1536 * 8}",
        f'evaluate.texts=[{{name="web", path="{elsewhere}/text/web.txt"}}]', "dataset.sequence_length=256",
    ]  # fmt: skip
    sets = [word for entry in own for word in ("--set", entry)]
    learnt = ["--set", "tokenizer.vocab_size=700", "--set", "folder=learnt"]
    kielo(place, "run", "own_text", *sets, *learnt, "--to", "tokenizer")
    (place / "learnt" / "tokenizer").rename(tmp_path / "tokenizer")
    cached(elsewhere / "hub", "model", tmp_path / "tokenizer")
    subprocess.run([sys.executable, "-c", MAKE_WEIGHTS, elsewhere / "weights"], check=True)
    named = ["tokenizer.path=hf:owner/model", f"model.weights=hf:{elsewhere}/weights"]
    sets += [word for entry in named for word in ("--set", entry)]

    import huggingface_hub.constants

    monkeypatch.chdir(place)
    for name, value in {"HOME": tmp_path, "OMP_NUM_THREADS": 1, "OWN_DISK": tmp_path / "own_disk"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("SLURM_CONF", machine.environment["SLURM_CONF"])
    monkeypatch.setenv("HF_HUB_CACHE", str(elsewhere / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(elsewhere / "hub"))
    kielo(place, "run", "own_text", *sets, "--to", "tokenizer")
    monkeypatch.delenv("HF_HUB_CACHE")
    run = LaunchedRun(place, {"SLURM_CONF": machine.environment["SLURM_CONF"]})
    assert (
        main(
            ["launch", f"runs/{NAME}", *TWO_NODES[:2], "--hours", "0.3", "--pack", "1", "--venv", sys.prefix]
        )
        == 0
    )
    run.wait(lambda: queue(machine) == {})
    for stage in ("tokens", "evaluation_texts"):
        assert (run.folder / stage / "manifest.json").is_file(), run.logs()
    assert main(["launch", f"runs/{NAME}", *TWO_NODES, "--jobs", "1", "--venv", sys.prefix]) == 0
    run.wait(lambda: queue(machine) == {})
    assert run.stopped == "finished", run.logs()
    assert run.last_step == 8
    assert list((tmp_path / "own_disk").iterdir()) == []  # caches are removed at the end
