"""The collator that a task's example scripts use: batches padded to their longest row (or to a multiple)."""

from __future__ import annotations

from typing import Any

from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
)

from autofit.problem.task import Task
from autofit.workload.data.prepared import Prepared


def collator_of(prepared: Prepared, model: Any) -> Any:
    """Return the collator for the prepared rows.

    Args:
        model: what is trained; encoder-decoders make their decoder's inputs from it.
    """
    tokenizer = prepared.load_tokenizer()
    options = {"tokenizer": tokenizer, "pad_to_multiple_of": prepared.source.pad_to_multiple_of}
    if prepared.task is Task.CAUSAL_LM:
        return DataCollatorForLanguageModeling(mlm=False, **options)
    if prepared.task is Task.MASKED_LM:
        return DataCollatorForLanguageModeling(mlm=True, **options)
    if prepared.task is Task.SEQ2SEQ_LM:
        return DataCollatorForSeq2Seq(model=model, **options)
    if prepared.task is Task.TOKEN_CLASSIFICATION:
        return DataCollatorForTokenClassification(**options)
    return DataCollatorWithPadding(**options)
