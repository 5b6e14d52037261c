"""TRL's Trainers, unmodified, with tiny models: as live objects and in a script, in their own class of arguments, with pairs counted as pairs."""

from __future__ import annotations

import json
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="trl is not installed")
pytest.importorskip("peft", reason="peft is not installed")

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from autofit.memory.request import TraceRequest, TraceUnavailable
from autofit.problem.adaptation import peft_config_json
from autofit.problem.config import Precision
from autofit.problem.spec import Workload
from autofit.processes.objects import ObjectFile, arguments_class, kept_arguments, sent_arguments
from autofit.processes.process import ProcessRunner
from autofit.results.export import export
from autofit.results.result import TuneResult, load
from autofit.search.baselines import plain_defaults
from autofit.search.tuning import tune
from autofit.tracing.run import trace
from autofit.trials.runner import TrialRequest
from autofit.trials.trial import Outcome
from autofit.workload.describe import describe_model
from autofit.workload.user_arguments import argument_defaults, effective_defaults, own_class, trained_as
from tests.one_search import ONE
from tests.refusals import refused
from tests.scripts.place import CONFIG
from tests.workload import tiny

pytestmark = pytest.mark.usefixtures("one_server")

WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "ran", "away", "from", "it", "good", "bad"]
TEXTS = ["the cat sat on the mat", "a dog ran away from it", "good cat"]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of `WORDS`."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def model() -> Any:
    return AutoModelForCausalLM.from_config(tiny.config("llama"))


def completed(result: TuneResult) -> list[Any]:
    assert all(r.outcome is Outcome.COMPLETED for r in result.trials), [r.failure for r in result.trials]
    return [r.measurement for r in result.trials]


# -- the class of arguments -------------------------------------------------------------------------------------------


def test_a_class_of_its_own_is_sent_with_what_differs_from_its_own_defaults(tmp_path: Path) -> None:
    args = SFTConfig(output_dir=str(tmp_path), max_length=16, learning_rate=3e-4, use_cpu=True)
    assert arguments_class(args) is SFTConfig
    assert arguments_class(TrainingArguments(output_dir=str(tmp_path), use_cpu=True)) is None
    kept = kept_arguments(args)
    assert (kept["max_length"], kept["learning_rate"]) == (16, 3e-4)


def test_defaults_of_the_class_are_what_it_makes_of_them() -> None:
    assert argument_defaults(SFTConfig)["bf16"] is None
    found = effective_defaults(SFTConfig, cpu=True)
    assert found["bf16"] is True
    assert found["activation_checkpointing"] is True
    assert own_class(TrainingArguments, cpu=True) == {}
    config = plain_defaults(16, "adamw_torch_fused", found)
    assert (config.precision, config.gradient_checkpointing, config.per_device_train_batch_size) == (Precision.BF16, True, 8)


def test_records_of_other_fields_or_adapters_do_not_mix() -> None:
    facts = {"digest": "d"}
    assert trained_as(facts, {"arguments": {"learning_rate": 1.0}}) == {}
    said = [{"arguments": {"max_length": 16}}, {"arguments": {"max_length": 32}}]
    said += [{"trainer_arguments": {"peft_config": LoraConfig(r=r)}} for r in (2, 4)]  # type: ignore[dict-item]
    found = [trained_as(facts, extra) for extra in said]
    assert len({f["digest"] for f in found}) == 4
    assert found[2]["adapter"] == "LORA"
    assert json.loads(peft_config_json(LoraConfig(r=2)))["r"] == 2


def test_the_memory_of_trls_trainers_is_not_traced_and_the_reason_is_said() -> None:
    with ObjectFile({"model": model(), "trainer_cls": SFTTrainer, "arguments": {"max_length": 16}}) as file:
        workload = Workload(model="<live>", task="causal-lm", seq_len=8, objects_path=file.path)
        request = TraceRequest(workload=workload, config=CONFIG, batch=2, device_type="cpu")
        with pytest.raises(TraceUnavailable, match="TRL's Trainers"):
            trace(request)


def test_keywords_of_a_model_that_autofit_builds_itself_are_refused_in_the_arguments(tmp_path: Path) -> None:
    args = SFTConfig(output_dir=str(tmp_path), model_init_kwargs={"dtype": "bfloat16"}, use_cpu=True, bf16=False)
    rows = Dataset.from_dict({"text": TEXTS})
    for given in (tiny.config("llama"), model()):
        with ObjectFile({"model": given, "train_dataset": rows, "trainer_cls": SFTTrainer, **sent_arguments(args)}) as file:
            workload = Workload(model="<mine>", task="causal-lm", seq_len=8, objects_path=file.path)
            if isinstance(given, torch.nn.Module):  # TRL itself says that it does not look at them
                assert describe_model(workload, cpu=True)[0]["source"] == "object"
                continue
            with refused("^SFTConfig holds model_init_kwargs", hint="pure_bf16"):
                describe_model(workload, cpu=True)


# -- live objects -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sft_is_tuned_with_an_adapter_that_the_trainer_puts_on(tmp_path: Path) -> None:
    args = SFTConfig(output_dir=str(tmp_path / "never"), max_length=16, learning_rate=3e-4, use_cpu=True, report_to="none")
    own, rows = model(), Dataset.from_dict({"text": TEXTS * 4})
    before = {name: p.clone() for name, p in own.state_dict().items()}
    result = tune(
        own,
        trainer_cls=SFTTrainer,
        args=args,
        processing_class=tokenizer(),
        train_dataset=rows,
        trainer_kwargs={"peft_config": LoraConfig(r=4)},
        **ONE,
    )
    measured = completed(result)
    assert all(m.facts["seen"]["trained_parameters"] == 2 * 4 * (2 * 64 + 64 + 32) for m in measured)
    assert result.baselines["defaults"].config == plain_defaults(4, "adamw_torch_fused", {"bf16": True, "activation_checkpointing": True})
    answer = result.training_arguments(str(tmp_path / "out"))
    assert type(answer) is SFTConfig
    assert (answer.max_length, answer.learning_rate, answer.bf16, answer.activation_checkpointing) == (16, 3e-4, False, False)
    assert all(torch.equal(before[name], p) for name, p in own.state_dict().items())
    assert len(rows) == 12
    assert not (tmp_path / "never").exists()
    _check_what_a_file_knows(result, tmp_path)


def _check_what_a_file_knows(result: TuneResult, tmp_path: Path) -> None:
    """Plain arguments, in which nothing is left to the defaults of another class; the snippet names the class."""
    result.save(tmp_path / "best.json")
    loaded = load(tmp_path / "best.json")
    answer = loaded.training_arguments(str(tmp_path / "out"))
    assert type(answer) is TrainingArguments
    assert (answer.bf16, answer.activation_checkpointing) == (False, False)
    snippet = export(loaded, "python")
    assert "SFTConfig(" in snippet
    assert "bf16=False" in snippet
    names: dict[str, Any] = {}
    exec(snippet.replace('"out"', repr(str(tmp_path / "out"))), names)
    assert type(names["args"]) is SFTConfig
    assert names["args"].activation_checkpointing is False


@pytest.mark.slow
def test_dpo_counts_pairs_and_holds_the_reference_model(tmp_path: Path) -> None:
    rows = Dataset.from_dict({"prompt": ["the cat", "a dog"] * 8, "chosen": [" sat on mat", " ran away"] * 8, "rejected": [" bad", " good it"] * 8})
    config = DPOConfig(output_dir=str(tmp_path / "never"), max_length=16, use_cpu=True, report_to="none")

    def tuned(reference: Any) -> TuneResult:
        given = {"trainer_cls": DPOTrainer, "args": config, "processing_class": tokenizer(), "train_dataset": rows}
        return tune(model(), **given, trainer_kwargs={"ref_model": reference}, **ONE)

    with_reference = tuned(model())
    measured = completed(with_reference)
    # prompt + answer + end, for both answers of a pair: (2 + 3 + 1) + (2 + 1 + 1), and (2 + 2 + 1) + (2 + 2 + 1)
    assert with_reference.best.tokens_per_second == pytest.approx(10 * with_reference.best.samples_per_second, rel=0.02)
    assert all(m.losses[0] == pytest.approx(0.693, abs=0.1) for m in measured)
    assert type(with_reference.training_arguments(str(tmp_path))) is DPOConfig
    large = AutoModelForCausalLM.from_config(tiny.config("llama", intermediate_size=40_000))
    more = sum(p.numel() * 4 for p in large.parameters()) - sum(p.numel() * 4 for p in model().parameters())
    peaks = [r.best.memory.peak_allocated_bytes or 0 for r in (with_reference, tuned(large))]
    assert peaks[1] - peaks[0] > 0.9 * more > 50 << 20


# -- a script ---------------------------------------------------------------------------------------------------------


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from datasets import Dataset
from peft import LoraConfig
from transformers import HfArgumentParser
from trl import SFTConfig, SFTTrainer
from tests.test_trl import TEXTS, model, tokenizer

(args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
trainer = SFTTrainer(
    model=model(), args=args, train_dataset=Dataset.from_dict({{"text": TEXTS * 4}}), processing_class=tokenizer(), peft_config=LoraConfig(r=4)
)
trainer.train()
trainer.save_model()
"""


@pytest.mark.slow
def test_an_sft_script_is_run_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "train_sft.py"
    path.write_text(textwrap.dedent(SCRIPT.format(root=str(Path(__file__).parent.parent))))
    command = shlex.split(f"{path} --output_dir {tmp_path / 'out'} --max_length 16 --report_to none")
    with ProcessRunner(Workload(model="train_sft.py", script=tuple(command)), "cpu") as runner:
        facts = runner.describe()
        result = runner.run(TrialRequest(config=CONFIG, timeout_seconds=120, window_seconds=0.1))
    assert result.outcome is Outcome.COMPLETED, result.failure
    assert result.measurement is not None
    seen = result.measurement.facts["seen"]
    assert (seen["gradient_checkpointing"], seen["autocast_dtype"]) == (False, None)
    assert seen["trained_parameters"] == 2 * 4 * (2 * 64 + 64 + 32)
    model_facts = facts["model"]
    assert model_facts["adapter"] == "LORA"
    assert model_facts["arguments_class"].endswith("SFTConfig")
    assert model_facts["script"]["own"]["bf16"] is True
    assert facts["argument_defaults"]["activation_checkpointing"] is True
    assert not (tmp_path / "out").exists()
