"""The answer is a function of the records, survives its file, and cannot be bent when it is used."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autofit.errors import FileFormatError
from autofit.problem.config import Precision, TrialConfig
from autofit.results.result import (
    SCHEMA,
    VERSION,
    Estimate,
    TuneResult,
    Warning,
    break_even_hours,
    by_config,
    estimate_of,
    estimates,
    load,
)
from autofit.trials.measurement import Interval, Memory
from autofit.trials.soundness import departed
from autofit.trials.trial import Outcome, Reason, Role, TrialRecord
from tests.builders import ARGUMENT_DEFAULTS, CPU, make_config, make_record, make_result
from tests.refusals import refused
from tests.strategies import trial_configs, trial_records

CONFIG = make_config(8)
SLOW, FAST = make_config(4), make_config(16, precision=Precision.BF16)
RECORDS = (
    make_record(0, CONFIG, 100.0, role=Role.DEFAULTS),
    make_record(1, FAST, 300.0, role=Role.HAND_RECIPE),
    make_record(2, SLOW, reason=Reason.OUT_OF_MEMORY),
)


@st.composite
def studies(draw: st.DrawFn) -> list[TrialRecord]:
    """Records of a few configurations, each with several runs, numbered as a study numbers them."""
    configs = draw(
        st.lists(trial_configs(effective_batch=64), min_size=1, max_size=4, unique_by=TrialConfig.key)
    )
    some = st.lists(trial_records(st.sampled_from(configs)), min_size=1, max_size=8)
    return [replace(record, number=number) for number, record in enumerate(draw(some))]


@given(studies(), st.randoms(use_true_random=False))
def test_the_order_of_the_records_does_not_matter(records: list[TrialRecord], rng: random.Random) -> None:
    shuffled = list(records)
    rng.shuffle(shuffled)
    assert estimates(shuffled) == estimates(records)


def test_runs_that_disagree_on_tokens_give_the_same_estimate_in_any_order() -> None:
    runs = [
        make_record(n, CONFIG, 100.0, tokens_per_sample=tokens) for n, tokens in enumerate((10.0, 20.0, None))
    ]
    assert estimates(runs[::-1]) == estimates(runs)


@given(studies())
def test_only_what_completed_and_never_failed_to_fit_has_an_estimate(records: list[TrialRecord]) -> None:
    found = estimates(records)
    for key, group in by_config(records).items():
        outcomes = {record.outcome for record in group}
        sound = group[0].config.precision not in departed(records)
        assert (key in found) == (sound and Outcome.COMPLETED in outcomes and Outcome.INFEASIBLE not in outcomes)


@given(studies())
def test_an_estimate_lies_in_its_interval_and_holds_every_peak(records: list[TrialRecord]) -> None:
    for key, estimate in estimates(records).items():
        assert estimate.config.key() == key
        assert estimate.interval.low <= estimate.samples_per_second * (1 + 1e-9)
        assert estimate.interval.high >= estimate.samples_per_second * (1 - 1e-9)
        for record in by_config(records)[key]:
            if record.measurement is not None and record.measurement.memory.peak_reserved_bytes is not None:
                assert estimate.memory.peak_reserved_bytes is not None
                assert estimate.memory.peak_reserved_bytes >= record.measurement.memory.peak_reserved_bytes


@settings(max_examples=40)
@given(studies())
def test_a_result_survives_json(records: list[TrialRecord]) -> None:
    assume(estimates(records))
    result = make_result(records)
    assert TuneResult.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result


def full_result(**fields: Any) -> TuneResult:
    """A result with something in every field."""
    values: dict[str, Any] = {
        "best": FAST,
        "tied": (estimates(RECORDS)[CONFIG.key()],),
        "removals": ({"knob": "precision", "value": "fp16", "reason": "no effect"},),
        "untested": {"dominated": 3},
        "certificate": {"statement": "nothing left", "contenders": []},
        "warnings": (Warning(code="cpu", message="measured on a CPU", next_step="use a GPU"),),
    }
    return make_result(RECORDS, **{**values, **fields})


def test_a_full_result_survives_its_file(tmp_path: Path) -> None:
    result = full_result()
    result.save(tmp_path / "best.json")
    assert load(tmp_path / "best.json") == result
    data = json.loads((tmp_path / "best.json").read_text())
    assert (data["schema"], data["version"]) == (SCHEMA, VERSION)
    best = data["best"]
    assert best["training_arguments"]["bf16"] is True
    product = best["training_arguments"]["per_device_train_batch_size"]
    product *= best["training_arguments"]["gradient_accumulation_steps"]
    assert product == best["effective_batch"] == 64


def test_the_playoff_counts_where_it_was_played_and_the_confirmation_only_alone() -> None:
    runs = [
        make_record(0, CONFIG, 100.0),
        make_record(1, CONFIG, 110.0, role=Role.PLAYOFF),
        make_record(2, CONFIG, 112.0, role=Role.PLAYOFF),
        make_record(3, CONFIG, 500.0, role=Role.CONFIRMATION),
        make_record(4, CONFIG, reason=Reason.CRASH),
    ]

    def speed(records: list[TrialRecord]) -> tuple[float, int]:
        estimate = estimate_of(records)
        assert estimate is not None
        return round(estimate.samples_per_second, 6), estimate.runs

    assert speed(runs) == (111.0, 2)
    assert speed([runs[0], runs[3]]) == (100.0, 1)
    assert speed([runs[3]]) == (500.0, 1)
    assert estimate_of([runs[4]]) is None
    assert estimate_of([*runs, make_record(5, CONFIG, reason=Reason.ALLOCATOR_THRASH)]) is None


def test_tokens_follow_samples_and_are_absent_where_they_make_no_sense() -> None:
    (text,) = estimates([make_record(0, CONFIG, 100.0, tokens_per_sample=128.0)]).values()
    (image,) = estimates([make_record(0, CONFIG, 100.0, tokens_per_sample=None)]).values()
    assert text.tokens_per_second == pytest.approx(12_800.0)
    assert image.tokens_per_second is None


@pytest.mark.parametrize(
    ("seconds", "speedup", "hours"),
    [(3600.0, 2.0, 1.0), (360.0, 1.1, 1.0), (100.0, 1.0, None), (100.0, 0.5, None), (100.0, None, None)],
)
def test_the_search_pays_after_these_hours(
    seconds: float, speedup: float | None, hours: float | None
) -> None:
    found = break_even_hours(seconds, speedup)
    assert found == (None if hours is None else pytest.approx(hours))


class TestTrainingArguments:
    @pytest.fixture
    def built(self, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """Keywords that the library's class was called with (the class itself takes seconds to import)."""
        calls: list[dict[str, Any]] = []
        stand_in = SimpleNamespace(TrainingArguments=lambda **keywords: calls.append(keywords))
        monkeypatch.setitem(sys.modules, "transformers", stand_in)  # type: ignore[arg-type]
        return calls

    def test_they_hold_what_differs_and_what_the_user_adds(self, built: list[dict[str, Any]]) -> None:
        full_result().training_arguments(output_dir="out", learning_rate=1e-4)
        assert built == [
            {
                "output_dir": "out",
                "per_device_train_batch_size": 16,
                "gradient_accumulation_steps": 4,
                "bf16": True,
                "learning_rate": 1e-4,
            }
        ]

    def test_an_answer_for_the_cpu_stays_on_the_cpu(self, built: list[dict[str, Any]]) -> None:
        full_result(device=CPU).training_arguments(output_dir="out")
        full_result(device=CPU).training_arguments(output_dir="out", use_cpu=False)
        assert [call["use_cpu"] for call in built] == [True, False]

    @pytest.mark.parametrize(
        "name",
        [
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "bf16",
            "fp16",
            "tf32",
            "optim",
            "activation_checkpointing",
            "gradient_checkpointing",
        ],
    )
    @pytest.mark.parametrize("best", [CONFIG, FAST], ids=["library defaults", "tuned"])
    def test_what_was_tuned_cannot_be_set_again(
        self, built: list[dict[str, Any]], name: str, best: TrialConfig
    ) -> None:
        with refused(f"^{name} was tuned and cannot be set again$", hint="result.arguments"):
            full_result(best=best).training_arguments(output_dir="out", **{name: 3})
        assert built == []

    def test_a_class_of_the_users_own_that_overrides_what_was_tuned_is_refused(self) -> None:
        def keeps_one_step(arguments: Any) -> None:
            arguments.gradient_accumulation_steps = 1

        fields = [(name, Any, dataclasses.field(default=value)) for name, value in ARGUMENT_DEFAULTS.items()]
        taking = dataclasses.make_dataclass("Taking", fields)
        overriding = dataclasses.make_dataclass("Overriding", [], bases=(taking,), namespace={"__post_init__": keeps_one_step})
        made = full_result(given=taking()).training_arguments(output_dir="out")
        assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (16, 4)
        with refused("^Overriding makes gradient_accumulation_steps=1 of gradient_accumulation_steps=4$"):
            full_result(given=overriding()).training_arguments(output_dir="out")

    def test_ways_of_checkpointing_in_the_users_arguments_are_kept_beside_the_tuned_ones(self) -> None:
        fields = [(name, Any, dataclasses.field(default=value)) for name, value in ARGUMENT_DEFAULTS.items()]
        given = dataclasses.make_dataclass("Given", fields)(activation_checkpointing_kwargs={"use_reentrant": True})
        best = CONFIG.but(gradient_checkpointing=True, extra=(("every_n_layers", 2),))
        made = make_result([make_record(0, best, 40.0)], given=given).training_arguments(output_dir="out")
        assert made.activation_checkpointing_kwargs == {"use_reentrant": True, "every_n_layers": 2}

    def test_all_that_clash_are_named(self) -> None:
        with refused("^bf16, optim was tuned and cannot be set again$"):
            full_result().training_arguments(output_dir="out", optim="sgd", bf16=False, learning_rate=1.0)

    def test_pure_bf16_needs_the_model_in_bf16(self) -> None:
        config = make_config(8, precision=Precision.PURE_BF16)
        result = make_result([make_record(0, config, 10.0)])
        assert result.model_arguments == {"dtype": "bfloat16"}
        assert full_result().model_arguments == {}


GOOD = full_result().to_json()


@pytest.mark.parametrize("schema", [None, "autofit/landscape", 1])
def test_another_schema_is_refused(schema: Any) -> None:
    with refused("^not a result file: schema is ", hint="autofit/result", kind=FileFormatError):
        TuneResult.from_json({**GOOD, "schema": schema})


@pytest.mark.parametrize("version", [VERSION + 1, 0, None, "1", 1.5])
def test_a_version_that_is_not_known_is_refused(version: Any) -> None:
    with refused("^result version .* is not readable here$", hint="upgrade autofit", kind=FileFormatError):
        TuneResult.from_json({**GOOD, "version": version})


#: sections that older files do not have
LATER = ("numerics", "soundness", "evaluation", "data")


def test_a_file_of_before_these_sections_loads() -> None:
    old = {key: value for key, value in GOOD.items() if key not in LATER}
    assert TuneResult.from_json(old) == TuneResult.from_json(GOOD)


@pytest.mark.parametrize("name", [name for name in GOOD if name not in ("schema", "version", *LATER)])
def test_a_result_that_lacks_a_field_is_refused_by_its_name(name: str) -> None:
    data = {key: value for key, value in GOOD.items() if key != name}
    with refused(f"^the result file cannot be read: .*{name}", hint="edited by hand", kind=FileFormatError):
        TuneResult.from_json(data)


@pytest.mark.parametrize("name", ["best", "baselines", "spec", "device", "trials", "warnings", "cost"])
@pytest.mark.parametrize("value", [None, 3, "text", [1], {"colour": "red"}])
def test_a_result_with_a_broken_field_is_refused(name: str, value: Any) -> None:
    with refused("^the result file cannot be read: ", hint="edited by hand", kind=FileFormatError):
        TuneResult.from_json({**GOOD, name: value})


@pytest.mark.parametrize("name", ["speedup", "software", "model", "data", "untested", "certificate", "soundness", "numerics", "argument_defaults"])
@pytest.mark.parametrize("value", [3, "text", [1]])
def test_a_section_that_is_no_object_is_refused(name: str, value: Any) -> None:
    with refused(f"cannot be read: .*{name} is no object", hint="edited by hand", kind=FileFormatError):
        TuneResult.from_json({**GOOD, name: value})


@pytest.mark.parametrize("change", [{"data": {"lengths": {}}}, {"data": {"lengths": 5}}, {"removals": "x"}, {"removals": [{}]}, {"memory_limit_bytes": "x"}, {"memory_limit_bytes": -1}, {"cost": {**GOOD["cost"], "seconds": -1.0}}])
def test_a_section_that_cannot_be_shown_is_refused(change: dict[str, Any]) -> None:
    with refused("^the result file cannot be read: ", hint="edited by hand", kind=FileFormatError):
        TuneResult.from_json({**GOOD, **change})


def test_a_result_with_an_impossible_configuration_is_refused() -> None:
    best = {**GOOD["best"], "config": {**GOOD["best"]["config"], "per_device_train_batch_size": 0}}
    with refused("per_device_train_batch_size must be a positive integer", kind=FileFormatError):
        TuneResult.from_json({**GOOD, "best": best})


@pytest.mark.parametrize("value", [math.nan, math.inf, 0, -1, 10**400, 1e300])
@pytest.mark.parametrize("place", [("best", "samples_per_second"), ("best", "interval", "high"), ("speedup", "defaults"), ("best", "runs")])
def test_numbers_that_no_search_can_have_are_refused(value: float, place: tuple[str, ...]) -> None:
    data = copy.deepcopy(GOOD)
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    with refused("^the result file cannot be read: ", hint="edited by hand", kind=FileFormatError) as caught:
        TuneResult.from_json(data)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("place", [("cost", "seconds"), ("device", "total_memory_bytes"), ("trials",), ("model",)])
@pytest.mark.parametrize("value", [math.nan, 10**400])
def test_numbers_that_cannot_be_printed_are_refused_wherever_they_stand(value: float, place: tuple[str, ...]) -> None:
    data = copy.deepcopy(GOOD)
    if place == ("trials",):
        data["trials"][0]["seconds"] = value
    elif place == ("model",):
        data["model"] = {"config": {"deep": [value]}}
    else:
        data[place[0]][place[1]] = value
    with refused("^the result file cannot be read: ", hint="edited by hand", kind=FileFormatError):
        TuneResult.from_json(data)


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_constants_that_json_does_not_know_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "best.json"
    path.write_text(json.dumps(GOOD).replace('"confirmed": ', f'"noise": {name}, "confirmed": '))
    with refused(f"is not JSON: {name} is no number of JSON", kind=FileFormatError):
        load(path)


def test_a_winner_of_another_effective_batch_or_that_no_trial_ran_is_refused() -> None:
    for change, says in (({"gradient_accumulation_steps": 96}, "effective batch"), ({"optim": "lion"}, "none of the trials")):
        best = {**GOOD["best"], "config": {**GOOD["best"]["config"], **change}}
        with refused(f"cannot be read: .*{says}", hint="edited by hand", kind=FileFormatError):
            TuneResult.from_json({**GOOD, "best": best})


@pytest.mark.parametrize(
    ("place", "factor"),
    [
        (("best", "samples_per_second"), 1.1),
        (("best", "tokens_per_second"), 1.1),
        (("best", "memory", "peak_reserved_bytes"), 2),
        (("baselines", "defaults", "estimate", "samples_per_second"), 0.5),
        (("speedup", "defaults"), 10.0),
    ],
)
def test_a_figure_that_the_trials_do_not_say_is_refused(place: tuple[str, ...], factor: float) -> None:
    data = copy.deepcopy(GOOD)
    inner = data
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] *= factor
    with refused("^the result file cannot be read: .*(and its trials say|which the speeds do not say)", hint="edited by hand", kind=FileFormatError):
        TuneResult.from_json(data)


def test_a_file_that_is_no_result_is_refused(tmp_path: Path) -> None:
    with refused("^result file .* does not exist$", kind=FileFormatError):
        load(tmp_path / "best.json")
    (tmp_path / "best.json").write_text("{}")
    with refused("^not a result file: schema is None$", kind=FileFormatError):
        load(tmp_path / "best.json")


def test_keys_of_a_newer_estimate_are_ignored() -> None:
    estimate = Estimate(
        config=CONFIG, samples_per_second=1.0, interval=Interval(low=0.5, high=1.5), runs=1, memory=Memory()
    )
    assert Estimate.from_json({**estimate.to_json(), "joules": 3}) == estimate


def test_a_notebook_shows_the_answer_and_not_pages_of_fields() -> None:
    result = make_result([make_record(0, make_config(8), 100.0, jitter=0.0)])
    assert repr(result) == "<TuneResult: fastest that fits: 8x8 fp32 adamw_torch_fused, 100 samples/s>"
