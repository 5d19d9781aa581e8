"""`kielo site`: the setup of a cluster, as a script and a page; or a card for a new cluster."""

import argparse
from pathlib import Path

from kielo.cli.flags import takes
from kielo.cli.terminal import print_json, print_table, print_text
from kielo.launch.bash import start_of
from kielo.launch.site import SITES_FOLDER, known_of, plan_site, write_new_card, write_site
from kielo.recipe.cards import cluster, clusters
from kielo.recipe.errors import KieloError
from kielo.recipe.places import place


@takes("""
    $ kielo site
    $ kielo site lumi_g
    $ kielo site --new my_site
    [CLUSTER]          cluster card, or your own file; default: a table of all
    --to DIR           folder for site.sh and site.md; default: sites/CLUSTER
    --container IMAGE  container image in place of the card's: its path, docker://NAME to build it, or none
    --wheels DIR       folder of wheels (`pip download`) to install from, without a network
    --new NAME         write the card NAME.toml for a new cluster, to fill in
    --json             print the table, or the paths, as JSON
""")
def site(options: argparse.Namespace) -> None:
    if (name := options.new) is not None:
        for flag in ("cluster", "to", "container", "wheels"):
            if getattr(options, flag) is not None:
                raise KieloError(f"--new {name} excludes {options.cluster or '--' + flag}. Fix: leave it out")
        path = write_new_card(name)
        if options.json:
            return print_json({"card": str(path)})
        print_text(f"wrote {path}. Fill it in, then: kielo plan RECIPE --cluster {path}")
        return None
    if options.cluster is None:
        for flag in ("to", "container", "wheels"):
            if getattr(options, flag) is not None:
                raise KieloError(f"--{flag}: no cluster. Fix: kielo site lumi_g --{flag} DIR")
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
    cards = [card for card in map(cluster, clusters()) if card.jobs is not None]
    rows = []
    for card in cards:
        (*made, unknown), network = known_of(card), "yes" if card.internet_on_compute_nodes else "no"
        rows.append((card.name, card.scheduler.replace("_", " "), *made, network, unknown))
    titles = ("cluster", "scheduler", "container", "environment", "network on nodes", "not known")
    if is_json:
        print_json([dict(zip(titles, row, strict=True)) for row in rows])
        return
    print_table(titles, rows)
    print_text(
        "What each card says, with its sources: kielo site CLUSTER. Another cluster: kielo site --new NAME"
    )
