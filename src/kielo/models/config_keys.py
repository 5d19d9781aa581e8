"""The keys of a Hugging Face `config.json`, as each family declares them in its `tables.py`; torch-free.

A family's `KEYS` is a table of entries: which keys of `config.json` and of `[model]` belong together, their
values, and their defaults. The import, the export and the refusals follow from it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from kielo.models.config_reader import (
    LAYER_KINDS,
    LAYERS,
    NO_NULL,
    NUMBER,
    SHARE,
    SIZE,
    SWITCH,
    ConfigReader,
    Kind,
)
from kielo.models.family_tables import layer_types
from kielo.models.rope_scaling import DEFAULT_ROPE_THETA, Scaling, normalise_rope, short
from kielo.recipe.errors import KieloError
from kielo.recipe.model_types import FAMILIES
from kielo.recipe.sections import CompleteModel, Model

# Keys of [model] that no config.json has.
_OF_THE_RECIPE = ("model_type", "params", "vocab_multiple", "weights", "transplant", "transplant_vectors")


class Entry:
    """Keys of config.json and keys `ours` of [model] that belong together; in this base class none."""

    ours: tuple[str, ...] = ()

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        """Return values of [model]. values: the whole numbers that the entries above have read."""
        return {}

    def write(self, model: CompleteModel) -> dict[str, object]:
        """Return keys and values of config.json for a complete model."""
        return {}

    def defaults(self) -> dict[str, object]:
        """Return the family's values of keys of [model] whose default is the family's."""
        return {}

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        """Yield the values of [model] that this family or its config.json cannot have, with reasons."""
        return ()


# A value, or a function of the whole numbers read before.
Default = Callable[[Mapping[str, int]], object] | object


class Key(Entry):
    """One key of [model] under one key of config.json.

    theirs: names in config.json, of which the first is written. default: the value of transformers if the key
    is missing, None if it is required; also [model]'s if is_family_default. null: its meaning, if allowed.
    """

    def __init__(
        self,
        ours: str,
        *theirs: str,
        kind: Kind,
        default: Default,
        null: Default = NO_NULL,
        is_family_default: bool = False,
    ):
        self.ours, self._key, self._theirs, self._kind = (ours,), ours, theirs or (ours,), kind
        self._default, self._null, self._is_family_default = default, null, is_family_default

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        default, null = (given(values) if callable(given) else given for given in (self._default, self._null))
        value = reader.value(self._theirs, self._kind, default, null)
        if value is None and null is NO_NULL:
            reader.complain(f"lacks {self._theirs[0]}")
            value = 1
        return {self._key: value}

    def write(self, model: CompleteModel) -> dict[str, object]:
        value = getattr(model, self._key)
        return {self._theirs[0]: bool(value) if self._kind is SWITCH else value}

    def defaults(self) -> dict[str, object]:
        return {self._key: self._default} if self._is_family_default else {}


def switch(name: str, default: bool) -> Key:
    """Return the entry of a switch, whose default is the family's in [model] too."""
    return Key(name, kind=SWITCH, default=default, is_family_default=True)


def sizes(
    vocabulary: int | None, hidden: int, inside: int | None, layers: int, heads: int
) -> tuple[Key, ...]:
    """Return the entries of the five sizes of every model, with these defaults, None for a required key."""
    return (
        Key("vocab_size", kind=SIZE, default=vocabulary),
        Key("hidden_size", kind=SIZE, default=hidden),
        Key("intermediate_size", kind=SIZE, default=inside),
        Key("num_hidden_layers", kind=LAYERS, default=layers),
        Key("num_attention_heads", kind=SIZE, default=heads),
    )


class Choice(Entry):
    """A key of which Kielo supports a few values. The first is the default, also for null and in [model].

    ours, theirs: None if [model] or config.json has no such key. is_written: exports have the key.
    """

    def __init__(self, *known: object, ours: str | None, theirs: str | None, is_written: bool = True):
        self.ours = () if ours is None else (ours,)
        self._known, self._ours, self._theirs, self._is_written = known, ours, theirs, is_written

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        value = self._known[0] if self._theirs is None else reader.only(self._theirs, self._known)
        return {} if self._ours is None else {self._ours: value}

    def write(self, model: CompleteModel) -> dict[str, object]:
        if self._theirs is None or not self._is_written:
            return {}
        value = None if self._ours is None else getattr(model, self._ours)
        return {self._theirs: self._known[0] if value is None else value}

    def defaults(self) -> dict[str, object]:
        return {} if self._ours is None or self._known[0] is None else {self._ours: self._known[0]}

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        if self._ours is not None and getattr(model, self._ours) not in (None, *self._known):
            yield (
                f"model.{self._ours} = {getattr(model, self._ours)!r}: {model.model_type} models have "
                f"{' or '.join(map(repr, self._known))}"
            )


def only(theirs: str, *known: object, is_written: bool = False) -> Choice:
    """Return the entry of a key of config.json that [model] lacks, as Kielo supports only these values."""
    return Choice(*known, ours=None, theirs=theirs, is_written=is_written)


def fixed(ours: str, *known: object, theirs: str | None = None) -> Choice:
    """Return the entry of a key of [model] that has only these values in this family."""
    return Choice(*known, ours=ours, theirs=theirs)


class Unread(Entry):
    """Keys of config.json that do not change logits. written: key → value of exports, or of the model."""

    def __init__(self, *theirs: str, **written: object):
        self._theirs, self._written = theirs, written

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        for name in (*self._theirs, *self._written):
            reader.get(name)
        return {}

    def write(self, model: CompleteModel) -> dict[str, object]:
        return {key: value(model) if callable(value) else value for key, value in self._written.items()}


class HeadWidth(Key):
    """The width of a head: config.json's head_dim. default: None for hidden_size / heads, also for null."""

    def __init__(self, default: int | None = None):
        super().__init__("head_dim", kind=SIZE, default=default, null=NO_NULL if default else None)

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        return {"head_dim": super().read(reader, values)["head_dim"] or _derived_width(reader, values)}


class WholeHeads(Entry):
    """Heads without groups that fill hidden_size. config.json has no keys for other shapes."""

    ours = ("num_key_value_heads", "head_dim")

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        heads, width = values["num_attention_heads"], _derived_width(reader, values)
        reader.get("num_key_value_heads")  # transformers does not read it
        reader.only("head_dim", (width,))  # transformers' RoPE reads it
        return {"num_key_value_heads": heads, "head_dim": width}

    def complaints(self, model: CompleteModel) -> Iterable[str]:
        heads, family = model.num_attention_heads, model.model_type
        if model.num_key_value_heads not in (None, heads):
            yield (
                f"model.num_key_value_heads = {model.num_key_value_heads}: a {family} model has as many as "
                f"model.num_attention_heads = {heads}"
            )
        if model.head_dim is not None and model.head_dim * heads != model.hidden_size:
            yield (
                f"model.head_dim = {model.head_dim}: a {family} model's {heads} heads are model.hidden_size "
                f"= {model.hidden_size} wide together"
            )


def _derived_width(reader: ConfigReader, values: Mapping[str, int]) -> int:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if hidden % heads:
        reader.complain(f"hidden_size {hidden} is no multiple of the {heads} attention heads")
    return max(1, hidden // heads)


class NoWindows(Entry):
    """Every layer attends to the whole sequence."""

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        reader.only("sliding_window", (None,))
        if "sliding_attention" in reader.layer_types(LAYER_KINDS[:1] * values["num_hidden_layers"]):
            reader.complain("layer_types has sliding_attention, which models of this type do not have")
        return {}


class Windows(Entry):
    """layer_types and sliding_window. Every `full_every`-th layer (keys: `pattern`) has no window."""

    ours = ("sliding_window", "layer_types")

    def __init__(self, full_every: int, *pattern: str):
        self._full_every, self._pattern = full_every, pattern

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        every = reader.value(self._pattern, SIZE, self._full_every)
        count = values["num_hidden_layers"]
        usual = [LAYER_KINDS[number % every != 0] for number in range(1, count + 1)]
        window, kinds = reader.value(("sliding_window",), SIZE, 4096, None), reader.layer_types(usual)
        if "sliding_attention" not in kinds:
            return {"layer_types": kinds}
        if window is None:
            reader.complain("layer_types has sliding_attention, but sliding_window is null")
        return {"layer_types": kinds, "sliding_window": window}

    def write(self, model: CompleteModel) -> dict[str, object]:
        # transformers makes the windowed mask even if no layer uses it.
        window = model.sliding_window or model.max_position_embeddings
        return {"layer_types": list(layer_types(model)), "sliding_window": window}


class Rope(Entry):
    """RoPE's base and scaling, the same in all layers. Exports have the spelling of transformers 4.

    theta: the base's key in config.json. rotary_pct: the default of config.json's rotary_pct, in families
    that rotate a share of each head.
    """

    def __init__(self, theta: str = "rope_theta", rotary_pct: float | None = None):
        self._theta, self._rotary_pct = theta, rotary_pct
        self.ours = ("rope_theta", "rope_scaling", *(() if rotary_pct is None else ("rotary_pct",)))

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        theta = reader.value((self._theta,), NUMBER, DEFAULT_ROPE_THETA)
        older, newer = reader.get("rope_scaling"), reader.get("rope_parameters")
        scaling = older or newer  # in the order of transformers
        share = self._share(reader, scaling)
        scaling = _with_trained_length(reader, scaling)
        base, scaling = _normalised(reader, theta, scaling, values, share)
        found: dict[str, object] = {"rope_theta": base, "rope_scaling": scaling}
        return found if self._rotary_pct is None else found | {"rotary_pct": share}

    def _share(self, reader: ConfigReader, scaling: object) -> float:
        if self._rotary_pct is None:
            reader.only("partial_rotary_factor", (1.0,))
            return 1.0
        share = reader.value(("rotary_pct",), SHARE, self._rotary_pct)
        inside = scaling.get("partial_rotary_factor") if isinstance(scaling, Mapping) else None
        if inside is not None and not SHARE.fits(inside):
            reader.complain(
                f"partial_rotary_factor = {short(inside)} does not fit: expected {SHARE.expected}"
            )
        return share if inside is None else inside

    def write(self, model: CompleteModel) -> dict[str, object]:
        base, scaling = normalise_rope(model.rope_theta, model.rope_scaling, model.max_position_embeddings)
        share = {} if self._rotary_pct is None else {"rotary_pct": model.rotary_pct}
        return {self._theta: base, "rope_scaling": scaling, **share}


class RopeByKind(Entry):
    """RoPE with a base of its own in windowed layers, or one base and a scaling of full layers only.

    transformers 5 writes `rope_parameters` with a table for each kind of layer, transformers 4 the
    `rope_scaling` of full layers and a key for each base. theta, windowed: (key, default) of each base, or no
    default if versions of transformers differ in it.
    """

    def __init__(
        self,
        theta: tuple[str, float | None],
        windowed: tuple[str, float | None],
        has_scaling: bool = True,
        writes_both: bool = False,
    ):
        self._theta, self._windowed = theta, windowed
        self._has_scaling, self._writes_both = has_scaling, writes_both
        self._is_one_base = theta == windowed
        self.ours = (
            "rope_theta",
            *(("rope_scaling",) if has_scaling else ()),
            *(() if self._is_one_base else ("rope_local_base_freq",)),
        )

    def read(self, reader: ConfigReader, values: Mapping[str, int]) -> dict[str, object]:
        reader.only("partial_rotary_factor", (1.0,))
        by_kind, older = reader.get("rope_parameters"), reader.get("rope_scaling")
        theta, windowed_theta = (
            reader.value((name,), NUMBER, default) for name, default in (self._theta, self._windowed)
        )
        windowed_scaling = None
        if by_kind is None:
            if theta is None or windowed_theta is None:
                name = self._theta[0]
                reader.complain(f"lacks {name}, for which versions of transformers take different values")
                return {}
            if isinstance(older, Mapping) and older.get("type") not in (None, older.get("rope_type")):
                # transformers 4 reads `type` here, and transformers 5 reads no scaling then.
                reader.complain(
                    f"rope_scaling.type = {short(older['type'])} is read by some versions of transformers "
                    "only. Fix: name it rope_type"
                )
            _refuse_trained_length_beside(reader, older, values)
            base, scaling = _normalised(reader, theta, older, values)
            windowed_base = windowed_theta
        elif missing := _missing_bases(by_kind):
            reader.complain(f"rope_parameters lacks {', '.join(missing)}")
            return {}
        else:
            if older:
                reader.complain("rope_scaling and rope_parameters mean the same: expected one of them")
            base, scaling = _normalised(reader, None, by_kind["full_attention"], values)
            windowed_base, windowed_scaling = _normalised(reader, None, by_kind["sliding_attention"], values)
        if windowed_scaling is not None:
            reader.complain("rope_parameters.sliding_attention has a scaling, which Kielo does not support")
        if scaling is not None and not self._has_scaling:
            reader.complain(f"not supported: rope_scaling of type {scaling['rope_type']}")
        found: dict[str, object] = {"rope_theta": base, "rope_scaling": scaling}
        if not self._is_one_base:
            return found | {"rope_local_base_freq": windowed_base}
        if base != windowed_base:
            reader.complain(
                f"rope_parameters has a rope_theta of {base:g} for full and {windowed_base:g} for sliding "
                "attention; only the same rope_theta for both is supported"
            )
        return found

    def write(self, model: CompleteModel) -> dict[str, object]:
        base, scaling = normalise_rope(model.rope_theta, model.rope_scaling, model.max_position_embeddings)
        written: dict[str, object] = {self._theta[0]: base}
        if not self._is_one_base:
            written[self._windowed[0]] = model.rope_local_base_freq
        if self._has_scaling:
            written["rope_scaling"] = scaling
        if self._writes_both:
            plain = {"rope_type": "default", "rope_theta": base}
            written["rope_parameters"] = {
                "full_attention": plain | (scaling or {}),
                "sliding_attention": plain,
            }
        return written


def _missing_bases(by_kind: object) -> list[str]:
    tables = by_kind if isinstance(by_kind, Mapping) else {}
    return [
        f"{kind}.rope_theta"
        for kind in LAYER_KINDS
        if not isinstance(tables.get(kind), Mapping) or tables[kind].get("rope_theta") is None
    ]


def _with_trained_length(reader: ConfigReader, scaling: object) -> object:
    """Add the length that the model was trained with, which files may have beside the scaling.

    transformers 5 prefers the outer value and transformers 4 the inner value, so unequal values are refused.
    """
    key = "original_max_position_embeddings"
    outer = reader.get(key)
    if outer is None or not isinstance(scaling, Mapping):
        return scaling
    if scaling.get(key) not in (None, outer):
        reader.complain(
            f"{key} = {short(outer)} and {short(scaling[key])} in rope_scaling mean the same and differ"
        )
    return {**scaling, key: outer}


def _refuse_trained_length_beside(reader: ConfigReader, scaling: object, values: Mapping[str, int]) -> None:
    """Complain of a trained length beside the scaling. transformers does not read it in these families."""
    key = "original_max_position_embeddings"
    outer = reader.get(key)
    if not isinstance(scaling, Mapping) or scaling.get(key) is not None:
        return
    if outer not in (None, values["max_position_embeddings"]):
        reader.complain(
            f"{key} = {short(outer)} stands beside rope_scaling, where transformers does not read it for "
            "models of this type. Fix: move it into rope_scaling"
        )


def _normalised(
    reader: ConfigReader, theta: float | None, scaling: object, values: Mapping[str, int], share: float = 1.0
) -> tuple[float, Scaling | None]:
    try:
        return normalise_rope(theta, scaling, values["max_position_embeddings"], "", share)
    except KieloError as error:
        reader.complain(str(error))
        return DEFAULT_ROPE_THETA, None


# Keys without a part in the maths, which exports have of their own. `artifact/weights_folder.py` reads
# transformers_weights.
_OF_NO_MODEL = """
    model_type bos_token_id eos_token_id pad_token_id cls_token_id sep_token_id dtype torch_dtype use_cache
    auto_map transformers_version _name_or_path id2label label2id _attn_implementation_autoset problem_type
    return_dict output_attentions output_hidden_states chunk_size_feed_forward pretraining_tp is_decoder
    classifier_dropout tokenizer_class transformers_weights
"""
# Keys that all families treat alike.
COMMON: tuple[Entry, ...] = (
    Unread(*_OF_NO_MODEL.split()),
    only("is_encoder_decoder", False),
    only("add_cross_attention", False),
    only("pruned_heads", {}),
)


def read_config(
    entries: Iterable[Entry], config: Mapping[str, object], model_type: str, where: str
) -> tuple[CompleteModel, list[str]]:
    """Return a config's model, and the keys that no entry knows. Raise KieloError with every complaint."""
    reader, values = ConfigReader(config), dict[str, Any](model_type=model_type)
    for entry in (*COMMON, *entries):
        values |= entry.read(reader, values)
    # transformers 5 makes its masks by this key, which no family's class declares.
    reader.only("is_causal", (not FAMILIES[model_type].is_encoder,))
    if reader.get("quantization_config"):
        reader.complain("not supported: quantization_config (weights must be bf16, fp16 or fp32)")
    if reader.complaints:
        raise KieloError(f"{where}: " + "; ".join(dict.fromkeys(reader.complaints)))
    return CompleteModel(**values), sorted(set(config) - reader.keys_read)


def foreign_keys(model: CompleteModel, own: Collection[str], given: Collection[str]) -> Iterator[str]:
    """Yield keys of [model] that the family does not have, and that are `given` or not the default."""
    for key, field in Model.model_fields.items():
        is_set = key in given or getattr(model, key) != field.default
        if is_set and key not in own and key not in _OF_THE_RECIPE:
            yield key
