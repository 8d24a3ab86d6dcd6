"""The CUDA backend: Triton kernels, decode steps replayed from graphs, drawn tokens that stay on the device.

`launch` puts a step on the device's stream and returns at once; `Pending.wait` reads what it drew. A step whose rows'
newest tokens are still on the device names them NEWEST, so the next step can be launched before this one is read.

Block tables and newest tokens live on the device, one row per sequence's row; a step uploads what changed and one flat
array of indices. After `warm_up` nothing is compiled: `num_compilations` proves it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton

from executor_svc.backends.base import StepOutput
from executor_svc.backends.cuda_decoder import AttentionStep, SharedPrefixes, TritonDecoder
from executor_svc.backends.cuda_memory import draft_geometry, kv_block_bytes, kv_budget, make_kv, step_bytes
from executor_svc.backends.cuda_sampling import (
    DeviceLogprobs,
    DeviceSampler,
    device_logprobs,
    logprob_messages,
    score_messages,
    upload,
)
from executor_svc.backends.cuda_step import StepTensors, TableMirror, arrange, is_decode_only, splits_needed
from executor_svc.backends.cuda_warm_up import warm_up_batches, widest_batch
from executor_svc.backends.int8_linear import Int8Linear
from executor_svc.backends.weights_report import report
from executor_svc.batch import ForwardBatch
from executor_svc.config import Dtype, ExecutorConfig, KVDtype
from executor_svc.errors import StartupError
from executor_svc.geometry import Defaults, Memory, size_pool
from executor_svc.graphs import GraphKey, GraphTable
from executor_svc.identity import fingerprint
from executor_svc.model.checkpoint import Checkpoint
from executor_svc.model.config import ModelConfig
from executor_svc.model.elements import name_of
from executor_svc.model.layers import PlainLinear
from executor_svc.model.weights import WeightSource
from executor_svc.scoring import Scoring
from executor_svc.startup import Startup
from kernels import attention_shared
from kernels.attention_decode import DecodeWorkspace, num_splits
from kernels.attention_prefill import block_q_for
from kernels.blocks import copy_blocks
from kernels.paged import SPLIT, PagedKV
from protos.stepwire.wire.v1 import step_pb2

# Bytes of keys and values that are read in the time by which launching a step eagerly is slower: about a millisecond.
LEAVING_A_GRAPH_COSTS = 4 << 30
CUDA_DEFAULTS = Defaults(block_size=16, max_num_seqs=256, max_num_batched_tokens=8192)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded decode step: write `flat`, replay, read `logits` (rows of one tensor that all recordings share)."""

    flat: torch.Tensor
    logits: torch.Tensor
    replay: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Pending:
    """A launched step. Its tokens are on their way to the host."""

    tokens: torch.Tensor
    logprobs: DeviceLogprobs | None
    rows: np.ndarray  # the sampled ones
    faults: list[step_pb2.RowFault]
    scores: tuple[DeviceLogprobs, Scoring] | None
    arrived: "torch.cuda.Event | None"

    def is_done(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def wait(self) -> StepOutput:
        if self.arrived is not None:
            self.arrived.synchronize()
        messages = logprob_messages(self.logprobs, self.rows) if self.logprobs is not None else []
        scores = score_messages(*self.scores) if self.scores is not None else []
        return StepOutput(self.tokens.numpy().copy(), messages, scores, self.faults)


class CudaBackend:
    name = "cuda"

    def __init__(
        self,
        decoder: TritonDecoder,
        kv: list[PagedKV],
        geometry: step_pb2.Geometry,
        identity: step_pb2.ModelIdentity,
        device_name: str,
    ):
        self.geometry = geometry
        self.identity = identity
        self.device = device_name
        self._decoder, self._kv = decoder, kv
        self._where = where = decoder.device
        config = decoder.config
        rows, max_blocks = geometry.max_num_seqs, -(-geometry.max_model_len // geometry.block_size)
        self._mirror = TableMirror(rows, max_blocks)
        self._tables = torch.zeros((rows, max_blocks), dtype=torch.int32, device=where)
        self._newest = torch.zeros(rows, dtype=torch.int32, device=where)
        self._max_splits = num_splits(geometry.max_model_len)
        shape = (rows, config.num_heads, self._max_splits, config.head_dim)
        self._workspace = DecodeWorkspace(shape, where)
        self._sampler = DeviceSampler(rows, geometry.vocab_size, where)
        self._block_q = block_q_for(config.num_heads, kv[0])
        self._rows_per_item = attention_shared.rows_per_item(config.num_heads // config.num_kv_heads, kv[0])
        self._token_bytes = kv_block_bytes(config, 1, kv[0].cache.dtype)
        self._logits = torch.empty((rows, geometry.vocab_size), dtype=torch.float32, device=where)
        # One memory pool for all recordings: steps run one after another, and logits are read before the next.
        self._graph_pool = torch.cuda.graph_pool_handle() if where.type == "cuda" else None
        self._compilations: CompilationCounter | None = None
        self.graphs: GraphTable[Recording] = GraphTable(rows, self._max_splits, self._record)

    def reset(self) -> None:
        """Rows are seated anew. Tables are compared, not trusted, so they need no clearing; nor do blocks."""
        self._sampler.reset()

    def copy_blocks(self, pairs: np.ndarray) -> None:
        on_device = upload(pairs.astype(np.int32), self._where)
        for layer in self._kv:
            copy_blocks(layer, on_device)

    def run(self, batch: ForwardBatch) -> StepOutput:
        return self.launch(batch).wait()

    @torch.inference_mode()
    def launch(self, batch: ForwardBatch) -> Pending:
        self._update_tables(batch)
        logits = self._forward(batch)
        scores = None
        if batch.scoring is not None:
            scores = self._score(logits, batch.scoring)
            logits = logits[upload(batch.scoring.others, self._where)]
        sampled = batch.sampling.rows
        if not len(sampled):
            nothing = torch.empty(0, dtype=torch.int32, device=self._where)
            return self._send(nothing, None, sampled, [], scores)
        tokens, logprobs, faults = self._sampler.draw(logits, batch.sampling)
        self._newest[upload(sampled.astype(np.int64), self._where)] = tokens
        return self._send(tokens, logprobs, sampled, faults, scores)

    def _score(self, logits: torch.Tensor, scoring: Scoring) -> tuple[DeviceLogprobs, Scoring]:
        raw, targets = logits[upload(scoring.index, self._where)], upload(scoring.targets, self._where)
        return device_logprobs(raw, targets, scoring.index.tolist(), scoring.counts.tolist()), scoring

    def _update_tables(self, batch: ForwardBatch) -> None:
        changed = self._mirror.update(batch)
        if len(changed):
            on_device = upload(changed, self._where)
            self._tables.view(-1)[on_device[:, 0].long()] = on_device[:, 1]

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Float32 logits of the sampled rows, in their order."""
        splits = splits_needed(batch)
        found = self.graphs.find(len(batch.rows), splits) if is_decode_only(batch) else None
        shared = self._share(batch, worth=0 if found is None else LEAVING_A_GRAPH_COSTS)
        if found is None or shared is not None:
            arrays = arrange(batch, block_q=self._block_q)
            flat = upload(arrays.flat(), self._where)
            step = StepTensors.of(flat, arrays.layout(), all_logits=arrays.all_logits, max_splits=splits)
            return self._compute(step, shared)
        key, recording = found
        recording.flat.copy_(upload(arrange(batch, block_q=self._block_q, pad_to=key.num_rows).flat(), self._where))
        recording.replay()
        if len(batch.logits_index) == len(batch.rows):
            return recording.logits[: len(batch.rows)]
        return recording.logits[upload(batch.logits_index.astype(np.int64), self._where)]

    def _compute(
        self, step: StepTensors, shared: SharedPrefixes | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        tables = self._tables[step.rows.long()]
        attention = AttentionStep(step, tables, self._workspace, shared)
        return self._decoder.forward(attention, self._kv, self._newest, out=out)

    def _share(self, batch: ForwardBatch, *, worth: int) -> SharedPrefixes | None:
        """What decoding rows share, if reading it once saves more than `worth` bytes."""
        decoding = np.flatnonzero(np.diff(batch.cu_seqlens) == 1)
        if np.count_nonzero(batch.seq_lens[decoding] > attention_shared.MIN_TOKENS) < attention_shared.MIN_ROWS:
            return None
        plan = attention_shared.plan_shared(
            batch.block_tables[decoding], batch.seq_lens[decoding], self.geometry.block_size, self._rows_per_item
        )
        if plan is None or plan.saved_tokens * self._token_bytes < worth:
            return None
        members, work, counts = (
            upload(part, self._where) for part in (plan.members, plan.work, plan.num_shared_splits)
        )
        return SharedPrefixes(members, work, counts)

    def _send(
        self,
        tokens: torch.Tensor,
        logprobs: DeviceLogprobs | None,
        rows: np.ndarray,
        faults: list[step_pb2.RowFault],
        scores: tuple[DeviceLogprobs, Scoring] | None,
    ) -> Pending:
        if self._where.type != "cuda":
            return Pending(tokens, logprobs, rows, faults, scores, None)

        def home(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to("cpu", non_blocking=True)

        def all_home(found: DeviceLogprobs) -> DeviceLogprobs:
            top_ids, top_logprobs = home(found.top_ids), home(found.top_logprobs)
            return replace(
                found, drawn=home(found.drawn), ranks=home(found.ranks), top_ids=top_ids, top_logprobs=top_logprobs
            )

        logprobs = None if logprobs is None else all_home(logprobs)
        scores = None if scores is None else (all_home(scores[0]), scores[1])
        tokens = home(tokens)
        arrived = torch.cuda.Event()
        arrived.record()
        return Pending(tokens, logprobs, rows, faults, scores, arrived)

    # ---- before the first request ---------------------------------------------------------------------------

    def warm_up(self) -> None:
        """Run a step of each kind and record every decode graph, so that serving compiles nothing."""
        for batch in warm_up_batches(self.geometry):
            self.run(batch)
        if self.geometry.num_blocks > 1:
            self.copy_blocks(np.array([[0, 1]]))
        if self._max_splits > 1:
            self._warm_sharing()
        if self._where.type == "cuda" and self._decoder.is_recordable:
            self.graphs.record_all()
        self.reset()
        self._compilations = CompilationCounter()

    @property
    def num_compilations(self) -> int:
        """Kernels compiled since warm-up: 0, or a step was slow that need not have been."""
        return self._compilations.count if self._compilations is not None else 0

    def _warm_sharing(self) -> None:
        """One row that shares its first split with nobody else."""
        _, step = self._blank_step(1, max_splits=2)
        step.seq_lens.fill_(SPLIT + 1)
        one, first = upload(np.array([1], np.int32), self._where), upload(np.array([0], np.int32), self._where)
        work = upload(np.array([[0, 0, 1]], np.int32), self._where)
        self._compute(step, SharedPrefixes(members=first, work=work, num_shared_splits=one))

    def _blank_step(self, num_rows: int, *, max_splits: int) -> tuple[torch.Tensor, StepTensors]:
        """(flat, its views) of a decode step in which nobody attends to or stores anything."""
        layout = decode_layout(num_rows)
        flat = torch.zeros(sum(-(-length // 4) * 4 for length in layout), dtype=torch.int32, device=self._where)
        step = StepTensors.of(flat, layout, all_logits=True, max_splits=max_splits)
        step.slots.fill_(-1)
        return flat, step

    def _record(self, key: GraphKey) -> Recording:
        flat, step = self._blank_step(key.num_rows, max_splits=key.max_splits)
        # Recording needs a first run for what libraries set up lazily.
        self._compute(step)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            logits = self._compute(step, out=self._logits[: key.num_rows])
        return Recording(flat, logits, graph.replay)


def decode_layout(num_rows: int) -> tuple[int, ...]:
    """Lengths of `StepArrays` for a padded decode-only step."""
    return (num_rows,) * 6 + (1, 0, 0)


class CompilationCounter:
    """Counts what Triton compiles in this process from now on."""

    def __init__(self) -> None:
        self.count = 0
        triton.knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, *args: object, **kwargs: object) -> None:
        self.count += 1


# ---- from options to a backend ------------------------------------------------------------------------------------


def make_cuda(config: ExecutorConfig, startup: Startup) -> CudaBackend:
    assert config.model is not None
    where = torch.device("cuda")
    model = ModelConfig.from_directory(config.model)
    dtype, kv_dtype = resolve_types(config.dtype, config.kv_dtype, torch.cuda.get_device_capability())
    in_bytes = config.dtype is Dtype.INT8
    weights = "int8" if in_bytes else name_of(dtype)
    startup.note(report(config.model, model, weights, torch.cuda.mem_get_info()[0], "device memory"))
    with startup.phase("loading weights"):
        source, progress = WeightSource(Checkpoint(config.model), model), startup.progress("loading weights: layer")
        linear = Int8Linear if in_bytes else PlainLinear
        decoder = TritonDecoder(source, dtype=dtype, device=where, linear=linear, progress=progress)
        torch.cuda.synchronize()
    sizes = config.sizes
    with startup.phase("measuring the widest step"):
        draft = draft_geometry(sizes, CUDA_DEFAULTS, model)
        working = step_bytes(lambda: _run_widest(decoder, draft, kv_dtype))
    budget = kv_budget(*torch.cuda.mem_get_info(), working=working, utilization=sizes.gpu_memory_utilization)
    geometry = size_pool(
        sizes,
        CUDA_DEFAULTS,
        block_bytes=lambda block_size: kv_block_bytes(model, block_size, kv_dtype),
        memory=Memory(budget, budget, "device memory"),
        max_position=model.max_position,
        vocab_size=model.vocab_size,
        notice=startup.note,
    )
    kv = make_kv(model, geometry, kv_dtype, where)
    identity = step_pb2.ModelIdentity(
        architecture=model.architecture,
        dtype=weights,
        kv_dtype=name_of(kv_dtype),
        fingerprint=fingerprint(config.model),
    )
    backend = CudaBackend(decoder, kv, geometry, identity, torch.cuda.get_device_name())
    with startup.phase("compiling kernels and recording graphs"):
        backend.warm_up()
    return backend


def resolve_types(dtype: Dtype, kv: KVDtype, capability: tuple[int, int]) -> tuple[torch.dtype, torch.dtype]:
    """(What is computed in, keys and values). Linear layers in int8 stand in a model of bfloat16."""
    weights = torch.bfloat16 if dtype in (Dtype.AUTO, Dtype.INT8) else getattr(torch, dtype.value)
    match kv:
        case KVDtype.FP8 if capability < (8, 9):
            raise StartupError("--kv-dtype fp8 needs compute capability 8.9, this device has less: use int8")
        case KVDtype.FP8:
            return weights, torch.float8_e4m3fn
        case KVDtype.INT8:
            return weights, torch.int8
        case _:
            return weights, weights


def _run_widest(decoder: TritonDecoder, draft: step_pb2.Geometry, kv_dtype: torch.dtype) -> None:
    kv = make_kv(decoder.config, draft, kv_dtype, decoder.device)
    CudaBackend(decoder, kv, draft, step_pb2.ModelIdentity(), "").run(widest_batch(draft))
