"""What `--tune` adds to the space, what it refuses and why, and how a search deals with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autofit.beliefs.microstep import MicroStepModel
from autofit.beliefs.predict import dominates
from autofit.beliefs.speed import Observation, SpeedModel
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.extras import KNOBS, keeps_no_less, makes_sense, memory_prior, parse_tune, time_prior
from autofit.problem.space import DEFAULT_OPTIMS, Space
from autofit.problem.spec import SearchSpec, Workload
from autofit.results.export import export
from autofit.results.result import TuneResult
from autofit.search.assemble import compile_seconds
from autofit.search.choices import space_of
from autofit.search.tuning import run_search
from autofit.testing import simulated_landscape
from tests.builders import make_config, make_record, make_result
from tests.refusals import refused

EAGER = (("attn_implementation", "eager"),)
COMPILED = (("torch_compile", True),)
EXTRAS: dict[str, Any] = {
    "attn": {"problem": None, "values": ["eager", "sdpa", "flash_attention_2"], "default": "sdpa"},
    "compile": {"problem": None},
    "liger": {"problem": "liger_kernel is not installed"},
    "every_n_layers": {"problem": None, "values": [2, 4]},
    "offload": {"problem": None},
}


def facts(*precisions: Precision, kind: str = "cuda", **extras: Any) -> dict[str, Any]:
    return {
        "device": {"kind": kind, "name": "it", "precisions": list(precisions or Precision), "total_memory_bytes": 1},
        "optims": DEFAULT_OPTIMS,
        "missing_packages": {},
        "argument_defaults": {},
        "model": {"extras": {**EXTRAS, **extras}},
    }


def widened(*tune: str, described: dict[str, Any] | None = None, **fields: Any) -> Space:
    spec = SearchSpec(
        workload=fields.pop("workload", Workload(model="m")), effective_batch=8, tune=tune, optims=("adamw_torch",), **fields
    )
    return space_of(spec, described or facts())


def extras_of(configs: Sequence[TrialConfig]) -> set[tuple[Any, ...]]:
    return {c.extra for c in configs}


class TestNames:
    """What the option takes."""

    def test_names_come_as_a_list_or_with_commas(self) -> None:
        assert parse_tune("attn, compile,attn") == parse_tune(("attn", "compile")) == ("attn", "compile")
        assert parse_tune(None) == ()

    def test_an_unknown_name_is_refused(self) -> None:
        with refused("^--tune does not know 'learning_rate'$", hint="attn, compile, liger"):
            parse_tune("learning_rate")


class TestSpace:
    """What is in the wider space."""

    def test_without_it_nothing_is_added(self) -> None:
        assert extras_of(widened().configs) == {()}

    def test_the_plain_space_is_a_part_of_the_wider_one_and_comes_first(self) -> None:
        plain, wider = widened(), widened("attn", "every_n_layers")
        assert set(plain.configs) < set(wider.configs)
        assert wider.configs[0] == plain.configs[0]

    def test_other_attention_is_named_and_the_default_is_not(self) -> None:
        assert extras_of(widened("attn").configs) == {(), EAGER, (("attn_implementation", "flash_attention_2"),)}

    def test_flash_attention_goes_with_16_bit_only(self) -> None:
        flash = [c for c in widened("attn").configs if ("attn_implementation", "flash_attention_2") in c.extra]
        assert {c.precision for c in flash} == {Precision.BF16, Precision.FP16}

    def test_ways_of_checkpointing_go_with_checkpointing_only(self) -> None:
        configs = widened("every_n_layers", "offload").configs
        assert extras_of([c for c in configs if not c.gradient_checkpointing]) == {()}
        assert len(extras_of([c for c in configs if c.gradient_checkpointing])) == 6
        assert all(makes_sense(c) for c in configs)

    def test_compiled_fp32_is_left_out_where_it_is_really_tf32(self) -> None:
        card = widened("compile")
        assert {c.precision for c in card.configs if c.extra} == {Precision.BF16, Precision.FP16, Precision.TF32}
        assert [(r.knob, r.value) for r in card.removals] == [("torch_compile", "in fp32")]
        cpu = widened("compile", described=facts(Precision.FP32, Precision.BF16, kind="cpu"))
        assert {c.precision for c in cpu.configs if c.extra} == {Precision.FP32, Precision.BF16}
        assert any("compile time counts" in note for note in cpu.notes)

    def test_pure_bf16_joins_the_precisions_asked_for_or_the_default_ones(self) -> None:
        assert {c.precision for c in widened("pure_bf16").configs} == set(Precision)
        asked = widened("pure_bf16", precisions=(Precision.FP32,))
        assert {c.precision for c in asked.configs} == {Precision.FP32, Precision.PURE_BF16}

    @pytest.mark.parametrize(
        ("tune", "fields", "reason"),
        [
            ("liger", {}, "liger_kernel is not installed"),
            ("offload", {"checkpointing": (False,)}, "excludes that"),
            ("pure_bf16", {"described": facts(Precision.FP32)}, "bf16 is not native"),
            ("compile", {"described": facts(compile={"problem": "there is no C++ compiler"})}, "there is no C\\+\\+ compiler"),
            ("every_n_layers", {"described": {**facts(), "model": {}}}, "nothing is known"),
        ],
    )
    def test_what_cannot_work_here_is_refused_with_the_reason(self, tune: str, fields: dict[str, Any], reason: str) -> None:
        with refused(f"^--tune {tune} cannot be used: .*{reason}", hint=f"leave {tune} out"):
            widened(tune, **fields)

    def test_pure_bf16_and_kept_numerics_exclude_each_other(self) -> None:
        with refused("^--keep-numerics and --tune pure_bf16 exclude each other"):
            widened("pure_bf16", keep_numerics=True)


class TestBeliefs:
    """What is believed before and after trials."""

    def test_every_prior_is_a_mean_and_a_spread(self) -> None:
        pairs = [*EAGER, *COMPILED, ("offload", True), ("every_n_layers", 2), ("use_liger_kernel", True), ("new", 1)]
        for prior in (time_prior, memory_prior):
            assert all(abs(mean) < 1.5 and 0 < spread <= 0.5 for mean, spread in map(prior, pairs))

    def test_fewer_checkpointed_layers_are_faster_and_keep_more(self) -> None:
        assert time_prior(("every_n_layers", 4))[0] < time_prior(("every_n_layers", 2))[0] < 0
        assert memory_prior(("every_n_layers", 4))[0] > memory_prior(("every_n_layers", 2))[0] > 0

    def test_what_keeps_no_less_by_construction(self) -> None:
        plain = make_config(8)
        full = plain.but(gradient_checkpointing=True)
        ways = [full, *(full.but(extra=pairs) for pairs in ((("every_n_layers", 2),), (("offload", True),)))]
        for way in ways:
            assert keeps_no_less(way, way)
            assert keeps_no_less(plain, way)
            assert dominates(plain, way)
            assert not keeps_no_less(way, plain)
            assert not any(keeps_no_less(way, other) for other in ways if other != way)
        assert not keeps_no_less(plain.but(extra=EAGER), full)
        assert keeps_no_less(plain.but(extra=EAGER), full.but(extra=(*EAGER, ("every_n_layers", 2))))

    def test_one_trial_teaches_about_other_extras_but_leaves_them_open(self) -> None:
        """Neither identical nor unrelated: the level is shared, the factor is not."""
        import numpy as np

        configs = [make_config(b, extra=extra) for extra in ((), EAGER) for b in (8, 16)]
        measurement = make_record(0, configs[0], 100.0).measurement
        assert measurement is not None
        model, rng = SpeedModel(configs), np.random.default_rng(0)
        before = model.log_speed_draws([], 2000, rng).std(axis=0)
        after = model.log_speed_draws([Observation.of(configs[0], measurement)], 2000, rng)
        same, other = after.std(axis=0)[0], after.std(axis=0)[2]
        assert same < 0.05
        assert 0.1 < other < 0.5
        assert abs(after.mean(axis=0)[2] - np.log(100.0)) < 0.3
        assert before.shape == (4,)

    def test_extras_are_factors_of_the_micro_step_over_all_batches(self) -> None:
        """Seen at one batch, an extra's factor is expected at another as well."""
        import numpy as np

        sizes = (8, 16)
        configs = [make_config(b, extra=extra) for extra in ((), EAGER) for b in sizes]
        model = MicroStepModel(configs, [None] * 4)
        seen = np.array([[np.log(0.1), 0.005], [np.log(0.2), 0.005], [np.log(0.13), 0.005]])
        draws = model.draws(np.array([0, 1, 2]), seen, 2000, np.random.default_rng(0))
        assert np.exp(draws[:, 3]).mean() == pytest.approx(0.26, rel=0.1)


def landscape_with_attention() -> Any:
    """A simulated card on which eager attention is 12 % slower and one that is compiled 25 % faster, at each configuration."""
    plain = simulated_landscape(32, optims=("adamw_torch_fused",), ruggedness=0.01, jitter=0.005)
    points = []
    for point in plain.points:
        assert point.measurement is not None
        for extra, factor in (((), 1.0), (EAGER, 1.12), (COMPILED, 0.75)):
            micro = tuple(factor * s for s in point.measurement.micro_step_seconds)
            points.append(
                replace(
                    point,
                    config=point.config.but(extra=extra),
                    measurement=replace(point.measurement, micro_step_seconds=micro),
                )
            )
    return replace(plain, points=tuple(points))


class TestSearch:
    """A search over a landscape that has such knobs."""

    @pytest.fixture(scope="class")
    def result(self) -> TuneResult:
        spec = SearchSpec(workload=Workload(model="simulated"), effective_batch=32)
        return run_search(spec, landscape=landscape_with_attention(), predict=False)

    def test_it_finds_the_knob_that_helps_without_trying_everything(self, result: TuneResult) -> None:
        assert result.best.config.extra == COMPILED
        fastest = max(
            p.measurement.samples_per_second(
                per_device_train_batch_size=p.config.per_device_train_batch_size,
                gradient_accumulation_steps=p.config.gradient_accumulation_steps,
            )
            for p in landscape_with_attention().points
        )
        assert result.best.samples_per_second > 0.98 * fastest
        assert result.cost.trials < len(landscape_with_attention().points) / 3

    def test_the_report_names_it(self, result: TuneResult) -> None:
        from autofit.reports.report import report_lines

        text = "\n".join(line.text for line in report_lines(result, 120))
        assert "torch_compile" in text
        assert "torch_compile=True" in text.partition("To use it")[2]


class TestAnswer:
    """Extras come out where they belong."""

    @pytest.fixture
    def result(self) -> TuneResult:
        extra = (*EAGER, *COMPILED, ("every_n_layers", 2))
        config = make_config(8, gradient_checkpointing=True, precision=Precision.BF16, extra=extra)
        measured = make_record(0, config, 100.0, facts={"compile": {"seconds": 40.0}})
        return make_result([measured, make_record(1, config, 99.0, facts={"compile": {"seconds": 3.0}})])

    def test_keywords_of_training_arguments(self, result: TuneResult) -> None:
        assert result.arguments["torch_compile"] is True
        assert result.arguments["activation_checkpointing_kwargs"] == {"every_n_layers": 2}
        assert "attn_implementation" not in result.arguments
        assert result.model_arguments == {"attn_implementation": "eager"}

    def test_python_json_and_flags(self, result: TuneResult) -> None:
        python = export(result, "python")
        assert 'from_pretrained("google-bert/bert-large-uncased", attn_implementation="eager")' in python
        assert 'activation_checkpointing_kwargs={"every_n_layers": 2},' in python
        compile(python, "snippet", "exec")
        assert json.loads(export(result, "json"))["torch_compile"] is True
        flags = export(result, "cli")
        assert "--torch_compile True" in flags
        assert "--attn_implementation eager" in flags

    def test_the_attention_that_was_asked_for_comes_out_too(self, result: TuneResult) -> None:
        workload = replace(result.spec.workload, attn_implementation="sdpa")
        plain = make_result([make_record(0, make_config(8), 1.0)], workload=workload)
        assert plain.model_arguments == {"attn_implementation": "sdpa"}

    def test_what_compiling_takes_is_the_longest_that_was_seen(self, result: TuneResult) -> None:
        assert compile_seconds(result.trials, result.best.config) == 40.0
        assert compile_seconds(result.trials, make_config(8)) == 0.0


def test_the_knobs_of_the_readme_and_the_help_are_all_there_are() -> None:
    from pathlib import Path

    import autofit

    readme = (Path(autofit.__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert f"--tune {','.join(KNOBS)}" in readme


@pytest.mark.slow
def test_attention_and_part_of_the_layers_are_traced_and_the_rest_says_why_not() -> None:
    from autofit.forecasts.estimation import asking
    from autofit.forecasts.laws import Setting, collect, law_class

    plain = make_config(8, precision=Precision.BF16)
    checkpointed = plain.but(gradient_checkpointing=True)
    traced = (plain, plain.but(extra=EAGER), checkpointed, checkpointed.but(extra=(("every_n_layers", 2),)))
    others = {
        plain.but(extra=COMPILED): "torch.compile fuses operators",
        checkpointed.but(extra=(("offload", True),)): "pinned host memory",
        plain.but(extra=(("attn_implementation", "flash_attention_2"),)): "kernels of its own",
    }
    workload = Workload(model="bert-tiny", seq_len=128)
    with asking(workload) as (described, ask):
        setting = Setting(workload=workload, facts=described)
        found = collect(setting, (*traced, *others), ask)
        laws = [found[law_class(setting, config)].laws for config in traced]
        peaks = [law.memory.predict(64).peak_allocated_bytes for law in laws if law is not None]
        assert len(peaks) == 4
        assert peaks[1] > peaks[0] > max(peaks[2:])
        assert peaks[2] != peaks[3]
        for config, reason in others.items():
            assert found[law_class(setting, config)].laws is None
            assert reason in str(found[law_class(setting, config)].reason)
