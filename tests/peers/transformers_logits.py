"""Records what transformers computes with tiny random models: writes tests/vectors/transformers_logits.json.

    python tests/peers/transformers_logits.py tests/vectors/transformers_logits.json

Needs torch and transformers. The file was made by 4.51, and then by 4.46 once more, which does not know Qwen3 and keeps those
cases: 4.51 applies a window that use_sliding_window switches off. The weights are those of TinyModel::random in tests/src/families.rs: the
same numbers from the same seed, so that no weights need be kept.
"""

import json
import os
import sys

import numpy as np
import torch
import transformers

CONFIG = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False,
}

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Family, what differs from CONFIG, seed.
CASES = [
    ("llama", {"rope_scaling": LLAMA3, "tie_word_embeddings": True}, 1),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "attention_bias": True}, 2),
    ("llama", {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 190,
               "tie_word_embeddings": True, "rope_theta": 100000.0}, 3),
    ("mistral", {"head_dim": 24, "sliding_window": 7}, 4),
    ("mistral", {"sliding_window": None, "rope_theta": 1000000.0}, 5),
    ("qwen2", {"rope_theta": 1000000.0, "sliding_window": 3, "use_sliding_window": False}, 6),
    ("qwen2", {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 0}, 7),
    ("qwen3", {"head_dim": 32, "rope_theta": 1000000.0}, 8),
    ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}, 9),
]

# Rows of logits that are recorded.
ROWS = [0, 5, 19, 39]

MASK = (1 << 64) - 1


class Noise:
    """SplitMix64, as 32-bit floats from -1 to 1."""

    def __init__(self, seed):
        self.state = seed

    def take(self, count):
        gamma = 0x9E3779B97F4A7C15
        z = np.array([(self.state + gamma * (i + 1)) & MASK for i in range(count)], dtype=np.uint64)
        self.state = (self.state + gamma * count) & MASK
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) >> np.uint64(40)
        return z.astype(np.float32) / np.float32(1 << 23) - np.float32(1)


def shapes(family, config):
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", [config["vocab_size"], hidden]
    yield "model.norm.weight", [hidden]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", [config["vocab_size"], hidden]
    everywhere = config.get("attention_bias", False)
    qkv = everywhere or family == "qwen2"
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows, columns, bias in [
            ("self_attn.q_proj", q, hidden, qkv),
            ("self_attn.k_proj", kv, hidden, qkv),
            ("self_attn.v_proj", kv, hidden, qkv),
            ("self_attn.o_proj", hidden, q, everywhere),
            ("mlp.gate_proj", wide, hidden, False),
            ("mlp.up_proj", wide, hidden, False),
            ("mlp.down_proj", hidden, wide, False),
        ]:
            yield f"{at}{name}.weight", [rows, columns]
            if bias:
                yield f"{at}{name}.bias", [rows]
        yield f"{at}input_layernorm.weight", [hidden]
        yield f"{at}post_attention_layernorm.weight", [hidden]
        if family == "qwen3":
            yield f"{at}self_attn.q_norm.weight", [head]
            yield f"{at}self_attn.k_norm.weight", [head]


def weights(family, config, seed):
    noise = Noise(seed)
    tensors = {}
    for name, shape in shapes(family, config):
        if len(shape) == 1:
            middle, width = (0, 0.5) if name.endswith(".bias") else (1, 0.5)
        elif "embed_tokens" in name:
            middle, width = 0, 1
        else:
            middle, width = 0, np.sqrt(np.float32(3) / np.float32(shape[1]))
        values = np.float32(middle) + np.float32(width) * noise.take(int(np.prod(shape)))
        tensors[name] = torch.from_numpy(values.reshape(shape))
    return tensors


def logits(family, changes, seed, prompt):
    config = {**CONFIG, **changes}
    made = transformers.AutoConfig.for_model(family, **config)
    made._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").float().eval()
    found = model.load_state_dict(weights(family, config, seed), strict=False)
    missing = [name for name in found.missing_keys if name != "lm_head.weight" and "inv_freq" not in name]
    assert not missing and not found.unexpected_keys, found
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


def main():
    prompt = [(7919 + i * i * 31 + i * 17 + 5) % 61 for i in range(40)]
    old = []
    if os.path.exists(sys.argv[1]):
        with open(sys.argv[1], encoding="utf-8") as file:
            old = json.load(file)["cases"]
    cases = []
    for index, (family, changes, seed) in enumerate(CASES):
        if family not in transformers.CONFIG_MAPPING:
            cases.append(old[index])
            continue
        rows = logits(family, changes, seed, prompt)
        cases.append(
            {
                "family": family,
                "changes": changes,
                "seed": seed,
                "transformers": transformers.__version__,
                "logits": [[round(float(value), 5) for value in rows[row]] for row in ROWS],
            }
        )
        print(family, changes, "largest logit", float(rows.abs().max()))
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        head = json.dumps({"torch": torch.__version__, "prompt": prompt, "rows": ROWS})[:-1]
        file.write(head + ', "cases": [\n')
        file.write(",\n".join(json.dumps(case) for case in cases))
        file.write("\n]}\n")


main()
