"""What `kielo site` writes: bash that makes an environment where jobs find it, and a page with sources.

The script runs against stubs: a container program, mksquashfs and a Python that note what they are asked for.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

from kielo.artifact.durable import HASH_COMMENT, marked
from kielo.cli.main import main
from kielo.launch.bash import assign, quoted
from kielo.launch.site import plan_site, site_page, site_script
from kielo.recipe import cards
from tests.house.checks import ROOT

SITES = [name for name in cards.clusters() if cards.cluster(name).jobs]
# Python as far as the script asks: its version, torch, environments, pip; what else it runs, Python runs.
PYTHON = """#!/bin/bash
echo "python $*" >> "$NOTES"
case "$*" in
    *version_info*) echo 3.12 ;;
    *torch.version.cuda*) echo "${TORCH_HAS:-2.13.0} ${CUDA_HAS:-0}" ;;
    *torch.__version__*) [ -n "${TORCH_HAS:-}" ] && echo "$TORCH_HAS" ;;
    "-m venv "*) mkdir -p "${!#}/bin"; touch "${!#}/bin/activate"; cp "$0" "${!#}/bin/python" ;;
    "-m pip install"*) [ -z "${PIP_FAILS:-}" ] ;;
    "-m pip list"*) echo kielo==0 ;;
    *) PYTHONPATH=$REAL_PYTHONPATH exec "$REAL_PYTHON" "$@" ;;
esac
"""
# The container: what is bound at /user-software lies elsewhere. An .sqsh is a folder here.
CONTAINER = """#!/bin/bash
echo "container $*" >> "$NOTES"
if [ "$1" = build ]; then echo image > "$2"; exit 0; fi
while [ "$1" != --bind ]; do shift; done
bound=$(sed -n 's|.*,\\([^,]*\\):/user-software.*|\\1|p' <<< "$2")
shift 3
command=${1/#\\/user-software/$bound}
shift
if [ "$1 $2" = "-m venv" ] || [ "$command" = env ]; then set -- "${@/#\\/user-software/$bound}"; fi
exec "$command" "$@"
"""
STUBS = {
    "python": PYTHON,
    "singularity": CONTAINER,
    "mksquashfs": '#!/bin/bash\necho "mksquashfs $*" >> "$NOTES"\ncp -r "$1" "$2"\n',
    "module": "#!/bin/bash\ntrue\n",
    **dict.fromkeys(("python3", "python3.11", "python3.12", "python3.13"), "#!/bin/bash\nexit 1\n"),
    "uname": "#!/bin/bash\necho ${ARCHITECTURE_HAS:-x86_64}\n",
}


class Site:
    """A folder with site.sh of a card, and a machine of stubs."""

    def __init__(self, folder: Path, *arguments: str):
        self.folder, self.stubs, self.notes = folder / "my site", folder / "stubs", folder / "notes"
        self.stubs.mkdir()
        for name, text in STUBS.items():
            (self.stubs / name).write_text(text)
            (self.stubs / name).chmod(0o755)
        assert main(["site", *arguments, "--to", str(self.folder)]) == 0

    def run(self, **environment: str) -> subprocess.CompletedProcess:
        """Runs site.sh."""
        variables = {"PATH": f"{self.stubs}:/usr/bin:/bin", "NOTES": str(self.notes), "HOME": "/nowhere"}
        real = {"REAL_PYTHON": sys.executable, "REAL_PYTHONPATH": os.environ["PYTHONPATH"]}
        return subprocess.run(
            ["bash", self.folder / "site.sh"], env=variables | real | environment, timeout=200,
            capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def made(self) -> dict:
        return json.loads((self.folder / "site.json").read_text())

    def asked(self) -> str:
        return self.notes.read_text()


def test_jobs_start_in_what_the_script_made(tmp_path, monkeypatch) -> None:
    """LUMI: the image's own torch is kept, the environment is one file, and a launch mounts it."""
    image = tmp_path / "torch.sif"
    image.touch()
    (tmp_path / "latest.sif").symlink_to(image)
    site = Site(tmp_path, "lumi_g", "--container", str(tmp_path / "latest.sif"))
    done = site.run(TORCH_HAS="2.10.0+rocm7.0")
    assert done.returncode == 0, done.stderr
    made, squash = site.made(), next(site.folder.glob("venv_*.sqsh"))
    assert made | {"python": "", "made_at": ""} == {
        "cluster": "lumi_g", "image": str(image), "venv": "/user-software", "squash": str(squash),
        "python": "", "torch": "2.10.0+rocm7.0", "made_at": "",
    }  # fmt: skip
    assert "-m venv --system-site-packages /user-software" in site.asked()
    assert (site.folder / "caches/constraints.txt").read_text() == "torch==2.10.0\n"
    assert f"{squash.name} -no-xattrs -processors 1 -noappend" in site.asked()
    assert [path.name for path in site.folder.glob("venv_*")] == [squash.name]
    monkeypatch.chdir(tmp_path)
    flags = ["--cluster", "lumi_g", "--nodes", "64", "--account", "project_1", "--dry-run"]
    assert main(["launch", "poro_34b", *flags, "--site", str(site.folder)]) == 0
    job = (tmp_path / "runs/poro_34b/launch/0001/job.sh").read_text()
    bound = f"{tmp_path},{squash}:/user-software:image-src=/"
    assert f"--bind '{bound}' --bind \"$NODE_FOLDER\" {quoted(str(image))})" in job
    environment = (tmp_path / "runs/poro_34b/launch/0001/environment.sh").read_text()
    assert "VENV=/user-software\n" in environment and f'-{site.folder}/caches/huggingface}}"' in environment
    # Beside runs/ it is found without the flag; another image or environment is taken in its place.
    (tmp_path / "sites").mkdir()
    site.folder.rename(tmp_path / "sites/lumi_g")
    for given in [], ["--venv", "mine"]:
        assert main(["launch", "poro_34b", *flags, *given]) == 0
    texts = [
        (path / "environment.sh").read_text()
        for path in sorted((tmp_path / "runs/poro_34b/launch").iterdir())
    ]
    assert "VENV=/user-software\n" in texts[1] and assign("VENV", f"{tmp_path}/mine") in texts[2].splitlines()


@pytest.mark.full
def test_without_an_image_the_environment_is_a_folder_with_torch(tmp_path) -> None:
    """Karolina's card names none: torch comes as wheels, of the version that plans are made for."""
    site = Site(tmp_path, "karolina")
    done = site.run()
    assert done.returncode == 0, done.stderr
    made = site.made()
    assert (made["image"], made["squash"]) == ("", "") and (Path(made["venv"]) / "bin/activate").exists()
    assert "container" not in site.asked()
    assert (site.folder / "caches/constraints.txt").read_text() == "torch==2.13.*\n"
    assert f"{ROOT}[train]" in site.asked()


@pytest.mark.full
def test_an_image_is_built_once(tmp_path) -> None:
    """`docker://NAME` becomes a file; the second run finds it, and makes another environment."""
    site = Site(tmp_path, "leonardo_booster", "--container", "docker://nvcr.io/nvidia/pytorch:26.01-py3")
    assert site.run(TORCH_HAS="2.10.0").returncode == 0
    first = site.made()
    assert first["image"] == str(site.folder / "image_nvcr.io_nvidia_pytorch_26.01-py3.sif")
    (site.folder / Path(first["venv"]).name).rename(site.folder / "venv_0")  # the names have seconds
    assert site.run(TORCH_HAS="2.10.0").returncode == 0
    assert site.asked().count("container build") == 1 and len(list(site.folder.glob("venv_*"))) == 2


# What is wrong → card, environment, parts of the answer.
REFUSED = {
    "other processors": ("karolina", {"ARCHITECTURE_HAS": "aarch64"}, ["aarch64", "x86_64", "short job"]),
    "no image": ("lumi_g", {}, ["lumi-multitorch-latest.sif is not here", "--container IMAGE"]),
    "wheels for a newer driver": (
        "leonardo_booster", {"CUDA_HAS": "13"}, ["built for CUDA 13", "12.2 at most", "TORCH=VERSION"],
    ),
    "no source of Kielo": ("karolina", {"KIELO": "/gone"}, ["/gone is not here", "KIELO=FOLDER_OF_KIELO"]),
    "no wheels": ("karolina", {"WHEELS": "/gone"}, ["WHEELS names no folder"]),
    "pip fails": ("karolina", {"PIP_FAILS": "yes"}, ["Kielo could not be installed"]),
    "an old Python": ("karolina", {"PYTHON": "old"}, ["no Python of 3.11", "old is 3.6", "module avail"]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_the_script_says_what_would_work(case, tmp_path) -> None:
    """One line, and nothing is left that a launch would take."""
    card, environment, parts = REFUSED[case]
    site = Site(tmp_path, card)
    (site.stubs / "old").write_text("#!/bin/bash\necho 3.6; exit 1\n")
    (site.stubs / "old").chmod(0o755)
    done = site.run(**environment)
    assert done.returncode == 1 and all(part in done.stderr for part in parts), done.stderr
    assert not (site.folder / "site.json").exists() and not list(site.folder.glob("venv_*"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say_of_a_site(tmp_path) -> None:
    """No warning; of one script with a container and one without, for the others differ in values alone."""
    for name in ("lumi_g", "roihu"):
        (tmp_path / f"{name}.sh").write_text(site_script(plan_site(name, cards.cluster(name), None, None)))
    files = [str(path) for path in tmp_path.glob("*.sh")]
    told = subprocess.run(["shellcheck", "--severity=warning", *files], capture_output=True, text=True)
    assert told.returncode == 0, told.stdout


def test_a_login_node_without_a_network_needs_packages(tmp_path) -> None:
    """Its script ends before pip would wait, and its page says so; another site's may use the network."""
    for name, said in (("marenostrum5_acc", True), ("leonardo_booster", False)):
        plan = plan_site(name, cards.cluster(name), None, None)
        page, script = site_page(plan), tmp_path / f"{name}.sh"
        assert ("The login nodes have none: `kielo prefetch" in page) is said
        script.write_text(site_script(plan).partition("# The shell's settings")[0])
        run = partial(subprocess.run, ["bash", str(script)], capture_output=True, text=True)
        without, given = run(), run(env=os.environ | {"WHEELS": str(tmp_path)})
        assert given.returncode == 0 and (without.returncode == 1) is said
        assert not said or without.stderr == (
            "marenostrum5_acc: its login nodes reach no network. Fix: kielo prefetch RECIPE --to "
            f"DIR --wheels on a machine with a network, then WHEELS=DIR/wheels bash {script}\n"
        )


@pytest.mark.parametrize("name", SITES)
def test_the_page_has_each_source_and_says_what_is_missing(name) -> None:
    """And bash reads the script of each card."""
    plan = plan_site(name, cards.cluster(name), None, None)
    page, jobs = site_page(plan), plan.of_site
    told = [field for field in ("storage", "setup", "container", "image", "squash") if getattr(jobs, field)]
    assert all(jobs.sources[field] in page for field in told)
    for field, asked in (("storage", "how much fits there"), ("setup", "module avail python")):
        assert (asked in page) == (not getattr(jobs, field))
    assert ("kielo prefetch RECIPE" in page) == (not plan.site.internet_on_compute_nodes)
    subprocess.run(["bash", "-n"], input=site_script(plan), text=True, check=True)


def test_a_changed_script_is_not_replaced(tmp_path, monkeypatch, capsys) -> None:
    """What a person wrote into it stays; one that nobody touched is written anew."""
    monkeypatch.chdir(tmp_path)
    assert main(["site", "lumi_g"]) == 0 and main(["site", "lumi_g"]) == 0
    script = tmp_path / "sites/lumi_g/site.sh"
    script.write_text(script.read_text().replace("MOUNT=/user-software", "MOUNT=/mine"))
    assert main(["site", "lumi_g"]) == 1
    assert "it was changed since" in capsys.readouterr().err and "MOUNT=/mine" in script.read_text()
    script.write_text(marked("#!/bin/bash\n", HASH_COMMENT))
    assert main(["site", "lumi_g"]) == 0 and "MOUNT=/user-software" in script.read_text()


FILLED = {
    'description = ""': 'description = "Mine: 4 A100 a node"', 'accelerator = ""': 'accelerator = "a100_80"',
    "devices_per_node = 0": "devices_per_node = 4", "\nnodes = 0": "\nnodes = 64",
    "memory_gib_per_node = 0": "memory_gib_per_node = 480",
    "cpu_cores_per_node = 0": "cpu_cores_per_node = 64",
    'network = ""': 'network = "4 × NDR200 InfiniBand"',
    "network_gbit_per_second_per_node = -1": "network_gbit_per_second_per_node = 800",
    'internet_on_compute_nodes = "?"': "internet_on_compute_nodes = false",
    'source = ""': 'source = "mine"', 'date = ""': 'date = "2026-11"', '{ name = "" }': '{ name = "gpu" }',
    '\ndevices = ""  ': '\ndevices = "--gpus-per-node=4"  ', "# max_wall_hours": "max_wall_hours",
    'partitions = ""': 'partitions = "sinfo, 2026-11"', '\ndevices = ""\n': '\ndevices = "sinfo, 2026-11"\n',
}  # fmt: skip


def test_a_new_card_has_every_field_and_works_once_it_is_filled_in(tmp_path, monkeypatch, capsys) -> None:
    """Until then each open field is named with its line; then it plans, launches and has a site."""
    monkeypatch.chdir(tmp_path)
    assert main(["site", "--new", "mine"]) == 0
    card = tmp_path / "mine.toml"
    text = card.read_text()
    for model in (cards.Cluster, cards.Jobs):
        fields = [name for name in model.model_fields if name not in ("jobs", "sources")]
        lines = [line.removeprefix("# ") for line in text.splitlines()]
        assert [
            name
            for name in fields
            if not any(line.startswith((f"{name} =", f"[jobs.{name}]")) for line in lines)
        ] == []
    capsys.readouterr()
    assert main(["plan", "poro_34b", "--cluster", "mine.toml", "--nodes", "16"]) == 1
    told = capsys.readouterr().err
    for number, line in enumerate(text.partition("[jobs.sources]")[0].splitlines(), 1):
        if re.match(r'\w+ = (""|0 |-1|"\?")', line):
            assert f"mine.toml, line {number}: " in told or line.startswith("devices ="), line
    for empty, value in FILLED.items():
        assert empty in text, empty
        text = text.replace(empty, value, 1)
    card.write_text(text)
    flags = ["--cluster", "mine.toml", "--nodes", "16", "--dry-run"]
    assert main(["launch", "poro_34b", *flags]) == 0
    assert main(["site", "mine.toml"]) == 0 and (tmp_path / "sites/mine/site.sh").is_file()
    assert main(["init", "--language", "fi", "--params", "3B", "--cluster", "mine.toml", "idea.toml"]) == 0
    assert tomllib.loads((tmp_path / "idea.toml").read_text())["cluster"] == "mine.toml"


def test_mistakes_in_a_card_are_named_by_key_and_line(tmp_path, monkeypatch, capsys) -> None:
    """Also in a value of several lines, and for a key that is not known."""
    monkeypatch.chdir(tmp_path)
    good = (Path(cards.__file__).parents[1] / "cards/clusters/leonardo_booster.toml").read_text()
    wrong = good.replace("max_nodes = 8 }", "max_node = 8 }", 1).replace("nodes = 3456", 'nodes = "all"')
    wrong = wrong.replace("account = '\\S+'", "account = '('").replace("a100_64", "a100_6")
    (tmp_path / "mine.toml").write_text(wrong)
    assert main(["plan", "poro_34b", "--cluster", "mine.toml", "--nodes", "16"]) == 1
    told, lines = capsys.readouterr().err, wrong.splitlines()
    for key, said in (
        ("partitions = [", "unknown key jobs.partitions[2].max_node"), ('nodes = "all"', "a whole number"),
        ("account = '('", "no regular expression"), ("accelerator =", "did you mean a100_64?"),
    ):  # fmt: skip
        number = next(number for number, line in enumerate(lines, 1) if line.startswith(key))
        assert any(f"mine.toml, line {number}: " in line and said in line for line in told.splitlines()), told


def test_the_table_has_each_site(capsys) -> None:
    """With what its card does not say."""
    assert main(["site", "--json"]) == 0
    rows = {row["cluster"]: row for row in json.loads(capsys.readouterr().out)}
    assert sorted(rows) == sorted(SITES)
    assert rows["lumi_g"]["not known"] == "" and "image" in rows["karolina"]["not known"]
    with contextlib.suppress(KeyError):
        assert rows["laptop"] is None
