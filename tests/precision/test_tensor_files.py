"""Whole tensors on disk: each content once, whatever its dtype, in bounded memory, and what a full disk does."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from modules import Net, records

from precision import PrecisionDebugger, PrecisionError
from precision.dump import tensor_files
from precision.dump.tensor_files import TensorFiles


def debugger(folder: Path, **options: Any) -> PrecisionDebugger:
    return PrecisionDebugger(dump_path=folder, quiet=True, task="tensor", **options)


def load(folder: Path, name: str, step: int = 0) -> torch.Tensor:
    return torch.load(folder / f"step{step}/rank/dump_tensor_data/{name}.pt", weights_only=True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4, dtype=torch.bfloat16),
        torch.randn(3, 4).to(torch.float8_e4m3fn),
        torch.tensor([1, -2]),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        torch.empty(0, 3),
        torch.tensor(2.5),
        torch.randn(6, 4)[::2, 1:],
        torch.randn(3, 4).t(),
        torch.ones(1).expand(5),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{list(tensor.shape)}-{tensor.layout}".replace("torch.", ""),
)
@pytest.mark.parametrize("compress", [False, True])
def test_every_kind_of_tensor_comes_back(tensor: torch.Tensor, compress: bool, tmp_path: Path) -> None:
    files = TensorFiles(compress=compress)
    with_checksums = (
        torch.serialization.get_crc32_options() if hasattr(torch.serialization, "get_crc32_options") else None
    )
    files.save(tensor, tmp_path / "a.pt")
    files.finish()
    assert files.failure is None
    if with_checksums is not None:
        # what other callers of torch.save get is as it was
        assert torch.serialization.get_crc32_options() is with_checksums
    expected = tensor.coalesce().values() if tensor.is_sparse else tensor
    read = torch.load(tmp_path / "a.pt", weights_only=True)
    assert read.dtype == expected.dtype
    assert torch.equal(
        read.float() if read.element_size() == 1 else read,
        expected.float() if expected.element_size() == 1 else expected,
    )
    # a view doesn't bring its whole storage along
    assert read.untyped_storage().nbytes() <= max(expected.numel() * expected.element_size(), 1)


def test_the_values_are_those_at_the_time_of_the_call(tmp_path: Path) -> None:
    tool = debugger(tmp_path)
    x = torch.zeros(1000)
    with tool.start():
        for _ in range(50):
            x.add_(1)
    for number in (0, 25, 49):
        assert load(tmp_path, f"Tensor.add_.{number}.forward.input.0").max() == number
        assert load(tmp_path, f"Tensor.add_.{number}.forward.output.0").max() == number + 1


def test_equal_contents_are_written_once_and_keep_their_names(tmp_path: Path) -> None:
    tool, model = debugger(tmp_path, level="mix"), Net()
    for _ in range(2):
        with tool.start(model):
            model(torch.ones(2, 4))
        tool.step()
    folder = tmp_path / "step0/rank/dump_tensor_data"
    weight = (folder / "Functional.linear.0.forward.input.1.pt").stat()
    assert (folder / "Module.block.fc.Linear.forward.0.parameters.weight.pt").stat().st_ino == weight.st_ino
    later = tmp_path / "step1/rank/dump_tensor_data" / "Functional.linear.0.forward.input.1.pt"
    assert later.stat().st_ino == weight.st_ino
    for step in range(2):
        for record in records(tmp_path, step).values():
            for entry in (*record["input_args"], *record["output"]):
                if "data_name" in entry:
                    assert list(load(tmp_path, entry["data_name"][:-3], step).shape) == entry["shape"]
    with torch.no_grad():
        model.head.weight.mul_(2)
    with tool.start(model):
        model(torch.ones(2, 4))
    changed = load(tmp_path, "Functional.linear.1.forward.input.1", step=2)
    assert torch.equal(changed, model.head.weight)


def test_compressed_files_are_smaller_and_the_same_tensors(tmp_path: Path) -> None:
    model, weight = torch.nn.Linear(256, 256, dtype=torch.bfloat16), "Functional.linear.0.forward.input.1"
    sizes = []
    for compress in (False, True):
        folder = tmp_path / str(compress)
        with debugger(folder, level="mix", compress=compress).start(model):
            model(torch.ones(2, 256, dtype=torch.bfloat16))
        assert torch.equal(load(folder, weight), model.weight)
        files = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*.pt")}
        sizes.append(sum(files.values()))
    assert sizes[1] < 0.85 * sizes[0]


@pytest.mark.skipif(not hasattr(torch.serialization, "get_crc32_options"), reason="this torch always makes checksums")
@pytest.mark.parametrize("direct_bytes", [1, 1 << 20])
def test_compressing_works_for_a_user_who_wants_no_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_bytes: int
) -> None:
    monkeypatch.setattr(tensor_files, "DIRECT_BYTES", direct_bytes)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        files = TensorFiles(compress=True)
        files.save(torch.ones(3), tmp_path / "a.pt")
        files.finish()
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(before)
    assert torch.equal(torch.load(tmp_path / "a.pt"), torch.ones(3))


def test_a_disk_that_fills_while_compressing_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: Any, target: Any, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_files.shutil, "copyfileobj", full)
    files = TensorFiles(compress=True)
    files.save(torch.ones(3), tmp_path / "a.pt")
    files.finish()
    assert "No space left on device" in str(files.failure)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(torch.serialization, "get_crc32_options"), reason="this torch always makes checksums")
@pytest.mark.parametrize("direct_bytes", [1, 1 << 20])
def test_no_time_goes_into_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct_bytes: int) -> None:
    seen = []
    save = torch.save
    monkeypatch.setattr(tensor_files, "DIRECT_BYTES", direct_bytes)
    monkeypatch.setattr(
        torch, "save", lambda *given: (seen.append(torch.serialization.get_crc32_options()), save(*given))
    )
    files = TensorFiles()
    files.save(torch.ones(3), tmp_path / "a.pt")
    files.finish()
    assert seen == [False]
    assert torch.serialization.get_crc32_options()


def test_memory_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MEMORY_LIMIT", 1 << 20)
    peak = 0
    files = TensorFiles()
    write = TensorFiles._write

    def watched(self: TensorFiles, tensor: torch.Tensor, path: Path) -> None:
        nonlocal peak
        peak = max(peak, self._waiting_bytes)
        write(self, tensor, path)

    monkeypatch.setattr(TensorFiles, "_write", watched)
    for number in range(40):
        files.save(torch.full((1 << 16,), float(number)), tmp_path / f"{number}.pt")
    files.finish()
    assert files.written == 40
    assert 0 < peak <= 1 << 20


def fill_the_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    save, count = torch.save, 0

    def limited(value: Any, path: Any) -> None:
        nonlocal count
        count += 1
        if count > after:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        save(value, path)

    monkeypatch.setattr(torch, "save", limited)


def test_a_full_disk_stops_with_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_the_disk(monkeypatch, after=5)
    tool, model = debugger(tmp_path, level="mix"), Net()

    def run() -> None:
        with tool.start(model):
            for _ in range(200):
                model(torch.ones(2, 4))

    message = r"could not be written \(No space left on device; \d+ MB free\); make room"
    with pytest.raises(PrecisionError, match=message):
        run()
    check_what_is_left(tmp_path, 5)


def test_a_full_disk_can_be_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_the_disk(monkeypatch, after=5)
    tool, model = debugger(tmp_path, level="mix", on_write_error="continue"), Net()
    with tool.start(model):
        for _ in range(3):
            model(torch.ones(2, 4))
    check_what_is_left(tmp_path, 5)
    # the statistics are complete
    assert records(tmp_path)["Module.head.Linear.forward.2"]["output"][0]["Max"] is not None
    assert "tensors are missing" in str(tool.summary)


def check_what_is_left(folder: Path, written: int) -> None:
    """Every file that the records name is whole, and no half one lies about."""
    files = list((folder / "step0/rank/dump_tensor_data").iterdir())
    assert len({path.stat().st_ino for path in files}) == written
    names = {path.name for path in files}
    assert all(name.endswith(".pt") and not name.startswith(".") for name in names)
    entries = [
        entry
        for record in records(folder).values()
        for entry in (*record.get("input_args", []), *record.get("output", []))
        if isinstance(entry, dict) and "data_name" in entry
    ]
    assert entries
    for entry in entries:
        assert entry["data_name"] in names
        load(folder, entry["data_name"][:-3])
