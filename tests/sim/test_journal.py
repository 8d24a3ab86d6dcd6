"""A journal of a random life makes the same plans again, whole or cut, masked or not, from any of its files on; and a
core that decides otherwise is found out."""

import dataclasses
import errno
import json
import os
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from protos.stepwire.wire.v1 import journal_pb2
from scheduler_svc.cli import app
from scheduler_svc.core import planner
from scheduler_svc.core.contract import Limits
from scheduler_svc.core.memory import Memory
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.errors import StartupError
from scheduler_svc.journal import frames
from scheduler_svc.journal.frames import MAGIC, FrameReader, frame
from scheduler_svc.journal.replay import Difference, Replay, parse_position, report
from tests.sim.mutants import patched
from tests.sim.recorded import RecordedWorld

NUM_WORLDS = 24


def replayed(path) -> Replay:
    replay = Replay(path)
    replay.run()
    replay.core.check()
    return replay


def test_every_plan_of_every_life_is_made_again_from_any_file_on(tmp_path):
    num_cut = num_cut_in_flight = 0
    for seed in range(NUM_WORLDS):
        world = RecordedWorld(seed, tmp_path, masked=bool(seed % 2), cut=0.03)
        world.run()
        replays = [replayed(path) for path in world.paths]
        last = next(r for r in replays if r.path.name == f"{seed}.{world._journals}.journal")
        assert last.core.stats() == world.scheduler.stats(), f"seed {seed}"
        assert {r.masked for r in replays} == {bool(seed % 2)}
        num_cut += sum(path.suffix == ".1" for path in world.paths)
        num_cut_in_flight += world.seen["journal cut with steps in flight"]
    assert num_cut >= 5
    assert num_cut_in_flight >= 5


def test_both_files_together_stay_within_the_limit(tmp_path, caplog):
    sizes = []
    for seed in range(6):
        world = RecordedWorld(seed, tmp_path, masked=True, limit_bytes=20_000).run()
        sizes += [path.stat().st_size for path in world.paths]
    assert max(sizes) <= 10_000 + 4_000, "half of the limit, and one turn"
    assert "journal_ended" in caplog.text, "a snapshot that takes the whole file ends the journal, and nothing else"


def test_a_masked_life_is_the_life_and_shows_no_prompt(tmp_path):
    """The executor and the clients see nothing of the mask: worlds check streams against the oracle."""
    lives = {}
    for masked in (False, True):
        folder = tmp_path / str(masked)
        folder.mkdir()
        world = RecordedWorld(5, folder, masked=masked).run()
        written = b"".join(path.read_bytes() for path in folder.iterdir())
        lives[masked] = {key: client.received for key, client in world.clients.items()}
        prompts = [request.prompt.astype("<i4").tobytes() for request in world.requests.values()]
        shown = [prompt in written for prompt in prompts if len(prompt) >= 4 * 8]
        assert shown
        assert shown == [not masked] * len(shown)
    assert lives[True] == lives[False]


MUTANTS = {
    "smaller chunks": lambda: patched(planner.Planner, "_share", staticmethod(lambda left, others_wait: -(-left // 3))),
    "nothing is shared": lambda: patched(Memory, "find_prefix", lambda memory, sequence, rows: []),
    "a block too many": lambda: patched(planner, "blocks_for", lambda num_tokens, size: num_tokens // size + 1),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_another_core_is_found_out_at_its_first_other_plan(tmp_path, name):
    for seed in range(NUM_WORLDS):
        for path in RecordedWorld(seed, tmp_path, masked=True).run().paths:
            replay = Replay(path)
            with MUTANTS[name]():
                said = difference_of(replay)
            if said:
                assert f"plan {replay.step} of epoch {replay.epoch}" in said
                replayed(path)
                return
    pytest.fail(f"{name}: no journal notices it")


def difference_of(replay: Replay) -> str:
    try:
        replay.run()
    except Difference as difference:
        return str(difference)
    return ""


def test_a_bug_that_ends_the_scheduler_is_met_again(tmp_path):
    world = RecordedWorld(3, tmp_path, masked=True)
    with patched(Rows, "commit", refuse), pytest.raises(AssertionError, match="a bug"):
        world.run()
    world.scheduler.flush()
    (path,) = world.paths[-1:]
    replayed(path)  # the core that has no such bug
    with patched(Rows, "commit", refuse):
        assert "is met by AssertionError" in difference_of(Replay(path))


def test_a_plan_that_a_bug_prevented_is_known_as_such(tmp_path):
    world = RecordedWorld(3, tmp_path, masked=True)
    with patched(Memory, "settled", refuse), pytest.raises(AssertionError, match="a bug"):
        world.run()
    world.scheduler.flush()
    (path,) = world.paths[-1:]
    assert "there was nothing to do, here is step=" in difference_of(Replay(path))  # the core that has no such bug
    with patched(Memory, "settled", refuse):
        assert "is met by AssertionError" in difference_of(Replay(path))


def refuse(*_: object) -> None:
    raise AssertionError("a bug")


def test_a_torn_tail_costs_what_was_torn(tmp_path):
    (path,) = RecordedWorld(3, tmp_path, masked=True).run().paths[-1:]
    whole, data = replayed(path), path.read_bytes()
    for size in (len(data) - 1, len(data) * 2 // 3, len(data) // 3):
        path.write_bytes(data[:size])
        cut = replayed(path)
        assert cut.num_plans <= whole.num_plans
        assert cut.num_torn_bytes == 0 or f"the last {cut.num_torn_bytes} bytes" in "\n".join(report(cut))
    assert cut.num_plans < whole.num_plans


def test_what_keeps_a_replay_from_what_was_asked_is_said_with_status_1(tmp_path):
    (path,) = RecordedWorld(3, tmp_path, masked=True).run().paths[-1:]
    status, out, said = command(path)
    assert (status, said) == (0, "")
    assert f"{replayed(path).num_plans} plans in " in out
    status, _, said = command(path, "--until", "9:9", "--story", "nobody")
    assert status == 1
    assert f"there is no plan 9 of epoch 9 in {path}: its last is plan " in said
    assert said.endswith("; nothing is known of request nobody")
    data = bytearray(path.read_bytes())
    begins = len(MAGIC)
    for content in list(FrameReader(path).read())[:20]:
        begins += len(frame(content))
    data[begins + 8] ^= 1
    path.write_bytes(data)
    status, _, said = command(path)
    assert status == 1
    assert f"begins at byte {begins}: {len(data) - begins} bytes from there on were not read" in said
    path.write_bytes(MAGIC + bytes([data[len(MAGIC)] ^ 1]) + data[len(MAGIC) + 1 :])
    assert f"begins at byte {len(MAGIC)}:" in command(path)[2]


def command(path, *options: str) -> tuple[int, str, str]:
    """`stepwire replay`: its exit status, what it prints, what it complains of in a line."""
    result = CliRunner().invoke(app, ["replay", str(path), *options])
    status = 1 if isinstance(result.exception, StartupError) else result.exit_code
    return status, result.output, str(result.exception or "")


def test_one_is_told_as_one(tmp_path):
    told = SimpleNamespace(
        core=Scheduler(Limits(hash_key=b"a key")),
        num_plans=1,
        num_epochs=1,
        masked=True,
        num_torn_bytes=0,
        step=1,
        epoch=1,
    )
    assert report(told)[0] == "1 plan in 1 epoch is the same; ids are masked"
    told.num_plans, told.num_epochs = 150, 2
    assert report(told)[0] == "150 plans in 2 epochs are the same; ids are masked"


@pytest.mark.parametrize("is_refused", [False, True], ids=["half a write is taken", "a write is refused"])
def test_a_disk_that_fills_up_ends_the_journal_and_nothing_else(tmp_path, caplog, monkeypatch, is_refused):
    room = 2_000
    write = os.write

    def write_until_full(descriptor: int, data: bytes) -> int:
        nonlocal room
        if len(data) <= room:
            room -= len(data)
            return write(descriptor, data)
        if is_refused:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(frames, "os", SimpleNamespace(**vars(os) | {"write": write_until_full}))
    world = RecordedWorld(3, tmp_path, masked=True).run()  # every stream of it equals the oracle
    assert caplog.text.count("journal_ended") == 1
    (path,) = world.paths[-1:]
    cut = replayed(path)
    assert cut.num_plans > 0
    assert (cut.num_torn_bytes > 0) == (not is_refused)


def test_until_stops_where_it_says(tmp_path):
    path = RecordedWorld(3, tmp_path, masked=True).run().paths[0]
    epoch, plans = 0, []
    for content in FrameReader(path).read():
        entry = journal_pb2.JournalEntry.FromString(content)
        epoch = entry.reset.epoch or epoch
        if entry.plan.step_id:
            plans.append((epoch, entry.plan.step_id))
    middle = len(plans) // 2
    replay = Replay(path)
    replay.run(parse_position("{}:{}".format(*plans[middle])))
    assert (replay.epoch, replay.step) == plans[middle]
    assert replay.num_plans == middle + 1 < len(plans)
    assert parse_position("4") == (None, 4)
    for text in ("", "x", "1:", ":", "-1", "1:2:3"):
        with pytest.raises(StartupError):
            parse_position(text)


def test_every_limit_is_in_the_journal(tmp_path):
    path = RecordedWorld(0, tmp_path, masked=True).paths[0]
    start = journal_pb2.JournalEntry.FromString(next(FrameReader(path).read())).start
    names = {field.name for field in dataclasses.fields(Limits)} - {"hash_key"}
    assert set(json.loads(start.limits_json)) == names
    assert b"a key" not in path.read_bytes()
