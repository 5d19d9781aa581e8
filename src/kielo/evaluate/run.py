"""The evaluate stage: a run's checkpoint and texts → `evaluate/scores.json`; also the scores of other models.

Every contender scores the same held-out documents under the convention of `bits_per_byte.py`.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from kielo.artifact.manifest import hash_manifest, is_current, write_stage
from kielo.artifact.scores import BitsPerByte, Sample, Scores
from kielo.artifact.stage_json import read_stage_json, write_json
from kielo.artifact.whole_checkpoints import newest_checkpoint
from kielo.checkpoint.read_checkpoint import read_plain
from kielo.dataset.provenance import check_recipe, check_tokenizer, check_tokens
from kielo.evaluate.baselines import ByteNgram, byte_stream, unigram_bits, xz_bits
from kielo.evaluate.bits_per_byte import counted_bytes, token_stream_bits
from kielo.evaluate.contender import Contender, document_tokens, load_checkpoint, load_hugging_face
from kielo.evaluate.generate import default_prompts, generate
from kielo.evaluate.texts import heldout_texts, training_texts, training_token_counts
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import longest_sequence_length
from kielo.recipe.sections import Recipe
from kielo.resolve import resolved as resolved_file
from kielo.tokenizer.load import end_of_text_id, load_tokenizer, vocabulary_size

KIND, VERSION = "scores", 1
CONVENTION = (
    "bits of all tokens, end-of-text included, divided by the UTF-8 bytes of the held-out documents plus "
    "one byte for each document; windows of sequence_length tokens advance by stride"
)


def evaluate(recipe: Recipe, run_folder: Path, checkpoint: Path | None = None) -> Scores:
    """Score the run's checkpoint (default: the newest whole one) beside three baselines given the same text.

    Writes `run_folder/evaluate`. A current folder is read back instead. Raises KieloError when a stage that
    it needs is not finished, and when text, tokenizer and checkpoint do not belong together.
    """
    run_folder = Path(run_folder)
    folder = run_folder / "evaluate"
    checkpoint = newest_checkpoint(run_folder) if checkpoint is None else Path(checkpoint)
    check_recipe(recipe, run_folder)
    check_tokens(read_plain(checkpoint), run_folder)
    inputs = {name: hash_manifest(run_folder / name) for name in ("corpus", "tokenizer", "tokens")}
    inputs["checkpoint"] = hash_manifest(checkpoint)
    section = recipe.evaluate.model_dump(mode="json") | {"seed": recipe.seed}
    if is_current(folder, KIND, VERSION, inputs, section):
        return read_stage_json(folder, Scores)
    with write_stage(folder, KIND, VERSION, inputs, section) as stage:
        resolved = resolved_file.read(run_folder / "resolved.toml")
        contender = load_checkpoint(checkpoint, resolved, run_folder / "tokenizer")
        scores = score(contender, checkpoint.name, recipe, run_folder)
        write_json(stage.folder, scores)
        stage.counts |= {
            "bits_per_byte": scores.bits_per_byte.content(),
            "heldout_bytes": scores.heldout_bytes,
        }
    return scores


def evaluate_hugging_face(recipe: Recipe, run_folder: Path, model: Path) -> Scores:
    """Score any Hugging Face folder in the same way, on the held-out text of a run. Writes nothing.

    Bits per byte compare models whose tokenizers differ. Windows are as long as the run's sequences.
    """
    check_recipe(recipe, run_folder)
    check_tokenizer(run_folder)
    contender = load_hugging_face(Path(model), longest_sequence_length(recipe))
    return score(contender, str(model), recipe, Path(run_folder))


def score(contender: Contender, name: str, recipe: Recipe, run_folder: Path) -> Scores:
    """Score the contender, which `name` names, beside the baselines on the held-out text of a run."""
    texts, coverage = heldout_texts(run_folder / "tokens")
    tokens = contender.encode_documents(texts)
    stride = max(1, contender.sequence_length // 2)
    num_bytes = counted_bytes(texts)
    bits_per_byte = token_stream_bits(contender, tokens, stride) / num_bytes
    if not math.isfinite(bits_per_byte):
        raise KieloError(
            f"{contender.name}: the model's loss is {bits_per_byte}: its weights are damaged, or overflow"
        )
    samples = [
        Sample(prompt=prompt, text=_continue(contender, recipe, prompt, recipe.seed + number))
        for number, prompt in enumerate(recipe.evaluate.prompts or default_prompts(texts))
    ]
    baselines, given = _baselines(recipe, run_folder, texts)
    return Scores(
        model=name,
        bits_per_byte=BitsPerByte(model=bits_per_byte, **baselines),
        samples=samples,
        sampling=recipe.evaluate.model_dump(include={"temperature", "top_k"}) | {"seed": recipe.seed},
        heldout_bytes=num_bytes - len(texts),
        heldout_documents=len(texts),
        heldout_tokens=len(tokens),
        sequence_length=contender.sequence_length,
        stride=stride,
        convention=CONVENTION,
        **coverage,
        **given,
        ngram_order=recipe.evaluate.ngram_order,
    )


def _continue(contender: Contender, recipe: Recipe, prompt: str, seed: int) -> str:
    evaluate = recipe.evaluate
    return generate(contender, prompt, evaluate.sample_tokens, evaluate.temperature, evaluate.top_k, seed)


def _baselines(
    recipe: Recipe, run_folder: Path, heldout: Sequence[str]
) -> tuple[dict[str, float], dict[str, int]]:
    """Returns the baselines' bits per byte, and the bytes of training text that they were given."""
    texts, given = training_texts(recipe, run_folder / "corpus")
    training, heldout_stream = byte_stream(texts), byte_stream(heldout)
    tokenizer = load_tokenizer(run_folder / "tokenizer")
    # The training shards' own counts: the unigram learns from what the model was trained on.
    counts = training_token_counts(run_folder / "tokens", vocabulary_size(tokenizer))
    bits = {
        "unigram": unigram_bits(counts, document_tokens(tokenizer, end_of_text_id(tokenizer), heldout)),
        "xz": xz_bits(training, heldout_stream),
        "ngram": ByteNgram(training, recipe.evaluate.ngram_order).bits(heldout_stream),
    }
    num_bytes = counted_bytes(heldout)
    return {name: value / num_bytes for name, value in bits.items()}, given
