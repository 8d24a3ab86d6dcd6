"""Encoders: plain text never makes control ids; otherwise the ids are the library's."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from scheduler_svc.errors import StartupError
from scheduler_svc.frontend.tokenizer import ModelTokenizer
from tests.unit.frontend import tiny_models

DOCUMENTS = {
    "byte_level": tiny_models.byte_level(),
    "byte_fallback": tiny_models.byte_fallback(),
    "unigram": tiny_models.unigram(),
    "word_piece": tiny_models.word_piece(),
}
TOKENIZERS = {name: ModelTokenizer(document) for name, document in DOCUMENTS.items()}


@pytest.mark.parametrize("name", DOCUMENTS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_plain_text_makes_no_control_ids(name, data):
    tokenizer = TOKENIZERS[name]
    part = st.one_of(st.sampled_from(list(tokenizer.special_tokens)), st.text(max_size=5))
    text = "".join(data.draw(st.lists(part, max_size=6)))
    ids = tokenizer.encode(text, add_special_tokens=False)
    control = tokenizer.special_ids - {tokenizer.token_id("<unk>"), tokenizer.token_id("[UNK]")}
    assert not control & set(ids)


@pytest.mark.parametrize("name", DOCUMENTS)
@given(text=st.text(max_size=40), add=st.booleans())
@settings(max_examples=100, deadline=None)
def test_ordinary_text_and_parsing_give_the_librarys_ids(name, text, add):
    tokenizer, library = TOKENIZERS[name], Tokenizer.from_str(DOCUMENTS[name])
    if any(special in text for special in tokenizer.special_tokens):
        return
    ids = library.encode(text, add_special_tokens=add).ids
    assert tokenizer.encode(text, add_special_tokens=add) == ids
    assert tokenizer.encode(text, add_special_tokens=add, parse_special_tokens=True) == ids


def test_parsing_makes_control_ids():
    tokenizer = TOKENIZERS["byte_level"]
    assert tokenizer.encode("<|im_start|>", parse_special_tokens=True) == [1]
    assert tokenizer.decode(tokenizer.encode("<|im_start|>")) == "<|im_start|>"


def test_one_bos_though_the_text_brings_its_own():
    tokenizer = TOKENIZERS["byte_fallback"]
    assert tokenizer.encode("<s>A", parse_special_tokens=True).count(1) == 1
    assert tokenizer.encode("A", parse_special_tokens=True)[0] == 1
    assert tokenizer.encode("<s>A")[0] == 1
    assert tokenizer.encode("<s>A").count(1) == 1  # and the spelled one is text
    assert tokenizer.encode("<s>A", add_special_tokens=False, parse_special_tokens=True).count(1) == 1


def test_digits_are_split_one_by_one():
    assert len(ModelTokenizer(tiny_models.byte_level(digits=True)).encode("12345")) == 5


def test_ids_beyond_the_tokenizer_decode_to_nothing():
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.decode([10**6, -1, 2**32, 2**40]) == ""
        assert tokenizer.token(2**40) is None


def test_truncation_and_padding_of_the_file_are_off():
    document = json.loads(DOCUMENTS["byte_level"])
    document["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    tokenizer = ModelTokenizer(json.dumps(document))
    assert tokenizer.encode("a b c d e f g h i") == TOKENIZERS["byte_level"].encode("a b c d e f g h i")
    assert tokenizer.encode("a") == TOKENIZERS["byte_level"].encode("a")


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_longest_token_is_that_of_the_whole_vocabulary(name):
    vocab = TOKENIZERS[name].vocab()
    assert TOKENIZERS[name].max_token_bytes == max(len(token.encode()) for token in vocab)


def test_no_text_has_fewer_tokens_than_its_bytes_allow():
    for name in ("byte_level", "byte_fallback"):
        tokenizer = TOKENIZERS[name]
        for text in tiny_models.TEXTS:
            assert len(tokenizer.encode(text)) * tokenizer.max_token_bytes >= len(text.encode())


@pytest.mark.parametrize("content", [None, "{", '{"a": 1}', "\xff"])
def test_a_bad_file_is_one_clear_line(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(StartupError, match=r"tokenizer\.json") as caught:
        ModelTokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)
