"""Calls between processes: servers, channels, and the error tree across both."""
