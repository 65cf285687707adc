"""What the node directory asks of a Redis or Valkey server: small scripts, each of which it carries out at once.

Between a look and a change nothing comes, so that a late word of one life never undoes what another one said. The keys
of a script belong together on one server: a cluster is not supported.
"""

from __future__ import annotations

from typing import Final

from h3kv.directory.entries import OWNER_OFFSET

_COMMON: Final = f"""
local function owner(value) return string.sub(value, {OWNER_OFFSET + 1}) end
local function generation(value) return (struct.unpack('>I8', value, 13)) end
local function is_entry(value) return value and #value > {OWNER_OFFSET + 1} end
"""

HEARTBEAT: Final = """
local boot = redis.call('GET', KEYS[1])
if boot and boot ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if boot then return 1 end
return 2
"""
"""KEYS: the owner. ARGV: its boot token, its lease in ms. Returns 0: a later life is there; 1: prolonged; 2: it was not
there, and now is."""

LEAVE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""KEYS: the owner. ARGV: its boot token."""

PUBLISH: Final = (
    _COMMON
    + """
local boot = redis.call('GET', KEYS[1])
if not boot then return 2 end
if boot ~= ARGV[1] then return 0 end
for i = 2, #KEYS do
    local value, known = ARGV[i + 1], redis.call('GET', KEYS[i])
    local is_older = is_entry(known) and owner(known) == owner(value) and generation(known) > generation(value)
    if not is_older then redis.call('SET', KEYS[i], value, 'PX', ARGV[2]) end
end
return 1
"""
)
"""KEYS: the owner, then entries. ARGV: its boot token, the entries' lease in ms, then their values. Returns 0: a later
life is there, 2: nobody is; nothing was written then."""

WITHDRAW: Final = (
    _COMMON
    + """
local removed = 0
for i = 1, #KEYS do
    local value, known = ARGV[i], redis.call('GET', KEYS[i])
    if is_entry(known) and owner(known) == owner(value) and generation(known) <= generation(value) then
        removed = removed + redis.call('DEL', KEYS[i])
    end
end
return removed
"""
)
"""KEYS: entries. ARGV: their values."""

SWEEP: Final = """
local removed = 0
for i = 1, #KEYS, 2 do
    if redis.call('GET', KEYS[i]) == ARGV[i] and redis.call('GET', KEYS[i + 1]) ~= ARGV[i + 1] then
        removed = removed + redis.call('DEL', KEYS[i])
    end
end
return removed
"""
"""KEYS: entry and owner in turns. ARGV: the entry's value and the boot token in it, in turns."""
