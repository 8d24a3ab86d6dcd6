"""A conversation in the terminal. The client owns it: every turn sends all the messages so far."""

from collections.abc import Callable

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.client.connection import connect
from scheduler_svc.client.generate import Write, answer

HELP = "Ctrl-C stops an answer, Ctrl-D ends, /reset forgets the conversation."


def chat(address: str, template: pb.ChatRequest, read: Callable[[str], str], write: Write) -> None:
    """`template` holds everything but the conversation, and its system message if there is one."""
    messages = list(template.messages)
    write(HELP + "\n")
    with connect(address) as channel:
        while True:
            try:
                line = read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                write("\n")
                return
            if line == "/reset":
                messages = list(template.messages)
            elif line:
                asked = pb.ChatMessage(role="user", content=line)
                request = pb.ChatRequest(
                    sampling=template.sampling, stopping=template.stopping, messages=[*messages, asked]
                )
                text = answer(channel, request, write)
                if text is not None:
                    messages += [asked, pb.ChatMessage(role="assistant", content=text)]
