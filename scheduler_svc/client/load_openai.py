"""The same jobs to a server that speaks OpenAI's HTTP API: vLLM, llama.cpp, SGLang, or Stepwire behind a gateway.

Streaming /v1/completions with token ids (or words), or /v1/chat/completions with words. Beside the standard fields it
sends what these servers understand and others ignore: `ignore_eos`, `return_token_ids`, `return_tokens`. Tokens are
counted by what the server says: ids in a chunk, else the usage at the end, else a chunk is a token.
"""

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from scheduler_svc.client.load import Answer, Failed, Heard, LoadPoint, Said, Sending, Served, Target
from scheduler_svc.client.measure import Record
from scheduler_svc.client.workload import Room
from scheduler_svc.errors import StartupError

# For servers that tell neither: ids that every vocabulary has, and a context that holds what benchmarks send.
DEFAULT_ROOM = Room(32_000, 8192)
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class OpenAI:
    """How to speak to it."""

    chat: bool = False
    # What the server calls the model; empty: the first that it lists.
    model: str = ""
    api_key: str = ""
    vocab_size: int = DEFAULT_ROOM.vocab_size
    # More fields of each request, for servers with ways of their own.
    extra: str = ""


class OpenAITarget(Target):
    def __init__(self, url: str, sending: Sending, heard: Heard, options: OpenAI):
        super().__init__(url, sending, heard)
        self._options = options
        self._model = options.model
        try:
            extra = json.loads(options.extra or "{}")
        except ValueError:
            extra = None
        if not isinstance(extra, dict):
            raise StartupError("--extra-body is no JSON object")
        self._extra: dict[str, Any] = extra

    async def __aenter__(self) -> "OpenAITarget":
        try:
            import httpx2
        except ImportError:
            raise StartupError("HTTP targets need httpx2: pip install 'stepwire[bench]'") from None
        self._errors = (httpx2.HTTPError, httpx2.StreamError)
        headers = {"authorization": f"Bearer {self._options.api_key}"} if self._options.api_key else {}
        self._client = httpx2.AsyncClient(
            base_url=self.address.rstrip("/"),
            headers=headers,
            timeout=httpx2.Timeout(self._sending.timeout_s, connect=10.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def describe(self) -> Served:
        try:
            reply = await self._client.get("/v1/models", timeout=10.0)
            listed = reply.raise_for_status().json()["data"]
            model: dict[str, Any] = next((m for m in listed if self._model in ("", m["id"])), {"id": self._model})
        except self._errors as error:
            raise StartupError(f"{self.address} does not list its models: {type(error).__name__}") from None
        except (ValueError, KeyError, TypeError):
            raise StartupError(f"{self.address}/v1/models is not an answer of the OpenAI API") from None
        self._model = model["id"]
        # vLLM and SGLang tell the context as max_model_len, llama.cpp as meta.n_ctx_train.
        about = model.get("meta") or {}
        length = model.get("max_model_len") or about.get("n_ctx_train") or DEFAULT_ROOM.max_model_len
        vocab_size = min(int(about.get("n_vocab") or self._options.vocab_size), self._options.vocab_size)
        return Served(self._model, "?", "?", 0, Room(vocab_size, int(length)))

    async def load(self) -> LoadPoint | None:
        return None

    async def stream(self, said: Said, record: Record) -> Answer:
        answer = Answer()
        num_chunks, usage = 0, 0
        path = "/v1/chat/completions" if self._options.chat else "/v1/completions"
        async for chunk in self._chunks(path, self._body(said, record)):
            usage = _usage(chunk, record) or usage
            choices: list[dict[str, Any]] = chunk.get("choices") or [{}]
            choice = choices[0]
            delta: dict[str, Any] = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            ids = choice.get("token_ids") or chunk.get("tokens") or []
            if not text and not ids:
                continue
            num_chunks += 1
            answer.ids.extend(ids)
            answer.text.append(text)
            self.note(record, len(ids) or 1)
        if not record.message_s and usage:
            raise Failed("NO_TEXT")
        # Chunks without ids may have held several tokens each, or none of a character that was not complete.
        if usage and not answer.ids:
            record.num_output = usage
        return answer

    def _body(self, said: Said, record: Record) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": record.num_asked,
            "temperature": self._sending.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "return_token_ids": True,
            "return_tokens": True,
            "cache_salt": self._salt,
        }
        if self._options.chat:
            roles = ("user", "assistant")
            body["messages"] = [{"role": roles[i % 2], "content": part} for i, part in enumerate(said.parts)]
        else:
            body["prompt"] = " ".join(said.parts) if self._sending.as_text else said.ids
        return {**body, **self._extra}

    async def _chunks(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        try:
            async with self._client.stream("POST", path, json=body) as reply:
                if reply.status_code != 200:
                    raise Failed(f"HTTP_{reply.status_code}")
                async for line in reply.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == DONE:
                        continue
                    chunk = json.loads(data)
                    if not isinstance(chunk, dict) or "error" in chunk:
                        raise Failed("ERROR_IN_STREAM")
                    yield chunk
        except self._errors as error:
            raise Failed(type(error).__name__) from None
        except ValueError:
            raise Failed("NOT_JSON") from None


def _usage(chunk: dict[str, Any], record: Record) -> int:
    """The tokens that the server counted, as far as this chunk tells; the prompt's go into the record."""
    usage = chunk.get("usage") or {}
    record.num_prompt = usage.get("prompt_tokens") or record.num_prompt
    record.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or record.num_cached
    return int(usage.get("completion_tokens") or 0)
