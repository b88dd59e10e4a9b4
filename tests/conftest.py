"""What holds for every test: one torch thread (xdist uses the cores), and Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
