"""A journal run through the core: the same calls, and every plan compared with the one that was made.

Knows the core's face and the journal's entries. Reads only; the first plan that differs ends it, since all later ones
follow from it.
"""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from protos.stepwire.wire.v1 import journal_pb2, step_pb2
from scheduler_svc.core.contract import Delivered, Geometry, Limits, Policy, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.errors import ProtocolViolation, RequestError, StartupError, StepwireError
from scheduler_svc.journal import snapshot
from scheduler_svc.journal.frames import FrameReader
from scheduler_svc.journal.recorder import VERSION, digest

# What a core that is not the recorded one may raise at a call that was accepted.
_SURPRISES = (RequestError, ProtocolViolation, AssertionError, LookupError, ValueError, TypeError, AttributeError)

Position = tuple[int | None, int]  # epoch (None: whichever comes first) and step


class Difference(StepwireError):
    """The core did something else than was recorded; the message names the first plan or call."""


@dataclass(slots=True)
class Replay:
    """`run()` once; then what there is to see."""

    path: Path
    make: Callable[[Limits], Scheduler] = Scheduler
    core: Scheduler = dataclasses.field(init=False)
    masked: bool = False
    num_plans: int = 0
    num_epochs: int = 0
    num_entries: int = 0
    # Bytes at the end of the file that are no whole frame, as the process left it.
    num_torn_bytes: int = 0
    # What keeps it from being what was asked for, a line each: a damaged file, a step that never came.
    troubles: list[str] = dataclasses.field(default_factory=list)
    # Of the last plan.
    epoch: int = 0
    step: int = 0

    def run(self, until: Position | None = None) -> None:
        """Raises Difference, and StartupError for what is no journal."""
        reader = FrameReader(self.path)
        frames = reader.read()
        start = self._entry(next(frames, b""))
        if reader.damaged_at is not None:
            raise StartupError(self._damage(reader))
        if start.WhichOneof("body") != "start":
            raise StartupError(f"{self.path} holds no whole entry: it was cut when it was begun")
        self._begin(start.start)
        for content in frames:
            self.num_entries += 1
            self._play(self._entry(content))
            if until is not None and (until[0] in (None, self.epoch)) and self.step == until[1]:
                return
        self.num_torn_bytes = reader.num_torn_bytes
        if reader.damaged_at is not None:
            self.troubles.append(self._damage(reader))
        if until is not None:
            epoch = "" if until[0] is None else f" of epoch {until[0]}"
            self.troubles.append(f"there is no plan {until[1]}{epoch} in {self.path}: its last is {self._where()}")

    def story(self, request_id: str) -> list[str]:
        """What happened to a request, up to here; empty and a trouble when nothing is known of it."""
        lines = self.core.story(request_id) if self.num_entries else []
        if not lines:
            self.troubles.append(f"nothing is known of request {request_id}")
        return lines

    def _damage(self, reader: FrameReader) -> str:
        return (
            f"{self.path} is damaged in the entry that begins at byte {reader.damaged_at}: "
            f"{count(reader.num_unread_bytes, 'byte')} from there on were not read"
        )

    def _entry(self, content: bytes) -> journal_pb2.JournalEntry:
        try:
            return journal_pb2.JournalEntry.FromString(content)
        except DecodeError:
            raise StartupError(f"{self.path}: entry {self.num_entries} is not of this version") from None

    def _begin(self, start: journal_pb2.JournalStart) -> None:
        if start.version != VERSION:
            raise StartupError(f"{self.path} is of version {start.version}, this is version {VERSION}")
        self.masked = start.masked
        self.core = self.make(_limits(start.limits_json))
        if start.snapshot:
            vars(self.core).update(snapshot.restore(start.snapshot))

    def _play(self, entry: journal_pb2.JournalEntry) -> None:
        body = entry.WhichOneof("body")
        try:
            if body == "plan":
                self._plan(entry.now, entry.plan)
            else:
                self._call(entry, body)
            self.core.take_output()
        except _SURPRISES as error:
            raise Difference(f"{self._where()}: {body} is met by {_told(error)}") from error

    def _call(self, entry: journal_pb2.JournalEntry, body: str | None) -> None:
        core = self.core
        match body:
            case "submit":
                core.submit(_request(entry.submit), entry.now)
            case "cancel_request":
                core.cancel_request(entry.cancel_request)
            case "cancel_handle":
                core.cancel_handle(entry.cancel_handle.session, entry.cancel_handle.handle)
            case "drop_session":
                core.drop_session(entry.drop_session)
            case "expire":
                core.expire(entry.now)
            case "result":
                core.commit(entry.result, entry.now)
            case "executor_lost":
                core.executor_lost()
            case "reset":
                core.reset(Geometry.from_wire(entry.reset.geometry), entry.reset.boot_id, entry.reset.epoch)
                self.num_epochs += 1
                self.epoch, self.step = entry.reset.epoch, 0
            case _:
                raise StartupError(f"{self.path}: entry {self.num_entries} is not of this version")

    def _plan(self, now: float, recorded: journal_pb2.JournalPlan) -> None:
        plan = self.core.plan(now)
        if recorded.step_id:
            if plan is not None:
                self.epoch = plan.epoch
            self.step = recorded.step_id
            self.num_plans += 1
        if plan is None and not recorded.step_id:
            return
        if plan is None:
            raise Difference(f"{self._where()} was made, here there is nothing to do")
        if not recorded.step_id:
            raise Difference(f"after {self._where()} there was nothing to do, here is {_describe(plan)}")
        if digest(plan) != recorded.digest:
            raise Difference(f"{self._where()} differs: here it is {_describe(plan)}")

    def _where(self) -> str:
        return f"plan {self.step} of epoch {self.epoch}"


def _limits(text: str) -> Limits:
    values = json.loads(text)
    names = {field.name for field in dataclasses.fields(Limits)} - {"hash_key"}
    if set(values) - names:
        raise StartupError(f"the journal has limits that this version does not know: {sorted(set(values) - names)}")
    return Limits(**{**values, "policy": Policy(values["policy"])})


def _request(submitted: journal_pb2.JournalSubmit) -> Request:
    """What the core was given, unchecked: it was checked when it was recorded."""
    submit = submitted.submit
    delivered = tuple(
        Delivered(_ints(choice.token_ids), choice.finished, choice.num_preemptions, choice.num_resumes)
        for choice in submit.delivered
    )
    return Request(
        session=submitted.session,
        request_id=submit.request_id,
        handle=submit.handle,
        prompt=_ints(submit.prompt_token_ids),
        sampling=submit.sampling,
        max_tokens=submit.max_tokens,
        num_choices=submit.num_choices,
        min_tokens=submit.min_tokens,
        stop_token_ids=frozenset(_ints(submit.stop_token_ids).tolist()),
        priority=submit.priority,
        tenant=submit.tenant,
        cache_salt=submit.cache_salt,
        deadline=submitted.deadline if submitted.HasField("deadline") else None,
        delivered=delivered or None,
        num_prompt_logprobs=submit.num_prompt_logprobs,
    )


def _ints(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<i4")


def _describe(plan: step_pb2.StepPlan) -> str:
    parts = {
        "step": plan.step_id,
        "admit": [admit.row for admit in plan.admit],
        "release": len(plan.release) // 4,
        "grow": len(plan.grow) // 8,
        "copy": len(plan.copy) // 8,
        "prefill": len(plan.prefill) // 8,
    }
    return " ".join(f"{name}={value}" for name, value in parts.items())


def _told(error: Exception) -> str:
    """Its text only where it was written for people."""
    return str(error) if isinstance(error, StepwireError) else type(error).__name__


def parse_position(text: str) -> Position:
    """ "12" or "3:12": a step, or an epoch and a step of it."""
    epoch, _, step = text.rpartition(":")
    if not step.isdecimal() or (epoch and not epoch.isdecimal()):
        raise StartupError(f"--until {text!r} is not STEP or EPOCH:STEP")
    return (int(epoch) if epoch else None), int(step)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def report(replay: Replay) -> list[str]:
    """What a person wants to know at the end, as lines."""
    stats: dict[str, Any] = dataclasses.asdict(replay.core.stats())
    ids = "masked" if replay.masked else "as they were"
    plans, epochs = count(replay.num_plans, "plan"), count(replay.num_epochs, "epoch")
    lines = [f"{plans} in {epochs} {'is' if replay.num_plans == 1 else 'are'} the same; ids are {ids}"]
    if replay.num_torn_bytes:
        lines.append(f"the last {replay.num_torn_bytes} bytes are no whole entry: the process ended in it")
    lines.append(f"after plan {replay.step} of epoch {replay.epoch}:")
    return lines + [f"  {name} {value}" for name, value in stats.items()]
