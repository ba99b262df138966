"""Running the two steps: as they are, or compiled, one graph for prefill and one for decode per shape."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
from torch import Tensor

from npu_tuned_model import cuda_graphs
from npu_tuned_model.compile_cache import CachedStep
from npu_tuned_model.cpu_decode import CpuDecode, why_no_cpu_decode
from npu_tuned_model.errors import UserError
from npu_tuned_model.kv_cache import KVCache, Window, round_up
from npu_tuned_model.step import run_layer

BACKENDS = ("auto", "inductor", "torchair")
TORCHAIR_MODES = ("max-autotune", "reduce-overhead", "npugraph_ex")


@dataclass(frozen=True)
class GraphOptions:
    """How prefill and decode are compiled.

    Attributes:
        backend: "inductor" (CPU, CUDA), "torchair" (NPU), or "auto": what fits the model's device.
        prefill_bucket: prompts are padded (behind, without effect on the result) to a multiple of this many tokens, so
            that prompts of about the same length share one prefill graph.
        dynamic: torchair only: prompt length and cache capacity are symbols, so that one prefill graph and one decode
            graph serve all of them. Off, there is a graph for each (prompts are padded to a bucket), which is faster:
            only a graph of known shapes is put on the device as a whole.
        torchair_mode: "max-autotune" builds a GE graph; "reduce-overhead" / "npugraph_ex" capture and replay kernels.
        frozen_parameter: torchair may take the weights' addresses as fixed (they are: nothing moves after loading).
        cuda_graphs: CUDA only: record decode's kernels and start them together (cuda_graphs.py).
        compile_cache: folder in which torchair keeps compiled graphs for the next process; None compiles every time.
        configure_torchair: is given torchair's CompilerConfig before anything is compiled, to set more of its options,
            as precision.PrecisionDebugger.set_torchair_options does.
    """

    backend: str = "auto"
    prefill_bucket: int = 128
    dynamic: bool = False
    torchair_mode: str = "max-autotune"
    frozen_parameter: bool = True
    cuda_graphs: bool = False
    compile_cache: Path | None = None
    configure_torchair: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UserError(f"no graph back end {self.backend!r}; there are {', '.join(BACKENDS)}")
        if self.torchair_mode not in TORCHAIR_MODES:
            raise UserError(f"no torchair mode {self.torchair_mode!r}; there are {', '.join(TORCHAIR_MODES)}")
        if self.prefill_bucket < 1:
            raise UserError(f"prefill_bucket must be at least 1, not {self.prefill_bucket}")


class EagerSteps:
    """Prefill and decode as plain Python."""

    backend: str | None = None
    torchair_mode: str | None = None
    cpu_decode: CpuDecode | None = None

    def __init__(self, model: Any) -> None:
        self.prefill = model.prefill
        self.decode = model.decode
        model.model.run_layer = run_layer

    def padded_length(self, length: int) -> int:
        """Prompts are run at their own length."""
        return length


class CompiledSteps:
    """Prefill and decode as compiled graphs.

    Attributes:
        backend: name of the back end.
        torchair_mode: the mode torchair compiles in; None with another back end.
        graphs: number of graphs compiled so far, by step ("prefill", "decode"). A promise: one per shape, and none
            while tokens are generated once a shape has been seen.
        seconds: time spent in first calls (compilation and one run), by step.
        cpu_decode: decode as one C++ call, where the model and the CPU allow it; few rows then need no graph.
    """

    def __init__(self, model: Any, options: GraphOptions) -> None:
        self.options = options
        self.cpu_decode = CpuDecode(model) if why_no_cpu_decode(model) is None else None
        device = model.model.norm.weight.device
        self.backend = _resolve_backend(options.backend, device)
        if options.dynamic and self.backend != "torchair":
            raise UserError(f"dynamic graphs are torchair's; {self.backend} pads prompts to prefill_bucket instead")
        if options.compile_cache is not None and self.backend != "torchair":
            raise UserError(f"compile_cache is torchair's; {self.backend} keeps its own in torch's cache folder")
        if options.configure_torchair is not None and self.backend != "torchair":
            raise UserError(
                f"configure_torchair is for torchair's options, and {self.backend} compiles here: leave it out"
            )
        if options.cuda_graphs:
            cuda_graphs.check(device, self.backend, fixed_kv_cache=model.options.fixed_kv_cache)
        self.torchair_mode = options.torchair_mode if self.backend == "torchair" else None
        model.model.run_layer = _layer_region(model) if self.backend == "inductor" else run_layer
        self._tiling_sink = model.options.tiling_sink
        self.graphs: Counter[str] = Counter()
        self.seconds: dict[str, float] = {"prefill": 0.0, "decode": 0.0}
        self._seen: set[tuple[Any, ...]] = set()
        self._prefill = self._compile("prefill", model.prefill, self._backend_function({}))
        recorded = cuda_graphs.INDUCTOR_OPTIONS if options.cuda_graphs else {}
        self._decode = self._compile("decode", model.decode, self._backend_function(recorded))
        if options.cuda_graphs:
            self._decode = cuda_graphs.RecordedDecode(self._decode)

    def padded_length(self, length: int) -> int:
        """The length that a prompt of `length` tokens is padded to."""
        return length if self.options.dynamic else round_up(length, self.options.prefill_bucket)

    def prefill(
        self, input_ids: Tensor, rotary: tuple[Tensor, Tensor], last_rows: Tensor | None, cache: KVCache
    ) -> Tensor:
        """As Qwen2ForCausalLM.prefill."""
        input_ids = _own(input_ids)
        if self.options.dynamic:
            _mark_symbolic(1, input_ids, *rotary, *cache.keys, *cache.values)
        key = ("prefill", tuple(input_ids.shape), _cache_shape(cache))
        with self._first_call(key):
            return self._prefill(input_ids, rotary, last_rows, cache)

    def decode(self, input_ids: Tensor, positions: Tensor, window: Window, cache: KVCache) -> Tensor:
        """As Qwen2ForCausalLM.decode."""
        key = ("decode", tuple(input_ids.shape), _cache_shape(cache))
        with self._first_call(key):
            return self._decode(_own(input_ids), positions, window, cache)

    def _compile(
        self, step: str, function: Callable[..., Tensor], compile_graph: Callable[..., Any]
    ) -> Callable[..., Any]:
        if self.options.compile_cache is not None:
            config = _torchair_config(self.options, tiling_sink=self._tiling_sink)
            return CachedStep(function, config, self.options.compile_cache, lambda: self.graphs.update([step]))

        def counting_backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            self.graphs[step] += 1
            return compile_graph(graph, inputs)

        # The weights are final and the model is its own: checking all of them again before every token takes a
        # millisecond, and only the inputs can change. (Where torch can be told so: 2.8 and newer.)
        skip_module_guards = getattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe", None)
        options = {"guard_filter_fn": skip_module_guards} if skip_module_guards else None
        return torch.compile(function, backend=counting_backend, options=options, fullgraph=True, dynamic=False)

    @contextlib.contextmanager
    def _first_call(self, key: tuple[Any, ...]) -> Iterator[None]:
        if key in self._seen:
            yield
            return
        start = time.perf_counter()
        # one entry per shape is what we ask for: dynamo's default of 8 is meant for code that recompiles by accident
        limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"
        with torch._dynamo.config.patch({limit: 1024}), _in_place_operators(self.backend):
            yield
        self.seconds[key[0]] += time.perf_counter() - start
        self._seen.add(key)

    def _backend_function(self, inductor_options: dict[str, Any]) -> Callable[..., Any]:
        if self.backend == "torchair":
            return _torchair_backend(self.options, tiling_sink=self._tiling_sink)
        # decode's small kernels are faster on one thread than the barrier between two: 240 ms a token instead of 330
        # on two cores with a busy neighbour, and no slower without one
        patches: dict[str, Any] = {"cpp.min_chunk_size": 4096, **inductor_options}
        # what an operator returns need not be checked again before every token: 700 checks, a third of a millisecond
        patches.update(size_asserts=False, alignment_asserts=False)
        inductor: Any = torch._dynamo.lookup_backend("inductor")
        return functools.partial(inductor, config_patches=patches)


def _layer_region(model: Any) -> Callable[..., Any]:
    """run_layer, marked as one region that inductor compiles once and uses for every layer, where torch can do that.

    The first calls of the steps then take well under half the time (24 layers, prompt of 1024, nothing cached: 42 s
    instead of 111), the later ones as long as before. Such a region may write to tensors, not to Python lists, as the
    growing cache does.
    """
    nested = getattr(torch.compiler, "nested_compile_region", None)
    if nested is None or not model.options.fixed_kv_cache:
        return run_layer
    return nested(run_layer)


@contextlib.contextmanager
def _in_place_operators(backend: str) -> Iterator[None]:
    """Let the vendor's rotary embedding return the tensors that it was given and wrote to.

    Newer torch looks for that in a graph's first call and makes it an error where the environment variable CI is set,
    for a graph could read the input again and find it overwritten. Ours doesn't, as test_three_modes.py shows.
    """
    config: Any = torch._functorch.config
    if backend != "torchair" or not hasattr(config, "error_on_custom_op_aliasing"):
        yield
        return
    with config.patch(error_on_custom_op_aliasing=False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"npu::npu_apply_rotary_pos_emb .*alias")
        yield


def _mark_symbolic(dim: int, *tensors: Tensor) -> None:
    # Not torch.compile(dynamic=True): it makes a symbol of every size and number it meets, gives equal ones the same
    # symbol (a prompt as long as a head is wide), and compiles again when they part.
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _own(input_ids: Tensor) -> Tensor:
    # a slice of the growing text has other strides at every step, and a graph is compiled for its inputs' strides
    return input_ids.clone(memory_format=torch.contiguous_format)


def _cache_shape(cache: KVCache) -> tuple[int, ...]:
    return tuple(cache.keys[0].shape) if cache.keys and isinstance(cache.keys[0], Tensor) else ()


def _resolve_backend(name: str, device: torch.device) -> str:
    if name == "auto":
        name = "torchair" if device.type == "npu" else "inductor"
    if name == "torchair" and device.type != "npu":
        raise UserError(f"torchair compiles for an NPU and the model is on {device.type}; use backend='inductor'")
    if name == "inductor" and device.type == "cpu" and not has_cpp_compiler():
        raise UserError(
            "compiling for the CPU needs a C++ compiler and none was found; install g++ (Debian, Ubuntu: "
            "apt-get install g++) or set CXX, or run eager (--execute_mode=eager)"
        )
    return name


def has_cpp_compiler() -> bool:
    """Whether inductor will find a C++ compiler for its CPU kernels."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++"))


def _torchair_config(options: GraphOptions, *, tiling_sink: bool) -> Any:
    if importlib.util.find_spec("torch_npu") is None:
        raise UserError("torchair comes with torch_npu, which is not installed; install it, or run eager")
    import torch_npu  # noqa: F401  makes torchair importable
    import torchair

    config = torchair.CompilerConfig()
    # defines the attention operator that takes lengths on the device; torchair itself does so when it is first called,
    # and that would be inside a trace
    importlib.import_module("torchair.ops._npu_fused_infer_attention_score")
    config.mode = options.torchair_mode
    config.experimental_config.frozen_parameter = options.frozen_parameter
    config.experimental_config.tiling_schedule_optimize = tiling_sink and options.torchair_mode == "max-autotune"
    if options.configure_torchair is not None:
        options.configure_torchair(config)
    return config


def _torchair_backend(options: GraphOptions, *, tiling_sink: bool) -> Callable[..., Any]:
    config = _torchair_config(options, tiling_sink=tiling_sink)
    import torchair

    return torchair.get_npu_backend(compiler_config=config)
