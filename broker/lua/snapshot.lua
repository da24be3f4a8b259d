-- snapshot.lua: all that a page shows together, at one instant. Costs the same at any queue length: sums and histograms
-- are kept by the transitions.
-- KEYS  1 policy; reads ledger, ready_hist, lag_hist, counters, engines, versions, workers, dead, waiting
-- ARGV  none
-- returns {now ms, oldest submission ms or "", dead letters, then the hashes as flat lists: policy, ledger, ready_hist,
--          lag_hist, counters, engines, versions, workers}
local oldest = redis.call('ZRANGE', k('waiting'), 0, 0, 'WITHSCORES')[2] or ''
local out = {int(now), oldest, redis.call('HLEN', k('dead')), redis.call('HGETALL', KEYS[1])}
for _, name in ipairs({'ledger', 'ready_hist', 'lag_hist', 'counters', 'engines', 'versions', 'workers'}) do
  out[#out + 1] = redis.call('HGETALL', k(name))
end
return out
