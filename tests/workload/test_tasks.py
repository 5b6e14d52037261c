from __future__ import annotations

import pytest
from transformers import AutoConfig

from autofit.errors import UserError
from autofit.problem import presets
from autofit.problem.task import Task
from autofit.workload import tasks
from tests.workload import tiny


@pytest.mark.parametrize(
    ("name", "task", "seq_len"),
    [
        ("bert-large-uncased", Task.SEQUENCE_CLASSIFICATION, 512),
        ("roberta-base", Task.SEQUENCE_CLASSIFICATION, 512),
        ("deberta-v3-base", Task.SEQUENCE_CLASSIFICATION, 512),
        ("electra-base", Task.SEQUENCE_CLASSIFICATION, 512),
        ("gpt2", Task.CAUSAL_LM, 512),
        ("llama-3.2-1b", Task.CAUSAL_LM, 512),
        ("pythia-160m", Task.CAUSAL_LM, 512),
        ("t5-small", Task.SEQ2SEQ_LM, 512),
        ("bart-base", Task.SEQ2SEQ_LM, 512),
        ("vit-base", Task.IMAGE_CLASSIFICATION, 196),
        ("wav2vec2-base", Task.CTC, 160_000),
    ],
)
def test_task_and_length_default_by_architecture(name: str, task: Task, seq_len: int) -> None:
    values = presets.load(name)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    assert tasks.default_task(config) is task
    assert tasks.sequence_length(None, task, config) == seq_len


def test_a_published_head_decides_the_default_task() -> None:
    config = tiny.config("bert", architectures=["BertForQuestionAnswering"])
    assert tasks.default_task(config) is Task.QUESTION_ANSWERING


def test_an_encoder_that_is_set_up_as_a_decoder_is_a_causal_model() -> None:
    assert tasks.default_task(tiny.config("bert", is_decoder=True)) is Task.CAUSAL_LM


def test_a_model_for_something_else_says_what_it_could_do() -> None:
    with pytest.raises(UserError, match="whisper") as caught:
        tasks.default_task(AutoConfig.for_model("whisper"))
    assert caught.value.hint is not None
    assert "causal-lm" in caught.value.hint


def test_a_task_that_the_model_cannot_do_is_refused_with_what_it_can() -> None:
    with pytest.raises(UserError, match="gpt2 model cannot be trained for seq2seq-lm") as caught:
        tasks.check_task(Task.SEQ2SEQ_LM, tiny.config("gpt2"))
    assert caught.value.hint is not None
    assert "causal-lm" in caught.value.hint


@pytest.mark.parametrize(
    ("model_type", "positions"),
    [("bert", 512), ("roberta", 512), ("gpt2", 1024), ("t5", None), ("deberta-v2", None), ("bart", 1024)],
)
def test_positions_are_those_that_hold_tokens(model_type: str, positions: int | None) -> None:
    assert tasks.max_positions(tiny.config(model_type)) == positions


def test_a_sequence_longer_than_the_positions_is_refused_with_the_maximum() -> None:
    with pytest.raises(UserError, match=r"513 is longer than the 512") as caught:
        tasks.sequence_length(513, Task.SEQUENCE_CLASSIFICATION, tiny.config("roberta"))
    assert caught.value.hint == "use --seq-len 512 or less"
    assert tasks.sequence_length(512, Task.SEQUENCE_CLASSIFICATION, tiny.config("roberta")) == 512
    assert tasks.sequence_length(4096, Task.SEQ2SEQ_LM, tiny.config("t5")) == 4096


def test_the_default_length_never_exceeds_the_positions() -> None:
    config = tiny.config("bert", max_position_embeddings=40)
    assert tasks.sequence_length(None, Task.MASKED_LM, config) == 40


def test_images_take_no_sequence_length() -> None:
    with pytest.raises(UserError, match="image-classification"):
        tasks.sequence_length(64, Task.IMAGE_CLASSIFICATION, tiny.config("vit"))
    assert tasks.sequence_length(None, Task.IMAGE_CLASSIFICATION, tiny.config("resnet")) == 1


def test_audio_that_is_too_short_for_the_front_end_is_refused() -> None:
    with pytest.raises(UserError, match="samples of audio"):
        tasks.sequence_length(512, Task.CTC, tiny.config("wav2vec2"))
    assert tasks.sequence_length(8000, Task.CTC, tiny.config("wav2vec2")) == 8000


def test_audio_frames_follow_the_convolutions() -> None:
    # (160000 - 10) // 5 + 1 = 31999, then 15999, 7999, 3999, 1999 (kernel 3), 999, 499 (kernel 2)
    assert tasks.audio_frames(160_000, tiny.config("wav2vec2")) == 499
