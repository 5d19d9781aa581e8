"""`kielo verify`: proofs that print a table, write a certificate, and fail when they fail."""

import argparse
from pathlib import Path
from typing import Any

from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe


def parity(options: argparse.Namespace) -> int:
    _check_steps(options.steps)
    recipe = read_recipe(options.recipe, options.sets).recipe
    folder = run_folder(recipe)
    if not (folder / "resolved.toml").is_file():
        raise KieloError(f"{folder} has no resolved.toml yet; run `kielo run {options.recipe} --to train` first")
    certificate = certify(recipe, folder, options.steps, is_quiet=options.json)
    if options.json:
        print_json(certificate)
    else:
        print(f"certificate: {folder / 'verify' / 'parity.json'}")
    return 0 if certificate["passed"] else 1


def certify(recipe: Recipe, folder: Path, steps: int | None = None, is_quiet: bool = False) -> dict[str, Any]:
    """Parity of the run's newest checkpoint with Hugging Face; prints it unless quiet."""
    from kielo.cli.run import newest_checkpoint
    from kielo.plan.resolved import read
    from kielo.verify.parity import print_parity, verify_parity

    section = recipe.verify
    certificate = verify_parity(
        read(folder / "resolved.toml"), folder / "verify", checkpoint=newest_checkpoint(folder),
        steps=steps or section.parity_steps, sequences_per_step=section.parity_sequences_per_step,
        sequence_length=section.parity_sequence_length, tolerance=section.tolerance,
    )
    if not is_quiet:
        print_parity(certificate)
    return certificate


def _check_steps(steps: int | None) -> None:
    if steps is not None and steps < 1:
        raise KieloError(f"--steps {steps}: give 1 or more")


def layouts(options: argparse.Namespace) -> int:
    _check_steps(options.steps)
    recipe = read_recipe(options.recipe, options.sets).recipe
    from kielo.verify.layouts import CERTIFICATE_NAME, verify_layouts
    from kielo.verify.layouts_table import table, verdict

    # Not in verify/: that folder is parity's stage, and is replaced as a whole.
    folder = run_folder(recipe) / "layouts"
    certificate = verify_layouts(recipe, folder, options.cases, steps=options.steps)
    if options.json:
        print_json(certificate)
    else:
        print_table(*table(certificate))
        print(verdict(certificate))
        print(f"certificate: {folder / CERTIFICATE_NAME}")
    return 0 if certificate["passed"] else 1


def round_trip(options: argparse.Namespace) -> int:
    from kielo.verify.round_trip import table, verdict, verify_round_trip

    with keep_stdout_for_json(options.json):
        result = verify_round_trip(options.weights, options.keep and Path(options.keep))
    if options.json:
        print_json(result)
    else:
        print_table(*table(result))
        if result["left_out"]:
            print(f"left out, for they are no weights: {', '.join(result['left_out'])}")
        print(verdict(result))
    return 0 if result["passed"] else 1
