"""Without a GPU, Triton kernels run in Triton's interpreter; this must be set before the first kernel is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
