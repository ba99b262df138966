"""What the READMEs show works as they show it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
READMES = ("README.md", "README.zh.md")


def blocks(readme: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / readme).read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("readme", READMES)
def test_the_library_example_runs(readme, tiny_checkpoint):
    example, *others = blocks(readme, "python")
    for other in others:
        compile(other, readme, "exec")
    example = example.replace("/path/to/Qwen2-0.5B-Instruct", str(tiny_checkpoint))
    names: dict = {}
    exec(compile(example, readme, "exec"), names)
    assert names["output"].shape == (2, names["inputs"]["input_ids"].shape[1] + 64)


def test_both_readmes_show_the_same_commands_and_paths():
    english, chinese = (
        {re.sub(r"\s+#.*", "", line) for block in blocks(readme, "sh") for line in block.splitlines()}
        for readme in READMES
    )
    assert english == chinese
    for readme in READMES:
        text = (ROOT / readme).read_text(encoding="utf-8")
        for path in re.findall(r"`((?:npu_tuned_model|benchmark|tests)/[\w./]*)`", text):
            assert (ROOT / path).exists(), path
