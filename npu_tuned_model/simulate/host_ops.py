"""What torch_npu's own operators compute, on host tensors: the portable side of the op contract.

Arguments come as the vendor's schema names them, defaults included, so a default that is a trap on the device (such as
next_tokens=0 of prompt flash attention) is one here, too. An operator or an argument without an implementation raises.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_tuned_model import ops

# Operators whose namesake in npu_tuned_model.ops takes the same arguments, and which of the vendor's it takes.
_NAMESAKES = {
    "npu_rms_norm": ("input", "gamma", "epsilon"),
    "npu_add_rms_norm": ("x1", "x2", "gamma", "epsilon"),
    "npu_rotary_mul": ("input", "r1", "r2", "rotary_mode"),
    "npu_swiglu": ("input", "dim"),
    "npu_dynamic_quant": ("input", "smooth_scales", "dst_type", "quant_mode"),
    "npu_weight_quant_batchmatmul": (
        "x",
        "weight",
        "antiquant_scale",
        "antiquant_offset",
        "quant_scale",
        "quant_offset",
        "bias",
        "antiquant_group_size",
    ),
    "npu_trans_quant_param": ("scale", "offset", "round_mode"),
    "npu_quant_matmul": ("x1", "x2", "scale", "offset", "pertoken_scale", "bias", "output_dtype"),
    "npu_mm_all_reduce_base": ("x1", "x2", "hcom", "reduce_op", "bias", "x3", "comm_turn"),
    "npu_prompt_flash_attention": (
        "query",
        "key",
        "value",
        "atten_mask",
        "pse_shift",
        "actual_seq_lengths",
        "quant_scale2",
        "quant_offset2",
        "num_heads",
        "scale_value",
        "pre_tokens",
        "next_tokens",
        "input_layout",
        "num_key_value_heads",
        "actual_seq_lengths_kv",
        "sparse_mode",
    ),
    "npu_incre_flash_attention": (
        "query",
        "key",
        "value",
        "atten_mask",
        "pse_shift",
        "actual_seq_lengths",
        "block_table",
        "quant_scale2",
        "quant_offset2",
        "kv_padding_size",
        "num_heads",
        "scale_value",
        "input_layout",
        "num_key_value_heads",
        "block_size",
        "inner_precise",
    ),
    "npu_fused_infer_attention_score": (
        "query",
        "key",
        "value",
        "pse_shift",
        "atten_mask",
        "actual_seq_lengths",
        "actual_seq_lengths_kv",
        "quant_scale2",
        "quant_offset2",
        "block_table",
        "query_padding_size",
        "kv_padding_size",
        "num_heads",
        "scale",
        "pre_tokens",
        "next_tokens",
        "input_layout",
        "num_key_value_heads",
        "sparse_mode",
        "inner_precise",
        "block_size",
        "softmax_lse_flag",
    ),
}

# newer releases of torch_npu hand dtypes on as torch's number for them
_DTYPES = {1: torch.int8, 3: torch.int32, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16, 16: torch.quint4x2}


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_graph: bool) -> Any:
    """Run an operator of torch_npu on host tensors.

    Args:
        func: the OpOverload.
        args, kwargs: its arguments, tensors on the host. Operators that overwrite an input on the device overwrite it.
        in_graph: whether the call is a node of a GE graph, where the rotary operator works on copies.

    Raises:
        NotImplementedError: the operator, or an argument given to it, isn't simulated.
    """
    name = func._schema.name.partition("::")[2]
    given = _by_name(func, args, kwargs)
    if name in _NAMESAKES:
        known = _NAMESAKES[name]
        # a captured graph has its results, and the kernel's scratch memory, at fixed addresses
        out, _ = given.pop("out", None), given.pop("workspace", None)
        _refuse_others(func, given, known)
        results = getattr(ops, name)(**{argument: given[argument] for argument in known if argument in given})
        return results if out is None else tuple(_put(place, result) for place, result in zip(out, results))
    if name in _SPECIAL:
        return _SPECIAL[name](given)
    if name == "npu_apply_rotary_pos_emb":
        return _rotary(given, overwrite=not in_graph)
    raise NotImplementedError(
        f"{func} is not simulated; add it to {__name__}, or run this part of the code on the CPU: {func._schema}"
    )


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Every argument of the call by its name in the schema, those left out with the vendor's default."""
    arguments = func._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    given.update(zip((argument.name for argument in arguments), args))
    given.update(kwargs)
    for name in ("output_dtype", "dst_type"):
        if isinstance(given.get(name), int):
            given[name] = _DTYPES.get(given[name], given[name])
    return given


def _refuse_others(func: Any, given: dict[str, Any], known: tuple[str, ...]) -> None:
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    for name, value in given.items():
        if name not in known and not isinstance(value, Tensor) and value == defaults[name]:
            continue
        if name not in known:
            raise NotImplementedError(f"{func}: its argument {name} is not simulated")


def _put(place: Tensor, result: Tensor) -> Tensor:
    # results that weren't asked for are empty, and the places for them may have any shape
    return place.copy_(result) if result.numel() else place


def _rotary(given: dict[str, Any], *, overwrite: bool) -> tuple[Tensor, Tensor]:
    query, key = given["query"], given["key"]
    results = ops.npu_apply_rotary_pos_emb(
        query, key, given["cos"], given["sin"], given["layout"], given["rotary_mode"]
    )
    if not overwrite:
        return results
    # the eager kernel returns its inputs, rotated, though its schema doesn't say so
    return query.copy_(results[0]), key.copy_(results[1])


def _scatter_update_(given: dict[str, Any]) -> Tensor:
    return ops.scatter_update_(given["input"], given["indices"], given["updates"], given["axis"])


def _scatter_update(given: dict[str, Any]) -> Tensor:
    return ops.scatter_update_(given["input"].clone(), given["indices"], given["updates"], given["axis"])


def _fusion_attention(given: dict[str, Any]) -> tuple[Any, ...]:
    """What torch_npu makes of scaled_dot_product_attention: BNSD, a mask that is True where masked out."""
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "atten_mask"))
    if given["input_layout"] != "BNSD" or given["sparse_mode"] not in (0, 1, 2) or given["pse"] is not None:
        raise NotImplementedError(
            "npu_fusion_attention is simulated as scaled_dot_product_attention calls it: input_layout BNSD, "
            f"sparse_mode 0 to 2, no pse; not {given['input_layout']}, {given['sparse_mode']}"
        )
    causal = given["sparse_mode"] == 2
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    context = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if causal or mask is None else ~mask.bool(),
        is_causal=causal,
        scale=given["scale"],
    )
    # the statistics that only a backward pass reads
    return context, *(query.new_empty(0, dtype=torch.float32) for _ in range(5))


_SPECIAL: dict[str, Callable[[dict[str, Any]], Any]] = {
    "scatter_update_": _scatter_update_,
    "scatter_update": _scatter_update,
    "npu_fusion_attention_v3": _fusion_attention,
    "_npu_fused_infer_attention_score_get_max_workspace": lambda given: given["query"].new_empty(1),
    "_npu_dtype_cast": lambda given: given["input"].to(given["dtype"], copy=True),
}
