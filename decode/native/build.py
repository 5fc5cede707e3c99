"""Compiles the native decoder once for this machine and keeps the library in a cache folder.

Owns the compiler command and the cache key: sources, flags, compiler version and processor features. Does not know
what the library does. Without a compiler it raises `NativeUnavailable`; the caller then uses torch and says so.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent / "cpp"
COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    "-O3",
    "-std=c++20",
    "-ffp-contract=off",  # one rounding per written operation: the same bits from every instruction set
    "-fno-math-errno",
    "-fwrapv",
    "-fPIC",
    "-pthread",
    "-w",
)


class NativeUnavailable(RuntimeError):
    """The native decoder cannot serve here; the message says why and what would help."""


def build_native(cache_dir: Path, *, portable: bool = False, compilers: tuple[str, ...] = COMPILERS) -> Path:
    """The compiled library, made now if it is not in `cache_dir`. `portable` leaves out the AVX-512 and AVX2 kernels.

    Takes some seconds the first time. Safe against several processes at once: the file appears whole or not at all.
    Raises NativeUnavailable: no compiler, or it fails (with the end of its output).
    """
    compiler = next((path for name in compilers if (path := shutil.which(name))), None)
    if compiler is None:
        raise NativeUnavailable(
            f"no C++ compiler found (looked for {', '.join(compilers)}); install one, such as g++"
        )
    tune = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    flags = [*_FLAGS, tune, *(["-DTOKENFERRY_PORTABLE"] if portable else [])]
    library = cache_dir / f"native-{_key(compiler, flags)}.so"
    if not library.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        _compile(compiler, flags, library)
    return library


def _compile(compiler: str, flags: list[str], library: Path) -> None:
    """Every source by its own compiler process, all at once, then one link."""
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / "native.so"
        objects = {str(source): str(Path(folder) / f"{source.stem}.o") for source in sorted(SOURCES.glob("*.cpp"))}
        _run_all([[compiler, *flags, "-c", source, "-o", made] for source, made in objects.items()])
        _run_all([[compiler, *flags, "-shared", *objects.values(), "-o", str(output)]])
        os.replace(output, library)


def _run_all(commands: list[list[str]]) -> None:
    """Raises NativeUnavailable with the end of the output of the first that fails, when all have ended."""
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate()[1] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            raise NativeUnavailable(f"{commands[0][0]} cannot compile the native decoder: {output[-2000:]}")


def _key(compiler: str, flags: list[str]) -> str:
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.hpp")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    for text in (*flags, version, platform.machine(), _cpu_features()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    """What -march=native depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    wanted = ("flags", "Features", "model name", "cpu family", "model\t")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
