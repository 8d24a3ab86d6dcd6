"""A GGUF vocabulary -> tokenizer.json and tokenizer_config.json.

Two kinds of vocabulary: `gpt2` (byte-level BPE with merges in the file) and `llama` (sentencepiece BPE with scores and
byte fallback). Which way text is cut before merging is not in the file, only a name for it (tokenizer.ggml.pre); a
wrong cut gives other ids without any error, so a name that is not in `PRE_TOKENIZERS` is refused.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from scheduler_svc.errors import StartupError
from scheduler_svc.models.gguf_file import GgufFile
from scheduler_svc.models.sentencepiece_merges import merges_from_ranks

UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
SPACE = "\u2581"

_LETTER_RUNS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = f"{_CONTRACTIONS}|{_LETTER_RUNS}|\\p{{N}}{{1,3}}{_TAIL}"
QWEN2 = f"{_CONTRACTIONS}|{_LETTER_RUNS}|\\p{{N}}{_TAIL}"
TEKKEN = _CASED % ("", "") + r"|\p{N}" + _CASED_TAIL
GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _CASED_TAIL

# tokenizer.ggml.pre -> "gpt2", "digits" (each digit alone, then gpt2) or a regular expression.
PRE_TOKENIZERS = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "jais", "trillion", "phi-2", "granite-docling"), "gpt2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), "digits"),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "dbrx", "smaug-bpe"), LLAMA3
    ),
    "chatglm-bpe": LLAMA3,
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), QWEN2),
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
}
# A whole word that is in the vocabulary is one token, whatever the merges would make of it.
WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken", "llama4")
NFC = ("qwen2", "deepseek-r1-qwen", "megrez")


def build_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer and the content of tokenizer_config.json."""
    vocabulary = Vocabulary(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer = _sentencepiece(vocabulary)
    else:
        raise StartupError(
            f"{file.path} has a tokenizer of kind {kind!r}; 'gpt2' and 'llama' can be converted. "
            "Use the model's Hugging Face directory"
        )
    _add_tokens(tokenizer, vocabulary)
    _add_borders(tokenizer, vocabulary)
    return tokenizer, _tokenizer_config(vocabulary)


class Vocabulary:
    """tokenizer.* of one file, checked."""

    def __init__(self, file: GgufFile):
        self.file = file
        self.tokens: list[str] = self.get("tokens", [])
        if not self.tokens or not all(isinstance(token, str) for token in self.tokens):
            raise StartupError(f"{file.path} has no vocabulary: its tokenizer is missing")
        self.types: list[int] = self.get("token_type") or [1] * len(self.tokens)
        self.pre: str = self.get("pre", "gpt-2")
        if len(self.types) != len(self.tokens):
            raise StartupError(f"{file.path}: {len(self.tokens)} tokens but {len(self.types)} token types")
        embedding = file.tensors.get("token_embd.weight")
        if embedding is not None and len(self.tokens) > embedding.shape[0]:
            raise StartupError(f"{file.path}: {len(self.tokens)} tokens for {embedding.shape[0]} embedding rows")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"tokenizer.ggml.{key}", default)

    def token(self, key: str) -> str | None:
        index = self.get(key)
        return self.tokens[index] if isinstance(index, int) and 0 <= index < len(self.tokens) else None

    def ids(self) -> dict[str, int]:
        """Token -> id. Padding rows that nobody can produce are left out; of equal tokens the first counts."""
        ids: dict[str, int] = {}
        for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if not (kind == UNUSED and token.startswith("[PAD")):
                ids.setdefault(token, index)
        return ids

    def adds(self, key: str, default: bool) -> bool:
        return bool(self.get(key, default))


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    pre = vocabulary.pre
    if pre in ("default", ""):
        pre = "gpt-2"
    if pre not in PRE_TOKENIZERS:
        raise StartupError(
            f"{vocabulary.file.path}: its tokenizer cuts text in a way ({pre!r}) that is not known here; "
            "use the model's Hugging Face directory"
        )
    pairs = [tuple(merge.split(" ")) for merge in vocabulary.get("merges", [])]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise StartupError(f"{vocabulary.file.path} has no sound merges: its tokenizer cannot be rebuilt")
    ids = vocabulary.ids()
    merges = [(left, right) for left, right in pairs if left in ids and right in ids and left + right in ids]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre in WHOLE_WORDS))
    if pre in NFC:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cut(PRE_TOKENIZERS[pre], vocabulary.adds("add_space_prefix", False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _cut(how: str, prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    if how == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)
    if how == "digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    split = pre_tokenizers.Split(Regex(how), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    gemma = str(vocabulary.file.metadata.get("general.architecture", "")).startswith("gemma")
    # Runs of spaces are written as spaces in some files, as the sentencepiece space in others.
    vocabulary.tokens = [SPACE * len(t) if t and not t.strip(" ") else t for t in vocabulary.tokens]
    ids = vocabulary.ids()
    scores = vocabulary.get("scores")
    if gemma:
        # Gemma's scores do not order its merges; its ids do.
        ranks: dict[str, float] = {token: -index for token, index in ids.items()}
    elif scores and len(scores) == len(vocabulary.tokens):
        ranks = {token: scores[index] for token, index in ids.items()}
    else:
        raise StartupError(f"{vocabulary.file.path} has no token scores: its tokenizer cannot be rebuilt")
    plain = {t: i for t, i in ids.items() if vocabulary.types[i] not in (CONTROL, UNKNOWN, BYTE)}
    unknown = vocabulary.token("unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids, merges=merges_from_ranks(plain, ranks), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    prefix = vocabulary.adds("add_space_prefix", not gemma)
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control tokens become special ones; user-defined ones are matched whole but remain text."""
    known = vocabulary.ids()
    special, whole = [], []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if known.get(token) != index:
            continue
        if kind in (CONTROL, UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED and token.strip(SPACE):
            whole.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)


def _add_borders(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """What a prompt gets around it: a beginning, an end, both or nothing."""
    sentencepiece = vocabulary.get("model") == "llama"
    begin, end = vocabulary.token("bos_token_id"), vocabulary.token("eos_token_id")
    with_begin = begin and vocabulary.adds("add_bos_token", sentencepiece or vocabulary.pre in WHOLE_WORDS)
    with_end = end and vocabulary.adds("add_eos_token", False)
    single = [*([begin] if with_begin else []), "$A", *([end] if with_end else [])]
    if len(single) == 1:
        return
    pair = [*single, *(f"{'$B' if part == '$A' else part}:1" for part in single)]
    used = [(token, tokenizer.token_to_id(token)) for token in (begin, end) if token and token in single]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)


def _tokenizer_config(vocabulary: Vocabulary) -> dict[str, Any]:
    architecture = vocabulary.file.metadata.get("general.architecture")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": vocabulary.file.metadata.get(f"{architecture}.context_length", 0),
        "add_bos_token": vocabulary.adds("add_bos_token", vocabulary.get("model") == "llama"),
        "add_eos_token": vocabulary.adds("add_eos_token", False),
    }
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for ours, theirs in names.items():
        token = vocabulary.token(f"{theirs}_token_id")
        if token is not None:
            config[ours] = token
    template = vocabulary.file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config
