"""Short runs of the two long ones, so that they work when a night is given to them."""

from tests.chaos import chaos, soak


def test_streams_survive_random_kills_and_stops(tmp_path, default_model):
    outcome = chaos.run(chaos.Plan(seconds=6, seed=7, num_streams=16, min_kills=3), tmp_path, default_model)
    print(outcome.report())
    assert outcome.is_good


def test_a_thousand_short_and_cancelled_streams_leave_nothing_behind(tmp_path, default_model):
    outcome = soak.run(1000, 7, tmp_path, default_model)
    print(outcome.report())
    assert outcome.is_good
