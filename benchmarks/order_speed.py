"""Speed of `Order.locate`: sample numbers turned into places a second, in vectors of 4,096.

    python benchmarks/order_speed.py [--sources 3] [--samples 1e12]

Prints one line for consecutive samples, one for those of rank 0 of 6,144, one for samples all over the run.
"""

import argparse
import time

import numpy as np

from kielo.dataset.order import Order, OrderSource, Phase

VECTOR = 4096


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--sources", type=int, default=3)
    arguments.add_argument("--samples", type=float, default=1e12, help="samples in one epoch of all sources")
    arguments.add_argument("--seconds", type=float, default=1.0)
    chosen = arguments.parse_args()
    length, total = 4096, int(chosen.samples)
    names = [f"source {number}" for number in range(chosen.sources)]
    sizes = [
        total * (number + 1) * 2 // (chosen.sources * (chosen.sources + 1))
        for number in range(chosen.sources)
    ]
    started = time.perf_counter()
    order = Order(
        1, Phase(1, 0, length, length), [OrderSource(n, s * length, s) for n, s in zip(names, sizes)]
    )
    print(
        f"built for {total:.0e} samples of {chosen.sources} sources in {time.perf_counter() - started:.3f} s"
    )
    steps = {
        "consecutive": np.arange(VECTOR),
        "every 6,144th": np.arange(VECTOR) * 6144,
        "anywhere": np.random.default_rng(1).integers(0, total // 2, VECTOR),
    }
    for name, samples in steps.items():
        wall, processor = measure(order, samples, chosen.seconds)
        print(
            f"{name:14s} {wall / 1e6:6.2f} million samples/s ({processor / 1e6:.2f} a second of processor "
            "time)"
        )


def measure(order: Order, samples: np.ndarray, seconds: float) -> tuple[float, float]:
    """Samples a second of wall and of processor time (one core), over at least `seconds`.

    Each vector is further on than the one before. On a busy machine only the second figure says something.
    """
    order.locate(samples)
    done, started, processor_started = 0, time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - started) < seconds:
        order.locate(samples + done)
        done += VECTOR
    return done / passed, done / (time.process_time() - processor_started)


if __name__ == "__main__":
    main()
