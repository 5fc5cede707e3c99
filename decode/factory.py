"""An engine from a checkpoint: the one place that turns settings into a runner, a config and a fingerprint.

Owns the choice of a thread count and the fingerprint. Refuses to read the environment: callers pass settings.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch

from decode.checkpoint import Checkpoint
from decode.engine import Engine, EngineConfig
from decode.errors import DecodeError
from decode.model_runner import LAYOUT, VARIANTS, TorchModelRunner
from decode.weights import Progress

BLOCK_SIZE = 16


class UnsupportedVariant(DecodeError):
    """No such execution variant, or this machine cannot run it."""


def load_engine(
    checkpoint: Checkpoint,
    *,
    variant: str,
    device: str,
    kv_cache_tokens: int,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    num_threads: int,
    progress: Progress | None = None,
) -> Engine:
    """`max_model_len` 0 means the checkpoint's, `num_threads` 0 chooses. `progress` is told of every tensor loaded.

    Raises UnsupportedVariant, and ValueError naming a limit that makes no sense.
    """
    if variant not in VARIANTS:
        raise UnsupportedVariant(f"unknown variant {variant!r} (known: {', '.join(VARIANTS)})")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedVariant(f"device {device!r}: torch finds no CUDA device")
    limit = checkpoint.config.max_model_len
    config = EngineConfig(
        num_blocks=kv_cache_tokens // BLOCK_SIZE,
        max_model_len=min(max_model_len or limit, limit),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        fingerprint=fingerprint(checkpoint, variant, device),
        block_size=BLOCK_SIZE,
        vocab_size=checkpoint.config.vocab_size,
    )
    runner = TorchModelRunner(
        checkpoint,
        variant=variant,
        device=device,
        kv_cache_tokens=kv_cache_tokens,
        block_size=BLOCK_SIZE,
        num_threads=num_threads or choose_num_threads(),
        max_model_len=config.max_model_len,
        progress=progress,
    )
    return Engine(runner, config)


def fingerprint(checkpoint: Checkpoint, variant: str, device: str) -> str:
    """Names all that decides a token's bits: weights, configuration, layout, variant, library, kind of processor."""
    kind = torch.device(device).type
    processor = torch.cuda.get_device_name(device) if kind == "cuda" else torch.backends.cpu.get_cpu_capability()
    parts = (checkpoint.content_hash(), LAYOUT, variant, kind, processor, torch.__version__)
    return f"{variant}-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"


def choose_num_threads(system: Path = Path("/sys")) -> int:
    """Physical cores that this process may use, and no more than its cgroup's processor quota.

    Threads of one core share its vector units, and threads beyond the quota are stopped while the others wait.
    """
    processors = os.sched_getaffinity(0)
    siblings = (system / f"devices/system/cpu/cpu{n}/topology/thread_siblings_list" for n in processors)
    cores = {path.read_text().strip() if path.exists() else str(path) for path in siblings}
    quota_file = system / "fs/cgroup/cpu.max"
    quota, _, period = quota_file.read_text().partition(" ") if quota_file.exists() else ("max", "", "")
    limit = len(cores) if quota == "max" else int(quota) // int(period)
    return max(1, min(len(cores), limit))
