"""Names and paths to checkpoints: what is found, what is refused, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest

from decode.checkpoint import names as registry
from decode.checkpoint.names import (
    HUB_COMPLETE,
    ModelDamaged,
    ModelMissing,
    Package,
    UnknownModel,
    check_file,
    model_dir,
    resolve,
    served_name,
)
from tests.models import tiny_model

CONTENT = b"tiny checkpoint"
TINY = tiny_model(CONTENT, Package("tiny-package==1.0", "tiny/tiny.gguf", 99))


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.PUBLISHED, "tiny", TINY)


def put(cache: Path, content: bytes) -> Path:
    path = model_dir("tiny", cache) / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def test_a_pulled_name_resolves_to_its_file(tmp_path: Path) -> None:
    path = put(tmp_path, CONTENT)
    assert resolve("tiny", tmp_path) == path


def test_a_name_that_is_not_pulled_says_how_to_pull_it(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="tokenferry pull tiny"):
        resolve("tiny", tmp_path)


def test_a_name_whose_terms_must_be_accepted_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelMissing, match="tokenferry pull gemma-3-270m --accept-terms"):
        resolve("gemma-3-270m", tmp_path)


def test_a_file_of_another_size_is_damaged(tmp_path: Path) -> None:
    put(tmp_path, CONTENT[:-1])
    with pytest.raises(ModelDamaged, match="14 bytes, published are 15"):
        resolve("tiny", tmp_path)


def test_a_file_of_the_right_size_with_other_contents_fails_the_check(tmp_path: Path) -> None:
    path = put(tmp_path, b"tiny checkpoinT")
    assert resolve("tiny", tmp_path) == path
    with pytest.raises(ModelDamaged, match="checksum"):
        check_file(TINY, path)


def test_the_check_reports_every_byte_it_reads(tmp_path: Path) -> None:
    seen: list[int] = []
    check_file(TINY, put(tmp_path, CONTENT), seen.append)
    assert sum(seen) == len(CONTENT)


def test_a_gguf_path_resolves_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.touch()
    assert resolve(str(path), tmp_path) == path.resolve()


def test_a_folder_with_a_config_resolves_to_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    assert resolve(str(tmp_path), tmp_path) == tmp_path.resolve()


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"config\.json"):
        resolve(str(tmp_path), tmp_path)


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    path.touch()
    with pytest.raises(UnknownModel, match=r"single \.gguf file"):
        resolve(str(path), tmp_path)


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"/nowhere/model\.gguf: there is no such file"):
        resolve("/nowhere/model.gguf", tmp_path)


def test_a_mistyped_name_suggests_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="did you mean smollm2-135m-instruct"):
        resolve("smolm2-135m", tmp_path)


def test_a_name_like_no_other_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="known: gemma-3-270m, smollm2-135m-instruct, tiny"):
        resolve("zzzz", tmp_path)


def test_a_hub_id_is_missing_until_its_download_completed(tmp_path: Path) -> None:
    folder = model_dir("someone/some-model", tmp_path)
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    with pytest.raises(ModelMissing, match="tokenferry pull someone/some-model"):
        resolve("someone/some-model", tmp_path)
    (folder / HUB_COMPLETE).touch()
    assert resolve("someone/some-model", tmp_path) == folder


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("tiny", "tiny"),
        ("someone/some-model", "someone/some-model"),
        ("/data/My-Model.Q4_1.gguf", "My-Model.Q4_1"),
        ("/data/checkpoints/my-model/", "my-model"),
    ],
)
def test_clients_ask_for_a_path_by_its_last_part(given: str, expected: str) -> None:
    assert served_name(given) == expected


def test_every_published_model_joins_parts_of_the_size_it_promises() -> None:
    for model in registry.PUBLISHED.values():
        assert len(model.sha256) == 64
        assert model.parts
        assert all("==" in package.requirement for package in (*model.parts, *model.notices))
