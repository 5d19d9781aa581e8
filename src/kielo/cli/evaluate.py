"""`kielo evaluate`: scores of a run, or samples and held-out bits per byte of any Hugging Face folder."""

import argparse
import json
from pathlib import Path

from kielo.cli.terminal import print_json, print_table
from kielo.recipe.errors import KieloError
from kielo.recipe.read import read_recipe, run_folder


def evaluate(options: argparse.Namespace) -> None:
    from kielo.cli.run import newest_checkpoint
    from kielo.evaluate.run import evaluate, evaluate_hugging_face

    model = Path(options.model)
    if (model / "config.json").is_file():
        if options.recipe is None:
            raise KieloError(f"{model} is a Hugging Face folder; name the RECIPE whose held-out text it is scored on too: "
                             f"kielo evaluate {options.model} RECIPE")
        recipe = read_recipe(options.recipe, options.sets).recipe
        scores = evaluate_hugging_face(recipe, run_folder(recipe), model)
    else:
        recipe = read_recipe(options.model, options.sets).recipe
        folder = run_folder(recipe)
        evaluate(recipe, folder, newest_checkpoint(folder))
        scores = json.loads((folder / "evaluate" / "scores.json").read_text(encoding="utf-8"))
    if options.json:
        return print_json(scores)
    print_table(["contender", "bits per byte"], [(name, f"{value:.3f}") for name, value in scores["bits_per_byte"].items()])
    for sample in scores["samples"]:
        print(f"\n{sample['prompt']} ▸ {sample['text']}")
