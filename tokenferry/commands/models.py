"""`tokenferry pull` and `tokenferry models`: what is in the cache, and getting it there.

Owns what these commands show. Refuses to know how a pull works (`tokenferry.pull`).
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from decode.checkpoint.names import PUBLISHED, ModelDamaged, ModelError, PublishedModel, resolve
from tokenferry import pull as pulling
from tokenferry.progress import PullProgress
from tokenferry.shown import print_json


def pull(name: str, cache_dir: Path, *, accept_terms: bool, check_only: bool) -> int:
    """Fetch a model, or only read what is there against its checksum. Raises ModelError."""
    with PullProgress() as progress:
        if check_only:
            path = pulling.check(name, cache_dir, progress)
        else:
            path = pulling.pull(name, cache_dir, accept_terms=accept_terms, progress=progress)
    Console().print(f"{name} is whole: {path}", highlight=False, markup=False, soft_wrap=True)
    return 0


def models(cache_dir: Path, *, as_json: bool = False) -> int:
    """A table of the known models and of what the cache holds."""
    if as_json:
        print_json([_record(model, cache_dir) for model in PUBLISHED.values()])
        return 0
    table = Table("name", "what", "licence", "here", box=None, header_style="bold", pad_edge=False)
    table.columns[0].no_wrap = True
    for model in PUBLISHED.values():
        table.add_row(model.name, model.description, model.licence, _state(model, cache_dir))
    console = Console()
    console.print(table, highlight=False)
    console.print(
        "\nMODEL also takes a folder with config.json, a .gguf file, or an id on a model hub.", highlight=False
    )
    return 0


def _record(model: PublishedModel, cache_dir: Path) -> dict[str, object]:
    return {
        "name": model.name,
        "description": model.description,
        "licence": model.licence,
        "download_bytes": model.download_bytes,
        "is_here": _state(model, cache_dir) == "yes",
        "state": _state(model, cache_dir),
    }


def _state(model: PublishedModel, cache_dir: Path) -> str:
    try:
        resolve(model.name, cache_dir)
    except ModelDamaged:
        return "damaged: pull it again"
    except ModelError:
        return f"no: download {model.download_bytes / 1e6:,.0f} MB"
    return "yes"
