"""The folder of fedveil-bench. A package only for `benchmarks.tests`, as others install a package `benchmarks`, too.

The code is imported as `fedveil_bench`, and this file is in no wheel.
"""
