"""Recipes of `kielo init` from another recipe, a finished run, or the script of another engine."""

import os
import re
from itertools import count
from pathlib import Path
from typing import Any

from kielo.artifact.manifest import read_manifest
from kielo.recipe import cards
from kielo.recipe.errors import KieloError
from kielo.recipe.from_script.megatron_rules import read_megatron
from kielo.recipe.from_script.recipe_writer import cluster_of, script_recipe
from kielo.recipe.from_script.script_arguments import TranslatedScript
from kielo.recipe.from_script.trainer_rules import read_trainer
from kielo.recipe.read import (
    find_recipe,
    is_shipped,
    read_first_language,
    read_recipe,
    read_toml,
    recipe_choices,
)
from kielo.recipe.toml_text import toml_table
from kielo.resolve.complete_model import KEPT_BESIDE_WEIGHTS


def free_name(reference: str) -> str:
    """Return NAME_2, or the next number without a recipe here and without a run."""
    name = read_first_language(reference).recipe.name
    for choice in recipe_choices(reference)[:1]:
        name = name.removesuffix(f"_{choice.partition('=')[2]}")
    numbered = (f"{name}_{number}" for number in count(2))
    return next(
        one for one in numbered if not (os.path.lexists(f"{one}.toml") or os.path.lexists(f"runs/{one}"))
    )


def recipe_from(reference: str, file: Path, name: str, changes: dict[str, Any]) -> tuple[str, str]:
    """Return the text of the recipe `file`, and what it does, for people.

    changes: values of the new recipe, as in TOML. Raises KieloError for a run that has no weights yet, and
    for changes that do not fit them.
    """
    if Path(reference).is_dir():
        return _continued(Path(reference), name, changes)
    path = find_recipe(reference)
    content = read_toml(path)
    base = content.pop("extends", None)
    if base is None:  # a recipe extends one other at most
        base, content = reference, {}
    if not is_shipped(base):
        beside = path.parent if content else Path()
        base = os.path.relpath(beside / base, file.parent)
        base = base if base.endswith(".toml") else f"./{base}"
    content.pop("folder", None)
    if "language" in changes:
        content.pop("languages", None)
    elif choices := recipe_choices(reference):
        name = f"{name}_{{{choices[0].partition('=')[0]}}}"  # each language or variant has a run
    text = f"# All other values: {base}.\n"
    top = {"extends": base, **content, "name": name}
    return text + toml_table("", _joined(top, changes)), f"which varies {reference}"


def _continued(run: Path, name: str, changes: dict[str, Any]) -> tuple[str, str]:
    recipe = read_recipe(run).recipe
    weights = run / "hf"
    if read_manifest(weights) is None:
        raise KieloError(
            f"{run}: not exported yet, so it has no weights to continue. Fix: kielo run {run} --only export"
        )
    if "model" in changes:
        raise KieloError(
            f"--params and --model-type: the weights in {weights} fix size and type. Fix: leave them out, or "
            f"for a new model --from {run / 'recipe.toml'}"
        )
    content = recipe.model_dump(mode="json", exclude_defaults=True, exclude={"folder", "follows"})
    kept = {key: value for key, value in content.get("model", {}).items() if key in KEPT_BESIDE_WEIGHTS}
    kept = {key: value for key, value in kept.items() if not key.startswith("transplant")}
    content["model"] = kept | {"weights": f"hf:{weights}"}
    frame = {key: value for key, value in content.get("tokenizer", {}).items() if key in ("bos", "eos")}
    content["tokenizer"] = frame | {"path": str(run / "tokenizer")}
    train = {key: value for key, value in content.get("train", {}).items() if key != "skip_steps"}
    content["train"] = train | {"learning_rate": recipe.train.learning_rate / 2}
    text = (
        f"# Continues the weights of {run}, with its tokenizer, in a new run: new warm-up, new moments.\n"
        f"# The learning rate is half of the run's rate. For another vocabulary: leave tokenizer.path out,\n"
        '# and set model.transplant = "mean".\n'
    )
    top = _joined(content, {"name": name, **changes})
    return text + toml_table("", top), f"which continues the weights of {weights}"


def _joined(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return content | {
        key: content.get(key, {}) | value if isinstance(value, dict) else value
        for key, value in changes.items()
    }


def read_engine_script(
    engine: str, script: str, variables: list[str], model_type: str | None
) -> TranslatedScript:
    """Translate a launch script of "megatron" or "trainer". variables: NAME=VALUE."""
    given = {}
    for one in variables:
        name, sign, value = one.partition("=")
        if not sign or not re.fullmatch(r"[A-Za-z_]\w*|[0-9]+", name, re.ASCII):
            raise KieloError(f"--variable {one}: no NAME=VALUE. Fix: --variable NNODES=4")
        given[name] = value
    reads = {"megatron": read_megatron, "trainer": read_trainer}
    return reads[engine](Path(script), given, model_type)


def recipe_of_script(
    engine: str, script: str, found: TranslatedScript, top: dict[str, Any], cluster: str | None
) -> tuple[str, str]:
    """Return the text of the recipe of a translated script, and the cluster's name, "" if it is not known.

    top: name and language. cluster: a card by name or path; None for the cluster of the script's queue.
    """
    cluster = cluster or cluster_of(found.partition)
    top = {**top, "description": f"From {Path(script).name}"}
    if cluster is not None:
        top["cluster"] = cluster
        site = cards.cluster(cluster)
        if found.machine.devices:
            top["nodes"] = [-(-found.machine.devices // site.devices_per_node)]
    return script_recipe(f"--from-{engine} {Path(script).name}", top, found), cluster or ""
