"""What a person sees: the report of a search, its progress line by line, the answer of `autofit estimate`."""
