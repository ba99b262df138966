"""The options of free-benchmark: msprobe's keys, and a few of our own."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, model_validator

from precision.config import Config

HandlerType = Literal["check", "fix"]
PertMode = Literal[
    "improve_precision", "add_noise", "bit_noise", "change_value", "no_change", "to_cpu", "round_mode", "condition"
]
PERT_MODES: tuple[PertMode, ...] = get_args(PertMode)
FuzzDevice = Literal["npu", "cpu"]
FuzzStage = Literal["forward", "backward"]
FuzzLevel = Literal["L1"]

# Modes whose re-run is closer to the truth than the call itself.
PRECISE_MODES = ("improve_precision", "to_cpu")
# Modes that change the inputs a little and keep the precision.
NOISE_MODES = ("add_noise", "bit_noise", "change_value")


class FreeBenchmarkConfig(Config):
    """What to perturb and how to judge it; see also Config, whose dump_path, rank, step, scope and list hold here too.

    Attributes:
        handler_type: "check" compares and reports, "fix" lets the model go on with the better result.
        pert_mode: how the call is run again.
            improve_precision: floating-point tensors one precision wider (bfloat16 and float16 to float32, float32 to
                float64), on the same device.
            to_cpu: the same on the CPU, by a registered reference where there is one.
            add_noise: activations scaled element by element by a random factor just below 1.
            bit_noise: the last mantissa bit of every normal number flipped.
            change_value: first and last element of every activation exchanged.
            no_change: the same inputs; the results must be equal bit for bit.
            round_mode: how the result agrees with the exact one rounded in each of six ways.
            condition: the condition number, from probes in the wider precision, and the kernel's error beside it.
        fuzz_device: "cpu" goes with to_cpu only and may be left out.
        fuzz_stage: "backward" compares gradients, handler "check" only.
        if_preheat, preheat_step, max_sample: during the first preheat_step steps, up to max_sample calls per API that
            would be flagged are held against the CPU; where the kernel is right, the API's limit is raised.
        rotate: check one call per API and shapes in each step, the next one in the next step.
        seed: of add_noise and the condition probes.
    """

    task: Literal["free_benchmark"] = "free_benchmark"  # type: ignore[assignment]
    level: Literal["L1", "graph"] = "L1"
    handler_type: HandlerType = "check"
    pert_mode: PertMode = "improve_precision"
    fuzz_device: FuzzDevice = "npu"
    fuzz_stage: FuzzStage = "forward"
    fuzz_level: FuzzLevel = "L1"
    if_preheat: bool = False
    preheat_step: int = Field(default=15, ge=1)
    max_sample: int = Field(default=20, ge=1)
    rotate: bool = False
    seed: int = 0

    @model_validator(mode="after")
    def _possible(self) -> FreeBenchmarkConfig:
        if self.handler_type == "fix" and self.pert_mode not in PRECISE_MODES:
            raise ValueError(f"handler_type 'fix' takes pert_mode {' or '.join(PRECISE_MODES)}, not {self.pert_mode}")
        if self.handler_type == "fix" and self.fuzz_stage == "backward":
            raise ValueError("handler_type 'fix' works on the forward stage; fuzz_stage 'backward' needs 'check'")
        if self.fuzz_device == "cpu" and self.pert_mode != "to_cpu":
            raise ValueError(f"fuzz_device 'cpu' goes with pert_mode to_cpu, not {self.pert_mode}")
        if self.fuzz_stage == "backward" and self.pert_mode in ("round_mode", "condition"):
            raise ValueError(f"pert_mode {self.pert_mode} works on the forward stage, not on backward")
        return self
