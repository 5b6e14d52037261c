"""The user's own data in a child: loading, columns, tokenising, collators, lengths, and how batches reach the Trainer."""
