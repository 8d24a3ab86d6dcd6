"""The CPU backend: a real model, its KV pool and the sampler, glued. How the model computes is the model's business."""

from dataclasses import replace

import numpy as np

from executor_svc.backends.base import AtOnce, StepOutput
from executor_svc.backends.weights_report import report
from executor_svc.batch import ForwardBatch
from executor_svc.config import Dtype, ExecutorConfig, KVDtype, available_cores, cache_directory
from executor_svc.errors import StartupError
from executor_svc.geometry import Defaults, Memory, show_bytes, size_pool
from executor_svc.identity import fingerprint
from executor_svc.kv_cache import KVPool
from executor_svc.memory import available_memory
from executor_svc.model.decoder import Decoder
from executor_svc.model.elements import name_of
from executor_svc.model.load import Choice, choose, load_chosen, read_model
from executor_svc.race import Race, load_race
from executor_svc.sampler import Sampler, score
from executor_svc.startup import Startup
from protos.stepwire.wire.v1 import step_pb2

CPU_DEFAULTS = Defaults(block_size=16, max_num_seqs=128, max_num_batched_tokens=512)


class CpuBackend(AtOnce):
    name = "cpu"
    device = "cpu"

    def __init__(
        self,
        decoder: Decoder,
        pool: KVPool,
        geometry: step_pb2.Geometry,
        identity: step_pb2.ModelIdentity,
        race: Race | None = None,
    ):
        self.geometry = geometry
        self.identity = identity
        self._decoder = decoder
        self._pool = pool
        self._sampler = Sampler(geometry.vocab_size, race)

    def reset(self) -> None:
        """Nothing to forget: no block is read before the new epoch has written it."""

    def copy_blocks(self, pairs: np.ndarray) -> None:
        self._pool.copy_blocks(pairs)

    def run(self, batch: ForwardBatch) -> StepOutput:
        wanted, scoring = np.asarray(self._decoder.forward(batch, self._pool)), batch.scoring
        if scoring is None:
            return self._sampler.sample(wanted, batch.sampling)
        output = self._sampler.sample(wanted[scoring.others], batch.sampling)
        return replace(output, prompt_logprobs=score(wanted[scoring.index], scoring))


def make_cpu(config: ExecutorConfig, startup: Startup) -> CpuBackend:
    assert config.model is not None
    num_threads = config.threads or available_cores()
    described = read_model(config.model)
    if config.kv_dtype is not KVDtype.AUTO:
        raise StartupError(f"--kv-dtype {config.kv_dtype} is not offered by the cpu backend: leave it at auto")
    cache_dir = cache_directory() / "native"
    chosen = choose(described, config.dtype.value, num_threads=num_threads, cache_dir=cache_dir, notice=startup.note)
    if chosen.dtype != config.dtype and config.dtype is not Dtype.AUTO:
        startup.note(_instead(config.dtype, described.architecture, chosen))
    startup.note(report(config.model, described, chosen.dtype, available_memory(), "memory"))
    with startup.phase("loading weights"):
        decoder = load_chosen(config.model, described, chosen, startup.progress("loading weights: layer"))
    startup.note(decoder.description)
    model, kv_dtype = decoder.config, name_of(decoder.kv_dtype)
    geometry = size_pool(
        config.sizes,
        CPU_DEFAULTS,
        block_bytes=lambda block_size: KVPool.bytes_per_block(model, block_size, kv_dtype),
        memory=Memory(available_memory()),
        max_position=model.max_position,
        vocab_size=model.vocab_size,
        notice=startup.note,
    )
    pool = KVPool(model, geometry.num_blocks, geometry.block_size, kv_dtype)
    used = geometry.num_blocks * KVPool.bytes_per_block(model, geometry.block_size, kv_dtype)
    startup.note(f"KV cache {show_bytes(used)} for {geometry.num_blocks * geometry.block_size} tokens")
    identity = step_pb2.ModelIdentity(
        architecture=model.architecture,
        dtype=chosen.dtype,
        kv_dtype=kv_dtype,
        fingerprint=fingerprint(config.model),
    )
    race = load_race(cache_dir, geometry.vocab_size, num_threads, startup.note)
    return CpuBackend(decoder, pool, geometry, identity, race)


def _instead(asked: Dtype, architecture: str, chosen: Choice) -> str:
    """What the operator is told who asked for a type and gets another."""
    return f"{asked} needs the native engine ({chosen.engine}): {architecture} is computed in {chosen.dtype}"
