"""Agreement of all ranks: values in, the same value or the same error out on every rank.

Without a process group the one process is rank 0 of 1, and nothing is sent. Sent values are descriptions
(paths, names, shapes, messages), never tensors.
"""

import socket
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from kielo.recipe.errors import KieloError

T = TypeVar("T")
R = TypeVar("R")


class Agreement:
    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1

    def gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def on_first(self, action: Callable[[], T]) -> T:
        """Runs `action` on rank 0; returns its result, or raises its error as KieloError, on every rank."""
        answer: tuple[T | None, str | None] = (None, None)
        cause: Exception | None = None
        if self.rank == 0:
            try:
                answer = (action(), None)
            except (KieloError, OSError) as error:
                answer, cause = (None, str(error)), error
        if self.size > 1:
            carrier = [answer]
            dist.broadcast_object_list(carrier, group=self.group, group_src=0)
            answer = carrier[0]
        if answer[1] is not None:
            raise KieloError(answer[1]) from cause
        return answer[0]

    def on_all(self, action: Callable[[], T]) -> list[T]:
        """Runs `action` on every rank; returns all results, or raises the first rank's error on every rank.

        Its message ends with the rank. An OSError keeps its errno.
        """
        answer: T | Exception
        cause: Exception | None = None
        try:
            answer = action()
        except OSError as error:
            reason = f"{error.strerror or error} on rank {self.rank}"
            answer, cause = OSError(error.errno, reason, error.filename), error
        except Exception as error:
            kind = KieloError if isinstance(error, KieloError) else RuntimeError
            answer, cause = kind(f"{error} on rank {self.rank} ({type(error).__name__})"), error
        answers = self.gather(answer)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer from cause
        return answers

    def distribute(self, value: T, divide: Callable[[list[T]], list[R]]) -> R:
        """Gives rank 0 the values of all ranks, and returns to each rank its entry of `divide(values)`.

        Unlike `gather`, nothing else is sent to other ranks. Raises what `on_first` raises.
        """
        values: list[T] = [value] * self.size
        if self.size > 1:
            dist.gather_object(value, values if self.rank == 0 else None, group=self.group, group_dst=0)
        parts: list[R] = []
        self.on_first(lambda: parts.extend(divide(values)))
        if self.size == 1:
            return parts[0]
        received: list[R | None] = [None]
        dist.scatter_object_list(received, parts if self.rank == 0 else None, group=self.group, group_src=0)
        return received[0]

    def refuse_together(self, complaint: str | None) -> None:
        """Raise KieloError on every rank if any rank complains: the first complaint, with its rank."""
        if complaint and self.size > 1:
            complaint = f"{complaint} (rank {self.rank} on {socket.gethostname()})"
        first = next(filter(None, self.gather(complaint)), None)
        if first:
            raise KieloError(first)
