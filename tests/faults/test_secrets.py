"""No file and no screen shows what looks like a secret."""

import os
import subprocess
from pathlib import Path

from kielo.launch.script import SCRIPTS, environment_script
from tests.faults.trial import kielo
from tests.launch.hand_made import plan, site

# Variable → its value; "secret" is in what nobody may see.
SECRETS = {
    "HF_TOKEN": "hf_secret1", "HUGGING_FACE_HUB_TOKEN": "hf_secret2", "WANDB_API_KEY": "secret3",
    "HF_ENDPOINT": "https://me:secret4@hub.example", "WANDB_BASE_URL": "https://secret5@wandb.example",
    "AWS_SECRET_ACCESS_KEY": "secret6", "https_proxy": "http://me:secret7@proxy.example",
    "PIP_INDEX_URL": "https://me:secret8@pip.example/simple", "CUDA_PASSWORD": "secret9",
    "HF_AUTH": "secret10", "SLURM_JWT": "secret11",
}  # fmt: skip


def with_a_secret(folder: Path) -> list[tuple[Path, str]]:
    """(file, line) of each line with a planted secret."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [
        (path, line[:200].decode(errors="replace"))
        for path in files
        for line in path.read_bytes().splitlines()
        if b"secret" in line
    ]


def test_a_rank_prints_its_settings_and_no_secret(tmp_path: Path) -> None:
    """The log of rank 0 has the variables that explain a job, and of an address its host."""
    (tmp_path / "environment.sh").write_text(environment_script(plan(site())) + "KIELO=(true)\n")
    meeting = "export MASTER_ADDR=a MASTER_PORT=1 NODES=1 DEVICES_PER_NODE=1 CACHES=/tmp/none\n"
    (tmp_path / "meeting.sh").write_text(meeting)
    environment = os.environ | SECRETS | {
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "HF_HUB_OFFLINE": "1", "CACHES": str(tmp_path),
    }  # fmt: skip
    words = ["bash", str(SCRIPTS / "rank.sh"), str(tmp_path), str(tmp_path), "--rank"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    (log,) = tmp_path.glob("*.00000.log")
    text = log.read_text()
    assert "HF_HUB_OFFLINE=1" in text and "MASTER_ADDR=a" in text and "hub.example" in text
    assert with_a_secret(tmp_path) == [] and "secret" not in done.stdout + done.stderr


def test_no_file_of_a_run_and_no_screen_has_one(workplace: Path) -> None:
    """All stages, a launch, what it is refused by, and an error that nobody foresaw."""
    said = []
    for words in (
        ("run", "tiny.toml", "--set", "cluster=lumi_g"), ("show", "tiny.toml", "--json"),
        ("launch", "tiny.toml", "--cluster", "karolina", "--account", "open-00-00",
         "--nodes", "1", "--dry-run"),
        ("status", "run"), ("plan", "tiny.toml", "--cluster", "lumi_g", "--nodes", "1"),
        ("train", "tiny.toml", "--set", "train.wandb=a"), ("recipes",),
    ):  # fmt: skip
        outcome = kielo(workplace, *words, **SECRETS)
        said.append(outcome.out + outcome.err)
        assert words[0] != "run" or outcome.code == 0, outcome.err
    assert with_a_secret(workplace) == []
    assert not [text for text in said if "secret" in text]
