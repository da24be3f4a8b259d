-- initialise.lua: writes the policy of a run once; a second call changes nothing but the settings that may change.
-- standalone (runs without common.lua)
-- KEYS  1 policy (hash)
-- ARGV  1 schema version  2 run id  then name, value pairs of the settings
-- returns {"created"} | {"kept"} | {"schema", found, run found}
local schema, run = redis.call('HGET', KEYS[1], 'schema'), redis.call('HGET', KEYS[1], 'run')
if schema and (schema ~= ARGV[1] or run ~= ARGV[2]) then return {'schema', schema, run or ''} end
for i = 3, #ARGV, 2 do
  if not schema or ARGV[i] ~= 'max_lag' then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
if schema then return {'kept'} end
redis.call('HSET', KEYS[1], 'schema', ARGV[1], 'run', ARGV[2], 'status', 'starting', 'paused', 0, 'version', -1,
  'highest', -1, 'published', -1, 'step', 0, 'durable_step', 0, 'epoch', 0, 'next_prompt', 0, 'last_id', 0)
return {'created'}
