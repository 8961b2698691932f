"""The command line: `sparsecoll` or `python -m sparsecoll`."""
