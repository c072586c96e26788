"""The interposer alone: its table of functions, how programs find it, what it refuses, what a call costs."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpucr_hpc.engine.nccl.cut import Cut
from tests.nccl import rig
from tests.nccl.loaded import FAKE, OURS, program, python, rank, ready

LIBRARY = rig.BUILD / "libgpucr_nccl.so"


def test_the_table_is_what_the_list_gives() -> None:
    subprocess.run([sys.executable, str(rig.SOURCES / "api.py"), "--check"], check=True)


def test_every_function_with_a_communicator_is_ours() -> None:
    """By both of its names; nothing else of ours is visible but dlsym."""
    text = (rig.SOURCES / "api.txt").read_text()
    names = set(re.findall(r"(nccl\w+)\([^)]*ncclComm_t", text))
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1] for line in listed.splitlines()}
    assert len(names) > 30
    assert names | {f"p{name}" for name in names} <= exported
    others = {name for name in exported if not name.startswith(("nccl", "pnccl"))}
    assert others == {
        *("dlsym", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle", "cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2"),
        *("cuMemExportToShareableHandle", "cuMemImportFromShareableHandle", "cudaGetDriverEntryPointByVersion"),
        *("cudaStreamBeginCapture", "cudaStreamEndCapture", "cuStreamBeginCapture_v2", "cuStreamEndCapture"),
        "cuStreamBeginCaptureToGraph",
    }


def test_a_library_that_the_program_loads_is_caught(tmp_path: Path) -> None:
    """dlopen and dlsym, RTLD_LOCAL: the program has our handle and can be cut."""
    child = program(
        tmp_path, f"assert magic == {OURS}\nprint('ready', flush=True)\nsys.stdin.readline()\nassert reduce() == 0"
    )
    ready(child)

    async def once() -> None:
        ranks = await rank(tmp_path, child.pid)
        cut = Cut("1", [ranks])
        await cut.take(5)
        await cut.tear_down(5)
        assert "fake-nccl-peer" not in Path(f"/proc/{child.pid}/maps").read_text()
        await cut.bring_back(5)
        await ranks.close()

    asyncio.run(once())
    assert child.communicate("\n", 20) == ("", "")
    assert child.returncode == 0


def test_a_library_that_a_plugin_brings_is_caught(tmp_path: Path) -> None:
    """PyTorch's way: a module, loaded RTLD_LOCAL, is linked to NCCL, which nobody else sees then."""
    source, module = tmp_path / "module.c", tmp_path / "module.so"
    source.write_text("int ncclGetVersion(int *);\nint version(int *v) { return ncclGetVersion(v); }\n")
    command = ["gcc", "-shared", "-fPIC", str(source), "-o", str(module), f"-Wl,-rpath,{FAKE}"]
    subprocess.run([*command, f"-L{FAKE}", "-l:libnccl.so.2"], check=True)
    code = f"import ctypes; v = ctypes.c_int(); l = ctypes.CDLL('{module}', os.RTLD_LOCAL | os.RTLD_NOW); "
    code = f"import os; {code} assert l.version(ctypes.byref(v)) == 0 and v.value > 0"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=rig.environment(tmp_path, "plain"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, "") == (done.returncode, done.stderr)


RUNTIME = """
#include <dlfcn.h>
#include <string.h>
int cudaIpcGetMemHandle(char *handle, void *memory) { memset(handle, 2, 64); return memory ? 0 : 1; }
int cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned v, unsigned long long f, int *status)
{
    return (*found = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), name)) ? 0 : 1;
}
"""
MODULE = """
int cudaIpcGetMemHandle(char *, void *), cudaGetDriverEntryPointByVersion(const char *, void **, unsigned,
    unsigned long long, int *);
int tensor(void) { char handle[64]; return cudaIpcGetMemHandle(handle, handle) ? 1 : handle[0] != 2; }
int symmetric(void)
{
    int (*call)(int *, unsigned long, int, unsigned long), handle = 0, status;
    if (cudaGetDriverEntryPointByVersion("cuMemExportToShareableHandle", (void **)&call, 13000, 0, &status)) return 1;
    return call(&handle, 1, 1, 0) ? 1 : handle != -1;
}
"""


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("assert module.tensor() == 0", "cudaIpcGetMemHandle"),
        ("assert module.symmetric() == 0", "cuMemExportToShareableHandle"),
        ("assert cuda.cuIpcGetMemHandle(ctypes.create_string_buffer(64), 1) == 0", "cuIpcGetMemHandle"),
    ],
)
def test_memory_that_a_program_shares_itself_is_said(tmp_path: Path, call: str, said: str) -> None:
    """By the runtime, as multiprocessing's CUDA tensors; by the driver, as symmetric memory; no communicator is needed.
    The call does what it does."""
    for name, text, more in (
        ("libcudart.so.13", RUNTIME, ["-ldl"]),
        ("module.so", MODULE, [f"-L{tmp_path}", "-l:libcudart.so.13", f"-Wl,-rpath,{tmp_path}"]),
    ):
        (tmp_path / f"{name}.c").write_text(text)
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(tmp_path / f"{name}.c")]
        subprocess.run([*command, "-o", str(tmp_path / name), *more], check=True)
    code = f"""
        import ctypes, sys
        cuda, module = ctypes.CDLL("{FAKE}/libcuda.so.1"), ctypes.CDLL("{tmp_path}/module.so")
        {call}
        print("ready", flush=True)
        sys.stdin.readline()
    """
    child = python(tmp_path, textwrap.dedent(code))
    ready(child)

    async def once() -> None:
        ranks = await rank(tmp_path, child.pid)
        [report] = await Cut("1", [ranks]).ask()
        assert (said in report.shares, report.unprotected) == (True, "")
        await ranks.close()

    asyncio.run(once())
    assert child.communicate("\n", 20)[1].count("is not protected") == 1


def test_dlsym_answers_its_caller(tmp_path: Path) -> None:
    """RTLD_NEXT means what comes after the library that asks, not after ours."""
    source = tmp_path / "next.c"
    source.write_text(
        "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdlib.h>\n"
        "int marker(void) { return 7; }\nvoid *next_of(const char *n) { return dlsym(RTLD_NEXT, n); }\n"
    )
    library = tmp_path / "libnext.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    code = (
        f"import ctypes; l = ctypes.CDLL('{library}', ctypes.RTLD_GLOBAL); l.next_of.restype = ctypes.c_void_p;"
        "assert l.next_of(b'marker') is None; assert l.next_of(b'no_such_symbol') is None;"
        "assert l.marker() == 7"
    )
    subprocess.run([sys.executable, "-c", code], env=rig.environment(tmp_path, "plain"), check=True)


def test_an_unknown_nccl_passes_through_and_says_so_once(tmp_path: Path) -> None:
    """A version with a function that we do not know gets its own handles; the process is not protected."""
    extra = tmp_path / "extra.c"
    extra.write_text(
        f'#include "{rig.SOURCES}/fake/nccl.h"\nAPI int ncclCommTeleport(ncclComm_t c) {{ return c ? 0 : 1; }}\n'
    )
    library = tmp_path / "libnccl.so.2"
    subprocess.run(
        [
            "gcc",
            "-shared",
            "-fPIC",
            "-pthread",
            str(extra),
            *map(str, rig.FAKE_NCCL),
            str(FAKE / "libcuda.so.1"),
            "-o",
            str(library),
        ],
        check=True,
    )
    child = program(
        tmp_path,
        f"assert magic != {OURS}\nassert reduce() == 0\nassert nccl.ncclCommTeleport(comm) == 0",
        library=library,
    )
    _, said = child.communicate(timeout=20)
    assert child.returncode == 0
    assert said.count("is not protected") == 1
    assert "ncclCommTeleport" in said


def test_a_call_costs_little(tmp_path: Path) -> None:
    """Less than 50 ns more than NCCL's own; scripts/measure_nccl measures it properly."""
    subprocess.run(["make", "-s", "-C", str(rig.SOURCES), "bench"], check=True)
    script = str(rig.ROOT / "scripts/measure_nccl")
    done = subprocess.run(
        [sys.executable, script, "--rounds", "5", "--calls", "500000", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 0 < json.loads(done.stdout)["added_ns"] < 50


def test_a_child_of_fork_is_left_alone(tmp_path: Path) -> None:
    code = "pid = os.fork()\nif pid == 0: os._exit(0)\nassert os.waitpid(pid, 0)[1] == 0\nassert reduce() == 0"
    child = program(tmp_path, code)
    assert child.communicate(timeout=20) == ("", "")
    assert child.returncode == 0
