"""What is exported is what transformers accepts, and it builds the arguments that were measured."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autofit.errors import UserError
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.results.export import Format, arguments_call, effective_batch, export, model_note
from autofit.results.result import TuneResult, Warning
from tests.builders import ARGUMENT_DEFAULTS, CPU, GPU, make_config, make_record, make_result

transformers = pytest.importorskip("transformers")

BF16, PURE, TF32 = Precision.BF16, Precision.PURE_BF16, Precision.TF32
CONFIGS = [
    make_config(8),
    make_config(16, precision=BF16, optim="adamw_bnb_8bit", gradient_checkpointing=True),
    make_config(64, precision=BF16, optim="adafactor"),
    make_config(2, gradient_checkpointing=True, extra=(("use_reentrant", False), ("every_n_layers", 2))),
    make_config(4, precision=BF16, extra=(("dataloader_num_workers", 2), ("dataloader_pin_memory", False))),
    make_config(1, effective_batch=97),
]


@dataclasses.dataclass
class ModelArguments:
    """As the example scripts of transformers have them."""

    dtype: str | None = None
    attn_implementation: str | None = None


def result_for(config: TrialConfig, *, on_gpu: bool = False, **fields: Any) -> TuneResult:
    return make_result([make_record(0, config, 41.2)], device=GPU if on_gpu else CPU, **fields)


def real_defaults() -> dict[str, Any]:
    from autofit.workload.trial import argument_defaults

    scalars = (str, int, float, bool, type(None))
    return {k: v for k, v in argument_defaults().items() if isinstance(v, scalars)}


def values(arguments: transformers.TrainingArguments) -> dict[str, Any]:
    return {k: v for k, v in arguments.to_dict().items() if k != "logging_dir"}


def words(line: str) -> list[str]:
    """The line as a real shell splits it."""
    done = subprocess.run(
        ["bash", "-c", f'printf "%s\\0" {line}'], capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("config", CONFIGS, ids=TrialConfig.label)
def test_json_is_read_by_the_argument_parser(config: TrialConfig, tmp_path: Path) -> None:
    result = result_for(config, argument_defaults=real_defaults())
    path = tmp_path / "best.json"
    path.write_text(json.dumps({**json.loads(export(result, "json")), "output_dir": str(tmp_path)}))
    (read,) = transformers.HfArgumentParser(transformers.TrainingArguments).parse_json_file(path)
    assert values(read) == values(result.training_arguments(str(tmp_path)))


@pytest.mark.parametrize("config", CONFIGS, ids=TrialConfig.label)
def test_flags_are_read_back_by_the_argument_parser(config: TrialConfig, tmp_path: Path) -> None:
    result = result_for(config, argument_defaults=real_defaults())
    line = export(result, "cli")
    parser = transformers.HfArgumentParser(transformers.TrainingArguments)
    (read,) = parser.parse_args_into_dataclasses(
        [*words(line), "--output_dir", str(tmp_path)], look_for_args_file=False
    )
    assert values(read) == values(result.training_arguments(str(tmp_path)))
    assert words(line) == shlex.split(line)


@pytest.mark.parametrize("config", CONFIGS, ids=TrialConfig.label)
def test_the_snippet_runs_and_builds_the_same_arguments(config: TrialConfig) -> None:
    result = result_for(config, argument_defaults=real_defaults())
    scope: dict[str, Any] = {}
    exec(compile(export(result, Format.PYTHON), "snippet.py", "exec"), scope)
    assert values(scope["args"]) == values(result.training_arguments("out"))


def test_the_exported_arguments_multiply_to_the_effective_batch() -> None:
    for config in CONFIGS:
        flags = export(result_for(config), "cli").split()
        sizes = [
            int(flags[flags.index(f"--{name}") + 1])
            for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
        ]
        assert sizes[0] * sizes[1] == config.effective_batch()


def test_a_snippet_for_a_model_that_needs_keywords_loads_it_with_them(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=40
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path)
    tuned = make_config(8, precision=PURE, extra=(("attn_implementation", "eager"),))
    result = result_for(tuned, workload=Workload(model=str(tmp_path)))
    scope: dict[str, Any] = {}
    exec(compile(export(result, "python"), "snippet.py", "exec"), scope)
    assert str(scope["model"].dtype) == "torch.bfloat16"
    assert scope["model"].config._attn_implementation == "eager"


def test_model_keywords_reach_a_script_that_has_them_and_are_refused_by_one_that_has_not(
    tmp_path: Path,
) -> None:
    result = result_for(make_config(8, precision=PURE), argument_defaults=real_defaults())
    flags = [*shlex.split(export(result, "cli")), "--output_dir", str(tmp_path)]
    both = transformers.HfArgumentParser((ModelArguments, transformers.TrainingArguments))
    model, _ = both.parse_args_into_dataclasses(flags, look_for_args_file=False)
    assert model.dtype == "bfloat16"
    alone = transformers.HfArgumentParser(transformers.TrainingArguments)
    with pytest.raises(ValueError, match="--dtype"):
        alone.parse_args_into_dataclasses(flags, look_for_args_file=False)


def test_a_checkpoint_stored_in_16_bit_is_loaded_in_float32_as_in_the_trials() -> None:
    model = {"task": "causal-lm", "source": "hub", "config": {"dtype": "bfloat16"}}
    result = result_for(make_config(8, precision=BF16), model=model, workload=Workload(model="org/llama"))
    assert 'AutoModelForCausalLM.from_pretrained("org/llama", dtype="float32")' in export(result, "python")
    assert model_note(result) is None


def test_the_snippet_says_what_trials_did_to_the_model_and_arguments_do_not() -> None:
    said = Warning(code="checkpointing_switched_off", message="it is on", next_step="call model.off() before the training")
    live = {"source": "object"}
    result = result_for(make_config(8), model=live, warnings=(said,))
    assert export(result, "python").splitlines()[1] == "# call model.off() before the training"
    both = result_for(make_config(8, extra=(("attn_implementation", "eager"),)), model=live, warnings=(said,))
    assert model_note(both) == 'load your model with attn_implementation="eager", as in the trials; call model.off() before the training'
    assert model_note(result_for(make_config(8), model=live)) is None


def test_where_the_stored_dtype_is_not_known_the_snippet_says_what_to_mind() -> None:
    snippet = export(result_for(make_config(8)), "python")
    assert 'dtype="float32"' in snippet.splitlines()[1]
    assert "from_pretrained" not in snippet


def test_a_live_model_cannot_be_loaded_by_name_so_the_snippet_only_says_what_it_needs() -> None:
    result = result_for(
        make_config(8, precision=PURE), model={"source": "object"}, workload=Workload(model="MyModel")
    )
    snippet = export(result, "python")
    assert "from_pretrained" not in snippet
    assert '# load your model with dtype="bfloat16"' in snippet


def test_remote_code_is_allowed_in_the_snippet_where_it_was_in_the_search() -> None:
    workload = Workload(model="org/own", trust_remote_code=True)
    assert "trust_remote_code=True)" in export(
        result_for(make_config(8, precision=PURE), workload=workload), "python"
    )


def test_only_what_differs_from_the_defaults_is_written() -> None:
    result = result_for(make_config(8, precision=TF32), on_gpu=True)
    assert json.loads(export(result, "json")) == {"gradient_accumulation_steps": 8, "tf32": True}
    assert json.loads(export(result_for(make_config(8, effective_batch=8), on_gpu=True), "json")) == {}


def test_the_answer_for_a_cpu_says_use_cpu() -> None:
    assert json.loads(export(result_for(make_config(8)), "json"))["use_cpu"] is True


def test_the_call_states_the_exact_product() -> None:
    result = result_for(make_config(16))
    assert effective_batch(result) == "effective batch 64 = 16 per device x 4 accumulation steps"
    assert arguments_call(result)[1] == f"    # {effective_batch(result)}"
    assert (
        effective_batch(result_for(make_config(64)))
        == "effective batch 64 = 64 per device x 1 accumulation step"
    )
    spec = dataclasses.replace(result.spec, effective_batch=128)
    shared = dataclasses.replace(result, spec=spec)
    assert effective_batch(shared) == "effective batch 128 = 16 per device x 4 accumulation steps x 2 devices"


def test_text_that_a_shell_or_python_would_read_otherwise_is_quoted() -> None:
    extra = (("optim_args", 'rank=2,note="a b" $HOME\'s'),)
    result = result_for(
        make_config(8, extra=extra), argument_defaults={**ARGUMENT_DEFAULTS, "optim_args": None}
    )
    flags = words(export(result, "cli"))
    assert flags[flags.index("--optim_args") + 1] == extra[0][1]
    line = next(part for part in arguments_call(result) if "optim_args" in part)
    assert eval(line.strip().removeprefix("optim_args=").rstrip(",")) == extra[0][1]


def test_a_name_with_line_breaks_cannot_leave_its_comment() -> None:
    result = result_for(make_config(8), workload=Workload(model="a\nraise SystemExit\n#"))
    exec(compile(export(result, "python"), "snippet.py", "exec"), {})


def test_a_value_of_none_cannot_be_a_flag() -> None:
    defaults = {**ARGUMENT_DEFAULTS, "dataloader_num_workers": 4}
    result = result_for(make_config(8, extra=(("dataloader_num_workers", None),)), argument_defaults=defaults)
    with pytest.raises(UserError, match="dataloader_num_workers=None"):
        export(result, "cli")
    assert "dataloader_num_workers=None," in export(result, "python")


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="yaml") as caught:
        export(result_for(make_config(8)), "yaml")
    assert caught.value.hint == "choose from json, python, cli"
