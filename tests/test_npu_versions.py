"""The tables of releases that fit together: reading versions, and what the vendor's own table says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_tuned_model.npu_versions import (
    Span,
    cann_for,
    first_three,
    newest_torch_npu_for,
    oldest_driver_for,
    parse,
    python_for,
)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("8.0.RC2", "8.0.RC3"),
        ("8.0.RC3", "8.0.0"),
        ("8.0.RC3.alpha003", "8.0.0"),
        ("8.3.RC1", "8.5.0"),
        ("9.1.0", "9.10.0"),
        ("25.0.rc1.1", "25.2.0"),
        ("2.1.0", "2.1.0.post12"),
        ("2.1.0.post8", "2.1.0.post12"),
        ("2.12.0rc1", "2.12.0"),
    ],
)
def test_versions_are_ordered_as_they_were_released(older: str, newer: str) -> None:
    first, second = parse(older), parse(newer)
    assert first is not None
    assert second is not None
    assert first < second


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=12))
def test_any_text_is_a_version_or_none(text: str) -> None:
    parsed = parse(text)
    assert parsed is None or text.strip().lstrip("vV")[:1].isdigit()


@pytest.mark.parametrize("build", ["2.1.0", "2.1.0+cpu", "2.1.0.post17", "2.1.0.post17+git1234"])
def test_torch_and_torch_npu_are_compared_by_three_parts(build: str) -> None:
    assert first_three(build) == "2.1.0"


@pytest.mark.parametrize(
    ("torch_npu", "cann"),
    [
        ("2.1.0.post17", Span("8.0.RC2", "8.3.RC1")),
        ("2.9.0.post2", Span("8.1.RC1", "9.2.0")),
        ("2.13.0", Span("8.5.0", "9.2.0")),
        ("2.2.0", Span("8.0.RC1", "8.0.RC1")),
        # patch releases that the table doesn't list belong to the listed one before them
        ("2.9.0.post4", Span("8.1.RC1", "9.2.0")),
        ("2.1.0.post18", Span("8.0.RC2", "8.3.RC1")),
        # a release candidate comes before the first listed release
        ("2.12.0rc1", Span("8.5.0", "9.2.0")),
    ],
)
def test_cann_for_a_torch_npu(torch_npu: str, cann: Span) -> None:
    assert cann_for(torch_npu) == cann


@pytest.mark.parametrize("torch_npu", ["1.11.0", "3.0.0", "", "unknown"])
def test_what_the_table_does_not_know_is_none(torch_npu: str) -> None:
    assert cann_for(torch_npu) is None
    assert newest_torch_npu_for(torch_npu) is None
    assert python_for(torch_npu) is None
    assert oldest_driver_for(torch_npu) is None


def test_newest_torch_npu_is_newest_by_version_not_by_text() -> None:
    assert newest_torch_npu_for("2.1.0+cpu") == "2.1.0.post17"
    assert newest_torch_npu_for("2.7.1") == "2.7.1.post11"


@pytest.mark.parametrize(
    ("found", "inside"),
    [("8.1.RC1", True), ("8.3.RC2", True), ("8.0.RC2", True), ("8.0.RC1", False), ("8.5.0", False), ("?", None)],
)
def test_a_span_holds_its_ends_and_their_patches(found: str, inside: bool | None) -> None:
    assert Span("8.0.RC2", "8.3.RC1").holds(found) is inside


def test_python_and_driver() -> None:
    assert python_for("2.1.0") == Span("3.8", "3.11")
    assert python_for("2.13.0+cpu") == Span("3.10", "3.14")
    assert oldest_driver_for("9.1.1") == "25.2.0"
    assert oldest_driver_for("8.5.0") == "25.0.RC1"
