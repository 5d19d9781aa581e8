"""`kielo verify`: proofs that print a table and write a certificate. Exit code 1: a proof failed."""

import argparse
import sys
from functools import partial
from pathlib import Path

from kielo.artifact.lease import held
from kielo.artifact.megatron_folder import is_checkpoint
from kielo.artifact.weights_folder import CONFIG_FILE, passed_over_in_words
from kielo.cli.flags import VerbParser, rank_words, takes
from kielo.cli.terminal import keep_stdout_for_json, print_json, print_table, print_text
from kielo.models.megatron_config import left_open
from kielo.ranks.rendezvous import find_rendezvous
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Recipe
from kielo.resolve.resolved import placed_as_trained
from kielo.stages import late
from kielo.stages.attempt import on_ranks, placed_here
from kielo.stages.results import PARITY_ON_RANKS, certify, certify_on_ranks
from kielo.verify import screens

PROOFS = {
    "parity": ("verify:parity", "Kielo against Hugging Face: logits, loss, gradients, optimiser steps"),
    "layouts": (
        "verify:layouts",
        "every layout against one process: loss, gradient norm, gradients, weights",
    ),
    "round-trip": (
        "verify:round_trip",
        "Hugging Face weights imported and exported again: every tensor the same",
    ),
    "export": (
        "verify:export",
        "an export in the programs that serve it: log-probabilities and greedy text",
    ),
    "position-heads": (
        "verify:position_heads",
        "the way to cut an LTG-BERT's position heads that has the lower loss",
    ),
}


def verify_flags(parser: VerbParser) -> None:
    parser.takes("$ kielo verify parity demo_estonian")
    parser.has_subverbs("proof", PROOFS)


@takes("""
    $ kielo verify parity demo_estonian --steps 20
    $ kielo verify parity demo_estonian --ranks 2 --precision bf16
    RECIPE
    --steps STEPS:count      optimiser steps; default: verify.parity_steps
    --ranks RANKS:count      processes of this machine: Kielo in the recipe's layout, then transformers under
                             accelerate with FSDP, one after the other
    --precision {fp32,bf16}  precision of the steps; default: the run's. Only with --ranks or in a job
    --sequence-length TOKENS:count  default: the run's. Only with --ranks or in a job
    --json                   print the certificate as JSON
""")
def parity(options: argparse.Namespace) -> int:
    recipe = read_recipe(options.recipe, options.sets).recipe
    folder = run_folder(recipe)
    if not (folder / "resolved.toml").is_file():
        raise KieloError(f"{folder} has no resolved.toml yet. Fix: kielo run {options.recipe} --to train")
    words = ["verify", "parity", options.recipe]
    for flag, value in {"--steps": options.steps, "--sequence-length": options.sequence_length}.items():
        words += [] if value is None else [flag, str(value)]
    on_this_rank = partial(_parity_on_this_rank, recipe, folder, options)
    code = on_ranks(rank_words(words, options), options.ranks, on_this_rank)
    if code is not None:
        return code
    if options.precision is not None or options.sequence_length is not None:
        raise KieloError("--precision and --sequence-length: one process has its own. Fix: with --ranks 1")
    with keep_stdout_for_json(options.json), held(folder):
        certificate = certify(recipe, folder, options.steps, is_quiet=options.json)
    if options.json:
        print_json(certificate.content())
    else:
        print_text(f"certificate: {folder / 'verify' / certificate.FILE_NAME}")
    return 0 if certificate.passed else 1


def _parity_on_this_rank(recipe: Recipe, folder: Path, options: argparse.Namespace) -> int:
    with keep_stdout_for_json(options.json):
        placed = placed_here(recipe, find_rendezvous().size)
        certificate = certify_on_ranks(
            recipe, folder, placed_as_trained(placed, folder), options, is_quiet=options.json
        )
    if certificate is None:  # rank 0 has it
        return 0
    if options.json:
        print_json(certificate.content())
    else:
        print_text(f"certificate: {folder / PARITY_ON_RANKS / certificate.FILE_NAME}")
        if recipe.model.weights is not None:
            print_text("note: only one process compares the folder of model.weights, without --ranks")
    return 0 if certificate.passed else 1


@takes("""
    $ kielo verify layouts demo_estonian
    $ kielo verify layouts demo_estonian --case 'tensor2*'
    RECIPE
    --case NAME... as cases  name or shell pattern of cases; may be repeated. Default: all cases
    --steps STEPS:count=10   optimiser steps of each case; default: 10
    --json                   print the certificate as JSON
""")
def layouts(options: argparse.Namespace) -> int:
    recipe = read_recipe(options.recipe, options.sets).recipe
    # Not in verify/, which the parity stage replaces as a whole.
    folder = run_folder(recipe) / "layouts"
    certificate = late.verify_layouts(recipe, folder, options.cases, steps=options.steps)
    if options.json:
        print_json(certificate)
    else:
        print_table(*screens.layouts_table(certificate))
        print_text(screens.layouts_verdict(certificate))
        print_text(f"certificate: {folder / late.LAYOUTS_CERTIFICATE}")
    return 0 if certificate["passed"] else 1


@takes("""
    $ kielo verify round-trip runs/demo_estonian/hf
    $ kielo verify round-trip hf:OWNER/NAME
    $ kielo verify round-trip megatron:DIR --keep my_hf
    WEIGHTS     Hugging Face folder, hf:OWNER/NAME on the hub, or megatron:DIR
    --keep DIR  new folder that keeps the export; default: remove it
    --json      print every tensor's dtype, shape and sha256 as JSON
""")
def round_trip(options: argparse.Namespace) -> int:
    with keep_stdout_for_json(options.json):
        result = late.verify_round_trip(options.weights, options.keep and Path(options.keep))
    _warn_of_files(result["source"])
    if options.json:
        print_json(result)
    else:
        print_table(*late.round_trip_table(result))
        if result["left_out"]:
            print_text(f"left out, because they are not weights: {', '.join(result['left_out'])}")
        print_text(late.round_trip_verdict(result))
    return 0 if result["passed"] else 1


def _warn_of_files(source: str) -> None:
    if is_checkpoint(Path(source)):
        print_text(f"Megatron: {left_open(Path(source))}", sys.stderr)
    if said := passed_over_in_words(Path(source)):
        print_text(f"warning: {said}", sys.stderr)


@takes("""
    $ kielo verify export demo_estonian
    $ kielo verify export runs/demo_estonian --gguf my_gguf
    RUN                    recipe or run folder, or an export in a run folder
    --set KEY=VALUE
    --export DIR           another export of the run; default: RUN/hf
    --gguf DIR             also the file of this folder, made by `kielo export RUN --to DIR --format gguf`
    --texts NUMBER:count=4  held-out texts to compare; default: 4
    --json                 print the certificate as JSON
""")
def export(options: argparse.Namespace) -> int:
    place = Path(options.run)
    if (place / CONFIG_FILE).is_file():
        run, folder = late.run_of_export(place), place
    else:
        run = run_folder(read_recipe(options.run, options.sets).recipe)
        folder = Path(options.export or run / "hf")
    gguf = None if options.gguf is None else Path(options.gguf)
    # Not in verify/, which the parity stage replaces as a whole.
    to = run / "serving"
    certificate = late.verify_export(run, folder, gguf, options.texts, to)
    if options.json:
        print_json(certificate)
    else:
        print_table(*screens.serving_table(certificate))
        print_text(screens.serving_verdict(certificate))
        print_text(f"certificate: {to / late.SERVING_NAME}")
    return 0 if certificate["passed"] else 1


@takes("""
    $ kielo verify position-heads hf:OWNER/NAME text.txt
    WEIGHTS    Hugging Face folder, or hf:OWNER/NAME on the hub
    TEXT:path  a text file in a language of the model
    --json     print the losses as JSON
""")
def position_heads(options: argparse.Namespace) -> int:
    result = late.verify_position_heads(options.weights, options.text)
    _warn_of_files(result["source"])
    if options.json:
        print_json(result)
    else:
        rows = [(way, f"{loss:.4f}") for way, loss in result["losses"].items()]
        print_table(["position_heads", f"nats a hidden token, of {result['hidden_tokens']:,}"], rows)
        print_text(late.position_heads_verdict(result))
    return 0 if result["passed"] else 1
