"""Everything specific to Flower's programs, flags and ports; no other Python code knows them."""
