"""A training whose ranks begin an all-reduce of different shapes in step 4: `python -m` it in place of kielo.

One argument before kielo's: the rank whose tensor is the smaller one, which gloo ends.
"""

import os
import sys

import torch
import torch.distributed as dist

from kielo.cli.main import main
from kielo.train.feed import Feed

STEP, BEGIN = 4, "unlike collectives begin"  # before the first checkpoint, which may be whole or not
take = Feed.take


def sum_four() -> None:
    dist.all_reduce(torch.ones(4))


def sum_eight() -> None:
    dist.all_reduce(torch.ones(8))


def take_and_sum(feed: Feed, step: int):
    if step == STEP:
        os.write(1, f"{BEGIN}\n".encode())  # a line at once, that those of two ranks do not mix
        (sum_four if dist.get_rank() == smaller else sum_eight)()
    return take(feed, step)


if __name__ == "__main__":
    smaller, Feed.take = int(sys.argv.pop(1)), take_and_sum
    sys.exit(main(sys.argv[1:]))
