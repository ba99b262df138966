"""Build stand-ins for the CANN libraries that torch_npu links against, so that the released wheel can be imported.

Which functions are needed is read from the wheel itself: its undefined symbols, less what torch and the system
libraries define. Each becomes a C function that returns 0, but for those that stub_functions.c defines for real. C++
symbols need no C++: a mangled name is a valid C name. All of it goes into libascendcl.so, where torch_npu also looks
functions up by name; the other libraries are empty and link to it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from npu_tuned_model.errors import UserError

SOURCE = Path(__file__).with_name("stub_functions.c")
# CANN's own headers, inside the wheel
HEADERS = "include/third_party/acl/inc"
MAIN_LIBRARY = "libascendcl.so"
EMPTY_LIBRARIES = (
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libfmk_parser.so",
    "libascend_protobuf.so",
)
# Looked up by name at run time, so no symbol table lists them.
FUNCTIONS_BY_NAME = (
    "aclSetCompileopt",
    "aclrtCtxSetSysParamOpt",
    "aclrtDestroyStreamForce",
    "aclrtDeviceEnablePeerAccess",
    "aclrtSetCurrentContext",
    "aclrtSetDeviceSatMode",
    "aclrtSetOpExecuteTimeOut",
    "aclrtSetStreamFailureMode",
    "aclrtSetStreamOverflowSwitch",
    "aclrtSetSysParamOpt",
    "aclrtSynchronizeDevice",
    "aclrtSynchronizeDeviceWithTimeout",
    "aclrtSynchronizeEvent",
    "aclrtSynchronizeStream",
    "aclrtSynchronizeStreamWithTimeout",
)
# torchair asks whether the graph engine knows an operator (ge::OperatorFactory::IsExistOp): yes, it does.
OPERATOR_QUESTION = re.compile(r"\w*OperatorFactory\w*IsExistOp\w*")


def build_stub_libraries(torch_npu: Path, torch: Path, cache: Path) -> Path:
    """The folder with the stub libraries for a torch_npu wheel, built when it isn't there yet.

    Args:
        torch_npu: package folder of the wheel (the one that holds lib/libtorch_npu.so).
        torch: package folder of the torch it runs with.
        cache: folder under which the result is kept, by content of the C source generated.

    Raises:
        UserError: no C compiler, no nm, or one of the two fails.
    """
    for tool in ("nm", "gcc"):
        if shutil.which(tool) is None:
            raise UserError(
                f"building the stub CANN libraries needs {tool} and it was not found; install gcc and binutils "
                "(Debian, Ubuntu: apt-get install gcc)"
            )
    source = stub_source(needed_symbols(torch_npu, torch))
    everything = SOURCE.read_text(encoding="utf-8") + source
    folder = cache / ("stubs-" + hashlib.sha256(everything.encode()).hexdigest()[:16])
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        _make_cann_folders(Path(temporary))
        _compile(source, torch_npu / HEADERS, Path(temporary))
        try:
            # two processes may build at once; whoever renames first has the folder, and both are the same
            shutil.copytree(temporary, f"{temporary}.done")
            os.rename(f"{temporary}.done", folder)
        except OSError:
            shutil.rmtree(f"{temporary}.done", ignore_errors=True)
            if not folder.is_dir():
                raise
    return folder


def needed_symbols(torch_npu: Path, torch: Path) -> list[str]:
    """Functions that the wheel's libraries use and neither they nor torch nor the system libraries define."""
    wheel = [
        *sorted((torch_npu / "lib").glob("*.so")),
        *sorted(torch_npu.glob("_C*.so")),
        *sorted((torch_npu / "dynamo" / "torchair" / "core").glob("*.so")),
    ]
    # lib*_atb.so is loaded only when its own operators are used, and needs a library of its own
    wheel = [library for library in wheel if not library.name.endswith("_atb.so")]
    undefined = _symbols("--undefined-only", wheel, kinds="U")
    defined = _symbols("--defined-only", [*wheel, *sorted((torch / "lib").glob("*.so*"))])
    # the system's libraries version their symbols (malloc@GLIBC_2.2.5), CANN's don't
    return sorted(name for name in undefined - defined if "@" not in name and not name.startswith(("Py", "_Py")))


def stub_source(symbols: list[str]) -> str:
    """C source of a function that returns 0 for each symbol that stub_functions.c doesn't define."""
    written = SOURCE.read_text(encoding="utf-8")
    real = set(re.findall(r"^[\w *]+?(\w+)\([^;]*?\) \{", written, flags=re.MULTILINE))
    lines = []
    for name in sorted({*symbols, *FUNCTIONS_BY_NAME} - real):
        answer = int(OPERATOR_QUESTION.fullmatch(name) is not None)
        lines.append(f"long {name}(void) {{ return {answer}; }}")
    return "\n".join(lines) + "\n"


def _symbols(which: str, libraries: list[Path], kinds: str = "") -> set[str]:
    output = _run(["nm", "-D", "--no-demangle", which, *map(str, libraries)])
    rows = (line.split()[-2:] for line in output.splitlines())
    return {row[1] for row in rows if len(row) == 2 and len(row[0]) == 1 and (not kinds or row[0] in kinds)}


def _make_cann_folders(folder: Path) -> None:
    # torch_npu checks that ASCEND_HOME_PATH looks like an installation
    for name in ("runtime", "compiler", "lib64"):
        (folder / name).mkdir()


def _compile(source: str, headers: Path, folder: Path) -> None:
    stubs = folder / "stubs.c"
    stubs.write_text(source, encoding="utf-8")
    shared = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-std=gnu11",
        "-Wno-deprecated-declarations",
        "-Wno-builtin-declaration-mismatch",
    ]
    main = [f"-I{headers}", f"-Wl,-soname,{MAIN_LIBRARY}", "-o", str(folder / MAIN_LIBRARY), str(SOURCE), str(stubs)]
    _run([*shared, *main])
    for name in EMPTY_LIBRARIES:
        link = [f"-L{folder}", "-Wl,--no-as-needed", "-lascendcl"]
        _run([*shared, f"-Wl,-soname,{name}", "-o", str(folder / name), "-xc", os.devnull, "-xnone", *link])


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        error = (result.stderr.strip().splitlines() or ["no message"])[0]
        raise UserError(f"building the stub CANN libraries: {command[0]} failed: {error}")
    return result.stdout
