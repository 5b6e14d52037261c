"""What `autofit estimate` prints: every number once, in the console's width and encoding, and no more confident than it may be."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from autofit.devices.target import target_of
from autofit.forecasts.estimation import MemoryEstimate, Subject
from autofit.forecasts.largest import LargestBatch, LargestBatches, largest_json
from autofit.problem.adaptation import Adaptation, AdapterKind
from autofit.problem.config import Precision, TrialConfig
from autofit.reports.estimate_report import (
    bar,
    largest_lines,
    operator_name,
    render_estimate,
    render_largest,
    verdict,
)
from autofit.units import GIB, MIB

SUBJECT = Subject(model="bert-large-uncased", task="sequence-classification", seq_len=512)
PARTS = {
    "weights": 1200 * MIB,
    "optimizer_state": 2400 * MIB,
    "saved_activations": 4000 * MIB,
    "inputs": 90_000,
    "context": 300 * MIB,
}
TOTAL = sum(PARTS.values())
RESERVED = TOTAL - PARTS["context"]


def _estimate(**fields: Any) -> MemoryEstimate:
    values: dict[str, Any] = {
        "subject": SUBJECT,
        "config": TrialConfig(per_device_train_batch_size=8, precision=Precision.BF16),
        "device": "RTX 3090",
        "memory_bytes": 24 * GIB,
        "peak_allocated_bytes": RESERVED - 50 * MIB,
        "peak_reserved_bytes": RESERVED,
        "min_capacity_bytes": RESERVED - 20 * MIB,
        "context_bytes": PARTS["context"],
        "device_used_bytes": TOTAL,
        "anatomy": {
            "parts": {name: {"bytes": size, "share": size / TOTAL} for name, size in PARTS.items()},
            "peak": {
                "moment": "forward",
                "step": 1,
                "micro_step": 0,
                "operator": "aten.bmm.default",
                "operator_bytes": 64 * MIB,
            },
        },
        "fits": True,
        "confidence": "traced",
        "warnings": ("figures of RTX 3090 are approximate",),
    }
    return MemoryEstimate(**{**values, **fields})


def _printed(width: int, encoding: str = "utf-8", answer: MemoryEstimate | None = None) -> list[str]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    render_estimate(answer or _estimate(), Console(file=file, width=width, legacy_windows=False))
    file.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize("width", [60, 80, 140])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_no_line_is_wider_than_the_console(width: int, encoding: str) -> None:
    lines = _printed(width, encoding)
    assert max(map(len, lines)) <= width
    assert not any(line.endswith(" ") for line in lines)


def test_everything_is_there_once() -> None:
    text = "\n".join(_printed(140))
    for part in (
        "bert-large-uncased, sequence-classification, length 512, on RTX 3090",
        "batch 8 x 1",
        "bf16",
        "saved activations",
        "< 0.1 %",
        "optimizer step 2",
        "bmm takes 64.0 MiB",
    ):
        assert text.count(part) == 1, part
    for peak in (
        "peak allocated",
        "peak reserved",
        "device used",
        "least capacity",
        "note: figures of RTX 3090 are approximate",
    ):
        assert text.count(peak) == 1, peak


def test_in_ascii_the_bars_are_ascii_and_nothing_is_lost() -> None:
    fine, plain = _printed(80), _printed(80, "ascii")
    assert any("█" in line for line in fine)
    assert any("####" in line for line in plain)
    assert not any("?" in line for line in plain)
    strip = {ord(c): None for c in " ▏▎▍▌▋▊▉█#"}
    assert [line.translate(strip) for line in fine] == [line.translate(strip) for line in plain]


@given(st.floats(0, 1), st.floats(0, 1), st.integers(8, 60), st.booleans())
def test_bars_are_as_long_as_their_share_and_never_longer_than_their_room(
    one: float, other: float, room: int, ascii_only: bool
) -> None:
    small, large = sorted((one, other))
    assert (
        len(bar(small, room, ascii_only=ascii_only)) <= len(bar(large, room, ascii_only=ascii_only)) <= room
    )
    assert bar(0.0, room, ascii_only=ascii_only) == ""
    assert len(bar(1.0, room, ascii_only=ascii_only)) == room


def test_the_largest_part_has_the_longest_bar() -> None:
    drawn = {line.split("  ")[1].strip(): line.count("█") for line in _printed(140) if "%" in line}
    assert max(drawn, key=lambda name: drawn[name]) == "saved activations"


@pytest.mark.parametrize(
    ("room_bytes", "confidence", "begins"),
    [
        (2 * RESERVED, "traced", "Fits into"),
        (int(1.02 * RESERVED), "traced", "Just fits into"),
        (int(0.995 * RESERVED), "traced", "Probably does not fit into"),
        (RESERVED // 2, "traced", "Does not fit into"),
        (int(1.12 * RESERVED), "traced", "Fits into"),
        (int(1.12 * RESERVED), "formula", "Just fits into"),
        (int(0.95 * RESERVED), "formula", "Probably does not fit into"),
        (RESERVED // 2, "formula", "Does not fit into"),
    ],
)
def test_a_verdict_is_no_surer_than_the_prediction_is_good(
    room_bytes: int, confidence: str, begins: str
) -> None:
    answer = _estimate(memory_bytes=room_bytes + PARTS["context"], confidence=confidence)
    answer = replace(answer, fits=answer.min_capacity_bytes <= room_bytes, usual_error=0.15 if confidence == "formula" else 0.0)
    text = verdict(answer)
    assert text.startswith(begins), text
    assert ("closed formula" in text) == (confidence == "formula")


def test_a_lower_bound_fits_nowhere_for_sure() -> None:
    bound = replace(_estimate(memory_bytes=100 * RESERVED, confidence="formula"), fits=True, usual_error=None)
    assert verdict(bound).startswith("Takes at least ")
    assert "is not known" in verdict(bound)
    assert verdict(replace(bound, memory_bytes=RESERVED // 2, fits=False)).startswith("Does not fit into")


def test_without_a_size_the_verdict_says_only_what_is_used() -> None:
    text = verdict(_estimate(memory_bytes=None, fits=None))
    assert text.startswith("Takes ")
    assert "fit" not in text


def test_a_formula_has_no_place_of_the_peak() -> None:
    answer = _estimate(confidence="formula", anatomy={**_estimate().anatomy, "peak": None})
    assert not any("The peak is reached" in line for line in _printed(80, answer=answer))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("aten.native_layer_norm.default", "native_layer_norm"),
        ("workspace", "workspace"),
        ("bitsandbytes.gemm.default", "bitsandbytes.gemm.default"),
    ],
)
def test_operators_are_named_as_people_know_them(name: str, shown: str) -> None:
    assert operator_name(name) == shown


def _rows() -> list[LargestBatch]:
    return [
        LargestBatch(
            precision=precision,
            gradient_checkpointing=on,
            optim=optim,
            batch_size={"adamw_torch_fused": 1234, "adafactor": 0}.get(optim),
            note="it is paged" if optim == "paged_adamw_8bit" else None,
        )
        for precision in (Precision.FP32, Precision.FP16)
        for on in (False, True)
        for optim in ("adamw_torch_fused", "adafactor", "paged_adamw_8bit")
    ]


def test_the_largest_batches_are_a_row_per_class_and_a_column_per_optimizer() -> None:
    lines = largest_lines(_rows(), 100)
    assert len(lines) == 1 + 4
    assert lines[1].split() == ["fp32", "off", "1,234", "0", "?"]


def test_where_the_columns_do_not_fit_there_is_a_row_per_answer() -> None:
    lines = largest_lines(_rows(), 60)
    assert len(lines) == 1 + 12
    assert max(map(len, lines)) <= 60
    assert lines[1].split() == ["fp32", "off", "adamw_torch_fused", "1,234"]


def test_signs_in_the_table_are_explained_and_a_reason_is_given_once() -> None:
    out = io.StringIO()
    render_largest(LargestBatches(subject=SUBJECT, rows=tuple(_rows())), target_of("T4", None), Console(file=out, width=100))
    text = out.getvalue()
    assert text.startswith("Largest per-device batch of bert-large-uncased, sequence-classification, length 512, on T4")
    assert "not even a batch of 1 fits" in text
    assert "could not be predicted" in text
    assert text.count("it is paged") == 1


def test_largest_batches_of_an_effective_batch_are_said_to_be_its_divisors() -> None:
    out = io.StringIO()
    found = LargestBatches(subject=SUBJECT, rows=tuple(_rows()), effective_batch=1536)
    render_largest(found, target_of("T4", None), Console(file=out, width=200))
    assert "each is the largest divisor of the effective batch 1,536 that is predicted to fit" in " ".join(out.getvalue().split())
    assert largest_json(found, target_of("T4", None))["effective_batch"] == 1536


def test_an_adapter_is_named_beside_the_model() -> None:
    file = io.StringIO()
    adapted = replace(SUBJECT, adapter=Adaptation(adapter=AdapterKind.LORA, rank=16).label())
    render_estimate(_estimate(subject=adapted), Console(file=file, width=100))
    assert file.getvalue().startswith("bert-large-uncased with lora of rank 16, sequence-classification, length 512, on ")
