"""Shapes of the published Qwen2 models, and the vendor's measured times to hold a plan or a run against."""

from __future__ import annotations

from typing import Any


def _shape(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32768,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    }


# As in each model's config.json; Qwen2.5's are the same but for the context's length.
SHAPES = {
    "qwen2-0.5b": _shape(896, 4864, 24, 14, 2, 151936, True),
    "qwen2-1.5b": _shape(1536, 8960, 28, 12, 2, 151936, True),
    "qwen2-7b": _shape(3584, 18944, 28, 28, 4, 152064, False),
    "qwen2-72b": _shape(8192, 29568, 80, 64, 8, 152064, False),
}

# (hidden size, layers, cards) -> batch -> (prefill, decode) in ms. Atlas 800I A2, Arm host, bf16, prompt 1024, 1024 new
# tokens, graph mode, as published with the design that this package builds on.
PUBLISHED: dict[tuple[int, int, int], dict[int, tuple[int, int]]] = {
    (3584, 28, 1): {1: (94, 23), 4: (345, 24), 8: (636, 29), 16: (1244, 33), 32: (2496, 36), 48: (3692, 45)},
    (8192, 80, 8): {1: (224, 38), 2: (360, 38), 4: (676, 38), 8: (1259, 39), 16: (2437, 42), 32: (4920, 47)},
}
