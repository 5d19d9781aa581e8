"""The settings of generation that weights come with: read at the import, kept in checkpoints, exported.

They are generation_config.json's, or config.json's. Each token id becomes the run's tokenizer's id.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kielo.artifact.checkpoint_index import PlainState
from kielo.artifact.json_object import JsonTable
from kielo.artifact.manifest import hash_file
from kielo.artifact.weights_folder import CONFIG_FILE, weights_here
from kielo.recipe.errors import KieloError
from kielo.tokenizer.chat_template import end_of_answers
from kielo.tokenizer.control_tokens import read_object
from kielo.tokenizer.load import TOKENIZER_FILE, load_tokenizer

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
_ROLES = ("bos_token_id", "eos_token_id", "pad_token_id")
# What transformers reads in config.json if there is no generation_config.json.
_OF_CONFIG = (*_ROLES, "do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "use_cache")
_TOKEN_LISTS = ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "force_words_ids")
# Keys of transformers' files by which it would read config.json in place of the file.
_NOT_KEPT = ("_from_model_config", "_commit_hash")
NewId = Callable[[int], tuple[int | None, str | None]]  # id in the source → the run's id, the token's name


def read_settings(source: Path, tokenizer_folder: Path | None) -> JsonTable:
    """Read the settings of the weights in the folder `source`, with ids of the tokenizer in another folder.

    Return {"generation": keys of generation_config.json, "config": the ids of config.json, "left_out":
    settings without a token in the tokenizer, in words}. Without `tokenizer_folder` ids stay.
    """
    config = read_object(source / CONFIG_FILE)
    generation = {key: config[key] for key in _OF_CONFIG if config.get(key) is not None}
    if (source / GENERATION_FILE).is_file():
        generation = read_object(source / GENERATION_FILE)
    generation = {key: value for key, value in generation.items() if key not in _NOT_KEPT}
    ids = {key: config[key] for key in _ROLES if config.get(key) is not None}
    new_id, left_out = _renumbering(source, tokenizer_folder), list[str]()
    kept = {"generation": _renumbered(generation, new_id, left_out), "config": _renumbered(ids, new_id, [])}
    return kept | {"left_out": left_out}


def settings_of_checkpoint(plain: PlainState, tokenizer_folder: Path | None) -> JsonTable:
    """Return the settings that a checkpoint keeps, or an older one's weights have, or {} without weights."""
    kept, weights = plain.source_settings, plain.identity.get("model", {}).get("weights")
    if kept is None and weights:
        folder = weights_here(weights)
        kept = None if folder is None else read_settings(folder, tokenizer_folder)
        if kept is None:
            logger.warning(
                f"{weights} no longer exists, and this checkpoint of an earlier Kielo does not keep its "
                f"{GENERATION_FILE}. The export has the tokenizer's end tokens and no settings for sampling. "
                "Fix: bring the folder back and export again"
            )
    for one in (kept or {}).get("left_out", ()):
        logger.warning("%s of %s: %s, so the export leaves it out", GENERATION_FILE, weights, one)
    return kept or {}


def generation_config(
    settings: Mapping[str, Any], roles: Mapping[str, int | None], tokenizer_folder: Path | None
) -> JsonTable:
    """Return generation_config.json of an export: the source's, or `roles`, with all end tokens."""
    generation = settings.get("generation") or dict(roles)
    ends = generation.get("eos_token_id")
    ends = list(ends) if isinstance(ends, list) else [] if ends is None else [ends]
    for end in (roles["eos_token_id"], _end_of_answers(tokenizer_folder)):
        ends += [end] if end is not None and end not in ends else []
    is_one = len(ends) == 1 and not isinstance(generation.get("eos_token_id"), list)
    return dict(generation) | ({"eos_token_id": ends[0] if is_one else ends} if ends else {})


def _end_of_answers(folder: Path | None) -> int | None:
    if folder is None or not (folder / TOKENIZER_FILE).is_file():
        return None
    try:
        return end_of_answers(load_tokenizer(folder))
    except KieloError as error:
        logger.warning("the export may lack the end token of answers: %s", error)
        return None


def _renumbering(source: Path, folder: Path | None) -> NewId:
    """Return a function: id in the source → (id of that token in the tokenizer of `folder`, its name)."""
    files = [one / TOKENIZER_FILE for one in (source, folder or source)]
    if not all(file.is_file() for file in files) or hash_file(files[0]) == hash_file(files[1]):
        return lambda number: (number, None)
    theirs, ours = (load_tokenizer(one).whole for one in (source, folder or source))

    def new_id(number: int) -> tuple[int | None, str | None]:
        name = theirs.id_to_token(number)
        if name == ours.id_to_token(number):
            return number, name
        return None if name is None else ours.token_to_id(name), name

    return new_id


def _renumbered(settings: Mapping[str, Any], new_id: NewId, left_out: list[str]) -> JsonTable:
    renumbered = {}
    for key, value in settings.items():
        if key == "sequence_bias" and isinstance(value, list):  # of [ids, bias]
            entries = [(_ids(key, ids, new_id, left_out), bias) for ids, bias in value]
            value = [[ids, bias] for ids, bias in entries if ids is not None]
        elif key.endswith("_token_id") or key in _TOKEN_LISTS:
            is_list = isinstance(value, list)
            found = [_ids(key, one, new_id, left_out) for one in (value if is_list else [value])]
            value = [one for one in found if one is not None] if is_list else found[0]
        renumbered[key] = value
    return renumbered


def _ids(key: str, value: Any, new_id: Callable[..., Any], left_out: list[str]) -> Any:
    """Return an id or a list of ids, renumbered, or None if the tokenizer lacks one of their tokens."""
    if isinstance(value, list):
        found = [_ids(key, one, new_id, left_out) for one in value]
        return None if None in found else found
    if not isinstance(value, int):
        return value
    number, name = new_id(value)
    if number is None:
        left_out.append(f"{key} {value}{f' ({name})' if name else ''} is no token of the run's tokenizer")
    return number
