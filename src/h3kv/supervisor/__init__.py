"""Runs the processes of a node on one machine: starts, watches, restarts and ends them."""
