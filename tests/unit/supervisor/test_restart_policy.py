from scheduler_svc.supervisor.restart import RestartPolicy


def test_delays_double_up_to_the_longest():
    policy = RestartPolicy(first_delay_s=0.1, max_delay_s=0.5, max_restarts=10)
    assert [policy.died(now, lived_s=1.0) for now in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_long_life_starts_the_delays_over():
    policy = RestartPolicy()
    assert [policy.died(0.0, 0.0), policy.died(1.0, 29.9)] == [0.1, 0.2]
    assert policy.died(31.0, 30.0) == 0.1
    assert policy.died(32.0, 0.5) == 0.2


def test_the_restart_after_the_fifth_within_the_window_is_refused():
    policy = RestartPolicy(max_restarts=5)
    assert all(policy.died(now, 0.0) is not None for now in (0.0, 100.0, 200.0, 300.0, 400.0))
    assert policy.num_recent == 5
    assert policy.died(599.9, 0.0) is None


def test_a_restart_leaves_the_window_exactly_at_its_length():
    policy = RestartPolicy(max_restarts=5)
    for now in (0.0, 100.0, 200.0, 300.0, 400.0):
        policy.died(now, 0.0)
    assert policy.died(600.0, 200.0) == 0.1
    assert policy.num_recent == 5
    assert policy.died(600.1, 0.0) is None


def test_rare_deaths_are_always_restarted():
    policy = RestartPolicy()
    assert {policy.died(121.0 * i, 120.0) for i in range(1000)} == {0.1}
