"""Small tokenizers trained on the spot, and model directories around them."""

import functools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. Hello world, this is a tiny corpus!",
    "Numbers 12345 and 2024; naïve café, straße, 東京, 你好世界, emoji 😀👍🏽, tabs\tand\nnewlines.",
    "def f(x):\n    return x * 2  # code has   several  spaces",
    "stop words: the end, END, <tag> [INST] user assistant system You are a helpful assistant",
]
CHATML_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are helpful<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def byte_level(digits: bool = False) -> str:
    """Byte-level BPE with ChatML control tokens; `digits`: numbers are split digit by digit, as in SmolLM2."""
    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if digits:
        steps = [pre_tokenizers.Digits(individual_digits=True), *steps]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=CHATML_SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer.to_str()


@functools.cache
def byte_fallback(strip: bool = True) -> str:
    """Llama-2's style: BPE with byte fallback, spaces as ▁, a leading space stripped by the decoder, a BOS."""
    specials = ["<unk>", "<s>", "</s>"]
    names = [f"<0x{b:02X}>" for b in range(256)]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(
        vocab_size=520, special_tokens=[*specials, *names], show_progress=False, limit_alphabet=60
    )
    tokenizer.train_from_iterator(TEXTS[:1] * 5, trainer)
    document = json.loads(tokenizer.to_str())
    # Byte tokens are vocabulary, not special.
    document["added_tokens"] = [t for t in document["added_tokens"] if t["content"] in specials]
    tokenizer = Tokenizer.from_str(json.dumps(document))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer.to_str()


@functools.cache
def unigram() -> str:
    """T5's style: Unigram with Metaspace; the special tokens are pieces of the model's own vocabulary."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=220, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer.to_str()


@functools.cache
def word_piece() -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer.to_str()


@functools.cache
def suffixed() -> str:
    """A decoder we do not know: end-of-word suffixes."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer.to_str()


def write_model(directory: Path, tokenizer: str, **files: object) -> Path:
    """A model directory without weights. `files` by stem: dicts become JSON, strings are written as they are."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer, "utf-8")
    for stem, content in files.items():
        if isinstance(content, str):
            (directory / f"{stem}.jinja").write_text(content, "utf-8")
        else:
            (directory / f"{stem}.json").write_text(json.dumps(content), "utf-8")
    return directory


def chat_model(directory: Path, template: str = CHATML) -> Path:
    """Byte-level, ChatML, two end tokens."""
    return write_model(
        directory,
        byte_level(digits=True),
        config={"eos_token_id": 0, "architectures": ["TinyForCausalLM"]},
        generation_config={"eos_token_id": [2, 0]},
        tokenizer_config={
            "chat_template": template,
            "eos_token": "<|im_end|>",
            "bos_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
