"""Operations that Numba's vectoriser cannot produce, built from LLVM instructions.

This is the only package that uses internals of Numba and of llvmlite, which may change with any release: `target`
chooses the instruction set, `cache` keeps compiled kernels on disk, `words` and `blocks` have the operations.
pyproject.toml bounds the versions to those tested; where an internal is missing all the same, the kernels are those of
`reference` (`kernels.host_kernels`).
"""
