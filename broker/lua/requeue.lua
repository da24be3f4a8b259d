-- requeue.lua: a dead letter's prompt is issued again, with all its tries.
-- KEYS  1 prefix; touches dead, dead_order, open, reissue, tries, events
-- ARGV  1 prompt index
-- returns {1} if it was a dead letter, else {0}
if redis.call('HDEL', k('dead'), ARGV[1]) == 0 then return {0} end
redis.call('ZREM', k('dead_order'), ARGV[1])
reissue(ARGV[1], 0)
count('dead_letters_requeued')
event('requeue', 'prompt ' .. ARGV[1])
return {1}
