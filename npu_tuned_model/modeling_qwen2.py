"""The tuned Qwen2 network (also Qwen1.5 and Qwen2.5: same architecture).

Hidden states are two-dimensional all the way, (tokens, hidden) with tokens = batch * sequence; only attention sees
(batch, sequence, heads, head_dim). Parameters are named as in the Hugging Face checkpoint but for the fused ones,
``self_attn.qkv`` and ``mlp.gate_up_proj``. What a layer computes with comes from the op table and from the step
object, so the network itself knows no device, no option and no cache layout.
"""

from __future__ import annotations

import os
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import Qwen2Config
from transformers.models.qwen2 import modeling_qwen2 as stock

from npu_tuned_model.generation import GenerationSteps
from npu_tuned_model.kv_cache import KVCache, Window
from npu_tuned_model.step import RotaryTable, decode_step, prefill_step, run_layer
from npu_tuned_model.tuning import OpTable, TuningOptions, select_ops

Step = Any


class Qwen2RMSNorm(stock.Qwen2RMSNorm):
    """RMSNorm (arXiv 1910.07467), with the residual add that stands before it fused in where there is one."""

    def __init__(self, hidden_size: int, eps: float, op_table: OpTable) -> None:
        super().__init__(hidden_size, eps)
        self.ops = op_table

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """hidden, residual (tokens, hidden) to (norm(hidden + residual), hidden + residual)."""
        if residual is None:
            return self.ops.rms_norm(hidden, self.weight, self.variance_epsilon)[0], hidden
        normed, _, residual = self.ops.add_rms_norm(hidden, residual, self.weight, self.variance_epsilon)
        return normed, residual


class Qwen2Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) with one projection for query, key and value.

    Head counts follow from the weights' shapes, so a tensor-parallel shard needs no special case.
    """

    def __init__(self, config: Qwen2Config, layer: int, op_table: OpTable) -> None:
        super().__init__()
        self.layer = layer
        self.ops = op_table
        self.head_dim = config.hidden_size // config.num_attention_heads
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.qkv = nn.Linear(config.hidden_size, heads * self.head_dim, bias=True)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, step: Step) -> Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        batch, length = step.cos.shape[:2]
        heads = self.o_proj.in_features // self.head_dim
        query, key, value = self.ops.project_qkv(self.qkv, hidden, (batch, length, heads, self.head_dim))
        query, key = self.ops.apply_rotary_pos_emb(query, key, step.cos, step.sin)
        context = step.attend(self.layer, query, key, value)
        return self.o_proj(context.reshape(batch * length, heads * self.head_dim))


class Qwen2MLP(nn.Module):
    """SwiGLU feed-forward (arXiv 2002.05202) with one projection for gate and up."""

    def __init__(self, config: Qwen2Config, op_table: OpTable) -> None:
        super().__init__()
        self.ops = op_table
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """(tokens, hidden) to (tokens, hidden)."""
        return self.down_proj(self.ops.gate_up_swiglu(self.gate_up_proj, hidden))


class Qwen2DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm that also adds the running residual."""

    def __init__(self, config: Qwen2Config, layer: int, op_table: OpTable) -> None:
        super().__init__()
        self.input_layernorm = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps, op_table)
        self.self_attn = Qwen2Attention(config, layer, op_table)
        self.post_attention_layernorm = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps, op_table)
        self.mlp = Qwen2MLP(config, op_table)

    def forward(self, hidden: Tensor, residual: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """hidden and residual (tokens, hidden): their sum is the layer's input, the results' sum its output."""
        hidden, residual = self.input_layernorm(hidden, residual)
        hidden, residual = self.post_attention_layernorm(self.self_attn(hidden, step), residual)
        return self.mlp(hidden), residual


class Qwen2PreTrainedModel(stock.Qwen2PreTrainedModel):
    """transformers' base class, told that its own attention variants don't apply here."""

    _supports_flash_attn_2 = False
    _supports_sdpa = False
    supports_gradient_checkpointing = False


class Qwen2Model(Qwen2PreTrainedModel):
    """Embedding, decoder layers and the final norm."""

    def __init__(self, config: Qwen2Config, options: TuningOptions) -> None:
        super().__init__(config)
        op_table = select_ops(options)
        self.ops = op_table
        self.run_layer = run_layer
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            Qwen2DecoderLayer(config, layer, op_table) for layer in range(config.num_hidden_layers)
        )
        self.norm = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps, op_table)
        head_dim = config.hidden_size // config.num_attention_heads
        self.rotary = RotaryTable(head_dim, config.max_position_embeddings, config.rope_theta)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, input_ids: Tensor, step: Step) -> Tensor:
        """input_ids (batch, sequence) to normed hidden states (batch * sequence, hidden)."""
        hidden, residual = self.embed_tokens(input_ids.reshape(-1)), None
        for layer in self.layers:
            hidden, residual = self.run_layer(layer, hidden, residual, step)
        return self.norm(hidden, residual)[0]


class Qwen2ForCausalLM(GenerationSteps, Qwen2PreTrainedModel):
    """Qwen2 with a language-model head: two steps, prefill and decode, which are what gets compiled.

    ``forward`` and ``generate`` (transformers' interface) come from GenerationSteps and call the two.
    """

    _tied_weights_keys: ClassVar[list[str]] = ["lm_head.weight"]

    def __init__(self, config: Qwen2Config, options: TuningOptions | None = None) -> None:
        super().__init__(config)
        self.options = options or TuningOptions()
        self.model = Qwen2Model(config, self.options)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.run_eager()
        self.post_init()

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Qwen2ForCausalLM:
        """Load a Hugging Face checkpoint, as transformers spells it; see npu_tuned_model.load.from_pretrained."""
        from npu_tuned_model import load

        return load.from_pretrained(cls, path, *args, **kwargs)

    def save_pretrained(self, folder: str | os.PathLike[str], **kwargs: Any) -> None:
        """Write a plain Hugging Face checkpoint; see npu_tuned_model.load.save_pretrained."""
        from npu_tuned_model import load

        load.save_pretrained(self, folder, **kwargs)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def prefill(
        self, input_ids: Tensor, rotary: tuple[Tensor, Tensor], last_rows: Tensor | None, cache: KVCache
    ) -> Tensor:
        """Run the prompts and store their keys and values.

        Args:
            input_ids: (batch, sequence), padding behind each prompt.
            rotary: model.rotary.prompt(batch, sequence), made outside the graph because it is the same every time.
            last_rows: (batch,) index of each row's last token in batch * sequence, or None for logits of all tokens.
            cache: empty.

        Returns:
            float32 logits, (batch, vocabulary) or (batch * sequence, vocabulary).
        """
        step = prefill_step(self.model.ops, rotary, cache)
        hidden = self.model(input_ids, step)
        if last_rows is not None:
            hidden = hidden.index_select(0, last_rows)
        return self.lm_head(hidden).float()

    def decode(self, input_ids: Tensor, positions: Tensor, window: Window, cache: KVCache) -> Tensor:
        """Run one new token per row.

        Args:
            input_ids: (batch, 1).
            positions: (batch,) int64, cache.positions.
            window: cache.decode_window().
            cache: what prefill filled.

        Returns:
            float32 logits, (batch, vocabulary).
        """
        step = decode_step(self.model.ops, self.model.rotary, cache, positions, window)
        return self.lm_head(self.model(input_ids, step)).float()
