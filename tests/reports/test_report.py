"""The report says what the result holds: every number in it can be found there, and nothing is lost at any width."""

from __future__ import annotations

import dataclasses
import io
import shlex
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from autofit.problem.config import Precision, TrialConfig
from autofit.reports.report import (
    baseline_lines,
    copy_lines,
    headline,
    joined_flags,
    memory_rows,
    render,
    report_lines,
    spare_bytes,
    standing_lines,
    subject_lines,
    warning_lines,
)
from autofit.reports.report_trials import (
    cost_lines,
    ending_lines,
    knob_lines,
    left_out_lines,
    measured_lines,
    unmeasured_lines,
)
from autofit.results.export import arguments, export
from autofit.results.knob_worth import measured
from autofit.results.result import Baseline, TuneResult, Warning
from autofit.trials.trial import Reason, Role, TrialRecord
from autofit.units import GIB, MIB
from tests.builders import CPU, make_config, make_record, make_result

BF16 = Precision.BF16
DEFAULTS = make_config(8)
RECIPE = make_config(32, precision=BF16)
WINNER = make_config(32, precision=BF16, optim="adamw_bnb_8bit")
TIED = make_config(16, precision=BF16, optim="adamw_bnb_8bit")
TOO_BIG = make_config(64, precision=BF16)


def records() -> list[TrialRecord]:
    return [
        make_record(0, DEFAULTS, 40.0, role=Role.DEFAULTS, needed_bytes=9 * GIB, predicted_bytes=9 * GIB),
        make_record(
            1,
            TOO_BIG,
            reason=Reason.OUT_OF_MEMORY,
            message="CUDA out of memory",
            phase="backward",
            role=Role.HAND_RECIPE,
            predicted_bytes=17 * GIB,
        ),
        make_record(2, RECIPE, 140.0, role=Role.HAND_RECIPE, needed_bytes=14 * GIB),
        make_record(3, WINNER, 160.0, needed_bytes=10 * GIB, predicted_bytes=11 * GIB),
        make_record(4, TIED, 160.2, needed_bytes=12 * GIB),
        make_record(
            5, make_config(64), reason=Reason.PREDICTED_TOO_BIG, message="predicted to need 29.2 GiB"
        ),
        make_record(6, make_config(4), reason=Reason.ERROR, message="ValueError: no", phase="forward"),
        make_record(7, WINNER, 160.0, role=Role.CONFIRMATION, needed_bytes=10 * GIB),
    ]


def result_of(given: Sequence[TrialRecord] | None = None, **fields: Any) -> TuneResult:
    made = make_result(given if given is not None else records(), **{"best": WINNER, **fields})
    return dataclasses.replace(made, tied=tuple(e for k, e in measured(made).items() if k == TIED.key()))


def one(records: Sequence[TrialRecord], **fields: Any) -> TuneResult:
    return make_result(records, **fields)


def text_of(result: TuneResult, width: int = 100) -> str:
    return "\n".join(line.text for line in report_lines(result, width))


def words(command: str) -> list[str]:
    """The command's words as a real shell splits them."""
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def rendered(result: TuneResult, **console: Any) -> str:
    target = io.StringIO()
    render(result, Console(file=target, **console))
    return target.getvalue()


def test_the_headline_is_one_sentence_with_speed_interval_tokens_and_both_baselines() -> None:
    said = headline(result_of())
    assert said.startswith(
        "Fastest that fits: batch 32 x 2 accumulation steps, bf16, checkpointing off, adamw_bnb_8bit, at 16"
    )
    best = result_of().best
    assert (
        f"{best.samples_per_second:.1f} samples/s (95 % interval {best.interval.low:.1f} to {best.interval.high:.1f})"
        in said
    )
    assert f"{best.tokens_per_second:,.0f} tokens/s" in said
    assert said.endswith(": 4.00x the plain defaults, 1.14x the hand recipe.")


def test_a_baseline_that_did_not_fit_is_said_and_not_divided_by() -> None:
    given = [
        make_record(0, DEFAULTS, reason=Reason.OUT_OF_MEMORY, role=Role.DEFAULTS),
        make_record(1, WINNER, 10.0),
    ]
    said = headline(one(given, recipe=RECIPE))
    assert "the plain defaults do not fit" in said
    assert "the hand recipe was not run" in said
    table = "\n".join(baseline_lines(one(given), 80))
    assert "does not fit" in table


def test_a_baseline_with_any_other_note_says_it() -> None:
    baselines = {"hand_recipe": Baseline(config=None, note="no power of two fits without checkpointing")}
    result = dataclasses.replace(result_of(), baselines=baselines, speedup={"hand_recipe": None})
    assert "no comparison with the hand recipe (no power of two fits without checkpointing)" in headline(
        result
    )
    assert "no power of two fits" in "\n".join(baseline_lines(result, 80))


def test_a_winner_that_is_the_defaults_is_not_called_faster_than_itself() -> None:
    result = one([make_record(0, DEFAULTS, 10.0, role=Role.DEFAULTS)], recipe=RECIPE)
    assert "the same as the plain defaults" in headline(result)
    assert "1.00x" not in headline(result)
    assert "the same" in "\n".join(baseline_lines(result, 80))


def test_a_gain_within_the_intervals_is_called_noise() -> None:
    given = [make_record(0, DEFAULTS, 10.0, role=Role.DEFAULTS), make_record(1, WINNER, 10.05)]
    assert "(within the noise)" in headline(one(given))
    assert "(within the noise)" not in headline(result_of())


def test_of_two_that_met_in_the_playoff_its_verdict_tells_what_is_noise() -> None:
    """The machine became slower from round to round: their intervals overlap, and in each round the winner was faster by a third."""
    given = [make_record(0, DEFAULTS, 90.0, role=Role.DEFAULTS), make_record(1, WINNER, 120.0)]
    given += [make_record(2 + n, config, speed / (1 + n), role=Role.PLAYOFF) for n in range(3) for config, speed in ((DEFAULTS, 90.0), (WINNER, 120.0))]
    result = one(given, best=WINNER, defaults=DEFAULTS)
    estimate = result.baselines["defaults"].estimate
    assert estimate is not None
    assert estimate.interval.overlaps(result.best.interval)
    assert "1.33x the plain defaults, the" in headline(result)
    assert "1.33x the plain defaults (within the noise), the" in headline(dataclasses.replace(result, tied=(estimate,)))


def test_memory_is_named_by_counter_and_adds_up_to_the_limit() -> None:
    rows = {name: size for name, size, _ in memory_rows(result_of())}
    assert rows["needed"] == rows["peak reserved"] + rows["context"] == 10 * GIB
    assert rows["needed"] + rows["spare"] == rows["limit"] == 16 * GIB
    assert rows["peak allocated"] <= rows["peak reserved"]
    assert rows["context"] == 500 * MIB
    assert "6.0 GiB to spare" in "\n".join(standing_lines(result_of(), 100))


def test_a_cpu_has_no_context_and_its_counters_are_explained_as_a_cpus() -> None:
    given = [make_record(0, DEFAULTS, 10.0, context_bytes=0)]
    rows = {name: meaning for name, _, meaning in memory_rows(one(given, device=CPU))}
    assert "context" not in rows
    assert "device used" not in rows
    assert "address space" in rows["peak reserved"]


def test_a_winner_over_the_limit_is_shouted() -> None:
    result = result_of(memory_limit_bytes=9 * GIB)
    assert spare_bytes(result) == -GIB
    assert "1.0 GiB OVER the limit" in "\n".join(standing_lines(result, 100))


def test_unknown_memory_is_left_out_and_not_called_zero() -> None:
    best = dataclasses.replace(
        result_of().best, memory=dataclasses.replace(result_of().best.memory, peak_reserved_bytes=None)
    )
    result = dataclasses.replace(result_of(), best=best)
    assert spare_bytes(result) is None
    assert {"needed", "spare", "peak reserved"}.isdisjoint(name for name, _, _ in memory_rows(result))
    assert "to spare" not in text_of(result)


def test_ties_and_confirmation_are_stated() -> None:
    said = " ".join(standing_lines(result_of(), 100))
    assert "Confirmed in a run at full accumulation" in said
    assert f"Tied with {TIED.label()}" in said
    assert "needs the least memory of those as fast" in said
    assert "Not confirmed" in " ".join(standing_lines(result_of(records()[:-1]), 100))


@pytest.mark.parametrize(
    ("best_gib", "tied_gib", "says"),
    [
        (10, 12, "The winner needs the least memory of those as fast in the mean."),
        (10, 6, "The winner is the fastest in the mean."),
        (None, None, "The winner is the fastest in the mean."),
    ],
)
def test_what_decided_a_tie_is_said_where_the_figures_bear_it_out(best_gib: int | None, tied_gib: int | None, says: str) -> None:
    found = result_of()
    one, other = found.best, dataclasses.replace(found.tied[0], config=found.best.config.but(gradient_checkpointing=True))

    def needing(estimate: Any, gib: int | None, speed: float) -> Any:
        memory = dataclasses.replace(estimate.memory, peak_reserved_bytes=None if gib is None else gib * GIB, context_bytes=0)
        return dataclasses.replace(estimate, memory=memory, samples_per_second=speed)

    result = dataclasses.replace(found, best=needing(one, best_gib, 100.0), tied=(needing(other, tied_gib, 99.9),), reference_optim=one.config.optim)
    said = next(line for line in " ".join(standing_lines(result, 100)).split("Tied with")[1:])
    assert says in said
    assert ("least memory" in said) == ("least memory" in says)


def test_measured_configurations_come_fastest_first_after_the_winner_with_their_marks() -> None:
    result = result_of()
    lines = measured_lines(result, measured(result), 140, None)
    assert [line.split()[0] for line in lines[1:5]] == ["*~3", "=~4", "2", "0"]
    assert "search, confirm" in lines[1]
    assert "10.0 GiB   11.0 GiB   +10 %" in lines[1]
    legend = " ".join(" ".join(lines[5:]).split())
    assert legend.startswith("* the winner; = tied with it; ~ changes the mathematics of training (against adamw_torch_fused)")


def test_the_rest_comes_infeasible_then_failed_then_skipped_with_reasons() -> None:
    result = result_of()
    lines = unmeasured_lines(result, measured(result), 140, None)
    assert [line.split()[0] for line in lines[1:]] == ["1", "6", "5"]
    assert "did not fit: CUDA out of memory (in backward; predicted 17.0 GiB)" in lines[1]
    assert "error: ValueError: no (in forward)" in lines[2]
    assert "skipped: predicted to need 29.2 GiB" in lines[3]


def test_a_configuration_that_failed_once_to_fit_is_not_listed_with_a_speed() -> None:
    given = [*records(), make_record(8, TIED, reason=Reason.OUT_OF_MEMORY, role=Role.PLAYOFF)]
    result = make_result(given, best=WINNER)
    assert TIED.label() not in "\n".join(measured_lines(result, measured(result), 140, None))
    assert TIED.label() in "\n".join(unmeasured_lines(result, measured(result), 140, None))


def test_runs_that_failed_are_listed_though_others_of_the_configuration_completed() -> None:
    crash = [make_record(8 + n, WINNER, reason=Reason.CRASH, role=Role.CONFIRMATION, message="killed by SIGSEGV") for n in range(2)]
    cut = make_record(10, TIED, reason=Reason.INTERRUPTED, role=Role.PLAYOFF)
    result = result_of([r for r in records() if r.role is not Role.CONFIRMATION] + [*crash, cut])
    told = [line for line in unmeasured_lines(result, measured(result), 140, None) if WINNER.label() in line]
    assert len(told) == 1, "once per role"
    assert "confirm run, others completed: crashed: killed by SIGSEGV" in told[0]
    assert WINNER.label() in "\n".join(measured_lines(result, measured(result), 140, None))
    assert not any(TIED.label() in line for line in unmeasured_lines(result, measured(result), 140, None))
    unconfirmed = dataclasses.replace(result, confirmed=False)
    assert "Not confirmed: its run at full accumulation and longest length failed." in standing_lines(unconfirmed, 100)


def test_one_that_the_figures_show_to_be_slower_is_no_tie() -> None:
    """The play-off had no reason to go on until it was separated: it could not be expected to gain."""
    given = [*records()[:-1], *(make_record(8 + n, config, speed + n) for n, (config, speed) in enumerate(((WINNER, 160.0), (TIED, 120.0))))]
    given = [r for r in given if r.number != 4]
    said = " ".join(standing_lines(result_of(given), 200))
    assert "Tied" not in said
    assert f"Slower in the mean, though the play-off ended before that was sure: {TIED.label()} (121.0 samples/s" in said
    assert "= tied" not in "\n".join(measured_lines(result_of(given), measured(result_of(given)), 120, None))
    early = " ".join(standing_lines(dataclasses.replace(result_of(given), settled=False), 200))
    assert f"Not separated yet from {TIED.label()}" in early


def test_a_run_that_saw_no_row_known_to_be_the_longest_is_not_said_to_have() -> None:
    script = dataclasses.replace(result_of(), confirmed=True, model={"source": "script", "sample_length": None})
    uneven = {"uneven": True, "memory_decided_by": {"length": 9, "unit": "tokens", "shown": False}}
    for result in (script, dataclasses.replace(script, data=uneven)):
        assert "Confirmed in a run at full accumulation." in standing_lines(result, 100)
    shown = {"uneven": True, "memory_decided_by": {"length": 9, "unit": "tokens", "shown": True}}
    for result in (dataclasses.replace(script, model={}), dataclasses.replace(script, data=shown), dataclasses.replace(script, data={"uneven": False})):
        assert "Confirmed in a run at full accumulation and longest length." in standing_lines(result, 100)


def test_a_playoff_that_ended_too_early_is_not_called_a_tie() -> None:
    result = dataclasses.replace(result_of(), settled=False)
    said = " ".join(standing_lines(result, 100))
    assert f"Not separated yet from {TIED.label()}" in said
    assert "beyond the noise" not in said
    assert "= not separated from it yet" in "\n".join(measured_lines(result, measured(result), 140, None))
    assert TuneResult.from_json(result.to_json()) == result


def test_long_tables_are_cut_and_say_how_many_more_and_where() -> None:
    sizes = [1, 2, 4, 8, 16, 32, 64]
    given = [make_record(i, make_config(b), 10.0 + b) for i, b in enumerate(sizes)]
    given += [make_record(20 + b, make_config(b, precision=BF16), reason=Reason.OUT_OF_MEMORY) for b in sizes]
    result = one(given)
    short = [line.text for line in report_lines(result, 100, trial_rows=5)]
    assert [line for line in short if "more" in line] == [
        "  ... and 2 more: autofit show --all"
    ] * 2
    assert "more:" not in "\n".join(line.text for line in report_lines(result, 100, trial_rows=None))


def test_the_waterfall_names_what_was_measured() -> None:
    result = result_of()
    said = "\n".join(knob_lines(result, measured(result), 100))
    assert "optimizer adamw_torch_fused -> adamw_bnb_8bit  1.14x  measured" in said
    assert "From the plain defaults to the winner: 40" in said
    assert "bf16 1.00, fp32 0.25" in said


def test_knobs_that_cannot_be_told_apart_are_said_to_be() -> None:
    result = one([make_record(0, DEFAULTS, 40.0, role=Role.DEFAULTS), make_record(1, RECIPE, 140.0)])
    said = "\n".join(knob_lines(result, measured(result), 140))
    assert "batch size 8 -> 32 and precision fp32 -> bf16  3.50x  measured, cannot be told apart" in said
    assert "Fitted" not in said


def test_what_was_not_tried_has_a_reason_and_a_count() -> None:
    removals = (
        {"knob": "optim", "value": "adamw_bnb_8bit", "reason": "needs bitsandbytes, which is not installed"},
    )
    untested = {"predicted_too_big": 31, "not_promising": 4, "dominated": 0, "new_reason": 2}
    said = "\n".join(left_out_lines(result_of(removals=removals, untested=untested), 100))
    assert "optimizer     adamw_bnb_8bit  needs bitsandbytes" in said
    assert "31  predicted not to fit" in said
    assert "4  the search ended first" in said
    assert "2  new reason" in said
    assert "at least as much" not in said
    assert left_out_lines(result_of(), 100) == []


def test_the_certificate_is_stated_once_with_its_contenders() -> None:
    contender = {
        "config": WINNER.but(gradient_checkpointing=True).to_json(),
        "samples_per_second": 150.0,
        "interval": {"low": 140.0, "high": 158.0},
        "fit_probability": 0.98,
        "beats_probability": 0.021,
    }
    statement = "none of the 4 untested configurations is predicted to win"
    result = result_of(
        stopped=statement,
        certificate={"statement": statement, "contenders": [contender]},
        untested={"not_promising": 4},
    )
    said = "\n".join(ending_lines(result, 100))
    assert said.count("untested configurations is predicted to win.") == 1
    assert "32x2 bf16 ckpt adamw_bnb_8bit       140.0 to 158.0           98 %   2.1 %" in said
    assert "not expected to win" in "\n".join(left_out_lines(result, 100))


def test_a_certificate_about_another_best_is_linked_with_the_winner_by_what_was_measured() -> None:
    def said(best: TrialConfig) -> str:
        return "\n".join(ending_lines(result_of(certificate={"statement": "none is left", "best": best.to_json()}), 100))

    assert f"{RECIPE.label()} was measured at 140.0 samples/s, the winner at 160.0." in said(RECIPE)
    assert "the winner at" not in said(WINNER)
    assert "the winner at" not in said(TOO_BIG), "it did not complete"


def test_cost_says_when_the_search_has_paid_for_itself() -> None:
    said = " ".join(" ".join(cost_lines(result_of(), 100)).split())
    assert (
        "1m 15s in all, 1m 01s of it in trials: 6 to search, 1 to settle ties and to confirm; 1 ran out of memory."
        in said
    )
    assert "Against the plain defaults it pays back after 25." in said
    quick = dataclasses.replace(result_of(), cost=dataclasses.replace(result_of().cost, seconds=0.59))
    assert "590.0 ms in all, the recorded trials took 1m 01s: 6 to search" in "\n".join(cost_lines(quick, 100))
    slower = one(
        [make_record(0, DEFAULTS, 10.0, role=Role.DEFAULTS), make_record(1, WINNER, 9.9)], best=WINNER
    )
    assert "Against the plain defaults it saves nothing." in "\n".join(cost_lines(slower, 100))


def test_a_result_prints_as_one_line() -> None:
    text = str(result_of())
    assert text.startswith(f"fastest that fits: {result_of().best.config.label()}, ")
    assert text.endswith(" samples/s")
    assert "\n" not in text


def test_a_bundled_config_is_named_where_the_model_is() -> None:
    assert "(bundled config)" not in subject_lines(result_of(model={"source": "local"}), 100)[0]
    assert "(bundled config), " in subject_lines(result_of(model={"source": "preset"}), 100)[0]


def test_each_warning_has_its_next_step_and_is_announced_on_the_first_screen() -> None:
    warnings = (
        Warning(code="a", message="something is off", next_step="do this"),
        Warning(code="b", message="no step."),
    )
    result = result_of(warnings=warnings)
    assert warning_lines(result, 100) == ["  ! Something is off.", "    Next: do this", "  ! No step."]
    assert "2 warnings: see below." in standing_lines(result, 100)


def test_the_lines_to_copy_come_last_and_are_what_export_gives() -> None:
    result = result_of()
    lines = [line.text for line in report_lines(result, 60)]
    start = next(i for i, line in enumerate(lines) if line.startswith("args = "))
    end = lines.index(")", start)
    call = "\n".join(lines[start : end + 1])
    scope: dict[str, Any] = {"TrainingArguments": dict}
    exec(call, scope)
    assert scope["args"] == {"output_dir": "out", **arguments(result)}
    flags = "\n".join(lines[lines.index("or as flags of a script that uses HfArgumentParser:") + 2 :])
    assert " \\\n" in flags
    assert words(flags) == shlex.split(export(result, "cli"))


def test_flags_are_continued_with_a_backslash_where_they_do_not_fit() -> None:
    flags = [f"--{name} 1" for name in ("a" * 20, "b" * 20, "c" * 20)]
    assert joined_flags(flags, 60) == [f"{flags[0]} {flags[1]} \\", f"  {flags[2]}"]


def test_an_answer_that_flags_cannot_say_still_has_its_call() -> None:
    defaults = {**result_of().argument_defaults, "dataloader_num_workers": 2}
    config = make_config(8, extra=(("dataloader_num_workers", None),))
    lines = [
        line.text for line in copy_lines(one([make_record(0, config, 5.0)], argument_defaults=defaults), 80)
    ]
    assert any("cannot be said with a flag" in line for line in lines)
    assert any(line == "    dataloader_num_workers=None," for line in lines)


@pytest.mark.parametrize("width", [20, 60, 80, 100, 140, 250])
def test_no_line_but_those_to_copy_is_wider_than_the_terminal(width: int) -> None:
    result = result_of(untested={"dominated": 3}, warnings=(Warning(code="a", message="long " * 60),))
    cut = len(report_lines(result, width)) - len(copy_lines(result, width))
    lines = [line.text for line in report_lines(result, width)[:cut]]
    assert max(len(line) for line in lines) <= max(width, 80)


def test_a_long_title_of_the_lines_to_copy_is_folded() -> None:
    config = make_config(8, optim="adamw_bnb_8bit", extra=(("dataloader_num_workers", 2), ("dataloader_pin_memory", False)))
    lines = [line.text for line in copy_lines(one([make_record(0, config, 5.0)]), 80)]
    assert max(len(line) for line in lines[: lines.index("")]) <= 80


def test_every_number_survives_every_width() -> None:
    result = result_of()
    for width in (20, 60, 80, 140):
        words = text_of(result, width).split()
        for number in ("160.0", "140.0", "16.0", "10.0"):
            assert any(number in word for word in words), (width, number)


def test_a_file_gets_no_escape_codes_and_ascii_gets_ascii() -> None:
    result = result_of(warnings=(Warning(code="a", message="caf\u00e9 \x1b[31mred\x1b[0m \u65e5"),))
    assert "\x1b" not in rendered(result, width=80)
    raw = io.BytesIO()
    target = io.TextIOWrapper(raw, encoding="ascii")
    render(result, Console(file=target, width=80))
    target.flush()
    assert b"Caf? " in raw.getvalue()


def test_colour_carries_no_meaning_and_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    import re

    result = result_of(warnings=(Warning(code="a", message="something"),))
    plain = rendered(result, width=80)
    coloured = rendered(result, width=80, force_terminal=True, color_system="standard", no_color=False)
    assert "\x1b[1;32m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    codes = set(
        re.findall(
            r"\x1b\[[0-9;]*m", rendered(result, width=80, force_terminal=True, color_system="standard")
        )
    )
    assert codes <= {"\x1b[0m", "\x1b[1m"}


def test_text_from_outside_is_never_read_as_markup() -> None:
    given = [
        make_record(0, DEFAULTS, 5.0),
        make_record(1, WINNER, reason=Reason.ERROR, message="[red]x[/red] [/] :smile:"),
    ]
    assert "[red]x[/red] [/] :smile:" in rendered(one(given), width=120)


def test_the_smallest_result_has_a_report() -> None:
    config = TrialConfig(per_device_train_batch_size=1)
    given = [make_record(0, config, 0.5, tokens_per_sample=None, samples=1, jitter=0.0, context_bytes=0)]
    said = text_of(one(given, device=CPU, effective_batch=1, software={}, model={}, stopped=""), 80)
    assert "0.5 samples/s" in said
    assert "tokens/s" not in said
    assert "use_cpu=True" in said
