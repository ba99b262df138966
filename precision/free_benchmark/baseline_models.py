"""The nine model families of the regression, tiny and randomly initialised.

From transformers where it has the class; else a twin with the same structure, built from the nearest class's config.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 512


class Family(NamedTuple):
    """
    Attributes:
        make: builds the model, in float32.
        batch: builds its inputs, given a number of tokens.
        apis: what the family's own row checks, besides softmax, matmul and linear.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]]
    apis: tuple[str, ...] = ()


def _tokens(count: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(0))}


def _llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, attn_implementation="eager", **{**sizes, **changes})
    return LlamaForCausalLM(config)


def _qwen() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="eager",
    )
    return Qwen2ForCausalLM(config)


def _bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=256, n_layer=2, n_head=4))


def _resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    # the defaults are ResNet-50
    return ResNetForImageClassification(ResNetConfig(num_labels=10))


def _image(_: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))}


def _latent(tokens: int) -> dict[str, Tensor]:
    return {"latent": torch.randn(4, tokens, 32, generator=torch.Generator().manual_seed(0))}


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(context.transpose(1, 2).reshape(batch, length, width))


class VideoTransformer(nn.Module):
    """Attention over space and over time in turn, as video diffusion has it: 257 linear layers, 83 attentions.

    (frames, tokens, 32) to the same shape.
    """

    def __init__(self, width: int = 64, heads: int = 4, blocks: int = 41) -> None:
        super().__init__()
        self.inward = nn.Linear(32, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.text = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.condition = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2 * width))
        self.space = nn.ModuleList(_Attention(width, heads) for _ in range(blocks))
        self.frames = nn.ModuleList(_Attention(width, heads) for _ in range(blocks))
        self.feed_forward = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(blocks)
        )
        self.last = _Attention(width, heads)
        self.modulation = nn.Linear(width, width)
        self.outward = nn.Linear(width, 32)

    def forward(self, latent: Tensor) -> Tensor:
        x = self.inward(latent)
        step = self.time(torch.ones_like(x[:1, :1])) + self.text(torch.ones_like(x[:1, :1]))
        scale, shift = self.condition(step).chunk(2, dim=-1)
        for space, frames, feed_forward in zip(self.space, self.frames, self.feed_forward):
            x = frames(space(x).transpose(0, 1)).transpose(0, 1)
            x = x + feed_forward(x) * (1 + scale) + shift
        return self.outward(self.modulation(self.last(x)))


FAMILIES: dict[str, Family] = {
    "LLaMA2": Family(_llama, _tokens),
    # Llama's structure with grouped queries
    "Aquila2": Family(lambda: _llama(num_key_value_heads=2), _tokens),
    "Baichuan2": Family(lambda: _llama(rms_norm_eps=1e-6, num_hidden_layers=3), _tokens),
    "Bloom": Family(_bloom, _tokens),
    # Llama's structure with biases in attention
    "InternLM": Family(lambda: _llama(attention_bias=True), _tokens),
    # biases in the query, key and value projections only
    "Qwen": Family(_qwen, _tokens),
    # GELU gates, a tied output layer and one head of keys and values
    "Gemma": Family(lambda: _llama(hidden_act="gelu", tie_word_embeddings=True, num_key_value_heads=1), _tokens),
    "ResNet50": Family(_resnet, _image, ("conv2d",)),
    "video diffusion": Family(VideoTransformer, _latent, ("linear", "scaled_dot_product_attention")),
}
