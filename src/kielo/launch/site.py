"""The set-up of a site, done once by a person: its card → site.sh, which makes an environment, and site.md.

The script makes what jobs of `kielo launch` start in, by the same fields of the card. It writes site.json
last. No torch.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kielo.artifact.durable import HASH_COMMENT, refuse_other_text, write_own_text
from kielo.artifact.launch_files import MadeSite
from kielo.artifact.manifest import write_text_atomically
from kielo.artifact.stage_json import read_json
from kielo.launch.bash import array, assign, comment
from kielo.recipe.cards import NEW_CARD, Cluster, Jobs, accelerator, clusters
from kielo.recipe.errors import KieloError
from kielo.resolve.software import NEWEST

MOUNT = "/user-software"  # where the container mounts a squashed environment
SITES_FOLDER = "sites"
SCRIPT_NAME, PAGE_NAME = "site.sh", "site.md"
_SCRIPTS = Path(__file__).resolve().parent / "scripts"
# Protocols from which the container's programs build an image.
_BUILT = re.compile(r"^(docker|oras|library)://\S+$")
# Fields of [jobs] that a person needs on a site, and their meaning.
_TOLD = {
    "architecture": "processors",
    "storage": "place of environments and runs",
    "setup": "before anything else",
    "container": "how ranks start in a container",
    "image": "container image",
    "squash": "environment in one file, packed by mksquashfs with",
    "driver_cuda": "newest CUDA of its driver",
    "stripe": "spreads the files of checkpoints",
    "node_folder": "a node's own folder, for compilers' caches",
    "network_log": "the log's words if the fast network is used",
}
# Fields whose absence leaves a step of the page to the person, and what to ask the site for.
_MISSED = {
    "storage": "where environments and runs should lie, and how much fits there",
    "setup": "which modules are loaded first, for Python 3.11 or newer (`module avail python`)",
    "container": "whether and how containers run (singularity, apptainer, enroot)",
    "image": "a container image with torch; without one, torch comes from the package index as wheels",
    "driver_cuda": "the newest CUDA that the driver runs (`nvidia-smi` on a node, top right)",
}


@dataclass(frozen=True)
class SitePlan:
    """A site's set-up."""

    card: str  # as `--cluster` names it
    site: Cluster
    of_site: Jobs
    image: str  # "" for none
    build_from: str
    wheels: str  # a folder, or ""


def jobs_of(site: Cluster) -> Jobs:
    """Return the card's table of jobs. Raises KieloError without it."""
    if site.jobs is None or site.scheduler == "none":
        raise KieloError(
            f"{site.name} has no table [jobs] in its card, so no job and no site can be made by it. Fix: "
            "a cluster that `kielo site` lists, or a card of your own: kielo site --new NAME"
        )
    return site.jobs


def plan_site(card: str, site: Cluster, container: str | None, wheels: str | None) -> SitePlan:
    """Check the flags against the card. container: an image, "docker://…" to build, or "none"."""
    of_site = jobs_of(site)
    image = of_site.image if container is None else container
    if image == "none":
        image = ""
    build_from = image if _BUILT.match(image) else ""
    if image and not of_site.container:
        raise KieloError(
            f"--container {image}: the card of {site.name} does not say how ranks start in a container. "
            "Fix: a card of your own with jobs.container, as docs/clusters.md says, or none"
        )
    if build_from:
        image = "image_" + re.sub(r"[^A-Za-z0-9.-]+", "_", build_from.partition("://")[2]) + ".sif"
    elif image and not image.startswith("/"):
        raise KieloError(
            f"--container {image}: no path. Fix: a path from /, or docker://NAME to build an image"
        )
    return SitePlan(card, site, of_site, image, build_from, str(Path(wheels).absolute()) if wheels else "")


def write_site(plan: SitePlan, folder: Path) -> list[Path]:
    """Write site.sh and site.md. Raises KieloError for files of these names that a person changed."""
    script, page = folder / SCRIPT_NAME, folder / PAGE_NAME
    folder.mkdir(parents=True, exist_ok=True)
    for path in (script, page):
        refuse_other_text(path)
    write_own_text(script, site_script(plan), HASH_COMMENT)
    write_own_text(page, site_page(plan))
    return [script, page]


def write_new_card(name: str) -> Path:
    """Write NAME.toml into the current folder, a card to fill in. Return its path."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", name) or name.endswith(".toml"):
        raise KieloError(f"--new {name}: not a name. Fix: letters, digits and _ . - such as my_site")
    if name in clusters():
        raise KieloError(f"--new {name}: has a card already; kielo site {name} shows it. Fix: another name")
    path = Path(f"{name}.toml")
    if os.path.lexists(path):
        raise KieloError(f"{path}: exists already. Fix: move it away, or another name")
    write_text_atomically(path, NEW_CARD.read_text(encoding="utf-8").replace("@NAME@", name))
    return path


def made_site(folder: Path, site: Cluster) -> MadeSite | None:
    """Read what site.sh made in `folder`; None if it has not ended. Raises KieloError for another cluster."""
    made = read_json(folder, MadeSite)
    if made is not None and made.cluster != site.name:
        fix = f"Fix: kielo site {site.name} --to DIR, and its site.sh"
        raise KieloError(f"{folder}: was made for {made.cluster}, and the run is for {site.name}. {fix}")
    return made


def site_script(plan: SitePlan) -> str:
    """Return site.sh, which finds out its own folder, because it may be copied to the site."""
    of_site, site = plan.of_site, plan.site
    fields = ("storage", "architecture", "container", "image", "squash", "driver_cuda")
    texts = {"SITE": site.name, "CARD": plan.card, "STORAGE": of_site.storage, "IMAGE": plan.image}
    texts |= {"ARCHITECTURE": of_site.architecture, "BUILD_FROM": plan.build_from, "MOUNT": MOUNT}
    texts |= {"DRIVER_CUDA": of_site.driver_cuda}
    lines = [
        "#!/bin/bash -l",
        comment(f"Makes once what jobs of Kielo need on {site.description}; {PAGE_NAME} explains it."),
        comment(f"Card: {site.source}, {site.date}."),
        *_sources(of_site, fields),
        *(assign(name, value) for name, value in texts.items()),
        array("CONTAINER", of_site.container),
        array("SQUASH", of_site.squash),
        "# These may be set differently: NAME=VALUE bash site.sh",
        f"KIELO=${{KIELO:-{assign('', source_of_kielo())[1:]}}} # its folder, or where pip finds it",
        f"TORCH=${{TORCH:-{assign('', site.torch or NEWEST)[1:]}}} # if the site brings none",
        f"WHEELS=${{WHEELS:-{assign('', plan.wheels)[1:]}}} # a folder that `pip download` filled",
        *([] if site.internet_on_login_nodes else _no_network(site)),
        "",
        "# The shell's settings for other Pythons: packages in ~/.local, and options of pip.",
        "unset PYTHONPATH PYTHONHOME PYTHONUSERBASE PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV",
        "export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PIP_USER=0",
        *_sources(of_site, ["setup"]),
        *of_site.setup,
        "",
    ]
    return "\n".join(lines) + (_SCRIPTS / SCRIPT_NAME).read_text(encoding="utf-8")


def site_page(plan: SitePlan) -> str:
    """Return site.md: the card's facts with their sources, the steps of the script, and missing facts."""
    import jinja2  # takes 0.1 s

    folder, strict = jinja2.FileSystemLoader(_SCRIPTS), jinja2.StrictUndefined
    pages = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=strict, loader=folder)
    of_card = {
        "jobs": plan.of_site,
        "given": plan.of_site.model_fields_set,
        "torch": plan.site.torch or NEWEST,
    }
    of_card |= {"missing": _missing(plan.site, plan.of_site), "mount": MOUNT, "sites": SITES_FOLDER}
    source = plan.site.sources.get("network", plan.site.source)
    words = {"told": _TOLD, "missed": _MISSED, "network_source": source}
    return pages.get_template("site.md.jinja").render(vars(plan) | of_card | words)


def _no_network(site: Cluster) -> list[str]:
    """Return bash that ends before pip would wait for a network."""
    said = (
        f"{site.name}: its login nodes reach no network. Fix: kielo prefetch RECIPE --to DIR --wheels on a "
        "machine with a network, then WHEELS=DIR/wheels bash"
    )
    return [f'if [ -z "$WHEELS" ]; then echo {shlex.quote(said)} "$0" >&2; exit 1; fi']


def known_of(site: Cluster) -> tuple[str, str, str]:
    """Return words on the container and the environment of a site, and on what its card does not say."""
    of_site = site.jobs
    if of_site is None:
        return "", "", "no [jobs]: no site"
    container = of_site.container[0] if of_site.container else ""
    if of_site.image:
        container += " with the site's image"
    kind = "in one file" if of_site.squash else "a folder"
    return container, kind, ", ".join(_missing(site, of_site))


def source_of_kielo() -> str:
    """Return where pip finds this Kielo: the folder of its source, or its address; empty if unknown."""
    source = Path(__file__).resolve().parents[3]
    if (source / "pyproject.toml").is_file():
        return str(source)
    try:
        text = metadata.distribution("kielo").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    origin = json.loads(text) if text else {}
    url = str(origin.get("url", ""))
    if "vcs_info" in origin:
        return f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return url.removeprefix("file://")


def _missing(site: Cluster, of_site: Jobs) -> list[str]:
    """Return the fields of `_MISSED` that the card lacks. AMD's devices have no CUDA."""
    absent = [field for field in _MISSED if field not in of_site.model_fields_set]
    is_amd = accelerator(site.accelerator).architecture.startswith("cdna")
    return [field for field in absent if not (is_amd and field == "driver_cuda")]


def _sources(of_site: Jobs, fields: Sequence[str]) -> list[str]:
    return [comment(f"{field}: {of_site.sources[field]}") for field in fields if field in of_site.sources]
