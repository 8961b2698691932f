"""Operations that Numba's vectoriser cannot produce, built from LLVM instructions.

This is the only package that uses internals of Numba and of llvmlite, which may change with any release. pyproject.toml
bounds the versions to those tested; where an internal is missing all the same, `host_kernels` takes `reference`.
"""
