-- submit.lua: finished groups enter the queue, or are refused with the reason. Repeating a call changes nothing.
-- KEYS  1 prefix, then for payloads in Redis one staged payload (string) for each group; touches ledger, group:<id>,
--       payload:<id>, the indexes, counters
-- ARGV  1 number of groups, then for each: group id, worker, bytes, checksum, oldest version or '', trainable tokens,
--       all tokens, samples, name of its file in the payload folder or '', task; then name, value pairs of statistics, counted
--       once if any group is new
-- returns for each group {"accepted"} | {"refused", "closed" | "stale" | "memory", detail}
local v, groups, counted, ids = n('version'), tonumber(ARGV[1]), false, {}
local function submit(at, staged)
  local id, worker, bytes, sum = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3]
  local rec = group(id)
  if rec.state and rec.worker == worker and rec.sum == sum then
    if staged then redis.call('UNLINK', staged) end
    return {'accepted'}
  end
  if rec.state ~= 'generating' or rec.worker ~= worker then
    if staged then redis.call('UNLINK', staged) end
    count('submissions_closed')
    count('submissions_closed_tokens', ARGV[at + 5])
    return {'refused', 'closed', 'group ' .. id .. ' is not held by ' .. worker .. ': its lease expired or it was submitted'}
  end
  local oldest = ARGV[at + 4] == '' and v or tonumber(ARGV[at + 4])
  local stale = v - oldest > n('max_lag')
  if not stale and staged and redis.pcall('RENAME', staged, k('payload:' .. id)).err then
    return {'refused', 'memory', 'the payload that was staged is gone; submit again'}
  end
  if not counted then
    for i = 2 + 10 * groups, #ARGV, 2 do count(ARGV[i], ARGV[i + 1]) end
    counted = true
  end
  rec.tokens = tonumber(ARGV[at + 5])
  tally('issued', 0, rec.tokens)
  if stale then
    if staged then redis.call('UNLINK', staged) end
    close(id, rec, 'stale', 'stale at submission', 'try')
    count('stale_at_submit')
    return {'refused', 'stale', 'oldest token is of version ' .. int(oldest) .. ', the trainer is at ' .. int(v) ..
      ', max_lag ' .. policy.max_lag}
  end
  if staged then redis.call('PERSIST', k('payload:' .. id)) end
  leave(id, rec)
  rec.oldest, rec.submitted, rec.bytes, rec.sum = oldest, now, bytes, sum
  rec.total, rec.samples, rec.task = tonumber(ARGV[at + 6]), tonumber(ARGV[at + 7]), ARGV[at + 9]
  rec.blob = not staged and ARGV[at + 8] or nil
  enter(id, rec, 'ready')
  add('ledger', 'bytes', bytes)
  count('groups_accepted')
  count('payload_bytes_total', bytes)
  return {'accepted'}
end
for i = 1, groups do ids[i] = ARGV[2 + 10 * (i - 1)] end
load(ids)
local out = {}
for i = 1, groups do out[i] = submit(2 + 10 * (i - 1), KEYS[1 + i]) end
write()
local ready = redis.call('ZCARD', k('ready'))
if ready >= n('groups_per_step') then redis.call('PUBLISH', k('batches'), 'ready ' .. ready) end
return out
