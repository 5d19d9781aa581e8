"""The tokenizer stage: documents → a byte-level tokenizer in Hugging Face form, with its figures.

A tokenizer is learned from the text, by byte-pair encoding or as a unigram model, or it is ready: as
it is, or extended by tokens of the text (`learn_vocabulary.py`). Without a normaliser each text comes back
exactly, and no character is unknown. A token is part of one word (`spelling.py`).
"""

import logging
import shutil
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from kielo.artifact import manifest
from kielo.artifact.documents import read_documents
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import Manifest
from kielo.artifact.stage_counts import CorpusCounts, TokenizerCounts, TokenizerMeasure
from kielo.artifact.stage_json import counts_of, write_json
from kielo.artifact.trained_text import has_trained, refuse_to_replace
from kielo.artifact.weights_folder import resolve_tokenizer, weights_here
from kielo.recipe.errors import KieloError
from kielo.recipe.sections import Recipe
from kielo.recipe.sections import Tokenizer as TokenizerSection
from kielo.recipe.several_languages import languages_of
from kielo.tokenizer import stage_inputs, trial
from kielo.tokenizer.chat_template import DEFAULT_TEMPLATE, TURN_BEGINS, TURN_ENDS, ChatTemplate
from kielo.tokenizer.control_tokens import read_object
from kielo.tokenizer.learn_vocabulary import extend, learn_stoppably, unigram_tokenizer
from kielo.tokenizer.load import (
    CONFIG_FILE,
    END_OF_TEXT,
    TOKENIZER_FILE,
    TextTokenizer,
    end_of_text_id,
    load_tokenizer,
    side_files,
    tokenizer_hash,
    vocabulary_size,
    write_without_dropout,
)
from kielo.tokenizer.make_row_map import make_row_map
from kielo.tokenizer.measure import measure
from kielo.tokenizer.spelling import LONGEST_WORD, ShortWords, pre_tokenizer
from kielo.tokenizer.stage_inputs import ready_files
from kielo.tokenizer.text_frame import ids_before_texts, refuse_other_frame, write_frame

KIND, VERSION = "tokenizer", 2
logger = logging.getLogger(__name__)
_VERSION_OF_COPIES = 1  # copies of ready tokenizers have not changed since
NUM_BYTES = 256
# Of decoders. Not end-of-text: a trainer that leaves padding out of the loss would leave it out too.
PADDING = "<|padding|>"
MEASURED_BYTES = 2_000_000
# Of encoders: role → token; ids 0 to 4.
ENCODER_TOKENS = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
# Keys of [tokenizer] that manifests of version 1 lack.
_LATER_KEYS = {"extend", "unchanged_sources", "model", "temperature", "reserved_tokens", "bos", "eos"}


def train_tokenizer(recipe: Recipe, corpus_folder: Path, folder: Path) -> Manifest:
    """Train, extend or copy the recipe's tokenizer, and measure it on held-out text.

    Write its files in Hugging Face form, measure.json, row_map.json with model.transplant, and the manifest.
    Keep a folder that is current. KieloError for unusable tokenizers, a small vocabulary, or without text.
    """
    ready = resolve_tokenizer(recipe.tokenizer.ready) if recipe.tokenizer.ready else None
    ready_key = recipe.tokenizer.ready_key
    section = {**_settings(recipe), "heldout_share": recipe.dataset.heldout_share}
    if marks := _marks(recipe):
        section["chat_tokens"] = marks
    if roles := _encoder_tokens(recipe):
        section["encoder_tokens"] = roles
    has_corpus = bool(recipe.corpus.of_raw_text.sources)
    inputs = {"corpus": manifest.hash_manifest(corpus_folder)} if has_corpus else {}
    if ready:
        inputs |= {path.name: manifest.hash_file(path) for path in ready_files(ready, ready_key)}
    of_weights = stage_inputs.tokenizer_of_weights(recipe)
    vectors = stage_inputs.transplant_vectors(recipe)
    if of_weights:
        section["transplant"] = recipe.model.transplant
        if vectors:
            inputs["model.transplant_vectors"] = manifest.hash_file(vectors)
        inputs["tokenizer of model.weights"] = tokenizer_hash(of_weights)
    version = _version(recipe, folder)
    if manifest.is_current(folder, KIND, version, inputs, section):
        return manifest.finished_manifest(folder)
    refuse_to_replace(folder, KIND, version, inputs, section)
    if ready:
        trial.try_tokenizer(ready / TOKENIZER_FILE, ready_key)
    if of_weights:
        trial.try_tokenizer(of_weights / TOKENIZER_FILE, "model.weights")
    if ready and _has_chats(recipe):
        ChatTemplate(load_tokenizer(ready))  # refuses a tokenizer without a template before packing
    with manifest.write_stage(folder, KIND, version, inputs, section) as stage:
        if ready:
            # No inputs of the stage: they change no token, and folders without them stay current.
            beside = side_files(ready, has_same_vocabulary=not recipe.tokenizer.extend)
            for name in [*(path.name for path in ready_files(ready, ready_key)), *beside]:
                (stage.folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(ready / name, stage.folder / name)
            if write_without_dropout(stage.folder):
                what = "has dropout, which gives a text different ids each time. This run turns it off"
                logger.warning("%s %s", ready / TOKENIZER_FILE, what)
            if recipe.tokenizer.extend:
                _extend(recipe, corpus_folder, load_tokenizer(ready), stage.folder)
        else:
            learnt = train_on(TrainingSample(recipe, corpus_folder), recipe)
            template = DEFAULT_TEMPLATE if marks else None
            save(learnt, stage.folder, template, roles, recipe.tokenizer.reserved_tokens)
        write_frame(stage.folder, recipe.tokenizer.bos, recipe.tokenizer.eos)
        tokenizer = load_tokenizer(stage.folder)
        refuse_other_frame(recipe, tokenizer)
        texts: Iterable[str]
        if has_corpus:
            measured_on, texts = texts_to_measure(recipe, corpus_folder)
        else:
            measured_on = "decoded documents of the token files"
            texts = stage_inputs.decoded_documents(recipe, tokenizer, MEASURED_BYTES)
        figures = {"measured_on": measured_on, "end_of_text_id": end_of_text_id(tokenizer)}
        measured = TokenizerMeasure.model_validate(figures | measure(tokenizer, texts))
        write_json(stage.folder, measured)
        if ready:
            _check_ready(recipe, tokenizer, texts if has_corpus else ())
        if of_weights and (method := recipe.model.transplant) is not None:
            write_json(stage.folder, make_row_map(load_tokenizer(of_weights), tokenizer, method, vectors))
        before = list(ids_before_texts(tokenizer))
        more = TokenizerCounts(largest_id=vocabulary_size(tokenizer) - 1, ids_before_texts=before)
        stage.counts.update(measured.content() | more.content())
    return manifest.finished_manifest(folder)


def train_on(texts: Iterable[str], recipe: Recipe) -> Tokenizer:
    """Learn a vocabulary. The same texts give the same merges. texts: read several times, so no iterator.

    Ids: end-of-text (of encoders their five tokens), the two marks of chats if a source has instructions,
    reserved tokens, padding (of decoders), the bytes. Raises KieloError for a vocabulary that is too small,
    or without text.
    """
    wanted, reserved = recipe.tokenizer.vocab_size, recipe.tokenizer.reserved_tokens
    marks, roles = _marks(recipe), _encoder_tokens(recipe)
    first, last = (roles.values(), ()) if roles else ([END_OF_TEXT], [PADDING])
    control = list(dict.fromkeys([*first, *marks, *reserved, *last]))
    if wanted < NUM_BYTES + len(control):
        others = " and the marks of chats" * bool(marks) + " and reserved tokens" * bool(reserved)
        end = f"{len(roles)} tokens of encoders" if roles else "end-of-text, padding"
        raise KieloError(
            f"tokenizer.vocab_size = {wanted}: a byte-level vocabulary needs at least "
            f"{NUM_BYTES + len(control)} ({NUM_BYTES} bytes and {end}{others})"
        )
    if next(iter(texts), None) is None:
        raise KieloError(
            "no training text to learn a vocabulary from. Fix: more text (funnel.json has what was dropped)"
        )
    # The space before a word is in its token, so the mask token takes the space in: "a [MASK] b" has the ids
    # of training, in which a mask token stands for the space and the word.
    mask = roles.get("mask_token")
    added = [AddedToken(name, special=True, lstrip=name == mask) for name in control]
    words, is_unigram = ShortWords(texts), recipe.tokenizer.model == "unigram"
    tokenizer = (
        unigram_tokenizer(words, wanted, added) if is_unigram else _bpe(words, recipe.tokenizer, added)
    )
    if words.cut_bytes:
        print(
            f"tokenizer: {words.cut_bytes:,} bytes of the sample are words of more than {LONGEST_WORD} "
            "characters. Tokens were learned from pieces of these words",
            file=sys.stderr,
        )
    if roles:
        begin, end = roles["cls_token"], roles["sep_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A {end}",
            pair=f"{begin} $A {end} $B:1 {end}:1",
            special_tokens=[(name, tokenizer.token_to_id(name)) for name in (begin, end)],
        )
    return tokenizer


def _bpe(texts: Iterable[str], settings: TokenizerSection, control: list[AddedToken]) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        min_frequency=settings.min_frequency,
        special_tokens=control,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learn_stoppably(tokenizer, texts, trainer)
    return tokenizer


def save(
    tokenizer: Tokenizer,
    folder: Path,
    chat_template: str | None = None,
    encoder_tokens: Mapping[str, str] | None = None,  # role → token
    reserved_tokens: Sequence[str] = (),
) -> None:
    """Write the tokenizer so that `transformers.AutoTokenizer.from_pretrained` gives the same ids."""
    # As in GPT-2 the unknown token is end-of-text: no text needs it, and converters ask for its name.
    tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END_OF_TEXT)
    if tokenizer.token_to_id(PADDING) is not None:
        tokens["pad_token"] = PADDING
    if encoder_tokens:
        ends = {"bos_token": encoder_tokens["cls_token"], "eos_token": encoder_tokens["sep_token"]}
        tokens = ends | dict(encoder_tokens)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,  # would change " ," to "," when decoding
        # transformers 4 adds token_type_ids by default, which most models refuse.
        "model_input_names": ["input_ids", "attention_mask"],
        **tokens,
    }
    marks = [] if chat_template is None else [TURN_BEGINS, TURN_ENDS]
    if chat_template is not None:
        config["chat_template"] = chat_template
    if others := list(dict.fromkeys([*marks, *reserved_tokens])):
        config["additional_special_tokens"] = others
    folder.mkdir(parents=True, exist_ok=True)
    # Not `tokenizer.save`, whose error on a full disk names neither the reason nor the file.
    manifest.write_text_atomically(folder / TOKENIZER_FILE, tokenizer.to_str(pretty=True))
    manifest.write_json_atomically(folder / CONFIG_FILE, config)
    manifest.write_json_atomically(folder / "special_tokens_map.json", tokens)


def _version(recipe: Recipe, folder: Path) -> int:
    """Return the version of the stage's output. A run that has trained keeps its older tokenizer."""
    is_copy, made = recipe.tokenizer.ready and not recipe.tokenizer.extend, manifest.read_manifest(folder)
    version = _VERSION_OF_COPIES if is_copy else VERSION
    return min(made.version, version) if made and has_trained(folder.parent) else version


def _settings(recipe: Recipe) -> JsonTable:
    given, fields = recipe.tokenizer.model_dump(), TokenizerSection.model_fields
    del given["max_unknown_share"]  # it changes no token
    as_before = {key for key in _LATER_KEYS if given[key] == fields[key].default}
    return {key: value for key, value in given.items() if key not in as_before}


def _extend(recipe: Recipe, corpus_folder: Path, ready: TextTokenizer, folder: Path) -> None:
    unchanged = set(recipe.tokenizer.unchanged_sources)
    extended = extend(
        ready,
        TrainingSample(recipe, corpus_folder, {one.name for one in recipe.corpus.sources} - unchanged),
        recipe.tokenizer.vocab_size,
        recipe.tokenizer.min_frequency,
        TrainingSample(recipe, corpus_folder, unchanged) if unchanged else (),
    )
    manifest.write_text_atomically(folder / TOKENIZER_FILE, extended.to_str(pretty=True))
    # A class that transformers has for a model may read the original vocabulary instead.
    config = read_object(folder / CONFIG_FILE) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    manifest.write_json_atomically(folder / CONFIG_FILE, config)


def _encoder_tokens(recipe: Recipe) -> dict[str, str]:
    is_own = recipe.train.objective == "masked_tokens" and not recipe.tokenizer.ready
    return ENCODER_TOKENS if is_own else {}


def _marks(recipe: Recipe) -> list[str]:
    return [TURN_BEGINS, TURN_ENDS] if _has_chats(recipe) and not recipe.tokenizer.ready else []


def _check_ready(recipe: Recipe, tokenizer: TextTokenizer, texts: Iterable[str]) -> None:
    """Refuse a ready tokenizer that loses text (an encoder's may), or of other weights if they are here."""
    key = f"{recipe.tokenizer.ready_key} = {recipe.tokenizer.ready!r}"
    if unknown := trial.find_unknown(tokenizer, texts):
        print(f"tokenizer: {unknown.sentence()}", file=sys.stderr)
    if recipe.train.objective != "masked_tokens":
        trial.refuse_lossy(tokenizer, texts, key)
        if unknown:
            trial.refuse_unknown(unknown, recipe.tokenizer.max_unknown_share, key)
    weights = recipe.model.weights and weights_here(recipe.model.weights)
    if weights and recipe.model.transplant is None:
        trial.refuse_other_vocabulary(tokenizer.folder, weights, key)
        for doubt in trial.doubts_about_weights(tokenizer, weights):
            logger.warning(doubt)


def _has_chats(recipe: Recipe) -> bool:
    return any(source.kind == "instructions" for source in recipe.corpus.sources)


@dataclass(frozen=True)
class TrainingSample:
    """The training documents of `sources` (None: of all) to learn from, which can be read several times.

    They have about max_sample_bytes, chosen by a hash from the whole of each source. tokenizer.temperature
    changes the shares of languages. Documents of a language with too little text count more than once.
    """

    recipe: Recipe
    corpus_folder: Path
    sources: Collection[str] | None = None

    def __iter__(self) -> Iterator[str]:
        share = self.recipe.dataset.heldout_share
        rates = self.rates()
        sources = rates.keys() if self.sources is None else self.sources
        for document in read_documents(self.corpus_folder / "documents"):
            if document["source"] not in sources:
                continue
            place = stage_inputs.place_by_hash(document["text"])
            whole, rest = divmod(rates[document["source"]], 1)
            if place >= share:
                for _ in range(int(whole) + (place < share + (1 - share) * rest)):
                    yield document["text"]

    def rates(self) -> dict[str, float]:
        """Return source → how many times a document of it is in the sample, on average."""
        counts = counts_of(self.corpus_folder, manifest.finished_manifest(self.corpus_folder), CorpusCounts)
        kept_bytes, settings = counts.bytes_kept or 0, self.recipe.tokenizer
        sample_bytes = min(settings.max_sample_bytes, kept_bytes)
        languages = {source.name: languages_of(self.recipe, source) for source in self.recipe.corpus.sources}
        if settings.temperature == 1:
            # All text if the manifest lacks its size.
            return dict.fromkeys(languages, min(1.0, settings.max_sample_bytes / max(kept_bytes, 1)))
        of_language = Counter[tuple[str, ...]]()
        for source in counts.sources:
            of_language[languages[source.name]] += source.bytes_kept
        shares = {code: size ** (1 / settings.temperature) for code, size in of_language.items()}
        all_shares = sum(shares.values())
        return {
            name: sample_bytes * shares[code] / all_shares / of_language[code]
            for name, code in languages.items()
            if of_language[code]
        }


def texts_to_measure(recipe: Recipe, corpus_folder: Path) -> tuple[str, list[str]]:
    """Return held-out texts up to 2 MB, or training texts if nothing is held out, which pack will refuse."""
    texts: dict[bool, list[str]] = {True: [], False: []}  # by whether they are held out
    sizes = Counter[bool]()
    for document in read_documents(corpus_folder / "documents"):
        which = stage_inputs.is_heldout(document["text"], recipe.dataset.heldout_share)
        if sizes[which] < MEASURED_BYTES:
            texts[which].append(document["text"])
            sizes[which] += len(document["text"].encode())
        elif which:
            break
    return ("held-out documents", texts[True]) if texts[True] else ("training documents", texts[False])


def unfilled_vocabulary(recipe: Recipe, made: Manifest) -> str:
    """Return what to set if the text gave fewer tokens than asked for, or "". made: the stage's manifest."""
    largest = TokenizerCounts.model_validate(made.counts).largest_id
    asked, size = recipe.tokenizer, (largest or 0) + 1
    if asked.path is not None or size >= asked.vocab_size:
        return ""
    too_rare = f"no other pair occurs {asked.min_frequency} times (tokenizer.min_frequency)"
    why = "no other piece occurs in two words" if asked.model == "unigram" else too_rare
    return (
        f"the text gives {size:,} of the {asked.vocab_size:,} tokens of tokenizer.vocab_size, and the model "
        f"has as many: {why}. Fix: tokenizer.vocab_size = {size} (then `kielo show` and plans count this "
        "model), or more text"
    )
