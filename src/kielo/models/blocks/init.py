"""First values that depend on nothing but a seed, a parameter's name and an element's index.

A counter-based generator gives each element 32 bits of its own (Philox-4x64-10, Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"). So a rank draws its own part of a parameter and nothing else,
and a model starts with the same numbers in every layout. Data in: seed, name, shape, box; data out: an fp32
tensor on the CPU.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import torch
from numpy.random import Philox
from torch import Tensor

from kielo.models.piece import Box

_NUMBERS_OF_COUNTER = 8  # four words of 64 bits
_PART = 2**20  # numbers that a thread draws at a time
_CHUNK = 2**15  # numbers, so that a chunk and its temporaries stay in a core's cache
# erfinv(x) = x × polynomial, lowest power first, in w - 2.5 for w = -log(1 - x²) below 5 and in √w - 3 above:
# Giles 2012, "Approximating the erfinv function", GPU Computing Gems, single precision.
_CENTRE = (1.50140941, 0.246640727, -0.00417768164, -0.00125372503, 0.00021858087, -4.39150654e-06,
           -3.5233877e-06, 3.43273939e-07, 2.81022636e-08)  # fmt: skip
_TAIL = (2.83297682, 1.00167406, 0.00943887047, -0.0076224613, 0.00573950773, -0.00367342844, 0.00134934322,
         0.000100950558, -0.000200214257)  # fmt: skip
_TAIL_BEGINS = 5.0


def constant(value: float, shape: Sequence[int], box: Box | None = None) -> Tensor:
    """Return the box of a parameter of which each element is `value`; the whole of it without a box."""
    return torch.full(_sizes(_whole(shape) if box is None else box), value, dtype=torch.float32, device="cpu")


def seeded_normal(
    name: str,
    shape: Sequence[int],
    standard_deviation: float,
    seed: int,
    rows: int | None = None,
    cutoff: float | None = None,
    box: Box | None = None,
) -> Tensor:
    """Return normal numbers around 0 for the box of a parameter of this whole shape.

    rows: number of rows that get numbers, always the same ones; those beyond, which pad a vocabulary, are 0.
    None for all. cutoff: the largest distance from 0 in standard deviations, None for no limit. box: a slice
    with bounds for each dim, None for the whole. One number is drawn for each element of the box outside
    the padding, and at most 14 more for each contiguous run of them.
    """
    box = _whole(shape) if box is None else box
    values = np.zeros(_sizes(box), dtype=np.float32)
    if rows is not None:
        box = (slice(min(box[0].start, rows), min(box[0].stop, rows)), *box[1:])
    drawn = values.reshape(-1)[: math.prod(_sizes(box))]
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    key = int.from_bytes(digest, "little")
    edge = 1.0 if cutoff is None else math.erf(cutoff / math.sqrt(2))

    def draw(part: tuple[np.ndarray, list[tuple[int, int]]]) -> None:
        numbers, runs = part
        _draw_bits(numbers.view(np.uint32), key, runs)
        for begin in range(0, len(numbers), _CHUNK):
            chunk = numbers[begin : begin + _CHUNK]
            chunk[:] = _erfinv(chunk.view(np.int32), edge)
            chunk *= math.sqrt(2) * standard_deviation

    parts = _parts(drawn, _runs(shape, box))
    threads = torch.get_num_threads()  # a rank's share of the node's cores
    if threads == 1 or len(drawn) <= _PART:
        for part in parts:
            draw(part)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(draw, parts))
    return torch.from_numpy(values)


def _parts(
    drawn: np.ndarray, runs: Iterable[tuple[int, int]]
) -> Iterator[tuple[np.ndarray, list[tuple[int, int]]]]:
    """Cut `drawn` at ends of runs into parts of at least `_PART` numbers; yield each with its runs."""
    begin, size, held = 0, 0, []
    for run in runs:
        held.append(run)
        size += run[1]
        if size >= _PART:
            yield drawn[begin : begin + size], held
            begin, size, held = begin + size, 0, []
    if held:
        yield drawn[begin:], held


def _draw_bits(bits: np.ndarray, key: int, runs: Iterable[tuple[int, int]]) -> None:
    """Fill `bits` (uint32 [elements of the runs]): element i of the parameter has the i-th of the stream."""
    generator, counter, done = Philox(key=key), 0, 0
    for first, length in runs:
        wanted, skipped = divmod(first, _NUMBERS_OF_COUNTER)
        generator.advance(wanted - counter)
        words = -(-(skipped + length) // 2)
        drawn = generator.random_raw(words).view(np.uint32)
        bits[done : done + length] = drawn[skipped : skipped + length]
        counter, done = wanted + -(-words // 4), done + length


def _runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yield (flat index, length) of the box's contiguous runs, at most a chunk long, in order."""
    if not math.prod(_sizes(box)):
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    inner = len(shape) - 1  # the dims after it are whole
    while inner > 0 and _sizes(box)[inner] == shape[inner]:
        inner -= 1
    length = _sizes(box)[inner] * strides[inner]
    for outer in product(*(range(part.start, part.stop) for part in box[:inner])):
        first = sum(index * stride for index, stride in zip((*outer, box[inner].start), strides))
        for begin in range(0, length, _CHUNK):
            yield first + begin, min(_CHUNK, length - begin)


def _erfinv(bits: np.ndarray, edge: float) -> np.ndarray:
    """Return erfinv of uniform numbers within ±edge, made of random bits (int32): normal, variance ½.

    Each step but the logarithm rounds alike on every processor and in every place of an array.
    """
    rest = _scaled(2**31 - 1 - (bits ^ (bits >> 31)), edge)  # from an integer, so that it is exact far out
    rest += 1 - edge  # 1 - |x|
    w = 2 - rest
    w *= rest
    np.log(w, out=w)
    np.negative(w, out=w)
    far = np.flatnonzero(w >= _TAIL_BEGINS)
    far_w = np.sqrt(w[far]) - 3
    w -= 2.5
    factor = _polynomial(_CENTRE, w)
    factor[far] = _polynomial(_TAIL, far_w)
    factor *= _scaled(bits, edge)
    return factor


def _scaled(integers: np.ndarray, edge: float) -> np.ndarray:
    scaled = integers.astype(np.float32)
    scaled += 0.5
    scaled *= edge * 2.0**-31
    return scaled


def _polynomial(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    highest, *others = reversed(coefficients)
    value = np.full_like(x, highest)
    for coefficient in others:
        value *= x
        value += coefficient
    return value


def _whole(shape: Sequence[int]) -> Box:
    return tuple(slice(0, size) for size in shape)


def _sizes(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)
