"""Room and bytes: who owns which blocks, and where they lie."""
