"""What a subprocess gets to see an NPU, and what is said when it can't be had."""

from __future__ import annotations

import sys

import pytest

from npu_tuned_model.errors import UserError
from npu_tuned_model.simulate import wheel
from npu_tuned_model.simulate.environment import npu_environment, run_on_npu
from npu_tuned_model.simulate.stub_libraries import build_stub_libraries, stub_source


def test_chip_devices_and_memory_are_those_asked_for():
    script = (
        "import torch, torch_npu as n; print(n.npu.device_count(), n.npu.get_device_name(), torch.npu.mem_get_info())"
    )
    result = run_on_npu([sys.executable, "-c", script], soc="Ascend910_9391", devices=3, capture=True)
    assert result.stdout.split(maxsplit=2)[:2] == ["3", "Ascend910_9391"], result.stderr
    assert "(68719476736, 68719476736)" in result.stdout


def test_a_real_cann_is_kept_out():
    base = {"ASCEND_TOOLKIT_HOME": "/usr/local/Ascend", "CANN_VERSION": "8", "PATH": "/bin"}
    environment = npu_environment(base=base)
    assert environment["PATH"] == "/bin"
    assert not {"ASCEND_TOOLKIT_HOME", "CANN_VERSION"} & set(environment)
    assert environment["ASCEND_HOME_PATH"] in environment["LD_LIBRARY_PATH"]


@pytest.mark.parametrize("devices", [0, 65])
def test_a_number_of_devices_out_of_range_is_refused(devices):
    with pytest.raises(UserError, match=f"{devices} simulated devices; there can be 1 to 64"):
        npu_environment(devices=devices)


def test_a_wheel_that_is_not_there_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(wheel, "version", lambda name: "0.0.1")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match=r"torch_npu==0\.0\.1 is needed for Python .* could not be installed") as error:
        wheel.torch_npu_folder(tmp_path)
    assert "\n" not in str(error.value)
    assert not any(tmp_path.iterdir())


def test_a_missing_compiler_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs nm and it was not found; install gcc and binutils"):
        build_stub_libraries(tmp_path, tmp_path, tmp_path / "cache")


def test_only_what_the_c_file_lacks_is_generated():
    source = stub_source(["aclrtMalloc", "aclrtNew", "_ZN2ge15OperatorFactory9IsExistOpEPKc"])
    assert "aclrtMalloc(" not in source
    assert "long aclrtNew(void) { return 0; }" in source
    assert "IsExistOpEPKc(void) { return 1; }" in source
