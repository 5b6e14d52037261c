"""Scripts that look inside a process of their own: contexts, provoked out-of-memory, allocator history. One JSON line per finding."""
