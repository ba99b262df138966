"""Which attention operators an Ascend chip has, and which of them serve prefill and decode.

Sources: torch_npu's operator documents (PFA and IFA: A2, A3 and 310P; FIA: A2, A3 and newer), torchair's converters
(PFA and IFA raise on Ascend950) and its table of arguments that a captured graph updates (FIA's lengths only).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npu_tuned_model.errors import UserError

ATTENTION = ("auto", "pfa_ifa", "fia")
PFA = "npu_prompt_flash_attention"
IFA = "npu_incre_flash_attention"
FIA = "npu_fused_infer_attention_score"
SMALL_OPS = "matmul, mask, softmax, matmul"
# torchair's names for one thing: kernels are captured once and replayed
CAPTURED_MODES = ("reduce-overhead", "npugraph_ex")
# CANN's names of chips begin so; the longer beginnings first
_FAMILIES = {
    "Ascend910_95": "950",
    "Ascend950": "950",
    "Ascend910_93": "A3",
    "Ascend910B": "A2",
    "Ascend310P": "310P",
}
_HAS_PFA = ("A2", "A3", "310P")


@dataclass(frozen=True)
class AttentionPlan:
    """Which operators serve the model's attention, and how decode tells them how much of the cache is filled.

    Attributes:
        prompt, decode: names of the operators (torch_npu's, or the portable ones of the same name).
        lengths: "window" (decode reads a slice of the cache; a tensor of lengths masks the rest of it), "host" (the
            cache is passed whole, with lengths that are integers on the host), "device" (whole, lengths in a tensor)
            or "mask" (whole, a mask hides what is not filled).
        chip: name of the chip, None where it is no NPU.
    """

    prompt: str = PFA
    decode: str = IFA
    lengths: str = "window"
    chip: str | None = None

    def __str__(self) -> str:
        operators = self.prompt if self.prompt == self.decode else f"{self.prompt}, {self.decode}"
        return operators if self.chip is None else f"{operators} on {self.chip}, lengths by {self.lengths}"


def family(chip: str) -> str | None:
    """ "A2", "A3", "310P" or "950" for CANN's name of a chip, None for a chip that is not known."""
    return next((name for beginning, name in _FAMILIES.items() if chip.startswith(beginning)), None)


def chip_name() -> str:
    """CANN's name of the chip of the current NPU, such as "Ascend910B3"."""
    import torch_npu

    return str(torch_npu.npu.get_device_name())


def plan_attention(
    device: torch.device,
    *,
    asked: str = "auto",
    flash_attention: bool = True,
    kv_lengths: bool = True,
    torchair_mode: str | None = None,
    tiling_sink: bool = True,
) -> AttentionPlan:
    """Choose the attention operators for a model on `device`.

    Args:
        asked: one of ATTENTION: "auto" takes PFA and IFA where the chip has them, else FIA.
        flash_attention, kv_lengths, tiling_sink: as in TuningOptions.
        torchair_mode: the mode that the steps are compiled in; None when torchair doesn't compile them.

    Raises:
        UserError: an unknown name, or operators that the chip hasn't.
    """
    if asked not in ATTENTION:
        raise UserError(f"no attention operators {asked!r}; there are {', '.join(ATTENTION)}")
    if not flash_attention:
        return AttentionPlan(prompt=SMALL_OPS, decode=SMALL_OPS, lengths="device")
    if device.type != "npu":
        return AttentionPlan(lengths="window" if kv_lengths else "device")
    chip = chip_name()
    kind = family(chip)
    if asked == "pfa_ifa" and kind not in _HAS_PFA:
        raise UserError(f"{chip} has no PFA and IFA (torch_npu refuses them); use attention='fia' or 'auto'")
    if asked == "fia" and kind == "310P":
        raise UserError(f"{chip} has no FIA; use attention='pfa_ifa' or 'auto'")
    fused = asked == "fia" or kind not in _HAS_PFA
    captured = torchair_mode in CAPTURED_MODES
    if captured and kind == "310P":
        raise UserError(f"a captured graph can change the lengths of FIA only, which {chip} hasn't; use max-autotune")
    # A captured graph replays its kernels with the host integers they were captured with; torchair updates those of FIA
    # before each replay, and of no other attention operator that we use.
    decode = FIA if fused or captured else IFA
    if not kv_lengths:
        lengths = "mask"
    elif decode == FIA and tiling_sink and torchair_mode == "max-autotune":
        # Tiling on the device would wait for host integers to be copied there; torchair.ops' FIA reads a tensor.
        lengths = "device"
    else:
        # One integer per row. In a GE graph they are one small input, and the graph stays static.
        lengths = "host"
    return AttentionPlan(FIA if fused else PFA, decode, lengths, chip)


def check_model(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, *, flash_attention: bool) -> None:
    """Raise UserError for a model that the NPU's operators can't run; nothing to check on other devices."""
    if device.type != "npu" or family(chip_name()) != "310P":
        return
    chip = chip_name()
    if dtype == torch.bfloat16:
        raise UserError(f"{chip} has no bfloat16; use --dtype=float16, or float32 with flash_attention off")
    if flash_attention and heads != kv_heads:
        raise UserError(
            f"{chip}'s attention operators take one key/value head per query head, not {kv_heads} for {heads}: "
            "switch flash_attention off"
        )
