-- submit.lua: one finished group enters the queue, or is refused with the reason. Repeating a call changes nothing.
-- KEYS  1 policy  2 staged payload (string); touches ledger, group:<id>, payload:<id>, the indexes, counters
-- ARGV  1 group id  2 worker  3 bytes  4 checksum  5 oldest version or ''  6 trainable tokens  7 all tokens  8 samples
--       then name, value pairs of statistics
-- returns {"accepted"} | {"refused", "closed" | "stale" | "memory", detail}
local id, worker = ARGV[1], ARGV[2]
local rec = group(id)
if rec.state and rec.worker == worker and rec.sum == ARGV[4] then
  redis.call('UNLINK', KEYS[2])
  return {'accepted'}
end
if rec.state ~= 'generating' or rec.worker ~= worker then
  redis.call('UNLINK', KEYS[2])
  count('submissions_closed')
  count('submissions_closed_tokens', ARGV[6])
  return {'refused', 'closed', 'group ' .. id .. ' is not held by ' .. worker .. ': its lease expired or it was submitted'}
end
local v = n('version')
local oldest = ARGV[5] == '' and v or tonumber(ARGV[5])
local stale = v - oldest > n('max_lag')
if not stale and redis.call('EXISTS', KEYS[2]) == 0 then
  return {'refused', 'memory', 'the payload that was staged is gone; submit again'}
end
for i = 9, #ARGV, 2 do count(ARGV[i], ARGV[i + 1]) end
rec.tokens = ARGV[6]
tally('issued', 0, tonumber(ARGV[6]))
if stale then
  redis.call('UNLINK', KEYS[2])
  close(id, rec, 'stale', 'stale at submission', 'try')
  count('stale_at_submit')
  return {'refused', 'stale', 'oldest token is of version ' .. int(oldest) .. ', the trainer is at ' .. int(v) ..
    ', max_lag ' .. policy.max_lag}
end
leave(id, rec)
rec.oldest, rec.submitted, rec.bytes = int(oldest), int(now), ARGV[3]
redis.call('HSET', k('group:' .. id), 'oldest', rec.oldest, 'tokens', ARGV[6], 'total', ARGV[7], 'samples', ARGV[8],
  'bytes', ARGV[3], 'sum', ARGV[4], 'submitted', rec.submitted)
redis.call('RENAME', KEYS[2], k('payload:' .. id))
redis.call('PERSIST', k('payload:' .. id))
redis.call('HINCRBY', k('ledger'), 'bytes', ARGV[3])
count('groups_accepted')
count('payload_bytes_total', ARGV[3])
enter(id, rec, 'ready')
return {'accepted'}
