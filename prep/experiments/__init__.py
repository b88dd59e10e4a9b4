"""What 2-bit codes do to a real model that fits in memory, and which use of calibration text would better them.

`python -m prep.experiments MODEL --text FILE` takes a model directory with FP4 and all three 2-bit codes. One half of the
text's documents calibrates, the other half is fresh: every error and loss is measured on the fresh half, each expert on the
tokens routed to it. The experiments are small and in plain torch; none writes a model. Owns no code's definition
(`kernels.formats`), no production solver (`prep.solvers`) and no errors on synthetic weights (`prep.study`).
"""
