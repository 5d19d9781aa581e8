"""Reading of values from a Hugging Face `config.json`, with every complaint collected; torch-free."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kielo.models.rope_scaling import LARGEST_SIZE, is_positive, is_size, short

LAYER_KINDS = ("full_attention", "sliding_attention")
_MOST_LAYERS = 10_000
NO_NULL = object()


class Kind(NamedTuple):
    fits: Callable[[Any], bool]
    expected: str  # in an error


SIZE = Kind(is_size, f"a whole number from 1 to {LARGEST_SIZE:,}")
LAYERS = Kind(
    lambda value: is_size(value) and value <= _MOST_LAYERS, f"a whole number from 1 to {_MOST_LAYERS:,}"
)
WHOLE = Kind(lambda value: type(value) is int and value >= 0, "a whole number")
NUMBER = Kind(is_positive, "a number above 0")
SHARE = Kind(lambda value: is_positive(value) and value <= 1, "a number above 0, up to 1")
SWITCH = Kind(lambda value: isinstance(value, bool), "true or false")


class ConfigReader:
    """A reader of one config. It collects complaints, continues with defaults, and notes the keys read."""

    def __init__(self, config: Mapping[str, object]):
        self._config = config
        self.complaints: list[str] = []
        self.keys_read: set[str] = set()

    def get(self, name: str) -> Any:
        self.keys_read.add(name)
        return self._config.get(name)

    def value(self, names: Sequence[str], kind: Kind, default: Any, null: Any = NO_NULL) -> Any:
        """Return the value of the first key among `names` that exists, else `default`; null is `null`."""
        self.keys_read.update(names)
        present = [name for name in names if name in self._config]
        present = [name for name in present if self._config[name] is not None] or present
        if not present:
            return default
        value = self._config[present[0]]
        for other in present[1:]:
            if self._config[other] != value:
                self.complain(
                    f"{present[0]} = {short(value)} and {other} = {short(self._config[other])} mean the same "
                    "and differ"
                )
        if value is None and null is not NO_NULL:
            return null
        if not kind.fits(value):
            given = "null" if value is None else short(value)
            self.complain(f"{present[0]} = {given} does not fit: expected {kind.expected}")
            return default
        return value

    def only(self, name: str, known: Sequence[Any]) -> Any:
        """Return a value, and complain unless it is `known`. The first is the default, also for null."""
        value = self.get(name)
        if value is None:
            return known[0]
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in known):
            self.complain(f"not supported: {name} = {short(value)} (known: {', '.join(map(repr, known))})")
            return known[0]
        return value

    def layer_types(self, default: Sequence[str]) -> tuple[str, ...]:
        """Return the kind of each layer: `default` if the key is missing or null."""
        count = len(default)
        kind = Kind(
            lambda value: (
                isinstance(value, list) and len(value) == count and all(each in LAYER_KINDS for each in value)
            ),
            f"a list of {count} of {' or '.join(LAYER_KINDS)}, one for each layer",
        )
        return tuple(self.value(("layer_types",), kind, default, default))

    def complain(self, complaint: str) -> None:
        self.complaints.append(complaint)
