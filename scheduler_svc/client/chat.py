"""A conversation in the terminal. The client owns it: every turn sends all the messages so far."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN, connect, explain
from scheduler_svc.client.generate import Write

HELP = "Ctrl-C stops an answer, Ctrl-D ends, /help shows the commands."
COMMANDS = """/clear          forget the conversation (also /reset)
/system TEXT    forget it and tell the model TEXT first; without TEXT: nothing
/stats          show time to first token and tokens/s after each answer, or no longer
/help           this
A line that ends in \\ goes on in the next one; \"\"\" on a line of its own opens and closes a longer text.
"""
FENCE = '"""'
# A request refused for its content leaves the conversation usable; a server that is gone does not.
FATAL = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED)
ANSWER_TIMEOUT_S = 10.0
Read = Callable[[str], str]


def chat(
    address: str,
    template: pb.ChatRequest,
    read: Read,
    write: Write,
    *,
    stats: bool = False,
    access: Access = OPEN,
) -> None:
    """`template` holds everything but the conversation, and its system message if there is one."""
    with connect(address, access) as channel:
        # Better now than after the first message that nothing answers.
        stub = InferenceServiceStub(channel)
        model = stub.GetModel(pb.GetModelRequest(), timeout=ANSWER_TIMEOUT_S, metadata=access.metadata)
        write(f"{model.model} on {address}. {HELP}\n")
        conversation = Conversation(stub, address, template, write, stats, access)
        while (text := read_message(read, write)) is not None:
            if text.startswith("/") and "\n" not in text:
                conversation.command(text)
            elif text:
                conversation.say(text)
    write("\n")


def read_message(read: Read, write: Write) -> str | None:
    """One message, over several lines if need be; None at the end of input. Ctrl-C drops a half-typed message."""
    lines: list[str] = []
    fenced = False
    while True:
        try:
            line = read("... " if lines or fenced else "> ")
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not lines and not fenced:
                return None
            write("\n")
            lines, fenced = [], False
            continue
        if line.strip() == FENCE:
            if fenced:
                return "\n".join(lines)
            fenced = True
        elif fenced:
            lines.append(line)
        elif line.endswith("\\"):
            lines.append(line[:-1])
        else:
            return "\n".join([*lines, line]).strip()


@dataclass(slots=True)
class Turn:
    """What one answer took."""

    num_tokens: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    ttft_s: float = 0.0
    duration_s: float = 0.0

    def describe(self) -> str:
        after_first = self.duration_s - self.ttft_s
        speed = f"{(self.num_tokens - 1) / after_first:.1f} tok/s" if self.num_tokens > 1 and after_first > 0 else "-"
        return (
            f"[{self.num_tokens} tokens, first after {self.ttft_s * 1000:.0f} ms, then {speed}; "
            f"prompt {self.num_prompt}, {self.num_cached} cached]"
        )


class Conversation:
    """The messages so far, and the way to add to them."""

    def __init__(
        self,
        stub: InferenceServiceStub,
        address: str,
        template: pb.ChatRequest,
        write: Write,
        stats: bool,
        access: Access,
    ):
        self._stub = stub
        self._access = access
        self._address = address
        self._template = template
        self._write = write
        self._stats = stats
        self._opening = list(template.messages)
        self.messages = list(self._opening)

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        match name:
            case "/clear" | "/reset":
                self.messages = list(self._opening)
            case "/system":
                text = rest.strip()
                self._opening = [pb.ChatMessage(role="system", content=text)] if text else []
                self.messages = list(self._opening)
            case "/stats":
                self._stats = not self._stats
                self._write(f"[stats are {'shown' if self._stats else 'not shown'}]\n")
            case "/help":
                self._write(COMMANDS)
            case _:
                self._write(f"[{name} is no command; /help shows them]\n")

    def say(self, text: str) -> None:
        """Sends a turn. Only an answer that came to its end becomes part of the conversation."""
        asked = pb.ChatMessage(role="user", content=text)
        turn = Turn()
        answer = self._answer([*self.messages, asked], turn)
        if answer is not None:
            self.messages += [asked, pb.ChatMessage(role="assistant", content=answer)]
            if self._stats:
                self._write(turn.describe() + "\n")

    def _answer(self, messages: list[pb.ChatMessage], turn: Turn) -> str | None:
        request = pb.ChatRequest()
        request.CopyFrom(self._template)
        del request.messages[:]
        request.messages.extend(messages)
        started = time.perf_counter()
        call = self._stub.Chat(request, metadata=self._access.metadata)
        parts: list[str] = []
        try:
            for message in call:
                self._note(turn, message, time.perf_counter() - started)
                parts.append(message.text)
                self._write(message.text)
        except KeyboardInterrupt:
            # Cancelling frees the request's memory on the server.
            call.cancel()
            self._write("\n[stopped]\n")
            return None
        except grpc.RpcError as error:
            if error.code() in FATAL:
                raise
            self._write(f"\n[{explain(error, self._address, self._access)}]\n")
            return None
        self._write("\n")
        return "".join(parts)

    def _note(self, turn: Turn, message: pb.GenerateResponse, now_s: float) -> None:
        if message.HasField("prompt"):
            turn.num_prompt, turn.num_cached = message.prompt.num_tokens, message.prompt.num_cached_tokens
        if message.token_ids and not turn.num_tokens:
            turn.ttft_s = now_s
        turn.num_tokens += len(message.token_ids)
        turn.duration_s = now_s
