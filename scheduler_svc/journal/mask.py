"""Other ids and names for a core whose journal may be shown to others: it works with these and nothing else.

Token ids go through a secret shuffle of the vocabulary on their way in and back on their way out; tenants and salts
become keyed hashes, and grammars are enciphered. Equal stays equal and different stays different, so every decision is
the one that would have been made. How often each id occurs can still be counted; lengths, times, seeds and request ids
are not hidden.
"""

import dataclasses
import hashlib

import numpy as np

from protos.stepwire.wire.v1 import step_pb2
from scheduler_svc.core.contract import Output, Request

NAME_BYTES = 12
NONCE_BYTES = 16


class NameMask:
    def __init__(self, key: bytes):
        """`key`: a secret of this process, written nowhere."""
        self._key = key[:64]

    def request(self, request: Request) -> Request:
        return dataclasses.replace(
            request, tenant=self._name(request.tenant.encode()).hex(), cache_salt=self._name(request.cache_salt)
        )

    def _name(self, name: bytes) -> bytes:
        return hashlib.blake2b(name, key=self._key, digest_size=NAME_BYTES).digest() if name else b""


class TokenMask:
    def __init__(self, key: bytes, vocab_size: int):
        words = np.frombuffer(hashlib.shake_256(b"vocabulary" + key).digest(8 * vocab_size), "<u8")
        self._forth = np.argsort(words, kind="stable").astype("<i4")
        self._back = np.argsort(self._forth, kind="stable").astype("<i4")
        self._cipher = Cipher(b"grammar" + key)

    def request(self, request: Request) -> None:
        """Masks it in place, but for the sampling message, which gets a copy."""
        request.prompt = self.ids(request.prompt)
        request.stop_token_ids = frozenset(self.ids(np.array(sorted(request.stop_token_ids), "<i4")).tolist())
        sampling = step_pb2.Sampling()
        sampling.CopyFrom(request.sampling)
        _translate(sampling, self._forth)
        if sampling.HasField("constraint"):
            sampling.constraint.grammar = self._cipher.seal(sampling.constraint.grammar)
        request.sampling = sampling
        if request.delivered is not None:
            request.delivered = tuple(
                dataclasses.replace(choice, token_ids=self.ids(choice.token_ids)) for choice in request.delivered
            )

    def ids(self, values: np.ndarray) -> np.ndarray:
        return _mapped(self._forth, values)

    def result(self, result: step_pb2.StepResult) -> step_pb2.StepResult:
        if len(result.token_ids) % 4:
            return result  # refused by the core, as it is
        masked = step_pb2.StepResult()
        masked.CopyFrom(result)
        masked.token_ids = self.ids(np.frombuffer(result.token_ids, "<i4")).tobytes()
        return masked

    # ---- and back ----------------------------------------------------------------------------------------------

    def plan(self, plan: step_pb2.StepPlan) -> step_pb2.StepPlan:
        """What the executor is to compute; `plan` itself where it holds no ids."""
        if not plan.admit:
            return plan
        clear = step_pb2.StepPlan()
        clear.CopyFrom(plan)
        for admit in clear.admit:
            admit.token_ids = _mapped(self._back, np.frombuffer(admit.token_ids, "<i4")).tobytes()
            _translate(admit.sampling, self._back)
            if admit.sampling.HasField("constraint"):
                admit.sampling.constraint.grammar = self._cipher.open(admit.sampling.constraint.grammar)
        return clear

    def output(self, output: Output) -> Output:
        if len(output.token):
            output.token = self._back.take(output.token)
        output.finished = [
            finished
            if finished.stop_token_id is None
            else dataclasses.replace(finished, stop_token_id=int(self._back[finished.stop_token_id]))
            for finished in output.finished
        ]
        return output


def _mapped(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Ids outside the vocabulary stay what they are: somebody is about to refuse them."""
    values = np.ascontiguousarray(values, "<i4")
    # A negative id is a large one without its sign.
    if not len(values) or values.view("<u4").max() < len(table):
        return table.take(values)
    inside = (values >= 0) & (values < len(table))
    return np.where(inside, table[np.where(inside, values, 0)], values)


class Cipher:
    """Texts to hexadecimal ones and back; equal ones stay equal. The nonce is a keyed hash of the text itself."""

    def __init__(self, key: bytes):
        self._key = hashlib.blake2b(key, digest_size=32).digest()

    def seal(self, text: str) -> str:
        data = text.encode()
        nonce = hashlib.blake2b(data, key=self._key, digest_size=NONCE_BYTES).digest()
        return (nonce + self._crypt(nonce, data)).hex()

    def open(self, sealed: str) -> str:
        data = bytes.fromhex(sealed)
        return self._crypt(data[:NONCE_BYTES], data[NONCE_BYTES:]).decode()

    def _crypt(self, nonce: bytes, data: bytes) -> bytes:
        stream = hashlib.shake_256(self._key + nonce).digest(len(data))
        return (np.frombuffer(data, np.uint8) ^ np.frombuffer(stream, np.uint8)).tobytes()


def _translate(sampling: step_pb2.Sampling, table: np.ndarray) -> None:
    if sampling.HasField("constraint"):
        ends = np.frombuffer(sampling.constraint.end_token_ids, "<i4")
        sampling.constraint.end_token_ids = _mapped(table, ends).astype("<i4", copy=False).tobytes()
    values = np.frombuffer(sampling.bad_words, "<i4").copy()
    place = 0
    while place < len(values):  # each word behind its length, which is no id
        begin, place = place + 1, place + 1 + int(values[place])
        values[begin:place] = _mapped(table, values[begin:place])
    sampling.bad_words = values.tobytes()
    for field in ("stop_token_ids", "bias_token_ids", "allowed_token_ids"):
        data = getattr(sampling, field)
        if data:
            setattr(sampling, field, _mapped(table, np.frombuffer(data, "<i4")).astype("<i4", copy=False).tobytes())
