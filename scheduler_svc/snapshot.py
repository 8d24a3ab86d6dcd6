"""Snapshots for those who watch: what the core, the links and the metrics know, as one message of the admin API.

Nothing is computed unless it is asked for, and at most once in MIN_INTERVAL_S whoever asks. The step loop pays
nothing.
"""

from protos.stepwire.admin.v1 import admin_pb2
from protos.stepwire.wire.v1 import session_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.survey import SequenceView, SharedView, Survey
from scheduler_svc.links.executors import Executor, ExecutorLink
from scheduler_svc.links.frontends import FrontendLink
from scheduler_svc.metrics import Buckets, SchedulerMetrics

MIN_INTERVAL_S = 0.24
MAX_PEERS = 64


class Snapshots:
    def __init__(
        self,
        core: Scheduler,
        frontends: FrontendLink,
        executors: ExecutorLink,
        metrics: SchedulerMetrics,
        began: float,
    ) -> None:
        self._core = core
        self._frontends = frontends
        self._executors = executors
        self._metrics = metrics
        self._began = began
        self._made_at = -float("inf")
        self._latest = admin_pb2.Snapshot()

    def reply(self, query_id: int, now: float, *, draining: bool) -> session_pb2.SnapshotReply:
        if now - self._made_at >= MIN_INTERVAL_S:
            self._latest = self._make(now, draining)
            self._made_at = now
        return session_pb2.SnapshotReply(query_id=query_id, snapshot=self._latest)

    def _make(self, now: float, draining: bool) -> admin_pb2.Snapshot:
        seen, stats, times = self._core.survey(now), self._core.stats(), self._metrics.step_times
        welcome, executors = self._frontends.welcome, self._executors
        first_token, inter_token = self._metrics.latencies()
        return admin_pb2.Snapshot(
            boot_id=executors.boot_id,
            uptime_ms=round((now - self._began) * 1000),
            epoch=executors.epoch,
            executor_ready=executors.active is not None,
            stalled=executors.is_stalled(now),
            draining=draining,
            device=welcome.device,
            backend=welcome.backend,
            dtype=welcome.model.dtype,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            max_num_seqs=welcome.geometry.max_num_seqs,
            max_num_batched_tokens=welcome.geometry.max_num_batched_tokens,
            totals=admin_pb2.Totals(
                generation_tokens=stats.generation_tokens_total,
                prompt_tokens_computed=stats.prompt_tokens_computed_total,
                prompt_tokens_cached=stats.prompt_tokens_cached_total,
                preemptions=stats.preemptions_total,
                recomputed_tokens=stats.recomputed_tokens_total,
                steps=times.num_steps,
                plan_s=times.plan_s,
                commit_s=times.commit_s,
                device_s=times.device_s,
                step_s=executors.step_s,
            ),
            blocks=admin_pb2.Blocks(
                total=stats.blocks_total,
                owned=stats.blocks_owned,
                cached=stats.blocks_cached,
                free=stats.blocks_free,
                block_size=seen.block_size,
                cells=seen.cells.tobytes(),
                shared=seen.num_shared_blocks,
            ),
            running=_columns(seen.running),
            waiting=_columns(seen.waiting),
            shared=[_shared(shared) for shared in seen.shared],
            tenants=[
                admin_pb2.Tenant(
                    name=tenant.name,
                    num_running=tenant.num_running,
                    num_waiting=tenant.num_waiting,
                    num_blocks=tenant.num_blocks,
                    num_output_tokens=tenant.num_output,
                )
                for tenant in seen.tenants
            ],
            frontends=self._seen_frontends(seen),
            executors=self._seen_executors(now),
            time_to_first_token=_histogram(first_token),
            inter_token=_histogram(inter_token),
        )

    def _seen_frontends(self, seen: Survey) -> list[admin_pb2.Frontend]:
        return [
            admin_pb2.Frontend(
                session=session.number,
                instance_id=session.instance_id,
                num_sequences=seen.num_of_session.get(session.number, 0),
                pending_bytes=session.pending_bytes,
            )
            for session in self._frontends.sessions[:MAX_PEERS]
        ]

    def _seen_executors(self, now: float) -> list[admin_pb2.Executor]:
        active = self._executors.active
        serving = [_executor(active, now, serving=True)] if active is not None else []
        return serving + [_executor(one, now, serving=False) for one in self._executors.standby]


def story_reply(query_id: int, lines: list[str]) -> session_pb2.StoryReply:
    return session_pb2.StoryReply(query_id=query_id, lines=lines)


def _columns(views: list[SequenceView]) -> admin_pb2.Sequences:
    return admin_pb2.Sequences(
        request_ids=[view.request_id for view in views],
        tenants=[view.tenant for view in views],
        rows=[view.row for view in views],
        num_prompt_tokens=[view.num_prompt for view in views],
        num_computed_tokens=[view.num_computed for view in views],
        num_output_tokens=[view.num_output for view in views],
        max_tokens=[view.max_tokens for view in views],
        num_shared_tokens=[view.num_shared for view in views],
        num_preemptions=[view.num_preemptions for view in views],
        age_ms=[max(0, round(view.age_s * 1000)) for view in views],
    )


def _shared(shared: SharedView) -> admin_pb2.SharedPrefix:
    request = shared.of.request
    return admin_pb2.SharedPrefix(
        num_sequences=shared.num_sequences,
        num_blocks=shared.num_blocks,
        request_id=request.request_id,
        tenant=request.tenant,
    )


def _executor(executor: Executor, now: float, *, serving: bool) -> admin_pb2.Executor:
    return admin_pb2.Executor(
        instance_id=executor.hello.instance_id,
        serving=serving,
        device=executor.hello.device,
        silent_ms=max(0, round((now - executor.heard_at) * 1000)),
    )


def _histogram(buckets: Buckets) -> admin_pb2.Histogram:
    return admin_pb2.Histogram(bounds_s=buckets.bounds_s, counts=buckets.counts, sum_s=buckets.sum_s)
