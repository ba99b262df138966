"""Comparing two dumps: which tensor belongs to which, how far they are apart, and where they first diverge."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Sequence

from torch import Tensor

from precision.compare import verdict
from precision.compare.dump_reader import Address, Dump, TensorEntry, find_dumps, read_dump
from precision.compare.mapping import Rule, same_shape, tensor_name
from precision.compare.metrics import TensorErrors, tensor_errors
from precision.compare.ranks import combine
from precision.errors import PrecisionError

Key = tuple[str, int]


@dataclass
class Row:
    """One pair of tensors.

    Attributes:
        target, golden: names in their dumps, "" for a tensor without counterpart.
        address, call: where in the model it is (see dump_reader.Address), and in which call of that module.
        errors: of the whole tensors, None where only statistics were dumped.
        error: relative error that the verdict went by; NaN where there is none.
        message: how the pair was made, or why there is no figure.
    """

    step: str
    target: str
    golden: str
    address: str
    call: int
    place: str
    dtype: str
    shape: list[int]
    verdict: str
    error: float = math.nan
    allowed: float = math.nan
    errors: TensorErrors | None = None
    statistics: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    message: str = ""

    @property
    def is_input(self) -> bool:
        return self.place.startswith("input") != (".backward" in self.target)

    @property
    def record(self) -> str:
        return self.target[: -len(self.place) - 1]


@dataclass
class Comparison:
    """All rows, in the target's order of execution."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def counts(self) -> Counter[str]:
        """Rows by verdict."""
        return Counter(row.verdict for row in self.rows)

    @property
    def matched(self) -> int:
        return sum(row.verdict not in (verdict.UNMATCHED, verdict.UNKNOWN) for row in self.rows)

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing was different."""
        return self.matched > 0 and not self.counts[verdict.DIFFERENT]

    def first_divergence(self) -> Row | None:
        """The first result that differs although what went into the call did not; else the first that differs."""
        by_record: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            if row.target:
                by_record.setdefault((row.step, row.record), []).append(row)
        first = None
        for rows in by_record.values():
            inputs_differ = any(row.is_input and row.verdict == verdict.DIFFERENT for row in rows)
            for row in rows:
                if row.verdict == verdict.DIFFERENT:
                    first = first or row
                    if not row.is_input and not inputs_differ:
                        return row
        return first


def compare_paths(
    golden: Path, target: Path, rules: Sequence[Rule] = (), *, by_name: bool = True, tolerance: float | None = None
) -> Comparison:
    """Compare what lies under two paths, step by step and rank by rank.

    Several ranks against one are put together (see ranks.combine); several against as many are compared one by one.

    Args:
        golden, target: see dump_reader.find_dumps.
        rules: see mapping.
        by_name: whether tensors that no rule speaks of are compared with what has the same name.
        tolerance: largest relative L2 error for every dtype; by default by dtype (see verdict.TOLERANCES).

    Raises:
        PrecisionError: for a missing or damaged dump, or ranks that don't fit.
    """
    result = Comparison()
    golden_steps, target_steps = find_dumps(golden), find_dumps(target)
    if len(golden_steps) == len(target_steps) == 1:
        pairs = [(next(iter(target_steps)), next(iter(golden_steps.values())), next(iter(target_steps.values())))]
    else:
        common = [step for step in target_steps if step in golden_steps]
        for step in sorted(set(golden_steps) ^ set(target_steps)):
            result.notes.append(f"{step} is in one of the dumps only")
        if not common:
            raise PrecisionError(f"{golden} and {target} have no step in common")
        pairs = [(step, golden_steps[step], target_steps[step]) for step in common]
    for step, golden_ranks, target_ranks in pairs:
        goldens = {rank: read_dump(path) for rank, path in golden_ranks.items()}
        targets = {rank: read_dump(path) for rank, path in target_ranks.items()}
        if len(goldens) == 1:
            jobs = [(next(iter(goldens.values())), [targets[rank] for rank in sorted(targets)], "")]
        elif set(goldens) == set(targets):
            jobs = [(goldens[rank], [targets[rank]], f" rank{rank}") for rank in sorted(goldens)]
        else:
            raise PrecisionError(
                f"golden has ranks {sorted(goldens)} and target {sorted(targets)}: they must be the same, or golden one"
            )
        for one_golden, some_targets, label in jobs:
            _compare_dumps(one_golden, some_targets, list(rules), by_name, f"{step}{label}".strip(), tolerance, result)
    return result


def _compare_dumps(
    golden: Dump,
    targets: list[Dump],
    rules: list[Rule],
    by_name: bool,
    step: str,
    tolerance: float | None,
    result: Comparison,
) -> None:
    if golden.has_modules != targets[0].has_modules:
        # msprobe's L1 doesn't say in which module an API ran
        _forget_modules(golden)
        for target in targets:
            _forget_modules(target)
    for dump in (golden, *targets):
        if dump.unknown:
            result.notes.append(
                f"{len(dump.unknown)} records of {dump.path} have unknown names: {dump.unknown[0]}, ..."
            )
    partners = [_index(target) for target in targets]
    found: dict[Key, list[tuple[TensorEntry, Rule | None]]] = {}
    for key, entry in _index(golden).items():
        matches = [
            (name, rule) for name, rule in _target_names(key[0], rules, by_name) if (name, key[1]) in partners[0]
        ]
        # a tensor may have several counterparts by rules of its own, else the first that there is
        own = [match for match in matches if match[1] is not None and match[1].names_tensor]
        for name, rule in own or matches[:1]:
            found.setdefault((name, key[1]), []).append((entry, rule))
        if not matches and by_name:
            result.rows.append(_lonely(step, "", entry.name, entry))
    for key, entry in partners[0].items():
        if key not in found:
            if by_name:
                result.rows.append(_lonely(step, entry.name, "", entry))
            continue
        parts = [index[key] for index in partners if key in index]
        for golden_entry, rule in found[key]:
            if len(parts) != len(partners):
                row = _lonely(step, entry.name, golden_entry.name, entry)
                row.message = f"only {len(parts)} of {len(partners)} ranks have it"
            else:
                row = _compare_entries(step, parts, golden_entry, rule, tolerance)
            result.rows.append(row)
    order = {entry.name: number for number, entry in enumerate(partners[0].values())}
    result.rows.sort(key=lambda row: (row.step != step, order.get(row.target, len(order)) if row.step == step else 0))


def _index(dump: Dump) -> dict[Key, TensorEntry]:
    return {
        (tensor_name(address, entry.place), address.call): entry
        for _, address, entries in dump.records
        for entry in entries
    }


def _target_names(name: str, rules: list[Rule], by_name: bool) -> list[tuple[str, Rule | None]]:
    """Candidates, the most particular first: a tensor's own rule, its module's, the same name."""
    candidates: list[tuple[str, Rule | None]] = []
    for rule in rules:
        if rule.names_tensor:
            other = rule.target_of(name)
            if other is not None:
                candidates.append((other, rule))
    path, _, place = name.partition(":")
    for rule in rules:
        if not rule.names_tensor:
            other = rule.target_of(path)
            if other is not None:
                candidates.append((f"{other}:{place}", rule))
    return [*candidates, (name, None)] if by_name else candidates


def _compare_entries(
    step: str, parts: list[TensorEntry], golden: TensorEntry, rule: Rule | None, tolerance: float | None
) -> Row:
    target = parts[0]
    allowed = tolerance if tolerance is not None else verdict.tolerance(target.dtype, golden.dtype)
    row = Row(
        step,
        target.name,
        golden.name,
        str(target.address),
        target.address.call,
        target.place,
        target.dtype,
        target.shape,
        "",
        allowed=allowed,
    )
    row.statistics = {key: (target.meta.get(key), golden.meta.get(key)) for key in ("Max", "Min", "Mean", "Norm")}
    if all(part.file is not None for part in parts) and golden.file is not None:
        _judge_tensors(row, [part.load() for part in parts], golden.load(), rule)
    elif len(parts) > 1:
        row.verdict, row.message = verdict.UNKNOWN, "ranks are put together from whole tensors: dump with task tensor"
    elif rule is not None and (rule.target_slice or rule.golden_slice):
        row.verdict, row.message = verdict.UNKNOWN, "a part of a tensor has no statistics: dump with task tensor"
    elif math.prod(target.shape) != math.prod(golden.shape):
        row.verdict, row.message = verdict.DIFFERENT, f"golden's shape is {golden.shape}"
        row.error = math.inf
    else:
        row.verdict, row.error = verdict.judge_statistics(target.meta, golden.meta, allowed)
        row.message = "statistics only"
    return row


def _judge_tensors(row: Row, parts: list[Tensor], golden: Tensor, rule: Rule | None) -> None:
    if rule is not None:
        golden = rule.shape_golden(golden)
        parts = [rule.shape_target(part) for part in parts]
    joined, how = combine(parts, golden.shape, rule.sections if rule else None)
    pair = same_shape(joined, golden) if how else None
    if pair is None:
        row.verdict, row.error = verdict.DIFFERENT, math.inf
        row.message = f"shapes differ: {list(joined.shape)} and {list(golden.shape)}"
        return
    row.errors = tensor_errors(*pair)
    row.error = row.errors.relative_l2
    row.verdict = verdict.judge(row.errors, row.allowed)
    notes = [] if how == "one rank" else [how]
    if row.errors.misplaced:
        notes.append(f"{row.errors.misplaced} elements are NaN or infinite on one side only")
    row.message = "; ".join(notes)


def _lonely(step: str, target: str, golden: str, entry: TensorEntry) -> Row:
    side = "golden" if target else "target"
    return Row(
        step,
        target,
        golden,
        str(entry.address),
        entry.address.call,
        entry.place,
        entry.dtype,
        entry.shape,
        verdict.UNMATCHED,
        message=f"nothing of this name in {side}",
    )


def _forget_modules(dump: Dump) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for number, (record, address, entries) in enumerate(dump.records):
        if address.api:
            key = (address.api, address.direction)
            plain = Address("", 0, address.api, counts[key], address.direction)
            counts[key] += 1
            for entry in entries:
                entry.address = plain
            dump.records[number] = (record, plain, entries)
