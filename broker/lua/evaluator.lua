-- evaluator.lua: an evaluator says that it lives, takes up what an operator asked for, and hands in a result.
-- KEYS  1 prefix; touches evaluator, evaluations, events
-- ARGV  1 ms for which it counts as alive  2 '1': it takes up the newest version now
--       3 result (JSON object), '' for none  4 the same in words, for the event log
-- returns {"asked" | "none"}: whether an evaluation was asked for and not taken up before this call
local asked = redis.call('HEXISTS', k('evaluator'), 'asked') == 1
redis.call('HSET', k('evaluator'), 'deadline', int(now + tonumber(ARGV[1])))
if ARGV[2] == '1' then redis.call('HDEL', k('evaluator'), 'asked') end
if ARGV[3] ~= '' then
  capped('evaluations', ARGV[3])
  event('evaluation', ARGV[4])
end
return {asked and 'asked' or 'none'}
