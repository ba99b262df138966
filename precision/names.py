"""Names of records, as msprobe spells them, and which APIs are worth recording.

Functional.linear.0.forward                API: family, name, call number, direction
Module.layers.0.mlp.MLP.forward.0          module: dotted name, class, direction, call number
Module.layers.0.mlp.MLP.parameters_grad.0  gradients of a module's own parameters
"""

from __future__ import annotations

import re
from typing import Any, Callable, NamedTuple

import torch

# Operators spell differently at torch's interception point than where msprobe patches them.
OPERATORS = {"add": "__add__", "sub": "__sub__", "mul": "__mul__", "div": "__truediv__"}
OPERATORS.update({name: f"__{name}__" for name in ("gt", "lt", "ge", "le", "eq", "ne")})
_REFLECTED = re.compile(r"^__r(add|sub|mul|truediv|matmul|pow)__$")

# Results with the same values as an argument, or with none of interest: left out unless risk_level is ALL.
_SHAPE_OPERATIONS = """
    __getitem__ __setitem__ getitem setitem view view_as reshape reshape_as transpose swapaxes swapdims t T mT
    permute movedim moveaxis expand expand_as unsqueeze unsqueeze_ squeeze squeeze_ flatten unflatten ravel
    contiguous clone detach detach_ to float half bfloat16 double int long short bool type type_as cpu cuda npu
    chunk split split_with_sizes tensor_split unbind narrow select diagonal unfold as_strided numpy tolist item
    requires_grad_ requires_grad size stride dim numel is_contiguous data_ptr zeros ones empty full arange eye rand
    randn tensor as_tensor from_numpy zeros_like ones_like empty_like full_like new_zeros new_ones new_empty
    new_full new_tensor empty_strided copy_ zero_ fill_ repeat_interleave share_memory_ pin_memory lift_fresh set_
    resize_ real imag alias broadcast_to broadcast_tensors meshgrid isfinite isnan isinf is_nonzero __len__ __bool__
    __repr__ __format__ __iter__ __reversed__ backward __reduce_ex__ __deepcopy__ storage untyped_storage
    element_size register_hook retain_grad record_stream set_grad_enabled
"""
_CORE_OPERATIONS = """
    linear matmul __matmul__ __rmatmul__ mm bmm addmm baddbmm addmv mv einsum conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d scaled_dot_product_attention softmax log_softmax layer_norm rms_norm
    group_norm batch_norm embedding cross_entropy packed_linear
"""
SHAPE_OPERATIONS = frozenset(_SHAPE_OPERATIONS.split())
CORE_OPERATIONS = frozenset(_CORE_OPERATIONS.split())


class Api(NamedTuple):
    """An API as it is named in a dump, and whether it runs in place or is one of the shape operations."""

    key: str
    shape_only: bool
    core: bool

    def wanted(self, risk_level: str) -> bool:
        if risk_level == "ALL":
            return True
        return self.core if risk_level == "CORE" else not self.shape_only


_cache: dict[Any, Api | None] = {}


def api_of(function: Callable[..., Any]) -> Api | None:
    """The API behind a callable that torch's function mode reports, or None where it is an attribute or internal."""
    try:
        return _cache[function]
    except KeyError:
        api = _cache[function] = _classify(function)
        return api
    except TypeError:
        return _classify(function)


def remember(function: Callable[..., Any], api: Api) -> None:
    """Let api_of know a function that it can't tell from its attributes."""
    _cache[function] = api


def forget(function: Callable[..., Any]) -> None:
    """Undo remember."""
    _cache.pop(function, None)


def make_api(family: str, name: str) -> Api:
    """An API under a family and a name."""
    core = name in CORE_OPERATIONS or name.startswith("npu_")
    return Api(f"{family}.{name}", name in SHAPE_OPERATIONS, core)


def _classify(function: Callable[..., Any]) -> Api | None:
    name = getattr(function, "__name__", "")
    module = getattr(function, "__module__", None) or ""
    if isinstance(function, torch._ops.OpOverload):
        return make_api(_namespace(function.namespace), function._opname)
    if isinstance(function, torch._ops.OpOverloadPacket):
        return make_api(_namespace(function._qualified_op_name.partition("::")[0]), name)
    if not name or name in ("__get__", "__set__", "__delete__") or module.startswith("torch.nn.init"):
        return None
    if module in ("torch.nn.functional", "torch._C._nn"):
        return make_api("Functional", name)
    owner = getattr(function, "__objclass__", None)
    if (isinstance(owner, type) and issubclass(torch.Tensor, owner)) or module == "torch._tensor":
        return make_api("Tensor", OPERATORS.get(name, name))
    if module.startswith("torch_npu"):
        return make_api("NPU", name)
    return make_api("Torch", name)


def _namespace(name: str) -> str:
    return "NPU" if name == "npu" else "Aten"


def canonical_api(name: str) -> str:
    """One spelling for an operator and its method: __mul__, __rmul__ and mul are the same."""
    reflected = _REFLECTED.match(name)
    if reflected:
        # 1 - x and x - 1 are different computations
        return name if reflected[1] in ("sub", "truediv", "pow", "matmul") else f"__{reflected[1]}__"
    return OPERATORS.get(name, name)


class RecordName(NamedTuple):
    """The parts of a record's name."""

    family: str
    name: str
    direction: str
    call: int

    @property
    def is_module(self) -> bool:
        return self.family in ("Module", "Cell")

    @property
    def canonical(self) -> tuple[str, str]:
        """What the same operation is called in any dump, without its call number."""
        return (self.name if self.is_module else canonical_api(self.name)), self.direction


_MODULE_RECORD = re.compile(r"^(Module|Cell)\.(.+)\.(forward|backward|parameters_grad)(?:\.(\d+))?$")
_API_RECORD = re.compile(r"^([A-Za-z_]+)\.(.+)\.(\d+)\.(forward|backward)$")


def parse_record(record: str) -> RecordName | None:
    """The parts of a record's name; None for a name in no known form."""
    match = _MODULE_RECORD.match(record)
    if match:
        return RecordName(match[1], match[2], match[3], int(match[4] or 0))
    match = _API_RECORD.match(record)
    return RecordName(match[1], match[2], match[4], int(match[3])) if match else None
