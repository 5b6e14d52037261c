"""`autofit.estimate`: what it answers, what it refuses, what it keeps, and that it never calls a guess a trace."""

from __future__ import annotations

import gzip
import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

import autofit
from autofit.devices.target import target_of
from autofit.forecasts.estimation import Subject, config_of, estimate, estimate_all
from autofit.forecasts.largest import largest_batches, largest_json
from autofit.memory.cache import cache_directory
from autofit.problem.config import Precision
from autofit.units import GIB, MIB, format_bytes
from tests import training
from tests.estimates import (
    GPU,
    HALF,
    MODEL,
    PLAIN,
    SEQ_LEN,
    WORKLOAD,
    answers,
    count_children,
    forbid_children,
    target,
)
from tests.refusals import refused

pytestmark = pytest.mark.usefixtures("one_server")

ISSUED_KEYS = [
    "schema", "version", "config", "device", "peak_allocated_bytes", "peak_reserved_bytes", "min_capacity_bytes", "context_bytes",
    "device_used_bytes", "anatomy", "fits", "confidence", "warnings",
]  # fmt: skip
OWN_KEYS = ["memory_bytes", "subject", "usual_error"]


def test_the_document_has_exactly_its_keys_and_is_json() -> None:
    for answer in answers():
        document = json.loads(json.dumps(answer.to_json(), allow_nan=False))
        assert sorted(document) == sorted([*ISSUED_KEYS, *OWN_KEYS])
        assert document["schema"] == "autofit/estimate"
        assert document["version"] == 1
        assert document["subject"] == {"model": MODEL, "task": "sequence-classification", "seq_len": SEQ_LEN, "adapter": None}
        assert set(document["anatomy"]) == {"parts", "peak"}


def test_an_estimate_is_a_frozen_dataclass_of_the_public_package() -> None:
    assert autofit.estimate is estimate
    with pytest.raises(FrozenInstanceError):
        answers()[0].fits = False  # type: ignore[misc]


def test_peaks_are_in_order_and_parts_add_up_to_what_the_device_loses() -> None:
    for answer in answers():
        assert answer.confidence == "traced"
        assert 0 < answer.peak_allocated_bytes <= answer.min_capacity_bytes <= answer.peak_reserved_bytes
        assert answer.device_used_bytes == answer.context_bytes + answer.peak_reserved_bytes
        parts = answer.anatomy["parts"]
        assert sum(part["bytes"] for part in parts.values()) == answer.device_used_bytes
        assert sum(part["share"] for part in parts.values()) == pytest.approx(1.0, abs=1e-4)
        assert parts["context"]["bytes"] == answer.context_bytes
        assert answer.fits is True


def test_weights_gradients_and_state_are_those_of_the_model() -> None:
    plain = next(a for a in answers() if a.config == PLAIN)
    weights = plain.anatomy["parts"]["weights"]["bytes"]
    assert weights == pytest.approx(4 * 4_386_178, rel=0.01)
    assert plain.anatomy["parts"]["optimizer_state"]["bytes"] == pytest.approx(2 * weights, rel=0.01)


def test_more_samples_take_more_and_checkpointing_takes_less() -> None:
    small, large = estimate_all(
        WORKLOAD, [PLAIN.but(per_device_train_batch_size=b) for b in (32, 64)], target()
    )
    assert small.peak_allocated_bytes < large.peak_allocated_bytes
    saving, keeping = estimate_all(
        WORKLOAD,
        [HALF.but(per_device_train_batch_size=64, gradient_checkpointing=on) for on in (True, False)],
        target(),
    )
    assert saving.peak_allocated_bytes < keeping.peak_allocated_bytes


def test_an_estimate_is_printed_on_one_line() -> None:
    answer = answers()[0]
    assert str(answer) == f"{answer.config.label()} on {answer.device}: {format_bytes(answer.device_used_bytes)} of {format_bytes(answer.memory_bytes or 0)}, fits (traced)"


def test_a_second_question_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    answers()
    forbid_children(monkeypatch)
    again = estimate_all(WORKLOAD, [PLAIN, HALF], target())
    assert [a.to_json() for a in again] == [a.to_json() for a in answers() if a.config in (PLAIN, HALF)]
    other_batch = estimate_all(WORKLOAD, [PLAIN.but(per_device_train_batch_size=128)], target())[0]
    assert other_batch.peak_allocated_bytes > again[0].peak_allocated_bytes
    by_name = estimate(MODEL, seq_len=SEQ_LEN, batch_size=8, gpu="Tesla T4")
    assert by_name.to_json() == again[0].to_json()


def test_tf32_is_answered_by_the_law_of_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    answers()
    forbid_children(monkeypatch)
    tf32 = estimate_all(WORKLOAD, [PLAIN.but(precision=Precision.TF32)], target())[0]
    assert tf32.peak_reserved_bytes == next(a for a in answers() if a.config == PLAIN).peak_reserved_bytes


@pytest.mark.slow
def test_damaged_caches_are_misses_and_are_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = next(a for a in answers() if a.config == PLAIN).to_json()
    for path in (cache_directory() / "laws").iterdir():
        path.write_bytes(gzip.compress(b'{"memory": {"version": 1}, "cost": null}'))
    for path in (cache_directory() / "models").iterdir():
        path.write_text("{")
    asked = count_children(monkeypatch)
    mended = estimate_all(WORKLOAD, [PLAIN, HALF], target())
    assert asked == ["describe", "estimate"]
    assert mended[0].to_json() == expected
    answers.cache_clear()  # the law of batch 1 is gone too
    answers()


@pytest.mark.slow
def test_an_optimizer_that_does_not_trace_is_answered_by_the_formula_which_says_so() -> None:
    answer = estimate_all(WORKLOAD, [PLAIN.but(optim="galore_adamw")], target())[0]
    assert answer.confidence == "formula"
    (warning,) = [w for w in answer.warnings if "closed formula" in w]
    assert "galore_adamw" in warning
    assert "usually within 30%" in warning
    assert answer.anatomy["peak"] is None
    parts = answer.anatomy["parts"]
    assert sum(part["bytes"] for part in parts.values()) == answer.device_used_bytes
    assert sorted(answer.to_json()) == sorted([*ISSUED_KEYS, *OWN_KEYS])


def _data_dependent_model() -> Any:
    from torch import Tensor
    from transformers import BertConfig, BertForSequenceClassification

    class Choosy(BertForSequenceClassification):
        def forward(self, input_ids: Tensor, **more: Any) -> Any:
            for position in (input_ids > 3).nonzero().tolist():  # what is computed depends on the data
                assert len(position) == 2
            return super().forward(input_ids, **more)

    shape = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 64,
    }
    return Choosy(BertConfig(**shape))


@pytest.mark.slow
def test_a_live_model_whose_forward_reads_its_data_is_answered_by_the_formula() -> None:
    answer = estimate(_data_dependent_model(), task="sequence-classification", seq_len=32, gpu=GPU)
    assert answer.confidence == "formula"
    assert any("could not be traced" in w and "nonzero" in w for w in answer.warnings)


@pytest.mark.slow
def test_a_live_model_is_traced_and_agrees_with_the_same_model_by_name() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512}
    live = estimate(
        BertForSequenceClassification(BertConfig(**shape)), seq_len=SEQ_LEN, batch_size=8, gpu=GPU
    )
    named = next(a for a in answers() if a.config == PLAIN)
    assert live.confidence == "traced"
    assert live.peak_allocated_bytes == pytest.approx(named.peak_allocated_bytes, rel=0.01)


@pytest.mark.slow
def test_a_model_with_data_of_its_own_is_traced_on_that_data() -> None:
    answer = estimate(training.Straight(), train_dataset=training.Rows(width=16), batch_size=8, gpu=GPU)
    assert answer.confidence == "traced"
    assert answer.subject == Subject(model="<Straight>")
    layer = 4 * (16 * 16 + 16)
    assert answer.anatomy["parts"]["weights"]["bytes"] == pytest.approx(layer, abs=1024), "rounded up to blocks of the allocator"
    with refused("there is no data for '<Straight>'", hint="train_dataset"):
        estimate(training.Straight(), gpu=GPU)


@pytest.mark.parametrize("limit_mib", [150, 300, 1000])
def test_the_largest_batch_fits_and_one_more_does_not(
    limit_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers()
    forbid_children(monkeypatch)
    tight = target_of(GPU, target().context_bytes + limit_mib * MIB)
    (row,) = largest_batches(
        WORKLOAD, tight, precisions=[HALF.precision], optims=[HALF.optim], checkpointing=[True]
    ).rows
    assert row.batch_size is not None
    assert row.batch_size > 0
    fitting, next_one = estimate_all(
        WORKLOAD, [HALF.but(per_device_train_batch_size=row.batch_size + more) for more in (0, 1)], tight
    )
    assert fitting.fits is True
    assert next_one.fits is False


def test_of_an_effective_batch_only_divisors_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    answers()
    roomy = target_of(GPU, 2 * GIB)
    forbid_children(monkeypatch)
    (row,) = largest_batches(
        WORKLOAD,
        roomy,
        effective_batch=48,
        precisions=[HALF.precision],
        optims=[HALF.optim],
        checkpointing=[True],
    ).rows
    assert row.batch_size == 48


def test_where_not_even_one_sample_fits_the_largest_batch_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    answers()
    forbid_children(monkeypatch)
    tiny = target_of(GPU, target().context_bytes + 20 * MIB)
    found = largest_batches(WORKLOAD, tiny, precisions=[HALF.precision], optims=[HALF.optim], checkpointing=[True])
    assert [row.batch_size for row in found.rows] == [0]
    assert found.subject == answers()[0].subject
    assert json.loads(json.dumps(largest_json(found, tiny)))["rows"][0]["batch_size"] == 0


def test_without_a_size_nothing_is_said_about_fitting(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = target_of(None, None)
    assert nowhere.memory_bytes is None
    assert any("no card was named" in w for w in nowhere.warnings)
    with refused("--max-batch needs", hint="--gpu"):
        largest_batches(WORKLOAD, nowhere)


class TestBadInput:
    """One line, before anything is started."""

    @pytest.fixture(autouse=True)
    def _no_child(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forbid_children(monkeypatch)

    @pytest.mark.parametrize("batch", [0, -4, 2.5, True, "8"], ids=repr)
    def test_a_batch_that_is_none(self, batch: Any) -> None:
        with refused("batch size must be a positive whole number"):
            estimate(MODEL, batch_size=batch)

    def test_an_effective_batch_of_zero(self) -> None:
        with refused("effective batch must be a positive"):
            estimate(MODEL, effective_batch=0)
        with refused("effective batch must be a positive"):
            largest_batches(WORKLOAD, target(), effective_batch=0)

    def test_a_batch_that_does_not_divide_names_the_next_smaller(self) -> None:
        with refused("does not divide the effective batch 64", hint="32"):
            estimate(MODEL, batch_size=48, effective_batch=64)

    @pytest.mark.parametrize(
        ("written", "near"), [("RTX 3900", "RTX 3090"), ("A1000-80GB", "A100"), ("T44", "T4")]
    )
    def test_an_unknown_card_names_the_nearest(self, written: str, near: str) -> None:
        with refused("unknown GPU", hint=near):
            estimate(MODEL, gpu=written)

    def test_more_memory_than_the_card_has(self) -> None:
        with refused("more than T4 has", hint="leave it out"):
            estimate(MODEL, gpu="T4", memory="80GiB")

    def test_a_memory_size_that_is_none(self) -> None:
        with refused("memory is not a size", hint="16GiB"):
            estimate(MODEL, memory="lots")

    def test_an_unknown_precision(self) -> None:
        with refused("precision", hint="bf16|fp32"):
            estimate(MODEL, precision="fp7")
        with refused("precision", hint="bf16|fp32"):
            estimate(MODEL, precision=["bf16"])  # type: ignore[arg-type]

    def test_a_card_that_is_no_name(self) -> None:
        with refused("a GPU is named in words, got 5", hint="A100-80GB"):
            estimate(MODEL, gpu=5)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seq_len": 4096}, "512"),
        ({"optim": "adamm"}, "adamm"),
        ({"task": "poetry"}, "poetry"),
    ],
    ids=["too long a sequence", "unknown optimizer", "unknown task"],
)
def test_what_only_the_libraries_know_is_refused_by_the_child(fields: dict[str, Any], message: str) -> None:
    with refused(message):
        estimate(MODEL, **fields)


@pytest.mark.parametrize(
    ("batch", "effective", "expected"),
    [
        (None, None, (8, 1)),
        (None, 6, (6, 1)),
        (None, 64, (8, 8)),
        (4, None, (4, 1)),
        (16, 64, (16, 4)),
        (None, 7, (7, 1)),
    ],
)
def test_what_is_left_out_is_filled_in(
    batch: int | None, effective: int | None, expected: tuple[int, int]
) -> None:
    config = config_of(
        batch_size=batch, effective_batch=effective, precision="bf16", checkpointing=False, optim="sgd"
    )
    assert (config.per_device_train_batch_size, config.gradient_accumulation_steps) == expected


def test_an_amd_card_says_what_was_assumed() -> None:
    amd = target_of("MI300X", None)
    assert amd.compute_capability == "8.0"
    assert any("AMD" in w for w in amd.warnings)
    assert any("approximate" in w for w in amd.warnings)


def test_a_precision_that_the_card_lacks_and_what_a_trace_does_not_know_are_said() -> None:
    assert any("T4 has no native bf16" in text for text in autofit.estimate("bert-tiny", batch_size=2, precision="bf16", gpu="T4").warnings)
    assert autofit.estimate("bert-tiny", batch_size=2, precision="fp16", gpu="T4").warnings == ()


def test_convolutions_are_traced_and_what_cudnn_takes_beside_them_is_said() -> None:
    told = autofit.estimate("wav2vec2-base", batch_size=1, precision="fp32", gpu="T4")
    assert told.confidence == "traced"
    assert any("convolutions: cuDNN" in text for text in told.warnings)


def test_audio_is_counted_in_positions_by_the_formula_and_the_rest_is_said() -> None:
    told = autofit.estimate("wav2vec2-base", batch_size=1, precision="fp32", gpu="T4", optim="galore_adamw")
    assert told.confidence == "formula"
    assert told.peak_allocated_bytes < 4 * GIB, "ten seconds are 499 positions, not 160,000"
    assert any("convolutions" in text and "lower bound" in text for text in told.warnings)


def test_what_an_optimizer_pages_is_said_to_be_in_no_figure() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    told = autofit.estimate("bert-tiny", batch_size=2, gpu="T4", optim="paged_adamw_8bit")
    assert told.confidence == "traced"
    assert any("moves between card and host" in text for text in told.warnings)
