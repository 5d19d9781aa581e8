"""RoPE's base and scaling in one spelling, from any of Hugging Face's three; torch-free."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from kielo.recipe.errors import KieloError

Scaling = dict[str, Any]  # "rope_type", and the numbers of this type
DEFAULT_ROPE_THETA = 10_000.0
# More than any model has: larger numbers come from a damaged file and must not allocate memory.
LARGEST_SIZE = 2**24
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
}
# Keys that any type may have, and keys that yarn's default of attention_factor is made of.
_KEYS_OF_ALL = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_KEYS_BESIDE = {"yarn": ("mscale", "mscale_all_dim", "truncate")}


def normalise_rope(
    rope_theta: float | None,
    scaling: object,
    max_position_embeddings: int,
    where: str = "model.",
    rotary_share: float = 1.0,
) -> tuple[float, Scaling | None]:
    """Return (base, scaling) in one spelling. The scaling is None for "default".

    transformers 4 writes `rope_theta` beside `rope_scaling`, transformers 5 `rope_parameters` with both
    inside. rotary_share: the rotated share of each head, if it varies. Raise KieloError for other types and
    numbers.
    """
    if not isinstance(scaling, Mapping | None):
        raise KieloError(
            f"{where}rope_scaling = {short(scaling)} does not fit: expected a table of rope_type and numbers"
        )
    scaling = dict(scaling or {})
    nested = [key for key, value in scaling.items() if isinstance(value, Mapping)]
    if nested:
        raise KieloError(
            f"{where}rope_scaling or rope_parameters has a table for each kind of layer "
            f"({', '.join(nested)}), which models of this type do not have"
        )
    inner_theta = scaling.pop("rope_theta", None)
    base = DEFAULT_ROPE_THETA if rope_theta is None else rope_theta
    base = base if inner_theta is None else inner_theta
    if not is_positive(base):
        raise KieloError(f"{where}rope_theta = {short(base)} does not fit: expected a number above 0")
    base = float(base)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(rope_type, str) or rope_type not in _ROPE_KEYS:
        raise KieloError(
            f"{where}rope_scaling.rope_type = {short(rope_type)} is not supported; known: "
            f"{', '.join(_ROPE_KEYS)}"
        )
    if scaling.get("partial_rotary_factor", rotary_share) != rotary_share:
        raise KieloError(
            f"{where}partial_rotary_factor = {short(scaling['partial_rotary_factor'])} is not supported; "
            f"only {rotary_share}"
        )
    if rope_type == "default":
        return base, None
    if rope_type in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
    if rope_type == "yarn" and scaling.get("truncate", True) is not True:
        raise KieloError(
            f"{where}rope_scaling.truncate = {short(scaling['truncate'])} is not supported; only true"
        )
    _refuse_unlike_numbers(scaling, where)
    if rope_type == "yarn":
        scaling = _with_yarn_defaults(scaling)
    missing = [key for key in _ROPE_KEYS[rope_type] if scaling.get(key) is None]
    if missing:
        raise KieloError(f"{where}rope_scaling of type {rope_type!r} lacks {', '.join(missing)}")
    if rope_type == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise KieloError(
            f"{where}rope_scaling.low_freq_factor = {scaling['low_freq_factor']} does not fit: expected "
            f"less than high_freq_factor = {scaling['high_freq_factor']}"
        )
    if rope_type == "yarn" and base <= 1:
        raise KieloError(f"{where}rope_theta = {base:g} does not fit; yarn needs a number above 1")
    return base, {"rope_type": rope_type} | {key: scaling[key] for key in _ROPE_KEYS[rope_type]}


def unread_keys(scaling: Mapping[str, Any]) -> list[str]:
    """Return the keys of a valid scaling that its type does not use."""
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    read = (*_KEYS_OF_ALL, *_ROPE_KEYS[rope_type], *_KEYS_BESIDE.get(rope_type, ()))
    return [key for key in scaling if key not in read]


def _refuse_unlike_numbers(scaling: Scaling, where: str) -> None:
    keys = dict.fromkeys(key for keys in _ROPE_KEYS.values() for key in keys)
    for key in (*keys, "mscale", "mscale_all_dim"):
        value, is_length = scaling.get(key), key == "original_max_position_embeddings"
        can_be_zero = key.startswith(("mscale", "beta"))  # transformers takes 0 for not given
        if value is None or (can_be_zero and value == 0) or (is_size if is_length else is_positive)(value):
            continue
        expected = "a whole number from 1 on" if is_length else "a number above 0"
        raise KieloError(f"{where}rope_scaling.{key} = {short(value)} does not fit: expected {expected}")


def _with_yarn_defaults(scaling: Scaling) -> Scaling:
    """Add transformers' values for missing numbers (Peng et al. 2023, arXiv:2309.00071, equation 22)."""

    def sharpness(mscale: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * mscale * math.log(scaling["factor"]) + 1.0

    fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
    scaling = scaling | {"beta_fast": fast, "beta_slow": slow}
    if scaling.get("attention_factor") is None and scaling.get("factor") is not None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        scaling["attention_factor"] = (
            sharpness(mscale) / sharpness(mscale_all_dim) if mscale and mscale_all_dim else sharpness(1)
        )
    return scaling


def is_positive(value: object) -> bool:
    """Return True for a finite number above 0. A bool is no number here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST_SIZE


def short(value: object) -> str:
    """Return a short `repr` of any value of a damaged file."""
    try:
        text = repr(value)
    except ValueError:  # of an int of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."
