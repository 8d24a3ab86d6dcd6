"""API keys: the file, who is let in, and what a tenant has for itself."""

import asyncio
import hashlib
import hmac

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from protos.stepwire.inference.v1 import inference_pb2 as pb
from scheduler_svc.client.config import Access
from scheduler_svc.errors import StartupError
from scheduler_svc.frontend import api_keys
from tests.unit.frontend.grpc_rig import rig
from tests.unit.frontend.test_grpc_generate import until

REQUEST = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70]), stopping=pb.StoppingCriteria(max_tokens=2))
ENDLESS = pb.GenerateRequest(
    request_id="mine", token_ids=pb.TokenIds(ids=[70]), stopping=pb.StoppingCriteria(max_tokens=200)
)
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def key_file(folder, *tenants: str):
    """A file with a key for each tenant, and the keys."""
    path, keys = folder / "keys", []
    for tenant in tenants:
        key, entry = api_keys.make_key(tenant)
        api_keys.add(path, entry)
        keys.append(key)
    path.touch()
    return path, keys


def guarded(folder, *tenants: str, **options):
    path, keys = key_file(folder, *tenants)
    return rig(folder, config={"api_keys": path}, **options), path, keys


def of(key: str) -> dict:
    return {"metadata": Access(key).metadata}


# ---- the file ----


def test_the_file_keeps_a_hash_and_no_key(tmp_path):
    path, [key] = key_file(tmp_path, "acme")
    text = path.read_text()
    assert key not in text
    assert key[12:] not in text
    assert hashlib.sha256(key.encode()).hexdigest() in text
    assert path.stat().st_mode & 0o777 == 0o600
    [entry] = api_keys.read(path)
    assert (entry.tenant, entry.key_id) == ("acme", key[3:11])


def test_keys_are_long_and_never_the_same():
    keys = {api_keys.make_key("a")[0] for _ in range(100)}
    assert len(keys) == 100
    assert all(api_keys.KEY.fullmatch(key) for key in keys)


def test_several_keys_of_one_tenant_and_revoking_one(tmp_path):
    path, [old, new, other] = key_file(tmp_path, "acme", "acme", "globex")
    path.write_text("# ours\n\n" + path.read_text())
    ring = api_keys.Keyring(api_keys.read(path))
    assert [ring.tenant_of(key) for key in (old, new, other)] == ["acme", "acme", "globex"]
    assert api_keys.remove(path, old[3:11]).tenant == "acme"
    ring = api_keys.Keyring(api_keys.read(path))
    assert [ring.tenant_of(key) for key in (old, new, other)] == [None, "acme", "globex"]
    assert path.read_text().startswith("# ours\n\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda key: key[:-1],
        lambda key: key + "x",
        lambda key: key[:-1] + ("A" if key[-1] != "A" else "B"),
        lambda key: key.upper(),
        lambda key: " " + key,
        lambda key: "sw-00000000" + key[11:],
        lambda key: "",
        lambda key: key + "\n",
        lambda key: "é" * 55,
        lambda key: "x" * 100_000,
    ],
)
def test_what_is_nearly_a_key_is_none(tmp_path, change):
    path, [key] = key_file(tmp_path, "acme")
    ring = api_keys.Keyring(api_keys.read(path))
    assert ring.tenant_of(key) == "acme"
    assert ring.tenant_of(change(key)) is None


def test_keys_are_compared_by_digest_in_constant_time(tmp_path, monkeypatch):
    """Whatever is asked, the same work: one compare_digest of two SHA-256."""
    path, [key] = key_file(tmp_path, "acme")
    ring = api_keys.Keyring(api_keys.read(path))
    compared, compare = [], hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    asked = [key, key[:-1] + "!", "sw-00000000" + key[11:], "", "nothing like a key"]
    answers = [ring.tenant_of(text) for text in asked]
    assert answers == ["acme", None, None, None, None]
    assert [pair[0] for pair in compared] == [hashlib.sha256(text.encode()).digest() for text in asked]
    assert {len(part) for pair in compared for part in pair} == {32}


@pytest.mark.parametrize(
    "text",
    [
        "acme",
        "0123abcd acme " + "0" * 63,
        "0123abcd acme " + "0" * 64 + " more",
        "0123ABCD acme " + "0" * 64,
        "0123abcd ../etc " + "0" * 64,
        "0123abcd " + "t" * 65 + " " + "0" * 64,
        ("0123abcd acme " + "0" * 64 + "\n") * 2,
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, text):
    path = tmp_path / "keys"
    path.write_text("# one\n" + text + "\n")
    with pytest.raises(StartupError, match=f"{path} line [23]"):
        api_keys.read(path)


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(StartupError, match="cannot read the key file"):
        api_keys.read(tmp_path / "no")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match="it is not text"):
        api_keys.read(tmp_path / "binary")


@pytest.mark.parametrize("tenant", ["", "-a", "a b", "a/b", "a#", "t" * 65, "ä", "a\n"])
def test_tenants_have_plain_names(tenant):
    with pytest.raises(StartupError, match="tenant"):
        api_keys.make_key(tenant)


# ---- the server ----


async def test_every_method_but_health_wants_a_key(tmp_path):
    """Each registered service, found from the server itself, each method of its descriptor."""
    make, _, [key] = guarded(tmp_path, "acme")
    async with make as r:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        call = r.channel.stream_stream(
            path,
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )(iter([ask]), **of(key))
        services = {service.name for service in (await call.read()).list_services_response.service}
        call.cancel()
        pool = descriptor_pool.Default()
        paths = [f"/{name}/{m.name}" for name in services for m in pool.FindServiceByName(name).methods]
        assert len(paths) >= 10
        codes = {}
        for path in [*paths, "/no.such.Service/Method", "/grpc.health.v1.Healthy/Check"]:
            codes[path] = await code_of_first(r.channel.unary_stream(path)(b"", timeout=60))
        opened = {path for path, code in codes.items() if code != UNAUTHENTICATED}
        assert opened == {path for path in paths if path.startswith("/grpc.health.v1.Health/")}
        assert not r.session.submitted


async def code_of_first(call) -> grpc.StatusCode:
    """How the call ends, or OK with its first message."""
    try:
        await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    call.cancel()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", "Basic KEY")],
        [("authorization", "KEY")],
        [("x-api-key", "KEY")],
        [("authorization-bin", b"Bearer KEY")],
        [("authorization", "Bearer KEY"), ("authorization", "Bearer KEY")],
        [("authorization", "Bearer sw-00000000-" + "A" * 43)],
    ],
)
async def test_no_key_or_another_one_is_refused(tmp_path, metadata):
    make, _, [key] = guarded(tmp_path, "acme")
    metadata = [(n, v.replace(b"KEY" if isinstance(v, bytes) else "KEY", key.encode() if isinstance(v, bytes) else key))
                for n, v in metadata]  # fmt: skip
    async with make as r:
        found = await r.refusal(REQUEST, metadata=metadata)
        assert found.code == UNAUTHENTICATED
        assert key not in found.message
        assert not r.session.submitted


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_key_lets_in_and_names_the_tenant(tmp_path, scheme):
    make, _, [key] = guarded(tmp_path, "acme")
    async with make as r:
        await r.collect(REQUEST, metadata=[("authorization", f"{scheme} {key}")])
        [submit] = r.session.submitted
        assert submit.tenant == "acme"


async def test_health_needs_none(tmp_path):
    make, _, _ = guarded(tmp_path, "acme")
    async with make as r:
        stub = health_pb2_grpc.HealthStub(r.channel)
        await stub.Check(health_pb2.HealthCheckRequest())
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        watch.cancel()


async def test_a_key_made_or_revoked_counts_from_the_next_call_on(tmp_path):
    make, path, [old] = guarded(tmp_path, "acme")
    async with make as r:
        await r.collect(REQUEST, **of(old))
        new, entry = api_keys.make_key("acme")
        api_keys.add(path, entry)
        await r.collect(REQUEST, **of(new))
        api_keys.remove(path, old[3:11])
        assert (await r.refusal(REQUEST, **of(old))).code == UNAUTHENTICATED
        await r.collect(REQUEST, **of(new))


async def test_a_file_that_breaks_leaves_the_last_keys_in_force_and_is_said_once(tmp_path, caplog):
    make, path, [key] = guarded(tmp_path, "acme")
    async with make as r:
        good = path.read_text()
        path.write_text("nonsense\n")
        for _ in range(3):
            await r.collect(REQUEST, **of(key))
        said = [record.getMessage() for record in caplog.records if "--api-keys" in record.getMessage()]
        assert said == ["--api-keys changed and cannot be used: what was read before stays in force"]
        path.write_text(good.replace("acme", "globex"))
        await r.collect(REQUEST, **of(key))
        assert [submit.tenant for submit in r.session.submitted] == ["acme", "acme", "acme", "globex"]


async def test_without_a_key_file_nobody_is_asked_and_nobody_has_a_name(tmp_path):
    async with rig(tmp_path) as r:
        await r.collect(REQUEST)
        await r.collect(REQUEST, metadata=[("authorization", "Bearer whatever")])
        assert [submit.tenant for submit in r.session.submitted] == ["", ""]


# ---- tenants apart ----


async def test_request_ids_of_tenants_do_not_meet(tmp_path):
    """The same id, live twice; neither sees, blocks or cancels the other's."""
    make, _, [acme, globex] = guarded(tmp_path, "acme", "globex")
    async with make as r:
        r.session.gate.clear()
        first, second = (r.stub.Generate(ENDLESS, **of(key)) for key in (acme, globex))
        await until(lambda: len(r.session.live) == 2)
        assert (await r.refusal(ENDLESS, **of(acme))).code == grpc.StatusCode.ALREADY_EXISTS
        await r.stub.Cancel(pb.CancelRequest(request_id="mine"), **of(globex))
        r.session.gate.set()
        messages = await asyncio.gather(collect(first), collect(second))
        assert messages[0][-1].finish_reason == pb.FINISH_REASON_LENGTH
        assert messages[1][-1].finish_reason == pb.FINISH_REASON_CANCELLED
        assert [m[0].request_id for m in messages] == ["mine", "mine"]
        # Naming the other's by its inner id does not help.
        r.session.gate.clear()
        third = r.stub.Generate(ENDLESS, **of(acme))
        await until(lambda: len(r.session.live) == 1)
        await r.stub.Cancel(pb.CancelRequest(request_id="acme/mine"), **of(globex))
        r.session.gate.set()
        assert (await collect(third))[-1].finish_reason == pb.FINISH_REASON_LENGTH


async def collect(call) -> list[pb.GenerateResponse]:
    return [message async for message in call]


async def test_a_refusal_is_counted(tmp_path):
    make, _, _ = guarded(tmp_path, "acme")
    async with make as r:
        await r.refusal(REQUEST)
        labels = {"method": "any", "status": "UNAUTHENTICATED"}
        assert r.service.metrics.registry.get_sample_value("stepwire_frontend_errors_total", labels) == 1


async def test_an_empty_file_refuses_everybody_and_says_so(tmp_path, caplog):
    make, _, _ = guarded(tmp_path)
    async with make as r:
        assert "holds no key yet" in caplog.text
        assert (await r.refusal(REQUEST)).code == UNAUTHENTICATED
