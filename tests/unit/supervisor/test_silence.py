from scheduler_svc.supervisor.silence import LATE_S, Silence


def test_silence_counts_from_the_last_change():
    silence = Silence(limit_s=5.0)
    assert [silence.look(now, sign) for now, sign in ((0.0, 1), (1.0, 2), (3.0, 2), (5.9, 2))] == [False] * 4
    assert silence.look(6.0, 2)


def test_any_change_is_a_sign_also_backwards():
    silence = Silence(limit_s=2.0)
    assert not any(silence.look(float(now), 10 - now) for now in range(10))


def test_who_never_gave_a_sign_is_left_alone():
    silence = Silence(limit_s=2.0)
    assert not any(silence.look(float(now), None) for now in range(10))


def test_a_supervisor_that_was_away_has_seen_no_silence():
    silence = Silence(limit_s=2.0)
    silence.look(0.0, 1)
    assert not silence.look(0.0 + LATE_S + 0.1, 1)
    assert not silence.look(LATE_S + 2.0, 1)
    assert silence.look(LATE_S + 2.2, 1)
