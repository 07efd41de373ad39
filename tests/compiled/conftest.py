"""Programs compiled for a device that is not there; each file needs an environment of its own.

`make test-compiled-tpu` and `make test-compiled-cuda` make it; elsewhere these tests skip.
"""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "benchmarks")]


@pytest.fixture(scope="session")
def pair():
    """Ours and Optax's program for one device; each is compiled once."""
    from _devices import compile_for, one_device, placed
    from _programs import PROGRAMS

    done, shardings = {}, {}

    def compiled(platform, key, make, tree):
        if platform not in shardings:
            shardings[platform] = one_device(platform)
        if key not in done:
            case = make()
            args = placed(case.args(tree), shardings[platform])
            done[key] = compile_for(platform, case.function, *args, donate=case.donate)
        return done[key]

    def both(platform, title, tree):
        choices = {"gcx": PROGRAMS[title].ours, "optax": PROGRAMS[title].theirs}
        shapes = (len(tree), str(next(iter(tree.values()))))
        return [
            compiled(platform, (platform, title, who, shapes), make, tree)
            for who, make in choices.items()
        ]

    return both


@pytest.fixture(scope="session")
def cost():
    """The program without a feature, the one with it, and N."""
    from _costs import COSTS
    from _devices import compile_for, one_device, placed
    from claims import LARGE, size_of

    def both(platform, name):
        feature, sharding = COSTS[name], one_device(platform)
        cases = [make() for make in (feature.without, feature.with_it)]
        programs = [
            compile_for(
                platform, case.function, *placed(case.args(LARGE), sharding), donate=case.donate
            )
            for case in cases
        ]
        return *programs, size_of(feature.unit(LARGE))

    return both
