"""Puts the scheduler service together from its configuration and runs it until it is told to end.

Knows which parts there are, not what they do.
"""

import contextlib
import json
import logging
import os
import secrets
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from scheduler_svc.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.links.budget import StepBudget
from scheduler_svc.links.executors import ExecutorLink
from scheduler_svc.links.frontends import FrontendLink
from scheduler_svc.links.transport import BadFrames, Security, Wire
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.service import Service

logger = logging.getLogger(__name__)

# At the end of a drain: time for the last frames to leave.
LAST_FRAMES_S = 1.0


@contextlib.contextmanager
def open_service(config: SchedulerConfig, metrics: SchedulerMetrics) -> Iterator[Service]:
    """The service with its sockets bound; they are closed at exit."""
    security = Security(secret=config.curve_secret, clients=config.curve_clients, insecure_wire=config.insecure_wire)
    bad_frames = BadFrames()
    wire = Wire(security, bad_frames)
    try:
        boot_id = secrets.randbits(64)
        frontends = FrontendLink(wire, config.bind_frontend, boot_id, bad_frames)
        budget = StepBudget(config.step_timeout_s)
        executors = ExecutorLink(wire, (config.bind_executor, config.bind_beat), boot_id, bad_frames, budget)
        yield Service(
            Scheduler(config.limits(hash_key=secrets.token_bytes(32))),
            frontends,
            executors,
            pipeline_depth=config.pipeline_depth,
            drain_timeout_s=config.drain_timeout_s,
            metrics=metrics,
            bad_frames=bad_frames,
            pulse=partial(renew, config.ready_file) if config.ready_file is not None else None,
        )
    finally:
        wire.close(linger_s=LAST_FRAMES_S)


def run_scheduler(config: SchedulerConfig) -> None:
    """Serves until SIGTERM or SIGINT, then drains. Raises StartupError when it cannot start."""
    metrics = SchedulerMetrics()
    with open_service(config, metrics) as service:
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


def renew(path: Path) -> None:
    """Sets its modification time to now: a sign of life for whoever watches over this process."""
    with contextlib.suppress(OSError):  # not written yet, or the supervisor has cleaned up: nobody looks at it
        os.utime(path)


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the whole new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    os.replace(draft, path)
