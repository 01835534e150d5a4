"""Records what transformers computes with tiny random models of the hybrid and latent families: writes a file like
tests/vectors/tiny_models.json.

    python tests/peers/tiny_models.py tests/vectors/tiny_models.json

Needs what tests/peers/requirements-transformers.txt pins. Weights are SplitMix64's numbers from a seed and the tensor's name,
as in tests/src/tiny_models.rs, so that no weights need be kept. All is float32 with eager attention; greedy tokens come from
whole forward passes, without a cache.
"""

import json
import sys

import numpy as np
import torch
import transformers

BASE = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Latents and rotated keys together are as wide as MLA backends take: 576, or 320.
DEEPSEEK = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64,
    "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "norm_topk_prob": False,
}

BAMBA = {
    "num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 8,
}

QWEN3_NEXT = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 32,
}

GEMMA3 = {
    "num_hidden_layers": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}

LLAMA4 = {
    "num_hidden_layers": 4, "head_dim": 16, "attention_chunk_size": 16, "intermediate_size": 32, "intermediate_size_mlp": 96,
    "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "floor_scale": 4, "attn_scale": 0.3,
}

# Name, type, fields besides BASE, seed.
CASES = [
    ("deepseek_v2", "deepseek_v2", {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"}, 1),
    ("deepseek_v2, low-rank queries, groups, biases", "deepseek_v2", {
        **DEEPSEEK, "kv_lora_rank": 256, "q_lora_rank": 24, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
        "routed_scaling_factor": 2.5, "attention_bias": True, "rope_theta": 1000.0}, 22),
    ("bamba", "bamba", BAMBA, 3),
    ("bamba, two groups, biases of projections", "bamba", {
        **BAMBA, "mamba_n_groups": 2, "mamba_conv_bias": False, "mamba_proj_bias": True, "mamba_d_conv": 3,
        "attn_layer_indices": [2], "mamba_chunk_size": 16}, 4),
    ("qwen3_next", "qwen3_next", QWEN3_NEXT, 5),
    ("qwen3_next, listed layers, one dense", "qwen3_next", {
        **QWEN3_NEXT, "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        "mlp_only_layers": [0], "norm_topk_prob": False, "partial_rotary_factor": 0.5, "attention_bias": True,
        "linear_num_value_heads": 2, "linear_conv_kernel_dim": 2}, 16),
    ("gemma3_text", "gemma3_text", {**GEMMA3, "tie_word_embeddings": True}, 23),
    ("gemma3_text, scaled rotation, wide heads", "gemma3_text", {
        **GEMMA3, "head_dim": 32, "query_pre_attn_scalar": 24, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_theta": 50000.0, "rope_local_base_freq": 500.0, "sliding_window": 5}, 20),
    ("llama4_text", "llama4_text", LLAMA4, 9),
    ("llama4_text, two experts, all layers", "llama4_text", {
        **LLAMA4, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1], "num_experts_per_tok": 2, "use_qk_norm": False,
        "interleave_moe_layer_step": 1, "rope_scaling": LLAMA3, "attn_temperature_tuning": False, "rope_theta": 10000.0,
        "attention_chunk_size": 8}, 10),
]

# The lengths of the prompts: below and above every window and chunk.
LENGTHS = [3, 17, 44]
# Greedy tokens of each prompt.
NEW_TOKENS = 12
# Rows of logits that are recorded: of the longest prompt.
ROWS = [0, 7, 16, 43]
# The least by which a greedy token's logit is above the next: below it, equal tokens would be luck.
MIN_GAP = 2e-3

MASK = (1 << 64) - 1


def noise(seed, name, count):
    """SplitMix64 from FNV-1a of "seed/name", as 32-bit floats from -1 to 1."""
    state = 0xCBF29CE484222325
    for byte in f"{seed}/{name}".encode():
        state = ((state ^ byte) * 0x100000001B3) & MASK
    # Arrays of 64 bits wrap, as the generator does.
    z = np.uint64(state) + np.uint64(0x9E3779B97F4A7C15) * np.arange(1, count + 1, dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(40)
    return z.astype(np.float32) / np.float32(1 << 23) - np.float32(1)


def spread(family, name, shape):
    """Middle and half width of a tensor's values: activations stay near unit variance."""
    if name.endswith("norm.weight"):
        around_zero = family in ("gemma3_text", "qwen3_next") and not name.endswith("linear_attn.norm.weight")
        return (0, 0.5) if around_zero else (1, 0.5)
    if name.endswith(".A_log"):
        return 0.5, 1
    if name.endswith(".D"):
        return 1, 0.5
    if len(shape) == 1:
        return 0, 0.5
    if "embed_tokens" in name:
        # Gemma multiplies them by the root of the hidden size.
        return 0, 0.125 if family == "gemma3_text" else 1
    # Experts in one tensor are transposed; all others are [outputs, inputs], a convolution's [channels, 1, taps].
    inputs = shape[1] if ".experts." in name and len(shape) == 3 else shape[-1]
    return 0, np.sqrt(np.float32(3) / np.float32(inputs))


def model_of(family, changes, seed):
    config = {**BASE, **changes}
    made = transformers.AutoConfig.for_model(family, **config)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)
    tensors = {}
    for name, shape in shapes.items():
        middle, width = spread(family, name, shape)
        values = np.float32(middle) + np.float32(width) * noise(seed, name, int(np.prod(shape)))
        tensors[name] = torch.from_numpy(values.reshape(shape))
    found = model.load_state_dict(tensors, strict=False)
    assert set(found.missing_keys) <= {"lm_head.weight"} and not found.unexpected_keys, found
    return model, {"model_type": family, **config}, shapes


def prompts():
    return [[(p * 7919 + i * i * 31 + i * 17 + 5) % 127 for i in range(length)] for p, length in enumerate(LENGTHS)]


def logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def greedy(model, prompt):
    """The tokens, and the least gap between a token's logit and the next."""
    tokens, gap = list(prompt), float("inf")
    for _ in range(NEW_TOKENS):
        best = torch.topk(logits(model, tokens)[-1], 2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        tokens.append(int(best.indices[0]))
    return tokens[len(prompt):], gap


def main():
    cases = []
    for name, family, changes, seed in CASES:
        model, config, shapes = model_of(family, changes, seed)
        rows = logits(model, prompts()[-1])
        tokens, gaps = zip(*(greedy(model, prompt) for prompt in prompts()))
        assert min(gaps) > MIN_GAP, f"{name}: gaps {gaps}; change the seed"
        print(f"{name}: largest logit {float(rows.abs().max()):.2f}, least gap {min(gaps):.4f}, {len(set(sum(tokens, [])))} tokens", file=sys.stderr)
        cases.append({
            "name": name,
            "config": config,
            "seed": seed,
            "tensors": shapes,
            "logits": [[round(float(value), 6) for value in rows[row]] for row in ROWS],
            "greedy": tokens,
        })
    head = {"transformers": transformers.__version__, "torch": torch.__version__, "prompts": prompts(), "rows": ROWS}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ', "cases": [\n')
        file.write(",\n".join(json.dumps(case) for case in cases))
        file.write("\n]}\n")


main()
