"""What was asked is checked field by field, and survives JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given

from autofit.problem.spec import MAX_EFFECTIVE_BATCH, MAX_SEQ_LEN, SearchSpec, Workload
from tests.refusals import refused
from tests.strategies import NAMED_BATCHES, search_specs, workloads

WORKLOAD = Workload(model="bert-base-uncased")


@given(workloads())
def test_a_workload_survives_json(workload: Workload) -> None:
    assert Workload.from_json(json.loads(json.dumps(workload.to_json()))) == workload


@given(search_specs())
def test_a_spec_survives_json(spec: SearchSpec) -> None:
    assert SearchSpec.from_json(json.loads(json.dumps(spec.to_json(), allow_nan=False))) == spec


def test_keys_of_a_newer_file_are_ignored() -> None:
    spec = SearchSpec(workload=WORKLOAD, effective_batch=64)
    data = spec.to_json()
    data["mood"] = "good"
    data["workload"]["colour"] = "red"
    assert SearchSpec.from_json(data) == spec


@given(workloads(), workloads())
def test_workloads_have_one_identity_exactly_when_they_are_equal(one: Workload, other: Workload) -> None:
    assert (one.identity() == other.identity()) == (one == other)


def test_where_objects_lie_is_not_part_of_the_identity() -> None:
    assert Workload(model="<Net>", objects_path="/tmp/a").identity() == Workload(model="<Net>").identity()


def test_a_workload_without_a_model_is_refused() -> None:
    with refused("^no model given$", hint="--model"):
        Workload(model="")


@pytest.mark.parametrize("seq_len", [0, -1, MAX_SEQ_LEN + 1])
def test_a_sequence_length_out_of_range_is_refused(seq_len: int) -> None:
    with refused(f"^sequence length must be between 1 and {MAX_SEQ_LEN}, got {seq_len}$"):
        Workload(model="gpt2", seq_len=seq_len)


@pytest.mark.parametrize("batch", [*NAMED_BATCHES, MAX_EFFECTIVE_BATCH])
def test_an_effective_batch_in_range_is_taken(batch: int) -> None:
    assert SearchSpec(workload=WORKLOAD, effective_batch=batch).effective_batch == batch


@pytest.mark.parametrize("batch", [0, -64, MAX_EFFECTIVE_BATCH + 1, 10**30])
def test_an_effective_batch_out_of_range_is_refused(batch: int) -> None:
    with refused(f"^effective batch must be between 1 and {MAX_EFFECTIVE_BATCH}, got {batch}$"):
        SearchSpec(workload=WORKLOAD, effective_batch=batch)


@pytest.mark.parametrize("batch", [64.0, "64", True, None])
def test_an_effective_batch_that_is_no_whole_number_is_refused(batch: Any) -> None:
    with refused(f"^effective batch must be a whole number, got {batch!r}$"):
        SearchSpec(workload=WORKLOAD, effective_batch=batch)


@pytest.mark.parametrize("trials", [0, -1])
def test_a_budget_without_trials_is_refused(trials: int) -> None:
    with refused(f"^trials must be at least 1, got {trials}$"):
        SearchSpec(workload=WORKLOAD, effective_batch=64, trials=trials)


@pytest.mark.parametrize("tolerance", [-0.01, 1.0, math.nan, math.inf])
def test_a_tolerance_that_is_no_share_is_refused(tolerance: float) -> None:
    with refused("^tolerance must be at least 0 and below 1, got "):
        SearchSpec(workload=WORKLOAD, effective_batch=64, tolerance=tolerance)


def test_json_that_lacks_a_field_is_refused() -> None:
    with refused("^not a Workload: .*model"):
        Workload.from_json({})
    with refused("^not a SearchSpec: .*effective_batch"):
        SearchSpec.from_json({"workload": {"model": "gpt2"}})
