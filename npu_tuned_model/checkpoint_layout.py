"""Which rows or columns of a checkpoint's tensors make up each parameter, for the whole model or for one rank of many.

A plain checkpoint holds q, k, v, gate and up projections apart; the tuned model holds them as `self_attn.qkv` and
`mlp.gate_up_proj`. A converted checkpoint (tools/merge_qkv_weight.py) holds them fused, rank by rank, so that an equal
cut of the rows gives each rank its own q, k and v. Loading, saving, converting and verifying all follow `pieces_of`.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053): heads, feed-forward width and vocabulary are divided among
the ranks; `o_proj` and `down_proj` are cut by columns, and their results summed over the ranks. With fewer KV heads
than ranks, each KV head is held by as many consecutive ranks as share its query heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from npu_tuned_model.config import AnyConfig
from npu_tuned_model.errors import CheckpointError, UserError

INT8 = "int8"
# the attribute of a module with an int8 weight that holds the rows' scales
SCALE = "weight_scale"

FUSED = {
    "self_attn.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# the modules with a row for each word
VOCABULARY = ("model.embed_tokens", "lm_head")
# The entry of config.json that marks a converted checkpoint.
LAYOUT_KEY = "npu_tuned_layout"
LAYOUT_VERSION = 1
LARGEST_TP_SIZE = 1024


class Shard(NamedTuple):
    """One rank's part of a model that is divided among `size` ranks."""

    rank: int
    size: int


WHOLE = Shard(0, 1)


class Quantised(NamedTuple):
    """Which weights are int8: those of the layers' linear modules, and also embedding and output layer."""

    linears: bool
    embeddings: bool

    def holds(self, name: str) -> bool:
        """Whether the parameter `name` is int8."""
        module_name, attribute = split_name(name)
        if attribute != "weight" or module_name.endswith("norm"):
            return False
        return self.embeddings if module_name in VOCABULARY else self.linears


FLOATS = Quantised(False, False)


class Piece(NamedTuple):
    """Indices [start, start + length) of dimension `dim` of a checkpoint's tensor.

    They go to [target_start, target_start + length) of the same dimension of the parameter.
    """

    source: str
    source_shape: tuple[int, ...]
    dim: int
    start: int
    length: int
    target_start: int


class Cut(NamedTuple):
    """A rank's part of a range of `total` indices."""

    total: int
    start: int
    length: int


def pieces_of(name: str, config: AnyConfig, shard: Shard = WHOLE, *, converted: bool = False) -> list[Piece]:
    """The pieces that make up one rank's parameter `name`, in order.

    Args:
        name: of the tuned model, such as "model.layers.0.self_attn.qkv.weight".
        config: sizes of the whole model.
        shard: the rank and among how many; `check_tp_size` accepts their number.
        converted: whether the checkpoint holds the fused rows, laid out for `shard.size` ranks.

    Raises:
        ValueError: the tuned model has no such parameter.
    """
    module_name, attribute = split_name(name)
    hidden = config.hidden_size
    columns = (hidden,) if attribute == "weight" else ()
    fused = fused_suffix(module_name)
    if fused is not None:
        cuts = _fused_cuts(fused, config, shard)
        rows = sum(cut.length for cut in cuts)
        if converted:
            return [Piece(name, (rows * shard.size, *columns), 0, rows * shard.rank, rows, 0)]
        prefix = module_name[: -len(fused)]
        pieces, target_start = [], 0
        for part, cut in zip(FUSED[fused], cuts):
            source = f"{prefix}{part}.{attribute}"
            pieces.append(Piece(source, (cut.total, *columns), 0, cut.start, cut.length, target_start))
            target_start += cut.length
        return pieces
    if module_name in VOCABULARY:
        cut = vocabulary_cut(config, shard)
        return [Piece(name, (cut.total, *columns), 0, cut.start, cut.length, 0)]
    if module_name.endswith((".self_attn.o_proj", ".mlp.down_proj")):
        if attribute == SCALE:
            return [Piece(name, (hidden,), 0, 0, hidden, 0)]
        cut = _equal_cut(hidden if module_name.endswith("o_proj") else config.intermediate_size, shard)
        return [Piece(name, (hidden, cut.total), 1, cut.start, cut.length, 0)]
    if module_name.endswith("norm"):
        return [Piece(name, (hidden,), 0, 0, hidden, 0)]
    raise ValueError(f"the tuned Qwen2 has no parameter {name}")


def shape_of(pieces: list[Piece]) -> tuple[int, ...]:
    """The shape of the parameter that the pieces make up."""
    shape = list(pieces[0].source_shape)
    shape[pieces[0].dim] = sum(piece.length for piece in pieces)
    return tuple(shape)


def vocabulary_cut(config: AnyConfig, shard: Shard) -> Cut:
    """A rank's rows of embedding and output layer. Any vocabulary can be divided: the shares differ by one at most."""
    start, end = (config.vocab_size * rank // shard.size for rank in (shard.rank, shard.rank + 1))
    return Cut(config.vocab_size, start, end - start)


def _fused_cuts(fused: str, config: AnyConfig, shard: Shard) -> list[Cut]:
    if fused == "mlp.gate_up_proj":
        return [_equal_cut(config.intermediate_size, shard)] * 2
    head_dim = config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads
    # With fewer heads than ranks, rank * kv_heads // size is the head of this rank's query heads.
    key_value = Cut(
        kv_heads * head_dim,
        shard.rank * kv_heads // shard.size * head_dim,
        max(kv_heads // shard.size, 1) * head_dim,
    )
    return [_equal_cut(config.hidden_size, shard), key_value, key_value]


def _equal_cut(total: int, shard: Shard) -> Cut:
    length = total // shard.size
    return Cut(total, shard.rank * length, length)


def fused_suffix(module_name: str) -> str | None:
    """The key of FUSED that a module's name ends with, if any."""
    return next((suffix for suffix in FUSED if module_name.endswith(f".{suffix}")), None)


def split_name(parameter_name: str) -> tuple[str, str]:
    """("model.norm", "weight") of "model.norm.weight"."""
    module_name, _, attribute = parameter_name.rpartition(".")
    return module_name, attribute


def scale_name(weight_name: str) -> str:
    """The name of an int8 weight's scales."""
    return f"{split_name(weight_name)[0]}.{SCALE}"


def parameter_names(config: AnyConfig, quantised: Quantised = FLOATS) -> list[str]:
    """The tuned model's parameters, in the order of its layers; those of `lm_head` also where it is tied."""
    layer = (
        "input_layernorm.weight",
        "self_attn.qkv.weight",
        "self_attn.qkv.bias",
        "self_attn.o_proj.weight",
        "post_attention_layernorm.weight",
        "mlp.gate_up_proj.weight",
        "mlp.down_proj.weight",
    )
    layers = (f"model.layers.{number}.{name}" for number in range(config.num_hidden_layers) for name in layer)
    names = []
    for name in (EMBEDDING, *layers, "model.norm.weight", HEAD):
        names += [name, scale_name(name)] if quantised.holds(name) else [name]
    return names


def check_tp_size(config: AnyConfig, size: int) -> None:
    """Raise UserError, naming the sizes that work, when the model can't be divided among `size` ranks."""
    reason = _why_not(config, size)
    if reason is not None:
        works = [str(other) for other in range(1, LARGEST_TP_SIZE + 1) if _why_not(config, other) is None]
        raise UserError(f"tp_size {size} does not divide this model: {reason}; sizes that work: {', '.join(works)}")


def _why_not(config: AnyConfig, size: int) -> str | None:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if size < 1:
        return "it must be at least 1"
    if heads % size:
        return f"{heads} attention heads over {size} ranks"
    if kv_heads % size and size % kv_heads:
        return f"{kv_heads} key and value heads over {size} ranks"
    if config.intermediate_size % size:
        return f"intermediate_size {config.intermediate_size} over {size} ranks"
    return None


class Layout(NamedTuple):
    """What a converted checkpoint was made for, and which of its weights are int8."""

    tp_size: int
    quantised: Quantised

    def entry(self) -> dict[str, Any]:
        """What config.json says of it under LAYOUT_KEY."""
        entry: dict[str, Any] = {"version": LAYOUT_VERSION, "tp_size": self.tp_size}
        if self.quantised.linears:
            entry.update(weight_dtype=INT8, int8_embeddings=self.quantised.embeddings)
        return entry


def layout_of(config: AnyConfig) -> Layout | None:
    """How a converted checkpoint is laid out; None for a plain one.

    Raises:
        CheckpointError: a layout that this version does not know.
    """
    layout: Any = getattr(config, LAYOUT_KEY, None)
    if layout is None:
        return None
    fields = layout if isinstance(layout, dict) else {}
    size, weight_dtype = fields.get("tp_size"), fields.get("weight_dtype")
    known = fields.get("version") == LAYOUT_VERSION and weight_dtype in (None, INT8)
    if not known or type(size) is not int or size < 1:
        raise CheckpointError(
            f"config.json: {LAYOUT_KEY} is {layout!r}, this version reads version {LAYOUT_VERSION} with a tp_size: "
            "convert the plain checkpoint again with tools/merge_qkv_weight.py"
        )
    return Layout(size, Quantised(weight_dtype == INT8, bool(fields.get("int8_embeddings"))))


def held_as(config: AnyConfig, weight_dtype: str | None, int8_embeddings: bool) -> Quantised:
    """Which weights a model loaded with these arguments of load_model holds as int8."""
    layout = layout_of(config)
    stored = FLOATS if layout is None else layout.quantised
    return stored if stored.linears or weight_dtype is None else Quantised(True, int8_embeddings)


def converted_tp_size(config: AnyConfig) -> int | None:
    """The number of ranks that a converted checkpoint was made for; None for a plain one.

    Raises:
        CheckpointError: a layout that this version does not know.
    """
    layout = layout_of(config)
    return None if layout is None else layout.tp_size


def some(names: Iterable[str], shown: int = 8) -> str:
    """Names for a message: all of them, or the first few and how many there are."""
    names = sorted(names)
    text = ", ".join(names[:shown])
    return text if len(names) <= shown else f"{text}, ... ({len(names)} in all)"
