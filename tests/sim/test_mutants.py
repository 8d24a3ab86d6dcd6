"""The simulation is worth what it catches: every seeded bug must fall."""

import pytest

from tests.sim.mutants import MUTANTS, seed_that_catches


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_the_simulation_catches(mutant) -> None:  # type: ignore[no-untyped-def]
    seed = seed_that_catches(mutant)
    assert seed is not None, "no world notices this bug"
    print(f"{mutant.__name__}: caught by seed {seed}")
