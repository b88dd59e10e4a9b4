"""How far each 2-bit code is from FP4: error of the weights, of a matrix's output, and of a whole expert's.

`python -m prep.study` measures synthetic weights (Gaussian and Student-t with 5 degrees of freedom, rounded to MXFP4) under
white activations; the functions take any FP4 matrix and any activations. Tables are trained on matrices other than those
measured. All errors are relative Frobenius errors against the FP4 values. Owns no model and no file of one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from kernels.expert import expert_ffn
from kernels.formats import Matrix, dequantize_fp4, dequantize_int2, dequantize_quad2, quantize_fp4
from kernels.measurement import document
from kernels.split import dequantize_base, merge_split
from prep.solvers.clip import solve_absmax, solve_clip
from prep.solvers.quad import solve_quad, train_quad
from prep.solvers.split import exponents_present, solve_split, train_split

Approximate = Callable[[Matrix], Tensor]  # FP4 matrices -> the float32 values a code gives them
Expert = tuple[Matrix, Matrix, Matrix]  # w1, w3, w2 in FP4

TOKENS = 1024
SHAPE = (256, 2048)  # of the matrices, as in the study that is repeated here
EXPERT_SHAPE = (512, 1024)  # width and hidden size of whole experts
NO_LIMIT = float("inf")
PAST_STUDY = {  # facts/codecs.md: error per matrix, and per whole expert
    "gaussian": {"clip": (0.330, 0.541), "quad": (0.283, 0.475), "split base": (0.310, 0.518)},
    "student-t5": {"clip": (0.406, 0.650), "quad": (0.302, 0.501), "split base": (0.341, 0.560)},
}


def codes_trained_on(sample: Matrix, others: Matrix, seed: int = 0) -> dict[str, Approximate]:
    """Each code by name, its tables trained on `sample`; `others` are matrices of which SPLIT needs the exponents."""
    assert sample.scales is not None and others.scales is not None
    levels = train_quad(sample, seed=seed)
    table = train_split(sample, exponents_present(sample.scales) | exponents_present(others.scales), seed=seed)

    def quad(matrix: Matrix) -> Tensor:
        coded, normalisers = solve_quad(matrix, levels)
        return dequantize_quad2(coded, levels, normalisers)

    return {
        "absmax / 1.5": lambda matrix: dequantize_int2(*solve_absmax(matrix, 1.5)),
        "absmax / 2": lambda matrix: dequantize_int2(*solve_absmax(matrix, 2.0)),
        "clip": lambda matrix: dequantize_int2(*solve_clip(matrix)),
        "quad": quad,
        "split base": lambda matrix: dequantize_base(solve_split(matrix, table)[0], table),
        "split exact": lambda matrix: dequantize_fp4(merge_split(*solve_split(matrix, table), table)),
    }


def relative_error(got: Tensor, exact: Tensor) -> float:
    """||got - exact|| / ||exact||."""
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def matrix_errors(matrix: Matrix, x: Tensor, codes: Mapping[str, Approximate]) -> dict[str, dict[str, float]]:
    """Weight and output error of each code on one FP4 matrix [N, K] under activations x [T, K] float32."""
    exact, errors = dequantize_fp4(matrix), {}
    for name, approximate in codes.items():
        coded = approximate(matrix)
        errors[name] = {"weight": relative_error(coded, exact), "output": relative_error(x @ coded.mT, x @ exact.mT)}
    return errors


def expert_errors(
    expert: Expert, x: Tensor, codes: tuple[Mapping[str, Approximate], ...], limit: float = NO_LIMIT
) -> dict[str, float]:
    """Output error of each code on a whole expert, all three matrices coded, under activations x [T, D] float32.

    codes: those of w1, w3 and w2, of equal names. limit: of the clamped SwiGLU, `expert_ffn`.
    """
    exact = expert_ffn(x, *(dequantize_fp4(matrix) for matrix in expert), limit=limit)
    errors = {}
    for name in codes[0]:
        w1, w3, w2 = (code[name](matrix) for code, matrix in zip(codes, expert, strict=True))
        errors[name] = relative_error(expert_ffn(x, w1, w3, w2, limit=limit), exact)
    return errors


def draw(distribution: str, shape: tuple[int, ...], random: torch.Generator, octave: float | None = 0.0) -> Matrix:
    """FP4 matrices [..., N, K] of synthetic weights: scale 2^octave / sqrt(K), or another octave in [0, 1) for each matrix.

    Where in an octave the weights lie decides how MXFP4's power-of-two scales cut them, and the codes' errors depend on it.
    """
    weights = torch.randn(shape, generator=random)
    if distribution == "student-t5":
        weights /= torch.randn(5, *shape, generator=random).square().mean(0).sqrt()
    octaves = torch.rand(*shape[:-2], 1, 1, generator=random) if octave is None else torch.tensor(octave)
    return quantize_fp4(weights * 2**octaves / shape[-1] ** 0.5)


def study_matrices(distribution: str, seed: int, octave: float | None) -> dict[str, dict[str, float]]:
    """Mean weight and output error of each code over a few synthetic matrices, tables trained on eight others."""
    random = torch.Generator().manual_seed(seed)
    trained, measured = (draw(distribution, (count, *SHAPE), random, octave) for count in (8, 2))
    x = torch.randn(TOKENS, SHAPE[1], generator=random)
    codes = codes_trained_on(trained, measured, seed)
    assert measured.scales is not None
    errors = [matrix_errors(Matrix(*part), x, codes) for part in zip(measured.codes, measured.scales, strict=True)]
    return {name: {kind: mean(one[name][kind] for one in errors) for kind in ("weight", "output")} for name in codes}


def study_expert(distribution: str, seed: int) -> dict[str, float]:
    """Output error of each code on one synthetic expert under white activations, tables trained on four others."""
    random = torch.Generator().manual_seed(seed)
    width, hidden = EXPERT_SHAPE
    expert, codes = [], []
    for shape in ((width, hidden), (width, hidden), (hidden, width)):
        matrix = draw(distribution, shape, random)
        expert.append(matrix)
        codes.append(codes_trained_on(draw(distribution, (4, *shape), random), matrix, seed))
    w1, w3, w2 = expert
    return expert_errors((w1, w3, w2), torch.randn(TOKENS, hidden, generator=random), tuple(codes))


def study(seeds: int) -> dict[str, Any]:
    """All errors by distribution and code.

    Matrices: one scale for all, mean over `seeds` places in an octave (with the lowest and highest), and scales that differ
    from matrix to matrix. Experts: mean over `seeds`.
    """
    results: dict[str, Any] = {}
    for distribution in PAST_STUDY:
        matrices = [study_matrices(distribution, seed, seed / seeds) for seed in range(seeds)]
        mixed = study_matrices(distribution, seeds, None)
        experts = [study_expert(distribution, 100 + seed) for seed in range(seeds)]
        results[distribution] = {
            name: {
                "weight_error": mean(one[name]["weight"] for one in matrices),
                "weight_error_range": [f(one[name]["weight"] for one in matrices) for f in (min, max)],
                "weight_error_mixed_scales": mixed[name]["weight"],
                "output_error": mean(one[name]["output"] for one in matrices),
                "expert_output_error": mean(one[name] for one in experts),
                "earlier_study": PAST_STUDY[distribution].get(name),
            }
            for name in mixed
        }
    return results


def speeds(rows: int = 2048, columns: int = 4096) -> dict[str, float]:
    """V4-Flash experts per minute of each solver on this machine: one matrix of a third of an expert, tables ready."""
    matrix = draw("gaussian", (rows, columns), torch.Generator().manual_seed(0))
    assert matrix.scales is not None
    levels, table = train_quad(matrix), train_split(matrix, exponents_present(matrix.scales))
    solvers: dict[str, Callable[[], object]] = {
        "clip": lambda: solve_clip(matrix),
        "quad": lambda: solve_quad(matrix, levels),
        "split": lambda: solve_split(matrix, table),
    }
    return {name: 60 / (3 * _seconds(solve)) for name, solve in solvers.items()}


def training_seconds() -> dict[str, float]:
    """Seconds to train the table of one layer and projection from a sample of 8 matrices."""
    sample = draw("gaussian", (8, *SHAPE), torch.Generator().manual_seed(0))
    assert sample.scales is not None
    present = exponents_present(sample.scales)
    return {"quad": _seconds(lambda: train_quad(sample)), "split": _seconds(lambda: train_split(sample, present))}


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The least of some repeats: other programs share the machine."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def table(results: Mapping[str, Any]) -> str:
    """The results for people, the earlier study's figures beside them."""
    keys = ("weight_error", "weight_error_mixed_scales", "output_error", "expert_output_error")
    lines = [
        f"{'':12}{'code':14}{'weight':>8}{'lowest':>8}{'highest':>8}{'mixed':>8}{'output':>8}{'expert':>8}  earlier"
    ]
    for distribution, codes in results.items():
        for name, errors in codes.items():
            first, *others = (errors[key] for key in keys)
            numbers = "".join(f"{value:8.4f}" for value in (first, *errors["weight_error_range"], *others))
            past = ", ".join(f"{value:.3f}" for value in errors["earlier_study"] or ())
            lines.append(f"{distribution:12}{name:14}{numbers}  {past}")
    return "\n".join(lines)


def measurement(seeds: int) -> dict[str, Any]:
    """The whole measurement, in the form of artifacts/measurements."""
    results = study(seeds)
    print(table(results), file=sys.stderr)  # noqa: T201 - the table is this command's output for people
    measured = {
        "shape": SHAPE,
        "expert_shape": EXPERT_SHAPE,
        "seeds": seeds,
        "errors": results,
        "v4_flash_experts_per_minute": speeds(),
        "training_seconds_per_layer_and_projection": training_seconds(),
    }
    what = "error of the 2-bit codes on synthetic MXFP4 weights, and the solvers' speed on this CPU"
    return document(what, "prep.study", measured)


def main() -> None:
    """Measures, prints the table on stderr and the JSON as the last line of stdout, writes the measurement file."""
    parser = argparse.ArgumentParser(prog="python -m prep.study", description=__doc__)
    parser.add_argument("--seeds", type=int, default=4, help="sets of matrices and experts")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--directory", type=Path, default=Path("artifacts/measurements"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measured = measurement(options.seeds)
    target = options.directory / f"{date.today()}-requant-synthetic.json"
    target.write_text(json.dumps(measured, indent=1) + "\n")
    print(json.dumps(measured))  # noqa: T201 - the last line is the measurement


if __name__ == "__main__":
    main()
