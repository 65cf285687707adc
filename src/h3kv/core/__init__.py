"""Types, sizes, layouts, errors and seams that all parts share. Pure: no I/O, no clock, no torch."""
