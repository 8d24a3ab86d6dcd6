"""Rebuilt tokenizers: against transformers on tricky texts, against a slow sentencepiece written out here."""

import json
import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from scheduler_svc.errors import StartupError
from scheduler_svc.models.gguf_file import GgufFile
from scheduler_svc.models.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from tests.unit.models.gguf_builder import Vocab, tiny_model, write_model

TRICKY = [
    "",
    " ",
    "   ",
    "\n",
    "\n\n \t\r\n",
    "Hello, world!",
    "  two spaces before and after  ",
    "don't WE'LL I'm they've it'd",
    "12345 3.14159 1,000,000 x2y3 ²③",
    "naïve café Grüße e\u0301",
    "日本語のテキスト 中文 한국어",
    "🙂👩‍👩‍👧 é",
    "a\u00a0b\u2003c\u200bd",
    "def f(x):\n\treturn x**2  # comment\n\n\n",
    "<|im_end|> </s> <s>",
    "\u2581 real \u2581\u2581 marks",
    "\x00\x07\x7f",
    "مرحبا بالعالم שלום",
    "ALLCAPS mixedCase snake_case kebab-case",
    "http://a.b/c?d=e&f#g 50% $9.99 ~!@^*()",
]
SAMPLE = [
    "the quick brown fox jumps over the lazy dog " * 3,
    "don't we'll 12345 67890 3.14 2024",
    "Hello world, hello There! naïve café",
    "  spaces\n\nand lines\n\treturn value",
]


def byte_level_vocab(pre: str, num_tokens: int = 420) -> Vocab:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=num_tokens, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    trained.train_from_iterator(SAMPLE, trainer)
    tokens = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    content = trained.to_str()
    merges = [" ".join(pair) for pair in json.loads(content)["model"]["merges"]]
    types = [3, 3] + [1] * (len(tokens) - 2)
    extra = {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": False}
    return Vocab(pre=pre, tokens=tokens, types=types, merges=merges, extra=extra)


def sentencepiece_vocab(**extra) -> Vocab:
    pieces = ["\u2581", *"abcdefghijklmnopqrstuvwxyz.,!0123456789"]
    merged = [
        "he",
        "\u2581t",
        "in",
        "th",
        "\u2581the",
        "er",
        "ll",
        "hell",
        "\u2581hello",
        "\u2581\u2581",
        "ing",
        "ello",
    ]
    scores = [-float(i + 1) for i in range(len(merged))] + [-1000.0 - i for i in range(len(pieces))]
    byte_pieces = [f"<0x{value:02X}>" for value in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_pieces, *merged, *pieces]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(pieces))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return Vocab("llama", "default", tokens, types, scores=[0.0] * 259 + scores, extra=ids | extra)


def write_vocab_only(path, vocab: Vocab, family: str = "llama", **changes):
    return write_model(path, tiny_model(family, vocab_size=len(vocab.tokens), **changes), vocab=vocab)


def rebuild(path) -> tuple[Tokenizer, dict]:
    with GgufFile(path) as file:
        return build_tokenizer(file)


def random_texts(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    pools = ["abc xyz", "0123456789", " \n\t\r", "'\"-_.,!?", "éüßñ", "日本語", "🙂👍", "\u0301\u200d\u00a0"]
    return ["".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 30))) for _ in range(count)]


SPLITS_OF_BOTH = ["llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2", "dbrx", "llama4"]


@pytest.mark.parametrize("pre", SPLITS_OF_BOTH)
def test_byte_level_equals_transformers(tmp_path, pre):
    path = write_vocab_only(tmp_path / "tiny.gguf", byte_level_vocab(pre))
    ours, _ = rebuild(path)
    ours.normalizer = None  # transformers' reading of GGUF files leaves Qwen's normaliser out
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in TRICKY + random_texts(11, 300):
        expected = theirs(text, add_special_tokens=False).input_ids
        # The tiny vocabulary splits some words that ignore_merges would keep; neither reading has such a word.
        assert ours.encode(text, add_special_tokens=False).ids == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected)


@pytest.mark.parametrize("pre", ["smollm", "starcoder"])
def test_digits_stand_alone(tmp_path, pre):
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", byte_level_vocab(pre)))
    assert ours.encode("12345").tokens == list("12345")
    assert ours.encode("a 12").tokens == ["a", "\u0120", "1", "2"]
    # The reference: Hugging Face's own steps of SmolLM's tokenizer.json, on the same vocabulary.
    plain, _ = rebuild(write_vocab_only(tmp_path / "plain.gguf", byte_level_vocab("gpt-2")))
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    plain.pre_tokenizer = pre_tokenizers.Sequence(steps)
    for text in TRICKY + random_texts(12, 300):
        assert ours.encode(text).ids == plain.encode(text).ids, text


def test_gpt2_does_not_split_digits(tmp_path):
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", byte_level_vocab("gpt-2")))
    assert len(ours.encode("12345").ids) < 5


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_text_comes_back(tmp_path, pre):
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", byte_level_vocab(pre)))
    for text in TRICKY:
        expected = text if ours.normalizer is None else ours.normalizer.normalize_str(text)
        ours.encode_special_tokens = True
        assert ours.decode(ours.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == expected


def test_words_of_the_vocabulary_stay_whole_for_llama3(tmp_path):
    vocab = byte_level_vocab("llama-bpe")
    vocab.tokens.append("\u0120zyx")
    vocab.types.append(1)
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", vocab))
    assert ours.encode("a zyx").tokens[-1] == "\u0120zyx"
    vocab.pre = "qwen2"
    ours, _ = rebuild(write_vocab_only(tmp_path / "other.gguf", vocab))
    assert ours.encode("a zyx").tokens[-1] != "\u0120zyx"


def test_qwen_normalises(tmp_path):
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", byte_level_vocab("qwen2")))
    assert ours.encode("e\u0301").ids == ours.encode("\u00e9").ids


def slow_sentencepiece(text: str, vocab: Vocab) -> list[int]:
    """Joins the best-scored neighbours until nothing joins; the leftmost of equals first. One prefix space."""
    normal = [i for i, kind in enumerate(vocab.types) if kind == 1]
    ids = {vocab.tokens[i]: i for i in normal}
    pieces = list(("\u2581" + text.replace(" ", "\u2581")) if text else "")
    while True:
        pairs = [
            (-vocab.scores[ids[pieces[i] + pieces[i + 1]]], i)
            for i in range(len(pieces) - 1)
            if pieces[i] + pieces[i + 1] in ids
        ]
        if not pairs:
            break
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    found = []
    for piece in pieces:
        known = [ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()]
        found.extend(known)
    return found


def test_sentencepiece_equals_the_slow_one(tmp_path):
    vocab = sentencepiece_vocab(add_bos_token=False)
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", vocab))
    ours.encode_special_tokens = True
    words = ["hello", "the", "there", "thing", " ", "  ", "he", "ll", "o", "ß", "🙂", "t", "in", "\n"]
    rng = random.Random(5)
    texts = TRICKY + ["".join(rng.choice(words) for _ in range(rng.randint(1, 9))) for _ in range(300)]
    for text in texts:
        ids = ours.encode(text).ids
        assert ids == slow_sentencepiece(text, vocab), text
        assert ours.decode(ids) == text.replace("\u2581", " "), text


def test_sentencepiece_equals_transformers_for_phi3(tmp_path):
    path = write_vocab_only(tmp_path / "tiny.gguf", sentencepiece_vocab(add_bos_token=False), "phi3")
    ours, _ = rebuild(path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in ["hello there", " hello", "  in the thing", "x\ny", "ß 🙂", "hello</s>hello"]:
        assert ours.encode(text).ids == theirs(text, add_special_tokens=False).input_ids, text


def test_no_space_prefix_where_the_file_says_so(tmp_path):
    vocab = sentencepiece_vocab(add_space_prefix=False, add_bos_token=False)
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", vocab))
    assert ours.encode("the").tokens == ["t", "he"]
    assert ours.decode(ours.encode(" the").ids) == " the"


def test_gemma_merges_in_the_order_of_its_ids(tmp_path):
    vocab = sentencepiece_vocab()
    vocab.scores = [0.0] * len(vocab.tokens)
    vocab.tokens = ["  " if token == "\u2581\u2581" else token for token in vocab.tokens]
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", vocab, "gemma2", head_dim=16))
    assert ours.encode("a  hello").tokens == ["<s>", "a", "\u2581\u2581", "hell", "o"]
    assert ours.decode(ours.encode(" a  b").ids) == " a  b"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["<s>", "\u2581the"]),
        ({"add_bos_token": True}, ["<s>", "\u2581the"]),
        ({"add_bos_token": False}, ["\u2581the"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "\u2581the", "</s>"]),
    ],
)
def test_borders(tmp_path, flags, expected):
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", sentencepiece_vocab(**flags)))
    assert ours.encode("the").tokens == expected
    assert ours.encode("the", add_special_tokens=False).tokens == ["\u2581the"]


def test_control_tokens_can_be_kept_out_of_plain_text(tmp_path):
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", byte_level_vocab("smollm")))
    assert ours.encode("a</s>").ids[-1] == 1
    ours.encode_special_tokens = True
    assert 1 not in ours.encode("a</s>").ids
    assert ours.decode([0, 1]) == ""


def test_user_defined_tokens_are_whole_text(tmp_path):
    vocab = byte_level_vocab("qwen2")
    vocab.tokens.append("<think>")
    vocab.types.append(4)
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", vocab))
    ids = ours.encode("a<think>b").ids
    assert len(vocab.tokens) - 1 in ids
    assert ours.decode(ids) == "a<think>b"


def test_padding_rows_are_no_tokens(tmp_path):
    vocab = byte_level_vocab("qwen2")
    vocab.tokens += ["[PAD420]", "[PAD421]"]
    vocab.types += [5, 5]
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", vocab))
    assert ours.token_to_id("[PAD420]") is None
    assert ours.get_vocab_size() == len(vocab.tokens) - 2


def test_tokenizer_config_has_names_template_and_length(tmp_path):
    vocab = byte_level_vocab("smollm")
    vocab.extra["chat_template"] = "{{ messages[0].content }} ü"
    _, config = rebuild(write_vocab_only(tmp_path / "tiny.gguf", vocab))
    assert config["chat_template"] == "{{ messages[0].content }} ü"
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    assert config["model_max_length"] == 128
    assert config["add_bos_token"] is False
    assert "pad_token" not in config


def test_the_saved_file_loads_again(tmp_path):
    ours, _ = rebuild(write_vocab_only(tmp_path / "tiny.gguf", sentencepiece_vocab()))
    ours.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert isinstance(loaded.decoder, decoders.Decoder)
    for text in TRICKY:
        assert loaded.encode(text).ids == ours.encode(text).ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "invented"}, r"cuts text in a way \('invented'\)"),
        ({"model": "bert"}, "kind 'bert'"),
        ({"merges": []}, "no sound merges"),
        ({"merges": ["a b c"]}, "no sound merges"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(tmp_path, change, message):
    vocab = byte_level_vocab("smollm")
    for name, value in change.items():
        setattr(vocab, name, value)
    path = write_vocab_only(tmp_path / "tiny.gguf", vocab)
    with pytest.raises(StartupError, match=message):
        rebuild(path)


def test_more_tokens_than_embeddings_are_refused(tmp_path):
    vocab = byte_level_vocab("smollm")
    path = write_model(tmp_path / "tiny.gguf", tiny_model("llama", vocab_size=len(vocab.tokens) - 1), vocab=vocab)
    with pytest.raises(StartupError, match="355 tokens for 354 embedding rows"):
        rebuild(path)
