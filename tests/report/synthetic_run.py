"""A finished run folder, written by hand: what each stage leaves behind, with hostile text in every place."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.manifest import write_manifest
from kielo.artifact.scores import StageTime
from kielo.artifact.verify_results import Settings, SourceFolder
from kielo.recipe.sections import Recipe
from kielo.resolve.resolve import resolve
from kielo.resolve.resolved import write
from kielo.resolve.text import imagined_text

HOSTILE = "<script>document.body.innerHTML = ''</script> & $x_1$ \"'"

RECIPE = Recipe.model_validate(
    {
        "name": "demo_estonian",
        "language": "no",  # what YAML would read as false
        "tokenizer": {"vocab_size": 4096},
        "train": {"tokens": 3_014_656, "tokens_per_step": 4096},
        "description": f"A small Llama {HOSTILE}",
        "corpus": {"sources": [{"name": "help", "debian_package": "libreoffice-help-et"}]},
        "report": {"license": "mpl-2.0", "text_license": "MPL-2.0 (LibreOffice help)"},
    }
)
STAGES = {
    "corpus": StageTime(seconds=41.2, skipped=True),
    "tokenizer": StageTime(seconds=1.3, skipped=False),
    "pack": StageTime(seconds=1.9, skipped=False),
    "train": StageTime(seconds=252.0, skipped=False),
    "verify": StageTime(seconds=14.8, skipped=False),
    "evaluate": StageTime(seconds=21.0, skipped=False),
    "export": StageTime(seconds=0.8, skipped=False),
}


def write_run(folder: Path) -> None:
    """Every stage folder with its manifest."""
    corpus(folder / "corpus")
    tokenizer_and_tokens(folder)
    training(folder / "train")
    verify(folder / "verify")
    evaluate(folder / "evaluate")
    _stage(folder / "hf", {"config.json": {"model_type": "llama"}}, {})


def corpus(folder: Path) -> None:
    steps, documents, size = [], 2550, 4_620_000
    for name, reason, dropped, dropped_bytes in (
        ("normalise", "nothing dropped", 0, 0),
        ("script", "letters outside the Latin script", 0, 12_000),
        ("line language", "line in another language", 2, 1_700_000),
        ("line language", HOSTILE, 0, 0),
        ("duplicate lines", "line seen before", 0, 610_000),
        ("document language", "document in another language", 260, 90_000),
        ("length", "fewer than 100 characters", 380, 21_000),
        ("duplicate documents", "document seen before", 3, 2_000),
    ):
        documents, size = documents - dropped, size - dropped_bytes
        steps.append({"name": name, "reason": reason, "documents": dropped, "lines": 0,
                      "bytes": dropped_bytes, "documents_left": documents, "bytes_left": size})  # fmt: skip
    table = {"lines": {"0.5": 0.62, "0.9": 0.55}, "documents": {"0.5": 0.93, "0.9": 0.9}}
    counts = {"bytes_in": 4_620_000, "documents_in": 2550, "bytes_kept": size, "documents_kept": documents}
    _stage(
        folder,
        {"funnel.json": {"settings": {}, "sources": [], "steps": steps, "threshold_table": table}},
        counts,
    )


def tokenizer_and_tokens(folder: Path) -> None:
    figures = {
        "measured_on": "held-out documents",
        "end_of_text_id": 0,
        "vocabulary_size": 4096,
        "tokens_per_word": 2.31,
        "bytes_per_token": 3.42,
        "characters_per_token": 3.31,
        "exact_round_trip_share": 1.0,
        "vocabulary_used_share": 0.871,
        "single_byte_token_share": 0.02,
        "renyi_efficiency": 0.48,
        "shannon_efficiency": 0.71,
        "texts": 85,
        "words": 12_169,
        "bytes": 96_140,
        "tokens": 28_111,
    }
    _stage(folder / "tokenizer", {"measure.json": figures}, {})
    sources = {"help": {"tokens": 510_000, "documents": 1820, "bytes": 1_690_000}}
    counts = {"sources": sources, "heldout": {"tokens": 28_000, "documents": 85, "bytes": 95_000}}
    _stage(folder / "tokens", {}, counts)


def transplant(folder: Path) -> None:
    """Adds what a run with model.transplant has besides: the map of rows."""
    rows = [[4], [3], [2, 5], [1, 1, 2], [9], [], [7], [8], [3, 5], [1, 2, 3]]
    row_map = {
        "method": "mean",
        "old_tokenizer": "",
        "old_vocabulary_size": 10,
        "rows": rows,
        "control_tokens": {"<|end|>": "</s>", HOSTILE: "<s>"},
    }
    (folder / "tokenizer" / "row_map.json").write_text(json.dumps(row_map), encoding="utf-8")


def training(folder: Path) -> None:
    random = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for step in [1, *range(10, 740, 10)]:
        loss = 2.6 + 5.7 * np.exp(-step / 120) + random.normal(0, 0.05)
        rows.append({"step": step, "tokens": 4096 * step, "loss": float(loss), "skipped": 1, "mfu": None,
                     "tokens_per_second": 5_000.0 if step == 1 else 12_000 + float(random.normal(0, 200)),
                     "seconds": 0.34 * step})  # fmt: skip
        if step % 100 == 0:
            rows.append({"step": step, "tokens": 4096 * step, "heldout_loss": float(loss) + 0.25})
    rows[5]["loss"] = None  # a step that was not finite
    rows.append({"step": 738, "tokens": 4096 * 738, "samples": 1, "phase": 1, "passed_over_from": 733})
    rows.append({"step": 739, "passed_over_from": 739, "passed_over_for": "spike"})
    folder.mkdir(parents=True)
    lines = [json.dumps(row) for row in rows]
    lines.insert(30, '{"step": 999, "lo')  # an attempt that was killed while writing
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = replace(imagined_text(RECIPE), tokens={"help": 3_000_000})
    write(resolve(RECIPE, "", 1, "cpu", text=text), folder.parent / "resolved.toml")
    write_manifest(folder, "train", 1, {}, {}, {"tokens_per_second": 12_000.0}, 252.0)


def verify(folder: Path, passed: bool = True) -> None:
    theirs = [8.3 - 0.11 * step for step in range(20)]
    ours = [loss * (1 + (2e-7 if passed else 3e-3) * (step % 3)) for step, loss in enumerate(theirs)]
    settings = {
        "optimiser": "AdamW",
        "Adam betas": [[0.9, 0.95]],
        "weight decay": {f"layers.{number}.weight": 0.1 if number % 3 else 0.0 for number in range(12)},
        "RoPE base": 10_000.0,
        "learning rate of each step": [1e-4 * step for step in range(1, 21)],
        "first token": HOSTILE,
    }
    certificate = {
        "passed": passed,
        "max_relative_loss_difference": 4e-7 if passed else 6e-3,
        "steps": 20,
        "tolerance": 1e-5,
        "logits_max_difference": 2.1e-6,
        "gradient_max_relative_difference": 3.3e-6,
        "settings": {
            "ours": settings,
            "theirs": settings | ({} if passed else {"RoPE base": 500_000.0}),
            "differing": [] if passed else ["RoPE base"],
        },
        "losses": {"ours": ours, "theirs": theirs, "relative_differences": [0.0] * 20},
        "gradient_norms": {"ours": [1.0] * 20, "theirs": [1.0] * 20},
        "weights": "initial values of seed 1",
        "sequences_per_step": 4,
        "sequence_length": 128,
        "hugging_face_overrides": {},
        "first_difference": None
        if passed
        else {"layer": "layers.0.attention", "where": "forward", "weight": None, "settings": ["RoPE base"]},
    }
    _stage(folder, {"parity.json": certificate}, {})


def evaluate(folder: Path, model: float = 1.413, sets: Sequence[dict[str, Any]] = ()) -> None:
    scores = {
        "model": "step_00000732",
        "bits_per_byte": {"model": model, "unigram": 2.301, "xz": 1.612, "ngram": 1.552},
        "sets": list(sets),
        "samples": [
            {
                "prompt": "Avab dialoogi, milles saab valida",
                "text": " faili vormingu ja asukoha.\nKlõpsa nupul.",
            },
            {"prompt": "Vali käsk", "text": " Vormindus - Lehekülg - kaart Päis."},
            {"prompt": HOSTILE, "text": HOSTILE},
        ],
        "sampling": {"temperature": 0.7, "top_k": 50, "seed": 1},
        "heldout_bytes": 95_000,
        "heldout_documents": 85,
        "heldout_documents_in_all": 85,
        "heldout_tokens": 28_000,
        "sequence_length": 256,
        "stride": 128,
        "convention": "bits of all tokens divided by the bytes of the documents",
        "ngram_order": 6,
        "training_bytes": 1_690_000,
        "training_bytes_of_byte_baselines": 1_690_000,
    }
    _stage(folder, {"scores.json": scores}, {})


def _stage(folder: Path, contents: dict[str, Any], counts: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    write_manifest(folder, folder.name, 1, {}, {}, counts, 12.5)


def source_folder(passed: bool = True) -> SourceFolder:
    """Make what a certificate says of imported weights: of two layers of 32, and of a wrong epsilon."""
    wrong = [] if passed else ["norm epsilon"]
    return SourceFolder(
        passed=passed, folder="/weights", layers=2, layers_of_model=32, is_transplanted=not passed,
        sequence_length=128, logits_max_difference=3e-6 if passed else 2.5, logits_relative_difference=4e-7,
        settings=Settings(ours={}, theirs={}, differing=wrong), layer=None if passed else "layers.0",
        where=None if passed else "before q",
    )  # fmt: skip


SOURCE_IN_WORDS = {
    True: "Before any step, Kielo's import of the weights and transformers' own reading with 2 of 32 layers "
    "(too large to load twice) are equal: logits by at most 3.0e-06 (4.0e-07 relative).",
    False: "Before any step, Kielo's import of the weights and transformers' own reading with their own "
    "vocabulary with 2 of 32 layers (too large to load twice) DIFFER: logits by at most 2.5e+00 (4.0e-07 "
    "relative); settings that differ: norm epsilon; first layer that differs: layers.0 (before q).",
}
