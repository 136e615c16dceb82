"""The figures of `fedveil demo` over many seeds."""
