"""Which recorded graph a decode step uses."""

from executor_svc.graphs import GraphKey, GraphTable, row_sizes, split_sizes


def test_sizes_reach_the_largest_and_ascend() -> None:
    for most in (1, 2, 3, 8, 100, 256, 1000):
        sizes = row_sizes(most)
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
    assert split_sizes(1) == [1]
    assert split_sizes(2) == [1, 2]
    assert split_sizes(20) == [1, 4, 16, 20]


def test_a_step_takes_the_smallest_recording_that_holds_it() -> None:
    recorded: list[GraphKey] = []

    def record(key: GraphKey) -> str:
        recorded.append(key)
        return f"{key.num_rows}x{key.max_splits}"

    table: GraphTable[str] = GraphTable(16, 5, record)
    assert table.find(3, 1) is None
    table.record_all()
    assert recorded[0] == GraphKey(16, 5)
    assert len(table) == len(recorded) == len(set(recorded)) == 5 * 3
    assert table.find(1, 1) == (GraphKey(1, 1), "1x1")
    assert table.find(3, 2) == (GraphKey(4, 4), "4x4")
    assert table.find(4, 4) == (GraphKey(4, 4), "4x4")
    assert table.find(5, 5) == (GraphKey(8, 5), "8x5")
    assert table.find(17, 1) is None
    assert table.find(1, 6) is None
