-- step.lua: one optimizer step was taken at `version`; its groups are trained or filtered and the version moves on by one.
-- Repeating the call changes nothing. A leased group that the step left out returns to the queue.
-- KEYS  1 prefix; touches policy, ledger, group:<id>, payload:<id>, leased, trained, retained, open, lag_hist, by_hist,
--       wait_hist, step_lags, metrics
-- ARGV  1 epoch  2 version  3 metrics (JSON)  4 number of outcomes  then (group id, filtered 0|1) pairs
--       then (lag, tokens) pairs: trained tokens by lag
-- returns {"stepped"} | {"version", recorded} | {"not-leased", group id} | {"fenced", holder}
local version = n('version')
if policy.stepped == ARGV[2] and tonumber(ARGV[2]) + 1 == version then return {'stepped'} end
if tonumber(ARGV[2]) ~= version then return {'version', int(version)} end
local outcomes = tonumber(ARGV[4])
local bound = math.max(n('max_lag'), n('pull_max_lag'))
local leased, named = load(redis.call('ZRANGE', k('leased'), 0, -1)), {}
for i = 5, 3 + 2 * outcomes, 2 do
  local rec = group(ARGV[i])
  if rec.state ~= 'leased' or named[ARGV[i]] or version - rec.oldest > bound then
    return {'not-leased', ARGV[i]}
  end
  named[ARGV[i]] = true
end
local step, lags = n('step') + 1, {}
for i = 5, 3 + 2 * outcomes, 2 do
  local id, filtered = ARGV[i], ARGV[i + 1] == '1'
  local rec = group(id)
  leave(id, rec)
  rec.step, rec.wait, rec.trained_at = step, math.max(0, rec.pulled - rec.submitted), version
  waited(rec, 1)
  if policy.retention == 'prompt' then free_payload(id, rec) end
  enter(id, rec, filtered and 'filtered' or 'trained')
  index('open', rec.prompt)
  if not filtered then
    local lag = int(version - rec.oldest)
    lags[lag] = lags[lag] or {0, 0}
    lags[lag][1] = lags[lag][1] + 1
    attribute('trained', rec, version - rec.oldest, 1)
  end
end
for i = 5 + 2 * outcomes, #ARGV, 2 do
  lags[ARGV[i]] = lags[ARGV[i]] or {0, 0}
  lags[ARGV[i]][2] = lags[ARGV[i]][2] + tonumber(ARGV[i + 1])
end
for lag, entry in pairs(lags) do histogram('lag_hist', lag, entry[1], entry[2]) end
if next(lags) then redis.call('HSET', k('step_lags'), int(step), cjson.encode(lags)) end
for _, id in ipairs(leased) do
  local rec = group(id)
  if rec.state == 'leased' then
    leave(id, rec)
    enter(id, rec, 'ready')
  end
end
set({step = int(step), version = int(version + 1), highest = int(math.max(n('highest'), version + 1)), stepped = ARGV[2],
  metrics = ARGV[3], trainer_deadline = int(now + n('trainer_lease_ms')), straggler_since = false, pull_nonce = false})
capped('metrics', ARGV[3])
return {'stepped'}
