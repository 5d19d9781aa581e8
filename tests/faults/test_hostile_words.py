"""Words of a recipe, a card, a shell and a folder are data: none of them becomes a command of a job."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kielo.launch.job_plan import Wishes
from kielo.launch.script import (
    environment_script,
    job_script,
    ladder_script,
    share_script,
    submit_script,
    submit_shares_script,
)
from kielo.launch.site import plan_site, site_script
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe
from tests.launch.hand_made import plan, recipe, site
from tests.launch.stand_in import Site

MADE = "MADE_BY_A_WORD"
DO = f"touch {MADE}"
WORDS = [
    f"a\n{DO}\n#", f"a\r{DO}", f"a\u2028{DO}", f"$({DO})", f"`{DO}`", f"'; {DO}; '", f'"; {DO}; "',
    f"a; {DO}", f"a && {DO} #", f"${{x:-$({DO})}}", "a b", "a\\", "a'b", "*",
]  # fmt: skip
COMMENTS = ("description", "notes", "network", "source", "date")
# Where a word stands → site, wishes and recipe with it. Commands of a card are not among them.
FIELDS: dict[str, Any] = {
    "recipe": lambda word: {"recipe": recipe(folder=word, train={"wandb": word})},
    "account": lambda word: {"wishes": Wishes(account=word)},
    "image": lambda word: {"wishes": Wishes(image=word, venv=word), "site": {"jobs": {"container": ["c"]}}},
    "comments": lambda word: {"site": dict.fromkeys(COMMENTS, word)},
    "partition": lambda word: {"site": {"jobs": {"partitions": [{"name": word, "qos": word}]}}},
    "constraint": lambda word: {"site": {"jobs": {"partitions": [{"constraint": word}]}}},
    "options": lambda word: {"site": {"jobs": {"options": [word], "devices": word}}},
    "settings": lambda word: {"site": {"jobs": {
        "environment": {"A": word}, "cpu_bind": word, "host_suffix": word, "network_log": word,
    }}},
    "container": lambda word: {"site": {"jobs": {"container": ["c", word], "image": f"/{word}"}}},
}  # fmt: skip


def scripts(fields: dict[str, Any], folder: Path) -> dict[str, str]:
    """Name → text of each script that these fields go into."""
    of = site(**fields.get("site", {}))
    more = {name: fields[name] for name in ("wishes", "recipe") if name in fields}
    jobs = plan(of, nodes=1, chain_length=1, **more)
    return {
        "job.sh": job_script(jobs, folder), "submit.sh": submit_script(jobs, folder),
        "environment.sh": environment_script(jobs), "ladder.sh": ladder_script(jobs, folder, [(folder, 60)]),
        "share.sh": share_script(jobs, folder, 2), "submit_shares.sh": submit_shares_script(jobs, folder, 2),
        "site.sh": site_script(plan_site("here", of, "/i.sif" if of.jobs.container else None, None)),
    }  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_no_word_becomes_a_command(field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each script is read and run by bash, beside stand-ins; or the word is refused in a sentence."""
    Site.make(tmp_path / "bin")
    for name in ("srun", "c", "lfs"):
        (tmp_path / "bin" / name).write_text("#!/bin/bash\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "1",
        "SLURM_ARRAY_TASK_ID": "1", "PYTHON": "none", "WHEELS": "", "HOME": str(tmp_path),
    }  # fmt: skip
    made = 0
    for number, word in enumerate(WORDS):
        here = tmp_path / f"{number}"
        here.mkdir()
        monkeypatch.chdir(here)
        try:
            found = scripts(FIELDS[field](word), here / "jobs")
        except KieloError as error:
            assert repr(word)[1:-1] in str(error) or "cannot be" in str(error)
            continue
        except ValueError:  # of the card's own types
            continue
        made += 1
        for name, text in found.items():
            (here / name).write_text(text, encoding="utf-8")
            subprocess.run(["bash", "-n", name], check=True)
            if DO in word and name in ("job.sh", "submit.sh"):
                none = subprocess.DEVNULL  # not a pipe, which a watcher's sleep would hold open
                subprocess.run(
                    ["bash", name], env=environment, stdin=none, stdout=none, stderr=none, timeout=60
                )
        assert not list(tmp_path.rglob(MADE)), (word, name)
    assert made >= 5


@pytest.mark.parametrize("place", ["a\ntouch x", "a\tb", "a b", "a'b", "%j"])
def test_the_working_folder_is_no_command(place: str, tmp_path: Path, monkeypatch) -> None:
    """A line break is refused before anything is written; the others come back as they are."""
    (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / place)
    if place.isprintable():
        text = job_script(plan(site()), Path.cwd() / "jobs")
        shown = subprocess.run(
            ["bash", "-c", text.partition("\n# ----")[0] + '\nprintf %s "$WORKING_FOLDER"'],
            capture_output=True,
            text=True,
        )
        assert shown.stdout == str(tmp_path / place)
        return
    with pytest.raises(KieloError, match="cannot be asked of a scheduler"):
        job_script(plan(site()), Path.cwd() / "jobs")


@pytest.mark.parametrize(
    "key",
    ["folder", "cluster", "corpus.sources", "tokenizer.path", "model.weights", "train.wandb", "machine"],
)
def test_a_recipe_has_no_control_characters(key: str) -> None:
    """In no name and no path, whatever quotes its file has; templates and prompts are text."""
    for sign in ("\n", "\t", "\x1b", "\x7f", "\u2028"):
        with pytest.raises(KieloError, match=f"{key}.*has a line break or another control character"):
            read_recipe("own_text", ["corpus.sources=a.txt", f"{key}=a{sign}b"])
    texts = ['evaluate.prompts=["a\\nb"]', "description=a\nb"]
    read_recipe("own_text", ["corpus.sources=a.txt", *texts])
