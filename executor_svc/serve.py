"""One life of the executor: build the backend, say hello, obey until told to stop."""

import json
import os
import signal
import tempfile
import threading
from pathlib import Path

from executor_svc.backends.base import Backend
from executor_svc.backends.select import make_backend
from executor_svc.config import ExecutorConfig
from executor_svc.constraints import Grammars
from executor_svc.link import ExecutorLink, LinkSettings
from executor_svc.metrics import ExecutorMetrics
from executor_svc.row_traces import RowTraces
from executor_svc.startup import Startup
from executor_svc.tracing import start_tracing
from executor_svc.worker import Worker
from protos.stepwire.wire.v1 import step_pb2

# After the hello: by then frontends are ready too, where everything starts at once.
GRAMMARS_AFTER_S = 1.0


def serve(
    config: ExecutorConfig, settings: LinkSettings, ready_file: Path | None, trace_endpoint: str | None = None
) -> None:
    metrics = ExecutorMetrics()
    if config.metrics_port:
        metrics.serve(config.metrics_host, config.metrics_port)
    tracing = start_tracing(trace_endpoint, "executor")
    startup = Startup()
    backend = make_backend(config, startup)
    grammars = Grammars(config.model, backend.geometry.vocab_size)
    if not grammars.is_small:
        grammars.load()
    worker = Worker(backend, grammars, lambda _, result: metrics.step(result))
    traces = None
    if tracing is not None:
        traces = RowTraces(tracing, backend.name)
        worker = Worker(backend, grammars, traces.beside(metrics.step), traces.reset)
    with ExecutorLink(hello_of(backend), settings) as link:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: link.stop())
        startup.note(describe(backend))
        metrics.loaded()
        if ready_file is not None:
            write_ready_file(ready_file, backend)
        later = grammars.load_in(GRAMMARS_AFTER_S)
        try:
            worker.serve(link)
        finally:
            later.cancel()
            if tracing is not None and traces is not None:
                traces.reset()
                tracing.close()


def hello_of(backend: Backend) -> step_pb2.ExecutorHello:
    return step_pb2.ExecutorHello(
        geometry=backend.geometry, model=backend.identity, device=backend.device, backend=backend.name
    )


def describe(backend: Backend) -> str:
    geometry, model = backend.geometry, backend.identity
    where = backend.name if backend.device == backend.name else f"{backend.name} ({backend.device})"
    return (
        f"{model.architecture} in {model.dtype} on {where}: {geometry.num_blocks} blocks of {geometry.block_size} "
        f"tokens, {geometry.max_num_seqs} sequences of {geometry.max_model_len}"
    )


def write_ready_file(path: Path, backend: Backend) -> None:
    """Whole or not at all: a reader never sees half of it."""
    value = {"pid": os.getpid(), "backend": backend.name, "device": backend.device, "pulse": True}
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(value, file)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
