"""The fuzzer by hand: ``python tests/fuzz/fuzz_run.py --minutes 10 --seed 1``, or ``make soak``."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from itertools import count

import torch

from fuzz_base import run
from fuzz_functions import Function
from fuzz_layers import Layer
from fuzz_models import Model

FAMILIES = (Layer, Function, Model)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--cases", type=int, help="so many of each family, whatever they take")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--family", choices=[f.__name__ for f in FAMILIES], action="append")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many")
    given = parser.parse_args()
    torch.set_num_threads(1)
    families = [f for f in FAMILIES if not given.family or f.__name__ in given.family]
    print(f"seed {given.seed}", flush=True)
    started, done, failed = time.monotonic(), Counter[str](), 0
    for index in count():
        for family in families:
            for failure in run(family, given.seed, [index]):
                failed += 1
                print(f"\n{failure}\n", flush=True)
            done[family.__name__] += 1
        over = time.monotonic() - started > 60 * given.minutes
        if failed >= given.failures or (index + 1 >= given.cases if given.cases else over):
            break
    print(f"{sum(done.values())} cases ({dict(done)}), {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
