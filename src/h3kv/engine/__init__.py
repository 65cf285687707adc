"""Sequences over a model: admission, prefix reuse, chunked prefill, decode, sampling, text, cancellation."""
