"""How an answer gets into the user's script, and the script itself as a baseline."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.reports.report import report_lines
from autofit.reports.report_script import usage
from autofit.results.export import cli_flags, export, flags_trouble
from autofit.results.result import TuneResult
from autofit.search.script_baseline import own_configuration
from tests.builders import CPU, make_config, make_record, make_result
from tests.refusals import refused

COMMAND = ("train.py", "--lr", "1e-4", "--bf16")
OWN = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 8,
    "activation_checkpointing": None,
    "gradient_checkpointing": True,
    "bf16": True,
    "fp16": False,
    "tf32": None,
    "optim": "adafactor",
    "use_cpu": False,
}


def answer(
    best: TrialConfig, *, command: tuple[str, ...] = COMMAND, weights: str = "float32", **script: Any
) -> TuneResult:
    facts = {
        "origin": "flags",
        "own": OWN,
        "set_in_code": [],
        "own_optimizer": False,
        "digest": "0",
        **script,
    }
    return make_result(
        [make_record(0, best, 100.0)],
        workload=Workload(model="train.py", script=command),
        model={"source": "script", "task": None, "seq_len": None, "weights_dtype": weights, "script": facts},
    )


def test_flags_take_back_what_the_script_asks_for_itself() -> None:
    flags = cli_flags(answer(make_config(16, optim="adamw_torch_fused")))
    assert set(flags) == {
        "--per_device_train_batch_size 16",
        "--gradient_accumulation_steps 4",
        "--activation_checkpointing False",
        "--bf16 False",
        "--optim adamw_torch_fused",
    }


def test_what_the_script_asks_for_already_need_not_be_taken_back() -> None:
    flags = cli_flags(
        answer(make_config(8, precision=Precision.BF16, gradient_checkpointing=True, optim="adafactor"))
    )
    assert "--bf16 False" not in flags
    assert not any(flag.endswith("False") for flag in flags)


def test_a_script_whose_answer_is_tf32_after_all_says_so_and_one_that_is_not_switches_it_off() -> None:
    own = {**OWN, "tf32": True, "bf16": False}
    assert "--tf32 False" in cli_flags(answer(make_config(8), own=own))
    assert "--tf32 True" in cli_flags(answer(make_config(8, precision=Precision.TF32), own=own))


def test_use_cpu_is_not_said_twice() -> None:
    result = make_result(
        [make_record(0, make_config(8), 100.0)],
        workload=Workload(model="train.py", script=COMMAND),
        model={
            "source": "script",
            "script": {"origin": "flags", "own": {**OWN, "use_cpu": True}, "set_in_code": []},
        },
        device=CPU,
    )
    assert not any("use_cpu" in flag for flag in cli_flags(result))


def test_the_report_ends_with_the_very_command_line_and_its_flags() -> None:
    lines = [line.text for line in report_lines(answer(make_config(16)), 100)]
    start = next(i for i, line in enumerate(lines) if line.startswith("python train.py"))
    shown = " ".join(line.removesuffix("\\").strip() for line in lines[start:])
    assert shown.startswith("python train.py --lr 1e-4 --bf16 --per_device_train_batch_size 16 ")
    assert "--bf16 False" in shown
    assert "add the flags at the end to your command line" in " ".join(lines)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"origin": "code"}, "change these lines of TrainingArguments in train.py:"),
        (
            {"origin": "flags", "set_in_code": ["bf16"]},
            "change these lines of TrainingArguments in train.py:",
        ),
        ({"origin": "file"}, "change these in args.json (values of TrainingArguments):"),
    ],
)
def test_where_flags_do_not_reach_the_script_lines_to_change_are_given(
    facts: dict[str, Any], said: str
) -> None:
    result = answer(make_config(16), command=("train.py", "args.json"), **facts)
    with refused("^train.py (takes no flags of TrainingArguments: it has them in (its code|a file)|sets bf16 in its own code)", hint="--format python"):
        export(result, "cli")
    assert export(result, "python")
    assert export(result, "json")
    how, command, lines = usage(result)
    assert how == said
    assert command == []
    assert "    per_device_train_batch_size=16," in lines
    assert "    bf16=False," in lines
    assert not any("output_dir" in line for line in lines)


def test_what_the_code_sets_and_the_answer_does_not_name_is_no_trouble_for_flags() -> None:
    kept = answer(make_config(16), set_in_code=["dataloader_num_workers"])
    assert flags_trouble(kept) is None
    more = answer(make_config(16, extra=(("dataloader_num_workers", 2),)), set_in_code=["dataloader_num_workers"])
    assert flags_trouble(more) == "train.py sets dataloader_num_workers in its own code: flags have no effect there"


def test_lines_to_change_name_the_scripts_own_class() -> None:
    result = answer(make_config(16), origin="code")
    own = dataclasses.replace(result, model={**result.model, "arguments_class": "trl.trainer.sft_config.SFTConfig"})
    assert usage(own)[0] == "change these lines of SFTConfig in train.py:"


def test_how_the_model_is_loaded_is_said_only_where_the_script_loads_it_otherwise() -> None:
    best = make_config(16, precision=Precision.PURE_BF16)
    assert not any("dtype" in flag for flag in cli_flags(answer(best)))
    assert "dtype" not in export(answer(best), "json")
    assert (
        report_lines(answer(best), 100)[-1].text
        == '# load your model with dtype="bfloat16", as in the trials'
    )
    assert "dtype" not in report_lines(answer(best, weights="bfloat16"), 100)[-1].text


def described(**own: Any) -> dict[str, Any]:
    return {"model": {"weights_dtype": "float32", "script": {"own": {**OWN, **own}}}}


def test_the_scripts_own_arguments_are_a_configuration() -> None:
    expected = TrialConfig(
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        precision=Precision.BF16,
        optim="adafactor",
    )
    assert own_configuration(described()) == expected
    assert own_configuration(described(bf16=False)) == expected.but(precision=Precision.FP32)
    assert own_configuration(described(bf16=False, tf32=True)) == expected.but(precision=Precision.TF32)


def test_arguments_that_make_no_configuration_are_no_baseline() -> None:
    assert own_configuration(described(per_device_train_batch_size=0)) is None
    assert own_configuration({"model": {"class": "Net"}}) is None
    half = {"model": {"weights_dtype": "float16", "script": {"own": {**OWN, "bf16": False}}}}
    assert own_configuration(half) is None


def test_weights_in_16_bit_without_a_flag_are_pure_16_bit_training() -> None:
    facts = {"model": {"weights_dtype": "bfloat16", "script": {"own": {**OWN, "bf16": False}}}}
    config = own_configuration(facts)
    assert config is not None
    assert config.precision is Precision.PURE_BF16
