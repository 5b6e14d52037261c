import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from autofit.memory.cache import CachedLaws, LawKey, cache_directory, load_laws, store_laws
from autofit.memory.law import MemoryLaw
from autofit.memory.roofline import CostLaw
from tests.memory.traces import training_loop

KEY = LawKey(
    model={"hidden_size": 1024, "num_hidden_layers": 24},
    task="causal-lm",
    seq_len=512,
    precision="bf16",
    optim="adamw_torch_fused",
    checkpointing="off",
    attention="sdpa",
    compute_capability="8.0",
    padded=False,
    accumulates=True,
    versions={"torch": "2.13.0", "transformers": "5.23.0"},
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOFIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def laws() -> CachedLaws:
    low, high = training_loop(2), training_loop(4)
    return CachedLaws(memory=MemoryLaw.fit(low, high, single=training_loop(1)), cost=CostLaw.fit(low, high))


def entry(directory: Path) -> Path:
    (path,) = (directory / "laws").iterdir()
    return path


def test_what_was_stored_is_loaded(laws: CachedLaws) -> None:
    assert load_laws(KEY) is None
    assert store_laws(KEY, laws)
    assert load_laws(KEY) == laws


def test_a_law_without_costs_is_kept_too(laws: CachedLaws) -> None:
    store_laws(KEY, replace(laws, cost=None))
    assert load_laws(KEY) == replace(laws, cost=None)


def test_answers_already_worked_out_are_kept(laws: CachedLaws) -> None:
    told = laws.memory.predict(16)
    store_laws(KEY, laws)
    loaded = load_laws(KEY)
    assert loaded is not None
    assert loaded.memory.predict(16) == told
    assert not loaded.memory._replays


def test_storing_again_replaces_the_entry_and_leaves_nothing_behind(
    directory: Path, laws: CachedLaws
) -> None:
    store_laws(KEY, replace(laws, cost=None))
    store_laws(KEY, laws)
    assert load_laws(KEY) == laws
    assert len(list((directory / "laws").iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"hidden_size": 1024, "num_hidden_layers": 23}},
        {"task": "masked-lm"},
        {"seq_len": 256},
        {"precision": "fp16"},
        {"optim": "adafactor"},
        {"checkpointing": "reentrant"},
        {"attention": "eager"},
        {"compute_capability": "9.0"},
        {"padded": True},
        {"accumulates": False},
        {"versions": {"torch": "2.12.0", "transformers": "5.23.0"}},
        {"extra": {"label_smoothing_factor": 0.1}},
    ],
)
def test_every_part_of_the_key_counts(change: dict[str, object], laws: CachedLaws) -> None:
    store_laws(KEY, laws)
    other = replace(KEY, **change)  # type: ignore[arg-type]
    assert other.digest() != KEY.digest()
    assert load_laws(other) is None


def test_the_order_of_a_mapping_does_not_count() -> None:
    model = {"num_hidden_layers": 24, "hidden_size": 1024}
    assert replace(KEY, model=model).digest() == KEY.digest()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not gzip",
        gzip.compress(b"not json", mtime=0),
        gzip.compress(b"[1, 2]", mtime=0),
        gzip.compress(b"{}", mtime=0),
        gzip.compress(json.dumps({"memory": {"version": 1}, "cost": None}).encode(), mtime=0),
        gzip.compress(json.dumps({"memory": None, "cost": None}).encode(), mtime=0),
        gzip.compress(b"\xff\xfe", mtime=0),
    ],
)
def test_a_damaged_entry_is_a_miss_and_is_overwritten(
    content: bytes, directory: Path, laws: CachedLaws
) -> None:
    store_laws(KEY, laws)
    entry(directory).write_bytes(content)
    assert load_laws(KEY) is None
    assert store_laws(KEY, laws)
    assert load_laws(KEY) == laws


@pytest.mark.parametrize("keep", [1, 10, 18, 100, 0.5, 0.99])
def test_a_truncated_entry_is_a_miss(keep: float, directory: Path, laws: CachedLaws) -> None:
    store_laws(KEY, laws)
    whole = entry(directory).read_bytes()
    entry(directory).write_bytes(whole[: int(keep if keep >= 1 else keep * len(whole))])
    assert load_laws(KEY) is None


def test_a_flipped_byte_is_a_miss(directory: Path, laws: CachedLaws) -> None:
    store_laws(KEY, laws)
    whole = bytearray(entry(directory).read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    entry(directory).write_bytes(bytes(whole))
    assert load_laws(KEY) is None


def test_a_directory_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, laws: CachedLaws
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOFIT_CACHE_DIR", str(tmp_path / "file"))
    assert store_laws(KEY, laws) is False
    assert load_laws(KEY) is None


def test_the_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_directory() == tmp_path / "cache"
    monkeypatch.delenv("AUTOFIT_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "autofit"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "autofit"
