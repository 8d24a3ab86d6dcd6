"""Streams of text or JSON to a terminal. What is printed is exactly what was streamed."""

from collections.abc import Callable, Iterator

from google.protobuf.json_format import MessageToJson

from protos.stepwire.inference.v1 import inference_pb2 as pb
from protos.stepwire.inference.v1.inference_pb2_grpc import InferenceServiceStub
from scheduler_svc.client.config import Access
from scheduler_svc.client.connection import OPEN, connect

Write = Callable[[str], object]


def generate(address: str, request: pb.GenerateRequest, write: Write, *, as_json: bool, access: Access = OPEN) -> None:
    with connect(address, access) as channel:
        stream = InferenceServiceStub(channel).Generate(request, metadata=access.metadata)
        if as_json:
            for message in stream:
                write(MessageToJson(message, indent=None, preserving_proto_field_name=True) + "\n")
        else:
            print_text(stream, write)


def print_text(stream: Iterator[pb.GenerateResponse], write: Write) -> str:
    """Writes the deltas and an end of line; the whole text."""
    text = ""
    for message in stream:
        text += message.text
        write(message.text)
    write("\n")
    return text
