"""A CUDA device that computes nothing, for machines without one: PyTorch's own CUDA build over stand-ins for the CUDA libraries.

What is real: PyTorch's CUDA dispatcher, its choice of kernels, its caching allocator with every figure and every out-of-memory error, transformers, and all
of autofit, fork server and memory limits included. What is not: kernels (no number is computed, losses are 0), time (only that of the host), cuBLAS' and
cuDNN's own choices (their workspaces are taken to be empty), contexts (a constant), drivers' failures. So memory that PyTorch allocates, and everything that
can break before a kernel runs, can be checked here; speed cannot, and no figure from here is ever recorded as a card's: the device calls itself `Hollow ...`.

    python -m benchmarks.hollow -- pytest -m gpu
    python -m benchmarks.hollow --card a100-80gb -- autofit doctor

It needs a CUDA 12 or 13 build of torch (2.9 to 2.15 were tried; its CUDA libraries need not be installed), gcc, binutils, and the headers of that CUDA's
runtime.
"""
