"""Tiny random models of every family, built from their real classes, and what each layer of them must be.

The expectations are written out by hand from the configurations; nothing here asks rope_probe.
"""

from dataclasses import dataclass, field, replace

import torch
import transformers
from projections import CLIP

VOCABULARY = 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Layer:
    """What one layer must be; `dim` channels of each head rotate, `length` is the formation length."""

    kind: str = "full_attention"
    rotates: bool = True
    base: float = 1e4
    dim: int = 16
    window: int = 0
    length: int = 64
    rope: dict = field(default_factory=dict)
    scaling: float = 1.0
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16


@dataclass(frozen=True)
class Family:
    """A tiny model: its classes, its configuration, and what it must turn out to be.

    `layout` is that of the projections, `rotated` that of the vectors attention receives; `split` says how to
    find q and k in the outputs of the projections, `last` that the rotary channels are the last ones of a head.
    `wrapper` is the configuration class of a multimodal model around the text model, with its `vision` options.
    """

    name: str
    model: str
    config: str
    options: dict
    layers: tuple
    layout: str = "half"
    rotated: str = ""
    split: str = "separate"
    last: bool = False
    lengths: tuple = (13,)
    exact: bool = True
    wrapper: str = ""
    vision: dict = field(default_factory=dict)

    def configuration(self):
        text = getattr(transformers, self.config)(**{**SIZES, **self.options})
        if not self.wrapper:
            return text
        return getattr(transformers, self.wrapper)(text_config=text.to_dict(), vision_config=self.vision)

    def build(self):
        return randomised(getattr(transformers, self.model)(self.configuration()))


def randomised(model, seed=0):
    """The model with weights N(0, 0.2), and biases, norm weights and sinks moved by as much."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(noise if parameter.ndim > 1 else parameter + noise)
    return model.eval()


def token_ids(length, segments=3):
    """The same random ids for the same length, special tokens left out."""
    return torch.randint(3, VOCABULARY, (segments, length), generator=torch.Generator().manual_seed(length))


def tiny(prefix, text="", seed=0, **options):
    """A random model of the transformers class names `prefix`ForCausalLM and `prefix`Config."""
    config = getattr(transformers, f"{prefix}{text}Config")(**{**SIZES, **options})
    return randomised(getattr(transformers, f"{prefix}ForCausalLM")(config), seed)


FULL = Layer()
SLIDING = Layer(kind="sliding_attention", window=8, length=8)
CHUNKED = Layer(kind="chunked_attention", window=8, length=8)


def still(layer):
    """The layer, not rotating at all."""
    return replace(layer, rotates=False, dim=0)


def scaled(kind, **parameters):
    return {"rope_type": kind, **parameters}


def llama(name, layers=(FULL, FULL), **options):
    return Family(name, "LlamaForCausalLM", "LlamaConfig", options, layers)


def plain(name, prefix, *layers, layout="half", text="", split="separate", **options):
    """A family of the transformers class names `prefix`ForCausalLM and `prefix`Config."""
    options = {"num_hidden_layers": len(layers), **options}
    return Family(name, f"{prefix}ForCausalLM", f"{prefix}{text}Config", options, layers, layout, split=split)


MHA = replace(FULL, kv_heads=4)
LLAMA31 = scaled("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
LLAMA32 = LLAMA31 | {"factor": 32.0}
YARN = scaled("yarn", factor=4.0, original_max_position_embeddings=16)
YARN_SCALING = 1.1386294361119891  # 0.1 ln 4 + 1
SHORT, LONG = [1.0, 1.1, 1.2, 1.3, 1.4, 1.6, 1.8, 2.0], [1.0, 1.5, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0]
LONGROPE = scaled("longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=16)
LONGROPE_SCALING = 1.5**0.5  # sqrt(1 + ln(64 / 16) / ln 16)
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA_LAYER = Layer(dim=8, kv_heads=1, head_dim=24)


def rope(base, parameters=None):
    return {"rope_theta": base, **(parameters or {"rope_type": "default"})}


def phi3(name, layer, **options):
    layers = (layer, layer)
    return Family(name, "Phi3ForCausalLM", "Phi3Config", options, layers, split="phi3")


def longrope(dim):
    return LONGROPE | {"short_factor": SHORT[: dim // 2], "long_factor": LONG[: dim // 2]}


def phi3_long(name, dim=16, **options):
    layer = replace(FULL, dim=dim, length=16, rope=longrope(dim), scaling=LONGROPE_SCALING)
    options |= {"original_max_position_embeddings": 16, "rope_parameters": rope(1e4, longrope(dim))}
    return replace(phi3(name, layer, **options), lengths=(13, 16, 24))


def deepseek(name, prefix, rope_parameters, layer, layout="interleaved", rotated="", **options):
    family = plain(
        name, prefix, layer, layer, layout=layout, split="mla", rope_parameters=rope_parameters, **MLA, **options
    )
    return replace(family, rotated=rotated, last=True, exact=False)


def _llama_families():
    q3, q2 = rope(5e5, LLAMA31), rope(5e5, LLAMA32)
    l31, l32 = replace(FULL, base=5e5, rope=LLAMA31), replace(FULL, base=5e5, rope=LLAMA32)
    narrow = replace(FULL, heads=8, head_dim=8, dim=8)
    smol = Layer(heads=9, kv_heads=3, head_dim=8, dim=8)
    smol_sizes = {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    yarn = replace(FULL, length=16, rope=YARN, scaling=YARN_SCALING)
    linear = replace(FULL, rope=scaled("linear", factor=4.0))
    dynamic = replace(FULL, length=8, rope=scaled("dynamic", factor=4.0))
    yield llama("Llama 2", (MHA, MHA), num_key_value_heads=4)
    yield llama("Llama 3", (replace(FULL, base=5e5),) * 2, rope_parameters=rope(5e5))
    yield llama("Llama 3.1", (l31,) * 2, rope_parameters=q3, max_position_embeddings=512)
    yield llama("Llama 3.2", (l32,) * 2, rope_parameters=q2, max_position_embeddings=512, tie_word_embeddings=True)
    yield llama("CodeLlama", (replace(MHA, base=1e6),) * 2, rope_parameters=rope(1e6), num_key_value_heads=4)
    yield llama("TinyLlama", (narrow,) * 2, num_attention_heads=8)
    yield llama("SmolLM", (smol,) * 2, **smol_sizes)
    yield llama("SmolLM2", (replace(smol, base=1e5),) * 2, rope_parameters=rope(1e5), **smol_sizes)
    yield llama("Llama with YaRN", (yarn,) * 2, rope_parameters=rope(1e4, YARN), head_dim=16)
    yield llama("Llama with linear scaling", (linear,) * 2, rope_parameters=rope(1e4, linear.rope))
    beyond = llama(
        "Llama with dynamic NTK",
        (dynamic,) * 2,
        rope_parameters=rope(1e4, dynamic.rope),
        max_position_embeddings=8,
        head_dim=16,
    )
    yield replace(beyond, lengths=(6, 13, 24))
    chunked = replace(CHUNKED, base=5e5)
    text = plain(
        "Llama 4 text",
        "Llama4",
        *(chunked, chunked, chunked, still(replace(FULL, base=5e5))),
        layout="interleaved",
        text="Text",
        split="llama4",
        head_dim=16,
        attention_chunk_size=8,
        num_local_experts=4,
        intermediate_size_mlp=96,
        interleave_moe_layer_step=2,
    )
    yield replace(text, exact=False)
    three = replace(FULL, base=2e6)
    yield plain("SmolLM3", "SmolLM3", three, three, three, still(three))


def _gemma_families():
    sliding, full = SLIDING, replace(FULL, base=1e6)
    wide = replace(FULL, head_dim=32, dim=32, kv_heads=1)
    soft = {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0}
    types = {"sliding_window": 8, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    yield plain("Gemma", "Gemma", wide, wide, head_dim=32, num_key_value_heads=1)
    yield plain("Gemma 2", "Gemma2", SLIDING, FULL, head_dim=16, sliding_window=8, **soft)
    gemma3 = plain("Gemma 3 text", "Gemma3", sliding, sliding, full, text="Text", head_dim=16, **types)
    yield gemma3
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    wrapped = replace(gemma3, model="Gemma3ForConditionalGeneration", wrapper="Gemma3Config", vision=vision)
    yield replace(wrapped, name="Gemma 3 multimodal")
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    stretched = (sliding, sliding, replace(full, rope=scaled("linear", factor=8.0)))
    yield replace(
        gemma3,
        name="Gemma 3 with linear scaling",
        layers=stretched,
        options=gemma3.options | {"rope_parameters": nested},
    )
    # head_dim and kv heads differ by layer; the slowest 12 of 16 pairs of full layers stand still
    proportional = scaled("proportional", partial_rotary_factor=0.25)
    wide = Layer(base=1e6, dim=32, head_dim=32, kv_heads=1, rope=proportional)
    gemma4 = plain(
        "Gemma 4 text",
        "Gemma4",
        *(sliding, sliding, wide, sliding, wide),
        text="Text",
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        sliding_window=8,
        layer_types=[layer.kind for layer in (sliding, sliding, wide, sliding, wide)],
    )
    yield gemma4
    yield replace(gemma4, name="Gemma 4 text, shared keys", options=gemma4.options | {"num_kv_shared_layers": 2})


def _other_families():
    biases = {"num_key_value_heads": 2, "tie_word_embeddings": True}
    yield plain("Qwen1.5", "Qwen2", MHA, MHA, num_key_value_heads=4, use_sliding_window=False, sliding_window=8)
    yield plain("Qwen2", "Qwen2", replace(FULL, base=1e6), replace(FULL, base=1e6), rope_parameters=rope(1e6), **biases)
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}
    yield plain("Qwen2.5", "Qwen2", FULL, FULL, SLIDING, SLIDING, **windows)
    wide = replace(FULL, head_dim=32, dim=32, base=1e6)
    yield plain("Qwen3", "Qwen3", wide, wide, head_dim=32, hidden_size=40, rope_parameters=rope(1e6))
    part = replace(MHA, dim=8)
    yield plain("Phi-2", "Phi", part, part, partial_rotary_factor=0.5, num_key_value_heads=4)
    yield plain(
        "Phi with qk norm", "Phi", part, part, partial_rotary_factor=0.5, num_key_value_heads=4, qk_layernorm=True
    )
    window = replace(SLIDING, kv_heads=4)
    yield phi3("Phi-3 4k", window, num_key_value_heads=4, sliding_window=8)
    yield phi3_long("Phi-3.5")
    yield phi3_long("Phi-4-mini", dim=12, partial_rotary_factor=0.75, tie_word_embeddings=True)
    yield plain("Mistral", "Mistral", SLIDING, SLIDING, sliding_window=8)
    mixtral = replace(FULL, base=1e6)
    yield replace(plain("Mixtral", "Mixtral", mixtral, mixtral, num_local_experts=4, sliding_window=None), exact=False)
    yield replace(plain("OLMo", "Olmo", MHA, MHA, clip_qkv=CLIP, num_key_value_heads=4), split="clipped")
    yield plain("OLMo 2", "Olmo2", replace(FULL, base=5e5), replace(FULL, base=5e5), rope_parameters=rope(5e5))
    long = replace(FULL, base=5e5, length=16, rope=YARN, scaling=YARN_SCALING)
    short = replace(SLIDING, base=5e5)
    nested = {"full_attention": rope(5e5, YARN), "sliding_attention": rope(5e5)}
    yield plain("OLMo 3", "Olmo3", short, short, short, long, sliding_window=8, rope_parameters=nested)
    neox = replace(MHA, dim=4)
    yield plain("Pythia", "GPTNeoX", neox, neox, split="neox", rotary_pct=0.25, num_key_value_heads=4)
    yield plain(
        "GPT-J",
        "GPTJ",
        replace(MHA, dim=8),
        replace(MHA, dim=8),
        layout="interleaved",
        rotary_dim=8,
        num_key_value_heads=4,
    )
    part = replace(FULL, dim=4)
    yield plain("StableLM", "StableLm", part, part, partial_rotary_factor=0.25, use_qkv_bias=True)
    yield plain("StableLM with qk norm", "StableLm", part, part, partial_rotary_factor=0.25, qk_layernorm=True)
    half = replace(FULL, dim=8)
    for name, prefix in (("GLM-4 9B", "Glm"), ("GLM-4 0414", "Glm4")):
        yield plain(name, prefix, half, half, layout="interleaved", head_dim=16, attention_bias=True)
    command = replace(FULL, base=5e5)
    yield plain("Cohere", "Cohere", command, command, layout="interleaved", rope_parameters=rope(5e5))
    yield plain(
        "Cohere with qk norm", "Cohere", FULL, FULL, layout="interleaved", rope_parameters=rope(1e4), use_qk_norm=True
    )
    yield plain("Cohere 2", "Cohere2", SLIDING, SLIDING, SLIDING, still(FULL), layout="interleaved", sliding_window=8)
    yield plain("Granite", "Granite", FULL, FULL, attention_multiplier=0.1)
    oss = scaled(
        "yarn", factor=32.0, original_max_position_embeddings=16, beta_fast=32.0, beta_slow=1.0, truncate=False
    )
    long = replace(FULL, base=1.5e5, length=16, rope=oss, scaling=1.3465735902799727)
    short = replace(long, kind="sliding_attention", window=8, length=8)
    sizes = {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"rope_parameters": rope(1.5e5, oss), "max_position_embeddings": 512}
    yield replace(plain("gpt-oss", "GptOss", short, long, short, long, **sizes), exact=False)


def _mla_families():
    unequal = YARN | {"mscale": 0.707, "mscale_all_dim": 1.0}
    equal = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}
    ratio = 0.964326914892074  # (0.0707 ln 4 + 1) / (0.1 ln 4 + 1)
    v2 = replace(MLA_LAYER, length=16, rope=unequal, scaling=ratio)
    v3 = replace(MLA_LAYER, length=16, rope=equal)
    yield deepseek("DeepSeek-V2", "DeepseekV2", rope(1e4, unequal), v2, q_lora_rank=None)
    yield deepseek("DeepSeek-V2 with query rank", "DeepseekV2", rope(1e4, unequal), v2, q_lora_rank=24)
    yield deepseek("DeepSeek-V3", "DeepseekV3", rope(1e4, equal), v3, rotated="half", q_lora_rank=24)
    longcat = deepseek("LongCat-Flash", "LongcatFlash", rope(1e4), MLA_LAYER, rotated="half", q_lora_rank=16)
    sizes = {"head_dim": 8, "num_layers": 1, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2}
    yield replace(longcat, split="longcat", options=longcat.options | sizes | {"moe_topk": 2})
    options = {"q_lora_rank": 24, "rope_interleave": False}
    yield deepseek("DeepSeek-V3 not interleaved", "DeepseekV3", rope(1e4), MLA_LAYER, layout="half", **options)


def _unlisted_families():
    """Families that nothing in the package was written for."""
    windows = (SLIDING, SLIDING, SLIDING, still(FULL))
    yield plain("EXAONE 4", "Exaone4", *windows, sliding_window=8, sliding_window_pattern=4)
    yield plain(
        "EXAONE 4 without windows", "Exaone4", FULL, FULL, sliding_window=None, layer_types=["full_attention"] * 2
    )
    ernie = replace(FULL, base=5e5)
    yield plain("Ernie 4.5", "Ernie4_5", ernie, ernie, layout="interleaved", head_dim=16, use_bias=True)
    helium = replace(FULL, base=1e5)
    yield plain("Helium", "Helium", helium, helium, layout="interleaved", head_dim=16)
    half = replace(FULL, dim=8)
    yield plain("Nemotron", "Nemotron", half, half, partial_rotary_factor=0.5)
    yield plain("StarCoder2", "Starcoder2", SLIDING, SLIDING, sliding_window=8)
    yield plain("Seed-OSS", "SeedOss", FULL, FULL, head_dim=16)
    yield plain(
        "CodeGen",
        "CodeGen",
        part := replace(MHA, dim=8),
        part,
        layout="interleaved",
        split="codegen",
        rotary_dim=8,
        num_key_value_heads=4,
    )
    yield plain("Persimmon", "Persimmon", part, part, split="persimmon", qk_layernorm=False, num_key_value_heads=4)
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    yield replace(plain("Qwen3 MoE", "Qwen3Moe", FULL, FULL, **moe), exact=False)


FAMILIES = [
    *_llama_families(),
    *_gemma_families(),
    *_other_families(),
    *_mla_families(),
    *_unlisted_families(),
]
NAMED = {family.name: family for family in FAMILIES}
