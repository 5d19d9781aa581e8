"""The set-up of a site, done once by a person: its card → site.sh, which makes an environment, and site.md.

The script makes what jobs of `kielo launch` start in, by the same fields of the card, and writes site.json
last. Nothing here needs torch.
"""

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kielo.artifact.launch_files import MadeSite
from kielo.artifact.manifest import write_text_atomically
from kielo.artifact.own_text import HASH_COMMENT, refuse_other_text, write_own_text
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
# Fields of [jobs] that a person needs on a site, and what they are.
_TOLD = {
    "architecture": "processors",
    "storage": "where things lie",
    "setup": "before anything else",
    "container": "how ranks start in a container",
    "image": "container image",
    "squash": "environment in one file, packed by mksquashfs with",
    "driver_cuda": "newest CUDA of its driver",
    "stripe": "spreads the files of checkpoints",
    "node_folder": "a node's own folder, for compilers' caches",
    "network_log": "what the log says where the fast network is used",
}
# Fields without which a step of the page is left to the person, and what to ask the site for.
_MISSED = {
    "storage": "where environments and runs should lie, and how much fits there",
    "setup": "which modules are loaded first, for Python 3.11 or newer (`module avail python`)",
    "container": "whether and how containers run (singularity, apptainer, enroot)",
    "image": "a container image with torch; without one, torch comes from the package index as wheels",
    "driver_cuda": "the newest CUDA that the driver runs (`nvidia-smi` on a node, top right)",
}


@dataclass(frozen=True)
class SitePlan:
    """A site's own part. card: as `--cluster` names it. image: "" for none. wheels: a folder, or ""."""

    card: str
    site: Cluster
    of_site: Jobs
    image: str
    build_from: str
    wheels: str


def plan_site(card: str, site: Cluster, container: str | None, wheels: str | None) -> SitePlan:
    """Check what was asked for against the card. container: an image, "docker://…" to build, or "none"."""
    if site.jobs is None or site.scheduler == "none":
        raise KieloError(
            f"{site.name} has no table [jobs] in its card, so no site can be set up by it. Fix: "
            "a cluster that `kielo site` lists, or a card of your own: kielo site --new NAME"
        )
    image = site.jobs.image if container is None else container
    if image == "none":
        image = ""
    build_from = image if _BUILT.match(image) else ""
    if image and not site.jobs.container:
        raise KieloError(
            f"--container {image}: the card of {site.name} does not say how ranks start in a container. "
            "Fix: a card of your own with jobs.container, as docs/clusters.md says, or none"
        )
    if build_from:
        image = "image_" + re.sub(r"[^A-Za-z0-9.-]+", "_", build_from.partition("://")[2]) + ".sif"
    elif image and not image.startswith("/"):
        raise KieloError(f"--container {image}: give a path from /, or docker://NAME to build one")
    return SitePlan(card, site, site.jobs, image, build_from, str(Path(wheels).absolute()) if wheels else "")


def write_site(plan: SitePlan, folder: Path) -> list[Path]:
    """Write site.sh and site.md. Raises KieloError for files of those names that a person changed."""
    script, page = folder / SCRIPT_NAME, folder / PAGE_NAME
    folder.mkdir(parents=True, exist_ok=True)
    for path in (script, page):
        refuse_other_text(path)
    write_own_text(script, site_script(plan), HASH_COMMENT)
    write_own_text(page, site_page(plan))
    return [script, page]


def write_new_card(name: str) -> Path:
    """Write NAME.toml into the current folder, a card to fill in. Returns its path."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?", name) or name.endswith(".toml"):
        raise KieloError(f"--new {name}: give a name of letters, digits and _ . - such as my_site")
    if name in clusters():
        raise KieloError(f"--new {name}: has a card already; kielo site {name} shows it. Choose another name")
    path = Path(f"{name}.toml")
    if os.path.lexists(path):
        raise KieloError(f"{path}: is there already; move it away or choose another name")
    write_text_atomically(path, NEW_CARD.read_text(encoding="utf-8").replace("@NAME@", name))
    return path


def made_site(folder: Path, site: Cluster) -> MadeSite | None:
    """Read what site.sh made in `folder`; None where it was not run to its end.

    Raises KieloError for the folder of another cluster.
    """
    made = read_json(folder, MadeSite)
    if made is not None and made.cluster != site.name:
        raise KieloError(
            f"{folder}: was made for {made.cluster}, and the run is for {site.name}. Fix: "
            f"kielo site {site.name} --to DIR, and its site.sh"
        )
    return made


def site_script(plan: SitePlan) -> str:
    """Return site.sh, which finds out its own folder: it may be written elsewhere and copied to the site."""
    of_site, site = plan.of_site, plan.site
    fields = ("storage", "architecture", "container", "image", "squash", "driver_cuda")
    lines = [
        "#!/bin/bash -l",
        comment(f"Makes once what jobs of Kielo need on {site.description}; {PAGE_NAME} explains it."),
        comment(f"Card: {site.source}, {site.date}."),
        *_sources(of_site, fields),
        assign("SITE", site.name), assign("CARD", plan.card), assign("STORAGE", of_site.storage),
        f"ARCHITECTURE={of_site.architecture}",
        array("CONTAINER", of_site.container), assign("IMAGE", plan.image),
        assign("BUILD_FROM", plan.build_from), array("SQUASH", of_site.squash), f"MOUNT={MOUNT}",
        assign("DRIVER_CUDA", of_site.driver_cuda),
        "# These may be set differently: NAME=VALUE bash site.sh",
        f"KIELO=${{KIELO:-{assign('', source_of_kielo())[1:]}}} # its folder, or where pip finds it",
        f"TORCH=${{TORCH:-{assign('', site.torch or NEWEST)[1:]}}} # where the site brings none",
        f"WHEELS=${{WHEELS:-{assign('', plan.wheels)[1:]}}} # a folder that `pip download` filled",
        *([] if site.internet_on_login_nodes else _no_network(site)),
        "",
        "# What the shell has for other Pythons: packages in ~/.local, and options of pip.",
        "unset PYTHONPATH PYTHONHOME PYTHONUSERBASE PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV",
        "export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1 PIP_USER=0",
        *_sources(of_site, ["setup"]), *of_site.setup, "",
    ]  # fmt: skip
    return "\n".join(lines) + (_SCRIPTS / SCRIPT_NAME).read_text(encoding="utf-8")


def site_page(plan: SitePlan) -> str:
    """Return site.md: what the card knows, with its sources, the steps of the script, what is missing."""
    of_site, site = plan.of_site, plan.site
    given = of_site.model_fields_set
    rows = [
        f"| {what} | {_cell(getattr(of_site, field))} | {of_site.sources[field]} |"
        for field, what in _TOLD.items()
        if field in given
    ]
    missing = [f"* {_MISSED[field]}" for field in _missing(site, of_site)]
    image = f"`{plan.image}`" if plan.image else ""
    steps = [
        "**Where.** Put this folder where environments lie: "
        + (f"{of_site.storage}." if of_site.storage else "the card does not say; not your home.")
        + " The script makes everything beside itself, and its caches too.",
        "**Modules.** "
        + (_code(of_site.setup) + " come first, as in each job." if of_site.setup else _unknown("setup")),
        "**Image.** "
        + (
            f"{image} is built from `{plan.build_from}`."
            if plan.build_from
            else f"{image} is used as it is; a link to the newest one is followed once, now."
            if image
            else "None: the card names no image with torch, so the environment is made without a container. "
            "`kielo site "
            + plan.card
            + " --container docker://NAME` builds one"
            + ("." if of_site.container else ", where the card says how containers run.")
        ),
        "**Environment.** A virtual environment with Kielo. A torch that the image or the modules bring is "
        f"kept, and pinned so that pip cannot replace it; where there is none, torch {site.torch or NEWEST} "
        "is installed."
        + (
            f" It is packed into one file, which the container mounts at `{MOUNT}`: tens of thousands of "
            "small files are slow on a parallel file system, and count."
            if plan.image and of_site.squash
            else ""
        )
        + (
            f" The driver runs CUDA {of_site.driver_cuda} at most; wheels for a later one are refused."
            if of_site.driver_cuda
            else ""
        ),
        "**Check.** Kielo and torch are imported as ranks will import them. Then `site.json` is written, by "
        "which `kielo launch` finds image and environment.",
    ]
    have_none = "The login nodes have none"
    if site.internet_on_login_nodes:
        have_none = "If the login nodes have none either"
    offline = [
        "",
        "## No network on compute nodes",
        "",
        "Text, weights and tokenizers: `kielo prefetch RECIPE --to DIR` where there is a network, and "
        f"KIELO_PREFETCHED=DIR here. {have_none}: `kielo prefetch RECIPE --to DIR "
        f"--wheels` there, and `WHEELS=DIR/wheels bash {SCRIPT_NAME}` here.",
    ]
    parts = [
        f"# Once on {site.description}",
        "",
        f"By the card of {site.name}: {site.source}, {site.date}. {site.notes}".rstrip(),
        "",
        f"Run `bash {SCRIPT_NAME}` on a login node, which needs no torch. Where its processors are others "
        f"than {of_site.architecture}, run it on a node, in a short job.",
        "",
        *(f"{number}. {step}" for number, step in enumerate(steps, 1)),
        "",
        "Then, in the folder that has `runs/`:",
        "",
        "```sh",
        f"kielo launch RECIPE --cluster {plan.card}"
        + f" --account {of_site.account_example or 'PROJECT'}" * bool(of_site.account)
        + " --site FOLDER_OF_THIS_PAGE",
        "```",
        "",
        f"`--site` is not needed where this folder is `{SITES_FOLDER}/{site.name}`.",
        *([] if site.internet_on_compute_nodes else offline),
        "",
        "## What the card says",
        "",
        f"| | {site.name} | source |",
        "|---|---|---|",
        f"| network | {site.network} | {site.sources.get('network', site.source)} |",
        *rows,
        "",
    ]
    if missing:
        parts += [
            "## What the card does not say",
            "",
            "Ask the site, and do not trust a guess:",
            "",
            *missing,
            "",
        ]
    return "\n".join(parts)


def _no_network(site: Cluster) -> list[str]:
    """Return bash that ends before pip would wait for a network."""
    said = (
        f"{site.name}: its login nodes reach no network. Fix: kielo prefetch RECIPE --to DIR "
        "--wheels where there is one, then WHEELS=DIR/wheels bash"
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
    """Return where pip finds this Kielo: the folder of its source, or its address; empty: not known."""
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
    """Return the fields of `_MISSED` that the card lacks; AMD's devices have no CUDA."""
    absent = [field for field in _MISSED if field not in of_site.model_fields_set]
    is_amd = accelerator(site.accelerator).architecture.startswith("cdna")
    return [field for field in absent if not (is_amd and field == "driver_cuda")]


def _sources(of_site: Jobs, fields: Sequence[str]) -> list[str]:
    return [comment(f"{field}: {of_site.sources[field]}") for field in fields if field in of_site.sources]


def _code(lines: tuple[str, ...]) -> str:
    return ", ".join(f"`{line}`" for line in lines)


def _cell(value: str | tuple[str, ...]) -> str:
    text = " ".join(value) if isinstance(value, tuple) else value
    return f"`{text}`".replace("|", "\\|")


def _unknown(field: str) -> str:
    return f"The card does not say {_MISSED[field]}."
