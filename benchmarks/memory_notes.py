"""What a reader of the accuracy report must know of each table, and the mechanisms of what is left."""

from __future__ import annotations

_ERA = (
    "The table is of January 2022 (torch 1.10, transformers 4.15). Column *software of its day* switches four documented properties of those versions on, none with a free number: "
    "`zero_grad` zeroed instead of freeing; softmax kept its input as well; BERT always added an fp32 mask; autocast ran gelu in fp32. The Adam of the day went parameter by "
    "parameter, cuBLAS had no workspace in the caching allocator, and 8-bit states were in blocks of 2048. These switches were found **after** the figures had been seen: this column shows that "
    "the method can be exact when the software is described exactly, not that it was right without hindsight."
)
FIRST_NOTES = (
    _ERA,
    "Column *software of today* is what `autofit estimate --attn eager` says of the same TrainingArguments with the libraries installed here. It answers what a run of today would take, which these figures are not: its distance from them is the distance between the software of 2022 and of today, not an error of prediction.",
    "The context (1343 MiB) is the table's own. It is added to every method but those with an overhead of their own.",
)
FIRST_RESIDUALS = (
    "Software of its day: low by a few to some tens of MiB in all rows but one. Not explained one by one; what is not in the replay is what driver and libraries take beyond the context as it was measured (kernels loaded later, cuBLAS handles).",
    "Software of today: low by the gradients that no longer stay alive in forward, by softmax's input, and in fp16 by gelu and scores that are kept in 16 bit. The checkpointed rows keep few activations and stay close, but for 8-bit AdamW: today's Trainer keeps the state of embeddings in fp32, in blocks of 256 elsewhere.",
)
SECOND_NOTES = (
    "The context of this run is unknown (nvidia-smi summed two cards). **Each method gets the one constant that suits it best**, the median of its own residuals: with four rows that flatters every method.",
    "Column *torch 2* traces the row with torch 2's `zero_grad`, eager attention with a mask, and AdamW parameter by parameter, which is what transformers of that time did. Which attention and which AdamW was run is not recorded; SDPA and lists of tensors are excluded by the figures themselves, so this too is hindsight.",
)
SECOND_RESIDUALS = (
    "Torch 2: one constant cannot be right for two contexts and for fp32 and fp16, which load different kernels. Software of today: fused AdamW instead of one by parameter, and gelu in 16 bit.",
)
CPU_NOTES = (
    "These are **CPU** figures and say nothing of a GPU's kernels, workspaces, allocator or context. They test one thing: that a step traced without memory has the births and deaths of the real one.",
    "The models are tiny (64 wide, two layers). The other methods are made for large models on GPUs; on these rows they show only what they leave out. Where a method has no such input (no text, an encoder with a decoder) it is left out of that row.",
)
CPU_RESIDUALS = (
    "ViT in bf16: oneDNN reorders the weights of a 16-bit convolution in scratch that no dispatcher sees; the trace is low by that. Of 16-bit matrix products, scratch that oneDNN takes and returns at once is removed from the measurement.",
    "The other rows that are not exact are low by 8 to 48 bytes (GPT-2, OPT, T5): some scalars; which was not looked into.",
)
