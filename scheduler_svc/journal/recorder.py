"""The core with a journal beside it. In a step only references are noted; encoding and writing happen in `flush`, which
the poll loop calls at the end of a turn, when plans are on their way.

Knows how the core's calls are written down, not what they do. A call that was refused changed nothing and is not
written. A journal that cannot be written ends with a line in the log; serving goes on.
"""

import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from protos.stepwire.wire.v1 import journal_pb2, session_pb2, step_pb2
from scheduler_svc.core.contract import Geometry, Limits, Output, Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.errors import StartupError
from scheduler_svc.journal import snapshot
from scheduler_svc.journal.frames import FrameWriter, frame
from scheduler_svc.journal.mask import NameMask, TokenMask

logger = logging.getLogger(__name__)

VERSION = 1
# A file is closed at half of the limit, and before that when nobody is there to wait for the snapshot.
IDLE_SHARE = 0.75


class RecordedScheduler(Scheduler):
    """`mask_key` None: the core, and so its journal, works with ids and names as they are."""

    def __init__(self, limits: Limits, journal: "Journal", mask_key: bytes | None):
        super().__init__(limits)
        self._journal = journal
        self._mask_key = mask_key
        self._names = NameMask(mask_key) if mask_key is not None else None
        # Made for a vocabulary, once the first executor has told it. Until then nothing is planned and nothing written.
        self._tokens: TokenMask | None = None

    def flush(self) -> None:
        if self._tokens is not None or self._mask_key is None:
            self._journal.flush(self)

    def submit(self, request: Request, now: float) -> None:
        if self._names is not None:
            request = self._names.request(request)
        if self._tokens is not None:
            self._tokens.request(request)
        super().submit(request, now)
        self._journal.note(now, "submit", request)

    def cancel_request(self, request_id: str) -> bool:
        found = super().cancel_request(request_id)
        if found:
            self._journal.note(0.0, "cancel_request", request_id)
        return found

    def cancel_handle(self, session: int, handle: int) -> bool:
        found = super().cancel_handle(session, handle)
        if found:
            self._journal.note(0.0, "cancel_handle", journal_pb2.JournalHandle(session=session, handle=handle))
        return found

    def drop_session(self, session: int) -> int:
        count = super().drop_session(session)
        if count:
            self._journal.note(0.0, "drop_session", session)
        return count

    def expire(self, now: float) -> int:
        count = super().expire(now)
        if count:
            self._journal.note(now, "expire", True)
        return count

    def plan(self, now: float) -> step_pb2.StepPlan | None:
        try:
            plan = super().plan(now)
        except AssertionError:
            self._journal.note(now, "plan", None)
            raise
        if plan is None:
            self._journal.idle(now)
            return None
        self._journal.note(now, "plan", plan)
        return plan if self._tokens is None else self._tokens.plan(plan)

    def commit(self, result: step_pb2.StepResult, now: float) -> Output:
        if self._tokens is not None:
            result = self._tokens.result(result)
        try:
            output = super().commit(result, now)
        except AssertionError:  # a bug of the core: the call that meets it belongs to the story
            self._journal.note(now, "result", result)
            raise
        self._journal.note(now, "result", result)
        return output if self._tokens is None else self._tokens.output(output)

    def take_output(self) -> Output:
        output = super().take_output()
        return output if self._tokens is None else self._tokens.output(output)

    def executor_lost(self) -> None:
        had_one = self._epoch is not None
        super().executor_lost()
        if had_one:
            self._journal.note(0.0, "executor_lost", journal_pb2.JournalLost())

    def reset(self, geometry: Geometry, boot_id: int, epoch: int) -> None:
        if self._tokens is None and self._mask_key is not None:
            self._tokens = TokenMask(self._mask_key, geometry.vocab_size)
            # Those that came before the first executor: nothing was derived from their ids yet.
            for state in self._registry.requests.values():
                self._tokens.request(state.request)
                for sequence in state.sequences:
                    sequence.log = bytearray(self._tokens.ids(sequence.tokens()).tobytes())
        super().reset(geometry, boot_id, epoch)
        self._journal.note(0.0, "reset", (geometry, boot_id, epoch))

    def state(self) -> dict[str, Any]:
        """The core alone, for a snapshot."""
        own = ("_journal", "_mask_key", "_names", "_tokens")
        return {name: value for name, value in vars(self).items() if name not in own}


class Journal:
    """A file, and FILE.1 before it; each at most half of `limit_bytes` and one turn."""

    def __init__(self, path: Path, limits: Limits, *, limit_bytes: int, masked: bool):
        self._path = path
        self._limits = limits
        self._masked = masked
        self._half = limit_bytes // 2
        self._entries: list[tuple[float, str, Any]] = []
        # The last call of `plan` that had nothing to do, if nothing was called since.
        self._idle_at: float | None = None
        self._writer: FrameWriter | None = None
        try:
            if path.exists() and path.stat().st_size:
                os.replace(path, _older(path))
            self._begin(b"")
        except OSError as error:
            raise StartupError(f"--journal {path} cannot be written ({error.strerror or error})") from None

    def note(self, now: float, body: str, value: Any) -> None:
        if self._idle_at is not None:
            self._entries.append((self._idle_at, "plan", None))
            self._idle_at = None
        self._entries.append((now, body, value))

    def idle(self, now: float) -> None:
        self._idle_at = now

    def flush(self, core: RecordedScheduler) -> None:
        entries, self._entries = self._entries, []
        if self._writer is None or not entries:
            return
        try:
            self._writer.append(b"".join(frame(_encoded(*entry)) for entry in entries))
            if self._writer.num_bytes > self._half * (IDLE_SHARE if core.is_idle else 1):
                self._go_on_in_a_new_file(core)
        except (OSError, snapshot.SnapshotError) as error:
            logger.error("journal_ended path=%s reason=%r", self._path, str(error))
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _begin(self, taken: bytes) -> None:
        self._writer = FrameWriter(self._path)
        limits = {name: value for name, value in dataclasses.asdict(self._limits).items() if name != "hash_key"}
        start = journal_pb2.JournalStart(
            version=VERSION, masked=self._masked, limits_json=json.dumps(limits, allow_nan=False), snapshot=taken
        )
        self._writer.append(frame(journal_pb2.JournalEntry(start=start).SerializeToString()))

    def _go_on_in_a_new_file(self, core: RecordedScheduler) -> None:
        taken = snapshot.take(core.state())
        self.close()
        if len(taken) > self._half * IDLE_SHARE:
            raise snapshot.SnapshotError(f"a snapshot has {len(taken)} bytes: --journal-limit is too small for it")
        os.replace(self._path, _older(self._path))
        self._begin(taken)


def digest(plan: step_pb2.StepPlan) -> int:
    data = plan.SerializeToString(deterministic=True)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _older(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")


def _encoded(now: float, body: str, value: Any) -> bytes:
    entry = journal_pb2.JournalEntry(now=now)
    match body:
        case "submit":
            entry.submit.CopyFrom(_submit(value))
        case "plan" if value is None:
            entry.plan.SetInParent()
        case "plan":
            entry.plan.step_id, entry.plan.digest = value.step_id, digest(value)
        case "result":
            entry.result.CopyFrom(value)
            entry.result.ClearField("logprobs")
            for fault in entry.result.faults:
                fault.message = ""
            for scores in entry.result.prompt_logprobs:  # how many is all that the core looks at
                scores.logprobs = scores.ranks = bytes(len(scores.logprobs))
                scores.num_top, scores.top_token_ids, scores.top_logprobs = 0, b"", b""
        case "reset":
            geometry, boot_id, epoch = value
            entry.reset.geometry.CopyFrom(step_pb2.Geometry(**dataclasses.asdict(geometry)))
            entry.reset.boot_id, entry.reset.epoch = boot_id, epoch
        case "cancel_handle" | "executor_lost":
            getattr(entry, body).CopyFrom(value)
        case _:
            setattr(entry, body, value)
    return entry.SerializeToString()


def _submit(request: Request) -> journal_pb2.JournalSubmit:
    submit = session_pb2.Submit(
        request_id=request.request_id,
        handle=request.handle,
        num_choices=request.num_choices,
        prompt_token_ids=_ints(request.prompt),
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=_ints(sorted(request.stop_token_ids)),
        sampling=request.sampling,
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        num_prompt_logprobs=request.num_prompt_logprobs,
    )
    for delivered in request.delivered or ():
        submit.delivered.add(
            token_ids=_ints(delivered.token_ids),
            finished=delivered.finished,
            num_preemptions=delivered.num_preemptions,
            num_resumes=delivered.num_resumes,
        )
    return journal_pb2.JournalSubmit(session=request.session, submit=submit, deadline=request.deadline)


def _ints(values: Any) -> bytes:
    return np.asarray(values, "<i4").tobytes()
