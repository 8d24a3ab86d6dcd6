"""Puts the scheduler service together from its configuration and runs it until it is told to end.

Knows which parts there are, not what they do.
"""

import contextlib
import json
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.links.budget import StepBudget
from scheduler_svc.links.executors import ExecutorLink
from scheduler_svc.links.frontends import FrontendLink
from scheduler_svc.links.transport import BadFrames, Security, Wire
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.request_traces import RequestTraces
from scheduler_svc.service import Service
from scheduler_svc.tracing import Tracing, start_tracing

logger = logging.getLogger(__name__)

# At the end of a drain: time for the last frames to leave.
LAST_FRAMES_S = 1.0


@contextlib.contextmanager
def open_service(
    config: SchedulerConfig, metrics: SchedulerMetrics, tracing: Tracing | None = None
) -> Iterator[Service]:
    """The service with its sockets bound; they are closed at exit."""
    security = Security(secret=config.curve_secret, clients=config.curve_clients, insecure_wire=config.insecure_wire)
    bad_frames = BadFrames()
    wire = Wire(security, bad_frames)
    try:
        boot_id = secrets.randbits(64)
        frontends = FrontendLink(wire, config.bind_frontend, boot_id, bad_frames)
        budget = StepBudget(config.step_timeout_s)
        executors = ExecutorLink(wire, (config.bind_executor, config.bind_beat), boot_id, bad_frames, budget)
        core, after_turn = make_core(config)
        yield Service(
            core,
            frontends,
            executors,
            pipeline_depth=config.pipeline_depth,
            drain_timeout_s=config.drain_timeout_s,
            metrics=metrics,
            bad_frames=bad_frames,
            after_turn=after_turn,
            traces=RequestTraces(tracing, core) if tracing is not None else None,
            pulse=partial(renew, config.ready_file) if config.ready_file is not None else None,
        )
    finally:
        wire.close(linger_s=LAST_FRAMES_S)


def make_core(config: SchedulerConfig) -> tuple[Scheduler, Callable[[], None] | None]:
    """The core, and what is to be called after every turn of the poll loop."""
    limits = config.limits(hash_key=secrets.token_bytes(32))
    if config.journal is None:
        return Scheduler(limits), None
    # Only who asked for a journal pays for its imports.
    from scheduler_svc.journal.recorder import Journal, RecordedScheduler

    masked = not config.journal_unmasked
    journal = Journal(config.journal, limits, limit_bytes=config.journal_limit_mib << 20, masked=masked)
    core = RecordedScheduler(limits, journal, secrets.token_bytes(32) if masked else None)
    return core, core.flush


def run_scheduler(config: SchedulerConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises StartupError when it cannot start."""
    metrics = SchedulerMetrics()
    tracing = start_tracing(config.trace_endpoint, "scheduler")
    with open_service(config, metrics, tracing) as service:
        port = metrics.serve(config.metrics_host, config.metrics_port) if config.metrics_port else 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: service.stop())
        if config.insecure_wire:
            logger.warning("wire_is_insecure: plain tcp may leave this host, anyone who reaches it rules this service")
        if config.ready_file is not None:
            ready = {"pid": os.getpid(), "frontend": config.bind_frontend, "executor": config.bind_executor}
            ready |= {"beat": config.bind_beat, "pulse": True}
            ready |= {"metrics": f"http://{config.metrics_host}:{port}/metrics"} if port else {}
            write_atomically(config.ready_file, json.dumps(ready))
        logger.info("scheduler_ready frontend=%s executor=%s", config.bind_frontend, config.bind_executor)
        service.run()
    if tracing is not None:
        tracing.close()


def renew(path: Path) -> None:
    """Sets its modification time to now: a sign of life for whoever watches over this process."""
    with contextlib.suppress(OSError):  # not written yet, or the supervisor has cleaned up: nobody looks at it
        os.utime(path)


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)
