"""The API reference from the comments of the public .proto files: `python -m protos.reference [--check]`.

Writes docs/api.md. With --check nothing is written; the exit status is 1 when the page differs from what the comments
give. A service, method, message or enum without a comment is an error: the page is made of nothing else.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PAGE = ROOT.parent / "docs" / "api.md"
PUBLIC = ("stepwire/inference/v1/inference.proto", "stepwire/admin/v1/admin.proto")
# Field numbers of descriptor.proto, of which paths into a file are made.
MESSAGE, ENUM, SERVICE, SYNTAX = 4, 5, 6, 12
METHOD, FIELD, VALUE, ONEOF = 2, 2, 2, 8
HEAD = """# API reference

Made from the comments of the `.proto` files by `python -m protos.reference`; a test compares. Every frontend answers
[`stepwire.inference.v1`](../protos/stepwire/inference/v1/inference.proto) for clients and
[`stepwire.admin.v1`](../protos/stepwire/admin/v1/admin.proto) for operators, and beside them `grpc.health.v1.Health`
(service names: empty or any of these for "a request would be computed", `liveness` for "this process answers"),
server reflection, and the interfaces of two gateways:
[`vllm.Inference` and `vllm.Control`](../protos/vllm) and `vllm.grpc.engine.VllmEngine`.
"""


class Page:
    """The lines of one .proto file: comments found by their path, as protoc keeps them."""

    def __init__(self, file: FileDescriptorProto):
        self.file = file
        self.missing: list[str] = []
        self._comments = {tuple(at.path): at.leading_comments for at in file.source_code_info.location}
        # The comment above `syntax` is the file's own.
        self._detached = {tuple(at.path): at.leading_detached_comments for at in file.source_code_info.location}

    def lines(self) -> Iterator[str]:
        file = self.file
        yield f"\n## {file.package}\n"
        yield self._text((SYNTAX,), file.name)
        for i, service in enumerate(file.service):
            yield f"\n### service {service.name}\n"
            yield self._text((SERVICE, i), service.name)
            yield "\n| method | takes | answers | |\n|---|---|---|---|"
            for j, method in enumerate(service.method):
                takes, answers = self._linked(method.input_type), self._linked(method.output_type)
                stream = "stream of " if method.server_streaming else ""
                text = self._text((SERVICE, i, METHOD, j), method.name)
                yield f"| `{method.name}` | {takes} | {stream}{answers} | {cell(text)} |"
        for i, message in enumerate(file.message_type):
            yield from self._message(message, (MESSAGE, i))
        for i, enum in enumerate(file.enum_type):
            yield f"\n### {enum.name}\n"
            yield self._text((ENUM, i), enum.name)
            yield "\n| value | number | |\n|---|---|---|"
            for j, value in enumerate(enum.value):
                text = self._comments.get((ENUM, i, VALUE, j), "")
                yield f"| `{value.name}` | {value.number} | {cell(text)} |"

    def _message(self, message: DescriptorProto, path: tuple[int, ...]) -> Iterator[str]:
        yield f"\n### {message.name}\n"
        yield self._text(path, message.name)
        if message.field:
            yield "\n| field | number | type | |\n|---|---|---|---|"
        for j, field in enumerate(message.field):
            text = self._comments.get((*path, FIELD, j), "")
            if field.HasField("oneof_index") and not field.proto3_optional:
                group = message.oneof_decl[field.oneof_index].name
                shared = self._comments.get((*path, ONEOF, field.oneof_index), "")
                members = [other for other in message.field if other.oneof_index == field.oneof_index]
                first = next(other for other in members if other.HasField("oneof_index")) is field
                text = f"One of `{group}`. {shared if first else ''} {text}"
            yield f"| `{field.name}` | {field.number} | {self._type(field, message)} | {cell(text)} |"

    def _type(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        entries = {f".{self.file.package}.{message.name}.{nested.name}": nested for nested in message.nested_type}
        if field.type_name in entries:
            key, value = (self._type(part, message) for part in entries[field.type_name].field)
            return f"map of {key} to {value}"
        name = self._linked(field.type_name) if field.type_name else plain_type(field)
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {name}"
        return f"optional {name}" if field.proto3_optional else name

    def _linked(self, full_name: str) -> str:
        name = full_name.rpartition(".")[2]
        return f"[{name}](#{name.lower()})"

    def _text(self, path: tuple[int, ...], name: str) -> str:
        text = self._comments.get(path, "").strip() or "\n".join(self._detached.get(path, ())).strip()
        if not text:
            self.missing.append(f"{self.file.name}: {name} has no comment")
        return "\n".join(line.strip() for line in text.splitlines())


def plain_type(field: FieldDescriptorProto) -> str:
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def cell(text: str) -> str:
    """One line, in which nothing ends the cell or is taken for markup."""
    line = " ".join(text.split())
    parts = line.split("`")
    parts[::2] = [part.replace("<", "&lt;").replace("|", "\\|").replace("*", "\\*") for part in parts[::2]]
    return "`".join(parts)


def describe(names: tuple[str, ...]) -> list[FileDescriptorProto]:
    """The files of `names` as protoc sees them, comments included."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "set"
        call = ["protoc", f"-I{ROOT}", "--include_source_info", f"--descriptor_set_out={target}", *names]
        if protoc.main(call) != 0:
            raise SystemExit(f"protoc failed: {' '.join(call)}")
        return list(FileDescriptorSet.FromString(target.read_bytes()).file)


def render(files: list[FileDescriptorProto]) -> str:
    """The page; exits when a comment is missing."""
    lines, missing = [HEAD.rstrip()], []
    for file in files:
        page = Page(file)
        lines += page.lines()
        missing += page.missing
    if missing:
        raise SystemExit("\n".join(missing))
    return "\n".join(lines) + "\n"


def main() -> int:
    page = render(describe(PUBLIC))
    if PAGE.exists() and PAGE.read_text() == page:
        return 0
    if "--check" in sys.argv[1:]:
        print("docs/api.md differs from the comments of the .proto files: run `make gen`", file=sys.stderr)
        return 1
    PAGE.write_text(page)
    print("wrote docs/api.md")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
