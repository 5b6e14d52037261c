from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from autofit.errors import UserError
from autofit.problem.spec import Workload
from autofit.problem.task import Task
from autofit.workload import batches, models
from autofit.workload.batches import IGNORED, SyntheticDataset, collator, make_batch
from autofit.workload.objects import LiveObjects
from autofit.workload.tasks import audio_frames, possible_tasks
from tests.workload import tiny

COMBINATIONS = [
    (model_type, str(task)) for model_type in tiny.CONFIGS for task in possible_tasks(tiny.config(model_type))
]


def _resolved(model_type: str, task: str) -> models.ResolvedModel:
    length = {"image-classification": None, "ctc": 8000}.get(task, 32)
    return tiny.resolved(model_type, task, length)


def test_the_small_models_cover_every_task() -> None:
    assert {task for _, task in COMBINATIONS} == {str(task) for task in Task}


@pytest.mark.parametrize(("model_type", "task"), COMBINATIONS)
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_forward_and_backward_give_finite_loss_and_gradients(
    model_type: str, task: str, weight_dtype: str
) -> None:
    resolved = _resolved(model_type, task)
    model = models.build(resolved, device="cpu", weight_dtype=weight_dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, weight_dtype)}
    for padded in (False, True):
        model.zero_grad()
        loss = model(**make_batch(resolved, 3, weight_dtype=weight_dtype, padded=padded)).loss
        loss.backward()
        assert torch.isfinite(loss)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert all(bool(g.isfinite().all()) for g in gradients)


def test_samples_are_reproducible_and_differ_from_each_other() -> None:
    resolved = _resolved("bert", "sequence-classification")
    first, again = SyntheticDataset(resolved, seed=3), SyntheticDataset(resolved, seed=3)
    other = SyntheticDataset(resolved, seed=4)
    assert torch.equal(first[5]["input_ids"], again[5]["input_ids"])
    assert not torch.equal(first[5]["input_ids"], other[5]["input_ids"])
    assert not torch.equal(first[5]["input_ids"], first[6]["input_ids"])


def test_a_dataset_of_any_size_repeats_a_small_pool() -> None:
    data = SyntheticDataset(_resolved("bert", "masked-lm"), size=10**9)
    assert len(data) == 10**9
    assert torch.equal(data[0]["input_ids"], data[64]["input_ids"])
    assert data[10**9 - 1]["input_ids"].shape == (32,)
    with pytest.raises(IndexError):
        data[10**9]


def test_changing_a_sample_does_not_change_the_pool() -> None:
    data = SyntheticDataset(_resolved("bert", "masked-lm"), size=4)
    data[0].pop("labels")
    assert "labels" in data[0]


def test_a_data_loader_takes_dataset_and_collator() -> None:
    resolved = _resolved("bert", "token-classification")
    loader = DataLoader(SyntheticDataset(resolved, size=10), batch_size=4, collate_fn=collator(resolved))
    assert [batch["input_ids"].shape for batch in loader] == [(4, 32), (4, 32), (2, 32)]


def test_texts_have_full_length_and_no_mask_unless_padding_is_asked() -> None:
    resolved = _resolved("llama", "causal-lm")
    full, padded = make_batch(resolved, 8), make_batch(resolved, 8, padded=True)
    assert bool(full["attention_mask"].all())
    assert torch.equal(full["labels"], full["input_ids"])
    real = padded["attention_mask"].sum(1)
    assert bool((real >= 16).all())
    assert bool((real < 32).all())
    assert torch.equal(padded["labels"] == IGNORED, padded["attention_mask"] == 0)


def test_ordinary_tokens_are_never_special_ones() -> None:
    ids = make_batch(_resolved("bert", "sequence-classification"), 64, 512)["input_ids"]
    assert not set(ids.unique().tolist()) & {0, 298, 299}
    assert int(ids.max()) < 300


def test_the_end_token_closes_what_an_encoder_decoder_reads() -> None:
    batch = make_batch(_resolved("bart", "sequence-classification"), 4, padded=True)
    for ids, mask in zip(batch["input_ids"], batch["attention_mask"]):
        assert (ids == 2).nonzero().flatten().tolist() == [int(mask.sum()) - 1]


def test_segments_are_given_to_models_that_have_them() -> None:
    assert "token_type_ids" in make_batch(_resolved("bert", "sequence-classification"), 1)
    assert "token_type_ids" not in make_batch(_resolved("roberta", "sequence-classification"), 1)


def test_about_15_percent_of_the_tokens_are_masked() -> None:
    labels = make_batch(_resolved("bert", "masked-lm"), 8, 200)["labels"]
    assert ((labels != IGNORED).sum(1) == 30).all()
    shortest = make_batch(_resolved("bert", "masked-lm"), 4, 1)["labels"]
    assert ((shortest != IGNORED).sum(1) == 1).all()


def test_token_labels_are_valid_and_leave_out_the_ends() -> None:
    labels = make_batch(tiny.resolved("bert", "token-classification", 32, num_labels=9), 8)["labels"]
    assert (labels[:, [0, -1]] == IGNORED).all()
    assert labels[:, 1:-1].min() >= 0
    assert labels[:, 1:-1].max() < 9


def test_answers_start_before_they_end_and_lie_in_the_text() -> None:
    batch = make_batch(_resolved("bert", "question-answering"), 32, padded=True)
    assert (batch["start_positions"] <= batch["end_positions"]).all()
    assert (batch["end_positions"] < batch["attention_mask"].sum(1)).all()


def test_targets_are_as_long_as_sources() -> None:
    assert make_batch(_resolved("t5", "seq2seq-lm"), 2)["labels"].shape == (2, 32)


def test_regression_and_several_labels_have_float_labels() -> None:
    one = make_batch(tiny.resolved("bert", "sequence-classification", 8, num_labels=1), 4)
    several = tiny.resolved(
        "bert", "sequence-classification", 8, num_labels=5, problem_type="multi_label_classification"
    )
    assert (one["labels"].dtype, one["labels"].shape) == (torch.float32, (4,))
    assert make_batch(several, 4)["labels"].shape == (4, 5)
    loss = models.build(several, device="cpu")(**make_batch(several, 4)).loss
    assert torch.isfinite(loss)


def test_images_have_the_size_of_the_config() -> None:
    batch = make_batch(_resolved("vit", "image-classification"), 2)
    assert batch["pixel_values"].shape == (2, 3, 64, 64)
    assert int(batch["labels"].max()) < 10


def test_speech_labels_fit_their_frames_and_avoid_the_blank() -> None:
    resolved = _resolved("wav2vec2", "ctc")
    labels = make_batch(resolved, 8)["labels"]
    assert labels.shape[1] <= audio_frames(8000, resolved.config) // 2
    assert not (labels == resolved.config.pad_token_id).any()
    assert labels.min() >= 0
    assert labels.max() < resolved.config.vocab_size
    assert (labels[:, 1:] != labels[:, :-1]).all()


def test_speech_has_a_mask_only_where_the_model_is_trained_with_one() -> None:
    assert "attention_mask" not in make_batch(_resolved("wav2vec2", "ctc"), 1)
    assert "attention_mask" in make_batch(_resolved("hubert", "ctc"), 1)


def test_a_model_of_unknown_inputs_asks_for_a_dataset() -> None:
    workload = Workload(model="mine")
    plain = models.resolve_with(workload, LiveObjects(model=torch.nn.Linear(2, 2)))
    with pytest.raises(UserError, match="cannot be made up") as caught:
        SyntheticDataset(plain)
    assert caught.value.hint is not None
    assert "train_dataset" in caught.value.hint


def test_a_speech_model_that_takes_features_asks_for_a_dataset() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("wav2vec2-bert", hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    resolved = models.resolve_with(Workload(model="features"), LiveObjects(config=config))
    with pytest.raises(UserError, match="input_features"):
        batches.make_batch(resolved, 1)
