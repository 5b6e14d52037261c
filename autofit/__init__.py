"""Find the fastest Hugging Face Trainer configuration that fits in memory, by measuring it."""
