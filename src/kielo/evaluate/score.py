"""The scores of a model on the held-out text of a run: bits per byte beside the baselines, and samples.

The models and texts are chosen here. `contender.py` has the arithmetic.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kielo.artifact.checkpoint_index import read_state
from kielo.artifact.documents import messages_of
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import hash_json, write_stage
from kielo.artifact.scores import BitsPerByte, MaskedScores, Sample, Scores, SetScore
from kielo.artifact.stage_json import write_json
from kielo.artifact.task_result import TASKS_FOLDER
from kielo.checkpoint.agreement import Agreement
from kielo.dataset.document_packer import DocumentEncoder, stored_ids
from kielo.dataset.provenance import check_recipe, check_tokenizer
from kielo.evaluate.baselines import ByteNgram, byte_stream, unigram_bits, xz_bits
from kielo.evaluate.contender import (
    Contender,
    causal_use,
    counted_bytes,
    document_tokens,
    load_checkpoint,
    load_hugging_face,
    refuse_odd_loss,
    token_stream_bits,
)
from kielo.evaluate.encoder import fill_heldout, fill_prompts, open_encoder
from kielo.evaluate.evaluation import KIND, VERSION, WantedScores
from kielo.evaluate.fluency import score_sentences
from kielo.evaluate.generate import default_prompts, generate
from kielo.evaluate.log_tasks import log_tasks
from kielo.evaluate.masked_tokens import score_masked_tokens
from kielo.evaluate.pair_files import read_pairs
from kielo.evaluate.part_of_speech import score_part_of_speech
from kielo.evaluate.pseudo_likelihood import pseudo_bits_per_byte, score_minimal_pairs
from kielo.evaluate.tasks import Place, score_tasks
from kielo.evaluate.tasks_harness import Harness
from kielo.evaluate.texts import documents_of_sets, heldout_documents, training_texts, training_token_counts
from kielo.recipe.errors import KieloError
from kielo.recipe.phases import longest_sequence_length
from kielo.recipe.sections import Recipe
from kielo.resolve import resolved as resolved_file
from kielo.resolve.resolved import Identity
from kielo.tokenizer.load import TextTokenizer, end_of_text_id, load_tokenizer, vocabulary_size


def make_scores(wanted: WantedScores) -> Scores | MaskedScores:
    """Score the checkpoint beside three baselines with the same text, and write the stage's folder.

    An encoder of the hybrid objective also gets the scores of its causal use.
    """
    refuse_tasks(wanted.recipe)
    with write_stage(wanted.folder, KIND, VERSION, wanted.inputs, wanted.section) as stage:
        masked, in_turn = score_checkpoint(wanted, folder=stage.folder)
        if masked is not None:
            write_json(stage.folder, masked)
            stage.counts |= {"accuracy": masked.accuracy.content()}
        if in_turn is not None:
            write_json(stage.folder, in_turn)
            stage.counts |= {
                "bits_per_byte": in_turn.bits_per_byte.content(),
                "heldout_bytes": in_turn.heldout_bytes,
            }
    if in_turn is not None:
        log_tasks(wanted.recipe, wanted.run_folder, read_state(wanted.checkpoint).step or 0, in_turn)
    scores = masked or in_turn
    assert scores is not None
    return scores


def score_checkpoint(
    wanted: WantedScores, has_baselines: bool = True, folder: Path | None = None
) -> tuple[MaskedScores | None, Scores | None]:
    """Return an encoder's scores on hidden tokens, and the scores of a model that predicts next tokens.

    Pairs that are made are written into `folder`, if it is given, and results of tasks beside the run's own.
    """
    recipe, run_folder, name = wanted.recipe, wanted.run_folder, wanted.checkpoint.name
    resolved = resolved_file.read(run_folder / "resolved.toml")
    contender = load_checkpoint(wanted.checkpoint, resolved, run_folder / "tokenizer")
    masked = None
    if wanted.is_masked:
        masked = score_encoder(contender, name, recipe, resolved.identity, run_folder)
        if not resolved.identity.train.causal_share:
            return masked, None
        contender = causal_use(contender, recipe)
        # The recipe's prompts have mask tokens: samples continue openings of held-out documents.
        settings = recipe.evaluate.model_copy(update={"prompts": ()})
        recipe = recipe.model_copy(update={"evaluate": settings})
    scores = score(contender, name, recipe, run_folder, has_baselines, folder)
    return masked, with_tasks(scores, contender, recipe, place_of_checkpoint(wanted))


def evaluate_hugging_face(recipe: Recipe, run_folder: Path, model: Path) -> Scores:
    """Score any Hugging Face folder in the same way, on the held-out text of a run.

    Nothing is written but the results of tasks, beside the run's own.
    Bits per byte compare models with different tokenizers. Windows are as long as the run's sequences.
    """
    if recipe.train.objective == "masked_tokens":
        raise KieloError(
            f"{model}: the recipe's text is an encoder's, for which bits per byte are not defined. "
            "Fix: a run of an encoder, with its recipe alone"
        )
    check_recipe(recipe, run_folder)
    check_tokenizer(run_folder)
    refuse_tasks(recipe)
    contender = load_hugging_face(model, longest_sequence_length(recipe))
    place = place_of_folder(run_folder, model)
    return with_tasks(score(contender, str(model), recipe, run_folder), contender, recipe, place)


def place_of_checkpoint(wanted: WantedScores) -> Place:
    """Return the place of the results of tasks of a checkpoint."""
    inputs = {key: wanted.inputs[key] for key in ("checkpoint", "tokenizer")}
    return Place(wanted.run_folder / TASKS_FOLDER / wanted.checkpoint.name, inputs)


def place_of_folder(run_folder: Path, model: Path) -> Place:
    """Return the place of the results of tasks of a Hugging Face folder."""
    weights = hash_json([[path.name, *_stamp(path)] for path in sorted(model.iterdir()) if path.is_file()])
    return Place(run_folder / TASKS_FOLDER / f"{model.resolve().name}-{weights[:8]}", {"weights": weights})


def refuse_tasks(recipe: Recipe) -> None:
    """Raise KieloError for tasks that cannot be asked, before work is done."""
    if recipe.evaluate.tasks:
        Harness(recipe.evaluate)


def with_tasks(scores: Scores, contender: Contender, recipe: Recipe, place: Place) -> Scores:
    """Add the scores of the recipe's tasks. Their results are kept in `place`."""
    if not recipe.evaluate.tasks:
        return scores
    found, unscored = score_tasks(contender, recipe.evaluate, place)
    return scores.model_copy(update={"tasks": found} | ({"unscored_tasks": unscored} if unscored else {}))


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def score_encoder(
    contender: Contender, name: str, recipe: Recipe, identity: Identity, run_folder: Path
) -> MaskedScores:
    """Score the contender `name` on the held-out text of a run and on the recipe's own files.

    The measures: hidden tokens, pseudo-perplexity, filled masks, minimal pairs, parts of speech.
    Raise KieloError for weights whose loss is not finite, and for a file that is missing or damaged.
    """
    evaluate = recipe.evaluate
    scores = score_masked_tokens(contender, name, identity, run_folder)
    encoder = open_encoder(contender, recipe)
    documents, _ = heldout_documents(run_folder / "tokens")
    order = np.random.default_rng(recipe.seed).permutation(len(documents))
    texts = [documents[number]["text"] for number in order]
    found: dict[str, object] = {
        "pseudo_bits_per_byte": pseudo_bits_per_byte(encoder, texts, evaluate.pseudo_tokens),
        "filled_masks": fill_prompts(encoder, evaluate.prompts)
        if evaluate.prompts
        else fill_heldout(encoder, texts, recipe.seed),
    }
    if evaluate.minimal_pairs:
        found["minimal_pairs"] = score_minimal_pairs(encoder, Path(evaluate.minimal_pairs).expanduser())
    if evaluate.part_of_speech.train:
        found["part_of_speech"] = score_part_of_speech(encoder, evaluate.part_of_speech)
    return scores.model_copy(update=found)


CONVENTION = (
    "bits of all tokens, end-of-text included, but without those that the tokenizer puts before each text, "
    "divided by the UTF-8 bytes of the held-out documents plus one byte for each document; windows of "
    "sequence_length tokens advance by stride"
)
NO_BASELINES: tuple[dict[str, float], dict[str, int]] = (
    {},
    {"training_bytes": 0, "training_bytes_of_byte_baselines": 0},
)


def score(
    contender: Contender,
    name: str,
    recipe: Recipe,
    run_folder: Path,
    has_baselines: bool = True,
    folder: Path | None = None,
) -> Scores:
    """Score the contender `name` on the held-out text of a run, beside the baselines if they are wanted.

    All ranks of a job call it together and get the same scores. Rank 0 computes the baselines. Pairs that are
    made are written into `folder`, if it is given.
    """
    pairs = read_pairs(Path(path).expanduser()) if (path := recipe.evaluate.minimal_pairs) else []
    heldout, coverage = heldout_documents(run_folder / "tokens")
    texts, stored = [document["text"] for document in heldout], [stored_ids(one) for one in heldout]
    own = load_tokenizer(run_folder / "tokenizer")
    takes_ids = own.whole.to_str() == contender.tokenizer.whole.to_str()
    tokens = contender.encode_documents(texts, stored if takes_ids else ())
    stride = max(1, contender.sequence_length // 2)
    num_bytes = counted_bytes(texts)
    bits_per_byte = token_stream_bits(contender, tokens, stride, contender.counted(tokens)) / num_bytes
    refuse_odd_loss(contender, bits_per_byte)
    settings, samples = recipe.evaluate, []
    how = settings.sample_tokens, settings.temperature, settings.top_k
    for number, prompt in enumerate(settings.prompts or default_prompts(texts)):
        text = generate(contender, prompt, *how, recipe.seed + number)
        samples.append(Sample(prompt=prompt, text=text))
    training: list[str] = []
    baselines, given = NO_BASELINES
    if has_baselines or settings.made_pairs:
        training, given = training_texts(recipe, run_folder)
    if has_baselines:
        order = settings.ngram_order
        baselines = Agreement().on_first(lambda: _baselines(run_folder, own, training, texts, stored, order))
    more: JsonTable = {**coverage, **given}
    more |= score_sentences(contender, recipe, pairs, own, heldout, training, folder)
    documents = DocumentEncoder(recipe, contender.tokenizer, contender.end_of_text_id, takes_ids)
    return Scores(
        model=name,
        bits_per_byte=BitsPerByte(model=bits_per_byte, **baselines),
        sets=_set_scores(contender, documents, run_folder, stride),
        samples=samples,
        sampling=settings.model_dump(include={"temperature", "top_k"}) | {"seed": recipe.seed},
        heldout_bytes=num_bytes - len(texts),
        heldout_documents=len(texts),
        heldout_tokens=len(tokens),
        sequence_length=contender.sequence_length,
        stride=stride,
        convention=CONVENTION,
        **more,
        ngram_order=settings.ngram_order,
    )


def _set_scores(
    contender: Contender, encoder: DocumentEncoder, run_folder: Path, stride: int
) -> list[SetScore]:
    """Score the contender on the held-out text of each source, and on texts from outside the mixture.

    The contender's own chat template lays out conversations; without it they have no score. If a run is
    trained on answers alone, only the bits and bytes of answers count.
    """
    scores = []
    for one, documents in documents_of_sets(run_folder / "tokens"):
        if not contender.has_chat_template and any(messages_of(document) for document in documents):
            continue
        parts, masks, num_bytes = [], [], 0
        for document, encoded in zip(documents, encoder.encode(documents), strict=True):
            first = contender.first_ids if encoded.is_framed else ()
            parts.append(np.array([*first, *encoded.ids, contender.end_of_text_id], np.int64))
            masks += [np.zeros(len(first), bool), encoded.loss_mask]
            with_loss = encoded.bytes_with_loss
            num_bytes += counted_bytes([document["text"]]) if with_loss is None else with_loss
        tokens, counted = np.concatenate(parts), np.concatenate(masks)
        scores.append(
            SetScore(
                name=one.name,
                languages=list(one.languages),
                bits_per_byte=token_stream_bits(contender, tokens, stride, counted) / num_bytes,
                bytes=num_bytes - len(documents),
                documents=len(documents),
            )
        )
    return scores


def _baselines(
    run_folder: Path,
    tokenizer: TextTokenizer,
    training: Sequence[str],
    heldout: Sequence[str],
    stored: Sequence[Sequence[int] | None],
    ngram_order: int,
) -> dict[str, float]:
    """Return the baselines' bits per byte, given training text."""
    training_stream, heldout_stream = byte_stream(training), byte_stream(heldout)
    # The training shards' own counts: the unigram learns from what the model was trained on.
    counts = training_token_counts(run_folder / "tokens", vocabulary_size(tokenizer))
    end = end_of_text_id(tokenizer)
    bits = {
        "unigram": unigram_bits(counts, document_tokens(tokenizer, end, heldout, stored=stored)),
        "xz": xz_bits(training_stream, heldout_stream),
        "ngram": ByteNgram(training_stream, ngram_order).bits(heldout_stream),
    }
    num_bytes = counted_bytes(heldout)
    return {name: value / num_bytes for name, value in bits.items()}
