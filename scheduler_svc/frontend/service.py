"""InferenceService: the seven methods, each a few steps over the parts that do the work.

A request's life here: checked, tokenised, resolved, handed to the scheduler's session; its deltas become messages;
whatever ends it, the session hears of it. Texts are tokenised and templates rendered in threads, with a bound on
how much may wait.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np

from protos.stepwire.admin.v1 import admin_pb2
from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1 import inference_pb2_grpc
from protos.stepwire.wire.v1 import session_pb2
from scheduler_svc.errors import DeadlineExceeded, InvalidArgument, NotFound, QueueFull, RequestError, Unavailable
from scheduler_svc.frontend import tenant, validation
from scheduler_svc.frontend.chat_template import ChatTemplate
from scheduler_svc.frontend.detokenizer import Detokenizer
from scheduler_svc.frontend.generation import Generation
from scheduler_svc.frontend.grammar_gate import GrammarGate
from scheduler_svc.frontend.metrics import FrontendMetrics
from scheduler_svc.frontend.model_files import ModelFiles
from scheduler_svc.frontend.status import guarded
from scheduler_svc.frontend.stream_record import StreamRecord
from scheduler_svc.frontend.submission import Resolved, bad_word_ids, bounds_of, resolve
from scheduler_svc.frontend.validation import ModelBounds, Request
from scheduler_svc.tracing import Tracing

# Shorter texts are tokenised at once: a thread would cost more than it saves the others.
INLINE_BYTES = 2048
MAX_WAITING_BYTES = 64 << 20
TEXT_THREADS = 2
RETRY_S = 1.0
# A client's deadline passes by its own clock first, by this much at the most: then it hangs up.
CLOCKS_APART_S = 0.1

T = TypeVar("T")
Write = Callable[[pb.GenerateResponse], Awaitable[None]]


class Session(Protocol):
    """What the services here need of scheduler_svc.links.session.SchedulerSession."""

    welcome: session_pb2.Welcome | None
    # A scheduler_svc.links.block_feed.BlockFeed.
    blocks: Any

    @property
    def ready(self) -> bool: ...

    def submit(self, submit: session_pb2.Submit) -> Any: ...

    def cancel_request(self, request_id: str) -> None: ...

    async def load(self, timeout_s: float = 2.0) -> session_pb2.Load: ...

    async def snapshot(self, timeout_s: float = 2.0) -> admin_pb2.Snapshot: ...

    async def story(self, request_id: str, timeout_s: float = 2.0) -> list[str]: ...


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(
        self,
        session: Session,
        model: ModelFiles,
        name: str,
        metrics: FrontendMetrics,
        tracing: Tracing | None = None,
    ):
        self.metrics = metrics
        self._tracing = tracing
        self.chat_template = ChatTemplate(model)
        self.num_active = 0
        self.session = session
        self.model = model
        self.name = name
        self._detokenizer = Detokenizer(model.tokenizer)
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")
        self._waiting_bytes = 0
        self._grammars = GrammarGate()
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- generation ----

    @guarded
    async def Generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        await self.generate(request, context, context.write)

    async def generate(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext, write: Write) -> None:
        """Runs a request to its end, by whatever service it came; `write` takes its messages. Raises RequestError."""
        with self._record("generate", context) as record:
            bounds = self._admit(request)
            field = request.WhichOneof("prompt") or "prompt"
            prompt = await self._prompt(request, bounds)
            resolved = await self._resolve(request, prompt, field, bounds, context)
            await self._stream(record, resolved, context, write)

    @guarded
    async def Chat(self, request: pb.ChatRequest, context: grpc.aio.ServicerContext) -> None:
        with self._record("chat", context) as record:
            validation.check_messages(request)
            bounds = self._admit(request)
            prompt = await self._chat_prompt(request, bounds)
            resolved = await self._resolve(request, prompt, "messages", bounds, context)
            await self._stream(record, resolved, context, context.write)

    def _admit(self, request: Request) -> ModelBounds:
        """Everything that can be refused before a prompt is looked at."""
        self._check_model(request.model)
        validation.check_request(request)
        bounds = self.bounds()
        validation.check_against_model(request, bounds)
        if validation.is_constrained(request.sampling) and not self.model.eos_token_ids:
            field = f"sampling.{request.sampling.WhichOneof('constraint')}"
            raise InvalidArgument(f"{field} needs a model with an end-of-sequence token; this has none", field=field)
        return bounds

    def _check_model(self, name: str) -> None:
        if name and name != self.name:
            raise NotFound(f"model: this server serves {self.name!r} only", field="model")

    def bounds(self) -> ModelBounds:
        welcome = self.session.welcome
        if welcome is None or not welcome.HasField("geometry"):
            raise Unavailable("no executor has been ready yet", retry_after_s=RETRY_S)
        return bounds_of(welcome, self.model.tokenizer.max_token_bytes)

    async def _prompt(self, request: pb.GenerateRequest, bounds: ModelBounds) -> list[int] | np.ndarray:
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise InvalidArgument("prompt is missing: set text or token_ids", field="prompt")
        if kind == "token_ids":
            if request.parse_special_tokens:
                raise InvalidArgument("parse_special_tokens is for text prompts only", field="parse_special_tokens")
            validation.check_prompt_ids(request.token_ids.ids, bounds)
            return list(request.token_ids.ids)
        num_bytes = len(request.text.encode())
        validation.check_text_size("text", num_bytes, bounds.max_text_bytes)
        ids = await self._encode(request.text, num_bytes, parse_special_tokens=request.parse_special_tokens)
        validation.check_prompt_length("text", len(ids), bounds)
        validation.check_ids("text", ids, bounds.vocab_size)
        return ids

    async def _chat_prompt(self, request: pb.ChatRequest, bounds: ModelBounds) -> list[int]:
        num_bytes = validation.chat_bytes(request)
        validation.check_text_size("messages", num_bytes, bounds.max_text_bytes)
        tools = validation.parse_tools(request.tools_json)
        extra = {}
        if not self.chat_template.problem:
            extra = validation.parse_template_kwargs(request.template_kwargs_json, self.chat_template.allowed_variables)
        messages = [{"role": message.role, "content": message.content} for message in request.messages]
        opens_turn = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
        ids = await self._in_thread(
            num_bytes,
            lambda: self.chat_template.token_ids(
                messages, tools=tools, add_generation_prompt=opens_turn, extra=extra, max_chars=bounds.max_text_bytes
            ),
        )
        validation.check_prompt_length("messages", len(ids), bounds)
        validation.check_ids("messages", ids, bounds.vocab_size)
        return ids

    async def _resolve(
        self, request: Request, prompt: Any, field: str, bounds: ModelBounds, context: grpc.aio.ServicerContext
    ) -> Resolved:
        grammar = (
            await self._grammars.resolve(request.sampling) if validation.is_constrained(request.sampling) else None
        )
        bad_words = await self._bad_words(request.sampling.bad_words, bounds.vocab_size)
        return resolve(
            request,
            prompt,
            field,
            model=self.model,
            bounds=bounds,
            deadline_s=context.time_remaining(),
            grammar=grammar,
            bad_words=bad_words,
        )

    async def _bad_words(self, words: Sequence[str], vocab_size: int) -> list[list[int]]:
        def work() -> list[list[int]]:
            return bad_word_ids(words, encode, vocab_size)

        def encode(text: str) -> list[int]:
            return self.model.tokenizer.encode(text, add_special_tokens=False, parse_special_tokens=True)

        num_bytes = sum(len(word.encode()) for word in words)
        return work() if num_bytes <= INLINE_BYTES else await self._in_thread(num_bytes, work)

    async def _stream(
        self, record: StreamRecord, resolved: Resolved, context: grpc.aio.ServicerContext, write: Write
    ) -> None:
        if self._is_draining:  # it may have begun while the prompt was tokenised
            raise self._draining()
        generation = Generation(resolved, self._detokenizer)
        resolved.submit.traceparent = record.traceparent
        stream = self.session.submit(resolved.submit)
        record.submitted(resolved, generation)
        try:
            while not generation.is_over:
                deltas = await stream.read()
                assert deltas, "the session has nothing more to say, and a choice is open"
                if stream.prompt_logprobs:
                    generation.add_prompt_logprobs(stream.take_prompt_logprobs())
                for delta in deltas:
                    cached = stream.started.num_cached_tokens if stream.started is not None else 0
                    choice = generation.choices[delta.index]
                    record.tokens(delta.index, len(delta.token_ids), cached)
                    for message in generation.messages(delta, cached):
                        if choice.ended_by_text:
                            stream.cancel_choice(delta.index)
                        await write(message)
            record.outcome = pb.FinishReason.Name(generation.finish_reason).removeprefix("FINISH_REASON_").lower()
        except DeadlineExceeded:
            record.outcome = "deadline"
            raise
        except RequestError:
            record.outcome = "failed"
            raise
        except (asyncio.CancelledError, grpc.aio.InternalError):
            # The second is what a write to a client that is gone ends with.
            left_s = context.time_remaining()
            record.outcome = "deadline" if left_s is not None and left_s <= CLOCKS_APART_S else "disconnected"
            raise
        finally:
            stream.cancel()

    # ---- the other methods ----

    @guarded
    async def Cancel(self, request: pb.CancelRequest, context: grpc.aio.ServicerContext) -> pb.CancelResponse:
        self.cancel(request.request_id)
        return pb.CancelResponse()

    def cancel(self, request_id: str) -> None:
        if not request_id:
            raise InvalidArgument("request_id is empty; name the request to cancel", field="request_id")
        validation.check_request_id(request_id)
        self.session.cancel_request(tenant.scoped(request_id))

    @guarded
    async def Tokenize(self, request: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        num_bytes = len(request.text.encode())
        welcome = self.session.welcome
        fits = welcome.geometry.max_model_len * self.model.tokenizer.max_token_bytes if welcome is not None else 0
        validation.check_text_size("text", num_bytes, max(fits, validation.MAX_TOKENIZE_BYTES))
        ids = await self._encode(
            request.text,
            num_bytes,
            add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
            parse_special_tokens=request.parse_special_tokens,
        )
        return pb.TokenizeResponse(token_ids=ids)

    @guarded
    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        validation.check_ids("token_ids", request.token_ids, self.bounds().vocab_size)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        ids = list(request.token_ids)
        text = await self._in_thread(4 * len(ids), lambda: self.model.tokenizer.decode(ids, skip_special_tokens=skip))
        return pb.DetokenizeResponse(text=text)

    @guarded
    async def GetModel(self, request: pb.GetModelRequest, context: grpc.aio.ServicerContext) -> pb.GetModelResponse:
        bounds, welcome = self.bounds(), self.session.welcome
        assert welcome is not None
        return pb.GetModelResponse(
            model=self.name,
            architecture=welcome.model.architecture,
            max_model_len=bounds.max_model_len,
            vocab_size=bounds.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            block_size=bounds.block_size,
            num_blocks=bounds.num_blocks,
            dtype=welcome.model.dtype,
            device=welcome.device,
            max_num_seqs=welcome.geometry.max_num_seqs,
            has_chat_template=not self.chat_template.problem,
        )

    @guarded
    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        load = await self.session.load()
        return pb.GetLoadResponse(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            blocks_total=load.blocks_total,
            blocks_used=load.blocks_owned,
            blocks_cached=load.blocks_cached,
            generation_tokens_total=load.generation_tokens_total,
            prompt_tokens_total=load.prompt_tokens_total,
            epoch=load.epoch,
            executor_ready=load.executor_ready,
            num_frontends=load.num_frontends,
        )

    # ---- text, away from the event loop ----

    async def _encode(self, text: str, num_bytes: int, **options: bool) -> list[int]:
        if num_bytes <= INLINE_BYTES:
            return self.model.tokenizer.encode(text, **options)
        return await self._in_thread(num_bytes, lambda: self.model.tokenizer.encode(text, **options))

    async def _in_thread(self, num_bytes: int, work: Callable[[], T]) -> T:
        if self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            raise QueueFull("too much text waits to be tokenised", retry_after_s=RETRY_S)
        self._waiting_bytes += num_bytes
        try:
            return await asyncio.get_running_loop().run_in_executor(self._text_threads, work)
        finally:
            self._waiting_bytes -= num_bytes

    # ---- life ----

    @contextlib.contextmanager
    def _record(self, method: str, context: grpc.aio.ServicerContext) -> Iterator[StreamRecord]:
        """One open stream, from its arrival to its end, however it ends."""
        if self._is_draining:
            raise self._draining()
        record = StreamRecord(method, self.name, self.metrics, self._tracing, self._traceparent(context))
        self.num_active += 1
        self._idle.clear()
        try:
            yield record
        except RequestError as error:
            record.refused(error)
            raise
        finally:
            self.num_active -= 1
            if self.num_active == 0:
                self._idle.set()
            record.close()

    def _traceparent(self, context: grpc.aio.ServicerContext) -> str:
        """What the caller sent; empty: nothing, or nobody wants to know."""
        if self._tracing is None:
            return ""
        return next((str(value) for key, value in context.invocation_metadata() or () if key == "traceparent"), "")

    @property
    def is_serving(self) -> bool:
        """A request that came now would be computed."""
        return self.session.ready and not self._is_draining

    def _draining(self) -> Unavailable:
        return Unavailable("this frontend is shutting down; another one may serve", retry_after_s=RETRY_S)

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new streams and waits for those that run. True: all of them ended in time."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        self.chat_template.close()
        self._grammars.close()
