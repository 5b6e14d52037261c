"""Predicted peaks against what PyTorch's own CUDA allocator counted for the same training on the hollow device (see `benchmarks/hollow`)."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from autofit.forecasts.estimation import asking
from autofit.forecasts.laws import Setting, collect, law_class
from autofit.problem.config import TrialConfig
from benchmarks.evidence.plan import full_plan
from benchmarks.hollow.quantised import workload_of

pytestmark = pytest.mark.usefixtures("one_server")

STACKS = json.loads((Path(__file__).parents[1] / "data" / "allocator-rows.json").read_text())["stacks"]
CASES = {case.key: case for case in full_plan().memory}
CHECKED = (
    "bert-large 4x2 bf16 adamw_torch_fused",
    "gpt2-medium 8x2 bf16 ckpt adamw_bnb_8bit",
    "gpt2-medium 2x1 fp32 adamw_torch_fused",  # reserves more in its third step than in two
    "llama-1b 1x1 bf16 adafactor",
    "t5-base 16x1 bf16 adamw_torch_fused",
    "t5-base 16x2 fp32 ckpt adafactor",
    "vit-base 64x1 tf32 adamw_torch_fused",
)


def counted(key: str) -> dict[str, Any]:
    """The row of the installed software."""
    for stack in STACKS:
        here = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        if all(stack["software"][name].partition("+")[0] == version.partition("+")[0] for name, version in here.items()):
            row: dict[str, Any] = next(row for row in stack["rows"] if row["key"] == key)
            return {**row, "capability": stack["device"]["compute_capability"]}
    pytest.skip("the allocator's peaks were counted with other versions of torch and transformers")


@pytest.mark.slow
@pytest.mark.parametrize("key", CHECKED)
def test_peaks_are_those_that_pytorchs_allocator_counts(key: str) -> None:
    row, case = counted(key), CASES[key]
    with asking(case.workload) as (facts, ask):
        setting = Setting(workload=case.workload, facts=facts, compute_capability=row["capability"])
        laws = collect(setting, [case.config], ask)[law_class(setting, case.config)].laws
    assert laws is not None
    peaks = laws.memory.predict(case.config.per_device_train_batch_size)
    assert peaks.peak_allocated_bytes == pytest.approx(row["peak_allocated_bytes"], rel=0.002)
    assert peaks.peak_reserved_bytes == pytest.approx(row["peak_reserved_bytes"], rel=0.005)


QUANTISED = json.loads((Path(__file__).parents[1] / "data" / "quantised-rows.json").read_text())["rows"]
FEW = [row for row in QUANTISED if row["model"] in ("gpt2", "tinyllama-1.1b")]


@pytest.mark.slow
@pytest.mark.parametrize("row", FEW, ids=lambda row: f"{row['model']}-{row['quantize']}-{TrialConfig.from_json(row['config']).label()}")
def test_peaks_on_quantised_models_are_those_that_pytorchs_allocator_counts(row: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    pytest.importorskip("peft", reason="peft is not installed")
    for name, version in row["software"].items():
        if importlib.metadata.version(name).partition("+")[0] != version.partition("+")[0]:
            pytest.skip(f"the allocator's peaks were counted with {name} {version}")
    workload, config = workload_of(row["model"], row["seq_len"], row["quantize"]), TrialConfig.from_json(row["config"])
    with asking(workload) as (facts, ask):
        setting = Setting(workload=workload, facts=facts, compute_capability=row["capability"])
        laws = collect(setting, [config], ask)[law_class(setting, config)].laws
    assert laws is not None
    peaks = laws.memory.predict(config.per_device_train_batch_size)
    assert peaks.peak_allocated_bytes == pytest.approx(row["peak_allocated_bytes"], rel=0.005)
    assert peaks.peak_reserved_bytes == pytest.approx(row["peak_reserved_bytes"], rel=0.01)


#: rows that `benchmarks.evidence` measured on a card, a document per card
CARDS = [json.loads(path.read_text()) for path in sorted((Path(__file__).parents[1] / "data").glob("memory-rows-*.json"))]
MEASURED = [(document, row) for document in CARDS for row in document["rows"] if row["outcome"] == "completed" and row["predicted"] is not None]
NAMES = [f"{document['device']['name']} {row['model']} {TrialConfig.from_json(row['config']).label()}" for document, row in MEASURED]


@pytest.mark.parametrize(("document", "row"), MEASURED, ids=NAMES)
def test_peaks_are_near_those_that_a_card_had(document: dict[str, Any], row: dict[str, Any]) -> None:
    """As predicted now where the card's versions are installed (T5 needs a quarter less with another transformers), else as it was predicted there."""
    config, told = TrialConfig.from_json(row["config"]), row["predicted"]
    case = CASES.get(f"{row['model']} {config.label()}")
    if case is not None and all(document["software"].get(name) == importlib.metadata.version(name) for name in ("torch", "transformers")):
        with asking(case.workload) as (facts, ask):
            setting = Setting(workload=case.workload, facts=facts, compute_capability=document["device"]["compute_capability"])
            laws = collect(setting, [config], ask)[law_class(setting, config)].laws
        assert laws is not None
        peaks = laws.memory.predict(config.per_device_train_batch_size)
        told = {name: getattr(peaks, name) for name in peaks.__slots__}
    assert told["peak_allocated_bytes"] == pytest.approx(row["measured"]["peak_allocated_bytes"], rel=0.03)
    assert told["peak_reserved_bytes"] == pytest.approx(row["measured"]["peak_reserved_bytes"], rel=0.05)


def test_every_configuration_of_the_plan_was_counted() -> None:
    for stack in STACKS:
        assert {row["key"] for row in stack["rows"]} == set(CASES)
