-- snapshot.lua: all that a page shows together, at one instant. Costs the same at any queue length: sums and histograms
-- are kept by the transitions.
-- KEYS  1 prefix; reads ledger, ready_hist, lag_hist, counters, engines, versions, workers, dead, waiting,
--       waiting:<dimension>:<name>, dead_order, by_hist, wait_hist, events, evaluations
-- ARGV  1 how many events and dead letters to tell, 0: neither these nor what follows `workers`  2 1: by name, too
-- returns {now ms, oldest submission ms or "", dead letters, then the hashes as flat lists: policy, ledger, ready_hist,
--          lag_hist, counters, engines, versions, workers, then by_hist, wait_hist, events, dead letters newest first,
--          evaluations, then by name what waits: {dimension, name, groups, submission ms of the youngest, of the one at
--          the median, at the 95th percentile of the time in queue, of the oldest}...; of all: dimension and name are ''}
local function waiting(dimension, name)
  local key = k(name == '' and dimension == '' and 'waiting' or 'waiting:' .. dimension .. ':' .. name)
  local groups = redis.call('ZCARD', key)
  if groups == 0 then return nil end
  local found = {dimension, name, groups}
  for _, share in ipairs({0, 0.5, 0.95, 1}) do
    local rank = groups - math.max(1, math.ceil(share * groups))
    found[#found + 1] = redis.call('ZRANGE', key, rank, rank, 'WITHSCORES')[2]
  end
  return found
end
local oldest = redis.call('ZRANGE', k('waiting'), 0, 0, 'WITHSCORES')[2] or ''
local out = {int(now), oldest, redis.call('HLEN', k('dead')), redis.call('HGETALL', POLICY)}
for _, name in ipairs({'ledger', 'ready_hist', 'lag_hist', 'counters', 'engines', 'versions', 'workers'}) do
  out[#out + 1] = redis.call('HGETALL', k(name))
end
local limit = tonumber(ARGV[1])
if limit > 0 then
  local by = ARGV[2] == '1' and redis.call('HGETALL', k('by_hist')) or {}
  out[#out + 1] = by
  out[#out + 1] = redis.call('HGETALL', k('wait_hist'))
  out[#out + 1] = redis.call('LRANGE', k('events'), 0, limit - 1)
  local prompts = redis.call('ZREVRANGE', k('dead_order'), 0, limit - 1)
  out[#out + 1] = #prompts > 0 and redis.call('HMGET', k('dead'), unpack(prompts)) or {}
  out[#out + 1] = redis.call('LRANGE', k('evaluations'), 0, limit - 1)
  out[#out + 1] = {waiting('', '')}
  for i = 1, #by, 2 do
    if string.sub(by[i], 1, 10) == 's:waiting:' then
      table.insert(out[#out], waiting(string.match(by[i], '^(%a+):0:(.*)$', 11)))
    end
  end
end
return out
