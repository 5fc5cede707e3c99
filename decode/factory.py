"""An engine from a checkpoint: the one place that turns settings into a runner, a config and a fingerprint.

Owns the choice of the execution variant, of a thread count, and the fingerprint. Does not read the environment:
callers pass settings. torch is loaded only for the variants that it executes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

from decode.checkpoint.checkpoint import Checkpoint
from decode.checkpoint.vocabulary import checkpoint_vocabulary
from decode.engine.engine import Engine, EngineConfig, ModelRunner
from decode.engine.grammar import Grammars
from decode.errors import DecodeError
from decode.native.build import NativeUnavailable
from decode.native.runner import MAX_DRAFT_ROWS, NATIVE_VARIANTS, NativeModelRunner, native_execution
from decode.threads import choose_num_threads

log = logging.getLogger(__name__)

BLOCK_SIZE = 16
AUTO = "auto"
VARIANTS = (AUTO, *NATIVE_VARIANTS, "bf16", "fp32")
"""auto: q4 on a CPU where it can be compiled, otherwise bf16."""

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


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
    cache_dir: Path,
    prompt_lookup: bool = False,
    progress: Progress | None = None,
) -> Engine:
    """`max_model_len` 0 means the checkpoint's, `num_threads` 0 chooses. `cache_dir` keeps what the native variants
    make once: the compiled library and the repacked weights. With `prompt_lookup` the native variants draft tokens,
    the others never do. The variant that was chosen is in `engine.config`.

    Raises UnsupportedVariant, and ValueError naming a limit that makes no sense.
    """
    if variant not in VARIANTS:
        raise UnsupportedVariant(f"unknown variant {variant!r} (known: {', '.join(VARIANTS)})")
    limit = checkpoint.config.max_model_len
    limits = {
        "num_blocks": kv_cache_tokens // BLOCK_SIZE,
        "max_model_len": min(max_model_len or limit, limit),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": BLOCK_SIZE,
        "vocab_size": checkpoint.config.vocab_size,
    }
    num_threads = num_threads or choose_num_threads()
    grammars = Grammars(lambda: checkpoint_vocabulary(checkpoint))
    grammars.load()  # meanwhile the weights come

    def configured(chosen: str) -> EngineConfig:
        return EngineConfig(
            fingerprint=fingerprint(checkpoint, chosen, device),
            variant=chosen,
            architecture=checkpoint.config.family,
            max_draft_rows=MAX_DRAFT_ROWS if prompt_lookup and chosen in NATIVE_VARIANTS else 0,
            **limits,
        )

    if variant in NATIVE_VARIANTS or (variant == AUTO and device == "cpu"):
        config = configured(NATIVE_VARIANTS[0] if variant == AUTO else variant)
        try:
            runner = _native(checkpoint, config, device, num_threads, cache_dir, progress)
            return _engine(runner, config, grammars)
        except NativeUnavailable as error:
            if variant != AUTO:
                raise UnsupportedVariant(f"variant {variant}: {error}") from error
            log.warning("serving with torch in bf16, several times slower than natively: %s", error)
    config = configured("bf16" if variant == AUTO else variant)
    return _engine(_torch(checkpoint, config, device, num_threads, progress), config, grammars)


def _engine(runner: ModelRunner, config: EngineConfig, grammars: Grammars) -> Engine:
    """NOTE: building the grammars' tokenizer holds the interpreter lock: it is over before a worker serves."""
    wait([grammars.load()])
    return Engine(runner, config, grammars)


def _native(
    checkpoint: Checkpoint,
    config: EngineConfig,
    device: str,
    num_threads: int,
    cache_dir: Path,
    progress: Progress | None,
) -> ModelRunner:
    if device != "cpu":
        raise NativeUnavailable(f"it runs on the CPU, not on device {device!r}")
    return NativeModelRunner(
        checkpoint,
        variant=next(name for name in NATIVE_VARIANTS if name == config.variant),
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        cache_dir=cache_dir,
        content_hash=checkpoint.content_hash(),
        num_threads=num_threads,
        progress=progress,
    )


def _torch(
    checkpoint: Checkpoint, config: EngineConfig, device: str, num_threads: int, progress: Progress | None
) -> ModelRunner:
    from decode.oracle.runner import TorchModelRunner

    return TorchModelRunner(
        checkpoint,
        variant=config.variant,
        device=device,
        kv_cache_tokens=config.num_blocks * config.block_size,
        block_size=config.block_size,
        num_threads=num_threads,
        max_model_len=config.max_model_len,
        progress=progress,
    )


def fingerprint(checkpoint: Checkpoint, variant: str, device: str) -> str:
    """Names all that decides a token's bits: weights, configuration and how `variant` (not "auto") is executed."""
    native = next((name for name in NATIVE_VARIANTS if name == variant), None)
    execution = native_execution(native) if native else _torch_execution(variant, device)
    return f"{variant}-{hashlib.sha256(f'{checkpoint.content_hash()} {execution}'.encode()).hexdigest()[:12]}"


def _torch_execution(variant: str, device: str) -> str:
    """Layout, variant, library and kind of processor: torch takes other kernels on another one."""
    import torch

    from decode.oracle.runner import LAYOUT

    if torch.device(device).type != "cuda":
        processor = torch.backends.cpu.get_cpu_capability()
    elif torch.cuda.is_available():
        processor = torch.cuda.get_device_name(device)
    else:
        raise UnsupportedVariant(f"device {device!r}: torch finds no CUDA device")
    return f"{LAYOUT} {variant} {torch.device(device).type} {processor} {torch.__version__}"
