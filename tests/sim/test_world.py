"""The simulation in the default run: a thousand worlds, every rare event seen, the same seed the same bytes."""

from collections import Counter

import pytest

from tests.sim.witness import SOMETIMES
from tests.sim.world import World

NUM_WORLDS = 1000


@pytest.mark.timeout(900)  # a minute on a quiet machine
def test_every_stream_of_every_world_equals_the_oracle() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORLDS):
        world = World(seed)
        try:
            seen.update(world.run().seen)
        except AssertionError as error:
            pytest.fail(f"seed {seed}: {error!r}; python -m tests.sim --first {seed} --seeds 1")
    never = [name for name in SOMETIMES if not seen[name]]
    assert not never, f"never happened in {NUM_WORLDS} worlds: {never}"


@pytest.mark.parametrize("seed", [7, 70])
def test_the_same_seed_makes_the_same_plans(seed: int) -> None:
    assert World(seed).run().trace == World(seed).run().trace
