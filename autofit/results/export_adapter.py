"""The lines that put an adapter on a model, quantised or not, as the trials did."""

from __future__ import annotations

from typing import Any

from autofit.problem.adaptation import Quantization
from autofit.problem.config import Precision
from autofit.results.result import TuneResult


def is_adapted(result: TuneResult) -> bool:
    """Whether autofit itself put an adapter on the model, so that the user has to as well."""
    return result.spec.workload.adaptation is not None and isinstance(result.model.get("adapter_config"), dict)


def quantization_config(result: TuneResult) -> str | None:
    """The `BitsAndBytesConfig(...)` of the trials; None where nothing is quantised."""
    adaptation = result.spec.workload.adaptation
    if adaptation is None or adaptation.quantization is None:
        return None
    options: dict[str, str] = {"load_in_8bit": "True"}
    if adaptation.quantization is Quantization.FOUR_BIT:
        half = "float16" if result.best.config.precision is Precision.FP16 else "bfloat16"
        options = {
            "load_in_4bit": "True",
            "bnb_4bit_quant_type": '"nf4"',
            "bnb_4bit_use_double_quant": "True",
            "bnb_4bit_compute_dtype": f'"{half}"',
        }
    if result.model.get("kept_modules"):
        options["llm_int8_skip_modules"] = repr(result.model.get("not_quantised"))
    return f"BitsAndBytesConfig({_listed(options)})"


def adapter_lines(result: TuneResult) -> list[str]:
    """What follows the line that loads the model; empty where the user's own code puts the adapter on."""
    if not is_adapted(result):
        return []
    config: dict[str, Any] = result.model["adapter_config"]
    made = f"{config['class']}({_listed({k: repr(v) for k, v in config['options'].items()})})"
    adaptation = result.spec.workload.adaptation
    quantised = adaptation is not None and adaptation.quantization is not None
    prepare = ["model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # args decide"] if quantised else []
    return [*prepare, f"model = get_peft_model(model, {made})"]


def adapter_import(result: TuneResult) -> str | None:
    """The line that imports what `adapter_lines` use."""
    if not is_adapted(result):
        return None
    names = [result.model["adapter_config"]["class"], "get_peft_model"]
    if quantization_config(result) is not None:
        names.append("prepare_model_for_kbit_training")
    return f"from peft import {', '.join(names)}"


def _listed(options: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
