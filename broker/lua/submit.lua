-- submit.lua: finished groups enter the queue, or are refused with the reason. Repeating a call changes nothing.
-- KEYS  1 policy, then for payloads in Redis one staged payload (string) for each group; touches ledger, group:<id>,
--       payload:<id>, the indexes, counters
-- ARGV  1 number of groups, then for each: group id, worker, bytes, checksum, oldest version or '', trainable tokens,
--       all tokens, samples, name of its file in the payload folder or '', task; then name, value pairs of statistics, counted
--       once if any group is new
-- returns for each group {"accepted"} | {"refused", "closed" | "stale" | "memory", detail}
local v, groups, counted = n('version'), tonumber(ARGV[1]), false
local function submit(at, staged)
  local id, worker, bytes, sum, blob = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 8]
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
  if not stale and staged and redis.call('EXISTS', staged) == 0 then
    return {'refused', 'memory', 'the payload that was staged is gone; submit again'}
  end
  if not counted then
    for i = 2 + 10 * groups, #ARGV, 2 do count(ARGV[i], ARGV[i + 1]) end
    counted = true
  end
  rec.tokens = ARGV[at + 5]
  tally('issued', 0, tonumber(rec.tokens))
  if stale then
    if staged then redis.call('UNLINK', staged) end
    close(id, rec, 'stale', 'stale at submission', 'try')
    count('stale_at_submit')
    return {'refused', 'stale', 'oldest token is of version ' .. int(oldest) .. ', the trainer is at ' .. int(v) ..
      ', max_lag ' .. policy.max_lag}
  end
  leave(id, rec)
  rec.task = ARGV[at + 9]
  rec.oldest, rec.submitted, rec.bytes = int(oldest), int(now), bytes
  local fields = {'oldest', rec.oldest, 'tokens', rec.tokens, 'total', ARGV[at + 6], 'samples', ARGV[at + 7], 'bytes', bytes,
    'sum', sum, 'submitted', rec.submitted, 'task', rec.task, 'state', 'ready'}
  if staged then
    redis.call('RENAME', staged, k('payload:' .. id))
    redis.call('PERSIST', k('payload:' .. id))
  else
    fields[#fields + 1], fields[#fields + 2] = 'blob', blob
  end
  redis.call('HSET', k('group:' .. id), unpack(fields))
  add('ledger', 'bytes', tonumber(bytes))
  count('groups_accepted')
  count('payload_bytes_total', bytes)
  enter(id, rec, 'ready', true)
  return {'accepted'}
end
local out = {}
for i = 1, groups do out[i] = submit(2 + 10 * (i - 1), KEYS[1 + i]) end
return out
