"""The evaluate stage: a run's checkpoint and text -> `evaluate/scores.json`, and the scores of any other model.

Every contender scores the same held-out documents. The byte baselines hold the training text in memory, so a
corpus above `MOST_TRAINING_BYTES` gives them an even sample of its documents; `scores.json` says how much.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kielo.artifact.documents import read_documents
from kielo.artifact.manifest import (
    hash_file,
    hash_manifest,
    is_current,
    read_manifest,
    write_json_atomically,
    write_stage,
)
from kielo.artifact.token_shards import TokenShard
from kielo.checkpoint.store import Store
from kielo.dataset.pack import is_heldout
from kielo.evaluate.baselines import ByteNgram, byte_stream, unigram_bits, xz_bits
from kielo.evaluate.bits_per_byte import counted_bytes, token_stream_bits
from kielo.evaluate.contender import Contender, is_hugging_face, load_checkpoint, load_hugging_face
from kielo.evaluate.generate import default_prompts, generate
from kielo.plan import resolved as resolved_file
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Evaluate, Recipe
from kielo.tokenizer.load import end_of_text_id, load_tokenizer

KIND = "evaluate"
VERSION = 1
SCORES_NAME = "scores.json"
MOST_HELDOUT_BYTES = 4 << 20
MOST_TRAINING_BYTES = 32 << 20
MOST_UNIGRAM_TOKENS = 1 << 28


def evaluate(recipe: Recipe, run_folder: Path, checkpoint: Path | None = None, folder: Path | None = None) -> dict[str, Any]:
    """Score the run's newest checkpoint (or `checkpoint`, which may be a Hugging Face folder) beside three baselines.

    Writes `scores.json` and the manifest to `folder` (default: `run_folder/evaluate`) and returns the scores:
    {"bits_per_byte": {"model", "unigram", "xz", "ngram"}, "samples": [{"prompt", "text"}], "heldout_bytes", …}.
    A folder that is current is read back. Raises KieloError when a stage that it needs is not finished.
    """
    run_folder = Path(run_folder)
    folder = run_folder / "evaluate" if folder is None else Path(folder)
    checkpoint = newest_checkpoint(run_folder) if checkpoint is None else Path(checkpoint)
    inputs, section = stage_inputs(run_folder, checkpoint), stage_section(recipe)
    if is_current(folder, KIND, VERSION, inputs, section):
        return read_scores(folder)
    with write_stage(folder, KIND, VERSION, inputs, section) as stage:
        texts, coverage = _heldout_texts(run_folder / "tokens")
        contender = _load(checkpoint, run_folder, recipe)
        scores = score(contender, recipe.evaluate, recipe.seed, texts)
        baselines, given = _baselines(recipe, run_folder, texts)
        scores["bits_per_byte"] |= baselines
        scores |= coverage | given
        write_json_atomically(stage.folder / SCORES_NAME, scores)
        stage.counts |= {"bits_per_byte": scores["bits_per_byte"], "heldout_bytes": scores["heldout_bytes"]}
    return scores


def evaluate_model(model: Path, settings: Evaluate, seed: int = 1, texts: Sequence[str] = ()) -> dict[str, Any]:
    """Score a Hugging Face folder without a run: samples, and bits per byte when there are `texts`. Writes nothing."""
    model = Path(model)
    if not is_hugging_face(model):
        raise KieloError(f"{model}: not a Hugging Face folder (no config.json); for a Kielo checkpoint name its recipe too")
    return score(load_hugging_face(model), settings, seed, texts)


def score(contender: Contender, settings: Evaluate, seed: int, texts: Sequence[str]) -> dict[str, Any]:
    """Bits per byte of the model on `texts` (where there are any), samples, and under which conventions."""
    samples = []
    for number, prompt in enumerate(settings.prompts or default_prompts(texts)):
        text = generate(
            contender, prompt, settings.sample_tokens, settings.temperature, settings.top_k, seed + number
        )
        samples.append({"prompt": prompt, "text": text})
    scores: dict[str, Any] = {
        "model": contender.name,
        "bits_per_byte": {},
        "samples": samples,
        "sampling": {"temperature": settings.temperature, "top_k": settings.top_k, "seed": seed},
    }
    if texts:
        tokens = contender.encode_documents(texts)
        stride = max(1, contender.sequence_length // 2)
        num_bytes = counted_bytes(texts)
        scores["bits_per_byte"]["model"] = token_stream_bits(contender, tokens, stride) / num_bytes
        scores |= {
            "heldout_bytes": num_bytes - len(texts),
            "heldout_documents": len(texts),
            "heldout_tokens": len(tokens),
            "sequence_length": contender.sequence_length,
            "stride": stride,
            "convention": "bits of all tokens, end-of-text included, divided by the UTF-8 bytes of the held-out "
            "documents plus one byte per document; windows of sequence_length tokens advance by stride",
        }
    return scores


def newest_checkpoint(run_folder: Path) -> Path:
    """The newest whole checkpoint of a run. KieloError where there is none."""
    folder = run_folder / "train" / "checkpoints"
    newest = Store(folder).newest()
    if newest is None:
        raise KieloError(f"{folder}: no finished checkpoint; run the train stage first")
    return newest


def stage_inputs(run_folder: Path, checkpoint: Path) -> dict[str, str]:
    """Hashes of what the scores are made of."""
    if read_manifest(checkpoint) is not None:
        weights = hash_manifest(checkpoint)
    elif is_hugging_face(checkpoint):  # a foreign folder: its configuration, and the sizes and times of its weights
        files = sorted(checkpoint.glob("*.safetensors"))
        sizes = ",".join(f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files)
        weights = f"{hash_file(checkpoint / 'config.json')}/{sizes}"
    else:
        raise KieloError(f"{checkpoint}: neither a finished Kielo checkpoint nor a Hugging Face folder")
    stages = {name: hash_manifest(run_folder / name) for name in ("corpus", "tokenizer", "tokens")}
    return stages | {"checkpoint": weights}


def stage_section(recipe: Recipe) -> dict[str, Any]:
    """What of the recipe decides the scores."""
    return recipe.evaluate.model_dump(mode="json") | {"seed": recipe.seed}


def read_scores(folder: Path) -> dict[str, Any]:
    """A finished `scores.json`."""
    return json.loads((folder / SCORES_NAME).read_text(encoding="utf-8"))


def _load(checkpoint: Path, run_folder: Path, recipe: Recipe) -> Contender:
    if is_hugging_face(checkpoint):
        return load_hugging_face(checkpoint, recipe.dataset.sequence_length)
    return load_checkpoint(checkpoint, resolved_file.read(run_folder / "resolved.toml"), run_folder / "tokenizer")


def _heldout_texts(tokens_folder: Path) -> tuple[list[str], dict[str, Any]]:
    """The held-out documents, an even sample of them where they are many; and how many there are."""
    path = tokens_folder / "heldout.jsonl.zst"
    sizes = [len(document["text"].encode("utf-8")) for document in read_documents(path)]
    if not sizes:
        raise KieloError(f"{path}: no held-out documents; raise dataset.heldout_share or add text")
    share = MOST_HELDOUT_BYTES / max(1, sum(sizes))
    texts = list(evenly((document["text"] for document in read_documents(path)), share))
    return texts, {"heldout_documents_in_all": len(sizes), "heldout_bytes_in_all": sum(sizes)}


def evenly(items: Iterator[Any], share: float) -> Iterator[Any]:
    """Every item for a share of 1 and above, else that share of them at even distances, the first included."""
    if share >= 1:
        yield from items
        return
    for number, item in enumerate(items):
        if number == 0 or int((number + 1) * share) > int(number * share):
            yield item


def _baselines(recipe: Recipe, run_folder: Path, heldout: Sequence[str]) -> tuple[dict[str, float], dict[str, Any]]:
    """Bits per byte of the three baselines, and how much training text the two byte baselines were given."""
    num_bytes = counted_bytes(heldout)
    heldout_stream = byte_stream(heldout)
    documents = run_folder / "corpus" / "documents"
    training_bytes = sum(len(text.encode("utf-8")) for text in _training_texts(documents, recipe))
    share = MOST_TRAINING_BYTES / max(1, training_bytes)
    training = byte_stream(evenly(_training_texts(documents, recipe), share))
    bits_per_byte = {
        "unigram": _unigram_bits(run_folder, heldout) / num_bytes,
        "xz": xz_bits(training, heldout_stream) / num_bytes,
        "ngram": ByteNgram(training, recipe.evaluate.ngram_order).bits(heldout_stream) / num_bytes,
    }
    given = {
        "training_bytes": training_bytes,
        "training_bytes_of_byte_baselines": len(training),
        "ngram_order": recipe.evaluate.ngram_order,
    }
    return bits_per_byte, given


def _training_texts(documents: Path, recipe: Recipe) -> Iterator[str]:
    for document in read_documents(documents):
        if not is_heldout(document["text"], recipe.dataset.heldout_share):
            yield document["text"]


def _unigram_bits(run_folder: Path, heldout: Sequence[str]) -> float:
    """Token frequencies come from the training shards, so they count what the model was trained on."""
    tokenizer = load_tokenizer(run_folder / "tokenizer")
    counts = np.zeros(tokenizer.get_vocab_size(), dtype=np.int64)
    prefixes = [path.with_suffix("") for path in sorted((run_folder / "tokens").glob("*.idx")) if path.stem != "heldout"]
    shards = [TokenShard(prefix) for prefix in prefixes]
    share = min(1.0, MOST_UNIGRAM_TOKENS / max(1, sum(shard.num_tokens for shard in shards)))
    for shard in shards:
        for start, count in _spread_pieces(shard.num_tokens, share):
            counts += np.bincount(shard.read(start, count), minlength=len(counts))
    end = end_of_text_id(tokenizer)
    encodings = tokenizer.encode_batch(list(heldout), add_special_tokens=False)
    tokens = np.concatenate([np.asarray([*encoding.ids, end], dtype=np.int64) for encoding in encodings])
    return unigram_bits(counts, tokens)


def _spread_pieces(num_tokens: int, share: float, piece: int = 1 << 22) -> Iterator[tuple[int, int]]:
    """(start, count) of pieces that cover the share of a shard, at even distances."""
    for start in range(0, num_tokens, piece):
        count = round(min(piece, num_tokens - start) * share)
        if count:
            yield start, count
