"""How a process is set up for an NPU, beside what the model and its graphs are: each part an option with its reason.

``set_up`` when the process starts, ``prepare_weights`` when the model is loaded. On a CPU or GPU the parts that mean
something there act, too. What belongs to graphs (frozen parameters, tiling on the device) is in graph.py, the sums over
cards inside graphs in tensor_parallel.py.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from npu_tuned_model.core_binding import bind_cores, format_core_list
from npu_tuned_model.linear import InputMajorLinear
from npu_tuned_model.tuning import InForce

FRACTAL_NZ = 29
ND = 2

# Set unless the user has set them. Source: HCCL's environment variables and its settings recommended for inference, in
# CANN's documentation.
HCCL_VARIABLES = {
    # ranks reach the first collective minutes apart when each loads and cuts a large checkpoint; the default is 120 s
    "HCCL_CONNECT_TIMEOUT": "1800",
    # the vector cores start a collective themselves, without a detour over the AI CPU: recommended for inference
    "HCCL_OP_EXPANSION_MODE": "AIV",
    # a fixed order of summing costs time; turn it on to compare runs bit by bit
    "HCCL_DETERMINISTIC": "false",
}


@dataclass(frozen=True)
class NpuSetup:
    """What is set up beside model and graph; the defaults are what we recommend.

    Attributes:
        jit_compile: compile eager operators anew for each shape. Off: the prebuilt ones serve every shape, and the
            first tokens don't wait for a compiler. (On is the vendor's default on 310P.)
        nz_weights: store the linear layers' weights in the NPU's own tiled format, FRACTAL_NZ, in which its matrix unit
            reads them, so that no layout is changed on the way. Saved checkpoints stay in the plain format.
        hccl_variables: set HCCL_VARIABLES, where the user hasn't, when there are several cards.
        core_binding: keep each card's process on an equal share of the cores, in NUMA order.
        frozen_gc: no garbage collection while tokens are generated.
    """

    jit_compile: bool = False
    nz_weights: bool = True
    hccl_variables: bool = True
    core_binding: bool = True
    frozen_gc: bool = True

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(option.name for option in dataclasses.fields(cls))


@dataclass
class PreparedSetup:
    """What of a NpuSetup has been done, and why the rest hasn't.

    Attributes:
        done: by option, what was done.
        not_done: by option, why not.
    """

    setup: NpuSetup
    done: dict[str, str] = field(default_factory=dict)
    not_done: dict[str, str] = field(default_factory=dict)

    def in_force(self) -> list[InForce]:
        """Rows for the table "what is in force", one per option."""
        rows = []
        for name in self.setup.names():
            asked = getattr(self.setup, name)
            why = self.done.get(name) or self.not_done.get(name) or "switched off"
            rows.append(InForce(name, asked, asked and name in self.done, why))
        return rows


class TiledLinear(InputMajorLinear):
    """An input-major linear layer on an NPU, its weight in FRACTAL_NZ."""

    def __init__(self, plain: InputMajorLinear) -> None:
        import torch_npu

        nn.Module.__init__(self)
        self.out_features, self.in_features = plain.out_features, plain.in_features
        self.weight = nn.Parameter(torch_npu.npu_format_cast(plain.weight.detach(), FRACTAL_NZ), requires_grad=False)
        self.bias = plain.bias

    def dense_weight(self) -> Tensor:
        """The weight as (out, in), in the plain format."""
        import torch_npu

        return torch_npu.npu_format_cast(self.weight.detach(), ND).t()


def set_up(
    setup: NpuSetup, device: torch.device, *, local_rank: int = 0, local_ranks: int = 1, ranks: int = 1
) -> PreparedSetup:
    """Set up this process: its cores, HCCL's variables, the NPU's modes.

    Call it before torch computes anything, since threads that run already keep to their cores, and before a process
    group is made.

    Args:
        device: what the process computes on.
        local_rank, local_ranks: this process's place among those of this host that run the model together.
        ranks: how many processes run it on all hosts.

    Raises:
        UserError: the cores can't be shared out.
    """
    npu = device.type == "npu"
    prepared = PreparedSetup(setup)
    if setup.core_binding:
        _bind_to_card(prepared, device, local_rank, local_ranks)
    if setup.hccl_variables:
        if npu and ranks > 1:
            for name, value in HCCL_VARIABLES.items():
                os.environ.setdefault(name, value)
            prepared.done["hccl_variables"] = ", ".join(f"{name}={os.environ[name]}" for name in HCCL_VARIABLES)
        else:
            prepared.not_done["hccl_variables"] = "needs several NPUs"
    if setup.frozen_gc:
        prepared.done["frozen_gc"] = "no collection while tokens are generated"
    if npu:
        import torch_npu

        torch_npu.npu.set_compile_mode(jit_compile=setup.jit_compile)
        prepared.done["jit_compile"] = (
            "each operator is compiled for each shape" if setup.jit_compile else "off: prebuilt operators"
        )
        # without it npu_format_cast makes plain tensors, and only a warning says so
        torch_npu.npu.config.allow_internal_format = setup.nz_weights
    else:
        prepared.not_done.update(jit_compile="needs an NPU", nz_weights="needs an NPU")
    return prepared


def _bind_to_card(prepared: PreparedSetup, device: torch.device, local_rank: int, local_ranks: int) -> None:
    card, cards = local_rank, local_ranks
    if device.type == "npu":
        # the cards that this process leaves alone are for other processes, of this model or another
        card = local_rank if device.index is None else device.index
        cards = torch.npu.device_count()  # type: ignore[attr-defined]
    if cards == 1:
        prepared.not_done["core_binding"] = "one card: its process may use all cores"
        return
    share = bind_cores(card, cards)
    torch.set_num_threads(min(torch.get_num_threads(), len(share)))
    prepared.done["core_binding"] = f"cores {format_core_list(share)} for card {card} of {cards}"


def prepare_weights(prepared: PreparedSetup, model: nn.Module) -> None:
    """Store the input-major weights of a model on an NPU as FRACTAL_NZ, one layer after the other.

    To be done before graphs are compiled, which are made for the formats of their inputs. Weights that are used in
    slices stay plain, because a slice of a tiled weight is converted back at each use; so does an embedding's, which a
    tied output layer shares.
    """
    if not prepared.setup.nz_weights or "nz_weights" in prepared.not_done:
        return
    sliced = _sliced_layers(model)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, InputMajorLinear) and name.rpartition(".")[2] not in sliced
    ]
    if not names:
        prepared.not_done["nz_weights"] = "no layer holds an input-major weight (packed_weights off)"
        return
    for name in names:
        parent, _, child = name.rpartition(".")
        plain = cast(InputMajorLinear, model.get_submodule(name))
        setattr(model.get_submodule(parent), child, TiledLinear(plain))
    prepared.done["nz_weights"] = f"FRACTAL_NZ in {len(names)} linear layers"


def _sliced_layers(model: Any) -> set[str]:
    options = getattr(model, "options", None)
    fused = {"qkv": getattr(options, "fused_qkv", True), "gate_up_proj": getattr(options, "fused_gate_up", True)}
    return {name for name, whole in fused.items() if not whole}
