"""Reading of a Hugging Face `config.json`, as every family needs it; torch-free.

Data in: the file's dict; data out: values under our keys. A key that is left out means what it means to
transformers. Keys that do not change the maths are ignored; a value of another kind than the key's, and one
that asks for something that Kielo does not do, is refused by name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kielo.recipe.errors import KieloError

DEFAULT_ROPE_THETA = 10_000.0
LAYER_KINDS = ("full_attention", "sliding_attention")
# More than any model has: larger numbers come from a damaged file and must not allocate memory.
_LARGEST_SIZE, _MOST_LAYERS = 2**24, 10_000
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
}
_NOT_THERE = object()
_NO_NULL = object()


class ConfigReader:
    """Reads keys of one config and collects complaints; `done` raises them all at once.

    default: transformers' value for a key that is left out. null: the meaning of null, where null is allowed.
    A value with a complaint is replaced by the default, so that reading can go on.
    """

    def __init__(self, config: Mapping[str, Any], where: str):
        self._config, self.where = config, where
        self._complaints: list[str] = []

    def size(self, *names: str, default: int, null: Any = _NO_NULL) -> Any:
        """Reads a whole number from 1 on, under any of `names`."""
        return self._value(names, default, null, _is_size, f"a whole number from 1 to {_LARGEST_SIZE:,}")

    def layers(self, *names: str, default: int) -> int:
        """Reads the number of layers."""
        return self._value(
            names, default, _NO_NULL, lambda value: _is_size(value) and value <= _MOST_LAYERS,
            f"a whole number from 1 to {_MOST_LAYERS:,}",
        )  # fmt: skip

    def whole(self, name: str, default: int) -> int:
        """Reads a whole number from 0 on."""
        return self._value(
            (name,), default, _NO_NULL, lambda value: type(value) is int and value >= 0, "a whole number"
        )

    def number(self, *names: str, default: float | None, null: Any = _NO_NULL) -> Any:
        """Reads a finite number above 0."""
        return self._value(names, default, null, _is_positive, "a number above 0")

    def switch(self, name: str, default: bool) -> bool:
        return self._value((name,), default, _NO_NULL, lambda value: isinstance(value, bool), "true or false")

    def only(self, name: str, *known: Any) -> Any:
        """Reads a value, and complains unless it is `known`; the first is the default, also for null."""
        _, value = self._found((name,))
        if value is _NOT_THERE or value is None:
            return known[0]
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in known):
            self._complaints.append(
                f"asks for what Kielo does not do: {name} = {_short(value)} (known: "
                f"{', '.join(map(repr, known))})"
            )
            return known[0]
        return value

    def layer_types(self, without: Sequence[str]) -> tuple[str, ...]:
        """Reads a kind for each layer; `without` where the key is left out or null."""

        def fits(value: Any) -> bool:
            return (
                isinstance(value, list)
                and len(value) == len(without)
                and all(v in LAYER_KINDS for v in value)
            )

        expected = f"a list of {len(without)} of {' or '.join(LAYER_KINDS)}, one for each layer"
        return tuple(self._value(("layer_types",), without, without, fits, expected))

    def windows(self, layers: int, full_every: int) -> dict[str, Any]:
        """Reads layer_types and sliding_window; by default every `full_every`-th layer has no window."""
        kinds = [
            "sliding_attention" if number % full_every else "full_attention"
            for number in range(1, layers + 1)
        ]
        window, kinds = self.size("sliding_window", default=4096, null=None), self.layer_types(kinds)
        if "sliding_attention" not in kinds:
            return {"layer_types": kinds}
        if window is None:
            self.complain("layer_types has sliding_attention, but sliding_window is null")
        return {"layer_types": kinds, "sliding_window": window}

    def head_dim(self, hidden: int, heads: int) -> int:
        """Returns hidden_size / heads, rounded down; complains where heads do not divide it."""
        if hidden % heads:
            self._complaints.append(f"hidden_size {hidden} is no multiple of the {heads} attention heads")
        return max(1, hidden // heads)

    def complain(self, complaint: str) -> None:
        self._complaints.append(complaint)

    def rope(self, default_theta: float, max_position_embeddings: int) -> tuple[float, dict[str, Any] | None]:
        """Reads (base, scaling), as `normalise_rope` returns them, and calls `done`."""
        self.only("partial_rotary_factor", 1.0)
        theta = self.number("rope_theta", default=default_theta)
        self.done()
        return normalise_rope(theta, self.rope_section(), max_position_embeddings, f"{self.where}: ")

    def rope_section(self) -> Any:
        """Returns the dict of RoPE scaling: transformers 4's before 5's, as transformers does."""
        return self._config.get("rope_scaling") or self._config.get("rope_parameters")

    def ropes(
        self,
        theta_key: str,
        default_theta: float | None,
        windowed_key: str,
        default_windowed: float | None,
        positions: int,
    ) -> tuple[float, dict[str, Any] | None, float]:
        """Reads (base, scaling, base of windowed layers), for families with another RoPE in windowed layers.

        transformers 5 writes `rope_parameters` with a dict for each kind of layer; transformers 4 writes the
        `rope_scaling` of full layers, and a base for each kind. A default of None: the key is required.
        A config with a scaling of windowed layers is refused.
        """
        by_kind, where = self._config.get("rope_parameters"), f"{self.where}: "
        if by_kind is None:
            theta = self.number(theta_key, default=default_theta)
            windowed_theta = self.number(windowed_key, default=default_windowed)
            if theta is None or windowed_theta is None:
                self.complain(f"lacks {theta_key}, for which versions of transformers take different values")
            self.done()
            base, scaling = normalise_rope(theta, self._config.get("rope_scaling"), positions, where)
            return base, scaling, float(windowed_theta)
        missing = [
            f"{kind}.rope_theta"
            for kind in LAYER_KINDS
            if not isinstance(by_kind, Mapping)
            or not isinstance(by_kind.get(kind), Mapping)
            or by_kind[kind].get("rope_theta") is None
        ]
        if missing:
            raise KieloError(f"{where}rope_parameters lacks {', '.join(missing)}")
        base, scaling = normalise_rope(None, by_kind["full_attention"], positions, where)
        windowed_base, windowed_scaling = normalise_rope(None, by_kind["sliding_attention"], positions, where)
        if windowed_scaling is not None:
            raise KieloError(
                f"{where}rope_parameters.sliding_attention has a scaling, which is not supported"
            )
        return base, scaling, windowed_base

    def done(self) -> None:
        if self._config.get("quantization_config"):
            self._complaints.append(
                "asks for what Kielo does not do: quantization_config (weights must be bf16, fp16 or fp32)"
            )
        if self._complaints:
            raise KieloError(f"{self.where}: " + "; ".join(dict.fromkeys(self._complaints)))

    def _found(self, names: Sequence[str]) -> tuple[str, Any]:
        """Returns the first of `names` in the config, and its value; complains where two of them differ."""
        there = [name for name in names if name in self._config]
        there = [name for name in there if self._config[name] is not None] or there
        for other in there[1:]:
            if self._config[other] != self._config[there[0]]:
                self._complaints.append(
                    f"{there[0]} = {_short(self._config[there[0]])} and {other} = "
                    f"{_short(self._config[other])} "
                    "mean the same and differ"
                )
        return (there[0], self._config[there[0]]) if there else (names[0], _NOT_THERE)

    def _value(
        self, names: Sequence[str], default: Any, null: Any, fits: Callable[[Any], bool], expected: str
    ) -> Any:
        name, value = self._found(names)
        if value is _NOT_THERE:
            return default
        if value is None and null is not _NO_NULL:
            return null
        if not fits(value):
            given = "null" if value is None else _short(value)
            self._complaints.append(f"{name} = {given} does not fit; expected {expected}")
            return default
        return value


def normalise_rope(
    rope_theta: float | None,
    scaling: Mapping[str, Any] | None,
    max_position_embeddings: int,
    where: str = "model.",
    rotary_share: float = 1.0,
) -> tuple[float, dict[str, Any] | None]:
    """Returns (base, scaling) in one spelling from any of Hugging Face's three.

    transformers 4 writes `rope_theta` beside `rope_scaling` {"type" or "rope_type", …}; transformers 5 writes
    `rope_parameters` with both inside. scaling is None ("default") or a dict of "rope_type" and just the
    numbers that this type uses. rotary_share: the rotated share of each head, for families in which it
    varies. Raises KieloError for other types, for missing numbers and for values that are no numbers.
    """
    if not isinstance(scaling, Mapping | None):
        raise KieloError(
            f"{where}rope_scaling = {_short(scaling)} does not fit; expected a table of rope_type and numbers"
        )
    scaling = dict(scaling or {})
    inner_theta = scaling.pop("rope_theta", None)
    base = DEFAULT_ROPE_THETA if rope_theta is None else rope_theta
    base = base if inner_theta is None else inner_theta
    if not _is_positive(base):
        raise KieloError(f"{where}rope_theta = {_short(base)} does not fit; expected a number above 0")
    base = float(base)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise KieloError(
            f"{where}rope_scaling.rope_type = {_short(rope_type)} is not supported; known: "
            f"{', '.join(_ROPE_KEYS)}"
        )
    if scaling.get("partial_rotary_factor", rotary_share) != rotary_share:
        raise KieloError(
            f"{where}partial_rotary_factor = {_short(scaling['partial_rotary_factor'])} is not supported; "
            f"only {rotary_share}"
        )
    if rope_type == "default":
        return base, None
    if rope_type in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
    if rope_type == "yarn" and scaling.get("truncate", True) is not True:
        raise KieloError(
            f"{where}rope_scaling.truncate = {_short(scaling['truncate'])} is not supported; only true"
        )
    _refuse_unlike_numbers(scaling, where)
    if rope_type == "yarn":
        scaling = _with_yarn_defaults(scaling)
    missing = [key for key in _ROPE_KEYS[rope_type] if scaling.get(key) is None]
    if missing:
        raise KieloError(f"{where}rope_scaling of type {rope_type!r} lacks {', '.join(missing)}")
    if rope_type == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise KieloError(
            f"{where}rope_scaling.low_freq_factor = {scaling['low_freq_factor']} does not fit; expected "
            f"less than high_freq_factor = {scaling['high_freq_factor']}"
        )
    if rope_type == "yarn" and base <= 1:
        raise KieloError(f"{where}rope_theta = {base:g} does not fit; yarn needs one above 1")
    return base, {"rope_type": rope_type} | {key: scaling[key] for key in _ROPE_KEYS[rope_type]}


def _refuse_unlike_numbers(scaling: Mapping[str, Any], where: str) -> None:
    """Raises KieloError for a value of `scaling` that should be null or a number above 0, and is not."""
    for key in (
        *dict.fromkeys(key for keys in _ROPE_KEYS.values() for key in keys),
        "mscale",
        "mscale_all_dim",
    ):
        value, is_length = scaling.get(key), key == "original_max_position_embeddings"
        may_be_zero = key.startswith(("mscale", "beta"))  # transformers takes 0 for not given
        if value is None or (may_be_zero and value == 0) or (_is_size if is_length else _is_positive)(value):
            continue
        expected = "a whole number from 1 on" if is_length else "a number above 0"
        raise KieloError(f"{where}rope_scaling.{key} = {_short(value)} does not fit; expected {expected}")


def _with_yarn_defaults(scaling: dict[str, Any]) -> dict[str, Any]:
    """Adds transformers' values for missing numbers (Peng et al. 2023, arXiv:2309.00071, equation 22)."""

    def sharpness(mscale: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * mscale * math.log(scaling["factor"]) + 1.0

    scaling = scaling | {
        "beta_fast": scaling.get("beta_fast") or 32,
        "beta_slow": scaling.get("beta_slow") or 1,
    }
    if scaling.get("attention_factor") is None and scaling.get("factor") is not None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        scaling["attention_factor"] = (
            sharpness(mscale) / sharpness(mscale_all_dim) if mscale and mscale_all_dim else sharpness(1)
        )
    return scaling


def _is_positive(value: Any) -> bool:
    """Returns True for a finite number above 0 that is no bool."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _LARGEST_SIZE


def _short(value: Any) -> str:
    """Returns a short `repr` of any value, as a damaged file may hold it.

    An int of thousands of digits has a `repr` too, but Python refuses to write it.
    """
    try:
        text = repr(value)
    except ValueError:
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
