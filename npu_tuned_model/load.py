"""From a checkpoint folder to a model that is ready to run, and back."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, Qwen2Config
from transformers.modeling_utils import no_init_weights

from npu_tuned_model import checkpoint, cpu_kernels
from npu_tuned_model.checkpoint_layout import (
    FLOATS,
    LAYOUT_KEY,
    WHOLE,
    Layout,
    check_tp_size,
    held_as,
    layout_of,
)
from npu_tuned_model.config import read_config, resolve_checkpoint
from npu_tuned_model.device import resolve_device, resolve_dtype
from npu_tuned_model.errors import CheckpointError, UserError
from npu_tuned_model.linear import packer_for
from npu_tuned_model.linear_int8 import Int8Linear, PackedInt8Linear, hold_int8, int8_packer_for, packed_embedding
from npu_tuned_model.lora import LoraAdapter
from npu_tuned_model.quantise import check_weight_dtype
from npu_tuned_model.tensor_parallel import EmbeddingShard, TensorParallel, connect, shard_model
from npu_tuned_model.tuning import TuningOptions

if TYPE_CHECKING:
    from npu_tuned_model.modeling_qwen2 import Qwen2ForCausalLM

_FROM_PRETRAINED_OPTIONS = ("torch_dtype", "device", "device_map", "options", "low_cpu_mem_usage")


def load_model(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype | None = None,
    options: TuningOptions | None = None,
    parallel: TensorParallel | None = None,
    lora: str | os.PathLike[str] | None = None,
    weight_dtype: str | None = None,
    int8_embeddings: bool = True,
) -> Qwen2ForCausalLM:
    """Load a Hugging Face checkpoint of Qwen1.5, Qwen2 or Qwen2.5 (dense), fused while it streams.

    A checkpoint that tools/merge_qkv_weight.py converted loads as well, on the number of ranks it was made for.

    Args:
        path: folder with config.json and the weights, or a Hub id.
        device: "auto", "cpu", "cuda" or "npu".
        dtype: "float32", "bfloat16" or "float16"; by default what the checkpoint says.
        options: which optimisations are on; by default all.
        parallel: this process's place among the ranks that hold the model together; each reads and holds its part
            only. By default this process holds all of it.
        lora: folder of a LoRA adapter in PEFT's format, to be merged into the weights of a plain checkpoint.
        weight_dtype: "int8" quantises the linear layers' weights while they are read, an adapter's part included; see
            quantise.py. By default they stay as they are: in `dtype`, or int8 in a checkpoint that
            tools/quantize_weight.py wrote.
        int8_embeddings: whether weight_dtype is also that of the embedding table and the output layer.

    Returns:
        the model in evaluation mode; eager until ``model.run_graph()`` is called.

    Raises:
        CheckpointError: for a checkpoint that is missing, broken, not of this architecture, or converted for another
            number of ranks.
        UserError: for a device that isn't there, an unknown dtype, or a number of ranks that doesn't divide the model.
    """
    check_weight_dtype(weight_dtype)
    from npu_tuned_model.modeling_qwen2 import Qwen2ForCausalLM

    device = resolve_device(device) if isinstance(device, str) else device
    folder = resolve_checkpoint(os.fspath(path))
    config = read_config(folder)
    shard = WHOLE if parallel is None else parallel.shard
    held = held_as(config, weight_dtype, int8_embeddings)
    layout = _take_layout(folder, config, shard.size)
    adapter = None if lora is None else LoraAdapter(lora)
    if adapter is not None and layout is not None:
        raise UserError("an adapter is merged into a plain checkpoint, and this one is converted: load the plain one")
    if isinstance(dtype, str):
        dtype = resolve_dtype(dtype)
    dtype = dtype or config.torch_dtype or torch.bfloat16
    if dtype == torch.float16:
        warnings.warn(
            "Qwen2's activations overflow in float16; use bfloat16, or check the results with --check_finite",
            stacklevel=2,
        )
    if device.type == "npu" and held.linears and dtype not in (torch.bfloat16, torch.float16):
        raise UserError(f"an NPU multiplies int8 weights with bfloat16 or float16 only, not {dtype}: pass that dtype")
    config.torch_dtype = dtype
    with torch.device("meta"), no_init_weights():
        model = Qwen2ForCausalLM(config, options)
    if parallel is not None and parallel.size > 1:
        shard_model(model, parallel)
    if held.linears:
        hold_int8(model, embeddings=held.embeddings)
    packer = _LayerPacker(model, device, dtype)
    checkpoint.load_weights(
        model,
        folder,
        dtype=dtype,
        device=device,
        on_ready=packer,
        shard=shard,
        converted=layout is not None,
        stored=FLOATS if layout is None else layout.quantised,
        adapter=adapter,
    )
    if parallel is not None and parallel.size > 1:
        connect(model, parallel)
    model.model.rotary.fill(device, dtype)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.requires_grad_(False).eval()


def _take_layout(folder: Path, config: Qwen2Config, size: int) -> Layout | None:
    """How the checkpoint is converted, for `size` ranks; the mark is taken off `config`, which describes the model.

    Raises:
        CheckpointError: it is converted for another number of ranks.
        UserError: the model can't be divided among `size` ranks.
    """
    layout = layout_of(config)
    check_tp_size(config, size)
    if layout is None:
        return None
    if layout.tp_size != size:
        tool = "quantize_weight" if layout.quantised.linears else "merge_qkv_weight"
        raise CheckpointError(
            f"{folder} was converted for tp_size {layout.tp_size}, this run has tp_size {size}: load the plain "
            f"checkpoint, or convert that: python tools/{tool}.py --model_path=PLAIN --output_path=OUT "
            f"--tp_size={size}"
        )
    delattr(config, LAYOUT_KEY)
    return layout


def from_pretrained(model_class: type, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Qwen2ForCausalLM:
    """load_model in the spelling of transformers: torch_dtype, device_map ("cpu", "cuda", "npu" or "auto").

    As in transformers, the dtype is float32 unless torch_dtype is given, and the device is the CPU.

    Raises:
        UserError: for any other keyword.
    """
    unknown = sorted(set(kwargs) - set(_FROM_PRETRAINED_OPTIONS))
    if args or unknown:
        raise UserError(
            f"the tuned model's from_pretrained doesn't take {', '.join(unknown) or 'positional arguments'}; "
            f"it takes {', '.join(_FROM_PRETRAINED_OPTIONS)}"
        )
    dtype = kwargs.get("torch_dtype", torch.float32)
    device = kwargs.get("device") or kwargs.get("device_map") or "cpu"
    if not isinstance(device, (str, torch.device)):
        raise UserError("the tuned model lives on one device; pass device_map='cpu', 'cuda', 'npu' or 'auto'")
    return load_model(path, device=device, dtype=None if dtype == "auto" else dtype, options=kwargs.get("options"))


def save_pretrained(model: Qwen2ForCausalLM, folder: str | os.PathLike[str], **kwargs: Any) -> None:
    """Write a plain Hugging Face checkpoint (unfused, unpacked), which stock transformers loads as well.

    Of int8 weights, what they stand for is written, in the model's dtype.

    Args:
        kwargs: what transformers' save_pretrained takes (max_shard_size, safe_serialization).

    Raises:
        UserError: for one rank's part of a model.
    """
    if isinstance(model.model.embed_tokens, EmbeddingShard):
        raise UserError("this process holds one rank's part of the model; load it without `parallel` to save it")
    tensors = checkpoint.unfused_state_dict(model)
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    PreTrainedModel.save_pretrained(model, folder, state_dict=tensors, **kwargs)


def pack_weights(model: Qwen2ForCausalLM, device: torch.device | None = None) -> Qwen2ForCausalLM:
    """Re-lay the weights of a model that was built, not loaded; the plain ones are dropped. In place.

    Args:
        device: the device whose layout it shall be; by default the one that the model is on.
    """
    weight = model.model.norm.weight
    packer = _LayerPacker(model, device or weight.device, weight.dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            packer(name, module)
    return model


class _LayerPacker:
    """Replaces a linear layer by its packed form as soon as its weights are complete."""

    def __init__(self, model: Qwen2ForCausalLM, device: torch.device, dtype: torch.dtype) -> None:
        self.model = model
        options = model.options
        kernels = options.native_kernels and device.type == "cpu" and dtype == torch.bfloat16
        kernels = kernels and cpu_kernels.why_not() is None
        self.pack = packer_for(device.type, dtype, kernels=kernels) if options.packed_weights else None
        self.pack_int8 = int8_packer_for(device.type, kernels=kernels) if options.packed_weights else None

    def __call__(self, name: str, module: nn.Module) -> None:
        if not isinstance(module, nn.Linear):
            return
        integers = isinstance(module, Int8Linear)
        pack: Any = self.pack_int8 if integers else self.pack
        # a tied output layer keeps the embedding's own weight: packing would make a second copy of it. Not so of int8:
        # a CPU's embedding reads the packed one, an NPU's operator takes no weight of so many rows in one piece.
        tied = name == "lm_head" and self.model.config.tie_word_embeddings
        if pack is None or (tied and not integers):
            return
        parent, _, child = name.rpartition(".")
        packed = pack(module, self._pieces(child, module))
        setattr(self.model.get_submodule(parent), child, packed)
        if tied and isinstance(packed, PackedInt8Linear):
            self.model.model.embed_tokens = packed_embedding(self.model.model.embed_tokens, packed)

    def _pieces(self, child: str, module: nn.Linear) -> list[int]:
        options, width = self.model.options, module.out_features
        if child == "qkv" and not options.fused_qkv:
            query_width = self.model.model.layers[0].self_attn.o_proj.in_features
            kv_width = (width - query_width) // 2
            return [query_width, kv_width, kv_width]
        if child == "gate_up_proj" and not options.fused_gate_up:
            return [width // 2, width // 2]
        return [width]
