"""Adapters that make the kernels of other engines callable as the contracts say."""
