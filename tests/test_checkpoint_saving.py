"""unfused_state_dict: stock transformers reads what the tuned model gives back."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import (
    assert_same_weights,
    config_of,
    load,
)
from models import stock_model
from torch import Tensor, nn
from transformers import Qwen2ForCausalLM as StockQwen2

from npu_tuned_model import load_model
from npu_tuned_model.checkpoint import unfused_state_dict


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("safe_serialization", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_transformers_saves_and_reads_the_unfused_weights(
    tmp_path: Path, tied: bool, safe_serialization: bool, packed: bool
) -> None:
    """Transformers drops tensors that share a storage, and safetensors refuses strided ones: neither may happen."""
    stock = stock_model(config_of(tied=tied))
    stock.save_pretrained(tmp_path / "in")
    model = load_model(tmp_path / "in", device="cpu", dtype="float32") if packed else load(tmp_path / "in")
    stock.save_pretrained(
        tmp_path / "out",
        state_dict=unfused_state_dict(model),
        safe_serialization=safe_serialization,
        max_shard_size="4KB",
    )
    again, report = StockQwen2.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    assert_same_weights(again.state_dict(), stock.state_dict())


def test_unfused_pieces_are_views(untied: tuple[Path, dict[str, Tensor]]) -> None:
    model = load(untied[0])
    state = unfused_state_dict(model)
    model.model.layers[0].self_attn.qkv.weight.data.fill_(7)
    model.model.layers[0].mlp.gate_up_proj.weight.data.fill_(8)
    for name, value in {"self_attn.k_proj": 7, "self_attn.v_proj": 7, "mlp.up_proj": 8}.items():
        assert (state[f"model.layers.0.{name}.weight"] == value).all()


class Transposed(nn.Module):
    """A packed form whose dense weight is strided and which holds parameters that no checkpoint knows."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inner = nn.ParameterList([nn.Parameter(linear.weight.detach().t().contiguous())])
        self.bias = linear.bias

    def dense_weight(self) -> Tensor:
        return self.inner[0].t()


def test_unfusing_asks_packed_modules_for_their_dense_weight(untied: tuple[Path, dict[str, Tensor]]) -> None:
    folder, weights = untied
    model = load(folder)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, Transposed(module))
    state = unfused_state_dict(model)
    assert_same_weights(state, weights)
    assert all(tensor.is_contiguous() for tensor in state.values())


def test_unfusing_refuses_head_counts_that_do_not_add_up(untied: tuple[Path, dict[str, Tensor]]) -> None:
    model = load(untied[0])
    model.config.num_key_value_heads = 1
    with pytest.raises(ValueError, match=r"qkv\.weight has shape \(32, 16\), model\.config asks for 16 \+ 4 \+ 4 rows"):
        unfused_state_dict(model)
