-- commit.lua: the checkpoint of `step` is durable: what was trained up to it is, too, and its records and payloads go.
-- KEYS  1 prefix; touches policy, ledger, group:<id>, payload:<id>, trained, retained, step_lags
-- ARGV  1 epoch  2 step
-- returns {"committed", groups} | {"version", recorded step} | {"fenced", holder}
local step = tonumber(ARGV[2])
if step > n('step') then return {'version', policy.step} end
local ids = redis.call('ZRANGEBYSCORE', k('trained'), '-inf', step)
for _, id in ipairs(load(ids)) do make_durable(id, group(id)) end
for _, past in ipairs(redis.call('HKEYS', k('step_lags'))) do
  if tonumber(past) <= step then redis.call('HDEL', k('step_lags'), past) end
end
set({durable_step = int(math.max(step, n('durable_step'))), trainer_deadline = int(now + n('trainer_lease_ms'))})
if policy.checkpoint_asked and n('checkpoint_asked') <= step then
  set({checkpoint_asked = false})
  event('checkpoint', 'step ' .. int(step) .. ', as asked')
end
return {'committed', #ids}
