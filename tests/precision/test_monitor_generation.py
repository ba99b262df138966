"""Generation: each forward pass is a step, of stock transformers and of the tuned model, in evaluation mode."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from monitor_runs import assert_row, by_name, read

from precision.monitor import Monitor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from models import save, stock_model, tiny_config, tuned_model

TOKENS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(stock_model(tiny_config()), tmp_path_factory.mktemp("model"))


def prompt() -> torch.Tensor:
    return torch.randint(2, 300, (2, 7), generator=torch.Generator().manual_seed(0))


def generate(model: Any) -> torch.Tensor:
    ids = prompt()
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False
    )


@pytest.mark.parametrize("kind", ["stock", "tuned"])
def test_every_token_is_a_step(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    model: Any = stock_model(tiny_config()) if kind == "stock" else tuned_model(checkpoint)
    if kind == "tuned":
        model.run_eager()
    alone = generate(model)
    kept: list[tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]] = []
    # kept before the monitor sees them: the KV cache goes on changing
    layer = model.get_submodule("model.layers.1.mlp")
    outputs: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda module, args, result: outputs.append(result.clone())),
        model.register_forward_hook(
            lambda module, args, result: kept.append((result.logits.clone(), *kept_cache(result.past_key_values)))
        ),
    ]
    monitor = Monitor(output_dir=tmp_path, quiet=True, all_xy=True, generation=True, page=False)
    with monitor.watch(model):
        watched = generate(model)
    for handle in handles:
        handle.remove()
    assert torch.equal(alone, watched)
    assert monitor.folder is not None
    assert monitor.notes == []
    for step in range(TOKENS):
        assert_row(by_name(read(monitor.folder, "actv", step))["model.layers.1.mlp.output"], outputs[step])
        found = {row["name"]: float(row["value"]) for row in read(monitor.folder, "generation", step)}
        logits, keys, values = kept[step]
        last = logits[:, -1].double()
        share = last.softmax(-1)
        best = last.sort(descending=True).values
        assert found["logits.entropy"] == pytest.approx(float(-(share * share.log()).sum(-1).mean()), rel=1e-5)
        assert found["logits.margin"] == pytest.approx(float((best[:, 0] - best[:, 1]).mean()), rel=1e-4)
        for place in range(2):
            assert found[f"kv.{place}.key.norm"] == pytest.approx(float(keys[place].norm()), rel=1e-5)
            assert found[f"kv.{place}.value.norm"] == pytest.approx(float(values[place].norm()), rel=1e-5)
        assert found["tokens_per_second"] > 0
    assert not list(monitor.folder.glob(f"actv_{TOKENS}-*.csv"))


def kept_cache(cache: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    pairs = list(cache) if isinstance(cache, tuple) else list(zip(cache.keys, cache.values))
    return [pair[0].double() for pair in pairs], [pair[1].double() for pair in pairs]


def test_bfloat16_kv_norms_arent_rounded_to_it() -> None:
    from precision.monitor.collector import Collector
    from precision.monitor.generation import add_generation

    key, value = torch.randn(2, 3, 5, 7).bfloat16(), torch.randn(2, 3, 5, 7).bfloat16()
    collector = Collector(["norm"], 0.0)
    add_generation(collector, {"past_key_values": ((key, value),)})
    rows = {record.name: figures[0] for record, figures in collector.send(0).rows()}
    expected = {"kv.0.key.norm": float(key.double().norm()), "kv.0.value.norm": float(value.double().norm())}
    assert rows == pytest.approx(expected, rel=1e-6)


def test_modules_that_are_never_called_are_named(tmp_path: Path) -> None:
    class Fused(torch.nn.Module):
        """Computes with its child's weight as a fused kernel does, without calling the child."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.fc.weight

    model = Fused()
    monitor = Monitor(output_dir=tmp_path, quiet=True, all_xy=True, page=False)
    with monitor.watch(model), torch.no_grad():
        model(torch.ones(1, 4))
    assert "1 of 2 watched modules weren't called in step 0 (fc)" in monitor.notes[0]
    assert "eagerly" in monitor.notes[0]


@pytest.mark.skipif(
    not hasattr(torch.compiler, "set_stance"), reason="torch before 2.6 can't run compiled code eagerly"
)
def test_inside_of_a_compiled_model_is_seen(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()).eval()
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(2, 4)
    with torch.no_grad():
        alone = compiled(x)
        with Monitor(output_dir=tmp_path, quiet=True, all_xy=True, page=False).watch(model) as monitor:
            assert torch.equal(compiled(x), alone)
        assert torch.equal(compiled(x), alone)
    assert monitor.folder is not None
    assert monitor.notes == []
    assert_row(by_name(read(monitor.folder, "actv"))["1.output"], alone)
