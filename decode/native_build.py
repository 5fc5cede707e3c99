"""Compiles the native decoder once for this machine and keeps the library in a cache folder.

Owns the compiler command and the cache key: sources, flags, compiler version and processor features. Refuses to know
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

SOURCES = Path(__file__).parent / "native"
_COMPILERS = ("g++", "c++", "clang++")
_FLAGS = (
    "-O3",
    "-std=c++20",
    "-ffp-contract=off",  # one rounding per written operation: the same bits from every instruction set
    "-fno-math-errno",
    "-fwrapv",
    "-fPIC",
    "-shared",
    "-pthread",
    "-w",
)


class NativeUnavailable(RuntimeError):
    """The native decoder cannot serve here; the message says why and what would help."""


def build_native(cache_dir: Path, *, portable: bool = False, compilers: tuple[str, ...] = _COMPILERS) -> Path:
    """The compiled library, made now if it is not in `cache_dir`. `portable` leaves out the AVX-512 kernels.

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
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / "native.so"
        result = subprocess.run([compiler, *flags, *sources, "-o", str(output)], capture_output=True, text=True)
        if result.returncode:
            raise NativeUnavailable(f"{compiler} cannot compile the native decoder: {result.stderr[-2000:]}")
        os.replace(output, library)


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
