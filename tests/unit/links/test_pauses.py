"""What counts as a pause of this process, and what does not."""

from scheduler_svc.links.pauses import LATE_S, Pauses


def test_looks_that_come_in_time_are_no_pause():
    pauses = Pauses(every_s=0.1)
    assert [pauses.look(now) for now in (50.0, 50.1, 50.1 + 0.1 + LATE_S - 0.001)] == [0.0, 0.0, 0.0]


def test_a_late_look_is_one_as_long_as_it_is_late_and_once():
    pauses = Pauses(every_s=0.5)
    pauses.look(50.0)
    assert pauses.look(60.0) == 9.5
    assert pauses.look(60.5) == 0.0
