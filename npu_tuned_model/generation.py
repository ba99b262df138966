"""transformers' interface (forward, generate) on top of the two steps, prefill and decode."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerationMode
from transformers.modeling_outputs import CausalLMOutputWithPast

from npu_tuned_model import cpu_kernels
from npu_tuned_model.chip import AttentionPlan, check_model, plan_attention
from npu_tuned_model.deterministic import rows_computed_alike, same_steps_in_every_mode
from npu_tuned_model.errors import UserError
from npu_tuned_model.frozen_gc import frozen_gc
from npu_tuned_model.graph import CompiledSteps, EagerSteps, GraphOptions
from npu_tuned_model.greedy import MostLikely, greedy_tokens, is_plain
from npu_tuned_model.kv_cache import FixedKVCache, GrowingKVCache, KVCache

_ALTERNATIVES = {
    "labels": "the loss: train with transformers' own Qwen2ForCausalLM",
    "inputs_embeds": "inputs_embeds: pass input_ids",
    "position_ids": "position_ids: pass attention_mask, positions follow from it",
    "output_attentions": "output_attentions (attention is fused, there are no weights to return): "
    "use transformers' own model with attn_implementation='eager'",
    "output_hidden_states": "output_hidden_states: register forward hooks on model.model.layers in eager mode",
}
_MODES = {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE}


class GenerationSteps:
    """Mixin of Qwen2ForCausalLM: turns transformers' calls into calls of ``prefill`` and ``decode``."""

    # what the mixin is mixed into provides
    config: Any
    model: Any
    options: Any
    steps: EagerSteps | CompiledSteps
    generation_config: Any
    device: torch.device
    dtype: torch.dtype
    # which attention operators an NPU shall use: one of chip.ATTENTION
    attention: str = "auto"
    # no garbage collection between the tokens of a generation
    freeze_gc: bool = True
    # a prompt's result doesn't hang on the batch it is in
    deterministic: bool = False

    def run_eager(self, *, deterministic: bool = False) -> None:
        """Run prefill and decode as plain Python from now on.

        Args:
            deterministic: see deterministic.py; call make_deterministic() of that file as well.

        Raises:
            UserError: when asked to be deterministic without the fixed KV cache.
        """
        self.steps = self._deterministic_steps(deterministic) or EagerSteps(self)

    def run_graph(self, graph_options: GraphOptions | None = None, *, deterministic: bool = False) -> None:
        """Compile prefill and decode, each when it is first called, and run the graphs from now on.

        Args:
            deterministic: as in run_eager().

        Raises:
            UserError: when the back end can't run here (no C++ compiler, no torchair), or as run_eager() does.
        """
        self.steps = self._deterministic_steps(deterministic) or CompiledSteps(self, graph_options or GraphOptions())

    def _deterministic_steps(self, deterministic: bool) -> EagerSteps | None:
        """Note what was asked for; the steps that serve it in every mode, where there are such."""
        if deterministic and not self.options.fixed_kv_cache:
            raise UserError("deterministic needs fixed_kv_cache: rows of a growing cache share their columns")
        self.deterministic = deterministic
        return same_steps_in_every_mode(self) if deterministic else None

    def new_cache(self, batch: int, capacity: int) -> FixedKVCache | GrowingKVCache:
        """An empty KV cache for `batch` rows of up to `capacity` tokens (prompt and new ones together).

        Raises:
            UserError: when capacity is beyond the model's context.
        """
        limit = self.config.max_position_embeddings
        if capacity > limit:
            raise UserError(f"{capacity} tokens are more than the model's context of {limit}; shorten the prompt")
        layers = len(self.model.layers)
        weight = self.model.norm.weight
        attention = self.model.layers[0].self_attn
        heads = attention.o_proj.in_features // attention.head_dim
        kv_heads = (attention.qkv.out_features // attention.head_dim - heads) // 2
        check_model(weight.device, weight.dtype, heads, kv_heads, flash_attention=self.options.flash_attention)
        plan = self.attention_plan()
        if not self.options.fixed_kv_cache:
            return GrowingKVCache(batch, capacity, weight.device, plan)
        cache = FixedKVCache(
            batch,
            self.steps.padded_length(capacity),
            layers,
            kv_heads,
            attention.head_dim,
            weight.dtype,
            weight.device,
            plan,
        )
        cache.capacity = capacity
        return cache

    def attention_plan(self) -> AttentionPlan:
        """Which attention operators serve the model as it runs now.

        Raises:
            UserError: when self.attention asks for operators that the chip hasn't.
        """
        return plan_attention(
            self.model.norm.weight.device,
            asked=self.attention,
            flash_attention=self.options.flash_attention,
            kv_lengths=self.options.kv_lengths,
            torchair_mode=self.steps.torchair_mode,
            tiling_sink=self.options.tiling_sink,
        )

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: KVCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Tensor, KVCache]:
        """One step: prefill when the cache is empty or missing, else decode.

        Args:
            input_ids: (batch, sequence) prompts, or (batch, 1) with a filled cache.
            attention_mask: (batch, sequence), 1 for tokens and 0 for padding, wherever the padding is; used by
                prefill, decode knows the lengths.
            past_key_values: a cache of new_cache() or of an earlier call; made to fit the prompt when missing.

        Returns:
            logits float32, (batch, 1, vocabulary) of each row's last token, or (batch, sequence, vocabulary) when
            options.last_token_logits is off; and the cache as past_key_values.

        Raises:
            UserError: for arguments that the tuned path doesn't serve, a cache that is too short, an empty prompt.
        """
        refused = {
            "labels": labels is not None,
            "inputs_embeds": inputs_embeds is not None,
            "position_ids": position_ids is not None,
            "output_attentions": output_attentions if output_attentions is not None else self.config.output_attentions,
            "output_hidden_states": output_hidden_states
            if output_hidden_states is not None
            else self.config.output_hidden_states,
        }
        for name, given in refused.items():
            if given:
                raise UserError(f"the tuned model doesn't offer {_ALTERNATIVES[name]}")
        if input_ids is None or input_ids.dim() != 2 or input_ids.numel() == 0:
            raise UserError("input_ids must be (batch, sequence) with at least one token")
        cache = past_key_values
        if cache is None:
            cache = self.new_cache(input_ids.shape[0], input_ids.shape[1])
        elif not isinstance(cache, KVCache):
            raise UserError(
                f"past_key_values is a {type(cache).__name__}; the tuned model takes model.new_cache(batch, capacity)"
            )
        if cache.batch != input_ids.shape[0]:
            raise UserError(f"the KV cache is for {cache.batch} rows and input_ids has {input_ids.shape[0]}")
        logits = (
            self._prefill(input_ids, attention_mask, cache)
            if cache.seen_tokens == 0
            else self._decode(input_ids, cache)
        )
        if return_dict if return_dict is not None else self.config.use_return_dict:
            return CausalLMOutputWithPast(logits=logits, past_key_values=cache if use_cache is not False else None)
        return logits, cache

    def _prefill(self, input_ids: Tensor, attention_mask: Tensor | None, cache: KVCache) -> Tensor:
        batch, length = input_ids.shape
        lengths, order = [length] * batch, None
        if attention_mask is not None:
            if attention_mask.shape != input_ids.shape:
                raise UserError(
                    f"attention_mask is {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)}; "
                    "they must be of one shape"
                )
            lengths = attention_mask.sum(dim=1).tolist()
            if min(lengths) == 0:
                raise UserError(f"row {lengths.index(0)} of attention_mask is all padding; drop it from the batch")
            if min(lengths) < length:
                order = torch.argsort((attention_mask == 0).to(torch.int8), dim=1, stable=True)
                input_ids = input_ids.gather(1, order)
        cache.check_room(max(lengths))
        if self.deterministic and (batch > 1 or lengths[0] < length):
            return self._prefill_rows(input_ids, lengths, order, cache)
        padded = self.steps.padded_length(length)
        input_ids = torch.nn.functional.pad(input_ids, (0, padded - length))
        last_rows = None
        if self.options.last_token_logits:
            last_rows = torch.tensor([padded * row + n - 1 for row, n in enumerate(lengths)]).to(input_ids.device)
        logits = self.steps.prefill(input_ids, self.model.rotary.prompt(batch, padded), last_rows, cache)
        cache.start(lengths)
        if last_rows is not None:
            return logits[:, None]
        return _put_back(logits.view(batch, padded, -1)[:, :length], order)

    def _prefill_rows(self, input_ids: Tensor, lengths: list[int], order: Tensor | None, cache: Any) -> Tensor:
        rows = [
            self._prefill(input_ids[row : row + 1, :length], None, cache.rows(row, row + 1))
            for row, length in enumerate(lengths)
        ]
        cache.start(lengths)
        if self.options.last_token_logits:
            return torch.cat(rows)
        length = input_ids.shape[1]
        whole = [torch.nn.functional.pad(logits, (0, 0, 0, length - logits.shape[1])) for logits in rows]
        return _put_back(torch.cat(whole), order)

    def _decode(self, input_ids: Tensor, cache: KVCache) -> Tensor:
        if input_ids.shape[1] != 1:
            raise UserError(
                f"{input_ids.shape[1]} tokens per row for a cache that already holds {cache.seen_tokens}: decode takes "
                "one at a time; to go on from a longer text, start a new generation with the whole text"
            )
        cache.check_room(1)
        together = rows_computed_alike(self.steps) if self.deterministic else cache.batch
        tokens = None
        if cache.batch <= together:
            logits, tokens = self._decode_together(input_ids, cache)
        else:
            logits = torch.cat(
                [self._decode_rows(input_ids, row, together, cache) for row in range(0, cache.batch, together)]
            )
        cache.advance()
        logits = logits[:, None]
        if tokens is not None:
            cache.most_likely = MostLikely(logits, tokens)
        return logits

    def _decode_rows(self, input_ids: Tensor, first: int, count: int, cache: Any) -> Tensor:
        rows = cache.rows(first, min(first + count, cache.batch))
        return self._decode_together(input_ids[first : first + count], rows)[0]

    def _decode_together(self, input_ids: Tensor, cache: Any) -> tuple[Tensor, Tensor | None]:
        """The logits, and each row's most likely token where the step finds it on the way."""
        cpu_decode = self.steps.cpu_decode
        if cpu_decode is not None and cpu_decode.serves(input_ids, cache):
            return cpu_decode(input_ids, cache)
        return self.steps.decode(input_ids, cache.positions, cache.decode_window(), cache), None

    # transformers' generate() calls the methods below

    def _get_generation_mode(self, generation_config: Any, assistant_model: Any) -> GenerationMode:
        mode = super()._get_generation_mode(generation_config, assistant_model)  # type: ignore[misc]
        if mode not in _MODES:
            raise UserError(
                f"the tuned model doesn't offer {mode.value.replace('_', ' ')}; use greedy search (num_beams=1, "
                "do_sample=False) or sampling (do_sample=True), or transformers' own model"
            )
        return mode

    def greedy_search(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """Greedy search over a cache made for this generation."""
        kwargs = self._with_cache(input_ids, kwargs)
        for name in ("eos_token_id", "pad_token_id"):
            if kwargs.get(name) is None:
                kwargs[name] = getattr(self.generation_config, name)
        with frozen_gc() if self.freeze_gc else contextlib.nullcontext():
            if is_plain(kwargs):
                return greedy_tokens(self, input_ids, **kwargs)
            return super().greedy_search(input_ids, **kwargs)  # type: ignore[misc]

    def sample(self, input_ids: Tensor, **kwargs: Any) -> Any:
        """Sampling over a cache made for this generation."""
        with frozen_gc() if self.freeze_gc else contextlib.nullcontext():
            return super().sample(input_ids, **self._with_cache(input_ids, kwargs))  # type: ignore[misc]

    def _with_cache(self, input_ids: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        if kwargs.get("past_key_values") is not None:
            raise UserError("generate() makes its own KV cache; pass the whole text instead of past_key_values")
        criteria: StoppingCriteriaList = kwargs["stopping_criteria"]
        if criteria.max_length is None:
            raise UserError("the KV cache needs a limit: set max_new_tokens or max_length")
        limit = self.config.max_position_embeddings
        if criteria.max_length > limit:
            raise UserError(
                f"a prompt of {input_ids.shape[1]} tokens and {criteria.max_length - input_ids.shape[1]} new ones "
                f"exceed the model's context of {limit}; shorten one of them"
            )
        if kwargs.get("use_cache") is False:
            return kwargs
        return {**kwargs, "past_key_values": self.new_cache(input_ids.shape[0], criteria.max_length)}

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: KVCache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The prompt for the first step, the last token for the later ones; anything else is passed to forward()."""
        if past_key_values is not None and past_key_values.seen_tokens > 0:
            input_ids, attention_mask = input_ids[:, -1:], None
        return {**kwargs, "input_ids": input_ids, "attention_mask": attention_mask, "past_key_values": past_key_values}

    # what the report asks

    def is_packed(self) -> bool:
        """Whether the linear layers hold re-laid weights."""
        return not isinstance(self.model.layers[0].mlp.gate_up_proj, torch.nn.Linear)

    def why_no_native_kernels(self) -> str | None:
        """Why decode's matmuls are not the C++ kernels' (whether or not they were asked for); None when they are."""
        layer = self.model.layers[0].mlp.gate_up_proj
        if getattr(layer, "few_rows_kernel", False):
            return None
        if self.device.type != "cpu" or self.dtype != torch.bfloat16:
            return "for bfloat16 on a CPU only"
        if not self.is_packed():
            return "needs packed_weights"
        return cpu_kernels.why_not() or "oneDNN packs the weights in a layout that the kernels don't know"


def _put_back(logits: Tensor, order: Tensor | None) -> Tensor:
    """(batch, sequence, vocabulary) of prompts stored without padding, in the caller's columns."""
    if order is None:
        return logits
    back = torch.argsort(order, dim=1)[:, :, None]
    return logits.gather(1, back.expand(-1, -1, logits.shape[-1]))
