-- snapshot.lua: all that a page shows together, at one instant. Costs the same at any queue length: sums and histograms
-- are kept by the transitions.
-- KEYS  1 prefix; reads ledger, ready_hist, lag_hist, counters, engines, versions, workers, dead, waiting,
--       dead_order, by_hist, wait_hist, events, evaluations
-- ARGV  1 how many events and dead letters to tell, 0: neither these nor what follows `workers`  2 1: by_hist, too
-- returns {now ms, oldest submission ms or "", dead letters, then the hashes as flat lists: policy, ledger, ready_hist,
--          lag_hist, counters, engines, versions, workers, then by_hist, wait_hist, events, dead letters newest first,
--          {submission ms of the group at the median, at the 95th percentile of the time in queue}, evaluations}
local oldest = redis.call('ZRANGE', k('waiting'), 0, 0, 'WITHSCORES')[2] or ''
local out = {int(now), oldest, redis.call('HLEN', k('dead')), redis.call('HGETALL', POLICY)}
for _, name in ipairs({'ledger', 'ready_hist', 'lag_hist', 'counters', 'engines', 'versions', 'workers'}) do
  out[#out + 1] = redis.call('HGETALL', k(name))
end
local limit = tonumber(ARGV[1])
if limit > 0 then
  out[#out + 1] = ARGV[2] == '1' and redis.call('HGETALL', k('by_hist')) or {}
  out[#out + 1] = redis.call('HGETALL', k('wait_hist'))
  out[#out + 1] = redis.call('LRANGE', k('events'), 0, limit - 1)
  local prompts = redis.call('ZREVRANGE', k('dead_order'), 0, limit - 1)
  out[#out + 1] = #prompts > 0 and redis.call('HMGET', k('dead'), unpack(prompts)) or {}
  local waiting, marks = redis.call('ZCARD', k('waiting')), {}
  for _, share in ipairs({0.5, 0.95}) do
    local rank = waiting - math.max(1, math.ceil(share * waiting))
    marks[#marks + 1] = redis.call('ZRANGE', k('waiting'), rank, rank, 'WITHSCORES')[2]
  end
  out[#out + 1] = marks
  out[#out + 1] = redis.call('LRANGE', k('evaluations'), 0, limit - 1)
end
return out
