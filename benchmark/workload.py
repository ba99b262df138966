"""What is generated from: prompts, chat template, padding to one fixed length."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from npu_tuned_model.errors import UserError

BUILT_IN_PROMPTS = (
    "Explain to a curious twelve-year-old why the sky is blue at noon and red at sunset. Begin with what light is "
    "made of, say what the air does to each colour on its way, and end with an experiment that can be done in a "
    "kitchen with a glass of water, a few drops of milk and a torch. ",
    "请用通俗的语言介绍一下大语言模型推理时的两个阶段：全量计算和增量计算。说明为什么前者受算力限制、后者受访存带宽限制，"
    "并举例说明键值缓存节省了哪些重复计算，批大小变化时两者的耗时分别怎样变化。",
    "Write a Python function that merges overlapping intervals, with type hints and three tests.\n\n"
    "def merge(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:\n"
    '    """Return the union of closed intervals, sorted, without overlaps."""\n'
    "    merged = []\n    for start, end in sorted(intervals):\n        if merged and start <= merged[-1][1]:\n",
    "Summarise the minutes below in five bullet points and list the open questions. The team met on Tuesday to go "
    "through the plan for the new library building. The architect showed two designs; the first keeps the old reading "
    "room, the second replaces it by a courtyard. The budget covers either, but not the cellar. ",
)
# A text of its own tokens may come back a token or two longer after being cut; the rest of this is left as padding.
_MARGIN = 8


@dataclass(frozen=True)
class Workload:
    """Prompts as the model takes them.

    Attributes:
        input_ids, attention_mask: (batch, input_max_len) int64, padded in front.
        max_new_tokens: tokens to generate, exactly.
        source: where the prompts come from, in words.
        chat_template: whether the tokenizer's chat template was applied.
        warnings: what the user must know, one line each.
    """

    input_ids: Tensor
    attention_mask: Tensor
    max_new_tokens: int
    source: str
    chat_template: bool
    warnings: list[str] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def input_max_len(self) -> int:
        return int(self.input_ids.shape[1])

    @property
    def prompt_tokens(self) -> list[int]:
        """Tokens of each prompt, without padding."""
        return [int(count) for count in self.attention_mask.sum(dim=1)]


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer, padding in front.

    Raises:
        UserError: when there is none, or it can't pad.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), padding_side="left", local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"no tokenizer can be read from {folder} ({first}); it needs tokenizer_config.json with tokenizer.json, or "
            "with vocab.json and merges.txt"
        ) from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer in {folder} has no padding token; set pad_token in tokenizer_config.json")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_prompts(file: Path) -> list[str]:
    """Prompts from a file: a JSON list of strings, or plain UTF-8 text with one prompt per line (empty lines skipped).

    Raises:
        UserError: for a file that can't be read or holds no prompt.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--prompts: {file} can't be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts: {file} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    if file.suffix == ".json" or text.lstrip().startswith("["):
        try:
            prompts = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"--prompts: {file} is not valid JSON ({error}); give a JSON list of strings") from error
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
            raise UserError(
                f"--prompts: {file} must be a JSON list of strings, or a text file with one prompt per line"
            )
    else:
        prompts = [line for line in text.splitlines() if line.strip()]
    if not any(prompt.strip() for prompt in prompts):
        raise UserError(f"--prompts: {file} holds no prompt; write one per line")
    return [prompt for prompt in prompts if prompt.strip()]


def make_workload(
    tokenizer: Any,
    *,
    batch_size: int,
    input_max_len: int,
    max_new_tokens: int,
    context: int,
    prompts: list[str] | None = None,
    source: str = "built-in texts",
) -> Workload:
    """Tokenise `batch_size` prompts (taken in turn, from the start again when there are fewer) to input_max_len.

    The built-in texts are repeated until they fill input_max_len, so that the length asked for is the length that is
    computed. Prompts of the user's are taken as they are and padded.

    Args:
        context: max_position_embeddings of the model.
        prompts: the user's prompts, or None for the built-in ones.

    Raises:
        UserError: for a prompt, or input_max_len + max_new_tokens, beyond the model's context.
    """
    if input_max_len + max_new_tokens > context:
        raise UserError(
            f"--input_max_len={input_max_len} and --max_new_tokens={max_new_tokens} together exceed the model's "
            f"context of {context} tokens; lower one of them"
        )
    texts: list[str] = []
    warnings: list[str] = []
    chat = tokenizer.chat_template is not None
    available = list(prompts) if prompts else list(BUILT_IN_PROMPTS)
    for row in range(batch_size):
        text = available[row % len(available)]
        if prompts is None:
            text = _fill(tokenizer, text, input_max_len, chat=chat)
        texts.append(_as_chat(tokenizer, text) if chat else text)
    if prompts is not None:
        for number, text in enumerate(texts[: len(available)], start=1):
            tokens = _count(tokenizer, text)
            if tokens > context:
                raise UserError(
                    f"prompt {number} has {tokens} tokens and the model's context is {context}; shorten the prompt"
                )
            if tokens > input_max_len:
                side = "end" if tokenizer.truncation_side == "right" else "start"
                warnings.append(
                    f"prompt {number} has {tokens} tokens: {tokens - input_max_len} were cut at its {side} to fit "
                    f"--input_max_len={input_max_len}"
                )
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=input_max_len, return_tensors="pt")
    return Workload(
        input_ids=encoded["input_ids"],
        attention_mask=encoded["attention_mask"],
        max_new_tokens=max_new_tokens,
        source=f"{source}, repeated to fill --input_max_len" if prompts is None else source,
        chat_template=chat,
        warnings=warnings,
    )


def _as_chat(tokenizer: Any, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, verbose=False)["input_ids"])


def _fill(tokenizer: Any, text: str, length: int, *, chat: bool) -> str:
    """`text` repeated and cut so that it makes about `length` tokens, a few fewer rather than one more."""
    frame = _count(tokenizer, _as_chat(tokenizer, "")) if chat else 0
    room = max(length - frame - _MARGIN, 1)
    once = max(_count(tokenizer, text), 1)
    tokens = tokenizer(text * (room // once + 2), verbose=False)["input_ids"]
    filled = ""
    while not filled:
        # the cut may fall into the bytes of one character; where that is the first, take it whole
        filled = str(tokenizer.decode(tokens[:room])).rstrip("\ufffd")
        room += 1
    return filled
