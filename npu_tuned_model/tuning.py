"""Which optimisations are on, and the table of operations that follows from it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor, nn

from npu_tuned_model import cpu_kernels, ops
from npu_tuned_model.errors import UserError
from npu_tuned_model.linear import AnyLinear, split_linear
from npu_tuned_model.ops import composed


@dataclass(frozen=True)
class TuningOptions:
    """One switch per optimisation; each can be off on its own and the result stays right.

    Attributes:
        fixed_kv_cache: keys and values go into one preallocated cache (scatter_update_), not into ever longer copies.
        flash_attention: prompt / incremental flash attention instead of matmul, mask, softmax, matmul.
        kv_lengths: decode is told the lengths and reads only the filled part of the cache, not its whole capacity.
        fused_rope: one rotary operator for query and key.
        fused_add_rms_norm: residual add and the RMSNorm behind it are one operator.
        last_token_logits: prefill computes the logits of each row's last token only.
        fused_qkv: one matmul for query, key and value.
        fused_gate_up: one matmul for gate and up, and SwiGLU as one operator.
        packed_weights: weights are stored in the layout the device's matmul wants (oneDNN blocks on a CPU, input-major
            on an NPU); the plain layout is dropped.
        native_kernels: attention and decode's matmuls are C++ kernels (packed bfloat16 weights, CPU with AVX512-BF16).
        tiling_sink: tiling of dynamic shapes runs on the device (torchair graphs only).
    """

    fixed_kv_cache: bool = True
    flash_attention: bool = True
    kv_lengths: bool = True
    fused_rope: bool = True
    fused_add_rms_norm: bool = True
    last_token_logits: bool = True
    fused_qkv: bool = True
    fused_gate_up: bool = True
    packed_weights: bool = True
    native_kernels: bool = True
    tiling_sink: bool = True

    @classmethod
    def none(cls) -> TuningOptions:
        """Every optimisation off."""
        return cls(**{field.name: False for field in dataclasses.fields(cls)})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(cls))

    def replace(self, **changes: bool) -> TuningOptions:
        """A copy with some switches changed.

        Raises:
            UserError: for a name that is no optimisation; the message lists those there are.
        """
        unknown = sorted(set(changes) - set(self.names()))
        if unknown:
            raise UserError(f"no such optimisation: {', '.join(unknown)}; there are {', '.join(self.names())}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class InForce:
    """One row of the table "what is in force"."""

    name: str
    asked: bool
    active: bool
    why: str


def what_is_in_force(
    options: TuningOptions,
    device: torch.device,
    graph_backend: str | None,
    torchair_mode: str | None = None,
    *,
    packed: bool,
    tied: bool,
    why_no_native_kernels: str | None,
) -> list[InForce]:
    """What of the options acts on this device in this mode, and why not where it doesn't.

    Args:
        graph_backend: name of the graph back end, or None in eager mode.
        torchair_mode: how torchair compiles, where it does.
        packed: whether the model's linear layers hold packed weights.
        tied: whether the output layer shares the embedding's weight.
        why_no_native_kernels: None when decode runs on the C++ kernels.
    """
    how = f"one compiled kernel ({graph_backend})" if graph_backend else "portable operator, eager"
    if device.type == "npu":
        how = "torch_npu operator"
    notes = {
        "fixed_kv_cache": "written in place, scatter_update_",
        "flash_attention": how,
        "kv_lengths": "decode reads the filled part of the cache only",
        "fused_rope": how,
        "fused_add_rms_norm": how,
        "last_token_logits": "one row per sequence goes through the output layer",
        "fused_qkv": "one matmul",
        "fused_gate_up": f"one matmul, SwiGLU: {how}",
        "packed_weights": "oneDNN layout" if device.type == "cpu" else "input-major layout",
        "native_kernels": "C++ with AVX512-BF16: attention, and decode's matmuls",
        "tiling_sink": "torchair",
    }
    inactive = {}
    if not packed:
        inactive["packed_weights"] = f"nothing to pack for {device.type}: the library takes the plain layout"
    elif tied:
        notes["packed_weights"] += "; the output layer shares the embedding's weight and stays plain"
    if why_no_native_kernels is not None:
        inactive["native_kernels"] = why_no_native_kernels
    if graph_backend != "torchair":
        inactive["tiling_sink"] = "needs a torchair graph on an NPU"
    elif torchair_mode != "max-autotune":
        inactive["tiling_sink"] = f"needs torchair's max-autotune; {torchair_mode} replays captured kernels"
    if not options.flash_attention:
        inactive["kv_lengths"] = "needs flash_attention"
    if not options.fixed_kv_cache:
        inactive["kv_lengths"] = "needs fixed_kv_cache"
    rows = []
    for name in options.names():
        asked = getattr(options, name)
        active = asked and name not in inactive
        why = notes[name] if active else (inactive[name] if asked else "switched off")
        rows.append(InForce(name, asked, active, why))
    return rows


@dataclass(frozen=True)
class OpTable:
    """The operations the network calls; each entry is either the fused one or the sequence that it replaces.

    Shapes: T = batch * sequence tokens, H hidden size, N and KVN heads, D head size. Attention is BSND.
    """

    rms_norm: Callable[..., tuple[Tensor, Tensor]]
    add_rms_norm: Callable[..., tuple[Tensor, Tensor, Tensor]]
    apply_rotary_pos_emb: Callable[..., tuple[Tensor, Tensor]]
    prompt_flash_attention: Callable[..., Tensor]
    incre_flash_attention: Callable[..., Tensor]
    project_qkv: Callable[[AnyLinear, Tensor, tuple[int, int, int, int]], tuple[Tensor, Tensor, Tensor]]
    gate_up_swiglu: Callable[[AnyLinear, Tensor], Tensor]


def _fused_qkv(qkv: AnyLinear, hidden: Tensor, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads, head_dim = shape
    # one view and one split: in an NPU graph each of them is a node
    merged = qkv(hidden).view(batch, length, -1, head_dim)
    kv_heads = (merged.shape[2] - heads) // 2
    query, key, value = merged.split([heads, kv_heads, kv_heads], dim=2)
    return query, key, value


def _separate_qkv(qkv: AnyLinear, hidden: Tensor, shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, heads, head_dim = shape
    query_width = heads * head_dim
    kv_width = (qkv.out_features - query_width) // 2
    parts = split_linear(qkv, hidden, [query_width, kv_width, kv_width])
    query, key, value = (part.view(batch, length, -1, head_dim) for part in parts)
    return query, key, value


def _fused_gate_up(gate_up: AnyLinear, hidden: Tensor) -> Tensor:
    return ops.npu_swiglu(gate_up(hidden), dim=-1)


def _separate_gate_up(gate_up: AnyLinear, hidden: Tensor) -> Tensor:
    width = gate_up.out_features // 2
    gate, up = split_linear(gate_up, hidden, [width, width])
    return nn.functional.silu(gate) * up


def select_ops(options: TuningOptions) -> OpTable:
    """The op table for these options."""
    norms = ops if options.fused_add_rms_norm else composed
    rotary = ops if options.fused_rope else composed
    attention = ops if options.flash_attention else composed
    native = options.native_kernels and options.flash_attention
    prompt_attention = cpu_kernels.prompt_flash_attention if native else attention.npu_prompt_flash_attention
    decode_attention = cpu_kernels.incre_flash_attention if native else attention.npu_incre_flash_attention
    return OpTable(
        rms_norm=norms.npu_rms_norm,
        add_rms_norm=norms.npu_add_rms_norm,
        apply_rotary_pos_emb=rotary.npu_apply_rotary_pos_emb,
        prompt_flash_attention=prompt_attention,
        incre_flash_attention=decode_attention,
        project_qkv=_fused_qkv if options.fused_qkv else _separate_qkv,
        gate_up_swiglu=_fused_gate_up if options.fused_gate_up else _separate_gate_up,
    )
