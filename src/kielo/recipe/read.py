"""Reads a recipe: TOML, one level of `extends`, a variant, `--set`. A path or shipped name → a checked
`Recipe`.

Relative paths inside a recipe start at the folder in which `kielo` is started. A run folder's recipe records
it (`write_run_recipe`).
"""

import codecs
import copy
import difflib
import glob
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from pydantic import ValidationError

from kielo.recipe.cards import language_code
from kielo.recipe.check import check
from kielo.recipe.complaints import Complaint, dotted, field_of, from_validation, keys_of, refuse
from kielo.recipe.errors import KieloError
from kielo.recipe.places import place, without_form
from kielo.recipe.sections import SHAPE_KEYS, Recipe
from kielo.recipe.several_languages import KEY as LANGUAGES
from kielo.recipe.several_languages import PLACE, codes_of, filled, of_language
from kielo.recipe.toml_text import TomlTable
from kielo.recipe.variants import CHOICE, chosen_variant, is_choice, variants_of
from kielo.recipe.variants import KEY as VARIANTS
from kielo.recipe.variants import PLACE as VARIANT_PLACE

# Folders of a run that stages replace as a whole. `train` is filled in place, and `raw` can hold a person's
# text.
REPLACED_FOLDERS = ("corpus", "tokenizer", "tokens", "verify", "evaluate", "hf")
# Of the longest name in a run folder, a temporary file of a checkpoint, with room to spare.
_BYTES_BELOW = 128
RUN_RECIPE_NAME = "recipe.toml"  # in a run folder; `kielo run` writes it
WRITTEN = "# The recipe of this "  # begins a line of recipes that Kielo writes
NOT_GIVEN = "not given"  # origin of a value that stands in for a missing value
_VARIANT = ", variant "  # of the origin of a variant's values, before its name
_AS_A_WHOLE = "`kielo run`, `plan`, `launch` and `status` take it as a whole"
_SHIPPED = Path(__file__).resolve().parent.parent / "recipes"
_TEXT = re.compile(r"\.(txt|jsonl|tsv|csv|html?|parquet)(\.gz|\.zst)?$", re.IGNORECASE)
# In place of required values that are missing or broken, so that the rest can still be checked.
_STAND_INS: TomlTable = {"name": "stand_in", "language": "et", "corpus": {"sources": ["stand_in.txt"]}}


@dataclass(frozen=True)
class Read:
    """A recipe, and the origin of each dotted key: "default", a file, "--set", or `NOT_GIVEN`."""

    recipe: Recipe
    origins: dict[str, str]


def read_recipe(
    reference: str | Path | None,
    sets: Sequence[str] = (),
    stand_ins: Mapping[str, Any] | None = None,
    fill: Callable[[Recipe], Recipe] | None = None,
) -> Read:
    """Read, overlay and check a recipe.

    reference: a path, the name of a shipped recipe, or a run folder, None for `sets` alone. sets:
    "section.key=value", the value in TOML, or plain text if it is no TOML or the key wants text. stand_ins:
    values of keys that neither has. fill: completes a recipe with such values for its checks. Raise
    KieloError with all complaints, and for a recipe of several runs (`recipe_choices`) if `sets` chooses
    none.
    """
    label, data, origins, complaints = _values(reference, sets)
    try:
        if names := variants_of(data, label):
            raise KieloError(
                f"{label}: a recipe of {len(names)} variants, and none is chosen. {_AS_A_WHOLE}. Fix: --set "
                f"{CHOICE}={names[0]}"
            )
        codes = codes_of(data, label)
        code = data.get("language")
        if codes and code not in codes:
            chosen = f"{code} is none of them" if code else "none is chosen"
            raise KieloError(
                f"{label}: a recipe of {len(codes)} languages, and {chosen}. {_AS_A_WHOLE}. Fix: --set "
                f"language={codes[0]}"
            )
        data = of_language(data, str(code), codes) if codes else data
        for key, value in (stand_ins or {}).items():
            if key not in data:
                data[key] = value
                origins |= dict.fromkeys(_leaves({key: value}), NOT_GIVEN)
        if isinstance(data.get("language"), str):
            data = filled(data, PLACE, language_code(data["language"]))
        fill = fill if NOT_GIVEN in origins.values() else None
        recipe, found = _validate(data, origins, label, fill)
    except RecursionError:
        raise _too_deep(label) from None
    refuse(label, complaints + found)
    assert recipe is not None
    known = list(keys_of(Recipe))
    sections = {key.rpartition(".")[0] for key in known}
    inside = _of_tables(origins)
    return Read(
        recipe, {key: _origin(key, origins, inside, "default") for key in known if key not in sections}
    )


def recipe_choices(reference: str | Path | None, sets: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the texts for `sets` that choose the runs of a recipe of several: "language=et", "variant=13b".

    () for a recipe of one run, and if `sets` has chosen.
    """
    label, data, _, _ = _values(reference, sets)
    if names := variants_of(data, label):
        return tuple(f"{CHOICE}={name}" for name in names)
    codes = codes_of(data, label)
    return () if data.get("language") in codes else tuple(f"language={code}" for code in codes)


def read_first_language(reference: str | Path, sets: Sequence[str] = ()) -> Read:
    """Read a recipe as `read_recipe` does; of a recipe of several runs, the first language or variant."""
    return read_recipe(reference, [*sets, *recipe_choices(reference, sets)[:1]])


def _values(
    reference: str | Path | None, sets: Sequence[str]
) -> tuple[str, TomlTable, dict[str, str], list[Complaint]]:
    """Return the recipe's name for messages, its values, their origins, and what is wrong with `sets`."""
    path, variant = (None, "") if reference is None else _find(str(reference))
    label = "--set" if path is None else _label(path)
    try:
        data, origins = ({}, {}) if path is None else _with_base(path)
        if reference is not None and os.path.isdir(reference):  # it may have been moved
            data["folder"], origins["folder"] = str(reference), label
        chosen = chosen_variant(sets)
        if variant and chosen not in (None, variant):
            raise KieloError(
                f"{reference} is variant {variant} already: {CHOICE} = {chosen}. Fix: leave it out"
            )
        data = _of_variant(data, origins, label, variant or chosen)
        of_keys = [text for text in sets if not is_choice(text)]
        complaints = [found for text in of_keys if (found := _apply_set(text, data, origins))]
        return label, data, origins, complaints + _two_layouts(of_keys, origins)
    except RecursionError:
        raise _too_deep(label) from None


def _too_deep(label: str) -> KieloError:
    return KieloError(f"{label} or --set: tables are nested too deep. Fix: at most two levels")


def _of_variant(data: TomlTable, origins: dict[str, str], label: str, name: str | None) -> TomlTable:
    """Return the values with variant `name` over them; without a name, as they are."""
    names = variants_of(data, label)
    if name is None:
        return data
    if name not in names:
        fix = f"{CHOICE}={names[0]}" if names else "leave it out"
        raise KieloError(f"{CHOICE} = {name}: {label} has {', '.join(names) or 'no variants'}. Fix: {fix}")
    below, own = {key: value for key, value in data.items() if key != VARIANTS}, data[VARIANTS][name]
    _replace_shape(_leaves(own), below, origins)
    _replace_layouts([*own, *_leaves(own)], below)
    origins |= dict.fromkeys(_leaves(own), f"{label}{_VARIANT}{name}")
    return filled(_overlay(below, own), VARIANT_PLACE, name)


def shipped_recipes() -> dict[str, Path]:
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.toml"))}


def is_shipped(reference: str) -> bool:
    """Return True for the name of a shipped recipe or of its variant."""
    return _shipped(reference) is not None


def _shipped(reference: str) -> tuple[Path, str] | None:
    """Return the file and the variant of a shipped name, "" for no variant."""
    shipped = shipped_recipes()
    if reference.endswith(".toml") or "/" in reference:
        return None
    if reference in shipped:
        return shipped[reference], ""
    for name, path in shipped.items():
        variant = reference.removeprefix(f"{name}_")
        if variant != reference and variant in read_toml(path).get(VARIANTS, {}):
            return path, variant
    return None


def run_folder(recipe: Recipe) -> Path:
    """Return the run folder, which need not exist yet.

    Raises KieloError if it cannot be a folder that holds Kielo's files, and if text, a tokenizer or weights
    of the recipe lie in a folder of the run that a stage replaces.
    """
    folder = place(recipe.folder or f"runs/{recipe.name}")
    num_bytes, most = len(os.fsencode(os.path.abspath(folder))), os.pathconf("/", "PC_PATH_MAX") - 1
    if num_bytes + _BYTES_BELOW > most:
        raise KieloError(
            f"folder: the path of the run folder has {num_bytes:,} bytes, and its files need {_BYTES_BELOW} "
            f"more, but the system allows {most:,}. Fix: a shorter `folder`; nothing was written"
        )
    for above in (folder, *folder.parents):
        if above.is_symlink() and not os.path.exists(above):
            raise KieloError(
                f"folder = {str(folder)!r}: {above} is a symbolic link to {os.readlink(above)}, which does "
                "not exist. Is its disk mounted? Fix: make that folder, or remove the link"
            )
        if os.path.exists(above):
            if not os.path.isdir(above):
                raise KieloError(
                    f"folder = {str(folder)!r}: {above} is a file. Fix: move it, or name another folder"
                )
            break
    given = {
        f"corpus.sources, {source.name}": source.local_path or source.tokens
        for source in recipe.corpus.sources
    }
    given |= {recipe.tokenizer.ready_key: recipe.tokenizer.ready, "model.weights": recipe.model.weights}
    for key, value in given.items():
        path = value and os.path.realpath(os.path.expanduser(_without_pattern(without_form(value))))
        for stage in REPLACED_FOLDERS:
            if path and Path(path).is_relative_to(os.path.realpath(folder / stage)):
                raise KieloError(
                    f"{key} = {value!r}: is in {folder / stage}, a folder of this run that Kielo replaces. "
                    "Fix: move it out of there, or give the run another `folder`; nothing was changed"
                )
    return folder


def _without_pattern(path: str) -> str:
    begin = re.search(r"[*?[]", path)
    return os.path.dirname(path[: begin.start()]) if begin else path


def read_toml(path: Path) -> TomlTable:
    """Return the file's content. Raises KieloError with the file, line and column that is not TOML."""
    try:
        # Editors on Windows begin files with a byte-order mark.
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise KieloError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        is_utf16 = path.read_bytes()[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        encoding = "UTF-16" if is_utf16 else "LATIN1"
        fix = _fix(path, f"iconv -f {encoding} -t UTF-8 {path} > converted.toml")
        raise KieloError(f"{path}: byte {error.start} is not UTF-8, which TOML requires. {fix}") from None
    # ValueError: TOMLDecodeError, and numbers of thousands of digits
    except (ValueError, RecursionError) as error:
        fix = _fix(path, "a line for each key = value, with text in quotes")
        raise KieloError(f"{path}: not valid TOML: {error}. {fix}") from None


def _fix(path: Path, fix: str) -> str:
    """Return the fix for a file that is no TOML. A file of text is named in a recipe."""
    return (
        f"Fix: kielo run own_text --set corpus.sources={path}" if _TEXT.search(path.name) else f"Fix: {fix}"
    )


def find_recipe(reference: str, beside: Path | None = None) -> Path:
    """Return the file of a path, a shipped name or a run folder. Paths start at `beside`, if it is given."""
    return _find(reference, beside)[0]


def _find(reference: str, beside: Path | None = None) -> tuple[Path, str]:
    """Return the file, as `find_recipe` does, and the variant that a shipped name chooses, or ""."""
    if (found := _shipped(reference)) is not None:
        return found
    shipped, path = shipped_recipes(), (beside or Path()) / reference
    if path.is_file():
        return path, ""
    if path.is_dir():
        if (path / RUN_RECIPE_NAME).is_file():
            return path / RUN_RECIPE_NAME, ""
        run = next((folder for folder in path.parents if (folder / RUN_RECIPE_NAME).is_file()), None)
        raise KieloError(
            f"{path}: a folder without {RUN_RECIPE_NAME}, which `kielo run` writes into its run folder. "
            + (f"Did you mean {run}?" if run else "Fix: the recipe that it was made from")
        )
    if reference.startswith(("hf:", "megatron:")):
        raise KieloError(
            f"{reference}: names weights, not a recipe. Fix: a recipe with --set model.weights={reference}"
        )
    near = difflib.get_close_matches(Path(reference).stem, shipped, n=1)
    meant = _on_quotes(reference) or (f"; did you mean {near[0]}?" if near else "")
    raise KieloError(f"{path}: no such recipe file, and no shipped recipe ({', '.join(shipped)}){meant}")


def _label(path: Path) -> str:
    return path.name if path.parent == _SHIPPED else str(path)


def _with_base(path: Path) -> tuple[TomlTable, dict[str, str]]:
    """Return the values of a file over its base recipe's, and the origin of each key."""
    data = read_toml(path)
    if _is_written(str(path)):
        _leave_out(data, ("train", "max_left_out_sequences"))  # of format version 2: such runs continue
        dataset = data.get("dataset")
        if isinstance(dataset, dict) and dataset.get("mixture_order") == "every_sample":  # now every run's
            del dataset["mixture_order"]
    if {"language", LANGUAGES} <= set(data):
        raise KieloError(f"{path}: has both language and {LANGUAGES}. Fix: one of them")
    base_reference = data.pop("extends", None)
    if base_reference is None:
        return data, dict.fromkeys(_leaves(data), _label(path))
    if not isinstance(base_reference, str) or not base_reference:
        raise KieloError(f"{path}: extends = {base_reference!r} does not fit. Fix: a path or shipped name")
    base_path, variant = _find(base_reference, beside=path.parent)
    base = read_toml(base_path)
    if "extends" in base:
        raise KieloError(
            f"{path}: extends {base_path}, which itself extends {base['extends']!r}; a single level is "
            f"allowed. Fix: extends = {base['extends']!r}, or copy the values"
        )
    of_base = dict.fromkeys(_leaves(base), _label(base_path))
    if variant:
        base = _of_variant(base, of_base, _label(base_path), variant)
    own = dict.fromkeys(_leaves(data), _label(path))
    _replace_shape(own, base)
    _replace_layouts([*data, *own], base)
    for name, inherited in _variant_tables(base).items():
        for over in (data, _variant_tables(data).get(name, {})):
            _yield_to(over, inherited)
    for key, other in (("language", LANGUAGES), (LANGUAGES, "language")):
        if key in data:
            base.pop(other, None)
    above = {leaf.rsplit(".", depth)[0] for leaf in own for depth in range(1, leaf.count(".") + 1)}
    kept = [leaf for leaf in _leaves(base) if leaf not in above]
    origins = {leaf: of_base.get(leaf, _label(base_path)) for leaf in kept} | own
    return _overlay(base, data), origins


def _variant_tables(data: TomlTable) -> dict[str, TomlTable]:
    """Return the tables of the recipe's variants. `variants_of` refuses other values."""
    tables = data.get(VARIANTS)
    found = tables.items() if isinstance(tables, dict) else ()
    return {name: own for name, own in found if isinstance(own, dict)}


def _yield_to(over: TomlTable, inherited: TomlTable) -> None:
    """Remove the values of a base recipe's variant that the recipe `over` gives itself."""
    given = _leaves(over)
    _replace_shape(given, inherited)
    _replace_layouts([*over, *given], inherited)
    for leaf in given:
        _leave_out(inherited, leaf.split("."))
    if "layouts" in over and "layout" in inherited:  # which would otherwise replace them
        inherited["layouts"] = over["layouts"]


def _overlay(base: TomlTable, over: TomlTable) -> TomlTable:
    """Join tables, and replace anything else, lists too."""
    joined = dict(base)
    for key, value in over.items():
        both_tables = isinstance(value, dict) and isinstance(base.get(key), dict)
        joined[key] = _overlay(base[key], value) if both_tables else value
    return joined


def _apply_set(text: str, data: TomlTable, origins: dict[str, str]) -> Complaint | None:
    key, equals, raw = text.partition("=")
    key = key.strip()
    parts = key.split(".")
    # Python's substitutes for bytes that are no text
    if not text.isprintable() and "\udc80" <= max(text) <= "\udcff":
        return Complaint((key,), f"--set {text!a}: is not UTF-8. Fix: a terminal with a UTF-8 locale")
    if quotes := _on_quotes(key):
        return Complaint((key,), f"--set {text}: {quotes.removeprefix('; ')}")
    if not equals or not all(parts):
        return Complaint(
            (key,), f"--set {text}: not KEY=VALUE. Fix: section.key=value, e.g. --set train.tokens=1000000"
        )
    if parts[0] == VARIANTS:
        choice = (
            f"--set {CHOICE}={parts[1]} --set {'.'.join(parts[2:])}={raw}"
            if parts[2:]
            else "a recipe with it"
        )
        raise KieloError(f"--set {text}: {VARIANTS} are a recipe's own. Fix: {choice}")
    table: Any = data
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return Complaint((key,), f"--set {text}: {part} holds a value, so {key} does not exist")
    if origins.get(key) != "--set":
        _replace_shape([key], data, origins)
    value = _value(raw.strip(), parts)
    if isinstance(value, str) and str not in _accepted(parts) and _is_broken_toml(value):
        return Complaint(
            (key,),
            f"--set {text}: not valid TOML. Fix: single quotes around KEY=VALUE and double quotes around each"
            """ text in it, e.g. --set 'corpus.sources=[{path="my_text.txt"}]'""",
        )
    if origins.get("layouts") != "--set":
        _replace_layouts([key, *_leaves({key: value})], data, origins)
    if key == LANGUAGES and origins.get("language") != "--set":
        data.pop("language", None)
    for own in _variant_tables(data).values():
        _leave_out(own, parts)
    table[parts[-1]] = value
    origins[key] = "--set"
    return None


def _replace_layouts(given: Sequence[str], below: TomlTable, origins: dict[str, str] | None = None) -> None:
    """Remove the `layouts` of `below`, or their micro-batches, if one of the `given` keys replaces them."""
    if any(key in ("layout", "layouts") or key.startswith("layout.") for key in given):
        below.pop("layouts", None)
        (origins or {}).pop("layouts", None)
    elif "train.micro_batch_sequences" in given and isinstance(below.get("layouts"), list):
        for entry in below["layouts"]:
            if isinstance(entry, dict):
                entry.pop("micro_batch_sequences", None)


def _two_layouts(sets: Sequence[str], origins: dict[str, str]) -> list[Complaint]:
    """Return a complaint if --set gives both `layouts` and `layout`."""
    keys = [text.partition("=")[0].strip() for text in sets]
    layout = next((key for key in keys if key == "layout" or key.startswith("layout.")), None)
    if layout is None or origins.get("layouts") != "--set":
        return []
    return [Complaint(("layouts",), f"--set: layouts and {layout} both give the layout. Fix: one of them")]


def _on_quotes(text: str) -> str:
    """Return advice if a text has typographic quotes, which are letters to a shell."""
    found = sorted(set(text) & set("“”„‟‘’‚«»"))
    return f"; {' '.join(found)} are letters to a shell. Fix: \" or '" if found else ""


def _replace_shape(given: Iterable[str], below: TomlTable, origins: dict[str, str] | None = None) -> None:
    """Remove the model's shape from `below` if `given` asks for a size, and a size if it has a shape.

    `origins` are of `below`'s values. Values of --set stay, so a shape and a size by --set are refused.
    """
    model, shape = below.get("model"), {f"model.{key}" for key in SHAPE_KEYS}
    if not isinstance(model, dict):
        return
    for key in SHAPE_KEYS if "model.params" in given else ["params"] if shape & set(given) else []:
        if (origins or {}).get(f"model.{key}") != "--set":
            model.pop(key, None)
            (origins or {}).pop(f"model.{key}", None)


def _value(raw: str, parts: Sequence[str]) -> Any:
    try:
        parsed = tomllib.loads(f"value = {raw}")
    except (ValueError, RecursionError):
        return raw
    if list(parsed) != ["value"]:  # further lines of TOML followed
        return raw
    value = parsed["value"]
    return raw if str in _accepted(parts) and not isinstance(value, str) else value


def _is_broken_toml(text: str) -> bool:
    """Return True for text that looks like a list or table, and not like a pattern or {language}/a.txt."""
    is_list, is_table = text[:1] == "[" and text[-1:] == "]", text[:1] == "{" and "=" in text
    return (is_list or is_table) and not glob.glob(text)


def _accepted(parts: Sequence[str]) -> tuple[Any, ...]:
    info = field_of(".".join(parts), Recipe)
    kind = info and info.annotation
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)


def _validate(
    data: TomlTable,
    origins: dict[str, str],
    default_origin: str,
    fill: Callable[[Recipe], Recipe] | None,
) -> tuple[Recipe | None, list[Complaint]]:
    """Return the recipe and its complaints.

    Values that do not fit by themselves are left out and the rest is checked again. So a wrong type in one
    section does not hide a contradiction in another.
    """

    inside = _of_tables(origins)

    def origin(key: str) -> str:
        return _origin(key, origins, inside, default_origin)

    complaints: list[Complaint] = []
    broken: set[str] = set()
    rest = copy.deepcopy(data)
    try:
        recipe = Recipe.model_validate(rest)
    except ValidationError as error:
        complaints = from_validation(error, Recipe, origin)
        for entry in error.errors():
            # A list with a broken entry is left out as a whole.
            location = list(takewhile(lambda part: not isinstance(part, int), entry["loc"]))[:2]
            broken.add(dotted(location))
            _leave_out(rest, location)
        try:
            recipe = Recipe.model_validate(_overlay(_STAND_INS, rest))
        except ValidationError:
            return None, complaints
    own_layer = None if _is_written(default_origin) else 1

    def layer(key: str) -> int | None:
        of = origin(key)
        return own_layer if of == default_origin else 3 if of == "--set" else 2 if _VARIANT in of else 0

    filled = fill(recipe) if fill and not complaints else None
    found = check(recipe, origin, layer, filled)
    return recipe, complaints + [entry for entry in found if not broken.intersection(entry.keys)]


def _is_written(label: str) -> bool:
    """Return True for the recipe of a run or a launch, which has every value, also inherited values."""
    try:
        with open(label, encoding="utf-8") as file:
            return any(line.startswith(WRITTEN) for line in islice(file, 4))
    except (OSError, ValueError):
        return False


def _leave_out(data: TomlTable, location: Sequence[str | int]) -> None:
    *parents, leaf = location
    table: Any = data
    for part in parents:
        table = table.get(part, {}) if isinstance(table, dict) else {}
    if isinstance(table, dict):
        table.pop(leaf, None)


def _origin(key: str, origins: dict[str, str], inside: dict[str, str], otherwise: str) -> str:
    """Return the origin of the key or the table above it, else of a value in it (dataset.mixture.NAME)."""
    above = key = key.split("[", maxsplit=1)[0]
    while above:
        if above in origins:
            return origins[above]
        above = above.rpartition(".")[0]
    return inside.get(key, otherwise)


def _of_tables(origins: dict[str, str]) -> dict[str, str]:
    """Return each table's origin: "--set" if a value in it is set there, else its last value's origin."""
    inside: dict[str, str] = {}
    for key, origin in origins.items():
        table = key.rpartition(".")[0]
        while table:
            if inside.get(table) != "--set":
                inside[table] = origin
            table = table.rpartition(".")[0]
    return inside


def _leaves(table: TomlTable, prefix: str = "") -> list[str]:
    keys = []
    for key, value in table.items():
        keys += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [prefix + key]
    return keys
