-- heartbeat.lua: what a worker says about itself; workers silent for an hour are forgotten: what was trained of them
-- counts as that of "(forgotten)", so that by_hist does not grow with every restart.
-- KEYS  1 prefix; touches workers, workers_seen, by_hist
-- ARGV  1 worker  2 statistics (JSON object)
-- returns {1}
local record = cjson.decode(ARGV[2])
record.heartbeat_ms = now
redis.call('HSET', k('workers'), ARGV[1], cjson.encode(record))
redis.call('ZADD', k('workers_seen'), now, ARGV[1])
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', k('workers_seen'), '-inf', now - 3600000)) do
  redis.call('HDEL', k('workers'), gone)
  redis.call('ZREM', k('workers_seen'), gone)
  for _, field in ipairs(redis.call('HKEYS', k('by_hist'))) do
    local unit, at, name = string.match(field, '^([gtsw]):trained:worker:(%-?%d+):(.*)$')
    if name == gone then
      add('by_hist', unit .. ':trained:worker:' .. at .. ':(forgotten)', tonumber(redis.call('HGET', k('by_hist'), field)))
      redis.call('HDEL', k('by_hist'), field)
    end
  end
end
return {1}
