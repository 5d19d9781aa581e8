"""Garbage is freed at the chosen steps, and the parts of the run when they are given back."""

import gc
import weakref

import pytest

from kielo.train.garbage import Garbage


class Node:
    """An object that refers to itself, which only the collector frees."""

    def __init__(self):
        self.me = self


@pytest.fixture
def garbage():
    garbage = Garbage(every_steps=3)
    yield garbage
    garbage.end()


def test_cycles_are_freed_at_the_chosen_steps_and_parts_after_the_end(garbage):
    part = Node()
    of_part = weakref.ref(part)
    garbage.begin()
    del part
    of_step = weakref.ref(Node())
    seen = []
    for step in (1, 2, 3):
        garbage.step(step)
        seen.append(of_step() is None)
    assert seen == [False, False, True]
    assert not gc.isenabled() and of_part() is not None
    garbage.end()
    gc.collect()
    assert gc.isenabled() and of_part() is None
