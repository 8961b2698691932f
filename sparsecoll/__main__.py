"""`python -m sparsecoll`."""

from sparsecoll.cli.main import main

if __name__ == "__main__":
    main()
