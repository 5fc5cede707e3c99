"""The engine that a worker's settings ask for: the scripted one, or a checkpoint's after preflight.

Owns that choice, what may be wrong with it (`CANNOT_SERVE`), and the lines that say how far loading is.
Heavy modules are imported when they are needed, so that only a worker with a real model loads torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from decode.checkpoint.names import SCRIPTED, ModelError, resolve, served_name
from decode.errors import DecodeError
from tasks.process.preflight import SCRIPTED_MB, PreflightRefused, Thresholds, memory_needed_mb, read_machine, require
from tasks.process.settings import SettingsError, WorkerSettings

if TYPE_CHECKING:
    from decode.engine.engine import Engine

log = logging.getLogger(__name__)

QUIET_S = 2.0
"""Loading that takes less than this logs no progress."""
CANNOT_SERVE = (SettingsError, ModelError, DecodeError, PreflightRefused)
"""What `load_for` raises when trying again would not help."""


def model_name(settings: WorkerSettings) -> str:
    """The name by which clients ask for the model."""
    return SCRIPTED if settings.model == SCRIPTED else served_name(settings.model)


def load_for(settings: WorkerSettings, environ: Mapping[str, str]) -> Engine:
    """`environ` holds preflight's thresholds. Raises one of CANNOT_SERVE."""
    started_s = time.monotonic()
    engine = _scripted(settings, environ) if settings.model == SCRIPTED else _from_checkpoint(settings, environ)
    log.info("loaded %s in %.1f s", settings.model, time.monotonic() - started_s)
    return engine


def _scripted(settings: WorkerSettings, environ: Mapping[str, str]) -> Engine:
    from decode.scripted import SCRIPTED_MAX_MODEL_LEN, ScriptedCosts, scripted_engine

    require(read_machine(), Thresholds.from_env(environ, SCRIPTED_MB))
    return scripted_engine(
        kv_cache_tokens=settings.kv_cache_tokens,
        max_model_len=settings.max_model_len or SCRIPTED_MAX_MODEL_LEN,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        costs=ScriptedCosts(step_ms=settings.scripted_step_ms),
    )


def _from_checkpoint(settings: WorkerSettings, environ: Mapping[str, str]) -> Engine:
    from decode.checkpoint.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(resolve(settings.model, settings.cache_dir))
    needed_mb = memory_needed_mb(checkpoint.config, settings.variant, settings.kv_cache_tokens)
    require(read_machine(), Thresholds.from_env(environ, needed_mb))

    from decode.factory import load_engine

    log.info(
        "loading %s; the first time on a machine takes longer: kernels are compiled, weights repacked", settings.model
    )
    return load_engine(
        checkpoint,
        variant=settings.variant,
        device=settings.device,
        kv_cache_tokens=settings.kv_cache_tokens,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        num_threads=settings.num_threads,
        cache_dir=settings.cache_dir / "native",
        prompt_lookup=settings.prompt_lookup,
        progress=WeightsLog(settings.model),
    )


class WeightsLog:
    """Logs each quarter of the weights that is read or repacked, once loading takes longer than `QUIET_S`."""

    def __init__(self, model: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._monotonic = monotonic
        self._quiet_until_s = monotonic() + QUIET_S
        self._said = 0

    def __call__(self, num_done: int, num_tensors: int) -> None:
        percent = 100 * num_done // num_tensors
        if percent >= self._said + 25 and self._monotonic() >= self._quiet_until_s:
            self._said = percent // 25 * 25
            log.info("%s: %d %% of the weights are there", self._model, self._said)
