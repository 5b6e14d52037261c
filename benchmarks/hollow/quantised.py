"""Peaks of adapters on quantised models as PyTorch's own allocator counts them on the hollow device: `tests/data/quantised-rows.json`.

    python -m benchmarks.hollow -- python -m benchmarks.hollow.quantised
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from autofit.files import write_json
from autofit.problem.adaptation import adaptation_of
from autofit.problem.config import Precision, TrialConfig
from autofit.problem.spec import Workload
from autofit.processes.process import ProcessRunner
from autofit.trials.runner import TrialRequest
from autofit.trials.trial import Outcome
from benchmarks.evidence.plan import ROOT

PATH = ROOT / "tests" / "data" / "quantised-rows.json"
MODELS: tuple[tuple[str, int | None], ...] = (("gpt2", 512), ("tinyllama-1.1b", 512), ("bert-large-uncased", None), ("qwen2.5-1.5b", 512))
CONFIGS = tuple(
    TrialConfig(per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, precision=precision, gradient_checkpointing=checkpointing, optim=optim)
    for batch, accumulation, precision, checkpointing, optim in (
        (4, 1, Precision.BF16, False, "adamw_torch_fused"),
        (16, 1, Precision.BF16, True, "adamw_torch_fused"),
        (4, 2, Precision.FP16, False, "adamw_torch"),
    )
)


def workload_of(model: str, seq_len: int | None, quantize: str) -> Workload:
    """LoRA on a quantised model."""
    return Workload(model=model, seq_len=seq_len, adaptation=adaptation_of(adapter="lora", quantize=quantize))


def rows() -> Iterator[dict[str, Any]]:
    """A trial of each."""
    for model, seq_len in MODELS:
        for quantize in ("4bit", "8bit"):
            with ProcessRunner(workload_of(model, seq_len, quantize), "cuda:0") as runner:
                facts = runner.describe()
                runner.context_bytes = facts["device"]["context_bytes"]
                for config in CONFIGS:
                    result = runner.run(TrialRequest(config=config, timeout_seconds=120.0, window_seconds=0.1))
                    if result.outcome is not Outcome.COMPLETED or result.measurement is None:
                        raise RuntimeError(f"{model} {quantize} {config.label()}: {result.failure}")
                    memory = result.measurement.memory
                    print(f"{model} {quantize} {config.label()}", file=sys.stderr)
                    yield {
                        "model": model,
                        "seq_len": seq_len,
                        "quantize": quantize,
                        "config": config.to_json(),
                        "peak_allocated_bytes": memory.peak_allocated_bytes,
                        "peak_reserved_bytes": memory.peak_reserved_bytes,
                        "capability": facts["device"]["compute_capability"],
                        "software": {name: facts["software"][name] for name in ("torch", "transformers", "peft", "bitsandbytes")},
                    }


if __name__ == "__main__":
    write_json(PATH, {"made_by": "python -m benchmarks.hollow.quantised", "rows": list(rows())})
