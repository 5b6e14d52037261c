"""The answer as data (`result`), computed from records alone, and what follows from it: what each knob was worth, what a reader must be
told, the forms in which the answer is used.
"""
