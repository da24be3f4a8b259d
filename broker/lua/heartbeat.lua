-- heartbeat.lua: what a worker says about itself; workers silent for an hour are forgotten.
-- KEYS  1 policy; touches workers, workers_seen
-- ARGV  1 worker  2 statistics (JSON object)
-- returns {1}
local record = cjson.decode(ARGV[2])
record.heartbeat_ms = now
redis.call('HSET', k('workers'), ARGV[1], cjson.encode(record))
redis.call('ZADD', k('workers_seen'), now, ARGV[1])
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', k('workers_seen'), '-inf', now - 3600000)) do
  redis.call('HDEL', k('workers'), gone)
  redis.call('ZREM', k('workers_seen'), gone)
end
return {1}
