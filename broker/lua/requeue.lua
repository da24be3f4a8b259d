-- requeue.lua: a dead letter's prompt is issued again, with all its tries.
-- KEYS  1 prefix; touches dead, dead_order, open, reissue, tries, events
-- ARGV  1 prompt index  2 who and why, for the log
-- returns as steer.lua; refused: 'no-dead-letter'
if redis.call('HDEL', k('dead'), ARGV[1]) == 0 then
  return {'refused', int(now), policy.version, 'no-dead-letter', 'prompt ' .. ARGV[1] .. ' is no dead letter'}
end
redis.call('ZREM', k('dead_order'), ARGV[1])
reissue(ARGV[1], 0)
count('dead_letters_requeued')
event('requeue', 'prompt ' .. ARGV[1] .. ' (' .. ARGV[2] .. ')')
return {'done', int(now), policy.version, 'prompt ' .. ARGV[1] .. ' is issued again'}
