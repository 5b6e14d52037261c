"""Traces of real training steps on tensors that do not exist: the only part of `memory` that needs torch.

`request` is data and may be imported anywhere. Everything else imports torch and transformers, patches both, and
therefore runs in a child process only; the door for such a child is `worker.answer`.
"""
