"""Agreement of all ranks on descriptions (paths, names, messages): the same value or error on every rank."""

import socket
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from kielo.ranks import objects
from kielo.recipe.errors import KieloError, sentence

T = TypeVar("T")
R = TypeVar("R")

_ERRORS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (OSError, KieloError, RuntimeError)}


class Agreement:
    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1

    def gather(self, value: T) -> list[T]:
        return [value] if self.size == 1 else objects.all_gather(value, self.group)

    def on_first(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0. Return its result, or raise its error as KieloError, on every rank."""
        results: list[T] = []
        complaint: str | None = None
        cause: Exception | None = None
        if self.rank == 0:
            try:
                results = [action()]
            except (KieloError, OSError) as error:
                complaint, cause = sentence(error) or str(error), error
        if self.size > 1:
            results, complaint = objects.broadcast((results, complaint), self.group)
        if complaint is not None:
            raise KieloError(complaint) from cause
        return results[0]

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Run `action` on every rank. Return all results, or raise the first error, with its rank."""
        results: list[T] = []
        failure: tuple[str, tuple[Any, ...]] | None = None
        cause: Exception | None = None
        try:
            results = [action()]
        except OSError as error:
            reason = f"{error.strerror or error} on rank {self.rank}"
            failure, cause = ("OSError", (error.errno, reason, error.filename)), error
        except Exception as error:
            kind = "KieloError" if isinstance(error, KieloError) else "RuntimeError"
            failure, cause = (kind, (f"{error} on rank {self.rank} ({type(error).__name__})",)), error
        answers = self.gather((results, failure))
        for _, failure in answers:
            if failure:
                raise _ERRORS[failure[0]](*failure[1]) from cause
        return [result for of_rank, _ in answers for result in of_rank]

    def distribute(self, value: T, divide: Callable[[list[T]], list[R]]) -> R:
        """Give rank 0 the values of all ranks. Return to each rank only its entry of `divide(values)`."""
        values = objects.gather(value, self.group) if self.size > 1 else [value]
        parts: list[R] = []
        self.on_first(lambda: parts.extend(divide(values)))
        return parts[0] if self.size == 1 else objects.scatter(parts, self.group)

    def refuse_together(self, complaint: str | None) -> None:
        """Raise KieloError on every rank if any rank complains: the first complaint, with its rank."""
        if complaint and self.size > 1:
            complaint = f"{complaint} (rank {self.rank} on {socket.gethostname()})"
        first = next(filter(None, self.gather(complaint)), None)
        if first:
            raise KieloError(first)
