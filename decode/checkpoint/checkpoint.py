"""A checkpoint on disk, opened: configuration, tokenizer, chat template, and where every tensor lies.

Owns `open_checkpoint`, the one way in. Does not load weights (`decode.oracle.weights` does) and to know about
torch, so that the web process can open a checkpoint for its text. Opening reads headers only, and finds out at once
whether the file is whole and every tensor that the decoder needs is there with the right shape and a supported type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decode.checkpoint.config import CheckpointError, Fields, ModelConfig
from decode.checkpoint.families import Naming, tensor_specs
from decode.checkpoint.gguf import GgufTokenizer, gguf_config, gguf_eos_token_ids, gguf_tokenizer
from decode.checkpoint.gguf_file import read_gguf
from decode.checkpoint.hf import HfTokenizerFiles, hf_config, read_json, read_safetensors
from decode.checkpoint.stored import StoredTensor, check_stored


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: Path
    """The GGUF file, or the Hugging Face directory."""
    naming: Naming
    config: ModelConfig
    eos_token_ids: tuple[int, ...]
    """Every token that ends an answer; may be empty."""
    bos_token_id: int | None
    chat_template: str | None
    """Jinja source, or None."""
    tokenizer: HfTokenizerFiles | GgufTokenizer
    tensors: Mapping[str, StoredTensor]

    def content_hash(self) -> str:
        """SHA-256 over the configuration and every byte of the weight files, hex. Reads the files (about 1 GB/s)."""
        digest = hashlib.sha256(repr(sorted(asdict(self.config).items())).encode())
        for path in sorted({tensor.path for tensor in self.tensors.values()}):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """`path`: a Hugging Face directory or a GGUF file. Raises CheckpointError, naming the file and what is wrong."""
    path = Path(path)
    if path.is_dir():
        checkpoint = _open_hf(path)
    elif path.is_file():
        checkpoint = _open_gguf(path)
    else:
        raise CheckpointError(f"{path}: no such file or directory")
    _check_tensors(checkpoint)
    return checkpoint


def _open_hf(directory: Path) -> Checkpoint:
    raw = read_json(directory / "config.json")
    tensors = read_safetensors(directory)
    generation = directory / "generation_config.json"
    tokenizer_config = directory / "tokenizer_config.json"
    tokenizer = read_json(tokenizer_config) if tokenizer_config.exists() else {}
    generation_fields = read_json(generation) if generation.exists() else {}
    return Checkpoint(
        path=directory,
        naming="hf",
        config=hf_config(directory, raw, tensors),
        eos_token_ids=_token_ids(directory, generation_fields.get("eos_token_id", raw.get("eos_token_id"))),
        bos_token_id=generation_fields.get("bos_token_id", raw.get("bos_token_id")),
        chat_template=_hf_chat_template(directory, tokenizer),
        tokenizer=HfTokenizerFiles(directory / "tokenizer.json", tokenizer),
        tensors=tensors,
    )


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    tokenizer = gguf_tokenizer(path, file.metadata)
    template = Fields(str(path), file.metadata).get("tokenizer.chat_template")
    return Checkpoint(
        path=path,
        naming="gguf",
        config=gguf_config(path, file),
        eos_token_ids=gguf_eos_token_ids(file.metadata, tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        chat_template=template,
        tokenizer=tokenizer,
        tensors=file.tensors,
    )


def _check_tensors(checkpoint: Checkpoint) -> None:
    sizes: dict[Path, int] = {}
    for spec in tensor_specs(checkpoint.config, checkpoint.naming):
        tensor = checkpoint.tensors.get(spec.name)
        if tensor is None:
            raise CheckpointError(f"{checkpoint.path}: tensor {spec.name} is missing")
        size = sizes.setdefault(tensor.path, tensor.path.stat().st_size)
        check_stored(tensor, spec.shape, size)


def _token_ids(directory: Path, value: Any) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise CheckpointError(f"{directory}: eos_token_id must be a token id or a list of them, not {value!r}")
    return tuple(ids)


def _hf_chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the text (or the template named "default") in tokenizer_config.json."""
    file = directory / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
