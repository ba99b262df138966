"""CUDA graphs: a decode step's kernels are recorded once and then started together, by inductor's CUDA graph trees.

A decode step of a small model has more kernels than the host can start in the time that they take. Recorded, they cost
the host one call. Recorded kernels read and write the addresses that they were recorded with: the KV cache is marked as
memory that stays where it is, everything else that changes (token, positions) is copied to a fixed place for each step.
"""

from __future__ import annotations

import weakref
from typing import Any, Callable

import torch
from torch import Tensor

from npu_tuned_model.errors import UserError
from npu_tuned_model.kv_cache import KVCache, Window

# for inductor: record, also where a graph writes to what it was given, as decode writes to the KV cache
INDUCTOR_OPTIONS: dict[str, Any] = {"triton.cudagraphs": True, "triton.cudagraph_support_input_mutation": True}


def check(device: torch.device, backend: str, *, fixed_kv_cache: bool) -> None:
    """Raise UserError, with what to do instead, where nothing can be recorded."""
    if not fixed_kv_cache:
        raise UserError("cuda_graphs needs fixed_kv_cache: a cache that grows never stays where it is")
    if device.type != "cuda" or backend != "inductor":
        raise UserError(f"cuda_graphs records inductor's CUDA kernels, and the model is on {device.type}: leave it out")
    import torch._inductor.config as inductor

    if not hasattr(inductor.triton, "cudagraph_support_input_mutation"):
        raise UserError(f"cuda_graphs needs torch 2.4 or newer, this is {torch.__version__}: update it or leave it out")


class RecordedDecode:
    """A compiled decode step whose kernels inductor records.

    Args:
        decode: Qwen2ForCausalLM.decode, compiled with INDUCTOR_OPTIONS.
    """

    def __init__(self, decode: Callable[..., Tensor]) -> None:
        self._decode = decode
        self._marked: Callable[[], Tensor | None] = lambda: None  # of the cache that is marked, the first keys

    def __call__(self, input_ids: Tensor, positions: Tensor, window: Window, cache: KVCache) -> Tensor:
        """As Qwen2ForCausalLM.decode."""
        if self._marked() is not cache.keys[0]:
            for tensor in (*cache.keys, *cache.values):
                # not guarded: another generation's cache may lie elsewhere: recorded anew, but not compiled anew
                torch._dynamo.mark_static_address(tensor, guard=False)
            self._marked = weakref.ref(cache.keys[0])
        torch.compiler.cudagraph_mark_step_begin()
        # the next step writes over its result
        return self._decode(input_ids, positions, window, cache).clone()
