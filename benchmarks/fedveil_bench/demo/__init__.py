"""The figures from `fedveil demo` over many seeds."""
