"""A progress bar that draws nothing and remembers what it was told, in the place of tqdm's."""

from types import ModuleType
from typing import Any, Self

import pytest


class Bar:
    """options: of the bar; updates: the steps that it was moved by."""

    def __init__(self, **options: Any):
        self.options, self.updates = options, []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, number: int) -> None:
        self.updates.append(number)


def bars_of(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[Bar]:
    """Returns the bars that the module makes from now on."""
    made: list[Bar] = []

    def make(**options: Any) -> Bar:
        made.append(Bar(**options))
        return made[-1]

    monkeypatch.setattr(module, "tqdm", make)
    return made
