"""A command whose `--help` lists its options under headings."""

from __future__ import annotations

import click

SECTIONS: dict[str, tuple[str, ...]] = {
    "What is trained": ("model", "task", "seq_len", "attn", "trust_remote_code"),
    "What is asked": ("effective_batch", "gpu", "memory", "device", "eval_batch_size", "max_batch", "padded"),
    "Configurations": ("batch_size", "precision", "checkpointing", "optim", "keep_numerics", "tune"),
    "How long, and how": ("trials", "timeout", "trial_timeout", "window", "rounds", "tolerance", "sampler", "seed", "predict"),
    "Your own data": ("dataset", "split", "text_column", "label_column", "tokenizer", "packing", "pad_to_multiple_of"),
    "Adapters and quantised models": ("adapter", "adapter_rank", "adapter_target", "quantize"),
    "Files": ("study", "output", "replay"),
}
OTHERS = "Other options"


class SectionedCommand(click.Command):
    """Lists options in `SECTIONS`; what is in none of them comes last."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of options per heading."""
        title_of = {name: title for title, names in SECTIONS.items() for name in names}
        listed: dict[str, dict[str, tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.name is not None:
                listed.setdefault(title_of.get(parameter.name, OTHERS), {})[parameter.name] = record
        for title in (*SECTIONS, OTHERS):
            rows = listed.get(title, {})
            names = [name for name in SECTIONS.get(title, ()) if name in rows] or list(rows)
            if names:
                with formatter.section(title):
                    formatter.write_dl([rows[name] for name in names])
