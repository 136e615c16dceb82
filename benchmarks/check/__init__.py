"""Recompute the committed results from their JSON alone, without any code of fedveil or fedveil_bench.

`python -m benchmarks.check`, in a checkout, prints a table of the files, figures and mismatches; it exits with 1 if
anything differs. The statistics are written from their definitions on numpy and scipy, so that an error in the
benchmarks' own code would show here.
"""
