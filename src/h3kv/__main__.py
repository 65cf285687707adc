"""`python -m h3kv` is the command `h3`."""

from h3kv.cli import main

if __name__ == "__main__":
    main()
