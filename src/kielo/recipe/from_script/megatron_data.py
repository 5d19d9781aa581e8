"""Megatron's arguments of text, held-out text and folders to [corpus], [dataset] and the run."""

import json
import re
from collections.abc import Callable

from kielo.recipe.from_script.script_arguments import TRANSLATED, Translation, text_of_file
from kielo.recipe.from_script.token_blends import put_blend, weighted_splits


def put_data(to: Translation) -> None:
    """Set sources, their mixture and the held-out share."""
    readers: dict[str, Callable[[str], list[str]]] = {
        "--data-args-path": str.split,
        "--per-split-data-args-path": lambda text: list(map(str, json.loads(text)["train"])),
        "--train-weighted-split-paths-path": weighted_splits,
    }
    blends = [name for name in ("--data-path", "--train-data-path") if to.has(name)]
    if to.has("--train-weighted-split-paths"):
        put_blend(
            to,
            "--train-weighted-split-paths",
            weighted_splits(" ".join(to.value("--train-weighted-split-paths"))),
        )
    for name in blends:
        put_blend(to, name, to.value(name))
    for name, read in readers.items():
        if not to.has(name):
            continue
        text = text_of_file(to.script, to.path, to.value(name))
        if text is None:
            to.drop(name, "this file is not here: name its sources in [[corpus.sources]]")
            continue
        try:
            put_blend(to, name, read(text))
        except (ValueError, KeyError, TypeError, AttributeError):
            to.refuse("this file is no list of weights and prefixes. Fix: another file", name)
    if to.has("--split"):
        _split(to)
    masks = [name for name in ("--reset-attention-mask", "--reset-position-ids") if to.is_on(name)]
    if "--reset-attention-mask" in masks:
        to.put("dataset.mask_documents", True, *masks)
    else:
        to.drop(
            "--reset-position-ids", "positions restart only with dataset.mask_documents, which is not set"
        )


def _split(to: Translation) -> None:
    shares = [
        float(one) for one in re.findall(r"[\d.]+", to.value("--split")) if re.fullmatch(r"\d*\.?\d+", one)
    ]
    held, total = shares[1] if len(shares) > 1 else 0.0, sum(shares)
    if not total or not 0 <= held / total < 0.5:
        to.refuse("is no split. Fix: 969,30,1", "--split")
    elif not held:
        to.drop("--split", "text is always held out: dataset.heldout_share, by default 2 %")
    else:
        to.put("dataset.heldout_share", float(f"{held / total:.6g}"), "--split")
        if len(shares) > 2 and shares[2]:
            to.say("--split", TRANSLATED, "there is no test split")


def put_run(to: Translation) -> None:
    """Set the size of held-out text, and write folder and first weights as comments."""
    if to.has("--eval-iters"):
        size = to.keys["train.tokens_per_step"][0] // to.value("--seq-length")
        if to.value("--eval-iters") > 0:
            to.put("train.heldout_sequences", to.value("--eval-iters") * size, "--eval-iters")
        else:
            to.drop("--eval-iters", "held-out text is always scored: train.heldout_sequences, by default 64")
    save, load = (
        to.given[name].text.partition(" ")[2] if to.has(name) else "" for name in ("--save", "--load")
    )
    if save and "$" in save:
        to.drop("--save", "only a job knows this path; a run is stored in runs/NAME (folder)")
    elif save:
        to.comments.setdefault("", []).append(f'folder = "{save}/kielo"  # {to.given["--save"].text}')
        to.drop("--save", "Kielo's run needs a folder of its own: runs/NAME, or the line `folder`")
    if load and load == save and not to.is_on("--finetune"):
        to.drop("--load", "the same command resumes a run")
    names = [name for name in ("--load", "--pretrained-checkpoint", "--finetune") if to.has(name)]
    weights = next((to.given[name].text.partition(" ")[2] for name in names if name != "--finetune"), "")
    if weights and (weights != save or to.is_on("--finetune")):
        to.comments.setdefault("model", []).append(
            f'weights = "megatron:{weights}"  # begins from these weights'
        )
        for name in names:
            to.drop(name, "a new run begins; the line `weights` in [model] begins from these weights")
    else:
        to.drop("--finetune", "the recipe begins at step 0")
    to.say("--tensorboard-dir", TRANSLATED, "train.tensorboard is on by default") if to.has(
        "--tensorboard-dir"
    ) else None
