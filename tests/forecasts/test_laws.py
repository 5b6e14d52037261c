"""Laws of many configurations: one per class, from the cache or from a child, or the reason why there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.forecasts import laws
from autofit.forecasts.laws import Setting, collect, law_class
from autofit.memory.cache import cache_directory
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from tests.lawful import SETTING, Child, grid

CONFIG = TrialConfig(per_device_train_batch_size=4)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFIT_CACHE_DIR", str(tmp_path))


@given(st.sampled_from(grid()), st.integers(1, 500))
def test_configurations_that_differ_only_in_batch_share_a_law(config: TrialConfig, batch: int) -> None:
    other = config.but(per_device_train_batch_size=batch)
    assert law_class(SETTING, config) == law_class(SETTING, other)
    assert SETTING.cache_key(config) == SETTING.cache_key(other)


def test_fp32_and_tf32_share_a_law() -> None:
    tf32 = CONFIG.but(precision=Precision.TF32)
    assert law_class(SETTING, CONFIG) == law_class(SETTING, tf32)
    assert SETTING.cache_key(CONFIG).digest() == SETTING.cache_key(tf32).digest()
    child = Child()
    assert len(collect(SETTING, [CONFIG, tf32], child)) == 1
    assert len(child.payloads[0]["requests"]) == 1


def test_two_micro_steps_and_more_share_a_law_and_one_has_its_own() -> None:
    two, four = CONFIG.but(gradient_accumulation_steps=2), CONFIG.but(gradient_accumulation_steps=4)
    assert law_class(SETTING, two) == law_class(SETTING, four)
    assert SETTING.cache_key(two) == SETTING.cache_key(four)
    assert law_class(SETTING, CONFIG) != law_class(SETTING, two)
    assert SETTING.cache_key(CONFIG) != SETTING.cache_key(two)


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": Precision.BF16},
        {"precision": Precision.PURE_BF16},
        {"gradient_checkpointing": True},
        {"optim": "adafactor"},
        {"extra": (("every_n_layers", 2),)},
    ],
    ids=str,
)
def test_every_knob_that_changes_a_step_has_a_law_of_its_own(fields: dict[str, Any]) -> None:
    other = CONFIG.but(**fields)
    assert law_class(SETTING, CONFIG) != law_class(SETTING, other)
    assert SETTING.cache_key(CONFIG).digest() != SETTING.cache_key(other).digest()


@pytest.mark.parametrize(
    "fields",
    [
        {"compute_capability": "9.0"},
        {"padded": True},
        {"label_smoothing_factor": 0.1},
        {"max_grad_norm": 0.0},
        {"facts": {"digest": "another model", "seq_len": 128}},
        {"facts": {"digest": "by hand", "seq_len": 256}},
    ],
    ids=str,
)
def test_every_setting_that_changes_a_step_is_kept_apart_on_disk(fields: dict[str, Any]) -> None:
    given_fields = {name: getattr(SETTING, name) for name in SETTING.__slots__}
    other = Setting(**{**given_fields, **fields})
    assert SETTING.cache_key(CONFIG).digest() != other.cache_key(CONFIG).digest()


def test_another_version_of_a_library_is_another_law(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SETTING.cache_key(CONFIG).digest()
    monkeypatch.setattr(laws, "versions", lambda: {"tracer": "1", "torch": "99.0"})
    assert SETTING.cache_key(CONFIG).digest() != before


def test_a_second_question_asks_no_child() -> None:
    child = Child()
    first = collect(SETTING, grid(), child)
    second = collect(SETTING, grid(), Child())
    again = Child()
    collect(SETTING, reversed(grid()), again)
    assert len(child.payloads) == 1
    assert again.payloads == []
    assert set(first) == set(second)
    for key, found in first.items():
        kept = second[key].laws
        assert found.laws is not None
        assert kept is not None
        assert kept.memory.predict(24) == found.laws.memory.predict(24)


def test_a_batch_of_one_is_traced_only_when_it_is_wanted_and_then_kept() -> None:
    child = Child()
    collect(SETTING, [CONFIG], child, single=True)
    assert child.payloads[0]["batches"] == [1, 2, 4]
    other = CONFIG.but(optim="adafactor")
    collect(SETTING, [other], child)
    assert child.payloads[1]["batches"] == [2, 4]


@pytest.mark.parametrize(
    "content", [b"", b"not gzip", b"\x1f\x8b\x08\x00\x00"], ids=["empty", "text", "torn"]
)
def test_a_corrupt_entry_is_a_miss_and_is_mended(content: bytes) -> None:
    collect(SETTING, [CONFIG], Child())
    (path,) = (cache_directory() / "laws").iterdir()
    path.write_bytes(content)
    child = Child()
    found = collect(SETTING, [CONFIG], child)
    assert len(child.payloads) == 1
    assert next(iter(found.values())).laws is not None
    after = Child()
    collect(SETTING, [CONFIG], after)
    assert after.payloads == []


def test_what_cannot_be_traced_has_a_reason_and_is_asked_again_next_time() -> None:
    other = CONFIG.but(optim="adafactor")
    child = Child(refuse="adafactor")
    found = collect(SETTING, [CONFIG, other], child)
    assert found[law_class(SETTING, CONFIG)].laws is not None
    refused = found[law_class(SETTING, other)]
    assert refused.laws is None
    assert refused.reason == "adafactor has no fake kernel"
    later = Child()
    assert collect(SETTING, [CONFIG, other], later)[law_class(SETTING, other)].laws is not None
    assert len(later.payloads[0]["requests"]) == 1


@pytest.mark.parametrize(
    "fields", [{"objects_path": "/nowhere/objects"}, {"trust_remote_code": True}], ids=str
)
def test_where_the_users_own_code_decides_nothing_is_kept(fields: dict[str, Any]) -> None:
    """Two modules with the same shapes may keep other activations, and a Trainer, a dataset or remote code is in no digest."""
    own = replace(SETTING, workload=Workload(model="<Net>", seq_len=128, **fields))
    collect(own, [CONFIG], Child())
    again = Child()
    collect(own, [CONFIG], again)
    assert len(again.payloads) == 1
    assert not (cache_directory() / "laws").exists()


def test_the_attention_of_the_models_own_config_is_in_the_key() -> None:
    eager, fused = (replace(SETTING, facts={**SETTING.facts, "attn_implementation": name}) for name in ("eager", "sdpa"))
    assert eager.cache_key(CONFIG).digest() != fused.cache_key(CONFIG).digest()
    asked = replace(fused, workload=replace(fused.workload, attn_implementation="eager"))
    assert asked.cache_key(CONFIG).attention == "eager"
