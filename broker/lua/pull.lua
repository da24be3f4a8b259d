-- pull.lua: the trainer leases the batch of the next step: earliest deadline first, none beyond the bound (rule P).
-- KEYS  1 prefix; touches policy, ledger, group:<id>, generating, admitted_hist, ready, waiting, leased, ready_hist, counters
-- ARGV  1 epoch  2 version  3 groups  4 nonce of the call: a repeated one gets the same batch  5 how many to look ahead
-- returns {"batch", {ids of those that are next in line now}, {id, prompt, attempt, oldest, samples, tokens, total,
--         bytes, submitted ms}...}
--       | {"refused", "starved" | "straggler", detail} | {"version", recorded version} | {"fenced", holder}
local version, groups, B, max_lag = n('version'), tonumber(ARGV[3]), n('groups_per_step'), n('max_lag')
if tonumber(ARGV[2]) ~= version then return {'version', int(version)} end
set({trainer_deadline = int(now + n('trainer_lease_ms'))})
local out, ahead = {'batch', {}}, tonumber(ARGV[5])
local function delivery(id, r)
  return {id, r.prompt, r.attempt, r.oldest, r.samples, r.tokens, r.total, r.bytes, r.submitted}
end
if policy.pull_nonce == ARGV[4] then
  for _, id in ipairs(load(cjson.decode(policy.pull_ids))) do out[#out + 1] = delivery(id, group(id)) end
  return out
end
reap()
local past = redis.call('ZRANGEBYSCORE', k('ready'), '-inf', version - max_lag - 1)
for _, id in ipairs(load(past)) do
  close(id, group(id), 'stale', 'stale in the queue', 'try')
  count('stale_at_pull')
end
if #past > 0 then flush() end
local ready = redis.call('ZCARD', k('ready'))
if ready < groups then
  count('pulls_starved')
  return {'refused', 'starved', ready .. ' groups are ready, the step needs ' .. groups}
end
-- A straggler: a deadline D by which more groups are still generating than the steps after this one can train, while
-- this batch has room for them. Waiting is bounded by straggler_ms; groups whose deadline has passed are not waited for.
local generating, waits_for = redis.call('ZCARD', k('generating')), nil
local D, admitted = version, generating > 0 and hash(k('admitted_hist')) or {}
while not waits_for and generating > (D - version) * B do
  local late = 0
  for at, groups_of in pairs(admitted) do
    if tonumber(at) >= version - max_lag and tonumber(at) <= D - max_lag then late = late + tonumber(groups_of) end
  end
  if late > (D - version) * B and redis.call('ZCOUNT', k('ready'), '-inf', D - max_lag) < groups then waits_for = D end
  D = D + 1
end
if waits_for then
  if not policy.straggler_since or n('straggler_since') > now then set({straggler_since = int(now)}) end
  if now - n('straggler_since') < n('straggler_ms') then
    count('pulls_straggler')
    return {'refused', 'straggler', 'groups still generating must be trained by version ' .. int(waits_for)}
  end
  count('stragglers_left_behind')
end
local ids = groups > 0 and redis.call('ZRANGE', k('ready'), 0, groups - 1) or {} -- an end of -1 is the last
if ahead > 0 then out[2] = redis.call('ZRANGE', k('ready'), groups, groups + ahead - 1) end
for _, id in ipairs(load(ids)) do
  local rec = group(id)
  leave(id, rec)
  rec.pulled = now
  enter(id, rec, 'leased')
  out[#out + 1] = delivery(id, rec)
end
set({pull_nonce = ARGV[4], pull_ids = cjson.encode(ids), pull_max_lag = max_lag, straggler_since = false})
return out
