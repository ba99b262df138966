"""C++ kernels for CPUs with AVX512-BF16, built on demand; without them everything runs, only slower.

A decode step reads every weight once. oneDNN and the compiled attention come within half again of that time: what they
lose goes into 120 calls of a few dozen microseconds each. The kernels of cpu_kernels.cpp read at the memory's speed.
Prefill's attention takes a third of the time of the compiled one and a quarter of scaled_dot_product_attention's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_tuned_model import ops

# More rows than this are better served by a matmul library's blocking.
FEW_ROWS = 8
SOURCE = Path(__file__).with_name("cpu_kernels.cpp")
# Named one by one, not as "native": the built file may be shared with a machine that has another CPU.
FLAGS = [
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fopenmp", "-mfma"),
    *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "bf16", "vnni")),
]
_BLOCK = 64
_CHECKED_BLOCKS = 64

_ATTENTION_ARGUMENTS = {"num_heads", "scale_value", "input_layout", "num_key_value_heads"}
_DECODE_ARGUMENTS = {*_ATTENTION_ARGUMENTS, "actual_seq_lengths"}
_PROMPT_ARGUMENTS = {*_ATTENTION_ARGUMENTS, "atten_mask", "sparse_mode"}

_library = torch.library.Library("npu_tuned_model", "FRAGMENT")
_loaded = False


@functools.cache
def why_not() -> str | None:
    """Build (once per machine, torch and source) and load the kernels; None when they can be used, else the reason."""
    global _loaded
    missing = _missing()
    if missing is not None:
        return missing
    try:
        torch.ops.load_library(_built())
    except (subprocess.CalledProcessError, OSError) as error:
        output = getattr(error, "stderr", None) or str(error)
        complaint = next((line for line in output.splitlines() if "error" in line), output[:200])
        return f"the C++ kernels could not be built: {complaint}"
    _library.impl("few_rows_linear", _few_rows_linear_meta, "Meta")
    _library.impl("cache_attention", _attention_meta, "Meta")
    _library.impl("causal_attention", _attention_meta, "Meta")
    _loaded = True
    return None


def _missing() -> str | None:
    try:
        cpu = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "needs Linux, to know what the CPU can do"
    # VNNI is older, so a CPU that has the one has the other, unless a virtual machine hides it
    if not {"avx512_bf16", "avx512_vnni"} <= set(cpu.split()):
        return "needs a CPU with AVX512-BF16"
    if not hasattr(torch.ops.mkldnn, "data_ptr"):
        return "needs a newer torch (one that tells where oneDNN keeps a packed weight)"
    if shutil.which(_compiler()) is None:
        return f"needs a C++ compiler, and {_compiler()} was not found: install g++"
    return None


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _built() -> Path:
    """The shared library, compiled unless it is there already. Not by cpp_extension.load, whose lock outlives a killed
    build and then stops every later start for good.

    Raises:
        subprocess.CalledProcessError: when the compiler fails.
        OSError: when the folder can't be written.
    """
    from torch.utils import cpp_extension

    command = [_compiler(), *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", str(SOURCE)]
    command += [f"-I{path}" for path in cpp_extension.include_paths()]
    command += [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu"]
    sources = [SOURCE, *sorted(SOURCE.parent.glob("cpu_kernels_*.h"))]
    made_of = b"".join(file.read_bytes() for file in sources) + repr((command, torch.__version__)).encode()
    folder = Path(cpp_extension.get_default_build_root()) / "npu_tuned_model"
    library = folder / f"cpu_kernels_{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            unfinished = Path(temporary) / library.name
            subprocess.run([*command, "-o", str(unfinished)], check=True, capture_output=True, text=True)
            unfinished.replace(library)
    return library


def _few_rows_linear_meta(rows: Tensor, blocks: Tensor, bias: Tensor, out_features: int) -> Tensor:
    return rows.new_empty(rows.shape[0], out_features)


def _attention_meta(query: Tensor, *others: object) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


def blocks_of(packed: Tensor, weight: Tensor) -> Tensor | None:
    """The memory of a weight that oneDNN has packed, as a plain tensor that few_rows_linear reads.

    Args:
        packed: oneDNN's opaque tensor; must stay alive as long as the result is used.
        weight: (out, in) bfloat16, what was packed.

    Returns:
        (out / 64 rounded up, in / 2, 64, 2) bfloat16, sharing memory with `packed`: for each 64 output features and
        each pair of input features, the 64 pairs; features that aren't there are zeros. None when oneDNN has chosen
        another layout (which it may on another CPU).
    """
    out_features, in_features = weight.shape
    shape = (-(-out_features // _BLOCK), in_features // 2, _BLOCK, 2)
    size = torch.ops.mkldnn._nbytes(packed)
    if in_features % 2 or size != 2 * shape[0] * _BLOCK * in_features:
        return None
    memory = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    blocks = torch.frombuffer(memory, dtype=torch.bfloat16).view(shape)
    # the layout is oneDNN's own business: look instead of trusting
    for first in range(0, shape[0], _CHECKED_BLOCKS):
        rows = weight[first * _BLOCK : (first + _CHECKED_BLOCKS) * _BLOCK]
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[0] % _BLOCK))
        expected = rows.view(-1, _BLOCK, in_features // 2, 2).transpose(1, 2)
        if not torch.equal(blocks[first : first + _CHECKED_BLOCKS].view(torch.int16), expected.view(torch.int16)):
            return None
    return blocks


def few_rows_linear(rows: Tensor, blocks: Tensor, bias: Tensor, out_features: int) -> Tensor:
    """rows (tokens, in) bfloat16 times a weight in blocks_of's layout, plus bias (out,) or an empty tensor.

    Sums in float32; reads the weight once for every 4 rows, the second time from the cache.
    """
    result: Tensor = torch.ops.npu_tuned_model.few_rows_linear.default(rows, blocks, bias, out_features)
    return result


def incre_flash_attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """ops.npu_incre_flash_attention, served by the C++ kernel where the call and the machine allow it.

    That is: bfloat16 on a CPU, layout BSND, one new token per row, lengths in a tensor, no mask, head_dim a multiple of
    32 up to 256. The kernel keeps scores and probabilities in float32.
    """
    lengths = arguments.get("actual_seq_lengths")
    if not (
        _serves(query, key, value, arguments, _DECODE_ARGUMENTS)
        and isinstance(lengths, Tensor)
        and query.shape[1] == 1
        and key.stride()[2:] == (key.shape[3], 1)
    ):
        return ops.npu_incre_flash_attention(query, key, value, **arguments)
    result: Tensor = torch.ops.npu_tuned_model.cache_attention.default(
        query, key, value, lengths, arguments["scale_value"]
    )
    return result


def prompt_flash_attention(query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
    """ops.npu_prompt_flash_attention, served by the C++ kernel where the call and the machine allow it.

    That is: bfloat16 on a CPU, layout BSND, causal (sparse_mode 3) over keys and values of the same length, head_dim a
    multiple of 32 up to 256. The kernel keeps scores in float32 and rounds the probabilities to bfloat16.
    """
    if not (
        _serves(query, key, value, arguments, _PROMPT_ARGUMENTS)
        and arguments["sparse_mode"] == 3
        and query.shape[1] == key.shape[1]
    ):
        return ops.npu_prompt_flash_attention(query, key, value, **arguments)
    result: Tensor = torch.ops.npu_tuned_model.causal_attention.default(query, key, value, arguments["scale_value"])
    return result


def _serves(query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any], known: set[str]) -> bool:
    return (
        _loaded
        and arguments.keys() == known
        and arguments["input_layout"] == "BSND"
        and all(t.device.type == "cpu" and t.dtype == torch.bfloat16 and t.stride(3) == 1 for t in (query, key, value))
        and query.shape[3] % 32 == 0
        and query.shape[3] <= 256
    )
