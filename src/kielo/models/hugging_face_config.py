"""What every family needs to read a Hugging Face `config.json`; torch-free.

Data in: the file's dict; data out: values under our keys. Keys that do not change the maths are ignored; a key whose
value asks for something that Kielo does not do is refused by name.
"""

import math
from collections.abc import Mapping
from typing import Any

from kielo.recipe.errors import KieloError

_DEFAULT_ROPE_THETA = 10_000.0
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
}
_NOT_THERE = object()


class ConfigReader:
    """Reads keys off one config and collects what stands against it; `done` raises it all at once."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self._config, self.where = config, where
        self._complaints: list[str] = []

    def required(self, *names: str) -> Any:
        """The value under the first of `names` that is set."""
        value = self.optional(*names, default=_NOT_THERE)
        if value is _NOT_THERE:
            self._complaints.append(f"lacks {' or '.join(names)}, without which the model's shape is not known")
            return 1
        return value

    def optional(self, *names: str, default: Any = None) -> Any:
        """null counts as not set, as in transformers."""
        return next((self._config[name] for name in names if self._config.get(name) is not None), default)

    def only(self, name: str, *known: Any, default: Any = _NOT_THERE) -> Any:
        """Complain about any value but the `known`; the first is the default unless another is given."""
        value = self.optional(name, default=known[0] if default is _NOT_THERE else default)
        if value not in known:
            self._complaints.append(
                f"asks for what Kielo does not do: {name} = {value!r} (known: {', '.join(map(repr, known))})"
            )
        return value

    def layer_types(self, layers: int, full_every: int) -> tuple[str, ...]:
        """One for each of `layers`; without that key every `full_every`-th sees all, the others a window."""
        numbers = range(1, layers + 1)
        without = ["sliding_attention" if number % full_every else "full_attention" for number in numbers]
        return tuple(self.optional("layer_types", default=without))

    def done(self) -> None:
        if self._config.get("quantization_config"):
            self._complaints.append(
                "asks for what Kielo does not do: quantization_config (weights must be bf16, fp16 or fp32)"
            )
        if self._complaints:
            raise KieloError(f"{self.where}: " + "; ".join(self._complaints))


def normalise_rope(
    rope_theta: float | None,
    scaling: Mapping[str, Any] | None,
    max_position_embeddings: int,
    where: str = "model.",
    rotary_share: float = 1.0,
) -> tuple[float, dict[str, Any] | None]:
    """(base, scaling) in one spelling from any of Hugging Face's three.

    transformers 4 writes `rope_theta` beside `rope_scaling` {"type" or "rope_type", …}; transformers 5 writes
    `rope_parameters` with both inside. Out comes the base, and None ("default") or a dict of "rope_type" and
    just the numbers that type uses. rotary_share: what part of each head turns, where a family has a say in it.
    KieloError for other types and for missing numbers.
    """
    scaling = dict(scaling or {})
    base = float(scaling.pop("rope_theta", None) or rope_theta or _DEFAULT_ROPE_THETA)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type not in _ROPE_KEYS:
        raise KieloError(f"{where}rope_scaling.rope_type = {rope_type!r} is not supported; known: {', '.join(_ROPE_KEYS)}")
    if scaling.get("partial_rotary_factor", rotary_share) != rotary_share:
        raise KieloError(
            f"{where}partial_rotary_factor = {scaling['partial_rotary_factor']} is not supported; only {rotary_share}"
        )
    if rope_type == "default":
        return base, None
    if rope_type in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
    if rope_type == "yarn":
        if scaling.get("truncate") is False:
            raise KieloError(f"{where}rope_scaling.truncate = false is not supported; only true")
        scaling = _with_yarn_defaults(scaling)
    missing = [key for key in _ROPE_KEYS[rope_type] if scaling.get(key) is None]
    if missing:
        raise KieloError(f"{where}rope_scaling of type {rope_type!r} lacks {', '.join(missing)}")
    return base, {"rope_type": rope_type} | {key: scaling[key] for key in _ROPE_KEYS[rope_type]}


def _with_yarn_defaults(scaling: dict[str, Any]) -> dict[str, Any]:
    """What transformers takes for the numbers that are not there (Peng et al. 2023, arXiv:2309.00071, equation 22)."""

    def sharpness(mscale: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * mscale * math.log(scaling["factor"]) + 1.0

    scaling = scaling | {"beta_fast": scaling.get("beta_fast") or 32, "beta_slow": scaling.get("beta_slow") or 1}
    if scaling.get("attention_factor") is None and scaling.get("factor") is not None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        scaling["attention_factor"] = (
            sharpness(mscale) / sharpness(mscale_all_dim) if mscale and mscale_all_dim else sharpness(1)
        )
    return scaling


def normalise_ropes(
    config: Mapping[str, Any],
    rope_theta: float,
    windowed_rope_theta: float,
    max_position_embeddings: int,
    where: str,
) -> tuple[float, dict[str, Any] | None, float]:
    """(base, scaling, base of windowed layers), of families whose windowed layers turn otherwise than the full ones.

    transformers 5 writes `rope_parameters` with a dict for each kind of layer; transformers 4 writes the `rope_scaling`
    of the full ones, beside bases that each family spells its own way. Windowed layers are not stretched: a config that
    asks for that is refused.
    """
    by_kind = config.get("rope_parameters")
    if by_kind is None:
        base, scaling = normalise_rope(rope_theta, config.get("rope_scaling"), max_position_embeddings, where)
        return base, scaling, float(windowed_rope_theta)
    missing = [
        f"{kind}.rope_theta"
        for kind in ("full_attention", "sliding_attention")
        if not isinstance(by_kind.get(kind), Mapping) or not by_kind[kind].get("rope_theta")
    ]
    if missing:
        raise KieloError(f"{where}rope_parameters lacks {', '.join(missing)}")
    base, scaling = normalise_rope(None, by_kind["full_attention"], max_position_embeddings, where)
    windowed_base, windowed_scaling = normalise_rope(None, by_kind["sliding_attention"], max_position_embeddings, where)
    if windowed_scaling is not None:
        raise KieloError(f"{where}rope_parameters.sliding_attention is stretched, which is not supported")
    return base, scaling, windowed_base
