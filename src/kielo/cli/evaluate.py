"""`kielo evaluate`: scores of a run, or samples and held-out bits per byte of any Hugging Face folder."""

import argparse
from pathlib import Path

from kielo.cli.terminal import print_json, print_table
from kielo.recipe.read import read_recipe, run_folder
from kielo.recipe.sections import Evaluate


def evaluate(options: argparse.Namespace) -> None:
    from kielo.cli.run import newest_checkpoint
    from kielo.evaluate.contender import is_hugging_face
    from kielo.evaluate.run import evaluate, evaluate_model, heldout_texts

    model = Path(options.model)
    if is_hugging_face(model):
        recipe = read_recipe(options.recipe, options.sets).recipe if options.recipe else None
        texts = heldout_texts(run_folder(recipe) / "tokens") if recipe else []
        scores = evaluate_model(model, recipe.evaluate if recipe else Evaluate(), texts=texts)
    else:
        recipe = read_recipe(options.recipe or options.model, options.sets).recipe
        folder = run_folder(recipe)
        scores = evaluate(recipe, folder, model if options.recipe else newest_checkpoint(folder))
    if options.json:
        return print_json(scores)
    print_table(["contender", "bits per byte"], [(name, f"{value:.3f}") for name, value in scores["bits_per_byte"].items()])
    for sample in scores["samples"]:
        print(f"\n{sample['prompt']} ▸ {sample['text']}")
