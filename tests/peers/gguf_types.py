"""Records what the tensor types of GGUF mean: writes tests/vectors/gguf_types.json.

    python tests/peers/gguf_types.py tests/vectors/gguf_types.json

Needs gguf and numpy. Two blocks of each type hold random bytes, with scales of a size that weights have; gguf says which values
they are.
"""

import importlib.metadata
import json
import sys

import gguf
import numpy as np

# Where a block has its scales, as 16-bit floats.
SCALES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}
BLOCKS = 2


def blocks(kind, noise):
    size, width = gguf.GGML_QUANT_SIZES[kind]
    if kind in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16):
        values = noise.normal(size=32).astype(np.float32)
        if kind == gguf.GGMLQuantizationType.F16:
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    data = noise.integers(0, 256, size=(BLOCKS, width), dtype=np.uint8)
    for block in data:
        for offset in SCALES[kind.name]:
            scale = np.array([noise.uniform(-0.1, 0.1)], dtype=np.float16)
            block[offset : offset + 2] = scale.view(np.uint8)
    return data.reshape(-1)


def main():
    noise = np.random.default_rng(6)
    kinds = [gguf.GGMLQuantizationType[name] for name in ["F16", "BF16", *SCALES]]
    types = []
    for kind in kinds:
        data = blocks(kind, noise)
        values = gguf.quants.dequantize(data, kind)
        types.append(
            {
                "name": kind.name,
                "type": int(kind),
                "bytes": data.tobytes().hex(),
                "values": [float(str(value)) for value in values.reshape(-1)],
            }
        )
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        version = json.dumps(importlib.metadata.version("gguf"))
        file.write(f'{{"gguf": {version}, "types": [\n')
        file.write(",\n".join(json.dumps(kind) for kind in types))
        file.write("\n]}\n")


main()
