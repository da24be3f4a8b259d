-- initialise.lua: writes the policy of a run once; a second call changes nothing but the settings that may change.
-- standalone (runs without common.lua)
-- KEYS  1 prefix of the run's keys; touches policy, cursor
-- ARGV  1 schema version  2 run id  then name, value pairs of the settings
-- returns {"created"} | {"kept"} | {"schema", found, run found}
local POLICY = KEYS[1] .. 'policy'
local schema, run = redis.call('HGET', POLICY, 'schema'), redis.call('HGET', POLICY, 'run')
if schema and (schema ~= ARGV[1] or run ~= ARGV[2]) then return {'schema', schema, run or ''} end
for i = 3, #ARGV, 2 do
  if not schema or ARGV[i] ~= 'max_lag' then redis.call('HSET', POLICY, ARGV[i], ARGV[i + 1]) end
end
if schema then return {'kept'} end
redis.call('HSET', POLICY, 'schema', ARGV[1], 'run', ARGV[2], 'status', 'starting', 'paused', 0, 'version', -1,
  'highest', -1, 'published', -1, 'step', 0, 'durable_step', 0, 'epoch', 0)
redis.call('HSET', KEYS[1] .. 'cursor', 'next_prompt', 0, 'last_id', 0)
return {'created'}
