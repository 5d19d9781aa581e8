"""`kielo report`: the page of a run, written again, or a page that compares runs."""

import argparse
import os
import sys
import webbrowser

from kielo.api import Run, compare
from kielo.cli.flags import takes
from kielo.cli.terminal import print_text
from kielo.recipe.errors import KieloError

_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "JOB_ID")


@takes("""
    $ kielo report runs/demo_estonian --open
    $ kielo report runs/a runs/b --to a_b.html
    RUN... as runs  a run folder; several are compared
    --to FILE       Page of the comparison. Default: comparison.html. Only with several runs
    --open          open the page in a browser
""")
def report(options: argparse.Namespace) -> None:
    runs = list(dict.fromkeys(options.runs))
    if len(runs) > 1:
        page = compare(*runs, to=options.to or "comparison.html")
    elif options.to is not None:
        raise KieloError(f"--to {options.to}: the page of one run stays in its folder. Fix: name two runs")
    else:
        page = Run(*runs).report()
    print_text(f"wrote {page}")
    if options.open:
        if reason := no_browser():
            return print_text(f"not opened: {reason}. Fix: copy this one file to your own machine")
        webbrowser.open(page.resolve().as_uri())


def no_browser() -> str | None:
    """Return the reason why no browser can be opened here, or None if it can."""
    if job := next((name for name in _JOB_VARIABLES if name in os.environ), None):
        return f"this is a job ({job} is set)"
    has_display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform.startswith("linux") and not has_display:
        return "this machine has no display"
    return None
