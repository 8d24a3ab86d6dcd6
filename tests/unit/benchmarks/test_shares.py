"""Shares of a step: they are parts of one whole, whatever the clocks of the engine count in."""

import pytest

from benchmarks.shares import shares_of

SECONDS = {"step": 8.0, "forward": 6.0, "sampling": 1.0}


def test_parts_add_up_to_the_wall_time():
    found = {"seconds": SECONDS, "operations": {"linear": 2.0, "attention": 1.0, "norm": 1.0}, "wall": 10.0}
    shares = shares_of(found, planned=0.5)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares == pytest.approx(
        {
            "matrix products": 0.3,  # half of what the engine counted, so half of forward
            "attention": 0.15,
            "other operations": 0.15,
            "sampling": 0.1,
            "executor around it": 0.1,
            "scheduler": 0.05,
            "wire and waiting": 0.15,
        }
    )


def test_without_an_engine_forward_is_one_part_and_planning_beside_a_step_is_free():
    found = {"seconds": SECONDS, "operations": {"linear": 0.0, "attention": 0.0}, "wall": 8.0}
    shares = shares_of(found, planned=0.5)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert (shares["other operations"], shares["scheduler"], shares["wire and waiting"]) == (0.75, 0.0, 0.0)
