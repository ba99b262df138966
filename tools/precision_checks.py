"""The comparisons behind check_precision: which runs are made, and which of their tensors are the same thing."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from precision_ranks import dump_ranks, rank_rules
from torch import Tensor, nn

from npu_tuned_model import Qwen2ForCausalLM, ops
from npu_tuned_model.graph import CompiledSteps, EagerSteps, GraphOptions
from precision import PrecisionDebugger
from precision.compare import Comparison, Row, compare_paths, verdict
from precision.compare.mapping import Rule

DECODE_STEPS = 2
# How much further from float32 than stock the tuned model may be in a narrow dtype.
OWN_ERRORS = 2.0
# results only: every input is the result of another call, and the weights need no copy on disk
_RESULTS = ["forward", "output"]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OPS_OF_TABLE = {
    "rms_norm": "npu_rms_norm",
    "add_rms_norm": "npu_add_rms_norm",
    "apply_rotary_pos_emb": "npu_apply_rotary_pos_emb",
    "prompt_flash_attention": "npu_prompt_flash_attention",
    "incre_flash_attention": "npu_incre_flash_attention",
}


@dataclass
class Check:
    """One comparison and its outcome.

    Attributes:
        name: what was held against what.
        passed: whether no tensor differs by more than rounding.
        culprit: layer and op that first diverge, or None.
    """

    name: str
    comparison: Comparison
    passed: bool = field(init=False)
    culprit: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.passed = self.comparison.passed
        first = self.comparison.first_divergence()
        self.culprit = None if first is None else name_of(first)


def name_of(row: Row) -> str:
    """ "layer 3, npu_rms_norm in input_layernorm, prefill" for a row of a dump of the tuned model."""
    path, _, api = row.address.partition("/")
    layer = _LAYER.match(path + ".")
    where = path[layer.end() :] if layer else path
    step = "prefill" if row.call == 0 else f"decode step {row.call}"
    what = f"{api} in {where}" if api and where else api or where
    return f"layer {layer[1]}, {what}, {step}" if layer else f"{what}, {step}"


def stock_against_tuned(stock: nn.Module, tuned: Qwen2ForCausalLM, ids: Tensor, folder: Path) -> Check:
    """Every comparable tensor of a prefill and two decode steps, ids (batch, sequence) without padding.

    The tokens fed to decode are stock's choices, so both models see the same text. In a dtype other than float32 both
    are held against stock in float32, for which a copy of it is made.
    """
    following = dump_stock(stock, ids, folder / "stock")
    dump_tuned(tuned, ids, following, folder / "tuned")
    rules = stock_rules(tuned.config, last_token_logits=tuned.options.last_token_logits)
    if tuned.dtype == torch.float32:
        return Check("stock against tuned", compare_paths(folder / "stock", folder / "tuned", rules, by_name=False))
    dump_stock(copy.deepcopy(stock).float(), ids, folder / "exact", following)
    allowed = verdict.tolerance(_name(tuned.dtype))
    comparison = compare_paths(folder / "exact", folder / "tuned", rules, by_name=False, tolerance=allowed)
    allow_own_errors(comparison, compare_paths(folder / "exact", folder / "stock", tolerance=allowed))
    return Check("stock against tuned", comparison)


def allow_own_errors(comparison: Comparison, stocks: Comparison) -> None:
    """Judge the tuned model in a narrow dtype by how far stock itself is from float32 in that dtype.

    Scores in the hundreds, as the first layer of a real Qwen2 has them, leave stock's bfloat16 attention off by a
    sixth: held against stock, the better result would look wrong.

    Args:
        comparison: float32 against the tuned model, changed here.
        stocks: float32 against stock in the narrow dtype.
    """
    errors = {row.golden: row.error for row in stocks.rows if math.isfinite(row.error)}
    for row in comparison.rows:
        row.allowed = max(row.allowed, OWN_ERRORS * errors.get(row.golden, 0.0))
        if row.errors is not None:
            row.verdict = verdict.judge(row.errors, row.allowed)
    comparison.notes.append(
        f"golden is stock in float32; allowed is {OWN_ERRORS:g} times what stock itself is off in this dtype, or more"
    )


def eager_against_graph(tuned: Qwen2ForCausalLM, ids: Tensor, following: Tensor, folder: Path) -> Check:
    """The tuned model's own small operations, as plain Python and as nodes of its compiled graphs."""
    dump_tuned(tuned, ids, following, folder / "eager", fused=False)
    dump_graph(tuned, ids, following, folder / "graph")
    comparison = compare_paths(folder / "eager", folder / "graph")
    # what runs outside every module is the cache's bookkeeping, part of which is outside the graph
    comparison.rows = [row for row in comparison.rows if not row.address.startswith("/")]
    return Check("tuned eager against tuned graph", comparison)


def one_rank_against_many(
    tuned: Qwen2ForCausalLM, model_path: Path, ranks: int, ids: Tensor, following: Tensor, folder: Path
) -> Check:
    """The tuned model in this process, and divided among `ranks` processes on the CPU, their parts put together.

    Raises:
        UserError: when the ranks can't run.
    """
    dump_tuned(tuned, ids, following, folder / "one_rank")
    dtype = _name(tuned.dtype)
    dump_ranks(model_path, dtype, ranks, ids, following, folder / "ranks", folder / "ranks.pt")
    # a float32 figure of a bfloat16 activation is no surer than that
    comparison = compare_paths(
        folder / "one_rank", folder / "ranks", rank_rules(tuned.config, ranks), tolerance=verdict.tolerance(dtype)
    )
    # the sums over the ranks have no counterpart, and a rank's part of a table is another table
    comparison.rows = [
        row
        for row in comparison.rows
        if row.golden and row.target and not row.address.startswith(("model.embed_tokens/", "lm_head/"))
    ]
    return Check(f"one rank against {ranks}", comparison)


def compiled_against_eager(tuned: Qwen2ForCausalLM, ids: Tensor, following: Tensor) -> tuple[float, float]:
    """Relative L2 error of the really compiled graphs' logits, against eager, and what rounding explains.

    It is what no interpreter can show.

    Raises:
        UserError: when the graphs can't be compiled here.
    """
    with _steps(tuned, CompiledSteps(tuned, GraphOptions())):
        compiled = run_tuned(tuned, ids, following)
    with _steps(tuned, EagerSteps(tuned)):
        plain = run_tuned(tuned, ids, following)
    return float((compiled - plain).norm() / plain.norm()), verdict.tolerance(_name(tuned.dtype))


@dataclass
class TextDifference:
    """Where two greedy texts part.

    Attributes:
        row: of the batch; token: number of the new token, from 0.
        margin: stock's logit of its own token minus that of the tuned model's token.
        logit_error: largest difference between the two models' logits at that point.
    """

    row: int
    token: int
    stock_token: int
    tuned_token: int
    margin: float
    logit_error: float

    @property
    def is_rounding(self) -> bool:
        """Whether the decision was so close that the models' logits need differ by rounding only."""
        return self.margin <= 2 * self.logit_error


@torch.no_grad()
def text_differences(
    stock: nn.Module, tuned: Qwen2ForCausalLM, ids: Tensor, mask: Tensor, new_tokens: int
) -> tuple[list[TextDifference], int]:
    """Greedy texts of both models, prompts padded on the left: the differences, and how many tokens were compared."""
    options: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": new_tokens,
        "do_sample": False,
        "num_beams": 1,
        "output_scores": True,
        "return_dict_in_generate": True,
        "pad_token_id": 0,
        "eos_token_id": None,
        "repetition_penalty": 1.0,
    }
    theirs = stock.generate(ids, **options)
    with _steps(tuned, EagerSteps(tuned)):
        ours = tuned.generate(ids, **options)
    their_text, our_text = theirs.sequences[:, ids.shape[1] :], ours.sequences[:, ids.shape[1] :]
    differences = []
    for row, unequal in enumerate((their_text != our_text).tolist()):
        if True in unequal:
            token = unequal.index(True)
            scores = theirs.scores[token][row].float()
            stock_token, tuned_token = int(their_text[row, token]), int(our_text[row, token])
            error = float((scores - ours.scores[token][row].float()).abs().max())
            margin = float(scores[stock_token] - scores[tuned_token])
            differences.append(TextDifference(row, token, stock_token, tuned_token, margin, error))
    return differences, their_text.numel()


@torch.no_grad()
def dump_stock(stock: nn.Module, ids: Tensor, folder: Path, following: Tensor | None = None) -> Tensor:
    """Dump stock's prefill and decode steps; returns the tokens that decode was fed, (batch, steps).

    Args:
        following: those tokens; by default stock's own choices.
    """
    debugger = PrecisionDebugger(dump_path=folder, task="tensor", level="mix", quiet=True, data_mode=_RESULTS)
    fed = []
    with debugger.start(stock):
        output = stock(ids, use_cache=True)
        for step in range(DECODE_STEPS):
            fed.append(output.logits[:, -1:].argmax(-1) if following is None else following[:, step : step + 1])
            output = stock(fed[-1], past_key_values=output.past_key_values, use_cache=True)
    return torch.cat(fed, dim=1)


@torch.no_grad()
def dump_tuned(
    tuned: Qwen2ForCausalLM, ids: Tensor, following: Tensor, folder: Path, *, fused: bool = True
) -> PrecisionDebugger:
    """Dump the tuned model's prefill and decode steps in eager mode, its ops.* as one call each (fused) or inside."""
    debugger = PrecisionDebugger(dump_path=folder, task="tensor", level="mix", quiet=True, data_mode=_RESULTS)
    if fused:
        register_ops(debugger, tuned)
    with _steps(tuned, EagerSteps(tuned)), debugger.start(tuned):
        run_tuned(tuned, ids, following)
    return debugger


@torch.no_grad()
def dump_graph(tuned: Qwen2ForCausalLM, ids: Tensor, following: Tensor, folder: Path) -> PrecisionDebugger:
    """Dump the nodes of the tuned model's prefill and decode graphs."""
    debugger = PrecisionDebugger(dump_path=folder, task="tensor", level="graph", quiet=True, data_mode=_RESULTS)
    backend = debugger.compile_backend("eager")
    steps: Any = EagerSteps(tuned)
    steps.prefill = torch.compile(steps.prefill, backend=backend, fullgraph=True, dynamic=False)
    steps.decode = torch.compile(steps.decode, backend=backend, fullgraph=True, dynamic=False)
    with _steps(tuned, steps), debugger.start(tuned):
        run_tuned(tuned, ids, following)
    return debugger


@torch.no_grad()
def run_tuned(tuned: Qwen2ForCausalLM, ids: Tensor, following: Tensor) -> Tensor:
    """Logits of a prefill and one decode step per column of `following`, (batch, 1 + steps, vocabulary)."""
    cache = tuned.new_cache(ids.shape[0], ids.shape[1] + following.shape[1])
    logits = [tuned(ids, past_key_values=cache).logits[:, -1]]
    for column in range(following.shape[1]):
        logits.append(tuned(following[:, column : column + 1], past_key_values=cache).logits[:, -1])
    return torch.stack(logits, dim=1)


def register_ops(debugger: PrecisionDebugger, tuned: Qwen2ForCausalLM) -> None:
    """Let the tuned model's operators count as APIs."""
    tables = {id(module.ops): module.ops for module in tuned.modules() if hasattr(module, "ops")}
    for table in tables.values():
        fields = {entry.name for entry in dataclasses.fields(table)}
        debugger.register_api(table, {name: op for name, op in _OPS_OF_TABLE.items() if name in fields})
    debugger.register_api(ops, ["npu_swiglu", "scatter_update_"])


def stock_rules(config: Any, *, last_token_logits: bool = True) -> list[Rule]:
    """Which tensor of stock Qwen2 (eager attention) is which of the tuned model."""
    head_dim = config.hidden_size // config.num_attention_heads
    kv_width = config.num_key_value_heads * head_dim
    q, kv, ffn = config.hidden_size, config.hidden_size + kv_width, config.intermediate_size
    layer = "model.layers.{n}"
    attention = f"{layer}.self_attn"
    heads_first = [0, 2, 1, 3]
    return [
        *_same("model.embed_tokens", "model.norm"),
        *_norm(f"{layer}.input_layernorm"),
        *_norm(f"{layer}.post_attention_layernorm"),
        *_norm("model.norm"),
        # the running sum is the second result of the tuned norm behind it
        Rule(golden=f"{layer}/__add__:output.0", target=f"{layer}.post_attention_layernorm:output.1"),
        _part(f"{attention}.q_proj", f"{attention}.qkv", 0, q),
        _part(f"{attention}.k_proj", f"{attention}.qkv", q, kv),
        _part(f"{attention}.v_proj", f"{attention}.qkv", kv, kv + kv_width),
        *(
            Rule(
                golden=f"{attention}/__add__{number}:output.0",
                target=f"{attention}/npu_apply_rotary_pos_emb:output.{place}",
                golden_permute=heads_first,
            )
            for place, number in enumerate(("", "#1"))
        ),
        *(
            Rule(
                golden=f"{attention}/matmul#1:output.0",
                target=f"{attention}/{op}:output.0",
                golden_permute=heads_first,
            )
            for op in ("npu_prompt_flash_attention", "npu_incre_flash_attention")
        ),
        *_same(f"{attention}.o_proj", attention, f"{layer}.mlp.down_proj", f"{layer}.mlp"),
        _part(f"{layer}.mlp.gate_proj", f"{layer}.mlp.gate_up_proj", 0, ffn),
        _part(f"{layer}.mlp.up_proj", f"{layer}.mlp.gate_up_proj", ffn, 2 * ffn),
        *(
            Rule(golden=f"{layer}.mlp/__mul__:output.0", target=f"{layer}.mlp/{op}:output.0")
            for op in ("npu_swiglu", "__mul__")
        ),
        Rule(
            golden="lm_head:output.0",
            target="lm_head:output.0",
            golden_slice=[1, -1, 0] if last_token_logits else None,
        ),
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _same(*paths: str) -> list[Rule]:
    return [Rule(golden=f"{path}:output.0", target=f"{path}:output.0") for path in paths]


def _norm(path: str) -> list[Rule]:
    targets = (path, f"{path}/npu_rms_norm", f"{path}/npu_add_rms_norm")
    return [Rule(golden=f"{path}:output.0", target=f"{target}:output.0") for target in targets]


def _part(golden: str, target: str, start: int, stop: int) -> Rule:
    return Rule(golden=f"{golden}:output.0", target=f"{target}:output.0", target_slice=[-1, start, stop])


@contextmanager
def _steps(tuned: Qwen2ForCausalLM, steps: Any) -> Iterator[None]:
    before = tuned.steps
    tuned.steps = steps
    try:
        yield
    finally:
        tuned.steps = before
