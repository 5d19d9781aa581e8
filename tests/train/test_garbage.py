"""Garbage is freed at the chosen steps, and the parts of the run when they are given back."""

import gc
import weakref

from kielo.train.watch.resources import Garbage
from tests.started_ranks import run_ranks


class Node:
    """An object that refers to itself, which only the collector frees."""

    def __init__(self):
        self.me = self


def what_is_freed() -> dict[str, list[bool]]:
    """Of a rank's process: after each step, is a cycle of it freed; then (is the collector on, is a part of
    the run there), in the run and after it. Before it: what nobody holds when it begins; old: what has lived
    for long, after a step's look and after a save's.
    """
    garbage = Garbage(every_steps=3)
    part = Node()
    of_part = weakref.ref(part)
    gc.disable()
    before = weakref.ref(Node())
    garbage.begin()
    freed_before = [before() is None]
    del part
    lasting = Node()
    of_lasting = weakref.ref(lasting)
    gc.collect()  # it is of the oldest generation from now on
    del lasting
    of_step = weakref.ref(Node())
    freed = []
    for step in (1, 2, 3):
        garbage.step(step)
        freed.append(of_step() is None)
    old = [of_lasting() is None]
    garbage.collect()
    old.append(of_lasting() is None)
    inside = [gc.isenabled(), of_part() is not None]
    garbage.end()
    gc.collect()
    after = [gc.isenabled(), of_part() is not None]
    return {"before": freed_before, "freed": freed, "old": old, "inside": inside, "after": after}


def test_cycles_are_freed_at_the_chosen_steps_and_parts_after_the_end():
    """In a process of its own: tests/conftest.py replaces the beginning and the end in this one."""
    (found,) = run_ranks(what_is_freed, 1)
    assert found == {
        "before": [True], "freed": [False, False, True], "old": [False, True], "inside": [False, True],
        "after": [True, False],
    }  # fmt: skip
