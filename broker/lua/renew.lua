-- renew.lua: a worker keeps the groups that it still holds.
-- KEYS  1 policy; touches group:<id>, generating
-- ARGV  1 worker  then group ids
-- returns the ids that are still held; the worker abandons the others
local held, deadline = {}, int(now + n('lease_ms'))
for i = 2, #ARGV do
  local rec = redis.call('HMGET', k('group:' .. ARGV[i]), 'state', 'worker')
  if rec[1] == 'generating' and rec[2] == ARGV[1] then
    redis.call('ZADD', k('generating'), deadline, ARGV[i])
    held[#held + 1] = ARGV[i]
  end
end
return held
