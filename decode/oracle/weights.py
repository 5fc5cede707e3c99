"""A checkpoint's tensors for the decoder: one role at a time, in float32, as torch tensors.

Does not choose a data type or a layout for computing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from decode.checkpoint.checkpoint import Checkpoint
from decode.checkpoint.families import computed_values, tensor_specs

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


class WeightReader:
    """Reads the tensors of one checkpoint by role and layer. Each is read anew, so that none is kept for long."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress | None = None) -> None:
        self._checkpoint = checkpoint
        self._specs = {(spec.role, spec.layer): spec for spec in tensor_specs(checkpoint.config, checkpoint.naming)}
        self._progress = progress
        self._num_done = 0

    def __contains__(self, key: tuple[str, int | None]) -> bool:
        return key in self._specs

    def read(self, role: str, layer: int | None = None) -> torch.Tensor:
        """float32, [outputs, inputs] or [size]."""
        spec = self._specs[role, layer]
        checkpoint = self._checkpoint
        stored = checkpoint.tensors[spec.name].values()
        values = torch.from_numpy(computed_values(checkpoint.config, checkpoint.naming, spec, stored))
        self._num_done += 1
        if self._progress is not None:
            self._progress(self._num_done, len(self._specs))
        return values

    def read_rows(self, roles: tuple[str, ...], layer: int) -> torch.Tensor | None:
        """The tensors of `roles` under one another, for linears that run as one; None where the model has none."""
        if (roles[0], layer) not in self:
            return None
        return torch.cat([self.read(role, layer) for role in roles])
