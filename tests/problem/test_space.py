"""The space holds every legal configuration, each with the exact product, and says what it leaves out and why."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autofit.problem.config import Precision, TrialConfig
from autofit.problem.space import (
    DEFAULT_OPTIMS,
    GEMM_GRANULARITY,
    Capabilities,
    Removal,
    Space,
    build_space,
    checkpointing_problem,
    divisors,
    optim_problem,
    precision_problem,
    preferred_order,
)
from tests.refusals import refused
from tests.strategies import NAMED_BATCHES, effective_batches

A100 = Capabilities(device_kind="cuda", precisions=tuple(Precision), optims=(*DEFAULT_OPTIMS, "sgd"))
T4 = Capabilities(device_kind="cuda", precisions=(Precision.FP32, Precision.FP16), optims=DEFAULT_OPTIMS)
CPU = Capabilities(device_kind="cpu", precisions=(Precision.FP32, Precision.BF16), optims=DEFAULT_OPTIMS)


@pytest.mark.parametrize("effective_batch", NAMED_BATCHES)
def test_the_promised_effective_batches_multiply_out_in_every_configuration(effective_batch: int) -> None:
    space = build_space(effective_batch=effective_batch, capabilities=A100)
    assert {config.effective_batch() for config in space.configs} == {effective_batch}
    sizes = {config.per_device_train_batch_size for config in space.configs}
    assert sizes == {d for d in range(1, effective_batch + 1) if effective_batch % d == 0}


@given(effective_batches(), st.integers(1, 8), st.sampled_from((A100, T4, CPU)))
def test_any_effective_batch_multiplies_out_over_all_devices(
    per_device: int, world_size: int, capabilities: Capabilities
) -> None:
    total = per_device * world_size
    space = build_space(effective_batch=total, capabilities=capabilities, world_size=world_size)
    assert all(config.effective_batch(world_size) == total for config in space.configs)
    assert len({config.key() for config in space.configs}) == len(space)


@given(effective_batches(240))
def test_a_configuration_and_its_parameters_lead_to_each_other(effective_batch: int) -> None:
    space = build_space(effective_batch=effective_batch, capabilities=CPU)
    choices = space.choices()
    for config in space.configs:
        params = space.params_of(config)
        assert "gradient_accumulation_steps" not in params
        assert set(params) == set(choices)
        assert all(value in choices[name] for name, value in params.items())
        assert space.config_of(params) == config
        assert config in space


def test_parameters_outside_the_space_lead_to_nothing() -> None:
    space = build_space(effective_batch=12, capabilities=CPU)
    params = space.params_of(space.configs[0])
    assert space.config_of({**params, "per_device_train_batch_size": 5}) is None
    assert space.config_of({**params, "optim": "sgd"}) is None
    assert space.config_of({}) is None
    assert TrialConfig(per_device_train_batch_size=12, gradient_accumulation_steps=2) not in space
    assert "12x1" not in space


@given(st.integers(1, 10_000))
def test_divisors_are_all_there_once_and_in_order(number: int) -> None:
    found = divisors(number)
    assert list(found) == [d for d in range(1, number + 1) if number % d == 0]


@given(st.lists(st.integers(1, 500), unique=True))
def test_multiples_of_eight_come_first(sizes: list[int]) -> None:
    ordered = preferred_order(sizes)
    assert sorted(ordered) == sorted(sizes)
    flags = [size % GEMM_GRANULARITY != 0 for size in ordered]
    assert flags == sorted(flags)
    assert all(a < b for a, b, same in zip(ordered, ordered[1:], map(bool.__eq__, flags, flags[1:])) if same)


def test_an_effective_batch_without_a_multiple_of_eight_is_said() -> None:
    space = build_space(effective_batch=50, capabilities=CPU)
    assert any("50 has no divisor that is a multiple of 8" in note for note in space.notes)
    assert not build_space(effective_batch=64, capabilities=CPU).notes
    assert not build_space(effective_batch=7, capabilities=CPU).notes, "nothing to prefer below 8"


def test_an_effective_batch_that_the_devices_cannot_share_is_refused() -> None:
    with refused("^effective batch 10 is not a multiple of 4 devices$"):
        build_space(effective_batch=10, capabilities=CPU, world_size=4)


@pytest.mark.parametrize(
    ("capabilities", "removed"),
    [
        (A100, {}),
        (T4, {"bf16": "not native", "tf32": "8.0 or newer"}),
        (CPU, {"fp16": "no effect on the CPU", "tf32": "NVIDIA"}),
    ],
)
def test_a_precision_that_the_device_lacks_is_removed_with_its_reason(
    capabilities: Capabilities, removed: dict[str, str]
) -> None:
    space = build_space(effective_batch=8, capabilities=capabilities)
    found = {r.value: r.reason for r in space.removals if r.knob == "precision"}
    assert set(found) == set(removed)
    assert all(removed[name] in found[name] for name in removed)
    assert {c.precision for c in space.configs}.isdisjoint(map(Precision, removed))


def test_pure_bf16_is_searched_only_when_named() -> None:
    default = build_space(effective_batch=8, capabilities=A100)
    assert Precision.PURE_BF16 not in {c.precision for c in default.configs}
    assert all(r.value != "pure_bf16" for r in default.removals)
    named = build_space(effective_batch=8, capabilities=A100, precisions=[Precision.PURE_BF16])
    assert {c.precision for c in named.configs} == {Precision.PURE_BF16}


def test_without_bitsandbytes_the_8_bit_optimizer_is_removed_with_its_reason() -> None:
    missing = Capabilities(
        device_kind="cpu",
        precisions=CPU.precisions,
        optims=DEFAULT_OPTIMS,
        missing_packages={"bitsandbytes": "not installed"},
    )
    space = build_space(effective_batch=8, capabilities=missing)
    removal = Removal(
        knob="optim", value="adamw_bnb_8bit", reason="needs bitsandbytes, which is not installed"
    )
    assert removal in space.removals
    assert "adamw_bnb_8bit" not in {c.optim for c in space.configs}


def test_a_model_without_checkpointing_is_searched_without_it() -> None:
    plain = Capabilities(
        device_kind="cpu",
        precisions=CPU.precisions,
        optims=DEFAULT_OPTIMS,
        supports_checkpointing=False,
        model_name="TinyNet",
    )
    space = build_space(effective_batch=8, capabilities=plain)
    assert not any(c.gradient_checkpointing for c in space.configs)
    assert [(r.knob, r.value) for r in space.removals if r.knob.startswith("gradient")] == [
        ("gradient_checkpointing", "True")
    ]
    assert checkpointing_problem(False, plain) is None
    with refused(
        "^gradient_checkpointing True cannot be used: TinyNet does not implement", hint="autofit doctor"
    ):
        build_space(effective_batch=8, capabilities=plain, checkpointing=[True])


@pytest.mark.parametrize(
    ("capabilities", "named", "message"),
    [
        (
            CPU,
            {"precisions": [Precision.FP16]},
            "^precision fp16 cannot be used: fp16 has no effect on the CPU",
        ),
        (CPU, {"precisions": [Precision.TF32]}, "^precision tf32 cannot be used: .*compute capability 8.0"),
        (T4, {"precisions": [Precision.BF16]}, "^precision bf16 cannot be used: bf16 is not native"),
        (
            T4,
            {"precisions": [Precision.PURE_BF16]},
            "^precision pure_bf16 cannot be used: bf16 is not native",
        ),
        (CPU, {"optims": ["adamw_torhc"]}, "^optim adamw_torhc cannot be used: .*does not know it"),
    ],
)
def test_a_choice_that_the_user_named_and_that_cannot_run_is_an_error(
    capabilities: Capabilities, named: dict[str, Any], message: str
) -> None:
    with refused(message, hint="^autofit doctor lists"):
        build_space(effective_batch=8, capabilities=capabilities, **named)


def test_a_device_without_any_half_precision_says_so() -> None:
    old = Capabilities(device_kind="cuda", precisions=(Precision.FP32,), optims=DEFAULT_OPTIMS)
    assert precision_problem(Precision.FP16, old) == "fp16 is not supported on this device"


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32, Precision.FP16])
def test_a_live_model_in_half_precision_is_not_trained_as_if_it_were_fp32(precision: Precision) -> None:
    live = Capabilities(
        device_kind="cuda", precisions=tuple(Precision), optims=DEFAULT_OPTIMS, weights_dtype="bfloat16"
    )
    assert "the model's own weights are bfloat16" in str(precision_problem(precision, live))
    assert precision_problem(Precision.BF16, live) is None
    assert precision_problem(Precision.PURE_BF16, live) is None
    assert {c.precision for c in build_space(effective_batch=8, capabilities=live).configs} == {Precision.BF16, Precision.PURE_BF16}


def test_paged_memory_needs_cuda() -> None:
    cpu = Capabilities(device_kind="cpu", precisions=CPU.precisions, optims=("paged_ademamix_32bit",))
    assert optim_problem("paged_ademamix_32bit", cpu) == "paged memory needs CUDA"


@pytest.mark.parametrize(
    ("size", "near"), [(40, "16, 32, 64"), (0, "1, 2, 4"), (-8, "1, 2, 4"), (1000, "64, 128, 256")]
)
def test_a_batch_size_that_does_not_divide_is_refused_with_its_neighbours(size: int, near: str) -> None:
    with refused(
        f"^batch size {size} does not divide the effective batch 256 exactly$",
        hint=f"^nearest that do: {near}$",
    ):
        build_space(effective_batch=256, capabilities=CPU, batch_sizes=[8, size])


def test_named_choices_restrict_the_space_and_repeats_do_not_matter() -> None:
    space = build_space(
        effective_batch=64,
        capabilities=A100,
        precisions=[Precision.BF16, Precision.BF16],
        optims=["sgd"],
        checkpointing=[True],
        batch_sizes=[16, 4, 16],
    )
    assert [(c.per_device_train_batch_size, c.gradient_accumulation_steps) for c in space.configs] == [
        (16, 4),
        (4, 16),
    ]
    assert {(c.precision, c.optim, c.gradient_checkpointing) for c in space.configs} == {
        (Precision.BF16, "sgd", True)
    }


def test_extras_multiply_the_space() -> None:
    both = ((("attn_implementation", "eager"),), (("attn_implementation", "sdpa"),))
    space = build_space(effective_batch=4, capabilities=CPU, extras=both)
    assert len(space) == 2 * len(build_space(effective_batch=4, capabilities=CPU))
    assert space.choices()["attn_implementation"] == ("eager", "sdpa")


def test_an_empty_space_is_refused() -> None:
    with refused("^the space is empty", hint="--precision, --optim, --checkpointing or --batch-size"):
        Space(configs=())
    with refused("^the space is empty"):
        build_space(effective_batch=8, capabilities=CPU, optims=[])


@given(effective_batches())
def test_the_size_of_the_space_is_the_product_of_its_choices(effective_batch: int) -> None:
    space = build_space(effective_batch=effective_batch, capabilities=A100)
    assert len(space) == math.prod(len(values) for values in space.choices().values())
