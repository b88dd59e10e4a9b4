"""The command `python -m prep.experiments`: parses, measures (`prep.experiments.measure`), prints. Owns nothing else."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from kernels.measurement import document
from prep import experiments
from prep.experiments.measure import measure


def main() -> None:
    """Measures; the table goes to stderr, the last line of stdout is the measurement in the form of artifacts/measurements."""
    parser = argparse.ArgumentParser(prog="python -m prep.experiments", description=experiments.__doc__)
    parser.add_argument("model", type=Path, help="model directory with FP4, int2, quad2 and split")
    parser.add_argument("--text", type=Path, required=True, help='JSON lines with "text", held out of training')
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = measure(options.model, options.text)
    what = "2-bit codes on a real model: errors of every expert on fresh text, held-out loss, and uses of calibration"
    print(json.dumps(document(what, "prep.experiments", results)))  # noqa: T201 - the last line is the measurement


if __name__ == "__main__":
    main()
