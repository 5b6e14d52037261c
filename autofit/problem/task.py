"""Tasks by name: what is trained, named as transformers' auto classes are. Which of them a model can do is `workload.tasks`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from enum import StrEnum

from autofit.errors import UserError


class Task(StrEnum):
    """What is trained, named as the auto classes are, in kebab case."""

    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    CAUSAL_LM = "causal-lm"
    MASKED_LM = "masked-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    QUESTION_ANSWERING = "question-answering"
    IMAGE_CLASSIFICATION = "image-classification"
    CTC = "ctc"

    @property
    def auto_class_name(self) -> str:
        """The name of the transformers auto class that builds a model for this task."""
        return _AUTO_CLASSES[self]

    @property
    def modality(self) -> str:
        """`text`, `image` or `audio`: what a sample is made of."""
        if self is Task.IMAGE_CLASSIFICATION:
            return "image"
        return "audio" if self is Task.CTC else "text"


_AUTO_CLASSES: Mapping[Task, str] = {
    Task.SEQUENCE_CLASSIFICATION: "AutoModelForSequenceClassification",
    Task.TOKEN_CLASSIFICATION: "AutoModelForTokenClassification",
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.MASKED_LM: "AutoModelForMaskedLM",
    Task.SEQ2SEQ_LM: "AutoModelForSeq2SeqLM",
    Task.QUESTION_ANSWERING: "AutoModelForQuestionAnswering",
    Task.IMAGE_CLASSIFICATION: "AutoModelForImageClassification",
    Task.CTC: "AutoModelForCTC",
}
#: pipeline names and common short forms
ALIASES: Mapping[str, Task] = {
    "text-classification": Task.SEQUENCE_CLASSIFICATION,
    "sentiment-analysis": Task.SEQUENCE_CLASSIFICATION,
    "ner": Task.TOKEN_CLASSIFICATION,
    "text-generation": Task.CAUSAL_LM,
    "fill-mask": Task.MASKED_LM,
    "text2text-generation": Task.SEQ2SEQ_LM,
    "summarization": Task.SEQ2SEQ_LM,
    "translation": Task.SEQ2SEQ_LM,
    "automatic-speech-recognition": Task.CTC,
    "asr": Task.CTC,
    "speech-recognition": Task.CTC,
}


def parse_task(name: str) -> Task:
    """Return the task called `name`: kebab case, pipeline name or auto class name, in any case.

    Raises:
        UserError: not a task; the hint has the nearest names.
    """
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    if plain in ALIASES:
        return ALIASES[plain]
    if plain.startswith("translation-"):  # translation_en_to_fr
        return Task.SEQ2SEQ_LM
    squeezed = plain.replace("-", "").removeprefix("automodelfor")
    for task in Task:
        if squeezed == task.replace("-", ""):
            return task
    known = [str(task) for task in Task]
    near = difflib.get_close_matches(plain, [*known, *ALIASES], n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from {', '.join(known)}"
    raise UserError(f"unknown task {name!r}", hint=hint)
