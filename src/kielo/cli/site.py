"""`kielo site`: what a person does once on a cluster, as a script and a page; or a card for a new cluster."""

import argparse
from pathlib import Path

from kielo.cli.flags import examples
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.launch.bash import start_of
from kielo.launch.site import SITES_FOLDER, known_of, plan_site, write_new_card, write_site
from kielo.recipe.cards import cluster, clusters
from kielo.recipe.errors import KieloError
from kielo.recipe.places import place


def site_flags(parser: argparse.ArgumentParser) -> None:
    examples(parser, "kielo site", "kielo site lumi_g", "kielo site --new my_site")
    parser.add_argument(
        "cluster",
        metavar="CLUSTER",
        nargs="?",
        help="cluster card, or a file of your own; left out: a table of all",
    )
    parser.add_argument("--to", metavar="DIR", help="folder for site.sh and site.md; default: sites/CLUSTER")
    parser.add_argument(
        "--container",
        metavar="IMAGE",
        help="another container image: its path, docker://NAME to build it, or none",
    )
    parser.add_argument(
        "--wheels",
        metavar="DIR",
        help="install from this folder of wheels (`pip download`), without a network",
    )
    parser.add_argument("--new", metavar="NAME", help="write NAME.toml, a card to fill in, for a new cluster")
    parser.add_argument("--json", action="store_true", help="print the table, or the paths, as JSON")


def site(options: argparse.Namespace) -> None:
    if options.new is not None:
        for flag in ("cluster", "to", "container", "wheels"):
            if getattr(options, flag) is not None:
                raise KieloError(
                    f"--new {options.new} stands alone; leave {options.cluster or '--' + flag} out"
                )
        path = write_new_card(options.new)
        if options.json:
            return print_json({"card": str(path)})
        print_text(f"wrote {path}; fill it in, then: kielo plan RECIPE --cluster {path}")
        return None
    if options.cluster is None:
        for flag in ("to", "container", "wheels"):
            if getattr(options, flag) is not None:
                raise KieloError(f"--{flag}: of which cluster? For example: kielo site lumi_g --{flag} DIR")
        return _known(options.json)
    card = cluster(options.cluster)
    plan = plan_site(options.cluster, card, options.container, options.wheels)
    folder = place(options.to or Path(SITES_FOLDER) / card.name)
    written = write_site(plan, folder)
    if options.json:
        return print_json({"cluster": card.name, "written": [str(path) for path in written]})
    print_text(f"wrote {written[0]} and {written[1]}, which explains it")
    print_text(f"next, on a login node of {card.name}: {start_of(written[0])}")
    return None


def _known(is_json: bool) -> None:
    """Print what is known of each cluster that takes jobs."""
    cards = [card for card in map(cluster, clusters()) if card.jobs is not None]
    rows = [
        (
            card.name,
            card.scheduler.replace("_", " "),
            *known_of(card)[:2],
            "yes" if card.internet_on_compute_nodes else "no",
            known_of(card)[2],
        )
        for card in cards
    ]
    titles = ("cluster", "scheduler", "container", "environment", "network on nodes", "not known")
    if is_json:
        print_json([dict(zip(titles, row)) for row in rows])
        return
    print_table(titles, rows)
    print_text(
        "What each card says, with its sources: kielo site CLUSTER. Another cluster: kielo site --new NAME"
    )
