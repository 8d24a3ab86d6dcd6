"""Streams of deltas against one decode of everything."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.frontend.detokenizer import Detokenizer, common_prefix
from scheduler_svc.frontend.tokenizer import ModelTokenizer
from tests.unit.frontend import tiny_models

DOCUMENTS = {
    "byte_level": tiny_models.byte_level(),
    "digits": tiny_models.byte_level(digits=True),
    "byte_fallback": tiny_models.byte_fallback(),
    "gemma": tiny_models.byte_fallback(strip=False),
    "unigram": tiny_models.unigram(),
    "word_piece": tiny_models.word_piece(),
    "suffixed": tiny_models.suffixed(),
}
DETOKENIZERS = {name: Detokenizer(ModelTokenizer(document)) for name, document in DOCUMENTS.items()}


def expected(tokenizer: ModelTokenizer, prompt: list[int], output: list[int], skip: bool) -> str:
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
    return whole[common_prefix(before, whole) :]


def deltas(detokenizer: Detokenizer, prompt: list[int], output: list[int], skip: bool = True) -> list[str]:
    stream = detokenizer.stream(prompt, skip_special_tokens=skip)
    return [*(stream.push(i) for i in output), stream.flush()]


def test_kinds():
    kinds = {name: d.kind for name, d in DETOKENIZERS.items()}
    assert kinds == {
        "byte_level": "bytes", "digits": "bytes", "byte_fallback": "pieces", "gemma": "pieces", "unigram": "pieces",
        "word_piece": "pieces", "suffixed": "window",
    }  # fmt: skip


@pytest.mark.parametrize("name", DOCUMENTS)
@given(data=st.data(), skip=st.booleans())
@settings(max_examples=250, deadline=None)
def test_random_ids_concatenate_to_the_full_decode(name, data, skip):
    detokenizer = DETOKENIZERS[name]
    # Beyond the tokenizer too: models have wider vocabularies.
    size = max(detokenizer.tokenizer.vocab().values()) + 40
    ids = st.integers(0, size)
    if name in ("byte_fallback", "gemma"):  # dwell on byte tokens: 3..258
        ids = st.one_of(ids, st.integers(3, 258), st.sampled_from([3 + b for b in "é東😀 ".encode()]))
    prompt = data.draw(st.lists(ids, min_size=1, max_size=8))
    output = data.draw(st.lists(ids, max_size=24))
    assert "".join(deltas(detokenizer, prompt, output, skip)) == expected(detokenizer.tokenizer, prompt, output, skip)
    # Taken together, tokens say what they say one by one.
    cut = data.draw(st.integers(0, len(output)))
    together = detokenizer.stream(prompt, skip_special_tokens=skip)
    parts = [together.push_all(output[:cut]), together.push_all(output[cut:]), together.flush()]
    one_by_one = deltas(detokenizer, prompt, output, skip)
    assert parts == ["".join(one_by_one[:cut]), "".join(one_by_one[cut:-1]), one_by_one[-1]]


@pytest.mark.parametrize("name", DOCUMENTS)
@given(text=st.text(st.characters(codec="utf-8"), max_size=30), cut=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_real_text_cut_anywhere(name, text, cut):
    detokenizer = DETOKENIZERS[name]
    ids = detokenizer.tokenizer.encode("Hello " + text)
    prompt, output = ids[:cut], ids[cut:]
    assert "".join(deltas(detokenizer, prompt, output)) == expected(detokenizer.tokenizer, prompt, output, True)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_an_emoji_comes_whole(name):
    detokenizer = DETOKENIZERS[name]
    ids = detokenizer.tokenizer.encode("a", add_special_tokens=False)
    emoji = [detokenizer.tokenizer.token_id(t) for t in single_bytes(name, "🦊".encode())]
    parts = deltas(detokenizer, ids, [*emoji, *ids])
    assert not any("\ufffd" in part for part in parts)
    assert "".join(parts).startswith("🦊")


def single_bytes(name: str, data: bytes) -> list[str]:
    if name == "byte_fallback":
        return [f"<0x{b:02X}>" for b in data]
    table = {v: k for k, v in byte_chars().items()}
    return [table[b] for b in data]


def byte_chars() -> dict[str, int]:
    """The alphabet as the library spells it: each byte alone, through its own encoder."""
    from tokenizers import pre_tokenizers

    spelled = {}
    for byte in range(256):
        text = bytes([byte]).decode("latin-1")
        piece = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
        if byte < 128:
            spelled[piece] = byte
        else:  # two bytes in UTF-8: C2/C3 and a continuation byte
            lead, low = text.encode()
            spelled[piece[0]], spelled[piece[1]] = lead, low
    for lead, sample in ((0xE6, "東"), (0xF0, "🦊")):
        piece = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(sample)[0][0]
        spelled[piece[0]] = lead
    return spelled


def test_a_cut_character_is_flushed_as_one_replacement():
    detokenizer = DETOKENIZERS["byte_level"]
    cut = [detokenizer.tokenizer.token_id(t) for t in single_bytes("byte_level", "🦊".encode()[:3])]
    prompt = detokenizer.tokenizer.encode("a")
    assert deltas(detokenizer, prompt, cut) == ["", "", "", "\ufffd"]
    # The same bytes at the end of the prompt are not the output's to show.
    assert deltas(detokenizer, prompt + cut, []) == [""]


def test_ids_that_nobody_has():
    for detokenizer in DETOKENIZERS.values():
        assert "".join(deltas(detokenizer, [1], [2**31 - 1, -1, 2**32, 10**12])) == ""


def test_work_per_token_does_not_grow(monkeypatch):
    """Calls into the library are counted: none for a token seen before, however long the text."""
    detokenizer = Detokenizer(ModelTokenizer(tiny_models.byte_fallback()))
    ids = detokenizer.tokenizer.encode("The quick brown fox", add_special_tokens=False)
    stream = detokenizer.stream(ids)
    for token_id in ids:
        stream.push(token_id)
    calls = []
    monkeypatch.setattr(detokenizer.tokenizer, "decode", lambda *a, **k: calls.append(a) or "")
    for _ in range(200):
        for token_id in ids:
            stream.push(token_id)
    assert calls == []
