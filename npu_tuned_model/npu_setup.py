"""How a process is set up for an NPU, beside what the model and its graphs are: each part an option with its reason.

Three calls in this order: ``prepare_process`` before torch starts threads or process groups, ``prepare_device`` before
the weights are loaded, ``prepare_weights`` after. On a CPU or GPU the parts that mean something there act, too.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

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
        allreduce_in_graph: with several cards, let a graph hold the sums over cards rather than break at them.
        core_binding: keep each card's process on an equal share of the cores, in NUMA order.
        frozen_gc: no garbage collection while tokens are generated.
    """

    jit_compile: bool = False
    nz_weights: bool = True
    hccl_variables: bool = True
    allreduce_in_graph: bool = True
    core_binding: bool = True
    frozen_gc: bool = True


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
        for option in dataclasses.fields(self.setup):
            name, asked = option.name, getattr(self.setup, option.name)
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


def prepare_process(setup: NpuSetup, device_type: str, *, card: int = 0, cards: int = 1) -> PreparedSetup:
    """Bind the process to its cores and set HCCL's variables; before torch computes and before a process group is made.

    Args:
        device_type: "cpu", "cuda" or "npu".
        card, cards: number of this process's card on this host, and how many cards the host's processes use.

    Raises:
        UserError: the cores can't be shared out.
    """
    prepared = PreparedSetup(setup)
    if setup.core_binding:
        if cards > 1:
            share = bind_cores(card, cards)
            torch.set_num_threads(min(torch.get_num_threads(), len(share)))
            prepared.done["core_binding"] = f"cores {format_core_list(share)} for card {card} of {cards}"
        else:
            prepared.not_done["core_binding"] = "one card: it may use all cores"
    if setup.hccl_variables:
        if device_type == "npu" and cards > 1:
            for name, value in HCCL_VARIABLES.items():
                os.environ.setdefault(name, value)
            prepared.done["hccl_variables"] = ", ".join(f"{name}={os.environ[name]}" for name in HCCL_VARIABLES)
        else:
            prepared.not_done["hccl_variables"] = "needs several NPUs"
    if setup.frozen_gc:
        prepared.done["frozen_gc"] = "no collection while tokens are generated"
    return prepared


def prepare_device(prepared: PreparedSetup, device: torch.device, *, cards: int = 1) -> None:
    """Set the NPU's modes; does nothing for another device but note it."""
    setup = prepared.setup
    if device.type != "npu":
        prepared.not_done.update(dict.fromkeys(("jit_compile", "nz_weights", "allreduce_in_graph"), "needs an NPU"))
        return
    import torch_npu

    torch_npu.npu.set_compile_mode(jit_compile=setup.jit_compile)
    prepared.done["jit_compile"] = (
        "on: each operator is compiled for each shape"
        if setup.jit_compile
        else "off: prebuilt operators serve every shape"
    )
    if setup.nz_weights:
        # without it npu_format_cast makes plain tensors and says so in a warning only
        torch_npu.npu.config.allow_internal_format = True
    if setup.allreduce_in_graph:
        if cards > 1:
            prepared.done["allreduce_in_graph"] = _patch_all_reduce()
        else:
            prepared.not_done["allreduce_in_graph"] = "one card"


def prepare_weights(prepared: PreparedSetup, model: nn.Module) -> None:
    """Store the input-major weights of a model on an NPU as FRACTAL_NZ, one layer after the other.

    To be done before graphs are compiled, which are made for the formats of their inputs. Weights that are used in
    slices stay plain, because a slice of a tiled weight is converted back at each use; so does an embedding's, which a
    tied output layer shares.
    """
    if not prepared.setup.nz_weights or "nz_weights" in prepared.not_done:
        return
    sliced = _sliced_layers(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, InputMajorLinear) and name.rpartition(".")[2] not in sliced
    }
    if not layers:
        prepared.not_done["nz_weights"] = "no layer holds an input-major weight (packed_weights off)"
        return
    for name, layer in layers.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, TiledLinear(layer))
    prepared.done["nz_weights"] = f"FRACTAL_NZ in {len(layers)} linear layers"


def _sliced_layers(model: Any) -> set[str]:
    options = getattr(model, "options", None)
    fused = {"qkv": getattr(options, "fused_qkv", True), "gate_up_proj": getattr(options, "fused_gate_up", True)}
    return {name for name, whole in fused.items() if not whole}


def _patch_all_reduce() -> str:
    # torch's own dynamo turns dist.all_reduce into a node of the graph since 2.3.1; before that torchair has to
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3]) >= (2, 3, 1):
        return "by dynamo"
    import torchair

    torchair.patch_for_hcom()
    return "by torchair.patch_for_hcom"
