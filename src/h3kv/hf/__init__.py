"""KV of transformers models on three tiers: a cache, and the attention implementation `"h3"` that reads it.

model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="h3")
cache = H3Cache(model.config, device_bytes="2GiB")
model.generate(**inputs, past_key_values=cache)

Importing this package registers the implementation. It needs `pip install h3kv[hf]`.
"""

from h3kv.hf.attention import register
from h3kv.hf.cache import H3Cache

register()

__all__ = ["H3Cache", "register"]
