"""torchair's compile cache: a graph that was compiled once is loaded by the next process, not compiled again.

Source: torchair.inference.cache_compile. A cached graph is loaded without the checks that a compiled function makes at
each call, and torchair's own key knows neither the releases nor our code, so here all that a graph depends on is in the
path: when anything of it changes, another folder is looked into and the graph is compiled anew. Nothing in a folder
ever becomes stale; old folders may be deleted at any time. Random numbers can't be part of a cached graph; ours have
none, sampling happens outside.
"""

from __future__ import annotations

import hashlib
import types
from pathlib import Path
from typing import Any, Callable, cast

import torch

from npu_tuned_model.version import __version__


def default_folder() -> Path:
    """Where the commands keep compiled graphs: in the user's cache folder."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("npu-tuned-qwen2")) / "torchair"


def fingerprint(*parts: object) -> str:
    """A short name for everything that graphs depend on: releases, chip, this package's code, and `parts`."""
    import torch_npu

    releases = (torch.__version__, torch_npu.__version__, torch_npu.npu.utils.get_cann_version(), __version__)
    digest = hashlib.sha256()
    for part in (*releases, torch_npu.npu.get_device_name(), *parts):
        digest.update(f"{part}\n".encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


class CachedStep:
    """Prefill or decode as graphs from the cache, one for each shape of the prompt and the KV cache.

    Attributes:
        folder: where the graphs are: <root>/<fingerprint>.
    """

    def __init__(self, step: Callable[..., Any], config: Any, root: Path, on_graph: Callable[[], None]) -> None:
        """step: Qwen2ForCausalLM.prefill or decode of a model; config: torchair's CompilerConfig; on_graph: called when
        a graph is compiled or loaded."""
        self._step, self._config, self._on_graph = cast(types.MethodType, step), config, on_graph
        model: Any = self._step.__self__
        self.folder = root / fingerprint(model.config.to_json_string(), model.options, _layers(model))
        self._graphs: dict[tuple[Any, ...], Any] = {}

    def __call__(self, input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        cache = rest[-1]
        shapes = (tuple(input_ids.shape), tuple(cache.keys[0].shape))
        if shapes not in self._graphs:
            self._graphs[shapes] = self._compile_or_load(shapes)
            self._on_graph()
        result: torch.Tensor = self._graphs[shapes](input_ids, *rest)
        return result

    def _compile_or_load(self, shapes: tuple[tuple[int, ...], ...]) -> Any:
        import torchair

        # torchair keeps one graph per code object and names its file after the function: a twin for each shape
        sizes = "_".join("x".join(map(str, shape)) for shape in shapes)
        name = f"{self._step.__name__}_{sizes}"
        function = self._step.__func__
        code = function.__code__.replace(co_name=name)
        twin = types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)
        method = types.MethodType(twin, self._step.__self__)
        self.folder.mkdir(parents=True, exist_ok=True)
        return torchair.inference.cache_compile(method, config=self._config, dynamic=False, cache_dir=str(self.folder))


def _layers(model: torch.nn.Module) -> list[str]:
    # what the layers became after loading (packed, tiled) is part of the graph
    return sorted({type(module).__qualname__ for module in model.modules()})
