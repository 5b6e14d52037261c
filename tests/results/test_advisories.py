"""Every advisory appears when its reason is there, says what to do, and stays away when it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autofit.devices.device import MemoryHolder
from autofit.problem.config import Precision, TrialConfig
from autofit.results import advisories
from autofit.results.result import Estimate, Warning, estimate_of
from autofit.trials.trial import OUTSIDE, Reason, Role, TrialRecord
from autofit.units import GIB
from tests.builders import CPU, GPU, make_config, make_measurement, make_record, make_result

CONFIG = make_config(8)


def one_line(warnings: list[Warning]) -> list[str]:
    """The codes; every text is one line."""
    for warning in warnings:
        assert len(warning.message.splitlines()) == 1
        assert warning.next_step is None or len(warning.next_step.splitlines()) == 1
    return [warning.code for warning in warnings]


def of_winner(*records: TrialRecord, confirmed: bool = True, interrupted: bool = False) -> list[Warning]:
    best = estimate_of(records)
    assert isinstance(best, Estimate)
    return advisories.of_winner(best, records, confirmed=confirmed, interrupted=interrupted)


def test_a_quiet_card_needs_no_word() -> None:
    assert advisories.of_device(GPU) == []


def test_a_cpu_is_said() -> None:
    (warning,) = advisories.of_device(CPU)
    assert one_line([warning]) == ["cpu"]
    assert "GPU machine" in str(warning.next_step)


def test_a_busy_card_is_said_with_who_holds_what() -> None:
    holders = (MemoryHolder(pid=7, name="jupyter", used_bytes=2 * GIB), MemoryHolder(pid=8, name="Xorg"))
    (warning,) = advisories.of_device(replace(GPU, holders=holders))
    assert one_line([warning]) == ["busy_device"]
    assert "jupyter (pid 7, 2.0 GiB), Xorg (pid 8)" in warning.message


def test_a_sound_winner_needs_no_word() -> None:
    assert of_winner(make_record(0, CONFIG, 100.0)) == []


def test_a_confirmation_that_failed_is_told_with_its_cause() -> None:
    crash = [make_record(n, CONFIG, reason=Reason.CRASH, role=Role.CONFIRMATION, message="killed by SIGSEGV") for n in (1, 2)]
    (warning,) = of_winner(make_record(0, CONFIG, 100.0), *crash, confirmed=False)
    assert one_line([warning]) == ["not_confirmed"]
    assert "run 2 times at full accumulation" in warning.message
    assert "killed by SIGSEGV" in warning.message
    cut = make_record(1, CONFIG, reason=Reason.INTERRUPTED, role=Role.CONFIRMATION)
    (warning,) = of_winner(make_record(0, CONFIG, 100.0), cut, confirmed=False)
    assert "completed no run" in warning.message


def test_an_answer_that_was_not_confirmed_or_was_interrupted_is_said() -> None:
    record = make_record(0, CONFIG, 100.0)
    assert one_line(of_winner(record, confirmed=False)) == ["not_confirmed"]
    assert one_line(of_winner(record, interrupted=True)) == ["interrupted"]


def test_checkpointing_that_trials_switched_off_is_said() -> None:
    (warning,) = of_winner(make_record(0, CONFIG, 100.0, facts={"checkpointing_switched_off": True}))
    assert one_line([warning]) == ["checkpointing_switched_off"]
    assert "model.activation_checkpointing_disable()" in str(warning.next_step)
    assert of_winner(make_record(0, CONFIG, 100.0, facts={"checkpointing_switched_off": False})) == []


def test_noise_is_said() -> None:
    assert one_line(of_winner(make_record(0, CONFIG, 100.0, jitter=0.5))) == ["noise"]
    loaded = make_record(0, CONFIG, 100.0, facts={"cpu_pressure_percent": 35.0})
    (warning,) = of_winner(loaded)
    assert one_line([warning]) == ["noise"]
    assert "35 %" in warning.message


def test_noise_of_others_and_of_the_confirmation_does_not_count() -> None:
    own = make_record(0, CONFIG, 100.0)
    other = make_record(1, make_config(4), 90.0, jitter=0.5)
    longest = make_record(2, CONFIG, 100.0, jitter=0.5, role=Role.CONFIRMATION)
    best = estimate_of([own, longest])
    assert best is not None
    assert advisories.of_winner(best, [own, other, longest], confirmed=True, interrupted=False) == []


def measured(**changes: Any) -> TrialRecord:
    record = make_record(0, CONFIG, 100.0)
    return replace(record, measurement=replace(make_measurement(CONFIG, 100.0), **changes))


def test_a_run_that_waits_for_its_data_is_said() -> None:
    micro = make_measurement(CONFIG, 100.0).t_micro
    (warning,) = of_winner(measured(fetch_seconds=(micro,)))
    assert one_line([warning]) == ["input_bound"]
    assert warning.message.startswith("50 %")
    assert str(warning.next_step).startswith("raise dataloader_num_workers")
    (stream,) = of_winner(measured(fetch_seconds=(micro,), facts={"loader": {"repeats": True}}))
    assert str(stream.next_step).startswith("divide the stream among workers")


@pytest.mark.parametrize(("reason", "advised"), [(Reason.ERROR, False), (Reason.INTERRUPTED, True)])
def test_workers_that_were_tried_are_not_advised(reason: Reason, advised: bool) -> None:
    own = measured(fetch_seconds=(make_measurement(CONFIG, 100.0).t_micro,))
    tried = make_record(1, CONFIG.but(extra=(("dataloader_num_workers", 2),)), role=Role.LOADER, reason=reason)
    best = estimate_of([own])
    assert best is not None
    (warning,) = advisories.of_winner(best, [own, tried], confirmed=True, interrupted=False)
    assert ("raise dataloader_num_workers" in str(warning.next_step)) is advised


def test_skipped_fp16_steps_are_said() -> None:
    assert one_line(of_winner(measured(skipped_steps=2))) == ["skipped_steps"]


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"optim": "adamw_torch"}, []),
        ({"optim": "adafactor"}, ["other_optimizer"]),
        ({"precision": Precision.PURE_BF16}, ["pure_bf16"]),
        ({"precision": Precision.BF16}, []),
    ],
)
def test_other_mathematics_is_said(changes: dict[str, Any], codes: list[str]) -> None:
    config: TrialConfig = CONFIG.but(**changes)
    warnings = advisories.of_numerics(make_result([make_record(0, config, 100.0)]))
    assert one_line(warnings) == codes
    assert all("no configuration that keeps it was measured" in w.message for w in warnings)


def test_the_fastest_that_keeps_the_mathematics_stands_beside_a_winner_that_does_not() -> None:
    records = [
        make_record(0, CONFIG.but(optim="adafactor"), 100.0),
        make_record(1, CONFIG, 80.0),
        make_record(2, CONFIG.but(precision=Precision.BF16), 90.0),
        make_record(3, CONFIG.but(precision=Precision.PURE_BF16), 95.0),
    ]
    (warning,) = advisories.of_numerics(make_result(records))
    assert "8x8 bf16 adamw_torch_fused, at 90.00 samples/s (-10 %)" in warning.message
    assert "second moment is factored" in warning.message
    assert "--keep-numerics" in str(warning.next_step)


def test_the_users_own_optimizer_is_the_reference() -> None:
    records = [make_record(0, CONFIG.but(optim="sgd"), 100.0), make_record(1, CONFIG, 80.0)]
    assert advisories.of_numerics(make_result(records, reference_optim="sgd")) == []
    (warning,) = advisories.of_numerics(make_result(records[1:], reference_optim="sgd"))
    assert "trains by AdamW, not by SGD" in warning.message


def test_trials_that_failed_are_counted_and_those_without_memory_are_not() -> None:
    crash = make_record(0, CONFIG, reason=Reason.CRASH, message="killed by signal 11")
    (warning,) = advisories.of_records(
        [crash, replace(crash, number=1), make_record(2, CONFIG, reason=Reason.OUT_OF_MEMORY)]
    )
    assert one_line([warning]) == ["failed_trials"]
    assert warning.message.startswith("2 trials failed")
    assert "killed by signal 11" in warning.message
    assert advisories.of_records([crash])[0].message.startswith("1 trial failed")
    assert advisories.of_records([make_record(0, CONFIG, reason=Reason.INTERRUPTED)]) == []


def test_a_prediction_that_was_off_is_said_with_its_sign() -> None:
    def record(number: int, predicted: float) -> TrialRecord:
        return make_record(
            number, CONFIG, 100.0, needed_bytes=10 * GIB, predicted_bytes=int(predicted * 10 * GIB)
        )

    assert advisories.prediction_error(record(0, 1.2)) == pytest.approx(0.2)
    assert advisories.of_records([record(0, 1.04), record(1, 0.96)]) == []
    (warning,) = advisories.of_records([record(0, 1.1), record(1, 0.8)])
    assert one_line([warning]) == ["prediction_off"]
    assert "-20 % off" in warning.message
    assert CONFIG.label() in warning.message


def test_without_a_prediction_or_a_counter_there_is_no_error() -> None:
    assert advisories.prediction_error(make_record(0, CONFIG, 1.0)) is None
    assert advisories.prediction_error(make_record(0, CONFIG, reason=Reason.CRASH, predicted_bytes=5)) is None
    bare = replace(measured(), predicted_bytes=5)
    assert bare.measurement is not None
    memory = replace(bare.measurement.memory, peak_reserved_bytes=None)
    without = replace(bare, measurement=replace(bare.measurement, memory=memory))
    assert advisories.prediction_error(without) is None


@pytest.mark.parametrize(("prepared", "seconds", "said"), [(8.0, 10.0, ["script_preparation"]), (8.0, 100.0, []), (0.8, 1.0, []), (None, 10.0, [])])
def test_a_script_that_takes_most_of_each_trial_to_prepare_is_told(prepared: float | None, seconds: float, said: list[str]) -> None:
    facts = {"script_seconds": prepared}
    found = advisories.of_records([make_record(n, CONFIG, 100.0, facts=facts, seconds=seconds) for n in range(2)])
    assert one_line(found) == said
    assert all("80 % of the time of trials" in warning.message and "8.00 s each" in warning.message for warning in found)


@pytest.mark.parametrize(("rows", "said"), [(10, ["few_rows"]), (64, []), (None, [])])
def test_less_data_than_one_step_takes_is_said(rows: int | None, said: list[str]) -> None:
    facts = {"loader": {"rows": rows, "user_data": True}}
    assert one_line(of_winner(make_record(0, CONFIG, 100.0, facts=facts))) == said


def test_weights_that_the_users_code_stores_in_16_bit_change_the_mathematics() -> None:
    half, whole = make_config(8, precision=Precision.BF16), make_config(8)
    records = [
        make_record(0, half, 200.0, facts={"weight_dtype": "bfloat16"}),
        make_record(1, whole, 100.0, facts={"weight_dtype": "float32"}),
    ]
    result = replace(make_result(records), model={"weights_dtype": "float32"})
    assert result.changes(whole) == ()
    assert "stored the weights in bfloat16" in result.changes(half)[0]
    (warning,) = advisories.of_numerics(result)
    assert one_line([warning]) == ["other_optimizer"]
    assert "float32" in str(warning.next_step)
    assert whole.label() in warning.message
    assert replace(result, model={"weights_dtype": "bfloat16"}).changes(half) == ()


@pytest.mark.parametrize(("speed", "why", "said"), [(300.0, OUTSIDE, True), (300.0, None, False), (50.0, OUTSIDE, False)])
def test_a_faster_baseline_that_was_not_to_be_searched_is_said(speed: float, why: str | None, said: bool) -> None:
    defaults, found = make_config(8), make_config(8, gradient_checkpointing=True)
    records = [make_record(0, defaults, speed, role=Role.DEFAULTS, why=why), make_record(1, found, 100.0)]
    warnings = advisories.of_baselines(make_result(records, best=found, defaults=defaults))
    assert [w.code for w in warnings] == (["faster_baseline"] if said else [])
    for warning in warnings:
        assert warning.message.startswith("faster than the winner, and outside of what was to be searched: the plain defaults (8x8 fp32")
        assert "300" in warning.message


@pytest.mark.parametrize(("played", "settled", "said"), [((1,), False, True), ((1, 1, 1), False, True), ((0, 1), False, False), ((), False, False), ((1,), True, False)])
def test_half_a_round_is_said(played: tuple[int, ...], settled: bool, said: bool) -> None:
    configs = [make_config(8), make_config(16)]
    records = [make_record(n, config, 100.0 - n) for n, config in enumerate(configs)]
    records += [make_record(2 + n, configs[which], 50.0, role=Role.PLAYOFF) for n, which in enumerate(played)]
    tied = (e,) if (e := estimate_of([r for r in records if r.config == configs[1]])) is not None else ()
    warnings = advisories.of_playoff(make_result(records, best=configs[0], tied=tied, settled=settled))
    assert one_line(warnings) == (["half_a_round"] if said else [])
    assert all(w.message.startswith("the play-off ended before all had run in it: 8x8 fp32 adamw_torch_fused ran in the search only") for w in warnings)


@pytest.mark.parametrize(("later", "said"), [(260.0, "30 % faster"), (150.0, "33 % slower"), (206.0, "")])
def test_a_machine_that_changed_between_baselines_and_winner_is_said_with_the_ratio_of_their_time(later: float, said: str) -> None:
    defaults, winner = make_config(8), make_config(16)
    records = [make_record(0, defaults, 100.0, role=Role.DEFAULTS), make_record(1, winner, 200.0)]
    records += [make_record(2 + n, winner, later + n / 10, role=Role.PLAYOFF) for n in range(3)]
    warnings = advisories.of_drift(make_result(records, best=winner, defaults=defaults))
    assert one_line(warnings) == (["drift"] if said else [])
    for warning in warnings:
        assert said in warning.message
        assert f"{winner.label()} ran at 200.0 samples/s, 2.00x the plain defaults" in warning.message
    records += [make_record(5 + n, defaults, later / 2, role=Role.PLAYOFF) for n in range(3)]
    assert advisories.of_drift(make_result(records, best=winner, defaults=defaults)) == [], "they met in the play-off"


def test_a_machine_that_changed_before_the_loaders_settings_were_tried_is_said() -> None:
    defaults, winner = make_config(8), make_config(16)
    tuned = winner.but(extra=(("dataloader_num_workers", 2),))
    records = [make_record(n, config, speed, role=Role.PLAYOFF) for n, (config, speed) in enumerate(((defaults, 100.0), (winner, 200.0)))]
    records.append(make_record(2, tuned, 600.0, role=Role.LOADER))
    (warning,) = advisories.of_drift(make_result(records, best=tuned, defaults=defaults))
    assert "200 % faster" in warning.message
    assert "200.0 samples/s, 2.00x the plain defaults" in warning.message
