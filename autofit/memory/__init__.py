"""Peak memory of a training step, predicted before anything runs on the device.

`events` is a trace of births and deaths; `allocator` and `replay` say what PyTorch's caching allocator makes of one;
`law` carries two traces to every batch size; `anatomy` takes the peak apart; `roofline` estimates seconds from the same
traces; `formula` answers where nothing can be traced; `cache` keeps laws on disk. Traces are made by `tracing`, from a `request`; nothing here imports torch.
"""
