"""torch_npu's own operators on the simulated device: the portable results, the vendor's traps, and clear refusals."""

from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
import torch_npu
from torch import Tensor

from npu_tuned_model import ops

ATTENTION = {"num_heads": 4, "input_layout": "BSND", "num_key_value_heads": 2, "scale_value": 0.125}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attention_inputs(query_len: int, kv_len: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw(2, query_len, 4, 64), draw(2, kv_len, 2, 64, seed=1), draw(2, kv_len, 2, 64, seed=2)


def int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(0))


# every operator that npu_tuned_model/ops calls on an NPU, as the package calls it
CALLS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]] = {
    "rms_norm": (ops.npu_rms_norm, (draw(3, 64), draw(64, seed=1)), {}),
    "add_rms_norm": (ops.npu_add_rms_norm, (draw(3, 64), draw(3, 64, seed=1), draw(64, seed=2)), {}),
    "rotary": (
        ops.npu_apply_rotary_pos_emb,
        (draw(2, 3, 4, 64), draw(2, 3, 2, 64, seed=1), draw(2, 3, 1, 64, seed=2), draw(2, 3, 1, 64, seed=3)),
        {},
    ),
    "rotary_mul": (ops.npu_rotary_mul, (draw(2, 3, 4, 64), draw(1, 3, 1, 64), draw(1, 3, 1, 64, seed=1)), {}),
    "scatter_update": (
        ops.scatter_update_,
        (draw(2, 8, 2, 64), torch.tensor([1, 5]), draw(2, 2, 2, 64, seed=1)),
        {"axis": 1},
    ),
    "swiglu": (ops.npu_swiglu, (draw(3, 128, dtype=torch.bfloat16),), {}),
    "dynamic_quant": (ops.npu_dynamic_quant, (draw(3, 64, dtype=torch.bfloat16),), {}),
    "quant_matmul": (
        ops.npu_quant_matmul,
        (int8(3, 64), int8(64, 16), draw(16).abs()),
        {"output_dtype": torch.bfloat16, "pertoken_scale": draw(3, seed=1).abs()},
    ),
    "weight_quant_matmul": (
        ops.npu_weight_quant_batchmatmul,
        (draw(3, 64, dtype=torch.bfloat16), int8(64, 16), draw(16, dtype=torch.bfloat16)),
        {},
    ),
    "trans_quant_param": (ops.npu_trans_quant_param, (draw(16).abs(),), {}),
    "prompt attention": (
        ops.npu_prompt_flash_attention,
        (*attention_inputs(5, 5),),
        {**ATTENTION, "atten_mask": ops.compressed_causal_mask(torch.device("cpu")), "sparse_mode": 3},
    ),
    "decode attention": (
        ops.npu_incre_flash_attention,
        (*attention_inputs(1, 9),),
        {**ATTENTION, "actual_seq_lengths": [3, 9]},
    ),
    "fused attention": (
        ops.npu_fused_infer_attention_score,
        (*attention_inputs(1, 9),),
        {"num_heads": 4, "input_layout": "BSND", "num_key_value_heads": 2, "scale": 0.125,
         "actual_seq_lengths_kv": [3, 9]},
    ),
}  # fmt: skip


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


@pytest.mark.parametrize("name", CALLS)
def test_the_package_gets_the_portable_result(name: str) -> None:
    function, inputs, options = CALLS[name]
    expected = tensors(function(*(tensor.clone() for tensor in inputs), **options))
    on_npu = {key: value.npu() if isinstance(value, Tensor) else value for key, value in options.items()}
    results = tensors(function(*(tensor.npu() for tensor in inputs), **on_npu))
    for result, wanted in zip(results, expected):
        assert result.device.type == "npu"
        assert result.dtype == wanted.dtype
        assert torch.equal(result.cpu(), wanted)


def test_eager_rotary_overwrites_its_inputs() -> None:
    query, key, cos, sin = (tensor.npu() for tensor in CALLS["rotary"][1])
    before = query.cpu()
    new_query, new_key = torch_npu.npu_apply_rotary_pos_emb(query, key, cos, sin)
    assert new_query is query
    assert new_key is key
    assert not torch.equal(query.cpu(), before)


@pytest.mark.parametrize(("mode", "overwritten"), [("max-autotune", False), ("npugraph_ex", True)])
@torch._functorch.config.patch(error_on_custom_op_aliasing=False)
def test_rotary_in_a_graph(mode: str, overwritten: bool) -> None:
    import torchair

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated = torch_npu.npu_apply_rotary_pos_emb(query * 1, key * 1, cos, sin)
        return rotated[0] + 1, rotated[1] + 1

    def rotate_and_use_again(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        doubled = query * 2
        rotated = torch_npu.npu_apply_rotary_pos_emb(doubled, key * 1, cos, sin)[0]
        return rotated - doubled

    config = torchair.CompilerConfig()
    config.mode = mode
    inputs = [tensor.npu() for tensor in CALLS["rotary"][1]]
    backend = torchair.get_npu_backend(compiler_config=config)
    results = torch.compile(rotate, backend=backend, dynamic=False)(*inputs)
    expected = ops.npu_apply_rotary_pos_emb(*CALLS["rotary"][1])
    assert all(torch.equal(result.cpu(), wanted + 1) for result, wanted in zip(results, expected))
    # reading an input again is the bug that the device has in eager and captured code, and a GE graph hasn't
    difference = torch.compile(rotate_and_use_again, backend=backend, dynamic=False)(*inputs)
    assert (not difference.any().item()) == overwritten


def test_the_vendors_default_of_next_tokens_cuts_a_mask() -> None:
    query, key, value = (tensor.npu() for tensor in attention_inputs(2, 5))
    nothing_masked = torch.zeros(2, 5, dtype=torch.bool, device="npu")
    options = {**ATTENTION, "atten_mask": nothing_masked}
    trapped = torch_npu.npu_prompt_flash_attention(query, key, value, **options)
    whole = torch_npu.npu_prompt_flash_attention(query, key, value, **options, next_tokens=2147483647)
    assert not torch.equal(trapped.cpu(), whole.cpu())


def test_an_operator_that_is_not_simulated_raises_with_its_name() -> None:
    with pytest.raises(NotImplementedError, match="npu_gelu"):
        torch_npu.npu_gelu(torch.ones(4, device="npu"))


def test_an_argument_that_is_not_simulated_raises_with_its_name() -> None:
    query, key, value = (tensor.npu() for tensor in attention_inputs(1, 9))
    with pytest.raises(NotImplementedError, match="antiquant_scale"):
        torch_npu.npu_incre_flash_attention(query, key, value, **ATTENTION, antiquant_scale=torch.ones(2, device="npu"))
