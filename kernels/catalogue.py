"""Every kernel in every configuration a supported model can ask for, as arguments of the compiler.

The shapes are those of real models; one of each kind that compiles to different code.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
import triton

from kernels import attention_decode, attention_prefill, attention_shared, blocks, logits, norm_act, rope_cache, sample
from kernels.configs import attention_config
from kernels.paged import QUANT_LIMIT, SPLIT

NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
}


@dataclass(frozen=True)
class Shape:
    """(Hq, Hkv, D, S) of a model's attention, and its name."""

    name: str
    q_heads: int
    kv_heads: int
    head_size: int
    block_size: int = 16


LLAMA_8B = Shape("llama8b", 32, 8, 128)
SMOLLM = Shape("smollm", 9, 3, 64)
PHI = Shape("phi3", 32, 32, 96)
GEMMA = Shape("gemma2", 8, 4, 256)


@dataclass(frozen=True)
class Case:
    """One compilation. `aligned` are the arguments whose value is a multiple of 16."""

    name: str
    config: str
    kernel: triton.JITFunction
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int
    num_stages: int = 3
    unaligned: frozenset[str] = frozenset()
    wants_tensor_cores: bool = False
    scattered: bool = False
    aligned: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        specialised = [
            name
            for name, kind in self.signature.items()
            if name in self.kernel.arg_names
            and name not in self.unaligned
            and (kind[0] == "*" or "stride" in name or name == "vocab")
        ]
        object.__setattr__(self, "aligned", tuple(specialised))


def kv_dtypes(arch: int) -> list[torch.dtype]:
    """e4m3 conversions exist from compute capability 8.9 on."""
    return [torch.bfloat16, torch.int8, torch.float8_e4m3fn if arch >= 90 else torch.float8_e5m2]


def attention_variants(arch: int) -> Iterator[tuple[Shape, torch.dtype, dict[str, object]]]:
    """(shape, cache type, features) compiled for each attention kernel."""
    plain: dict[str, object] = {"WINDOW": 0, "SOFTCAP": 0.0}
    for shape in (LLAMA_8B, SMOLLM):
        for dtype in kv_dtypes(arch):
            yield shape, dtype, plain
    yield PHI, torch.bfloat16, plain
    yield GEMMA, torch.bfloat16, {"WINDOW": 0, "SOFTCAP": 50.0}
    yield GEMMA, torch.bfloat16, {"WINDOW": 4096, "SOFTCAP": 50.0}
    yield LLAMA_8B, torch.bfloat16, {"WINDOW": 4096, "SOFTCAP": 0.0}
    yield SMOLLM, torch.float32, plain


def _attention_parts(shape: Shape, kv_dtype: torch.dtype, features: dict[str, object]) -> tuple[str, dict, dict]:
    """(label, pointer types, constants) that all attention kernels share."""
    compute = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
    label = f"{shape.name} D{shape.head_size} {NAMES[kv_dtype]}"
    label += "".join(f" {name.lower()}{value:g}" for name, value in features.items() if value)
    signature = {"q_ptr": f"*{NAMES[compute]}", "kv_ptr": f"*{NAMES[kv_dtype]}", "out_ptr": f"*{NAMES[compute]}"}
    signature["scale_ptr"] = "*fp32" if kv_dtype in QUANT_LIMIT else signature["q_ptr"]
    constants = {
        **features,
        "QUANTISED": kv_dtype in QUANT_LIMIT,
        "G": shape.q_heads // shape.kv_heads,
        "S": shape.block_size,
        "HKV": shape.kv_heads,
        "D": shape.head_size,
        "D_PAD": triton.next_power_of_2(shape.head_size),
    }
    return label, signature, constants


_SCALARS = ("stride_q", "stride_out", "stride_table", "stride_x", "stride_qkv", "max_splits")
_TABLES = ("table_ptr", "cu_seqlens_ptr", "seq_lens_ptr", "work_ptr", "shared_ptr", "members_ptr")
INTS = dict.fromkeys(_SCALARS, "i32") | dict.fromkeys(_TABLES, "*i32")
FLOATS = {"scale": "fp32", "eps": "fp32", "partial_ptr": "*fp32", "lse_ptr": "*fp32"}


def prefill_cases(arch: int) -> Iterator[Case]:
    for shape, kv_dtype, features in attention_variants(arch):
        label, signature, constants = _attention_parts(shape, kv_dtype, features)
        config = attention_config("prefill", shape.head_size, kv_dtype, arch)
        yield Case(
            "prefill",
            f"{label} m{config.block_m} t{config.tile} w{config.num_warps} s{config.num_stages}",
            attention_prefill.prefill_kernel,
            INTS | FLOATS | signature,
            constants | {"BLOCK_M": config.block_m, "TILE": config.tile},
            config.num_warps,
            config.num_stages,
            frozenset({"stride_table", "table_ptr", "seq_lens_ptr"}),
            wants_tensor_cores=kv_dtype != torch.float32,
        )


def decode_cases(arch: int) -> Iterator[Case]:
    for shape, kv_dtype, features in attention_variants(arch):
        label, signature, constants = _attention_parts(shape, kv_dtype, features)
        config = attention_config("decode", shape.head_size, kv_dtype, arch)
        for direct in (False, True) if kv_dtype == torch.bfloat16 else (False,):
            yield Case(
                "decode_direct" if direct else "decode_split",
                f"{label} t{config.tile} w{config.num_warps} s{config.num_stages}",
                attention_decode.decode_split_kernel,
                INTS | FLOATS | signature,
                constants | {"BLOCK_M": 16, "TILE": config.tile, "SPLIT": SPLIT, "DIRECT": direct, "HAS_SHARED": False},
                config.num_warps,
                config.num_stages,
                frozenset({"stride_table", "max_splits"}),
            )
    for shape in (LLAMA_8B, SMOLLM, GEMMA):
        head_pad = triton.next_power_of_2(shape.head_size)
        yield Case(
            "decode_combine",
            f"{shape.name} D{shape.head_size}",
            attention_decode.decode_combine_kernel,
            INTS | FLOATS | {"out_ptr": "*bf16"},
            {"WINDOW": 0, "TILE": 64, "SPLIT": SPLIT, "MERGE": attention_decode.MERGE}
            | {"HQ": shape.q_heads, "D": shape.head_size, "D_PAD": head_pad},
            attention_decode.combine_warps(head_pad),
            unaligned=frozenset({"max_splits"}),
        )


def shared_cases(arch: int) -> Iterator[Case]:
    for shape, kv_dtype, features in attention_variants(arch):
        if features["WINDOW"]:
            continue
        label, signature, constants = _attention_parts(shape, kv_dtype, features)
        config = attention_config("shared", shape.head_size, kv_dtype, arch)
        del signature["out_ptr"], constants["WINDOW"]
        yield Case(
            "shared_split",
            f"{label} m{config.block_m} t{config.tile} w{config.num_warps} s{config.num_stages}",
            attention_shared.shared_split_kernel,
            INTS | FLOATS | signature,
            constants | {"BLOCK_M": config.block_m, "TILE": config.tile, "SPLIT": SPLIT},
            config.num_warps,
            config.num_stages,
            frozenset({"stride_table", "max_splits"}),
            wants_tensor_cores=kv_dtype != torch.float32,
        )


def elementwise_cases(arch: int) -> Iterator[Case]:
    for shape, norm in ((LLAMA_8B, False), (SMOLLM, False), (PHI, False), (GEMMA, True)):
        for kv_dtype in kv_dtypes(arch):
            types = {"qkv_ptr": "*bf16", "q_out_ptr": "*bf16", "kv_ptr": f"*{NAMES[kv_dtype]}"}
            types |= {"scale_ptr": "*fp32", "cos_sin_ptr": "*fp32", "positions_ptr": "*i32", "slots_ptr": "*i32"}
            types |= {"q_weight_ptr": "*bf16", "k_weight_ptr": "*bf16"}
            yield Case(
                "rope_cache",
                f"{shape.name} D{shape.head_size} {NAMES[kv_dtype]}" + (" norm" if norm else ""),
                rope_cache.rope_cache_kernel,
                INTS | FLOATS | types,
                rope_cache.constants(
                    (shape.q_heads, shape.kv_heads, shape.head_size, shape.block_size),
                    kv_dtype,
                    rotary=shape.head_size,
                    norm=norm,
                ),
                rope_cache.num_warps(shape.head_size),
            )
    for width in (576, 2304, 4096, 8192):
        for residual in (False, True):
            yield Case(
                "rms_norm",
                f"N{width}" + (" residual" if residual else ""),
                norm_act.rms_norm_kernel,
                INTS | FLOATS | dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), "*bf16"),
                {"RESIDUAL": residual, "N": width, "N_PAD": triton.next_power_of_2(width)},
                norm_act.row_warps(width),
            )
    for activation in ("silu", "gelu_tanh", "gelu"):
        yield Case(
            "gated",
            f"{activation} F14336",
            norm_act.gated_kernel,
            INTS | {"x_ptr": "*bf16", "out_ptr": "*bf16"},
            {"ACT": activation, "F": 14336, "BLOCK": norm_act.BLOCK},
            4,
        )


_COUNTED = frozenset({"counts_ptr", "tokens_ptr"})


def logit_cases(arch: int) -> Iterator[Case]:
    """From logits to tokens; vocabularies of Llama 3 and SmolLM2."""
    rules = {"rows_ptr": "*i32", "penalties_ptr": "*fp32", "counts_ptr": "*i32", "allowed_ptr": "*i32"}
    rules |= {"num_outputs_ptr": "*i32", "num_edits_ptr": "*i32", "until_ptr": "*i32", "values_ptr": "*fp32"}
    keys = {"params_ptr": "*fp32", "top_k_ptr": "*i32", "seeds_ptr": "*i64", "choices_ptr": "*i32"}
    outputs = {"ids_ptr": "*i32", "max_ptr": "*fp32", "tokens_ptr": "*i32", "scratch_ptr": "*fp32"}
    types = INTS | FLOATS | rules | keys | outputs | {"positions_ptr": "*i32", "stride_logits": "i32"}
    wide = {"BLOCK": logits.BLOCK}
    for kind in ("bf16", "fp32"):
        common = types | {"logits_ptr": f"*{kind}", "vocab": "i32"}
        constants = {"BLOCK": sample.BLOCK, "CANDIDATES": sample.CANDIDATES}
        yield Case("sample", kind, sample.sample_kernel, common, constants, sample.NUM_WARPS)
    for vocab in (49152, 128256):
        for kind in ("bf16", "fp32"):
            common = types | {"logits_ptr": f"*{kind}"}
            label = f"V{vocab} {kind}"
            yield Case("argmax", label, logits.argmax_kernel, common, wide | {"V": vocab}, logits.NUM_WARPS)
        common = types | {"logits_ptr": "*fp32"}
        constants = wide | {"V": vocab, "WORDS": -(-vocab // 32), "IN_PROMPT": logits.IN_PROMPT}
        yield Case("penalty", f"V{vocab}", logits.penalty_kernel, common, constants, logits.NUM_WARPS)
        # Scattered by nature: no 16-byte accesses to ask for.
        scattered = {"V": vocab, "E": 1088, "BLOCK": 128}
        yield Case("edit", f"V{vocab}", logits.edit_kernel, common, scattered, 1, scattered=True)
        drawn = {"V": vocab}
        yield Case("count_drawn", f"V{vocab}", logits.count_drawn_kernel, common, drawn, 1, scattered=True)
    counting = types | {"length": "i32", "amount": "i32"}
    yield Case("count", "", logits.count_kernel, counting, {"BLOCK": 1024}, 4, unaligned=_COUNTED, scattered=True)
    block = 2 * LLAMA_8B.block_size * LLAMA_8B.kv_heads * LLAMA_8B.head_size * 2
    types = {"cache_ptr": "*i32", "pairs_ptr": "*i32"}
    constants = {"BYTES": block, "CHUNK": blocks.CHUNK}
    yield Case("copy_blocks", "llama8b bf16", blocks.copy_blocks_kernel, types, constants, 4)


def cases(arch: int) -> Iterator[Case]:
    """Everything, for a device of compute capability `arch`."""
    yield from prefill_cases(arch)
    yield from decode_cases(arch)
    yield from shared_cases(arch)
    yield from elementwise_cases(arch)
    yield from logit_cases(arch)
