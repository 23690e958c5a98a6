"""Mutants of kernels and launchers: what a harness is worth is what it finds."""
